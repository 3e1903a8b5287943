"""Lines: emitter, severity, prefixes; messages that were wrapped or are structured; families of exceptions."""

import json
import random
from pathlib import Path

import pytest

from allranks.analysis.diagnose import diagnose
from allranks.analysis.diagnose.causes import HIGHEST, UNSURE_HIGHEST
from allranks.analysis.diagnose.causes.exceptions import family_of
from allranks.analysis.diagnose.lines import EMITTERS, parse_line, strip_escapes
from allranks.analysis.diagnose.scanner import Scanner
from tests.unit.diagnose_examples import ids, of


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
        ("[default3]:[rank3]: ", 3, None),
        ("(TrainWorker pid=77, ip=10.0.0.3) ", None, "10.0.0.3"),
        ("Jan  2 10:00:00 gpu07 python[4711]: ", None, "gpu07"),
        ("  | 2026-01-02T10:00:00.123Z | ", None, None),  # of platforms that nothing here knows
        ("(worker1, rank=3, pid=2134) ", 3, None),
        ("trainer/0 local_rank=1 10:00:00.123 ", None, None),
    ],
)
def test_prefixes_of_a_traceback_are_stripped(tmp_path: Path, prefix: str, rank: int | None, host: str | None) -> None:
    lines = ["Traceback (most recent call last):", '  File "/w/a.py", line 3, in main', "KeyError: 'labels'"]
    found = of(tmp_path, "\n".join(prefix + line for line in lines))
    assert ids(found) == ["application_error"]
    assert "a.py:3 in main" in found.findings[0].cause
    assert (found.findings[0].rank, found.findings[0].host) == (rank, host)


@pytest.mark.parametrize(
    "form", ['{"log":%s,"stream":"stderr"}', '{"time":"2026-01-02T10:00:00Z","level":"%%s","message":%s}']
)
def test_lines_that_a_collector_wraps_in_json_are_read(tmp_path: Path, form: str) -> None:
    lines = ["Traceback (most recent call last):\n", '  File "/w/a.py", line 3, in main\n', "KeyError: 'labels'\n"]
    found = of(tmp_path, "\n".join((form % json.dumps(line)).replace("%s", "error") for line in lines))
    assert "a.py:3 in main" in found.findings[0].cause
    remark = (form % '"timed out, trying again"').replace("%s", "info")
    assert (of(tmp_path, remark).unexplained is None) == ("level" in form), "the level is kept"


@pytest.mark.parametrize("raw", [b"\x1b[31m\x1b[1m{}\x1b[0m", b"[31m{}[0m", rb"\u001b[31m{}\u001b[0m", b"^[[1m{}^[[0m"])
def test_escape_codes_are_removed_in_any_spelling(raw: bytes) -> None:
    assert strip_escapes(raw.replace(b"{}", b"red")) == b"red"
    assert strip_escapes(b"x[3] took [5m] a[31]m") == b"x[3] took [5m] a[31]m"


def test_the_name_of_an_interpreter_is_no_host() -> None:
    line = "python3: can't open file '/w/a.py': [Errno 2] No such file or directory"
    assert (parse_line(line, labelled=False).host, parse_line(f"n3: {line}", labelled=False).host) == (None, "n3")


XID, SXID = "[ 10.5] NVRM: Xid (PCI:0000:c1:00): ", "nvidia-nvswitch3: SXid (PCI:0000:86:00.0): "
RECOVERY = f"{XID}154, GPU recovery action changed from 0x0 (None) to"
EI0005 = "[ERROR] HCCL EI0005: The arguments for collective communication are inconsistent between ranks."
BARRIER = "Timed out initializing process group in store based barrier on rank: 0, for key: k (world_size=16, "
MPI = "mpirun noticed that process rank 2 with PID 7 on node n3 exited on signal 11 (Segmentation fault)."


@pytest.mark.parametrize(
    ("line", "kind", "said"),
    [
        (f"{XID}79, pid=1, GPU has fallen off the bus.", "gpu_hardware_fault", "Xid 79"),
        (f"{XID}31, pid=1, MMU Fault", "gpu_application_fault", "Xid 31"),
        (f"{XID}45, pid=1, Ch 1 caused by previous Xid 149", "gpu_hardware_fault", "Xid 149"),
        (f"{RECOVERY} 0x1 (GPU Reset Required)", "gpu_hardware_fault", "Xid 154"),
        (f"{SXID}20034, Fatal, Link 30 LTSSM Fault Up", "gpu_hardware_fault", "SXid 20034"),
        ("Memory access fault by GPU node-4 on address 0x7f. Reason: x.", "gpu_application_fault", "AMD"),
        (EI0005, "collective_mismatch", "EI0005"),
        ("4711.0 train OUT_OF_MEMORY 0:125", "host_oom", "OUT_OF_MEMORY"),
        ("Ranks 3, 5 failed to pass monitoredBarrier in 1000 ms", "collective_mismatch", "rank 3, 5"),
        (f"{BARRIER}worker_count=15, timeout=0:30:00)", "rendezvous_unreachable", "15 of 16"),
        (MPI, "rank_died", ""),
        ("['python', 'x.py'] exits with return code = -11", "rank_died", ""),
    ],
)
def test_structured_messages_are_read_by_their_fields(tmp_path: Path, line: str, kind: str, said: str) -> None:
    found = of(tmp_path, line)
    assert ids(found)[:1] == [kind]
    assert said in found.findings[0].cause


@pytest.mark.parametrize(
    ("said", "title"),
    [
        ("OSError: [Errno 24] Too many open files: '/x'", "too many open files"),
        ("RuntimeError: Error(s) in loading state_dict for Net:", "a checkpoint does not fit the model"),
        ("RuntimeError: CUDA error: no kernel image is available", "the GPU or the build does not support"),
        ("RuntimeError: Error building extension 'fused_adam'", "an extension or a kernel could not be built"),
        ("TypeError: f() got an unexpected keyword argument 'x'", "versions of libraries do not fit"),
        ("ValueError: loss is nan at step 5", "a value is not finite"),
        ("FileNotFoundError: [Errno 2] No such file or directory: '/d'", "a file or folder is not there"),
    ],
)
def test_an_exception_gets_the_remedy_of_its_family(tmp_path: Path, said: str, title: str) -> None:
    family = family_of(said)
    assert family is not None and family.title.startswith(title)
    error = of(tmp_path, "ValueError: loss is nan at step 5").findings[0]
    assert "not finite" in error.title and "learning rate" in error.fix


def test_an_exception_that_python_ignores_is_none(tmp_path: Path) -> None:
    trace = 'Traceback (most recent call last):\n  File "/w/a.py", line 3, in __del__\nOddError: x'
    block = f"Exception ignored in: <function C.__del__ at 0x7f>\n{trace}"
    assert of(tmp_path, block).verdict == "incomplete"
    assert ids(of(tmp_path, f"{block}\nTraceback (most recent call last):\nKeyError: 'k'")) == ["application_error"]


def test_the_highest_confidence_needs_the_emitter_and_no_contradiction(tmp_path: Path) -> None:
    sure = of(tmp_path, "[12.345678] Memory cgroup out of memory: Killed process 4174 (python)").findings[0]
    unsure = of(tmp_path, "it said: Memory cgroup out of memory: Killed process 4174 (python)").findings[0]
    assert unsure.confidence <= UNSURE_HIGHEST < sure.confidence <= HIGHEST


def _run(root: Path, name: str, status: str, torch: str, host: str) -> Path:
    good = status == "succeeded"
    checks = [{"name": "torch", "found": torch}, {"name": "disk", "found": "75GiB"}]
    plan = {"run_name": "demo", "nodes": [{"host": host}], "environment": [], **({"launcher": "slurm"} if good else {})}
    metrics = {"status": status, "step_time_s": {"median": 0.1 if good else 0.3}}
    files = {
        "spec.yaml": "name: demo\ntrain: {lr: 1e-3}",
        "plan.json": json.dumps(plan),
        "metrics.json": json.dumps(metrics),
        "preflight.json": json.dumps([{"host": host, "checks": checks}]),
        "events/rank0.jsonl": json.dumps({"event": "data", "train_hash": torch}, separators=(",", ":")),
        f"logs/attempt-1/{host}.rank0.log": "step 1 loss 2" if good else "KeyError: 'x'",
    }
    of(root / name, files)
    return root / name


def test_changes_since_the_last_good_run_of_the_spec(tmp_path: Path) -> None:
    _run(tmp_path, "demo-1", "succeeded", "2.5", "n1")
    other = _run(tmp_path, "demo-2", "succeeded", "2.6", "n1") / "spec.yaml"
    other.write_text(other.read_text().replace("1e-3", "9e-3"))
    last = diagnose([_run(tmp_path, "demo-3", "failed", "2.6", "n2")]).last_good_run
    assert last is not None and (last.run, last.same_spec) == ("demo-1", True)
    assert {c.what: (c.before, c.now) for c in last.changes} == {
        "version of torch": ("2.5", "2.6"),
        "nodes": ("n1", "n2"),
        "hash of the training data": ("2.5", "2.6"),
        "step time": ("0.100 s", "0.300 s"),
    }
    assert diagnose([tmp_path / "demo-2"]).last_good_run is None, "it did not fail"


# how a file is cut into blocks and in which order lines are searched does not change what is found

TELLING = (
    "[rank1]: KeyError: 'labels'",
    "[rank2]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.00 GiB",
    "node-a:7:9 [0] misc/socket.cc:57 NCCL WARN something new went wrong",
    "Training completed in 5 s",
)


def _lines(seed: int, *, unlike: bool) -> list[str]:
    """Return lines of text with failures and progress in between; `unlike` ones have words that no other line has."""
    rng, lines = random.Random(seed), []
    for n in range(3000):
        words = " ".join("".join(rng.choices("abcdefghij", k=6)) for _ in range(6)) if unlike else "reading the next"
        lines.append(f"[rank{n % 4}]: {words} {n}")
        if n % 7 == 0:
            lines.append(f"2026-01-02 10:{n // 60 % 60:02d}:{n % 60:02d} step {n}/9000 loss {rng.random():.3f}")
        if rng.random() < 0.01:
            lines.append(rng.choice(TELLING))
    return lines


@pytest.mark.parametrize("unlike", [True, False])
def test_the_size_of_blocks_does_not_change_what_is_found(unlike: bool) -> None:
    lines = _lines(3, unlike=unlike)
    made = []
    for size in (len(lines), 1, 150):  # many blocks, of which later ones are searched before they are split
        blocks = [("\n".join(lines[at : at + size]) + "\n").encode() for at in range(0, len(lines), size)]
        scan = Scanner().scan(0, ((block, True) for block in blocks))
        assert len(scan.signals) > 4 and scan.marks.keys() >= {0, 7, 21, 49}
        signals = [(s.kind, s.owner, s.line, s.rank, s.text) for s in scan.signals]
        progress = (scan.first_progress, scan.last_progress, scan.late_progress, scan.last_progress_text)
        made.append((signals, progress, scan.marks, scan.last_done, scan.lines))
    assert made[0] == made[1] == made[2]
