"""Slurm's answers, as 21.08 to 25.05 print them, read by the pure parsers. See slurm_answers/README.md."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest

from allranks.nodes.slurm import answers
from allranks.nodes.slurm.answers import JobInfo, NoAnswer, NodeInfo

FOLDER = Path(__file__).parent / "slurm_answers"
FILES = sorted(path.stem for path in FOLDER.glob("*.txt"))


@pytest.fixture(autouse=True)
def utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Slurm prints local time; the golden files hold seconds since the epoch."""
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def text(name: str) -> str:
    return (FOLDER / f"{name}.txt").read_text()


def job(name: str) -> JobInfo:
    found = answers.parse_jobs(text(name))
    assert len(found) == 1
    return found[0]


def node(name: str) -> NodeInfo:
    return answers.parse_nodes(text(name))[0]


def read(name: str) -> Any:
    if "-job-" in name:
        return {**msgspec.to_builtins(job(name)), "end_text": answers.end_text(job(name))}
    if "-node-" in name:
        found = node(name)
        return {**msgspec.to_builtins(found), "lost": answers.is_lost(found)}
    if "-sinfo" in name:
        return msgspec.to_builtins(answers.parse_partitions(text(name)))
    found = answers.parse_sacct(text(name), "4711")
    return None if found is None else {"state": found.state, "end_text": answers.end_text(found)}


@pytest.mark.parametrize("name", FILES)
def test_an_answer_is_read_as_its_golden_file_says(name: str) -> None:
    golden = FOLDER / f"{name}.json"
    found = json.loads(msgspec.json.encode(read(name)))
    if os.environ.get("ALLRANKS_GOLDEN") == "write":
        golden.write_text(json.dumps(found, indent=1) + "\n")
    assert found == json.loads(golden.read_text())


def test_free_text_cannot_pretend_to_be_a_state() -> None:
    """Recorded: the job's name and comment hold ``JobState=FAILED``, a node's reason ``State=DOWN``."""
    assert "JobState=FAILED" in text("22.05-job-running")
    assert job("22.05-job-running").state == "RUNNING"
    assert job("24.05-job-preempted").state == "PREEMPTED"
    assert "slow State=DOWN" in text("22.05-node-drain") and node("22.05-node-drain").state == "IDLE"


def seconds(stamp: str) -> float:
    return datetime.fromisoformat(stamp).timestamp()


@pytest.mark.parametrize(
    ("name", "now", "cause"),
    [
        # recorded while the signal was handled
        ("22.05-job-cancelling", "2026-11-22T17:08:34", "cancelled"),
        ("22.05-job-preempt-grace", "2026-11-22T17:04:21", "preempted"),
        ("22.05-job-preempted", "2026-11-22T17:04:43", "preempted"),
        ("22.05-job-time-limit", "2026-11-22T17:06:13", "time_limit"),
        ("22.05-job-node-fail", "2026-11-22T17:06:45", "node_fail"),
        ("22.05-job-requeue", "2026-11-22T17:08:42", "unknown"),
        ("22.05-job-killed-by-usr1", "2026-11-22T17:04:12", "time_limit"),
        # two hours of limit: far from it, near it, and as early as Slurm may signal
        ("22.05-job-running", "2026-11-22T17:10:00", "unknown"),
        ("22.05-job-running", "2026-11-22T19:06:31", "time_limit"),
        ("22.05-job-running", "2026-11-22T19:05:32", "time_limit"),
        ("22.05-job-running", "2026-11-22T19:04:00", "unknown"),
        # written after the documentation
        ("21.08-job-cancelled", "2026-03-02T10:10:01", "cancelled"),
        ("23.02-job-node-fail", "2026-03-02T10:10:01", "node_fail"),
        ("23.02-job-unlimited", "2026-03-02T22:00:00", "unknown"),
        ("23.11-job-timeout", "2026-03-02T22:00:23", "time_limit"),
        ("24.05-job-preempted", "2026-03-02T10:10:31", "preempted"),
        ("25.05-job-completing", "2026-03-02T10:10:01", "unknown"),
        ("25.05-job-running", "2026-03-02T21:58:00", "time_limit"),
    ],
)
def test_why_a_job_was_signalled(name: str, now: str, cause: str) -> None:
    assert answers.why_signalled(job(name), seconds(now), signal_s=120) == cause


def test_no_answer_gives_no_cause_and_no_verdict() -> None:
    assert answers.why_signalled(None, 0.0, 120) == "unknown"
    assert answers.is_lost(None) is None
    assert answers.is_lost(NoAnswer("slurmctld is away")) is None


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ("RUNNING", ("RUNNING", (), None)),
        ("COMPLETING", ("COMPLETING", ("COMPLETING",), None)),
        ("CANCELLED,COMPLETING", ("CANCELLED", ("COMPLETING",), None)),
        ("CANCELLED+COMPLETING", ("CANCELLED", ("COMPLETING",), None)),
        ("CANCELLED by 2001", ("CANCELLED", (), 2001)),
        ("PENDING,REQUEUED,POWER_UP_NODE", ("PENDING", ("REQUEUED", "POWER_UP_NODE"), None)),
        ("", ("UNKNOWN", (), None)),
    ],
)
def test_job_states(state: str, expected: tuple[str, tuple[str, ...], int | None]) -> None:
    assert answers.job_state(state) == expected


@pytest.mark.parametrize(
    ("gres", "gpus"),
    [
        ("gpu:8", 8), ("gpu", 1), ("gpu:a100", 1), ("gpu:a100:4(S:0-1)", 4), ("gpu:a100:2,gpu:v100:2", 4), ("(null)", 0), (None, 0), ("", 0),
        ("shard:8", 0), ("mps:400", 0), ("gpu:2,shard:16(S:0,1),mps:200", 2), ("gpu:tesla(S:0,1),nvme:1", 1), ("gres/gpu:h100=4", 4),
        ("gres:gpu:2", 2), ("gpu:a100:no_consume:4", 4), ("gpu:0", 0), ("mygpu:4", 0), ("gpu:8(IDX:0-7)", 8),
    ],
)  # fmt: skip
def test_gpus_in_generic_resources(gres: str | None, gpus: int) -> None:
    assert answers.gpu_count(gres) == gpus


@pytest.mark.parametrize(
    ("version", "partition", "gpus"),
    [
        ("21.08", None, 0), ("21.08", "gpu", 4), ("21.08", "nope", None), ("21.08", "mps", 2), ("21.08", "cpu,gpu", 4),
        ("25.05", None, 8), ("25.05", "batch", 0), ("25.05", "mixed", 1), ("22.05", None, 2), ("22.05", "gpu", 2),
    ],
)  # fmt: skip
def test_gpus_of_a_partition(version: str, partition: str | None, gpus: int | None) -> None:
    assert answers.partition_gpus(answers.parse_partitions(text(f"{version}-sinfo")), partition) == gpus


def test_an_array_gives_one_record_a_task_and_the_one_asked_for_is_found() -> None:
    two = text("22.05-job-running") + text("22.05-job-requeue")
    assert [one.job for one in answers.parse_jobs(two)] == ["1", "2"]
    found = answers.parse_job(two, "2")
    assert found is not None and found.restarts == 1
    assert answers.parse_job("", "2") is None
