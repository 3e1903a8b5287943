"""A user's script in /tmp of the login side, of which each node has its own: refused by name, or staged and run."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from allranks.lab.cluster import Box
from allranks.rundir.files import read_json
from tests.cluster.helpers import on
from tests.cluster.runs import log_of, run

PROGRAM = """
import sys, torch, torch.distributed as dist
dist.init_process_group('gloo')
x = torch.ones(1)
dist.all_reduce(x)
print('sum', int(x), 'of', __file__, sys.argv[1:], flush=True)
dist.destroy_process_group()
"""


@pytest.fixture
def script() -> Iterator[Path]:
    with tempfile.NamedTemporaryFile("w", suffix=".py", prefix="allranks-own-", dir="/tmp") as file:
        file.write(PROGRAM)
        file.flush()
        yield Path(file.name)


def spec_of(script: Path, shared: Path, stage: str) -> dict[str, Any]:
    cluster = {"launcher": "slurm", "nodes": 2, "procs_per_node": 1, "cache": str(shared / "cache"), "stage": stage}
    return {
        "name": "own",
        "script": {"path": str(script), "args": ["x"]},
        "run_root": str(shared / "runs"),
        "cluster": cluster,
    }


def test_it_is_refused_where_nothing_may_be_staged(box: Box, shared: Path, script: Path) -> None:
    done, run_dir = run(shared, spec_of(script, shared, "never"))
    assert done.returncode == 3, done.stdout + done.stderr + log_of(run_dir)
    assert f"n1 does not see {script}" in done.stderr, done.stderr
    assert "put it on a file system shared by all nodes" in done.stderr
    assert "cluster.stage: auto" in done.stderr
    assert not run_dir.rank_logs(1)


def test_it_is_staged_alone_and_run(box: Box, shared: Path, script: Path) -> None:
    """n2 has an older file of the same name: only the content tells."""
    on(box, "n2", "sh", "-c", f"echo 'raise SystemExit(7)' > {script}")
    done, run_dir = run(shared, spec_of(script, shared, "auto"))
    assert done.returncode == 0, done.stdout + done.stderr + log_of(run_dir)
    for path in run_dir.rank_logs(1).values():
        said = path.read_text()
        assert "sum 2 of /tmp/allranks-" in said and f"/project/{script.name} ['x']" in said, said
    nodes = read_json(run_dir.stage)["nodes"]
    assert [[part["name"] for part in node["parts"] if part["staged"]] for node in nodes] == [["project"]] * 2
    (part,) = json.loads(run_dir.bundle.read_bytes())["parts"]
    assert part["files"] == 1
    packed = {path.name.split("-")[0] for path in (shared / "cache" / "allranks").glob("stage-*/*-*")}
    assert packed == {"project"}, "more was packed than a node lacked"
    for node in ("n1", "n2"):
        assert on(box, node, "sh", "-c", "ls -d /tmp/allranks-[0-9]* 2>/dev/null; true") == ""
    on(box, "n2", "rm", str(script))
