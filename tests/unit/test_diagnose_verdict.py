"""The verdict: failures are detected without any class, survived ones are remarks, and health needs evidence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from allranks.analysis.diagnose import Diagnosis, diagnose

STEPS = "\n".join(f"step {n}/900 loss 1.{n}" for n in range(20, 30))


def of(tmp_path: Path, text: str) -> Diagnosis:
    path = tmp_path / "a.log"
    path.write_text(text + "\n")
    return diagnose([path])


@pytest.mark.parametrize(
    ("line", "emitter"),
    [
        ("Traceback (most recent call last):", "python"),
        ("2026-01-02 10:00:00,123 - my.trainer - ERROR - giving up", "program"),
        ("node-a:7:9 [0] misc/socket.cc:57 NCCL WARN something new went wrong", "nccl"),
        ("srun: error: node-b: task 3: Exited with exit code 9", "slurm_client"),
        ("slurmstepd: error: container_p_join: open failed for something", "slurm_daemon"),
        ("subprocess.CalledProcessError: Command 'x' returned non-zero exit status 3.", "python"),
        (
            (
                "[2026-01-02 10:00:00,123] [ERROR] [launch.py:321:sigkill_handler] ['python', 'x'] exits with return "
                "code = 1"
            ),
            "launcher",
        ),
        ("/var/spool/slurmd/job9/slurm_script: line 12: 4711 Terminated   python x", "shell"),
        ("train.py FAILED\nRoot Cause (first observed failure):\n[0]:\n  exitcode  : 1 (pid: 7)", "launcher"),
        ("ray.exceptions.ActorDiedError: The actor died unexpectedly", "python"),
        ("[E1218 20:27:21.426415540 Something.cpp:12] an unknown thing", "torch"),
        ("4711 train gpu 8 FAILED 1:0", "program"),
    ],
)
def test_a_failure_of_no_class_is_unexplained_and_its_emitter_is_named(tmp_path: Path, line: str, emitter: str) -> None:
    found = of(tmp_path, f"{STEPS}\n{line}")
    assert (found.verdict, [f.id for f in found.findings]) == ("unexplained", [])
    assert found.unexplained is not None
    assert found.unexplained.emitter == emitter
    assert found.unexplained.evidence[0].text in line
    assert found.unexplained.read_next


@pytest.mark.parametrize("end", ["Training completed in 5 s", "{'train_runtime': 12.5, 'train_loss': 1.0}", STEPS])
def test_health_needs_progress_or_completion_at_the_end(tmp_path: Path, end: str) -> None:
    assert of(tmp_path, f"starting\n{end}").verdict == "healthy"
    later = "\n".join(f"reading shard {'abcdefgh'[n % 8] * (n % 50 + 1)}" for n in range(400))
    assert of(tmp_path, f"starting\n{end}\n{later}").verdict == "incomplete"


def test_what_a_logger_calls_a_warning_is_no_sign(tmp_path: Path) -> None:
    assert of(tmp_path, "[2026-01-02 10:00:00 WARNING] request timed out, retrying").verdict == "incomplete"
    assert of(tmp_path, "[2026-01-02 10:00:00 ERROR] request timed out").verdict == "unexplained"


def test_records_of_a_run_whose_ranks_succeeded_are_healthy(tmp_path: Path) -> None:
    ends = {"host": "n1", "failed": [], "succeeded": [{"rank": 0, "host": "n1", "exitcode": 0, "time": 1.7e9}]}
    (tmp_path / "n1.exit.json").write_text(json.dumps(ends, indent=2))
    (tmp_path / "n1.rank0.log").write_text("no progress is printed\n")
    assert diagnose([tmp_path]).verdict == "healthy"


@pytest.mark.parametrize(
    "line",
    [
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.00 GiB",
        "ERROR could not write the profile, going on",
        "KeyError: 'labels'",
        "ConnectionError: HTTPSConnectionPool(host='huggingface.co', port=443): Max retries exceeded",
    ],
)
def test_what_the_job_survived_is_a_remark(tmp_path: Path, line: str) -> None:
    assert of(tmp_path, f"{STEPS}\n{line}").verdict in ("found", "unexplained")
    found = of(tmp_path, f"{STEPS}\n{line}\nretrying\n{STEPS}")
    assert (found.verdict, found.findings) == ("healthy", [])


def test_one_more_step_of_another_rank_is_no_survival(tmp_path: Path) -> None:
    text = f"{STEPS}\n[rank1]: KeyError: 'labels'\nstep 31/900 loss 1.2"
    assert [f.id for f in of(tmp_path, text).findings] == ["application_error"]


@pytest.mark.parametrize(
    "line",
    [
        "NET/OFI configured attributes handshake completed",
        "process 12 reached the unreachable code path table",
        "RuntimeError: Invalid partition of the graph",
    ],
)
def test_a_class_is_not_named_by_a_part_of_a_word_or_by_another_emitter(tmp_path: Path, line: str) -> None:
    ids = [f.id for f in of(tmp_path, line).findings]
    assert not {"rdma_unreachable", "slurm_submit_rejected", "roce_gid_index"} & set(ids)
