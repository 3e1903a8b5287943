"""Lines: emitter, severity, prefixes; logical lines that were wrapped; structured messages; remedies by family of
exception."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from allranks.analysis.diagnose import Diagnosis, diagnose
from allranks.analysis.diagnose.causes import HIGHEST, MEASURED, UNSURE_HIGHEST
from allranks.analysis.diagnose.causes.exceptions import FAMILIES, family_of
from allranks.analysis.diagnose.lines import EMITTERS, parse_line, strip_escapes


def of(tmp_path: Path, text: str, name: str = "a.log") -> Diagnosis:
    (tmp_path / name).write_text(text + "\n")
    return diagnose([tmp_path])


def ids(found: Diagnosis) -> list[str]:
    return [f.id for f in found.findings]


@pytest.mark.parametrize(
    ("text", "emitter", "severity"),
    [
        ("node-a:5:9 [0] misc/ibvwrap.cc:262 NCCL WARN Call to x failed", "nccl", "warning"),
        ("srun: error: node-b: task 3: Killed", "slurm_client", "error"),
        ("slurmstepd: error: *** JOB 1 ***", "slurm_daemon", "error"),
        ("[2026-01-02T10:00:00.123] error: Node n1 is bad", "slurm_daemon", "error"),
        ("Jan 11 02:17:44 node-c kernel: mlx5_core: Link is Down", "kernel", ""),
        ("[  12.345678] NVRM: Xid (PCI:0000:c1:00): 79", "kernel", ""),
        ("[rank3]:[E1218 20:27:21.426 ProcessGroupNCCL.cpp:629] x", "torch", "error"),
        ("torch.OutOfMemoryError: CUDA out of memory", "python", ""),
        ("E0301 10:00:05.123 139 torch/distributed/elastic/agent.py:8] failed", "launcher", "error"),
        ("libfabric:12:17:efa:cq:x():1<warn> Unresponsive receiver", "network_library", ""),
        ("/var/spool/slurmd/job1/slurm_script: line 4: python: command not found", "shell", ""),
        ("[node1:77] *** Process received signal ***", "mpi", ""),
        ("EI0006: Getting socket times out", "hccl", ""),
        ("x.py:3: UserWarning: something", "program", "warning"),
        ("loading model", "program", ""),
    ],
)
def test_emitter_and_severity(text: str, emitter: str, severity: str) -> None:
    line = parse_line(text, labelled=False).identified()
    assert (line.emitter, line.severity) == (emitter, severity)
    assert emitter in EMITTERS


@pytest.mark.parametrize(
    ("prefix", "rank", "host"),
    [
        ("[1,3]<stderr>:", 3, None),
        ("[rank2]: ", 2, None),
        ("2026-01-02T10:00:00.123456Z stderr F ", None, None),
        ("2026-01-02 10:00:00,123 - ERROR - ", None, None),
        ("[pod/worker-1/pytorch] ", None, "worker-1"),
        ("gpu-07: ", None, "gpu-07"),
        ("(TrainWorker pid=77, ip=10.0.0.3) ", None, "10.0.0.3"),
    ],
)
def test_prefixes_are_stripped_from_a_traceback(
    tmp_path: Path, prefix: str, rank: int | None, host: str | None
) -> None:
    lines = ["Traceback (most recent call last):", '  File "/w/a.py", line 3, in main', "KeyError: 'labels'"]
    found = of(tmp_path, "\n".join(prefix + line for line in lines))
    assert ids(found) == ["application_error"]
    assert "a.py:3 in main" in found.findings[0].cause
    assert (found.findings[0].rank, found.findings[0].host) == (rank, host)


@pytest.mark.parametrize(
    "raw",
    [
        b"\x1b[31m\x1b[1mred\x1b[0m",
        b"[31m[1mred[0m",
        rb"\x1b[31mred\x1b[0m",
        rb"\u001b[31mred\u001b[0m",
        b"^[[31mred^[[0m",
    ],
)
def test_escape_codes_are_removed_in_any_spelling(raw: bytes) -> None:
    assert strip_escapes(raw) == b"red"
    assert strip_escapes(b"x[3] took [5m] a[31]m") == b"x[3] took [5m] a[31]m"


@pytest.mark.parametrize(
    ("lines", "kind"),
    [
        (
            "n1:1:1 [0] misc/ibvwrap.cc:262 NCCL WARN\nCall to ibv_reg_mr failed with error Cannot allocate memory",
            "memlock_limit",
        ),
        ("[rank0]: torch.OutOfMemoryError: CUDA out of\n[rank0]: memory. Tried to allocate 2.00 GiB", "cuda_oom"),
        ("[rank0]: RuntimeError: CUDA error: invalid\n[rank1]: ok\n[rank0]: device ordinal", "invalid_device"),
        (
            "Error: Traceback (most recent call last):\\n  File \"x.py\", line 1, in f\\nKeyError: 'k'",
            "application_error",
        ),
    ],
)
def test_a_message_on_two_lines_is_read_as_one(tmp_path: Path, lines: str, kind: str) -> None:
    assert ids(of(tmp_path, lines))[:1] == [kind]


XID = "[ 10.5] NVRM: Xid (PCI:0000:c1:00): "


@pytest.mark.parametrize(
    ("line", "kind", "said"),
    [
        (f"{XID}79, pid=1, GPU has fallen off the bus.", "gpu_hardware_fault", "Xid 79"),
        (f"{XID}31, pid=1, MMU Fault", "gpu_application_fault", "Xid 31"),
        (f"{XID}45, pid=1, Ch 1 caused by previous Xid 149", "gpu_hardware_fault", "Xid 149"),
        (f"{XID}154, GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)",
         "gpu_hardware_fault", "Xid 154"),
        ("nvidia-nvswitch3: SXid (PCI:0000:86:00.0): 20034, Fatal, Link 30 LTSSM Fault Up",
         "gpu_hardware_fault", "SXid 20034"),
        ("Memory access fault by GPU node-4 on address 0x7f. Reason: Page not present.",
         "gpu_application_fault", "AMD"),
        ("[ERROR] HCCL EI0005: The arguments for collective communication are inconsistent between ranks.",
         "collective_mismatch", "EI0005"),
        ("4711.0 train OUT_OF_MEMORY 0:125", "host_oom", "OUT_OF_MEMORY"),
        ("Ranks 3, 5 failed to pass monitoredBarrier in 1000 ms", "collective_mismatch", "rank 3, 5"),
        ((
            "Timed out initializing process group in store based barrier on rank: 0, for key: k (world_size=16, "
            "worker_count=15, timeout=0:30:00)"
        ),
         "rendezvous_unreachable", "15 of 16"),
        ("mpirun noticed that process rank 2 with PID 7 on node n3 exited on signal 11 (Segmentation fault).",
         "rank_died", ""),
        ("['python', 'x.py'] exits with return code = -11", "rank_died", ""),
    ],
)  # fmt: skip
def test_structured_messages_are_read_by_their_fields(tmp_path: Path, line: str, kind: str, said: str) -> None:
    found = of(tmp_path, line)
    assert ids(found)[:1] == [kind]
    assert said in found.findings[0].cause


@pytest.mark.parametrize(
    ("said", "title"),
    [
        ("OSError: [Errno 24] Too many open files: '/x'", "too many open files"),
        ("RuntimeError: Error(s) in loading state_dict for Net:", "a checkpoint does not fit the model"),
        (
            "RuntimeError: CUDA error: no kernel image is available for execution on the device",
            "the GPU or the build does not support",
        ),
        ("RuntimeError: Error building extension 'fused_adam'", "an extension or a kernel could not be built"),
        ("TypeError: f() got an unexpected keyword argument 'x'", "versions of libraries do not fit"),
        ("ValueError: loss is nan at step 5", "a value is not finite"),
        ("FileNotFoundError: [Errno 2] No such file or directory: '/d'", "a file or folder is not there"),
    ],
)
def test_an_exception_gets_the_remedy_of_its_family(tmp_path: Path, said: str, title: str) -> None:
    family = family_of(said)
    assert family is not None
    assert family.title.startswith(title)
    assert all(len(text) > 30 for f in FAMILIES for text in (f.means, f.fix, f.next_test))
    error = of(tmp_path, "ValueError: loss is nan at step 5").findings[0]
    assert "not finite" in error.title
    assert "learning rate" in error.fix


def test_an_exception_that_python_ignores_is_none(tmp_path: Path) -> None:
    block = (
        'Exception ignored in: <function C.__del__ at 0x7f>\nTraceback (most recent call last):\n  File "/w/a.py", '
        "line 3, in __del__\nOddError: x"
    )
    assert of(tmp_path, block).verdict == "incomplete"
    assert ids(of(tmp_path, f"{block}\nTraceback (most recent call last):\nKeyError: 'k'")) == ["application_error"]


def test_the_highest_confidence_needs_the_emitter_and_no_contradiction(tmp_path: Path) -> None:
    sure = of(tmp_path, "[12.345678] Memory cgroup out of memory: Killed process 4174 (python)").findings[0]
    unsure = of(tmp_path, "it said: Memory cgroup out of memory: Killed process 4174 (python)").findings[0]
    assert UNSURE_HIGHEST < sure.confidence <= HIGHEST
    assert unsure.confidence <= UNSURE_HIGHEST
    assert all(0 <= hits <= answers for answers, hits in MEASURED.values())


def _run(root: Path, name: str, status: str, torch: str, hosts: list[str], lr: str) -> Path:
    run = root / name
    (run / "logs" / "attempt-1").mkdir(parents=True)
    (run / "events").mkdir()
    (run / "spec.yaml").write_text(f"name: demo\ntrain: {{lr: {lr}}}\n")
    (run / "plan.json").write_text(
        json.dumps(
            {
                "run_name": "demo",
                "nodes": [{"host": h} for h in hosts],
                "environment": [],
                **({"launcher": "slurm"} if status == "succeeded" else {}),
            }
        )
    )
    (run / "metrics.json").write_text(
        json.dumps({"status": status, "step_time_s": {"median": 0.1 if status == "succeeded" else 0.3}})
    )
    checks = [{"name": "torch", "found": torch}, {"name": "disk", "found": "75GiB"}]
    (run / "preflight.json").write_text(json.dumps([{"host": h, "checks": checks} for h in hosts]))
    (run / "events" / "rank0.jsonl").write_text(
        json.dumps({"event": "data", "train_hash": torch}, separators=(",", ":")) + "\n"
    )
    (run / "logs" / "attempt-1" / f"{hosts[0]}.rank0.log").write_text(
        "KeyError: 'x'\n" if status != "succeeded" else "step 1 loss 2\n"
    )
    return run


def test_changes_since_the_last_good_run_of_the_spec(tmp_path: Path) -> None:
    _run(tmp_path, "demo-1", "succeeded", "2.5", ["n1"], "1e-3")
    _run(tmp_path, "demo-2", "succeeded", "2.6", ["n1"], "9e-3")
    bad = _run(tmp_path, "demo-3", "failed", "2.6", ["n2"], "1e-3")
    found = diagnose([bad])
    assert found.last_good_run is not None
    assert (found.last_good_run.run, found.last_good_run.same_spec) == ("demo-1", True)
    told = {c.what: (c.before, c.now) for c in found.last_good_run.changes}
    assert told == {
        "version of torch": ("2.5", "2.6"),
        "nodes": ("n1", "n2"),
        "hash of the training data": ("2.5", "2.6"),
        "step time": ("0.100 s", "0.300 s"),
    }
    assert diagnose([tmp_path / "demo-2"]).last_good_run is None, "it did not fail"


@pytest.mark.parametrize(
    "line",
    [
        f"{XID}45, pid=77, name=python, Ch 00000010",
        f"{XID}154, GPU recovery action changed from 0x0 (None) to 0x0 (None)",
        "nvidia-nvswitch3: SXid (PCI:0000:86:00.0): 12028, Non-fatal, Link 31",
        "4711 train COMPLETED 0:0",
        "job ended with exit code 0",
    ],
)
def test_harmless_values_of_structured_messages_are_no_findings(tmp_path: Path, line: str) -> None:
    assert of(tmp_path, line).findings == []
