"""Run a torchrun command line on this machine alone."""

from __future__ import annotations

import os

import msgspec

from allranks.launch.outcome import RunResult
from allranks.launch.rank_processes import TORCHRUN_VARIABLE
from allranks.launch.runs import Observer, launch, write_request
from allranks.launch.torchrun.options import TorchrunOptions
from allranks.launch.torchrun.request import create_folder, make_spec, plan_nodes, read_node, store_place


def run_here(options: TorchrunOptions, view: Observer) -> RunResult:
    """Run a program on this machine, and return how it ended.

    Raises:
        RequestError, EnvironmentNotAble: it cannot be started.
    """
    node = read_node(options)
    address, port, fixed = store_place(options)
    settings = node.settings(address, port, port_fixed=fixed, agent_store=bool(node.torch))
    os.environ[TORCHRUN_VARIABLE] = msgspec.json.encode(settings).decode()
    spec, run = create_folder(make_spec(node, 1))
    plan = plan_nodes(spec, node.facts, [node.facts.host], [node.procs])
    write_request(run, spec, plan)
    return launch(run, spec, plan, attempt=1, observer=view)
