"""Slurm's commands when they answer badly, late or not at all. Stubs stand in for them: what the real ones do, the box
shows."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from allranks.errors import EnvironmentNotAble
from allranks.nodes.slurm.answers import JobInfo, NoAnswer, NodeInfo
from allranks.nodes.slurm.commands import NO_ANSWER, Slurm
from tests.unit.test_slurm_answers import text

AWAY = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)"
NOT_KNOWN = "slurm_load_jobs error: Invalid job id specified"
DISABLED = "Slurm accounting storage is disabled"


def stub(folder: Path, **scripts: str) -> Slurm:
    """A Slurm whose commands are shell lines; a command without one is not installed."""
    cases = "\n".join(f"{name}) {script} ;;" for name, script in scripts.items())
    path = folder / "stub"
    path.write_text(f'#!/bin/sh\ncase "$1" in\n{cases}\n*) echo "$1: command not found" >&2; exit 127 ;;\nesac\n')
    path.chmod(0o755)
    return Slurm([str(path)], "a stub")


def saying(folder: Path, answer: str, code: int = 0, to: str = "") -> str:
    path = folder / f"answer-{abs(hash(answer))}"
    path.write_text(answer)
    return f"cat {path} {to}; exit {code}"


def test_a_job_that_slurm_does_not_know_differs_from_no_answer(tmp_path: Path) -> None:
    unknown = stub(tmp_path, scontrol=saying(tmp_path, NOT_KNOWN, 1, ">&2"))
    assert unknown.try_job("7") is None
    assert unknown.state("7").state == "GONE" and not unknown.state("7").alive
    away = stub(tmp_path, scontrol=saying(tmp_path, AWAY, 1, ">&2"))
    found = away.try_job("7")
    assert isinstance(found, NoAnswer) and "Unable to contact" in found.reason
    assert away.state("7").state == NO_ANSWER
    assert away.state("7").alive, "a controller that restarts has ended no job"
    assert away.restarts("7") is None and away.end_reason("7") == "unknown"


def test_a_node_that_slurm_does_not_know_differs_from_no_answer(tmp_path: Path) -> None:
    assert stub(tmp_path, scontrol=saying(tmp_path, "Node n9 not found\n", 1)).try_node("n9") is None
    away = stub(tmp_path, scontrol=saying(tmp_path, AWAY.replace("jobs", "node"), 1, ">&2"))
    assert isinstance(away.try_node("n9"), NoAnswer)
    there = stub(tmp_path, scontrol=saying(tmp_path, text("22.05-node-down"))).try_node("n2")
    assert isinstance(there, NodeInfo) and there.responding is False


def test_the_answer_of_a_job_is_read(tmp_path: Path) -> None:
    slurm = stub(tmp_path, scontrol=saying(tmp_path, text("22.05-job-running")))
    found = slurm.try_job("1")
    assert isinstance(found, JobInfo) and found.state == "RUNNING"
    state = slurm.state("1")
    assert (state.state, state.nodes, state.alive, state.restarts) == ("RUNNING", "n[1-2]", True, 0)


@pytest.mark.parametrize("answer", [b"", b"\xff\xfe\x00garbage", b"JobId=x\n", b"<html>proxy</html>"])
def test_an_answer_that_cannot_be_read_is_no_answer(tmp_path: Path, answer: bytes) -> None:
    (tmp_path / "answer").write_bytes(answer)
    assert isinstance(stub(tmp_path, scontrol=f"cat {tmp_path}/answer").try_job("7"), NoAnswer)


def test_commands_that_cannot_be_started_are_no_answer(tmp_path: Path) -> None:
    assert isinstance(Slurm([str(tmp_path / "nowhere")], "none").try_job("7"), NoAnswer)
    (tmp_path / "not-executable").write_text("#!/bin/sh\n")
    (tmp_path / "not-executable").chmod(0o644)
    forbidden = Slurm([str(tmp_path / "not-executable")], "forbidden")
    assert isinstance(forbidden.try_job("7"), NoAnswer)
    assert isinstance(forbidden.try_node("n1"), NoAnswer)
    assert forbidden.partition_gpus(None) is None and forbidden.node_state("n1") == "unknown"
    with pytest.raises(EnvironmentNotAble, match="cannot be started"):
        forbidden.call("sbatch")


def test_a_command_that_hangs_is_ended_with_its_children(tmp_path: Path) -> None:
    """A wrapper script's child holds the pipe: killing the wrapper alone would wait for the child."""
    slurm = stub(tmp_path, scontrol=f"sleep 120 & echo $! > {tmp_path}/child; wait")
    began = time.monotonic()
    found = slurm.try_job("7")
    assert isinstance(found, NoAnswer) and "within 10 s" in found.reason
    assert time.monotonic() - began < 60, "not until the child ends by itself"
    status = Path("/proc") / (tmp_path / "child").read_text().strip() / "status"
    deadline = time.monotonic() + 10
    while alive(status):
        assert time.monotonic() < deadline, "the child was left running"
        time.sleep(0.05)


def alive(status: Path) -> bool:
    try:
        return "State:\tZ" not in status.read_text()
    except OSError:
        return False


@pytest.mark.parametrize(
    ("recorded", "said"),
    [
        ("22.05-job-killed", "FAILED (JobLaunchFailure, the batch script was killed by signal 9 (SIGKILL))"),
        ("22.05-job-failed", "FAILED (NonZeroExitCode, exit code 3)"),
        ("22.05-job-completed", "COMPLETED"),
        ("24.11-job-out-of-memory", "OUT_OF_MEMORY (OutOfMemory)"),
    ],
)
def test_how_a_job_ended(tmp_path: Path, recorded: str, said: str) -> None:
    assert stub(tmp_path, scontrol=saying(tmp_path, text(recorded))).end_reason("7") == said


@pytest.mark.parametrize(
    ("sacct", "said"),
    [
        (("CANCELLED by 2001|0:15\n", 0, ""), "CANCELLED (by user id 2001, the batch script was killed by signal 15 (SIGTERM))"),
        (("COMPLETED|0:0\n", 0, ""), "COMPLETED"),
        ((DISABLED, 1, ">&2"), "unknown"),
        ((DISABLED, 0, ""), "unknown"),
        (("", 0, ""), "unknown"),
        (None, "unknown"),
    ],
)  # fmt: skip
def test_a_job_that_scontrol_has_forgotten_is_looked_up_where_there_is_accounting(
    tmp_path: Path, sacct: tuple[str, int, str] | None, said: str
) -> None:
    scripts = {"scontrol": saying(tmp_path, NOT_KNOWN, 1, ">&2")}
    if sacct is not None:
        scripts["sacct"] = saying(tmp_path, sacct[0], sacct[1], sacct[2])
    assert stub(tmp_path, **scripts).end_reason("7") == said
