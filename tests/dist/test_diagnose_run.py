"""Real runs that fail: the rank that failed first is named, not those that only lost it; a healthy run gives nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from allranks.utils.machine import oom_kills
from tests.dist.harness import allranks, folders, write_spec

pytestmark = pytest.mark.dist

# Three ranks exchange sums; rank 2 falls out after the fifth.
PROGRAM = """
import os, resource, signal, sys, time
import torch, torch.distributed as dist
how = sys.argv[1]
dist.init_process_group("gloo")
x = torch.ones(4)
for step in range(8):
    dist.all_reduce(x)
    print(f"step {step} loss {1 / (step + 1):.3f}", flush=True)
    if step == 5 and dist.get_rank() == 2:
        if how == "exception":
            {"rows": 1}["labels"]
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "memory":
            resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
            torch.ones(4 << 30)
if how == "well":
    time.sleep(1.5)  # the agent looks at connections now and then
dist.destroy_process_group()
"""


def _run(tmp_path: Path, how: str) -> tuple[dict[str, Any], str, Path]:
    """The diagnosis of a run as JSON, as text, and its folder."""
    (tmp_path / "own.py").write_text(PROGRAM)
    spec = {
        "name": how, "script": {"path": str(tmp_path / "own.py"), "args": [how]}, "run_root": str(tmp_path / "runs"),
        "cluster": {"procs_per_node": 3, "timeout_s": 60},
    }  # fmt: skip
    done = allranks("run", str(write_spec(tmp_path, spec)), cwd=tmp_path)
    assert done.returncode == (0 if how == "well" else 1), done.stdout + done.stderr
    (folder,) = folders(tmp_path)
    found = allranks("diagnose", folder.name, "--json", cwd=tmp_path)
    shown = allranks("diagnose", folder.name, cwd=tmp_path)
    assert found.returncode == shown.returncode == (0 if how == "well" else 1), found.stderr
    return json.loads(found.stdout), shown.stdout, folder


@pytest.mark.parametrize(
    ("how", "kind", "said"),
    [
        ("exception", "application_error", "KeyError: 'labels'"),
        pytest.param("killed", "host_oom" if oom_kills() is None else "rank_died", "-9", marks=pytest.mark.full),
        pytest.param("memory", "host_oom", "DefaultCPUAllocator", marks=pytest.mark.full),
    ],
)
def test_the_rank_that_failed_first_is_named(tmp_path: Path, how: str, kind: str, said: str) -> None:
    found, shown, folder = _run(tmp_path, how)
    first = found["findings"][0]
    assert (first["id"], first["rank"]) == (kind, 2), found["findings"]
    (log,) = (folder / "logs" / "attempt-1").glob("*.rank2.log")
    assert first["host"] == log.name.split(".")[0]
    told = " ".join([first["cause"], *(e["text"] for e in first["evidence"])])
    assert said in told, first
    assert "rank 2 on host" in shown
    assert "Traceback" not in shown


@pytest.mark.full
def test_a_healthy_run_gives_no_finding_and_a_summary(tmp_path: Path) -> None:
    found, shown, _ = _run(tmp_path, "well")
    assert found["findings"] == []
    health = found["health"]
    assert health["ranks_seen"] == [0, 1, 2]
    assert list(health["transports"]) == ["TCP/lo"]
    assert found["verdict"] == "healthy"
    assert "No failure found" in shown
    assert "3 ranks" in shown
