"""What a thread is doing, by the frames of its stack: one answer for the hang watch and for diagnose."""

from __future__ import annotations

import inspect

import pytest

from allranks.analysis.stacks import is_collective_stack, main_thread_frames, thread_activity, traceback_frames
from allranks.train.data.batch_feed import BatchFeed

MAIN = "/home/u/train.py:main"
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
        (
            ["threading.py:wait", "concurrent/futures/_base.py:result", f"{inspect.getfile(BatchFeed)}:take", MAIN],
            "data",
        ),
        (["tqdm/_monitor.py:run", MAIN], "other"),
    ],
)
def test_the_innermost_frames_say_what_a_thread_does(frames: list[str], activity: str) -> None:
    assert thread_activity(frames) == activity


@pytest.mark.parametrize("frame", ["threading.py:wait", "subprocess.py:wait", "concurrent/futures/_base.py:wait"])
def test_the_wait_for_a_thread_is_no_collective_where_py_spy_shortens_the_path(frame: str) -> None:
    assert not is_collective_stack([frame, MAIN])


def test_faulthandler_and_py_spy_give_the_same_main_thread() -> None:
    dump = (
        'Thread 0x00007f01 (most recent call first):\n  File "/home/u/loads.py", line 3 in load\n\n'
        'Current thread 0x00007f02 (most recent call first):\n  File "/home/u/train.py", line 7 in step\n'
        '  File "/home/u/train.py", line 9 in <module>\n'
    )
    spied = (
        'Thread 7 (active): "MainThread"\n    step (/home/u/train.py:7)\n    <module> (/home/u/train.py:9)\n'
        'Thread 8 (idle): "loads"\n    load (/home/u/loads.py:3)\n'
    )
    assert main_thread_frames(dump) == main_thread_frames(spied)
    assert str(main_thread_frames(dump)[0]) == "/home/u/train.py:step"


def test_a_traceback_is_read_with_the_prefix_of_torch_and_without() -> None:
    plain = (
        'Traceback (most recent call last):\n  File "/home/u/train.py", line 9, in <module>\n  File '
        '"/home/u/train.py", line 7, in step\n'
    )
    prefixed = "".join(f"[rank12]: {line}\n" for line in plain.splitlines())
    assert traceback_frames(prefixed) == traceback_frames(plain)
    assert [frame.line for frame in traceback_frames(plain)] == [7, 9]
