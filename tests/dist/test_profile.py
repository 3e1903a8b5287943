"""``observe.profile`` on two gloo ranks: real traces of a real run."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from allranks.analysis.trace import analyse
from allranks.rundir.events import read_events
from allranks.rundir.paths import RunDir
from tests.conftest import tiny_spec, write_rows
from tests.dist.harness import stall_ranks, train

pytestmark = pytest.mark.dist


def run_with(tmp_path: Path, profile: dict[str, Any], **sections: Any) -> tuple[Any, RunDir]:
    write_rows(tmp_path / "rows.json", 60)
    spec = tiny_spec(tmp_path / "rows.json", tmp_path, observe={"profile": profile}, **sections)
    done, run = train(tmp_path, spec)
    assert done.returncode == 0, done.stdout + done.stderr
    return done, run


def load(path: Path) -> dict[str, Any]:
    return json.loads(gzip.decompress(path.read_bytes()))


LATE_S = 0.3


def test_each_rank_leaves_a_trace_with_all_that_analysis_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 is late with every batch, and the analysis of the traces says so."""
    stall_ranks(monkeypatch, "sleep_a_while:1:-1", LATE_S)
    done, run = run_with(tmp_path, {"wait": 2, "warmup": 1, "active": 2}, train={"max_steps": 8, "grad_accum": 2})
    assert run.traced_ranks() == [0, 1]
    for rank in (0, 1):
        document = load(run.trace_of(rank))
        told = document["distributedInfo"]
        assert (told["rank"], told["world_size"], told["backend"]) == (rank, 2, "gloo")
        assert {g["pg_desc"]: g["ranks"] for g in told["pg_config"]} == {
            "default_pg": [0, 1],
            "control": [0, 1],
            "checkpoint": [0, 1],
        }
        assert document["allranks"] == {
            "run": run.name, "attempt": 1, "rank": rank, "world_size": 2, "backend": "gloo", "device": "cpu",
            "strategy": "pytorch_ddp", "grad_accum": 2,
        }  # fmt: skip
        names = [e["name"] for e in document["traceEvents"] if e.get("cat") == "user_annotation"]
        assert sorted(n for n in names if n.startswith("ProfilerStep")) == ["ProfilerStep#4", "ProfilerStep#5"]
        parts = {
            part: names.count(f"allranks.{part}") for part in ("data", "forward", "backward", "optimizer", "control")
        }
        assert parts == {"data": 4, "forward": 4, "backward": 4, "optimizer": 2, "control": 2}
        assert "gloo:all_reduce" in names
        assert any(n.startswith("allranks.module:") and n.endswith("q_proj") for n in names)
        (event,) = [e for e in read_events(run.events_of(rank)) if e["event"] == "trace"]
        assert (event["first_step"], event["last_step"], event["bytes"]) == (4, 5, run.trace_of(rank).stat().st_size)
    assert "allranks trace" in done.stdout
    (analysed,) = analyse([run.root])
    rows = {row.rank: row for row in analysed.stragglers}
    assert rows[1].max_late_s > 0.5 * LATE_S, rows
    assert rows[1].caused_wait_s > 2 * rows[0].caused_wait_s, rows
