"""Public programs run unchanged; a fault in one is named by rank and reason, in the terminal and by diagnose."""

import json
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from allranks.rundir.files import read_json
from allranks.utils.machine import oom_kills
from tests.dist.harness import allranks, train
from tests.dist.public_programs import NEEDS, lay_out, plant

full = partial(pytest.param, marks=pytest.mark.full)
CGROUPS = Path("/sys/fs/cgroup/memory")
HOG = "hog = [torch.ones(%d) for _ in range(64)]"
# what is planted on rank 1: what the terminal says of it, the class and the words of diagnose
FAULTS: dict[str, tuple[str, str, str, str]] = {
    "exception": ("raise KeyError('tokens_17')", "failed: KeyError: 'tokens_17'", "application_error", "'tokens_17'"),
    "exit text": (
        "import sys; sys.exit('vocabulary does not match')",
        "failed: ended with exit code 1: vocabulary does not match",
        "application_error", "with the text 'vocabulary does not match'",
    ),
    "SIGSEGV": (
        "import ctypes; ctypes.string_at(0)", "failed: ended by SIGSEGV: in FOLDER/nanogpt/train.py:290 in <module>",
        "rank_died", "ended by SIGSEGV",
    ),
    "SIGKILL": (
        "import signal; os.kill(os.getpid(), signal.SIGKILL)",
        "failed: ended by SIGKILL, but not by the kernel's out-of-memory killer",
        "rank_died", "not by the kernel's out-of-memory killer",
    ),
    "endless loop": ("exec('while True: pass')", "stalled, it never joined", "collective_mismatch", "running"),
    "extra collective": (
        "torch.distributed.all_reduce(torch.ones(4))",
        "failed: ended by SIGABRT: the ranks are in different collectives",
        "collective_mismatch", "the ranks are in different collectives",
    ),
    "memory limit of the process": (
        f"import resource; resource.setrlimit(resource.RLIMIT_AS, (6 << 30, 6 << 30)); {HOG % (1 << 26)}",
        "failed: RuntimeError: [enforce fail at alloc_cpu.cpp",
        "host_oom", "can't allocate memory",
    ),
}  # fmt: skip


@pytest.fixture
def cgroup() -> Iterator[Path]:
    """A memory cgroup of 900 MiB. Processes that exceed it are ended by the kernel's own out-of-memory killer."""
    folder = CGROUPS / f"allranks-test-{os.getpid()}"
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"no memory cgroup (v1) can be made here: {error.strerror}")
    (folder / "memory.limit_in_bytes").write_text(str(900 << 20))
    yield folder
    folder.rmdir()


def end_of(tmp_path: Path, name: str, fault: str = "", **more: Any) -> tuple[Any, Any, list[dict[str, Any]]]:
    folder = tmp_path / "programs"
    spec = {"cluster": {"procs_per_node": 2}, **lay_out(name, folder), "run_root": str(tmp_path / "runs"), **more}
    if fault:
        plant(folder, fault)
    done, run = train(tmp_path, spec, limit_s=600)  # DeepSpeed builds an operation at its first use
    return done, run, json.loads(allranks("diagnose", "--json", str(run.root), cwd=tmp_path).stdout)["findings"]


@pytest.mark.full
@pytest.mark.parametrize("name", sorted(NEEDS))
def test_it_runs_unchanged_and_nothing_is_found(tmp_path: Path, name: str) -> None:
    done, run, findings = end_of(tmp_path, name)
    assert done.returncode == 0, done.stdout + done.stderr
    metrics = read_json(run.metrics)
    assert (metrics["status"], metrics["world_size"]) == ("succeeded", 2)
    steps = {"nanogpt": 40, "alpaca": 20, "trl": 20, "lightning": 16, "deepspeed": 20}
    assert metrics["steps"] == steps.get(name) and (metrics["train_loss_last"] is not None) == (name in steps)
    assert "not finite" not in done.stdout + done.stderr and findings == []


@pytest.mark.parametrize("name", [name if name == "exception" else full(name) for name in sorted(FAULTS)])
def test_a_fault_on_one_rank_is_named_by_rank_and_reason(tmp_path: Path, name: str) -> None:
    fault, said, kind, why = FAULTS[name]
    more = {"observe": {"hang_s": 5}} if name == "endless loop" else {}
    kills = oom_kills()
    done, _, (first, *_) = end_of(tmp_path, "nanogpt", fault, **more)
    if name == "SIGKILL" and oom_kills() != kills:
        pytest.skip("the kernel ended another process of this machine for lack of memory meanwhile")
    assert done.returncode == 1, done.stdout + done.stderr
    err = done.stderr.replace(str(tmp_path / "programs"), "FOLDER").replace(f" {os.uname().nodename} ", " HOST ")
    assert f"rank 1 on HOST {said}" in err
    assert (first["id"], first["rank"]) == (kind, 1), first
    assert why in first["cause"] + " ".join(e["text"] for e in first["evidence"])


def test_a_loss_that_becomes_nan_is_named_with_its_step(tmp_path: Path) -> None:
    """The program does not notice and ends with 0. Gradients are averaged, so no rank can be named."""
    done, run, (first, *others) = end_of(tmp_path, "nanogpt", "raw_model.lm_head.weight.data.fill_(float('nan'))")
    assert done.returncode == 0, done.stdout + done.stderr
    warning = "all 2 ranks succeeded, but the loss is not finite (NaN or infinite) from step 10 on, as the output of"
    assert f"{warning} rank 0 says" in " ".join(done.stderr.split())
    assert "-> nan (not finite)" in done.stdout
    metrics = read_json(run.metrics)
    assert (metrics["steps"], metrics["loss_not_finite"]) == (40, {"step": 10, "source": "log"})
    assert (first["id"], first["rank"], others) == ("loss_not_finite", None, [])
    assert "iter 10: loss nan" in first["cause"]


@pytest.mark.full
def test_lack_of_host_memory_is_told_from_a_kill(tmp_path: Path, cgroup: Path) -> None:
    """The kernel itself ends the rank, in a cgroup with a limit."""
    fault = f"open('{cgroup}/cgroup.procs', 'w').write(str(os.getpid())); {HOG % (1 << 24)}"
    done, _, (first, *_) = end_of(tmp_path, "nanogpt", fault)
    assert "ended by SIGKILL, and the kernel's out-of-memory killer has ended a process" in done.stderr
    assert (first["id"], first["rank"]) == ("host_oom", 1)
    assert "out-of-memory killer has ended a process" in first["cause"]
