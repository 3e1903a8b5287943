"""Start a torchrun command line: alone, as the driver of several nodes, or as one of the others."""

from __future__ import annotations

import signal
from collections.abc import Callable

from allranks.launch.launchers import Launcher
from allranks.launch.outcome import RunResult
from allranks.launch.rendezvous import host_labels
from allranks.launch.runs import Observer, launch, write_request
from allranks.launch.torchrun.options import TorchrunOptions
from allranks.launch.torchrun.request import NodeRequest, create_folder, make_spec, plan_nodes, read_node, store_place
from allranks.rundir.paths import RunDir
from allranks.utils.machine import host_name


def start(
    options: TorchrunOptions, view: Observer, show: Callable[[RunDir, list[int]], object]
) -> RunResult | tuple[int, str]:
    """Run a program; return how it ended, or, on a node that does not drive, its exit code and what to say.

    Args:
        show: shows the output of the ranks of a node that does not drive.

    Raises:
        RequestError, EnvironmentNotAble: it cannot be started.
    """
    node = read_node(options)
    if not options.several_nodes:
        return _run(node, view, [node.facts.host], [node.procs], None)
    from allranks.launch.torchrun import nodes

    own, port = nodes.own_node_rank(options), store_place(options)[1]
    listener = nodes.open_endpoint(options, own, port)
    if listener is None:
        return nodes.follow_driver(node, port, show)
    if options.backend == "static" and not nodes.is_this_machine(options.address):
        view.say(
            f"this node has node rank 0, but {options.address} is not its address: where another node has rank 0, too, "
            "give each its own --node-rank (in a batch script, srun must start the shell that expands $SLURM_NODEID)"
        )
    joined = nodes.gather(listener, options, nodes.Join(node=own, host=host_name(), procs=node.procs), view.say)
    peers = [peer for _, peer in joined if peer is not None]
    hosts = host_labels([join.host for join, _ in joined])
    if note := nodes.order_note(hosts, options.backend):
        view.say(note)
    code = 1
    try:
        launcher = nodes.NodesLauncher(peers, agent_store=bool(node.torch))
        result = _run(node, view, hosts, [join.procs for join, _ in joined], launcher)
        code = 0 if result.status == "succeeded" else 1
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # srun --kill-on-bad-exit sends it before the verdict is printed
        for peer in peers:
            peer.send(nodes.Finish(code=code))
    return result


def _run(node: NodeRequest, view: Observer, hosts: list[str], procs: list[int], launcher: Launcher | None) -> RunResult:
    address, port, fixed = store_place(node.options)
    node.export_settings(address, port, port_fixed=fixed, agent_store=bool(node.torch))
    spec, run = create_folder(make_spec(node, hosts))
    plan = plan_nodes(spec, node.facts, hosts, procs)
    write_request(run, spec, plan)
    return launch(run, spec, plan, attempt=1, observer=view, launcher=launcher)
