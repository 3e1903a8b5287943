"""The judgement of a comparison, apart from running one: gates, ranges, conclusions, loads, output."""

import csv
import gzip
import io
import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from allranks.analysis.machine_load import load_of_hosts, load_records, loads_of_run, machine_notes, read_load
from allranks.analysis.metrics import own_time
from allranks.analysis.stragglers import StragglerDetector
from allranks.analysis.trace.rank import RankResult, read_rank
from allranks.cli.compare import show_comparison
from allranks.errors import SpecError
from allranks.experiments import compare, conclusions, gates
from allranks.experiments.output import csv_text, file_links, terminal_tables
from allranks.rundir.paths import RunDir
from allranks.spec import parse_spec
from tests.sampling import examples

WINDOW = {
    "step_s": 0.1, "compute_s": 0.07, "comm_s": 0.02, "overlapped_comm_s": 0.01, "exposed_comm_s": 0.01, "idle_s": 0.02,
}  # fmt: skip
ONE = {"kind": "all_reduce", "phase": "backward", "count": 3, "bytes": 300}
STEP = {"rows": "a", "tokens": 20, "tokens_trained": 10}
NEAR = {"error": 1e-6, "norm_error": 1e-6, "loss_error": 1e-6}


def trial(steps: int, accum: int = 1) -> dict[str, Any]:
    return {**NEAR, "ranks_differ": 0.0, "micro_batches": steps * accum, "work": [STEP] * steps}


def rank(**changes: Any) -> dict[str, Any]:
    verified = {
        **trial(6), "updates": 6, "claims_overlap": True, "expected": [ONE],
        "measured": [{**ONE, "count": 3.0, "bytes": 300.0}],
        "memory": {"weights_bytes": 10, "gradients_bytes": 10, "optimizer_bytes": 20, "peak_bytes": 90},
        "window": {**WINDOW, "collectives": [["all_reduce", 100, 0.001], ["all_reduce", 200, 0.002]]},
    }  # fmt: skip
    uneven = trial(5, accum=3)
    phases = ("step_time_s", "data_s", "forward_s", "backward_s", "optimizer_s")
    repeat = {**trial(5), "tokens": [20, 20, 20], **{phase: [0.1, 0.1, 0.1] for phase in phases}}
    parts = {"uneven": uneven, "timed": repeat}
    for key, value in changes.items():
        kind, _, name = key.rpartition("__")
        parts.get(kind, verified)[name] = value
    return {"failed": changes.get("failed"), "verified": verified, "uneven": uneven, "repeats": [repeat]}


def measured(ranks: list[dict[str, Any]], **changes: Any) -> dict[str, Any]:
    return {
        "world_size": 2, "nodes": 1, "device": "cpu", "dtype": "float32", "model": "tiny:llama", "parameters": 100,
        "trained_bytes": 400, "grad_accum": 1, "global_batch_size": 2, "steps": 3, "warmup_steps": 2, "verify_steps": 6,
        "repeats": 1, "reference_s": 1.0, "negative_control": {"error": 0.5, "ranks_differ": 0.1}, "ranks": ranks,
        "uneven_accum": 3, "uneven_clip_norm": 0.02,
        "references": {
            kind: {"problem": None, "spread": NEAR, "norms": [1.0] * steps, "planned": [[STEP] * steps] * 2}
            for kind, steps in (("verified", 6), ("uneven", 5), ("timed", 5))
        },
        **changes,
    }  # fmt: skip


def both(name: str = "bucket_ddp_async", **changes: Any) -> dict[str, Any]:
    return measured([{"simple_ddp": rank(), name: rank(**changes)} for _ in range(2)])


def test_a_row_that_passes_all_gates_has_figures() -> None:
    row = gates.evaluate_strategies(both())[1]
    assert row.gates.passed and row.figures is not None
    assert row.figures["tokens_per_s"]["median"] == pytest.approx(2 * 60 / 0.3)
    assert (row.figures["overlap"], row.figures["memory"]["state_bytes"]) == (0.5, 40)


@pytest.mark.parametrize(
    ("changes", "gate", "words"),
    [
        ({"error": 3e-5}, "parity", "in verification the weights after 6 steps"),
        ({"error": None}, "parity", "from those of one process"),
        ({"uneven__error": 3e-5}, "parity", "in the uneven trial the weights after 5 steps"),
        ({"timed__error": 3e-5}, "parity", "in repeat 1 the weights after 5 steps"),
        ({"norm_error": 1.0}, "parity", "missing division"),
        ({"uneven__norm_error": 1e-4}, "parity", "missing division"),
        ({"loss_error": 1e-4}, "parity", "the loss differs"),
        ({"timed__loss_error": None}, "parity", "the loss differs"),
        ({"ranks_differ": 1e-9}, "parity", "ranks' weights differ"),
        ({"timed__ranks_differ": 1e-9}, "parity", "in repeat 1 the ranks' weights differ"),
        ({"measured": [{**ONE, "bytes": 600.0}]}, "mechanism", "600"),
        ({"measured": [{**ONE, "count": 6.0}]}, "mechanism", "6 calls"),
        ({"measured": [{**ONE, "phase": "after_backward"}]}, "mechanism", "0 calls"),
        ({"measured": [ONE, {**ONE, "kind": "broadcast"}]}, "mechanism", "unexpected"),
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
    row = gates.evaluate_strategies(both(**changes))[1]
    assert not getattr(row.gates, gate) and row.figures is None and words in "; ".join(row.reasons)


def with_reference(kind: str, **changes: Any) -> dict[str, Any]:
    found = both()
    found["references"] = {**found["references"], kind: {**found["references"][kind], **changes}}
    return found


def test_limits_follow_from_the_distance_of_two_honest_trainings() -> None:
    wide = with_reference("verified", spread={**NEAR, "error": 1e-5, "norm_error": 0.1})
    assert gates.trial_limits(wide, "verified") == pytest.approx({"error": 5e-5, "norm_error": 0.5, "loss_error": 2e-5})
    assert gates.trial_limits(wide, "timed")["error"] == pytest.approx(5e-5), "more steps of the same work"
    assert gates.trial_limits(wide, "uneven") == dict.fromkeys(NEAR, 2e-5)
    assert gates.trial_limits({**wide, "dtype": "bfloat16"}, "verified")["error"] == 0.02
    assert gates.trial_limits({**wide, "param_dtype": "bfloat16"}, "verified")["error"] == 0.02


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
    for row in gates.evaluate_strategies(with_reference(kind, **changes)):
        assert not row.gates.parity and words in row.reasons[0]
    unseen = gates.evaluate_strategies({**both(), "negative_control": {"error": 1e-5, "ranks_differ": 0.0}})
    assert not any(row.gates.parity for row in unseen)


def test_overlap_that_is_claimed_and_not_shown_is_marked() -> None:
    row = gates.evaluate_strategies(both(window={**WINDOW, "overlapped_comm_s": 0.0, "collectives": []}))[1]
    assert row.gates.passed and "expected to overlap" in "; ".join(row.marks)


def test_a_library_may_choose_its_messages_but_not_their_bytes() -> None:
    free = [{**ONE, "count": None}]
    assert gates.compare_traffic(free, [{**ONE, "count": 7.0}]) is None
    assert gates.compare_traffic(free, [{**ONE, "bytes": 330.0}])

    def gathers(count: float | None, forward: float, backward: float) -> list[dict[str, Any]]:
        sent = {"kind": "all_gather", "count": count}
        return [{**sent, "phase": "forward", "bytes": forward}, {**sent, "phase": "backward", "bytes": backward}]

    moved = gates.compare_traffic(gathers(None, 100, 80), gathers(1.0, 120.0, 60.0))
    assert moved is None, "a prefetch moves bytes from one phase to the other"


def test_tokens_are_over_the_slowest_rank() -> None:
    ranks = [{"tokens": [10], "step_time_s": [0.1]}, {"tokens": [10], "step_time_s": [0.2]}]
    assert gates.tokens_per_s(ranks) == pytest.approx(100.0)


def event(name: str, thread: int, begin: float, duration: float) -> dict[str, Any]:
    kind = "cpu_op" if "::" in name else "user_annotation"
    args = {"Input Dims": [[10]], "Input type": ["float"]} if "all_reduce" in name or "allreduce" in name else {}
    times = {"ts": begin, "dur": duration, "args": args}
    return {"ph": "X", "name": name, "cat": kind, "pid": 1, "tid": thread, **times}


def write_trace(path: Path, events: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))
    return path


# One profiled step of 100 us with one all-reduce of training.
ONE_STEP = [
    event("ProfilerStep#1", 1, 0, 100), event("allranks.forward", 1, 0, 38), event("aten::mm", 1, 0, 38),
    event("allranks.backward", 1, 39, 22), event("c10d::allreduce_", 1, 40, 5), event("aten::mm", 1, 50, 10),
    event("gloo:all_reduce", 2, 50, 30), event("allranks.control", 1, 85, 5), event("c10d::allreduce_", 1, 86, 2),
    event("gloo:all_reduce", 2, 88, 2),
    {"ph": "i", "name": "[memory]", "pid": 1, "tid": 1, "ts": 30, "s": "t",
     "args": {"Total Allocated": 500, "Device Type": 0, "Device Id": -1, "Addr": 1, "Bytes": 500}},
]  # fmt: skip


def unprofiled(folder: Path, peak_bytes: int = 0) -> dict[str, Any]:
    """What two ranks on a CPU write: no window, no peak of memory, and a trace of each strategy."""
    names = ("simple_ddp", "zero1")
    found = measured([{name: rank() for name in names} for _ in range(2)])
    for r, one in enumerate(found["ranks"]):
        for name in names:
            verified = one[name]["verified"]
            del verified["window"]
            verified["before_bytes"], verified["memory"]["peak_bytes"] = 40, peak_bytes
            write_trace(folder / name / "traces" / f"rank{r}.json.gz", ONE_STEP)
    return found


def test_profiles_give_windows_and_the_peak_of_memory(tmp_path: Path) -> None:
    found = unprofiled(tmp_path)
    compare.add_profiles(tmp_path, found)
    for one in found["ranks"]:
        verified = one["zero1"]["verified"]
        assert verified["window"]["comm_s"] == pytest.approx(32e-6)
        assert verified["memory"]["peak_bytes"] == 540, "what was held before, and the most that was allocated since"
        assert verified.keys() == rank()["verified"].keys()
    assert all(row.gates.passed for row in gates.evaluate_strategies(found))
    found = unprofiled(tmp_path, peak_bytes=900)
    compare.add_profiles(tmp_path, found)
    assert found["ranks"][1]["zero1"]["verified"]["memory"]["peak_bytes"] == 900, "a GPU's own peak counts"


@pytest.mark.parametrize("damage", ["no trace", "absent"])
def test_a_strategy_without_a_trace_fails_alone(tmp_path: Path, damage: str) -> None:
    found = unprofiled(tmp_path)
    trace = tmp_path / "zero1" / "traces" / "rank1.json.gz"
    trace.unlink()
    if damage == "no trace":
        trace.write_bytes(gzip.compress(b"{}"))
    compare.add_profiles(tmp_path, found)
    good, bad = gates.evaluate_strategies(found)
    assert good.gates.passed and good.figures
    assert not bad.gates.passed and bad.figures is None and bad.reasons[0].startswith(f"rank 1: {trace}: ")
    assert ("not a profiler trace" if damage == "no trace" else "No such file") in bad.reasons[0]
    conclusions.recommend_strategy(found, [good, bad])


def test_requests_that_make_no_sense_are_refused() -> None:
    spec = parse_spec({"model": {"name": "tiny:llama"}, "data": {"source": "x"}})
    for names, words in ((["zero"], "did you mean 'zero"), (["single"], "one process"), (["zero1", "zero1"], "twice")):
        with pytest.raises(SpecError, match=words):
            compare.comparison_request(spec, names, 1)


PARTS = ("step_time_s", "forward_s", "backward_s", "optimizer_s")


def repeats(*step_s: float, share: float = 0.5) -> list[dict[str, Any]]:
    """Timed repeats whose steps all take the given seconds."""
    work = rank()["repeats"][0]
    return [{**work, **{p: [s * (1.0 if p == "step_time_s" else share)] * 3 for p in PARTS}} for s in step_s]


def three_repeats(scale: float = 1.0) -> dict[str, Any]:
    """Two ranks: repeats of 0.1, 0.3 and 0.2 s; the second takes 0.1 s longer, and holds and sends more."""
    first, second = rank(), rank()
    first["repeats"] = repeats(*(t * scale for t in (0.1, 0.3, 0.2)))
    second["repeats"] = repeats(*(t * scale for t in (0.2, 0.4, 0.3)))
    steps = [{"exposed_comm_s": exposed, "overlapped_comm_s": 0.02 - exposed} for exposed in (0.002, 0.018)]
    first["verified"]["window"]["steps"] = [{**WINDOW, **one} for one in steps]
    second["verified"]["memory"] = {**second["verified"]["memory"], "peak_bytes": 70, "optimizer_bytes": 16}
    return measured([{"zero1": first}, {"zero1": second}], repeats=3)


def figures_of(found: dict[str, Any]) -> dict[str, Any]:
    row = gates.evaluate_strategies(found)[0]
    assert row.figures is not None, row.reasons
    return row.figures


@pytest.mark.parametrize(
    ("name", "value", "least", "most", "samples"),
    [
        ("step_time_s", 0.25, 0.15, 0.35, 3),
        ("backward_s", 0.125, 0.075, 0.175, 3),
        ("tokens_per_s", 120 / 0.9, 120 / 1.2, 120 / 0.6, 3),  # over the slowest rank's seconds
        ("exposed_comm_s", 0.01, 0.002, 0.018, 3),
        ("exposed_share", 0.1, 0.02, 0.18, 3),
        ("overlap", 0.5, 0.1, 0.9, 3),
        ("peak_bytes", 90, 70, 90, 2),
        ("state_bytes", 40, 36, 40, 2),
    ],
)
def test_ranges_are_of_repeats_steps_or_ranks(name: str, value: float, least: float, most: float, samples: int) -> None:
    known = figures_of(three_repeats())
    spread = gates.find_spread(known, name)
    assert spread is not None
    assert (spread.value, spread.min, spread.max, spread.samples) == pytest.approx((value, least, most, samples))
    if name == "tokens_per_s":
        assert known[name] == {"median": spread.value, "min": spread.min, "max": spread.max}


def test_traces_give_the_times_of_each_step(tmp_path: Path) -> None:
    """Two steps of 100 and 200 us: the first waits 30 us for an all-reduce that the second hides."""
    events = [
        event("ProfilerStep#1", 1, 0, 100), event("aten::mm", 1, 0, 40), event("gloo:all_reduce", 2, 50, 30),
        event("ProfilerStep#2", 1, 100, 200), event("aten::mm", 1, 100, 180), event("gloo:all_reduce", 2, 150, 30),
    ]  # fmt: skip
    result = read_rank(write_trace(tmp_path / "rank0.json.gz", events))
    assert isinstance(result, RankResult)
    found = compare.trace_figures(result)
    by_step = {"step_s": (100e-6, 200e-6), "exposed_comm_s": (30e-6, 0.0), "overlapped_comm_s": (0.0, 30e-6)}
    for name, (first, second) in by_step.items():
        assert [step[name] for step in found["steps"]] == pytest.approx([first, second])
        assert found[name] == pytest.approx((first + second) / 2)


def test_a_window_that_contradicts_itself_has_no_shares() -> None:
    found = three_repeats()
    for one in found["ranks"]:
        one["zero1"]["verified"]["window"]["exposed_comm_s"] = 0.2
    known = figures_of(found)
    assert gates.find_spread(known, "exposed_share") is None and gates.find_spread(known, "idle_share") is not None
    parts = [table for table, _ in terminal_tables(gates.evaluate_strategies(found), found)][1]
    assert str(next(iter(parts.columns[4].cells))) == "-"


def test_tables_without_a_row_are_not_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = three_repeats()
    for rank in found["ranks"]:
        rank.update({name: {"failed": "rank 1: RuntimeError: no", "verified": {}, "repeats": []} for name in rank})
    done = compare.write_comparison(RunDir(tmp_path), found)
    assert show_comparison(done, as_json=False) == 1
    shown = capsys.readouterr().out
    assert "Speed" in shown and "Traffic per step" not in shown and "Memory per rank" not in shown, shown


def test_what_is_written_is_whole_and_safe(tmp_path: Path) -> None:
    found = {**three_repeats(), "model": "<script>alert(1)</script>"}
    for r in found["ranks"]:
        r["broken"] = {"failed": "rank 1: RuntimeError: no", "verified": {}, "repeats": []}
    done = compare.write_comparison(RunDir(tmp_path), found)
    good, bad = json.loads((tmp_path / "comparison.json").read_text())["rows"]
    assert good["spread"]["step_time_s"] == pytest.approx({"value": 0.25, "min": 0.15, "max": 0.35, "samples": 3})
    assert good["forward_s"] == pytest.approx(0.125) and good["step_time_s"].keys() == {"median", "p90"}
    assert not done.ok and bad["spread"] is None and bad["tokens_per_s"] is None
    good, bad = csv.DictReader(io.StringIO((tmp_path / "comparison.csv").read_text()))
    assert float(good["step_time_s_min"]) == pytest.approx(0.15) and float(good["overlap_max"]) == pytest.approx(0.9)
    assert good["peak_bytes_min"] == "70" and bad["peak_bytes_min"] == "" and "RuntimeError" in bad["reasons"]
    assert None not in good and None not in bad, "every line has as many cells as the head"
    html = (tmp_path / "comparison.html").read_text()
    assert "<script>" not in html and "http" not in html.replace("http-equiv", "")
    assert compare.finished_comparison(RunDir(tmp_path)) is None, "without measured.json"
    (tmp_path / "compare").mkdir()
    (tmp_path / "compare" / "measured.json").write_text(json.dumps(done.measured))
    again = compare.finished_comparison(RunDir(tmp_path))
    assert again is not None and [row.strategy for row in again.rows] == ["zero1", "broken"]


def test_a_figure_that_is_not_known_leaves_its_cells_empty() -> None:
    alone = {**WINDOW, "comm_s": 0.0, "overlapped_comm_s": 0.0, "exposed_comm_s": 0.0, "collectives": []}
    rows = gates.evaluate_strategies(measured([{"zero1": rank(window=alone)} for _ in range(2)]))
    (line,) = csv.DictReader(io.StringIO(csv_text(rows)))
    assert line["overlap"] == line["overlap_min"] == line["overlap_max"] == "" and line["reasons"] == ""


def test_a_name_cannot_lead_out_of_the_page(tmp_path: Path) -> None:
    name = "javascript:alert(1)"
    (tmp_path / "compare" / name).mkdir(parents=True)
    links = file_links(tmp_path, [name])
    assert links is not None and links.links[-1].href == "compare/javascript%3Aalert%281%29/"


PASSED = gates.Gates(parity=True, mechanism=True, equal_work=True)
SENT = [{"kind": "all_reduce", "count": 2, "bytes": 2e7}]


def figures(**changes: Any) -> dict[str, Any]:
    """Figures of a strategy on two ranks: 10 ms of a step of 100 ms are exposed."""
    comm = 0.01
    return {
        "tokens_per_s": {"median": 1000.0, "min": 950.0, "max": 1050.0}, "step_time_s": {"median": 0.1, "p90": 0.11},
        "profiled_step_s": 0.1, "comm_s": comm, "exposed_comm_s": comm, "idle_s": 0.0, "compute_s": 0.08,
        "overlap": 0.0, "collectives": SENT, "memory": {"peak_bytes": 1000, "state_bytes": 400}, **changes,
    }  # fmt: skip


def row(name: str, **changes: Any) -> gates.ComparisonRow:
    known = {"reasons": [], "marks": [], "parity_error": 0.0, "figures": figures(**changes)}
    return gates.ComparisonRow(strategy=name, gates=PASSED, **known)


def measured_of(rows: list[gates.ComparisonRow]) -> dict[str, Any]:
    known = {"verified": {"window": {"collectives": []}}, "repeats": [{"tokens": [50, 50]}]}
    return {"world_size": 2, "nodes": 1, "device": "cpu", "ranks": [{r.strategy: known for r in rows}] * 2}


def concluded(*rows: gates.ComparisonRow) -> str:
    return " ".join(conclusions.recommend_strategy(measured_of([*rows]), [*rows]))


def test_shares_are_of_the_profiled_step() -> None:
    """The timed step is shorter than a profiled one."""
    short = {"median": 0.01, "p90": 0.01}
    text = concluded(row("a", step_time_s=short, profiled_step_s=0.1, exposed_comm_s=0.0254, comm_s=0.0254))
    assert "25% of its profiled step is exposed communication" in text


NUMBER = st.floats(0, 1e9)


@settings(max_examples=examples(100), deadline=None)
@given(
    st.lists(
        st.fixed_dictionaries(
            {"low": NUMBER, "more": NUMBER, "step": st.floats(1e-6, 1e3), "profiled": NUMBER, "exposed": NUMBER,
             "overlap": st.none() | st.floats(0, 1), "peak": st.integers(0, 2**50), "state": st.integers(0, 2**50)}
        ),
        min_size=1, max_size=5,
    )
)  # fmt: skip
def test_whatever_is_measured_no_sentence_has_an_impossible_figure(given_figures: list[dict[str, Any]]) -> None:
    rows = [
        row(
            f"s{i}", tokens_per_s={"median": g["low"] + g["more"] / 2, "min": g["low"], "max": g["low"] + g["more"]},
            step_time_s={"median": g["step"], "p90": g["step"]}, profiled_step_s=g["profiled"],
            exposed_comm_s=g["exposed"], overlap=g["overlap"],
            memory={"peak_bytes": g["peak"], "state_bytes": g["state"]},
        )
        for i, g in enumerate(given_figures)
    ]  # fmt: skip
    words = concluded(*rows)
    assert "nan" not in words and "inf" not in words.replace("information", "")
    assert all(0 <= share <= 100 for share in [int(n) for n in re.findall(r"(\d+)% (?:of its|slower)", words)]), words


STEPS = 60
STEP_S = 0.1


def load(r: int, time: float, taken: float, **changes: Any) -> dict[str, Any]:
    """One second of a rank that wanted one of two cores and got ``1 - taken`` of it; others used the rest."""
    return {
        "event": "cpu_load", "rank": r, "time": time, "compute_threads": 1, "seconds": 1.0, "cores": "0-1",
        "core_count": 2, "cpu_s": 1 - taken, "queued_s": taken, "queued_main_s": taken, "busy_threads": 1,
        "machine_s": 2.0, "steal_s": 0.0, "throttled_s": None, **changes,
    }  # fmt: skip


def story(r: int, own: float, queued: float, taken: float, **changes: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [{"event": "start", "rank": r, "host": "n1", "world_size": 2, "time": 0.0}]
    for s in range(1, STEPS + 1):
        times = {"time": s * STEP_S, "own_s": own, "own_queued_s": queued, "step_time_s": STEP_S}
        found.append({"event": "step", "rank": r, "step": s, **times})
        if s % 10 == 0:
            found.append(load(r, s * STEP_S, taken, **changes))
    return found


def said(ranks: dict[int, list[dict[str, Any]]]) -> list[str]:
    listener = StragglerDetector()
    return [text for moment in zip(*ranks.values(), strict=True) for event in moment for text in listener.take(event)]


def test_a_rank_that_had_no_core_is_not_named_but_the_machine_is_once() -> None:
    ranks = {0: story(0, 0.02, 0.0, 0.5), 1: story(1, 0.08, 0.06, 0.5)}
    (text,) = said(ranks)
    assert text.startswith("n1 is overloaded: 49% of the CPU time of its ranks was taken (other processes used 1.0 of")
    assert text.endswith("no rank is called slow for it")
    found = own_time(ranks)
    assert found is not None and found["stragglers"] == []
    assert {r["rank"]: r["reason"] for r in found["ranks"]} == {0: None, 1: "machine"}
    known = [msgspec.structs.asdict(load) for load in loads_of_run(ranks)]
    notes = machine_notes({"own_time": found, "machine_load": known})
    assert notes == [text.replace("49%", "50%")]  # over a longer time the error of the clock is smaller


def test_a_slow_rank_on_a_loaded_machine_is_named_and_the_machine_too() -> None:
    texts = said({0: story(0, 0.02, 0.0, 0.5), 1: story(1, 0.08, 0.02, 0.5)})
    assert len(texts) == 2 and "rank 1 on n1 is slow: its own work (data and forward) takes 3.0 times" in texts[0]
    assert "n1 is overloaded" in texts[1]


def test_ranks_that_take_the_cores_from_each_other_are_told_apart_from_other_processes() -> None:
    ranks = {r: story(r, own, own - 0.02, 0.5, cpu_s=1.0, queued_s=3.0) for r, own in ((0, 0.02), (1, 0.08))}
    (text,) = said(ranks)
    assert text.startswith("the ranks on n1 compete for its cores: 75% of the CPU time that they want goes to each")
    assert "thread" not in text.lower(), "they have one each"
    several = {r: [{**e, "compute_threads": 4} if e["event"] == "cpu_load" else e for e in s] for r, s in ranks.items()}
    assert "busy threads" in said(several)[0] and "OMP_NUM_THREADS" in said(several)[0]


def test_a_slow_rank_is_named_only_once_its_load_is_known() -> None:
    """Torch's threads may have waited for a core; what the main thread measures does not show that."""
    alone = {r: [e for e in story(r, own, 0.0, 0.0) if e["event"] != "cpu_load"] for r, own in ((0, 0.02), (1, 0.08))}
    assert said(alone) == []
    several = {r: story(r, own, 0.0, 0.0, compute_threads=4, queued_s=0.8) for r, own in ((0, 0.02), (1, 0.08))}
    assert not any("is slow" in text for text in said(several))


def test_damaged_records_are_left_out() -> None:
    good = load(0, 1.0, 0.5)
    assert read_load(good) is not None
    damaged = {"seconds": (0, "x", float("inf")), "cpu_s": (None,), "time": (float("nan"),), "compute_threads": ("4",)}
    for key, values in damaged.items():
        assert [read_load({**good, key: value}) for value in values] == [None] * len(values)


def test_a_host_of_which_a_rank_reports_nothing_is_not_judged() -> None:
    """That rank's CPU time would count as that of other processes."""
    ranks = {0: story(0, 0.02, 0.0, 0.5), 1: story(1, 0.02, 0.0, 0.5)}
    assert load_of_hosts({0: load_records(ranks[0]), 1: []}, {0: "n1", 1: "n1"}) == []
    assert [m.host for m in loads_of_run(ranks)] == ["n1"]
    assert machine_notes({"machine_load": "x", "own_time": 3}) == []


def repeat(taken: float | None, speed: float = 1.0) -> dict[str, Any]:
    one = rank()["repeats"][0]
    use = {} if taken is None else {"load": {"host": "n1", **load(0, 0.0, taken, machine_s=2.0)}}
    return {**one, "step_time_s": [t / speed for t in one["step_time_s"]], **use}


def comparison(**repeats: list[dict[str, Any]]) -> dict[str, Any]:
    return measured([{name: {**rank(), "repeats": own} for name, own in repeats.items()} for _ in range(2)])


def rate(found: dict[str, Any], name: str) -> dict[str, Any]:
    row = next(r for r in gates.evaluate_strategies(found) if r.strategy == name)
    assert row.figures is not None, row.reasons
    return row.figures["tokens_per_s"]


def test_figures_are_of_the_undisturbed_repeats() -> None:
    found = comparison(zero1=[repeat(0.5, 0.4), repeat(0.0, 1.0), repeat(0.0, 1.1)], zero2=[repeat(0.0)])
    assert gates.counted_repeats(found, "zero1") == [1, 2]
    assert rate(found, "zero1") == {"median": pytest.approx(420), "min": pytest.approx(400), "max": pytest.approx(440)}
    known = gates.load_figures(found, "zero1")
    assert known["taken_share"] == pytest.approx(0.48, abs=0.03)
    assert known.items() >= {"repeats": 3, "counted": 2, "disturbed": 1, "undisturbed": True}.items()
    assert "1 of 3 repeats are not counted: the machine was overloaded" in gates.evaluate_strategies(found)[0].marks
    (text,) = gates.load_conclusions(found, ["zero1", "zero2"])
    assert "was overloaded in 1 of 4 timed repeats: on n1 up to" in text
    assert "other processes used 1.0 of 2 cores" in text and text.endswith("These repeats are not counted.")


def test_figures_of_an_overloaded_machine_alone_are_marked_first_of_all() -> None:
    found = comparison(zero1=[repeat(0.5, 0.4), repeat(0.5, 0.5)], zero2=[repeat(0.0)])
    assert rate(found, "zero1")["max"] == pytest.approx(200)
    rows = gates.evaluate_strategies(found)
    assert any("timed on an overloaded machine in all 2 repeats" in mark for mark in rows[0].marks)
    advice = conclusions.recommend_strategy(found, rows)
    assert "The figures of zero1 are those of an overloaded machine; repeat the comparison on an idle one." in advice[0]
    both = comparison(zero1=[repeat(0.5)], zero2=[repeat(0.5)])
    assert "All figures are those" in conclusions.recommend_strategy(both, gates.evaluate_strategies(both))[0]


def test_the_other_rank_is_no_other_process() -> None:
    """Two ranks that fill both cores: judged one at a time, each would be disturbed by the other."""
    busy = {"host": "n1", **load(0, 0.0, 0.0, cpu_s=0.95, queued_s=0.05, machine_s=1.98)}
    one = {**rank()["repeats"][0], "load": busy}
    assert gates.load_figures(comparison(zero1=[one]), "zero1")["disturbed"] == 0
    assert gates.load_figures(comparison(zero1=[{**one, "load": {"host": "n1"}}]), "zero1")["taken_share"] is None
