"""Links are called slow or lossy on the kernel's evidence alone, never because a receiver or network is slow."""

import math
import socket
import struct
import threading
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from allranks.analysis.stragglers import link_message, links_of_run
from allranks.utils import kernel_counters
from allranks.utils.kernel_counters import read_tcp_info
from tests.sampling import examples

MB = 1_000_000


def counters(peer: int, mb: float = 100, busy_s: float = 0.5, **more: Any) -> dict[str, Any]:
    """What the kernel counts of a connection to n<peer>."""
    sent = {"acked_bytes": int(mb * MB), "segments": int(mb * MB / 1448), "resent": 0, "busy_s": busy_s}
    times = {"receiver_s": 0.0, "rtt_s": 0.0005, "min_rtt_s": 0.0001}
    return {"peer": f"10.0.0.{peer}", "connections": 1, **sent, **times, **more}


def story(rank: int, *links: dict[str, Any]) -> list[dict[str, Any]]:
    """A rank on host n<rank> with the address 10.0.0.<rank>, after 10 s."""
    event = {"event": "links", "rank": rank, "addresses": [f"10.0.0.{rank}"]}
    start = {"event": "start", "rank": rank, "host": f"n{rank}", "world_size": 3}
    return [start, {**event, "time": 100.0, "links": []}, {**event, "time": 110.0, "links": list(links)}]


def ring(*usual: float, **slow: Any) -> dict[int, list[dict[str, Any]]]:
    """Three nodes that send to the next one; what differs is the link from n1 to n2."""
    return {r: story(r, {**counters((r + 1) % 3, *usual), **own}) for r, own in {1: slow, 2: {}, 0: {}}.items()}


def named(ranks: dict[int, list[dict[str, Any]]]) -> list[tuple[str, str]]:
    return [(k.host, k.peer) for k in links_of_run(ranks) if k.slow or k.lossy]


@pytest.mark.parametrize(
    ("slow", "names"),
    [
        ({}, []),
        ({"busy_s": 5.0}, [("n1", "n2")]),
        ({"busy_s": 5.0, "receiver_s": 4.8}, []),  # n2 did not read: it is slow, not the link
        ({"busy_s": 1.2}, []),  # below the factor
        ({"acked_bytes": 100_000, "busy_s": 5.0}, []),  # too little to tell a rate
        ({"resent": 2000, "segments": 69_000}, [("n1", "n2")]),
        ({"resent": 19, "segments": 100}, []),  # some at the start of a connection
        ({"resent": 300, "segments": 69_000}, []),
    ],
)
def test_which_links_are_named(slow: dict[str, Any], names: list[tuple[str, str]]) -> None:
    assert named(ring(**slow)) == names


def test_a_slow_link_that_is_hardly_used_and_a_network_that_is_slow_are_not_named() -> None:
    (link,) = [k for k in links_of_run(ring(2, 0.01, busy_s=0.5)) if k.host == "n1"]
    assert link.relative is not None and link.relative > 3 and not link.slow
    assert named(ring(100, 9.0)) == [], "the whole network is slow"
    # the only link is not slow, but may be lossy
    assert named({1: story(1, counters(2, 100, 9.0)), 2: story(2)}) == []
    assert named({1: story(1, counters(2, 100, 9.0, resent=5000)), 2: story(2)}) == [("n1", "n2")]


def test_only_what_was_sent_in_the_last_attempt_between_hosts_of_the_run_counts() -> None:
    ranks = ring(busy_s=5.0)
    ranks[1] += story(1, counters(2))
    assert named(ranks) == []
    hub = ring()
    hub[1] = story(1, counters(2), {**counters(0, 900, 900.0), "peer": "93.184.216.34"})
    assert {k.peer for k in links_of_run(hub)} == {"n0", "n1", "n2"}
    closed = ring()
    closed[1][1]["links"] = [counters(2, 500, 5.0)]  # more than at the end: connections were closed
    assert ("n1", "n2") not in {(k.host, k.peer) for k in links_of_run(closed) if k.sent_bytes}


names = st.sampled_from(["peer", "segments", "resent", "acked_bytes", "busy_s", "receiver_s", "rtt_s"])
values = st.none() | st.integers(-5, 1 << 70) | st.floats() | st.text(max_size=3) | st.lists(st.integers(0, 3))


@settings(max_examples=examples(1000), deadline=None)
@given(st.dictionaries(names, values))
def test_damaged_counters_end_nothing(changes: dict[str, Any]) -> None:
    for link in links_of_run(ring(**changes)):
        assert math.isfinite(link.busy_share)
        link_message(link)


def test_the_fields_of_the_kernel_are_at_their_places() -> None:
    """Against a real connection: what was sent arrived, and was on its way for some time."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        other, _ = server.accept()
        reader = threading.Thread(target=lambda: [None for _ in iter(lambda: other.recv(1 << 20), b"")])
        reader.start()
        for _ in range(50):
            client.sendall(bytes(100_000))
        client.shutdown(socket.SHUT_WR)
        reader.join()
        other.close()
        info = read_tcp_info("10.0.0.2", client.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256))
    assert info is not None and abs(info.acked_bytes - 5_000_000) <= 2
    assert 5_000_000 / 66_000 <= info.segments <= 5_000_000 / 500
    assert info.resent <= info.segments // 20  # a loaded machine may acknowledge late
    assert 0 < info.min_rtt_s <= info.rtt_s < 10


def test_an_older_kernel_reports_fewer_fields() -> None:
    assert read_tcp_info("10.0.0.2", bytes(104)) is None and read_tcp_info("10.0.0.2", b"") is None
    data = bytearray(192)
    struct.pack_into("=I", data, 100, 7)
    found = read_tcp_info("10.0.0.2", bytes(data))
    assert found is not None and found.resent == 7


def test_connections_within_a_host_are_left_out_and_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        assert "127.0.0.1" not in {link.peer for link in kernel_counters.tcp_links()[1]}
        monkeypatch.setattr(kernel_counters, "_is_local", lambda local, peer: False)
        own, links = kernel_counters.tcp_links()
        assert "127.0.0.1" in own and "127.0.0.1" in {link.peer for link in links}
        client.sendall(b"still open")
        assert client.getblocking()
        socket.setdefaulttimeout(5)
        try:
            assert kernel_counters.tcp_links() == ([], [])
        finally:
            socket.setdefaulttimeout(None)
