"""The judgement of a comparison, apart from running one: gates, the fitted model, what is written."""

from __future__ import annotations

import csv
import gzip
import io
import json
from pathlib import Path
from typing import Any

import pytest

from allranks.errors import SpecError
from allranks.experiments.compare import add_profiles, comparison_request, finished_comparison, write_comparison
from allranks.experiments.conclusions import recommend_strategy
from allranks.experiments.gates import compare_traffic, evaluate_strategies, tokens_per_s, trial_limits
from allranks.experiments.output import comparison_page, csv_text
from allranks.rundir.paths import RunDir
from allranks.spec import parse_spec

WINDOW = {
    "step_s": 0.1, "compute_s": 0.07, "comm_s": 0.02, "overlapped_comm_s": 0.01, "exposed_comm_s": 0.01, "idle_s": 0.02,
}  # fmt: skip
ONE = {"kind": "all_reduce", "phase": "backward", "count": 3, "bytes": 300}


STEP = {"rows": "a", "tokens": 20, "tokens_trained": 10}
NEAR = {"error": 1e-6, "norm_error": 1e-6, "loss_error": 1e-6}


def trial(steps: int, accum: int = 1) -> dict[str, Any]:
    """What one rank tells of one trial, all well."""
    return {**NEAR, "ranks_differ": 0.0, "micro_batches": steps * accum, "work": [STEP] * steps}


def rank(**changes: Any) -> dict[str, Any]:
    """What one rank tells of one strategy, all well."""
    verified = {
        **trial(6), "updates": 6, "claims_overlap": True, "expected": [ONE],
        "measured": [{**ONE, "count": 3.0, "bytes": 300.0}],
        "memory": {"weights_bytes": 10, "gradients_bytes": 10, "optimizer_bytes": 20, "peak_bytes": 90},
        "window": {**WINDOW, "collectives": [["all_reduce", 100, 0.001], ["all_reduce", 200, 0.002]]},
    }  # fmt: skip
    uneven = trial(5, accum=3)
    repeat = {
        **trial(5),
        "tokens": [20, 20, 20],
        **{p: [0.1, 0.1, 0.1] for p in ("step_time_s", "data_s", "forward_s", "backward_s", "optimizer_s")},
    }
    parts = {"uneven": uneven, "timed": repeat}
    for key, value in changes.items():
        kind, _, name = key.rpartition("__")
        parts.get(kind, verified)[name] = value
    return {"failed": changes.get("failed"), "verified": verified, "uneven": uneven, "repeats": [repeat]}


def measured(ranks: list[dict[str, Any]], **changes: Any) -> dict[str, Any]:
    return {
        "world_size": 2, "nodes": 1, "device": "cpu", "dtype": "float32", "model": "tiny:llama", "parameters": 100, "trained_bytes": 400,
        "grad_accum": 1, "global_batch_size": 2, "steps": 3, "warmup_steps": 2, "verify_steps": 6, "repeats": 1, "reference_s": 1.0,
        "negative_control": {"error": 0.5, "ranks_differ": 0.1}, "ranks": ranks, "uneven_accum": 3, "uneven_clip_norm": 0.02,
        "references": {
            kind: {"problem": None, "spread": NEAR, "norms": [1.0] * steps, "planned": [[STEP] * steps] * 2}
            for kind, steps in (("verified", 6), ("uneven", 5), ("timed", 5))
        },
        **changes,
    }  # fmt: skip


def both(name: str = "bucket_ddp_async", **changes: Any) -> dict[str, Any]:
    return measured([{"simple_ddp": rank(), name: rank(**changes)} for _ in range(2)])


def test_a_row_that_passes_all_gates_has_figures() -> None:
    row = evaluate_strategies(both())[1]
    assert row.gates.passed and row.figures is not None
    assert row.figures["tokens_per_s"]["median"] == pytest.approx(2 * 60 / 0.3)
    assert row.figures["overlap"] == 0.5
    assert row.figures["memory"]["state_bytes"] == 40


@pytest.mark.parametrize(
    ("changes", "gate", "words"),
    [
        ({"error": 3e-5}, "parity", "in verification the weights after 6 steps"),
        ({"error": float("nan")}, "parity", "from those of one process"),
        ({"error": None}, "parity", "from those of one process"),
        ({"uneven__error": 3e-5}, "parity", "in the uneven trial the weights after 5 steps"),
        ({"timed__error": 3e-5}, "parity", "in repeat 1 the weights after 5 steps"),
        ({"norm_error": 1.0}, "parity", "missing division"),
        ({"norm_error": None}, "parity", "missing division"),
        ({"uneven__norm_error": 1e-4}, "parity", "missing division"),
        ({"loss_error": 1e-4}, "parity", "the loss differs"),
        ({"timed__loss_error": None}, "parity", "the loss differs"),
        ({"ranks_differ": 1e-9}, "parity", "ranks' weights differ"),
        ({"timed__ranks_differ": 1e-9}, "parity", "in repeat 1 the ranks' weights differ"),
        ({"measured": [{**ONE, "bytes": 600.0}]}, "mechanism", "600"),
        ({"measured": [{**ONE, "count": 6.0}]}, "mechanism", "6 calls"),
        ({"measured": [{**ONE, "phase": "after_backward"}]}, "mechanism", "0 calls"),
        ({"measured": [ONE, {**ONE, "kind": "broadcast"}]}, "mechanism", "unexpected"),
        ({"measured": []}, "mechanism", "0 calls"),
        ({"updates": 5}, "equal_work", "5 updates"),
        ({"micro_batches": 5}, "equal_work", "5 micro-batches"),
        ({"timed__micro_batches": 4}, "equal_work", "in repeat 1 rank 0 trained 4 micro-batches"),
        ({"uneven__micro_batches": 5}, "equal_work", "planned 15"),
        ({"timed__work": [STEP] * 4}, "equal_work", "4 steps of 5"),
        ({"work": [*[STEP] * 5, {**STEP, "rows": "b"}]}, "equal_work", "other rows in step 6"),
        ({"timed__work": [STEP, {**STEP, "tokens": 40}, *[STEP] * 3]}, "equal_work", "40 tokens in step 2"),
        ({"uneven__work": [*[STEP] * 4, {**STEP, "tokens_trained": 9}]}, "equal_work", "9 tokens_trained in step 5"),
        ({"failed": "rank 1: RuntimeError: no"}, "parity", "RuntimeError"),
    ],
)
def test_each_gate_can_shut(changes: dict[str, Any], gate: str, words: str) -> None:
    row = evaluate_strategies(both(**changes))[1]
    assert not getattr(row.gates, gate)
    assert row.figures is None
    assert words in "; ".join(row.reasons)


def test_a_negative_control_that_is_not_seen_to_be_wrong_shuts_every_row() -> None:
    found = evaluate_strategies({**both(), "negative_control": {"error": 1e-5, "ranks_differ": 0.0}})
    assert not any(row.gates.parity for row in found)


def with_reference(kind: str, **changes: Any) -> dict[str, Any]:
    found = both()
    found["references"] = {**found["references"], kind: {**found["references"][kind], **changes}}
    return found


def test_limits_follow_from_the_distance_of_two_honest_trainings() -> None:
    wide = with_reference("verified", spread={**NEAR, "error": 1e-5, "norm_error": 0.1})
    assert trial_limits(wide, "verified") == pytest.approx({"error": 5e-5, "norm_error": 0.5, "loss_error": 2e-5})
    assert trial_limits(wide, "timed")["error"] == pytest.approx(5e-5), "more steps of the same work"
    assert trial_limits(wide, "uneven") == dict.fromkeys(NEAR, 2e-5)
    assert trial_limits({**wide, "dtype": "bfloat16"}, "verified")["error"] == 0.02
    assert trial_limits({**wide, "param_dtype": "bfloat16"}, "verified")["error"] == 0.02


@pytest.mark.parametrize(
    ("kind", "changes", "words"),
    [
        ("verified", {"spread": {**NEAR, "error": 2e-3}}, "nothing can be proved"),
        ("timed", {"spread": {**NEAR, "error": None}}, "nothing can be proved"),
        ("uneven", {"norms": [1.0, 0.03]}, "does not clip"),
        ("verified", {"problem": "sequence 3 was prepared with other tokens"}, "not those of the spec: sequence 3"),
    ],
)
def test_a_reference_that_proves_nothing_shuts_every_row(kind: str, changes: dict[str, Any], words: str) -> None:
    for row in evaluate_strategies(with_reference(kind, **changes)):
        assert not row.gates.parity and words in row.reasons[0]


def test_overlap_that_is_claimed_and_not_shown_is_marked() -> None:
    row = evaluate_strategies(both(window={**WINDOW, "overlapped_comm_s": 0.0, "collectives": []}))[1]
    assert row.gates.passed and "expected to overlap" in "; ".join(row.marks)


def test_a_library_may_choose_its_messages_but_not_their_bytes() -> None:
    free = [{**ONE, "count": None}]
    assert compare_traffic(free, [{**ONE, "count": 7.0}]) is None
    assert compare_traffic(free, [{**ONE, "bytes": 330.0}])
    gathers = [
        {"kind": "all_gather", "phase": p, "count": None, "bytes": b} for p, b in (("forward", 100), ("backward", 80))
    ]
    seen = [
        {"kind": "all_gather", "phase": p, "count": 1.0, "bytes": b}
        for p, b in (("forward", 120.0), ("backward", 60.0))
    ]
    assert compare_traffic(gathers, seen) is None, "a prefetch moves bytes from one phase to the other"


def test_tokens_are_over_the_slowest_rank() -> None:
    ranks = [{"tokens": [10], "step_time_s": [0.1]}, {"tokens": [10], "step_time_s": [0.2]}]
    assert tokens_per_s(ranks) == pytest.approx(100.0)


def write_trace(path: Path) -> None:
    """One profiled step of 100 us with one all-reduce of training."""

    def event(name: str, cat: str, tid: int, ts: float, dur: float, **args: Any) -> dict[str, Any]:
        return {"ph": "X", "name": name, "cat": cat, "pid": 1, "tid": tid, "ts": ts, "dur": dur, "args": args}

    sizes = {"Input Dims": [[10]], "Input type": ["float"]}
    events = [
        event("ProfilerStep#1", "user_annotation", 1, 0, 100), event("allranks.forward", "user_annotation", 1, 0, 38),
        event("aten::mm", "cpu_op", 1, 0, 38), event("allranks.backward", "user_annotation", 1, 39, 22),
        event("c10d::allreduce_", "cpu_op", 1, 40, 5, **sizes), event("aten::mm", "cpu_op", 1, 50, 10),
        event("gloo:all_reduce", "user_annotation", 2, 50, 30, **sizes),
        event("allranks.control", "user_annotation", 1, 85, 5), event("c10d::allreduce_", "cpu_op", 1, 86, 2, **sizes),
        event("gloo:all_reduce", "user_annotation", 2, 88, 2, **sizes),
        {"ph": "i", "name": "[memory]", "pid": 1, "tid": 1, "ts": 30, "s": "t",
         "args": {"Total Allocated": 500, "Device Type": 0, "Device Id": -1, "Addr": 1, "Bytes": 500}},
    ]  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))


def unprofiled(folder: Path, names: tuple[str, ...] = ("simple_ddp", "zero1"), **memory: int) -> dict[str, Any]:
    """What two ranks on a CPU write: no window, no peak of memory, and a trace of each strategy."""
    found = measured([{name: rank() for name in names} for _ in range(2)])
    for r, one in enumerate(found["ranks"]):
        for name in names:
            one[name]["verified"].pop("window")
            one[name]["verified"]["before_bytes"] = 40
            one[name]["verified"]["memory"]["peak_bytes"] = memory.get("peak_bytes", 0)
            write_trace(folder / name / "traces" / f"rank{r}.json.gz")
    return found


def test_profiles_give_windows_and_the_peak_of_memory(tmp_path: Path) -> None:
    found = unprofiled(tmp_path)
    add_profiles(tmp_path, found)
    for one in found["ranks"]:
        verified = one["zero1"]["verified"]
        assert verified["window"]["comm_s"] == pytest.approx(32e-6)
        assert verified["memory"]["peak_bytes"] == 540, "what was held before, and the most that was allocated since"
        assert verified.keys() == rank()["verified"].keys()
    assert all(row.gates.passed for row in evaluate_strategies(found))
    found = unprofiled(tmp_path, peak_bytes=900)
    add_profiles(tmp_path, found)
    assert found["ranks"][1]["zero1"]["verified"]["memory"]["peak_bytes"] == 900, "a GPU's own peak counts"


@pytest.mark.parametrize("damage", ["no trace", "absent"])
def test_a_strategy_without_a_trace_fails_alone(tmp_path: Path, damage: str) -> None:
    found = unprofiled(tmp_path)
    trace = tmp_path / "zero1" / "traces" / "rank1.json.gz"
    trace.unlink()
    if damage == "no trace":
        trace.write_bytes(gzip.compress(b"{}"))
    add_profiles(tmp_path, found)
    good, bad = evaluate_strategies(found)
    assert good.gates.passed and good.figures
    assert not bad.gates.passed and bad.figures is None and bad.reasons[0].startswith(f"rank 1: {trace}: ")
    assert ("not a profiler trace" if damage == "no trace" else "No such file") in bad.reasons[0]
    recommend_strategy(found, [good, bad])


def test_what_is_written_is_whole_and_safe(tmp_path: Any) -> None:
    both_ = both(error=1.0)
    done = write_comparison(RunDir(tmp_path), {**both_, "model": "<script>alert(1)</script>"})
    assert not done.ok
    lines = list(csv.DictReader(io.StringIO((tmp_path / "comparison.csv").read_text())))
    assert [line["strategy"] for line in lines] == ["simple_ddp", "bucket_ddp_async"]
    assert lines[0]["tokens_per_s"] and not lines[1]["tokens_per_s"] and "parity" in lines[1]["reasons"]
    html = (tmp_path / "comparison.html").read_text()
    assert "<script>" not in html and "http" not in html.replace("http-equiv", "")
    assert csv_text(done.rows).count("\n") == 3 and comparison_page("x", done.measured, done.rows, [])
    assert done.document()["rows"][1]["tokens_per_s"] is None
    assert finished_comparison(RunDir(tmp_path)) is None, "without measured.json"
    (tmp_path / "compare").mkdir()
    (tmp_path / "compare" / "measured.json").write_text(json.dumps(done.measured))
    again = finished_comparison(RunDir(tmp_path))
    assert again is not None and [row.strategy for row in again.rows] == ["simple_ddp", "bucket_ddp_async"]


def test_requests_that_make_no_sense_are_refused() -> None:
    spec = parse_spec({"model": {"name": "tiny:llama"}, "data": {"source": "x"}})
    with pytest.raises(SpecError, match="did you mean 'zero"):
        comparison_request(spec, ["zero"], 1)
    with pytest.raises(SpecError, match="one process"):
        comparison_request(spec, ["single"], 1)
    with pytest.raises(SpecError, match="twice"):
        comparison_request(spec, ["zero1", "zero1"], 1)
