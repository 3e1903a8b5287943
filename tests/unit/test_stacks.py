"""What a thread is doing, by the frames of its stack; what the log of a rank says of an abort, and who killed it."""

import inspect
import json
from pathlib import Path

import pytest

from allranks.analysis import stacks
from allranks.launch.failure_attribution import RankEnd, describe_crash, find_first_failure
from allranks.train.data.batch_feed import BatchFeed
from tests.unit.diagnose_examples import of

MAIN = "/home/u/train.py:main"
FEED = f"{inspect.getfile(BatchFeed)}:take"
ALL_REDUCE = "/v/site-packages/torch/distributed/distributed_c10d.py:all_reduce"


@pytest.mark.parametrize(
    ("frames", "activity"),
    [
        ([ALL_REDUCE, MAIN], "collective"),
        (["/v/site-packages/torch/cuda/__init__.py:synchronize", MAIN], "collective"),
        (["torch/distributed/nn/functional.py:backward", MAIN], "collective"),
        ([*["/home/u/io.py:flush"] * 6, "/home/u/ckpt.py:save_state_dict", ALL_REDUCE, MAIN], "checkpoint"),
        ([ALL_REDUCE, "/v/site-packages/torch/distributed/checkpoint/utils.py:reduce_scatter", MAIN], "collective"),
        (["/v/site-packages/torch/utils/checkpoint.py:recompute", MAIN], "other"),  # activation checkpointing
        (["/v/site-packages/torch/utils/data/dataloader.py:_next_data", MAIN], "data"),
        (["multiprocessing/queues.py:get", MAIN], "data"),
        (["threading.py:wait", "concurrent/futures/_base.py:result", FEED, MAIN], "data"),
        (["tqdm/_monitor.py:run", MAIN], "other"),
    ],
)
def test_the_innermost_frames_say_what_a_thread_does(frames: list[str], activity: str) -> None:
    assert stacks.thread_activity(frames) == activity


@pytest.mark.parametrize(
    "frame",
    [
        "/usr/lib/python3.11/subprocess.py:wait", "/opt/conda/lib/python3.12/threading.py:wait",
        "/v/site-packages/torch/utils/data/dataloader.py:wait", "/v/site-packages/psutil/__init__.py:wait",
        "threading.py:wait", "subprocess.py:wait", "concurrent/futures/_base.py:wait",  # py-spy shortens the path
    ],
)  # fmt: skip
def test_the_wait_for_a_process_or_thread_is_no_collective(frame: str) -> None:
    assert not stacks.is_collective_stack([frame, MAIN])


def test_faulthandler_and_py_spy_give_the_same_main_thread() -> None:
    dump = (
        'Thread 0x00007f01 (most recent call first):\n  File "/home/u/loads.py", line 3 in load\n\n'
        'Thread 0x00007f02 (most recent call first):\n  File "/usr/lib/python3.11/threading.py", line 320 in wait\n'
        '  File "/home/u/train.py", line 7 in step\n  File "/home/u/train.py", line 9 in <module>\n'
    )
    spied = (
        "Process 41: python train.py\nPython v3.11.7 (/usr/bin/python3.11)\n\n"
        'Thread 7 (active): "MainThread"\n    wait (/usr/lib/python3.11/threading.py:320)\n'
        "    step (/home/u/train.py:7)\n    <module> (/home/u/train.py:9)\n"
        'Thread 8 (idle): "loads"\n    load (/home/u/loads.py:3)\n'
    )
    assert stacks.main_thread_frames(dump) == stacks.main_thread_frames(spied)
    within = "(within /usr/lib/python3.11/threading.py:320 wait)"
    assert stacks.blocking_location(stacks.main_thread_frames(dump)) == f"/home/u/train.py:7 in step {within}"
    assert stacks.main_thread_frames("nothing of the kind\n") == []


def test_a_traceback_is_read_with_the_prefix_of_torch_and_without() -> None:
    frame = '  File "/home/u/train.py", line {}, in step\n'
    plain = f"Traceback (most recent call last):\n{frame.format(9)}{frame.format(7)}"
    prefixed = "".join(f"[rank12]: {line}\n" for line in plain.splitlines())
    assert stacks.traceback_frames(prefixed) == stacks.traceback_frames(plain)
    assert [frame.line for frame in stacks.traceback_frames(plain)] == [7, 9]


# an abort in a rank's log, and who sent a SIGKILL, by the kernel's own count

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


DIFFERENT = (
    "the ranks are in different collectives (it received data of 106880 bytes where it expected 4): "
    "rank 0 in /home/u/train.py:306 in <module>; rank 1 in /home/u/train.py:290 in sync"
)


@pytest.mark.parametrize(
    ("log", "said", "others"),
    [
        (WHAT.format(SIZES) + DUMP, DIFFERENT, {0: "iter 1\n" + TRACEBACK, 2: "nothing"}),
        (WHAT.format("bad things") + DUMP, "bad things, in /home/u/train.py:290 in sync", {}),
        (DUMP, "in /home/u/train.py:290 in sync", {}),
        (WHAT.format("bad things"), "bad things", {}),
        (TRACEBACK + "went on\n", "", {}),  # a crash is no exception
        ("", "", {}),
        ("Fatal Python error: ", "", {}),
    ],
)
def test_an_abort_is_told_as_far_as_the_log_goes(log: str, said: str, others: dict[int, str]) -> None:
    assert describe_crash(1, {1: log, **others}) == said


@pytest.mark.parametrize(
    ("for_memory", "said", "kind"),
    [
        (True, "the kernel's out-of-memory killer has ended a process on this machine", "host_oom"),
        (False, "but not by the kernel's out-of-memory killer", "rank_died"),
        (None, "Slurm's memory limit send it too", "host_oom"),
    ],
)
def test_a_kill_for_memory_is_told_from_others(tmp_path: Path, for_memory: bool | None, said: str, kind: str) -> None:
    end = RankEnd(rank=2, host="n2", pid=5, exitcode=-9, time=1.7e9, done=False, killed_for_memory=for_memory)
    first = find_first_failure([end], [], {})
    assert first is not None and said in first.message
    row = {"rank": 2, "host": "n2", "pid": 5, "exitcode": -9, "time": 1.7e9, "killed_for_memory": for_memory}
    record = json.dumps({"host": "n2", "attempt": 1, "failed": [row]}, indent=2)
    assert [(f.id, f.rank, f.host) for f in of(tmp_path, {"n2.exit.json": record}).findings] == [(kind, 2, "n2")]
