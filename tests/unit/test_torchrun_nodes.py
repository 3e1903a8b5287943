"""How the nodes of `allranks torchrun` find each other: who drives, who is refused, and in which order they are."""

import os
import socket
import threading
from collections.abc import Iterator

import pytest

from allranks.errors import EnvironmentNotAble
from allranks.launch.torchrun import nodes
from allranks.launch.torchrun.options import TorchrunOptions, parse
from tests.dist.harness import until
from tests.other_users import OTHER_USER, needs_other_user


def options(port: int, *more: str) -> TorchrunOptions:
    return parse(("--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=j", *more, "p.py"), {})


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as made:
        yield made


def join(port: int, node: int | None, host: str, *, run_id: str = "j", version: str = nodes.__version__) -> nodes.Peer:
    peer = nodes._connect(options(port, f"--rdzv-id={run_id}"), port, 5.0)
    assert peer is not None
    peer.send(nodes.Join(node=node, host=host, procs=1, version=version))
    return peer


def gather_in_thread(listener: socket.socket, *more: str) -> tuple[threading.Thread, list[str]]:
    hosts: list[str] = []

    def run() -> None:
        found = nodes.gather(listener, options(0, *more), nodes.Join(node=0, host="n10", procs=1), lambda _: None)
        hosts.extend(one.host for one, _ in found)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, hosts


def test_nodes_are_ordered_by_rank_and_wrong_ones_are_told_why(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    judged, usual = list[str](), nodes._why_refused  # the lock in which they are judged is held until one has joined
    monkeypatch.setattr(nodes, "_why_refused", lambda new, *more: judged.append(new.host) or usual(new, *more))
    port = listener.getsockname()[1]
    thread, hosts = gather_in_thread(listener, "--nnodes=3", "--rdzv-conf=join_timeout=30", "--rdzv-backend=static")
    with socket.create_connection(("127.0.0.1", port)) as stranger:
        stranger.sendall(b"GET / HTTP/1.0\r\n\r\n" * 20)
        second = join(port, 2, "n2")
        until(lambda: judged == ["n2"])
        for node, host, version, says in (
            (2, "n3", nodes.__version__, "n3 has node rank 2, as n2 has"),
            (3, "n4", nodes.__version__, "n4 (node rank 3) is not one of the 3 nodes"),
            (1, "n5", "0.0.1", "n5 has allranks 0.0.1"),
        ):
            refused = join(port, node, host, version=version).receive(10.0)
            assert isinstance(refused, nodes.Finish)
            assert says in refused.message
        first = join(port, 1, "n9")
        thread.join(10.0)
    assert hosts == ["n10", "n9", "n2"]
    assert "torchrun would sort c10d's nodes by name" in nodes.order_note(hosts, "c10d")
    assert not nodes.order_note(hosts, "static")
    first.sock.close(), second.sock.close()


def test_another_job_does_not_join(listener: socket.socket) -> None:
    port = listener.getsockname()[1]
    thread, hosts = gather_in_thread(listener, "--nnodes=2", "--rdzv-conf=join_timeout=30")
    assert nodes._connect(options(port, "--rdzv-id=other"), port, 1.0) is None
    join(port, 0, "n1")  # that of the driver: torchrun ignores it under c10d
    thread.join(10.0)
    assert hosts == ["n10", "n1"]


def test_of_a_range_those_are_enough_that_have_joined_by_the_last_call(listener: socket.socket) -> None:
    thread, hosts = gather_in_thread(listener, "--nnodes=2:4", "--rdzv-conf=last_call_timeout=0.5")
    join(listener.getsockname()[1], None, "n1")
    thread.join(10.0)
    assert hosts == ["n10", "n1"]


def test_too_few_nodes_end_with_their_names(listener: socket.socket) -> None:
    own = nodes.Join(node=0, host="n10", procs=1)
    with pytest.raises(EnvironmentNotAble, match=r"1 of 2 nodes have joined \(n10\) within 1 s"):
        nodes.gather(listener, options(0, "--nnodes=2", "--rdzv-conf=join_timeout=1"), own, lambda _: None)


@pytest.mark.parametrize(
    ("words", "slurm", "expected"),
    [
        ("--rdzv-backend=static --node-rank 2", {"SLURM_NODEID": "1", "SLURM_STEP_NUM_NODES": "3"}, 2),
        ("--node-rank 0", {"SLURM_NODEID": "1", "SLURM_STEP_NUM_NODES": "3"}, 1),  # expanded by the batch script
        ("--node-rank 2", {"SLURM_NODEID": "0", "SLURM_STEP_NUM_NODES": "1"}, 2),
        ("", {"SLURM_NODEID": "1", "SLURM_STEP_NUM_NODES": "3"}, 1),
        ("", {"SLURM_NODEID": "0", "SLURM_PROCID": "2", "SLURM_STEP_NUM_NODES": "1"}, 2),
        ("", {}, None),
        ("--rdzv-backend=static", {}, 0),
    ],
)
def test_node_rank(monkeypatch: pytest.MonkeyPatch, words: str, slurm: dict[str, str], expected: int | None) -> None:
    for name in ("SLURM_NODEID", "SLURM_PROCID", "SLURM_STEP_NUM_NODES"):
        monkeypatch.delenv(name, raising=False)
    for name, value in slurm.items():
        monkeypatch.setenv(name, value)
    assert nodes.own_node_rank(options(1, "--nnodes=3", *words.split())) == expected


@needs_other_user
def test_a_port_that_is_reserved_for_root_is_not_called_taken() -> None:
    os.seteuid(OTHER_USER)
    try:
        with pytest.raises(EnvironmentNotAble, match=r"port 1023, where the nodes meet: only root may listen"):
            nodes.open_endpoint(options(1023, "--nnodes=2"), 0, 1023)
    finally:
        os.seteuid(0)
