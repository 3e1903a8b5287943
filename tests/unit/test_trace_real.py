"""The real traces beside the project, against a plain computation that shares nothing with the analysis."""

import gzip
import json
import math
from fractions import Fraction
from pathlib import Path

import pytest

from allranks.analysis.trace import analyse
from allranks.analysis.trace.records import TraceReport
from tests.conftest import shared

Spans = list[tuple[Fraction, Fraction]]
CPU, HOST = "cpu_gloo_rank34_of_300.json.gz", "no_gpu_kernels.json.gz"
GPU_TRACES = ("a100_nccl_rank0_of_2.json.gz", "mi250_rocm.json.gz")
GPU_TRACES = (*GPU_TRACES, "sampled_128rank/rank-0.json.gz", "sampled_128rank/rank-1.json.gz")


def union(spans: Spans) -> Fraction:
    total, end = Fraction(0), Fraction(-1)
    for a, b in sorted(spans):
        total += max(Fraction(0), b - max(a, end))
        end = max(end, b)
    return total


def plain(path: Path) -> tuple[dict[str, float], Spans]:
    """Sums over the whole trace in microseconds: unions of kernels by name, no more; the spans of compute kernels."""
    events = json.loads(gzip.decompress(path.read_bytes()), parse_float=Fraction)["traceEvents"]
    spans: dict[str, Spans] = {"comm": [], "compute": [], "copy": []}
    for e in events:
        if e.get("ph") == "X" and e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            what = "copy" if e["cat"] != "kernel" else "comm" if "nccl" in e["name"].lower() else "compute"
            spans[what].append((Fraction(e["ts"]), Fraction(e["ts"]) + Fraction(e["dur"])))
    out = {k: union(v) for k, v in spans.items()}
    out["overlapped"] = out["comm"] + out["compute"] - union(spans["comm"] + spans["compute"])
    out["busy"] = union(spans["comm"] + spans["compute"] + spans["copy"])
    return {name: float(time) for name, time in out.items()}, spans["compute"]


def only(path: Path) -> TraceReport:
    (report,) = analyse([path])
    return report


@pytest.mark.parametrize("name", GPU_TRACES)
def test_gpu_figures_are_those_of_a_plain_union(name: str) -> None:
    """Compute exactly: to what a 64-bit float can hold of times since 1970, of which a kernel has two."""
    path = shared("traces", *name.split("/"))
    (true, kernels), b = plain(path), only(path).ranks[0].total
    found = (b.compute_s, b.comm_s, b.overlapped_comm_s, b.compute_s + b.exposed_comm_s + b.copy_s)
    names = ("compute", "comm", "overlapped", "busy")
    assert [t * 1e6 for t in found] == [pytest.approx(true[name], rel=1e-6, abs=1e-3) for name in names]
    assert len(kernels) > 10 and abs(b.compute_s * 1e6 - true["compute"]) < 0.01  # one kernel that is missing is more
    assert abs(Fraction(b.compute_s * 1e6) - union(kernels)) <= len(kernels) * math.ulp(kernels[-1][1]) / 10


def test_ddp_on_two_a100() -> None:
    report = only(shared("traces", "a100_nccl_rank0_of_2.json.gz"))
    assert (report.device, report.backend, report.world_size, report.missing_ranks) == ("gpu", "nccl", 2, (1,))
    rank = report.ranks[0]
    assert [s.step for s in rank.steps] == [4, 5, 6]
    rows = {(r.step, r.kind, r.phase): (r.count, r.bytes) for r in report.launches}
    # ResNet-50's gradients in five buckets, and its buffers before forward
    assert rows == {
        (step, kind, phase): what
        for step in (4, 5, 6)
        for kind, phase, what in (("all_reduce", "backward", (5, 102_228_128)), ("broadcast", "forward", (2, 212_904)))
    }
    assert {p.phase for p in rank.phases if p.host_s > 0.01} == {"forward", "backward", "optimizer"}


def test_steps_that_do_not_cover_the_trace_are_said() -> None:
    report = only(shared("traces", CPU))
    assert (report.ranks[0].rank, report.world_size, len(report.missing_ranks)) == (34, 300, 299)
    assert any(p.kind == "outside_steps" for p in report.problems)
    assert {(r.kind, r.count, r.bytes) for r in report.launches} == {("all_reduce", 2, (321_271 + 2_082_411) * 4)}


def test_rocm_without_rank_and_with_an_empty_last_step() -> None:
    report = only(shared("traces", "mi250_rocm.json.gz"))
    assert {p.kind for p in report.problems} == {"no_rank", "empty_step"}
    assert report.ranks[0].total.overlap is None
    assert {p.phase: p for p in report.ranks[0].phases}["backward"].busy_s > 0


def test_a_trace_of_the_host_alone() -> None:
    report = only(shared("traces", HOST))
    assert report.device == "cpu" and not report.top_kernels
    assert report.ranks[0].total.compute_s > 0


def test_two_of_128_ranks_are_one_run() -> None:
    (report,) = analyse([shared("traces", "sampled_128rank")])
    assert [r.rank for r in report.ranks] == [0, 1]
    assert len(report.missing_ranks) == 126
    kinds = {r.kind for r in report.collectives}  # their kernels are all called SendRecv
    assert kinds == {"all_reduce", "all_gather", "all_to_all"}


def test_a_folder_of_unrelated_traces_gives_a_report_for_each() -> None:
    assert {r.name for r in analyse([shared("traces")])} == {name.split("/")[0] for name in GPU_TRACES} | {CPU, HOST}
