"""The run's own outcome is the first evidence of its diagnosis; texts of allranks are not read as a library's."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from allranks.analysis.diagnose import Diagnosis, diagnose
from allranks.analysis.diagnose.run_outcome import GENERAL, failure_headline, failure_of
from allranks.errors import CheckpointError
from allranks.launch.rank import _record_error
from allranks.rundir.paths import RunDir
from tests.conftest import shared

FULL = "the checkpoint could not be saved: rank 0 failed to find room for it: /r: 8.9 MiB are needed, 4.6 MiB are free"
LOST = "the agent on n3 is gone: its node does not answer. Continue after step 4 with: allranks resume r"
FIRST_NODE = (
    "n1, the job's first node, where its script and rank 0 ran, has recorded nothing for too long: Slurm reports."
)
LIMIT = "stopped after step 40 (the time limit is near); a full checkpoint is in /r. Continue with: allranks resume r"
KILLER = "the kernel's out-of-memory killer"
RAISED = "Traceback (most recent call last):\n"


def run_folder(tmp_path: Path, message: str, log: str = "", **metrics: object) -> Path:
    run = tmp_path / "r"
    for name in ("plan.json", "spec.yaml", "run_args.json"):
        (run / "logs" / "attempt-1").mkdir(parents=True, exist_ok=True)
        (run / name).write_text("{}")
    (run / "logs" / "attempt-1" / "n2.rank0.log").write_text(log)
    (run / "metrics.json").write_text(json.dumps({"status": "failed", "message": message, **metrics}, indent=1))
    return run


def read(tmp_path: Path, text: str) -> Diagnosis:
    (tmp_path / "a.log").write_text(text)
    return diagnose([tmp_path / "a.log"])


@pytest.mark.parametrize(
    ("message", "log", "wanted"),
    [
        (FULL, f"{RAISED}allranks.errors.CheckpointError: {FULL}\n", ("disk_full", 0, "n2")),
        (LOST, "RuntimeError: Connection closed by peer [10.1.0.3]:4455\n", ("node_unhealthy", None, "n3")),
        (LOST.replace("n3", "this machine"), "", ("node_unhealthy", None, None)),
        (
            "n1: node 0 cannot listen on n1:80 for the store of the ranks: only root may listen on a port below 1024",
            "",
            ("port_reserved", None, None),
        ),
        (
            "the checkpoint could not be saved: rank 1 on n2 failed to write its files: /r: No such file or directory. "
            "The run folder is no longer visible on n1. Earlier checkpoints are untouched",
            "",
            ("node_unhealthy", None, "n1"),
        ),
        (LIMIT, "", ("slurm_time_limit", None, None)),
        ("rank 1 on n2 failed after step 3: OutOfMemoryError: CUDA out of memory. Log: /r", "", ("cuda_oom", 1, "n2")),
        ("rank 1 on n2 failed: CheckpointError: different metadata for x", "", ("application_error", 1, "n2")),
        ("rank 1 on n2 failed before the first step: ended by SIGSEGV. Log: /r", "", ("rank_died", 1, "n2")),
        ("rank 1 on n2 failed after step 20: ended by SIGKILL (the kernel", "", ("rank_died", 1, "n2")),
        (f"rank 1 on n2 failed: ended by SIGKILL, and {KILLER} has ended a process here", "", ("host_oom", 1, "n2")),
        ("ended before the ranks were started: the time limit is near.", "", ("slurm_time_limit", None, None)),
        ("stopped after step 4 (Slurm ended the job because a node failed)", "", ("node_unhealthy", None, None)),
        (f"n2: the ranks made no progress; {FIRST_NODE} Job 3 was cancelled.", "", ("node_unhealthy", None, "n1")),
        ("job 7 was cancelled. No checkpoint had been written", "", ("slurm_cancelled", None, None)),
        ("the loss of rank 0, 1 is not finite (nan) in step 7", "", ("loss_not_finite", 0, "n2")),
    ],
)
def test_the_outcome_of_a_run_is_its_diagnosis(tmp_path: Path, message: str, log: str, wanted: tuple[Any, ...]) -> None:
    run = run_folder(tmp_path, message, log)
    found = diagnose([run])
    assert [(f.id, f.rank, f.host) for f in found.findings] == [wanted]
    assert found.findings[0].evidence[0].file.endswith("metrics.json")
    failure = failure_of(RunDir(run), message)  # what `run` saves and `report` shows
    assert (failure.id, failure.rank, failure.host) == wanted
    shown = failure_headline({"message": message, "failure": msgspec.to_builtins(failure)}, "r")
    same_start = shown.partition(".")[0] == found.summary.partition(".")[0]
    assert shown == found.summary or (failure.id in GENERAL and same_start)


def test_a_rank_that_left_early_is_called_so_whatever_the_order_of_the_ends_in_the_records(tmp_path: Path) -> None:
    while_others = "while other ranks were still running; rank 0 then failed with RuntimeError"
    for n, when in enumerate((while_others, "before it had finished its work")):
        folder = tmp_path / str(n)
        folder.mkdir()
        (found,) = diagnose([run_folder(folder, f"rank 1 on n2 failed: ended with exit code 0 {when}", "")]).findings
        assert (found.title, found.rank) == ("a rank left early with exit code 0", 1), when


def test_a_log_may_say_more_than_the_outcome_and_that_of_an_earlier_attempt_is_not_used(tmp_path: Path) -> None:
    killed = "RuntimeError: DataLoader worker (pid 8) is killed by signal: Bus error\n"
    log = "terminate called\nFatal Python error: Bus error\n" + killed
    run = run_folder(tmp_path, "rank 0 on n2 failed after step 2: ended by SIGBUS. Log: /r", log)
    assert diagnose([run]).findings[0].id in ("shm_too_small", "sigbus_memory")
    run = run_folder(tmp_path, FULL, failure={"id": "disk_full", "rank": 0, "host": None, "attempt": 1})
    (run / "logs" / "attempt-2").mkdir()
    (run / "logs" / "attempt-2" / "n2.rank0.log").write_text("step 1 loss 0.5\nall 2 ranks succeeded\n")
    assert not diagnose([run]).findings


def test_our_own_class_is_not_torchs_of_the_same_name(tmp_path: Path) -> None:
    text = RAISED + '  File "t.py", line 3, in f\n{}.CheckpointError: unexpected key(s)\n'
    modules = ("allranks.errors", "torch.utils.checkpoint")
    ours, torchs = (read(tmp_path, text.format(name)).findings[0] for name in modules)
    assert "does not fit the model" not in ours.title and "does not fit the model" in torchs.title
    run = RunDir(tmp_path / "own")
    run.events.mkdir(parents=True)
    _record_error(run, 1, 0, CheckpointError("rank 1 cannot load its part: CUDA out of memory"), 1)
    assert [f.id for f in diagnose([run.events]).findings] == ["application_error"]


def test_public_reports() -> None:
    for name, wanted, says in (
        ("nfs", "storage_stalled", "03:10:12"), ("elastic", "peer_died_first", "n2"), ("uvlock", "package_lock", "lock")
    ):  # fmt: skip
        found = diagnose([shared("found", f"{name}.log")]).findings
        assert [f.id for f in found] == [wanted] and says in found[0].cause


STEP = (
    "{rank} Traceback (most recent call last):\n"
    '{rank}   File "/w/two.py", line {line}, in <module>\n{rank}     x\n'
    '{rank}   File "/v/site-packages/torch/distributed/distributed_c10d.py", line 9, in {call}\n'
    "{rank} RuntimeError: [unbound_buffer.cc:78] Timed out waiting 20000ms for recv operation to complete\n"
)


@pytest.mark.parametrize(
    ("calls", "wanted"), [(("broadcast_object_list", "all_reduce"), True), (("all_reduce", "all_reduce"), False)]
)
def test_timeouts_in_different_calls_name_both_lines(tmp_path: Path, calls: tuple[str, str], wanted: bool) -> None:
    text = "".join(STEP.format(rank=f"[rank{r}]:", line=9 + 3 * r, call=call) for r, call in enumerate(calls))
    first = read(tmp_path, text).findings[0]
    assert (first.id == "collective_mismatch") is wanted
    assert ("/w/two.py:9" in first.cause and "/w/two.py:12" in first.cause) is wanted


@pytest.mark.parametrize(
    "text",
    [
        " 8121 S    nfs_wait_client       [nfsv4.1-svc]\n",
        " 8121 D    io_schedule           python train.py\n",
        " 8121 D    nfs_start_io_write    python train.py\n" + "".join(f"step {n} loss 1.5\n" for n in range(9)),
        "INFO waiting for lock on the prepared data of rank 0\n",
        RAISED + '  File "train.py", line 4, in f\nAssertionError\n',
    ],
)
def test_near_misses(tmp_path: Path, text: str) -> None:
    assert not {f.id for f in read(tmp_path, text).findings} & {"storage_stalled", "package_lock", "peer_died_first"}


def test_evidence_of_memory_has_the_sizes_and_its_tear_down_is_no_cancellation(tmp_path: Path) -> None:
    found = read(
        tmp_path,
        "slurmstepd: error: Detected 1 oom_kill event in StepId=7.0.\nsrun: error: n1: task 0: Out Of Memory\n"
        "[12345.1] Memory cgroup out of memory: Killed process 42 (python) total-vm:912kB, anon-rss:642kB, "
        "file-rss:0kB\n"
        "slurmstepd: error: *** STEP 7.0 ON n1 CANCELLED AT 2026-09-01T10:11:12 ***\n",
    )
    assert [f.id for f in found.findings] == ["host_oom"]
    assert "anon-rss:642kB" in found.findings[0].evidence[0].text
    assert not any("cancelled by a user" in line for line in found.story)


def test_a_library_a_shape_and_a_watchdog_are_named_with_what_helps(tmp_path: Path) -> None:
    text = "ImportError: /lib/libc.so.6: version `GLIBC_2.32' not found (required by x.so)\n"
    first = read(tmp_path, text).findings[0]
    assert first.id == "library_missing" and "too old" in first.title
    assert "GLIBC_2.32" in first.cause and "container" in first.fix
    text = (
        RAISED + '  File "/w/train.py", line 88, in step\n'
        '  File "/v/site-packages/torch/nn/linear.py", line 125, in forward\n'
        "RuntimeError: mat1 and mat2 shapes cannot be multiplied (3x4 and 3x4)\n"
    )
    assert "/w/train.py:88 in step" in read(tmp_path, text).findings[0].cause
    text = (
        "[rank0]:[E901 12:00:00.1 ProcessGroupNCCL.cpp:632] [Rank 0] Watchdog caught collective operation timeout\n"
        "[rank0]:[I901 12:00:02.1 X.cpp:1] Finished writing Flight Recorder debug info to /w/nccl_trace_rank_0\n"
    )
    assert "/w/nccl_trace_rank_0" in read(tmp_path, text).findings[0].next_test


def test_a_crash_without_a_time_stamp_has_the_time_of_its_end(tmp_path: Path) -> None:
    log = f"2026-09-01 10:00:00 start\n{RAISED}ValueError: bad sample\n"
    run = run_folder(tmp_path, "rank 0 on n2 failed: ValueError: bad sample", log)
    (run / "events").mkdir()
    _record_error(RunDir(run), 1, 0, ValueError("bad sample"), 1)
    started = "[RANK 1] WORLD_SIZE=2 n2 pid 9 2026-09-01 10:00:00\nRuntimeError: Connection closed by peer\n"
    (run / "logs" / "attempt-1" / "n2.rank1.log").write_text(started)
    (line,) = diagnose([run]).story  # the log and the event tell of one exception
    assert "10:00:00" not in line
