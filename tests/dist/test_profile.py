"""``observe.profile`` on two gloo ranks: real traces of a real run."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from allranks.analysis.trace import analyse
from allranks.rundir.events import read_events
from tests.dist.harness import rows_spec, stall_ranks, train

pytestmark = pytest.mark.dist


LATE_S = 0.3


def test_each_rank_leaves_a_trace_with_all_that_analysis_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 is late with every batch, and the analysis of the traces says so."""
    stall_ranks(monkeypatch, "sleep_a_while:1:-1", LATE_S)
    profile = {"wait": 2, "warmup": 1, "active": 2}
    spec = rows_spec(tmp_path, observe={"profile": profile}, train={"max_steps": 8, "grad_accum": 2})
    done, run = train(tmp_path, spec, code=0)
    assert run.traced_ranks() == [0, 1]
    for rank in (0, 1):
        document = json.loads(gzip.decompress(run.trace_of(rank).read_bytes()))
        told = document["distributedInfo"]
        assert (told["rank"], told["world_size"], told["backend"]) == (rank, 2, "gloo")
        groups = {g["pg_desc"]: g["ranks"] for g in told["pg_config"]}
        assert groups == {name: [0, 1] for name in ("default_pg", "control", "checkpoint")}
        assert document["allranks"] == {
            "run": run.name, "attempt": 1, "rank": rank, "world_size": 2, "backend": "gloo", "device": "cpu",
            "strategy": "pytorch_ddp", "grad_accum": 2,
        }  # fmt: skip
        names = [e["name"] for e in document["traceEvents"] if e.get("cat") == "user_annotation"]
        assert sorted(n for n in names if n.startswith("ProfilerStep")) == ["ProfilerStep#4", "ProfilerStep#5"]
        parts = {"data": 4, "forward": 4, "backward": 4, "optimizer": 2, "control": 2}
        assert {part: names.count(f"allranks.{part}") for part in parts} == parts
        assert "gloo:all_reduce" in names
        assert any(n.startswith("allranks.module:") and n.endswith("q_proj") for n in names)
        (event,) = [e for e in read_events(run.events_of(rank)) if e["event"] == "trace"]
        assert (event["first_step"], event["last_step"], event["bytes"]) == (4, 5, run.trace_of(rank).stat().st_size)
    assert "allranks trace" in done.stdout
    (analysed,) = analyse([run.root])
    rows = {row.rank: row for row in analysed.stragglers}
    assert rows[1].max_late_s > 0.5 * LATE_S, rows
    assert rows[1].caused_wait_s > 2 * rows[0].caused_wait_s, rows
