"""When a user's own program hangs: the rules on samples of its ranks, with a clock set by hand."""

import pytest

from allranks.launch.monitor.hang_rules import due_alarm
from allranks.launch.monitor.hang_watch import RankSample, ScriptSilence, Silence
from allranks.launch.monitor.procfs import ProcessWork
from allranks.launch.monitor.records import HangAlarm
from allranks.planning.records import Limits

BARRIER = ("/v/torch/distributed/distributed_c10d.py:barrier", "/u/train.py:main")
SLEEP = ("/u/rows.py:read", "/u/train.py:main")
LOOP = ("/u/train.py:spin",)
NINJA = ("/usr/lib/python3.11/subprocess.py:wait", "/v/torch/utils/cpp_extension.py:_run_ninja_build")
BATON = ("/v/site-packages/torch/utils/file_baton.py:wait", "/v/torch/utils/cpp_extension.py:_jit_compile")


def silence(
    *stacks: tuple[str, ...],
    working: tuple[int, ...] = (),
    speaking: tuple[int, ...] = (),
    until_s: float = 100.0,
    device: str = "cpu",
    collectives: bool = True,
    changing: tuple[int, ...] = (),
    compiling: tuple[int, ...] = (),
) -> tuple[float, Silence] | None:
    """Return the first silence found and its time: one look a second at ranks that stop making progress at 3 s."""
    script = ScriptSilence(Limits(step_s=20.0, long_s=60.0), device)
    for second in range(int(until_s)):
        samples = {
            rank: RankSample(
                progress=second if rank in speaking else min(second, 3),
                work=ProcessWork(second * (rank in working), second * (rank in compiling), 0),
                stack=(f"/u/part{second}.py:f", *stack) if rank in changing else stack,
                others_needed=collectives,
            )
            for rank, stack in enumerate(stacks)
        }
        if found := script.look(float(second), 0.0, samples):
            return float(second), found
    return None


def test_ranks_that_wait_for_an_idle_one_are_silent_after_the_shorter_limit() -> None:
    assert silence(BARRIER, SLEEP) == (24.0, Silence(rank=1, since=3.0, limit_s=20.0, stuck=True, waiting=True))


def test_a_rank_that_works_while_others_wait_has_the_longer_limit() -> None:
    expected = Silence(rank=1, since=3.0, limit_s=60.0, stuck=False, waiting=True)
    assert silence(BARRIER, LOOP, working=(1,)) == (64.0, expected)


def test_a_line_or_report_of_any_rank_is_progress_of_all() -> None:
    assert silence(BARRIER, SLEEP, speaking=(1,)) is None
    assert silence(SLEEP, BARRIER, speaking=(0,)) is None


def test_a_program_that_calls_no_collectives_is_never_silent() -> None:
    assert silence(SLEEP, SLEEP, collectives=False) is None


def test_an_idle_rank_whose_stack_is_another_one_is_not_stuck() -> None:
    found = silence(SLEEP, SLEEP, changing=(0,))
    assert found is not None
    assert not found[1].stuck


def test_on_a_gpu_a_thread_that_waits_for_it_is_not_at_work() -> None:
    item = ("/u/train.py:log",)
    assert silence(item, item, working=(0, 1), device="cuda", until_s=30) is not None
    assert silence(item, item, working=(0, 1), device="cpu", until_s=30) is None
    assert silence(item, item, working=(0, 1), changing=(0,), device="cuda", until_s=30) is None


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_rank_that_builds_an_extension_is_at_work(device: str) -> None:
    for other in (BATON, BARRIER):
        assert silence(NINJA, other, compiling=(0,), device=device, until_s=60) is None


def test_ranks_that_wait_for_a_build_have_the_longer_limit() -> None:
    """It may be that of another job. A lock that nobody holds is found all the same."""
    assert silence(BATON, BATON) == (64.0, Silence(rank=0, since=3.0, limit_s=60.0, stuck=False, waiting=True))


def test_the_limit_is_10_times_the_median_interval_of_progress() -> None:
    script = ScriptSilence(Limits(step_s=20.0, long_s=60.0), "cpu")
    for second in range(0, 60, 5):
        sample = RankSample(progress=second, work=ProcessWork(), stack=BARRIER, others_needed=True)
        script.look(float(second), 0.0, {0: sample})
    assert script.limit_s == 50.0


def alarm(*, stuck: bool, waiting: bool, whole_job: bool = True) -> HangAlarm:
    return HangAlarm(
        node=0, host="n0", rank=0, phase="script", part="", step=None, since=1.0, time=2.0, limit_s=1.0,
        whole_job=whole_job, stuck=stuck, waiting=waiting,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("alarms", "due"),
    [
        ([alarm(stuck=True, waiting=True)], False),  # the other node makes progress
        ([alarm(stuck=True, waiting=True), alarm(stuck=True, waiting=False)], True),
        (
            [alarm(stuck=True, waiting=True), alarm(stuck=False, waiting=False)],
            True,
        ),  # one waits for another that loops
        ([alarm(stuck=False, waiting=False), alarm(stuck=False, waiting=False)], False),  # all compute, nobody waits
        ([alarm(stuck=True, waiting=False, whole_job=False)], True),  # allranks' own training
    ],
)
def test_a_program_hangs_only_if_all_nodes_are_silent(alarms: list[HangAlarm], due: bool) -> None:
    assert (due_alarm(alarms, 2) is not None) == due
