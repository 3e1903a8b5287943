"""Failures of the field notes on two real ranks: what torch says, that diagnose names it, and what allranks does."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from allranks.analysis.diagnose import diagnose
from tests.conftest import REPO

PROGRAM = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "tests.dist.failures_a"]


@pytest.fixture(scope="module")
def happened(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, str]]]:
    """The folder with the program's output, and what each rank raised: everything happens in one start of two ranks."""
    folder = tmp_path_factory.mktemp("failures")
    env = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}  # torchrun is to warn of it
    env |= {"GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": f"{REPO}:{os.environ.get('PYTHONPATH', '')}"}
    command = [sys.executable, *PROGRAM, str(folder)]
    done = subprocess.run(command, env=env, cwd=REPO, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    (folder / "job.out").write_text(done.stdout + done.stderr)
    return folder, [json.loads((folder / f"rank{rank}.json").read_text()) for rank in (0, 1)]


def named(happened: tuple[Path, list[dict[str, str]]], what: str) -> tuple[Any, list[str]]:
    """The only finding of both ranks' tracebacks as they would stand in their logs."""
    folder = happened[0] / what
    folder.mkdir()
    texts = [rank[what] for rank in happened[1]]
    for rank, text in enumerate(texts):
        (folder / f"n1.rank{rank}.log").write_text(text)
    (finding,) = diagnose([folder]).findings
    return finding, texts


def test_reentrant_checkpointing_is_named_and_a_model_of_allranks_is_not_struck(happened: Any) -> None:
    found, texts = named(happened, "ready_twice")
    assert all("marked as ready twice" in text for text in texts) and found.id == "ddp_ready_twice"
    assert [rank["ours"] for rank in happened[1]] == ["", ""]


def test_mixed_dtypes_in_the_old_fsdp_are_named(happened: Any) -> None:
    found, texts = named(happened, "mixed_dtypes")
    assert all("uniform dtype" in text for text in texts) and found.id == "fsdp_mixed_dtype"


def test_memory_that_ends_in_the_first_optimizer_step_is_named_as_that(happened: Any) -> None:
    found, texts = named(happened, "optimizer_step")
    assert all("exp_avg_sq" in text and "in step" in text for text in texts), "it died elsewhere"
    assert found.id == "host_oom" and "optimizer's step" in found.cause


def test_real_warnings_of_a_healthy_run_are_no_failure(happened: Any) -> None:
    found = diagnose([happened[0] / "job.out"])
    assert found.findings == []
    assert {b.id for b in found.benign} >= {"omp_threads", "unused_parameters_search", "deprecation_warning"}
