"""The generator against itself: what it writes is a well-formed trace, and says what the answer says."""

from __future__ import annotations

import gzip
import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from tests.tracegen import Scenario, generate

SCENARIOS = {
    "nccl": Scenario(memcpy=True, second_stream=True, second_group=True, slow={(3, 1): 900}),
    "gloo": Scenario(backend="gloo", world=3, memcpy=True),
    "rccl": Scenario(names="rccl", metadata="none", world=2),
}


def events(folder: Path, rank: int) -> list[dict[str, Any]]:
    return json.loads(gzip.decompress((folder / f"rank{rank}.json.gz").read_bytes()))["traceEvents"]


@pytest.mark.parametrize("name", SCENARIOS)
def test_events_of_one_thread_nest_and_never_cross(name: str, tmp_path: Path) -> None:
    generate(SCENARIOS[name], tmp_path)
    for rank in range(SCENARIOS[name].world):
        spans = [e for e in events(tmp_path, rank) if e["ph"] == "X"]
        spans.sort(key=lambda e: (str(e["pid"]), e["tid"], e["ts"], -e["dur"]))
        for _, thread in itertools.groupby(spans, key=lambda e: (e["pid"], e["tid"])):
            ends: list[float] = []
            for e in thread:
                while ends and ends[-1] <= e["ts"]:
                    ends.pop()
                assert not ends or e["ts"] + e["dur"] <= ends[-1], e
                ends.append(e["ts"] + e["dur"])


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_parts_of_a_step_add_up(name: str, tmp_path: Path) -> None:
    truth = generate(SCENARIOS[name], tmp_path)
    for step in truth.steps.values():
        assert step.compute + step.exposed_comm + step.memcpy_alone + step.idle == step.duration
        assert step.exposed_comm + step.overlapped_comm == step.comm
        assert min(step.compute, step.exposed_comm, step.overlapped_comm, step.idle) > 0


def test_who_comes_late_is_who_was_slow(tmp_path: Path) -> None:
    truth = generate(SCENARIOS["nccl"], tmp_path)
    late = [c for c in truth.collectives if c.last_rank is not None and c.group == "0"]
    assert [(c.step, c.last_rank, c.late_by) for c in late] == [(1, 3, 900)]
    assert late[0].waits[3] == 0 and late[0].waits[0] == 900


def test_clocks_move_what_is_written_and_not_what_is_true(tmp_path: Path) -> None:
    plain = generate(Scenario(world=2), tmp_path / "a")
    moved = generate(Scenario(world=2, offset_us={0: 500, 1: -3000}), tmp_path / "b")
    assert moved.steps == plain.steps and moved.collectives == plain.collectives
    assert moved.offset_us == {0: 0, 1: -3500}
    starts = {r: next(e["ts"] for e in events(tmp_path / "b", r) if e.get("cat") == "kernel") for r in (0, 1)}
    before = {r: next(e["ts"] for e in events(tmp_path / "a", r) if e.get("cat") == "kernel") for r in (0, 1)}
    assert {r: starts[r] - before[r] for r in (0, 1)} == {0: 500, 1: -3000}


def test_a_dropped_collective_and_an_absent_rank_are_in_the_answer(tmp_path: Path) -> None:
    truth = generate(Scenario(world=4, absent=frozenset({2}), dropped=(1, 0, 3)), tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["rank0.json.gz", "rank1.json.gz", "rank3.json.gz"]
    assert [set(c.missing) for c in truth.collectives[:4]] == [{2}, {2}, {2}, {1, 2}]
    kernels = [e for e in events(tmp_path, 1) if e.get("cat") == "kernel" and "nccl" in e["name"]]
    assert [e["args"]["Seq"] for e in kernels][:5] == [0, 1, 2, 4, 5]
