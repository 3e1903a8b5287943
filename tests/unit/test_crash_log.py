"""What the logs of ranks say of an abort and of the place in the program; and who sent a SIGKILL, by the kernel's own
count."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from allranks.analysis.diagnose import diagnose
from allranks.launch.failure_attribution import RankEnd, describe_crash, find_first_failure

WHAT = "terminate called after throwing an instance of 'gloo::EnforceNotMet'\n  what():  {}\n"
SIZES = (
    "[enforce fail at gloo/transport/tcp/pair.cc:456] op.preamble.length <= op.nbytes. 106880 vs 4. Received data size "
    "doesn't match"
)
DUMP = """Fatal Python error: Aborted

Thread 0x00007f954e7366c0 (most recent call first):
  File "/env/lib/python3.11/threading.py", line 982 in run

Thread 0x00007f954fa24b80 (most recent call first):
  File "/env/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 3252 in all_reduce
  File "/home/u/train.py", line 290 in sync
  File "/src/allranks/launch/rank.py", line 252 in <module>
"""
TRACEBACK = """Traceback (most recent call last):
  File "/src/allranks/launch/rank.py", line 101, in _work
  File "/home/u/train.py", line 306, in <module>
    loss.backward()
  File "/env/lib/python3.11/site-packages/torch/_tensor.py", line 623, in backward
RuntimeError: Connection reset by peer
"""


def test_mixed_up_collectives_are_told_with_the_line_of_each_rank() -> None:
    logs = {0: "iter 1\n" + TRACEBACK, 1: WHAT.format(SIZES) + DUMP, 2: "nothing"}
    assert describe_crash(1, logs) == (
        "the ranks are in different collectives (it received data of 106880 bytes where it expected 4): "
        "rank 0 in /home/u/train.py:306 in <module>; rank 1 in /home/u/train.py:290 in sync"
    )


@pytest.mark.parametrize(
    ("log", "said"),
    [
        (WHAT.format("bad things") + DUMP, "bad things, in /home/u/train.py:290 in sync"),
        (DUMP, "in /home/u/train.py:290 in sync"),
        (WHAT.format("bad things"), "bad things"),
        (TRACEBACK + "went on\n", ""),  # a crash is no exception
        ("", ""),
        ("Fatal Python error: ", ""),
    ],
)
def test_an_abort_is_told_as_far_as_the_log_goes(log: str, said: str) -> None:
    assert describe_crash(1, {1: log}) == said


@pytest.mark.parametrize(
    ("for_memory", "said", "kind"),
    [
        (True, "the kernel's out-of-memory killer has ended a process on this machine", "host_oom"),
        (False, "but not by the kernel's out-of-memory killer", "rank_died"),
        (None, "Slurm's memory limit send it too", "host_oom"),
    ],
)
def test_a_kill_for_lack_of_memory_is_told_from_others(
    tmp_path: Path, for_memory: bool | None, said: str, kind: str
) -> None:
    end = RankEnd(rank=2, host="n2", pid=5, exitcode=-9, time=1.7e9, done=False, killed_for_memory=for_memory)
    first = find_first_failure([end], [], {})
    assert first is not None and said in first.message
    row = {"rank": 2, "host": "n2", "pid": 5, "exitcode": -9, "time": 1.7e9, "killed_for_memory": for_memory}
    (tmp_path / "n2.exit.json").write_text(json.dumps({"host": "n2", "attempt": 1, "failed": [row]}, indent=2))
    (finding,) = diagnose([tmp_path]).findings
    assert (finding.id, finding.rank, finding.host) == (kind, 2, "n2")


def test_a_stop_by_a_signal_outside_slurm_is_not_called_a_cancellation_by_a_user(tmp_path: Path) -> None:
    (tmp_path / "job.out").write_text("step 3/9 loss 2.1\nTraceback (most recent call last):\nKeyboardInterrupt\n")
    (finding,) = diagnose([tmp_path]).findings
    assert finding.id == "slurm_cancelled"
    assert "user" not in finding.title and finding.next_test.startswith("the line names the signal")
