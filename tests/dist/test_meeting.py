"""The meeting place of several nodes, with real stores of torch."""

from __future__ import annotations

import socket
import threading
from datetime import timedelta

import pytest
from torch.distributed import TCPStore

from allranks.errors import EnvironmentNotAble
from allranks.launch import meeting
from allranks.launch.meeting import join_store
from allranks.launch.rendezvous import Rendezvous
from tests.dist.harness import free_port

pytestmark = pytest.mark.dist


def place(port: int, key: str = "7.0") -> Rendezvous:
    return Rendezvous(address="127.0.0.1", port=port, key=key, network="", reason="", places=[])


def test_nodes_of_one_run_meet_and_torch_takes_the_same_store() -> None:
    port = free_port()
    first = join_store(place(port), 0, "mine", 10)
    second = join_store(place(port), 1, "mine", 10)
    again = TCPStore("127.0.0.1", port, 1, True, timedelta(seconds=10), multi_tenant=True)
    second.set("word", "said")
    assert again.get("word") == first.get("word") == b"said"


def test_another_runs_store_is_refused_by_both_names() -> None:
    port = free_port()
    held = join_store(place(port, "41.0"), 0, "theirs", 10)
    words = r"run theirs \(41\.0\).*run mine \(42\.0\)"
    with pytest.raises(EnvironmentNotAble, match=words):
        join_store(place(port, "42.0"), 1, "mine", 10)
    del held


def test_a_store_of_anything_else_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "SIGNED_WITHIN_S", 0.5)
    port = free_port()
    held = TCPStore("127.0.0.1", port, None, True, timedelta(seconds=10), False)
    with pytest.raises(EnvironmentNotAble, match=r"not been signed .*not that of run mine"):
        join_store(place(port), 1, "mine", 10)
    held.set(meeting.SIGNATURE, "{no json")
    with pytest.raises(EnvironmentNotAble, match=r"not that of run mine"):
        join_store(place(port), 1, "mine", 10)


def test_a_taken_port_is_said_on_node_0() -> None:
    with socket.socket() as other:
        other.bind(("0.0.0.0", 0))  # noqa: S104 - as torch does
        other.listen()
        with pytest.raises(EnvironmentNotAble, match=r"held by a program that is no run"):
            join_store(place(other.getsockname()[1]), 0, "mine", 10)
    for thread in threading.enumerate():  # what torch prints when the port closes belongs to this test
        if thread.name == "meeting":
            thread.join(10)
