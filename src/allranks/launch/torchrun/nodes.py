"""Several nodes, each with its own command line: the first one drives, the others join it at the endpoint.

The driver listens at the endpoint until all nodes have joined; then the store of the ranks takes the port. Each node
keeps its connection, over which it is told what to run, once per attempt, and how the run has ended. Both sides prove
that they know the run's id (``--rdzv-id``, else Slurm's job id); messages are JSON, so nothing that arrives is
executed.
"""

from __future__ import annotations

import hashlib
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import psutil

from allranks.errors import EnvironmentNotAble
from allranks.launch import channel_protocol as protocol
from allranks.launch.channel import authenticate, keep_alive, receive_exactly
from allranks.launch.launchers import LocalLauncher, agent_words, write_attempt_args
from allranks.launch.local_job import LocalJob
from allranks.launch.rendezvous import END_ITS_PROGRAM, bind_problem
from allranks.launch.runs import count_signals
from allranks.launch.supervisor import LaunchedJob
from allranks.launch.torchrun.options import TorchrunOptions
from allranks.launch.torchrun.request import NodeRequest
from allranks.planning.records import LaunchPlan
from allranks.rundir.files import make_folder, open_append, write_text_atomic
from allranks.rundir.paths import RunDir, create_run
from allranks.spec.records import RunSpec
from allranks.utils.inputs import read_regular
from allranks.utils.machine import host_name
from allranks.version import __version__

POLL_S = 0.1
HANDSHAKE_S = 10.0
RETRY_S = 0.5
PREFER_OTHER_S = 5.0  # a node of a higher rank on the endpoint's machine lets the others open the endpoint
SAY_S = 10.0  # from the start until missing nodes are named
KEEP_S = 120.0  # how long agents keep their ranks without the driver
JOIN_S = 120.0  # for the agents, whose nodes are there
LAST_S = 60.0  # from the order to end the ranks to the end of all agents


class Join(msgspec.Struct, frozen=True, kw_only=True, tag="join"):
    """A node's first message. ``node``: the node rank of its command line or of Slurm; None if it has none."""

    node: int | None
    host: str
    procs: int
    version: str = __version__


class Task(msgspec.Struct, frozen=True, kw_only=True, tag="task"):
    """One attempt, as a node's agent runs it. The node finds the driver where it has joined it."""

    name: str
    folder: str
    spec: str
    plan: str
    attempt: int
    node: int
    port: int
    token: str
    agent_store: bool


class Finish(msgspec.Struct, frozen=True, kw_only=True, tag="finish"):
    """The end of the run; the message says why the node was refused, if it was."""

    code: int
    message: str = ""


_DECODER: msgspec.json.Decoder[Join | Task | Finish] = msgspec.json.Decoder(Join | Task | Finish)


class Peer:
    """An authenticated connection between two nodes."""

    def __init__(self, sock: socket.socket, session: tuple[protocol.FrameWriter, protocol.FrameReader]) -> None:
        self.sock, (self._writer, self._reader) = sock, session
        self._waiting: list[bytes] = []
        sock.settimeout(None)
        keep_alive(sock)

    def send(self, message: Join | Task | Finish) -> None:
        """Send a message; one to a node that is gone is dropped, because its agent is missed as well."""
        with suppress(OSError):
            self.sock.sendall(self._writer.seal(msgspec.json.encode(message)))

    def receive(self, timeout_s: float) -> Join | Task | Finish | None:
        """Return the next message, or None if none arrives in time.

        Raises:
            OSError, ChannelError: the connection has ended, or the message is malformed.
        """
        with selectors.DefaultSelector() as ready:
            ready.register(self.sock, selectors.EVENT_READ)
            while not self._waiting:
                if not ready.select(timeout_s):
                    return None
                if not (data := self.sock.recv(1 << 16)):
                    raise ConnectionError("the other node has closed the connection")
                self._waiting += self._reader.feed(data)
        try:
            return _DECODER.decode(self._waiting.pop(0))
        except msgspec.DecodeError as error:
            raise protocol.ChannelError(str(error)) from None


def join_token(options: TorchrunOptions) -> str:
    """Return what both sides must know."""
    run_id = options.run_id if options.run_id != "none" else os.environ.get("SLURM_JOB_ID", "none")
    return hashlib.sha256(f"allranks torchrun {run_id}".encode()).hexdigest()


def own_node_rank(options: TorchrunOptions) -> int | None:
    """Return the node rank of the command line, else that of Slurm; None if neither has one.

    Under c10d, where torchrun ignores ``--node-rank``, Slurm's counts first: ``--node-rank $SLURM_NODEID``, expanded by
    the shell of a batch script, is 0 on all nodes.
    """
    one_per_node = os.environ.get("SLURM_STEP_NUM_NODES") == str(options.max_nodes)
    if options.node_rank is not None and not (one_per_node and options.backend == "c10d"):
        return options.node_rank
    rank = os.environ.get("SLURM_NODEID" if one_per_node else "SLURM_PROCID", "")
    return int(rank) if rank.isdigit() else 0 if options.backend == "static" else None


def is_this_machine(host: str) -> bool:
    """Return whether a name or address is one of this machine's."""
    own = {address.address.partition("%")[0] for listed in psutil.net_if_addrs().values() for address in listed}
    try:
        named = {str(info[4][0]) for info in socket.getaddrinfo(host, None)}
    except OSError:
        named = set()
    return host in (socket.gethostname(), socket.getfqdn()) or bool(named & own)


def open_endpoint(options: TorchrunOptions, node_rank: int | None, port: int) -> socket.socket | None:
    """Listen at the endpoint if this node drives; None if it joins another one.

    The driver is node 0 of a static rendezvous; under c10d the node whose address is the endpoint, of several on one
    machine the first.

    Raises:
        EnvironmentNotAble: the port is taken, or reserved for root.
    """
    static = options.backend == "static"
    if node_rank != 0 if static else not is_this_machine(options.address):
        return None
    if node_rank and _connect(options, port, PREFER_OTHER_S) is not None:
        return None
    try:
        return socket.create_server(("", port), backlog=1024)
    except OSError as error:
        if not static and node_rank != 0:
            return None
        problem = bind_problem(error, port, f"{END_ITS_PROGRAM}, or choose another on all nodes")
        raise EnvironmentNotAble(f"this node cannot listen on port {port}, where the nodes meet: {problem}") from None


def gather(
    listener: socket.socket, options: TorchrunOptions, own: Join, say: Callable[[str], object]
) -> list[tuple[Join, Peer | None]]:
    """Wait for the other nodes, and return all in their order, this one first.

    Of a range of nodes, those that have joined are enough once nobody has come for torchrun's last call.

    Raises:
        EnvironmentNotAble: too few have joined in time.
    """
    joined: list[tuple[Join, Peer | None]] = [(own, None)]
    lock, token = threading.Lock(), join_token(options)

    def admit(conn: socket.socket) -> None:
        try:
            peer = _accept(conn, token)
            message = peer.receive(HANDSHAKE_S)
        except (OSError, protocol.ChannelError):
            conn.close()
            return
        if not isinstance(message, Join):
            return
        with lock:
            if options.backend == "c10d" and any(message.node == one.node for one, _ in joined):
                message = msgspec.structs.replace(message, node=None)
            problem = _why_refused(message, [one for one, _ in joined], options.max_nodes)
            if not problem:
                joined.append((message, peer))
        if problem:
            peer.send(Finish(code=1, message=problem))
            say(problem)

    began = latest = time.monotonic()
    notified, count = False, 1
    listener.settimeout(POLL_S)
    with listener:
        while len(joined) < options.max_nodes:
            with suppress(TimeoutError):
                threading.Thread(target=admit, args=(listener.accept()[0],), daemon=True).start()
            now = time.monotonic()
            if len(joined) > count:
                count, latest = len(joined), now
            if count >= options.min_nodes and now - latest > options.last_call_s:
                break
            missing = f"{count} of {options.max_nodes} nodes have joined ({', '.join(j.host for j, _ in joined)})"
            if now - began > options.join_timeout_s and count < options.min_nodes:
                for _, peer in joined[1:]:
                    assert peer is not None
                    peer.send(Finish(code=1, message=f"{missing} within {options.join_timeout_s:.0f} s"))
                raise EnvironmentNotAble(
                    f"{missing} within {options.join_timeout_s:.0f} s (--rdzv-conf join_timeout); start the same line "
                    "on the others, and see what they print"
                )
            if not notified and now - began > SAY_S:
                notified = True
                say(f"{missing}; waiting for the others")
    with lock:
        others = sorted(joined[1:], key=lambda one: (one[0].node is None, one[0].node or 0, one[0].host))
    return [joined[0], *others]


def _why_refused(new: Join, joined: Sequence[Join], most: int) -> str:
    taken = next((one.host for one in joined if new.node is not None and one.node == new.node), "")
    if new.version != __version__:
        return f"{new.host} has allranks {new.version}, and the first node {__version__}; install the same version"
    if taken:
        return f"{new.host} has node rank {new.node}, as {taken} has; give each node its own --node-rank"
    if len(joined) >= most or (new.node or 0) >= most:
        return f"{new.host} (node rank {new.node}) is not one of the {most} nodes of --nnodes"
    return ""


def order_note(hosts: Sequence[str], backend: str) -> str:
    """Return how the order of the nodes differs from torchrun's, which sorts them by name under c10d; else empty."""
    if backend != "c10d" or list(hosts) == sorted(hosts):
        return ""
    order = ", ".join(f"{node} = {host}" for node, host in enumerate(hosts))
    return f"node ranks {order}: from --node-rank or SLURM_NODEID; torchrun would sort c10d's nodes by name"


def _accept(conn: socket.socket, token: str) -> Peer:
    conn.settimeout(HANDSHAKE_S)
    sent = protocol.new_challenge()
    conn.sendall(sent)
    answered = receive_exactly(conn, protocol.ANSWER_BYTES)
    conn.sendall(protocol.verify_answer(token, sent, answered))
    return Peer(conn, protocol.open_session(token, sent, answered, server=True))


def _connect(options: TorchrunOptions, port: int, timeout_s: float) -> Peer | None:
    """Connect to the driver; None if nobody who knows the run answers in time."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        with suppress(OSError, protocol.ChannelError):
            sock = socket.create_connection((options.address, port), timeout=HANDSHAKE_S)
            return Peer(sock, authenticate(sock, protocol.Endpoint(address="", port=port, token=join_token(options))))
        time.sleep(RETRY_S)
    return None


class NodesJob(LocalJob):
    """The agent of this node, and those of the other nodes."""

    interrupt_grace_s = 15.0  # other machines, some of which may be slow

    def __init__(self, *args: Any) -> None:
        super().__init__(*args, address="0.0.0.0", keep_s=KEEP_S, join_s=JOIN_S)  # noqa: S104 - the nodes are elsewhere
        self._code: int | None = None
        self._ordered: float | None = None

    @property
    def endpoint(self) -> protocol.Endpoint:
        return self._hub.endpoint

    def poll(self) -> int | None:
        """Return None until the agents of all nodes have ended, or have had their time to do so."""
        now = time.monotonic()
        for link in self._hub.links.values():  # a signal to one node stops the others, too
            if "the agent received" in link.report.reason:
                self._supervisor.stop(f"{link.report.host}: {link.report.reason}")
        if self._supervisor.orders.end:
            self._ordered = self._ordered or now
        if self._code is None:
            self._code = self.poll_agent()
        late = self._ordered is not None and now - self._ordered > LAST_S + (self._plan.grace_s or 0.0)
        if self._code is None or not (self._supervisor.all_ended or late):
            return None
        self._close()
        end = self.end()
        return 1 if self._code or end.failed or end.refused or end.lost or late else 0


class NodesLauncher(LocalLauncher):
    """Starts the agent of this node, and has the nodes that have joined start theirs."""

    def __init__(self, peers: Sequence[Peer], *, agent_store: bool) -> None:
        self._peers, self._agent_store = peers, agent_store

    def start(self, run: RunDir, spec: RunSpec, plan: LaunchPlan, attempt: int, resume: dict[str, Any]) -> LaunchedJob:
        """Start the agents."""
        write_attempt_args(run, attempt, resume)
        words = agent_words([sys.executable], run, attempt, node=0, telemetry_s=spec.observe.telemetry_s)
        job = NodesJob(run, plan, attempt, {}, words)
        for node, peer in enumerate(self._peers, 1):
            task = Task(
                name=run.name,
                folder=str(run.root),
                spec=read_regular(run.spec).decode(),
                plan=read_regular(run.plan).decode(),
                attempt=attempt,
                node=node,
                port=job.endpoint.port,
                token=job.endpoint.token,
                agent_store=self._agent_store,
            )
            peer.send(task)
        return job


def follow_driver(request: NodeRequest, port: int, show: Callable[[RunDir, list[int]], object]) -> tuple[int, str]:
    """Join the driver and run the ranks of this node; return torchrun's exit code, and what to say."""
    options = request.options
    where = f"{options.address}:{port}"
    peer = _connect(options, port, options.join_timeout_s)
    if peer is None:
        return 1, f"the first node did not answer at {where} within {options.join_timeout_s:.0f} s"
    peer.send(Join(node=own_node_rank(options), host=host_name(), procs=request.procs))
    shown = False
    try:
        while not isinstance(task := peer.receive(options.join_timeout_s + KEEP_S), Finish):
            if not isinstance(task, Task):
                return 1, f"the first node at {where} did not start the run"
            run = _folder_here(task, options)
            ranks = msgspec.json.decode(task.plan, type=LaunchPlan).nodes[task.node].ranks
            if not shown:
                shown = bool(show(run, ranks)) or True
            request.export_settings(options.address, port, port_fixed=True, agent_store=task.agent_store)
            _run_agent(run, task, peer)
    except (OSError, protocol.ChannelError) as error:
        return 1, f"the connection to the first node at {where} was lost: {error}"
    return task.code, task.message


def _folder_here(task: Task, options: TorchrunOptions) -> RunDir:
    """Return the driver's run folder if this node shares it, else one of its own with the same name."""
    name = Path(task.name).name
    for folder in (Path(task.folder), Path(options.log_dir or "runs").absolute() / name):
        with suppress(OSError):
            if read_regular(folder / "plan.json").decode() == task.plan:
                make_folder(RunDir(folder).logs_of(task.attempt))
                return RunDir(folder)
    run = create_run(options.log_dir or "runs", name)
    write_text_atomic(run.spec, task.spec)
    write_text_atomic(run.plan, task.plan)
    make_folder(run.logs_of(task.attempt))
    return run


def _run_agent(run: RunDir, task: Task, peer: Peer) -> None:
    """Run the agent of this node to its end; hand it the signals that this process receives."""
    endpoint = protocol.Endpoint(address=peer.sock.getpeername()[0], port=task.port, token=task.token, keep_s=KEEP_S)
    own = {
        protocol.CHANNEL_VARIABLE: msgspec.json.encode(endpoint).decode(),
        protocol.LAUNCHER_PID_VARIABLE: str(os.getpid()),
    }
    with count_signals() as counts, os.fdopen(open_append(run.agent_log(task.attempt, host_name())), "ab") as log:
        agent = subprocess.Popen(
            agent_words([sys.executable], run, task.attempt, node=task.node),
            env=os.environ | own, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
        sent = 0
        while agent.poll() is None:
            if (received := counts.interrupts + counts.stops) > sent:
                agent.send_signal(signal.SIGINT if counts.interrupts > 1 else signal.SIGTERM)
                sent = received
            time.sleep(POLL_S)
