"""What is read of the kernel, and who used the cores: other processes, a hypervisor, a quota, or the ranks."""

import hashlib
import math
import os
import threading
import time
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from allranks.utils import kernel_counters
from allranks.utils.kernel_counters import CpuSample, CpuUse, RunQueueClock, add_uses, sample_cpu, use_between
from allranks.utils.text import format_ranges, parse_ranges


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
        "at_s": 10.0, "cores": (0, 1), "cpu_s": 1.0, "threads": {1: (1.0, 0.5)}, "machine_s": 5.0, "steal_s": 0.0,
        "throttled_s": None,
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
    assert moved.machine_s is None and moved.steal_s is None
    again = use_between(sample(), sample(at_s=12.0, threads={1: (0.2, 0.1)}))  # another thread with its number
    backwards = use_between(later, sample())
    assert again.queued_s == 0.1 and (backwards.seconds, backwards.cpu_s) == (0.0, 0.0)


def use(cpu: float, queued: float | None, machine: float | None, **changes: Any) -> CpuUse:
    known: dict[str, Any] = {"seconds": 10.0, "cores": "0-1", "core_count": 2, "steal_s": 0.0, "busy_threads": 1}
    return CpuUse(cpu_s=cpu, queued_s=queued, machine_s=machine, **{**known, **changes})


def judge(*uses: CpuUse) -> kernel_counters.MachineLoad:
    return kernel_counters.judge_machine("n1", uses)


ANY = pytest.approx(0.5, abs=0.5)
QUOTA: dict[str, Any] = {"cores": "0-7", "core_count": 8}
ONE: dict[str, Any] = {"cores": "0", "core_count": 1}
OTHER = {**ONE, "cores": "1"}


@pytest.mark.parametrize(
    ("uses", "taken", "overloaded", "words"),
    [
        (2 * [use(9.8, 0.2, 20.0)], pytest.approx(0.01, abs=0.0099), False, ""),
        (2 * [use(5.0, 5.0, 20.0)], pytest.approx(0.5, abs=0.01), True, "other processes used 1.0 of 2 cores"),
        ([use(10.0, 5.0, 20.0)], ANY, True, ""),  # a rank that is left out counts as others
        (2 * [use(10.0, 30.0, 20.2, busy_threads=4)], ANY, False, "8 busy threads of its ranks share 2 cores"),
        (2 * [use(8.0, 0.0, 16.0, steal_s=4.0)], pytest.approx(0.2, abs=0.02), True, "took 0.4 of 2 cores (steal)"),
        (2 * [use(1.0, 0.0, 16.0, steal_s=4.0)], pytest.approx(0.15, abs=0.15), True, "took 0.4 of 2 cores (steal)"),
        (
            [use(5.0, 4.8, 60.0, **QUOTA, throttled_s=5.0)],
            ANY,
            False,
            "CPU quota stopped the ranks for 50% of the time",
        ),
        ([use(5.0, 4.8, 60.0, **QUOTA, throttled_s=0.0)], ANY, True, ""),
        (2 * [use(0.05, 0.02, 0.14, seconds=0.06)], ANY, False, ""),  # the kernel's ticks may add one or two a core
        # each on a core of its own; on cores that the first rank uses, too
        ([use(9.9, 0.0, 10.0, **ONE), use(5.0, 5.0, 10.0, **OTHER)], pytest.approx(4.8 / 19.9, abs=0.01), True, ""),
        ([use(9.9, 0.1, 10.0, **ONE), use(5.0, 5.0, 15.0)], ANY, False, ""),
    ],
)
def test_who_took_the_cores(uses: list[CpuUse], taken: Any, overloaded: bool, words: str) -> None:
    load = judge(*uses)
    assert load.taken_share == taken and load.overloaded is overloaded and words in kernel_counters.describe_load(load)
    assert load.competing_share == pytest.approx(0.75, abs=0.01) or "threads of its ranks" not in words


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
        assert found.taken_share is None and not found.overloaded and kernel_counters.describe_load(found)


def test_consecutive_records_add_up() -> None:
    total = add_uses([use(1.0, 0.5, 4.0), use(2.0, 0.25, 6.0, seconds=5.0, busy_threads=3)])
    assert total == use(3.0, 0.75, 10.0, seconds=15.0, busy_threads=3)
    unknown = add_uses([use(1.0, 0.5, 4.0), use(1.0, None, 4.0)])
    assert unknown is not None and unknown.queued_s is None and add_uses([]) is None
    assert add_uses([use(1.0, 0.5, 4.0), use(1.0, 0.5, 4.0, cores="3", core_count=1)]) is None
