"""What is read of the kernel, who used the cores, and which links are slow: on evidence, and otherwise not known."""

from __future__ import annotations

import hashlib
import math
import os
import socket
import struct
import threading
import time
from typing import Any

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from allranks.analysis.stragglers import link_message, links_of_run
from allranks.utils import kernel_counters
from allranks.utils.kernel_counters import (
    CpuSample,
    CpuUse,
    MachineLoad,
    RunQueueClock,
    add_uses,
    describe_load,
    judge_machine,
    read_tcp_info,
    sample_cpu,
    use_between,
)
from allranks.utils.text import format_ranges, parse_ranges
from tests.sampling import examples


@given(st.frozensets(st.integers(0, 300), max_size=40))
def test_a_list_of_cores_is_read_as_it_was_written(cores: frozenset[int]) -> None:
    assert parse_ranges(format_ranges(cores) + "\n") == cores


@pytest.mark.parametrize("text", ["x", "1-", "-1", "0-9999999999", "1,,2"])
def test_what_is_no_list_of_cores_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        parse_ranges(text)


def test_busy_time_is_that_of_the_allowed_cores() -> None:
    times, known = psutil.cpu_times(percpu=True), sample_cpu()
    if known.machine_s is None:
        pytest.skip("some cores are offline")
    busy = sum(times[c].user + times[c].nice + times[c].system for c in known.cores)
    assert known.machine_s == pytest.approx(busy, abs=2)


def test_a_busy_loop_is_seen_as_own_cpu_time_and_sleep_is_not() -> None:
    first = sample_cpu()
    until = time.thread_time() + 0.1
    while time.thread_time() < until:
        pass
    worked = sample_cpu()
    time.sleep(0.1)
    use, rest = use_between(first, worked), use_between(worked, sample_cpu())
    assert use.cpu_s >= 0.1 and rest.cpu_s < 0.05 and parse_ranges(use.cores) == os.sched_getaffinity(0)


@pytest.mark.skipif(not RunQueueClock().available, reason="this kernel has no /proc/<pid>/schedstat")
def test_a_thread_that_shares_its_core_waits_for_it() -> None:
    """Hashing of large buffers does not hold the interpreter: both threads could run."""
    allowed, end, data = os.sched_getaffinity(0), threading.Event(), bytes(1 << 20)
    waited: list[float] = []

    def other() -> None:
        while not end.is_set():
            hashlib.sha256(data).digest()

    def measured() -> None:
        queue = RunQueueClock()
        start, until = queue.read(), time.thread_time() + 0.2
        while time.thread_time() < until:
            hashlib.sha256(data).digest()
        now = queue.read()
        assert start is not None and now is not None
        waited.append(now - start)

    os.sched_setaffinity(0, {min(allowed)})
    try:
        first = sample_cpu()
        threads = [threading.Thread(target=t) for t in (other, measured)]
        for thread in threads:
            thread.start()
        threads[1].join()
        use = use_between(first, sample_cpu())
    finally:
        end.set()
        os.sched_setaffinity(0, allowed)
    threads[0].join()
    assert waited[0] > 0.05 and use.queued_s is not None and use.queued_s >= waited[0] / 2
    assert use.core_count == 1


def sample(**changes: Any) -> CpuSample:
    known: dict[str, Any] = {
        "at_s": 10.0, "cores": (0, 1), "cpu_s": 1.0, "threads": {1: (1.0, 0.5)}, "machine_s": 5.0, "steal_s": 0.0, "throttled_s": None,
    }  # fmt: skip
    return CpuSample(**{**known, **changes})


def test_counters_that_are_missing_or_went_back_are_not_known() -> None:
    later = sample(at_s=12.0, cpu_s=2.0, threads={1: (2.0, 1.5), 2: (0.5, 0.25)}, machine_s=8.0)
    use = use_between(sample(), later)
    assert (use.seconds, use.cpu_s, use.queued_s, use.machine_s, use.busy_threads) == (2.0, 1.0, 1.25, 3.0, 2)
    assert use_between(sample(threads=None), later).queued_s is None
    assert use_between(sample(), sample(at_s=12.0, threads=None)).queued_s is None
    assert use_between(sample(machine_s=None), later).machine_s is None
    assert use_between(sample(), sample(at_s=12.0, machine_s=4.0)).machine_s is None
    moved = use_between(sample(cores=(0,)), later)
    assert (moved.machine_s, moved.steal_s) == (None, None)
    again = use_between(sample(), sample(at_s=12.0, threads={1: (0.2, 0.1)}))  # another thread with its number
    assert again.queued_s == 0.1
    backwards = use_between(later, sample())
    assert (backwards.seconds, backwards.cpu_s) == (0.0, 0.0)


def use(cpu: float, queued: float | None, machine: float | None, **changes: Any) -> CpuUse:
    known: dict[str, Any] = {"seconds": 10.0, "cores": "0-1", "core_count": 2, "steal_s": 0.0, "busy_threads": 1}
    return CpuUse(cpu_s=cpu, queued_s=queued, machine_s=machine, **{**known, **changes})


def judge(*uses: CpuUse) -> MachineLoad:
    return judge_machine("n1", uses)


def judge_two(*numbers: float, **changes: Any) -> MachineLoad:
    """Two ranks of one use."""
    return judge(use(*numbers, **changes), use(*numbers, **changes))


def test_two_ranks_that_fill_two_cores_are_not_other_processes() -> None:
    found = judge_two(9.8, 0.2, 20.0)
    assert found.taken_share is not None and found.taken_share < 0.02 and not found.overloaded
    assert judge(use(10.0, 5.0, 20.0)).overloaded, "a rank that is left out counts as others"
    short = judge_two(0.05, 0.02, 0.14, seconds=0.06)
    assert not short.overloaded, "of 60 ms the kernel's ticks may add one or two for each core"


def test_others_that_take_half_of_the_cores_are_named_with_numbers() -> None:
    found = judge_two(5.0, 5.0, 20.0)
    assert found.taken_share == pytest.approx(0.5, abs=0.01) and found.overloaded
    assert "other processes used 1.0 of 2 cores" in describe_load(found)


def test_own_threads_that_are_more_than_cores_are_told_apart() -> None:
    found = judge_two(10.0, 30.0, 20.2, busy_threads=4)
    assert not found.overloaded and found.competing_share == pytest.approx(0.75, abs=0.01)
    assert "8 busy threads of its ranks share 2 cores" in describe_load(found)


def test_steal_counts_and_is_named() -> None:
    found = judge_two(8.0, 0.0, 16.0, steal_s=4.0)
    assert found.taken_share == pytest.approx(0.2, abs=0.02)
    assert "the hypervisor took 0.4 of 2 cores" in describe_load(found)
    # steal of a machine whose cores other processes use does not count in full
    foreign = judge_two(1.0, 0.0, 16.0, steal_s=4.0)
    assert foreign.steal_cores == 0.4 and foreign.taken_share is not None and foreign.taken_share < 0.3


def test_a_quota_is_no_other_process() -> None:
    stopped, free = (judge(use(5.0, 4.8, 60.0, cores="0-7", core_count=8, throttled_s=s)) for s in (5.0, 0.0))
    assert not stopped.overloaded and free.overloaded
    assert "its CPU quota stopped the ranks for 50% of the time" in describe_load(stopped)


def test_ranks_on_cores_of_their_own_are_judged_by_these() -> None:
    found = judge(use(9.9, 0.0, 10.0, cores="0", core_count=1), use(5.0, 5.0, 10.0, cores="1", core_count=1))
    assert found.cores == 2 and found.taken_share == pytest.approx(4.8 / 19.9, abs=0.01)
    shared = judge(use(9.9, 0.1, 10.0, cores="0", core_count=1), use(5.0, 5.0, 15.0))
    assert not shared.overloaded, "the second rank's cores were used by the first one"


@pytest.mark.parametrize(
    "changes",
    [
        {"queued": None}, {"machine": None}, {"seconds": 0.0}, {"seconds": math.nan}, {"seconds": 0.01},
        {"queued": math.inf}, {"machine": -1.0}, {"throttled_s": math.nan}, {"core_count": 0, "cores": ""},
    ],
)  # fmt: skip
def test_absence_is_not_evidence(changes: dict[str, Any]) -> None:
    bad = use(5.0, changes.pop("queued", 5.0), changes.pop("machine", 20.0), **changes)
    for found in (judge(bad), judge(use(5.0, 5.0, 20.0), bad), judge()):
        assert found.taken_share is None and not found.overloaded and describe_load(found)


def test_consecutive_records_add_up() -> None:
    total = add_uses([use(1.0, 0.5, 4.0), use(2.0, 0.25, 6.0, seconds=5.0, busy_threads=3)])
    assert total is not None
    assert (total.seconds, total.cpu_s, total.queued_s, total.machine_s) == (15.0, 3.0, 0.75, 10.0)
    assert total.busy_threads == 3
    unknown = add_uses([use(1.0, 0.5, 4.0), use(1.0, None, 4.0)])
    assert unknown is not None and unknown.queued_s is None and add_uses([]) is None
    assert add_uses([use(1.0, 0.5, 4.0), use(1.0, 0.5, 4.0, cores="3", core_count=1)]) is None


MB = 1_000_000


def counters(peer: int, mb: float = 100, busy_s: float = 0.5, **more: Any) -> dict[str, Any]:
    """What the kernel counts of a connection to n<peer>."""
    return {
        "peer": f"10.0.0.{peer}", "connections": 1, "segments": int(mb * MB / 1448), "resent": 0, "acked_bytes": int(mb * MB),
        "busy_s": busy_s, "receiver_s": 0.0, "rtt_s": 0.0005, "min_rtt_s": 0.0001, **more,
    }  # fmt: skip


def story(rank: int, *links: dict[str, Any]) -> list[dict[str, Any]]:
    """A rank on host n<rank> with the address 10.0.0.<rank>, after 10 s."""
    event = {"event": "links", "rank": rank, "addresses": [f"10.0.0.{rank}"]}
    start = {"event": "start", "rank": rank, "host": f"n{rank}", "world_size": 3}
    return [start, {**event, "time": 100.0, "links": []}, {**event, "time": 110.0, "links": list(links)}]


def ring(*usual: float, **slow: Any) -> dict[int, list[dict[str, Any]]]:
    """Three nodes that send to the next one; what differs is the link from n1 to n2."""
    changes = {1: slow, 2: {}, 0: {}}
    return {r: story(r, {**counters((r + 1) % 3, *usual), **own}) for r, own in changes.items()}


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


def test_a_slow_link_that_is_hardly_used_is_not_named() -> None:
    (link,) = [k for k in links_of_run(ring(2, 0.01, busy_s=0.5)) if k.host == "n1"]
    assert link.relative is not None and link.relative > 3 and not link.slow


def test_the_only_link_is_not_slow_but_may_be_lossy() -> None:
    assert named({1: story(1, counters(2, 100, 9.0)), 2: story(2)}) == []
    assert named({1: story(1, counters(2, 100, 9.0, resent=5000)), 2: story(2)}) == [("n1", "n2")]
    assert named(ring(100, 9.0)) == [], "the whole network is slow"


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
