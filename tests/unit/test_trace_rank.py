"""Small traces whose figures can be read off by eye, of one rank and of several."""

from pathlib import Path
from typing import Any

import pytest

from allranks.analysis.trace import analyse
from allranks.analysis.trace.records import RankReport, TraceReport
from tests.unit import trace_builder
from tests.unit.trace_builder import AUTOGRAD, GLOO, Event, gloo, kernel, launch, mark, memory, nccl, op, span, step

RUNLOOPS = [trace_builder.thread(tid, f"thread {tid} (pt_gloo_runloop)") for tid in (GLOO, GLOO + 1)]


def report_of(tmp_path: Path, events: list[Event], **more: Any) -> TraceReport:
    (report,) = analyse([trace_builder.write(tmp_path / "rank0.json", events, **more)])
    return report


def rank_of(tmp_path: Path, events: list[Event], **more: Any) -> RankReport:
    return report_of(tmp_path, events, **more).ranks[0]


def times(rank: RankReport) -> dict[str, float]:
    b = rank.total
    names = ("span", "compute", "exposed_comm", "copy", "idle", "comm", "overlapped_comm", "copy_total")
    return {n: round(getattr(b, f"{n}_s") * 1e6, 3) for n in names}


# GPU


def test_streams_are_merged_and_annotations_and_synchronisation_are_no_work(tmp_path: Path) -> None:
    events = [
        step(1, 0, 1000), nccl("allreduce", 350, 600, 0),
        kernel("gemm", 100, 300, stream=7), kernel("gemm", 200, 400, stream=13),
        span("gpu_memcpy", "Memcpy DtoH", 550, 700, 7, 0), span("gpu_memset", "Memset", 300, 320, 7, 0),
        span("gpu_user_annotation", "nccl:all_reduce", 350, 900, 20, 0),
        span("gpu_user_annotation", "backward", 0, 1000, 7, 0),
        span("cuda_sync", "Context Sync", 400, 900, 7, 0), span("overhead", "Activity Buffer", 400, 900, 7, 0),
    ]  # fmt: skip
    rank = rank_of(tmp_path, events)
    assert times(rank) == {
        "span": 1000, "compute": 300, "exposed_comm": 200, "copy": 100, "idle": 400,
        "comm": 250, "overlapped_comm": 50, "copy_total": 170,
    }  # fmt: skip
    assert rank.total.overlap == pytest.approx(0.2)


def test_a_step_lasts_until_its_kernels_have_run_but_not_into_the_next(tmp_path: Path) -> None:
    events = [
        step(1, 0, 100), step(2, 110, 200),
        launch(1, 50), kernel("a", 90, 150, 1),
        launch(2, 150), kernel("b", 190, 260, 2),
    ]  # fmt: skip
    rank = rank_of(tmp_path, events)
    assert [(s.step, round(s.start_s * 1e6), round(s.end_s * 1e6)) for s in rank.steps] == [(1, 0, 110), (2, 110, 260)]
    assert [round(s.breakdown.compute_s * 1e6) for s in rank.steps] == [20, 110]


def test_collectives_take_size_group_and_place_from_metadata_and_launch(tmp_path: Path) -> None:
    events = [
        step(4, 0, 1000),
        trace_builder.thread(AUTOGRAD, "thread 101 (pt_autograd_0)"),
        launch(1, 100, AUTOGRAD),
        nccl(
            "_reduce_scatter_base", 110, 210, 0, 1, dtype="BFloat16", **{"In msg nelems": 4000, "Out msg nelems": 2000},
        ),
        mark("Optimizer.step#AdamW.step", 500, 700),
        launch(2, 600), nccl("_allgather_base", 610, 650, 1, 2, **{"In msg nelems": 2000, "Out msg nelems": 4000}),
        launch(3, 800), nccl("allreduce", 820, 830, 2, 3, elements=10),
    ]  # fmt: skip
    report = report_of(tmp_path, events)
    rows = [(r.kind, r.phase, r.count, r.bytes) for r in report.launches]
    kinds = (("all_gather", "optimizer"), ("all_reduce", "other"), ("reduce_scatter", "backward"))
    assert sorted(rows) == [(*kind, 1, size) for kind, size in zip(kinds, (16000, 40, 8000), strict=True)]
    row = next(r for r in report.collectives if r.kind == "reduce_scatter")
    assert row.group_size == 2
    assert row.algbw_bytes_s == pytest.approx(8000 / 100e-6)
    assert row.busbw_bytes_s == pytest.approx(8000 / 100e-6 / 2)


def test_a_kernel_that_tells_nothing_is_named_by_the_call_that_launched_it(tmp_path: Path) -> None:
    dims = {"in_dims": [[4096], [1024], [], []], "in_types": ["float", "float", "", "Scalar"]}
    events = [
        step(1, 0, 1000),
        op("c10d::_allgather_base_", 100, 140, **dims),
        op("record_param_comms", 105, 135, in_dims=[[], []], in_types=["", "Scalar"]),
        mark("nccl:_all_gather_base", 110, 130, in_dims=[[1024]], in_types=["float"]),
        launch(1, 120),
        kernel("ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclDevComm*, unsigned long, ncclWork*)", 200, 300, 1),
    ]  # fmt: skip
    (row,) = report_of(tmp_path, events).launches
    assert (row.kind, row.count, row.bytes) == ("all_gather", 1, 4096 * 4)


# CPU and gloo


def test_gloo_spans_are_named_by_their_calls(tmp_path: Path) -> None:
    events = [
        step(1, 0, 1000), *RUNLOOPS,
        *gloo("all_reduce", 10, 40, 60, [[[64]]]),
        *gloo("reduce_scatter", 20, 41, 70, [[16], [64]], GLOO + 1),
        *gloo("all_gather", 80, 90, 99, [[64], [16]]),
        *gloo("broadcast", 110, 120, 140, [[[7]]]),
        *gloo("reduce_scatter", 150, 160, 170, [[8], [32]]),
    ]  # fmt: skip
    report = report_of(tmp_path, events, world=4)
    told = {r.kind: (r.count, r.bytes) for r in report.launches}
    sums = {"all_reduce": (1, 256), "reduce_scatter": (2, 256 + 128), "all_gather": (1, 256), "broadcast": (1, 28)}
    assert told == sums
    by_kind = {r.kind: r for r in report.collectives}
    assert by_kind["reduce_scatter"].total_s == pytest.approx(39e-6)
    assert by_kind["all_reduce"].busbw_bytes_s == pytest.approx(256 / 20e-6 * 2 * 3 / 4)


NODE = "autograd::engine::evaluate_function"
RUNS = {"in_dims": [[9]], "in_types": ["float"]}
HOOK = [  # the node's span holds the hook's waiting; a sum over outermost operators would call it compute
    *RUNLOOPS, op(f"{NODE}: MmBackward0", 100, 300, sequence=1), op("aten::mm", 120, 290),
    op(f"{NODE}: torch::autograd::AccumulateGrad", 300, 800), op("torch::autograd::AccumulateGrad", 310, 790),
    op("aten::detach", 320, 330), op("c10d::allreduce_", 340, 360), mark("gloo:all_reduce", 370, 780, GLOO, **RUNS),
]  # fmt: skip
OTHER_THREAD = [  # the wait lasts longer than gloo's span
    op("aten::mm", 200, 400, AUTOGRAD), op("aten::addmm", 100, 250), op("_c10d_functional::wait_tensor", 500, 700),
    op("aten::copy_", 550, 560), mark("gloo:all_reduce", 300, 650, GLOO, **RUNS),
]  # fmt: skip
OWN_THREAD = [*RUNLOOPS, mark("gloo:all_reduce", 300, 650, GLOO, **RUNS), op("aten::copy_", 310, 600, GLOO)]


@pytest.mark.parametrize(
    ("events", "compute", "comm", "exposed"),
    [
        (HOOK, (340 - 100) + (370 - 360) + (800 - 780), 410, 410),
        (OTHER_THREAD, 300, 400, 300),
        (OWN_THREAD, 0, 350, 350),
    ],
    ids=["a hook that blocks in backward", "compute of another thread", "what gloo's threads run"],
)
def test_compute_and_communication(tmp_path: Path, events: Any, compute: int, comm: int, exposed: int) -> None:
    found = times(rank_of(tmp_path, [step(1, 0, 1000), *events]))
    assert (found["compute"], found["comm"], found["exposed_comm"]) == (compute, comm, exposed)


# phases


@pytest.mark.parametrize("style", ["## {} ##", "allranks.{}", "{}", None])
def test_phases_come_from_the_marks_of_the_program_or_of_the_profiler(tmp_path: Path, style: str | None) -> None:
    events = [
        step(1, 0, 2000),
        mark("enumerate(DataLoader)#_X.__next__", 10, 50), op("aten::stack", 20, 40),
        mark("DistributedDataParallel.forward", 100, 250), op("aten::linear", 100, 200),
        op("autograd::engine::evaluate_function: AddmmBackward0", 260, 400), op("c10d::allreduce_", 390, 395),
        mark("gloo:all_reduce", 396, 450, GLOO, in_dims=[[1]], in_types=["float"]),
        mark("Optimizer.step#SGD.step", 1400, 1800), op("aten::add_", 1410, 1700),
    ]  # fmt: skip
    parts = {"backward": (240, 500), "forward": (90, 230), "optimizer": (1390, 1810)}
    events += [mark(style.format(name), *span) for name, span in parts.items() if style]
    report = report_of(tmp_path, events)
    host = {p.phase: round(p.host_s * 1e6) for p in report.ranks[0].phases}
    assert host == (
        {"forward": 140, "backward": 260, "optimizer": 420, "data": 40, "other": 1140}
        if style
        else {"forward": 150, "backward": 140, "optimizer": 400, "data": 40, "other": 1270}
    )
    (backward,) = [p for p in report.ranks[0].phases if p.phase == "backward"]
    assert [r.phase for r in report.launches] == ["backward"] and round(backward.comm_s * 1e6) == 54


def test_kernels_belong_to_the_phase_of_their_launch_wherever_they_run(tmp_path: Path) -> None:
    events = [
        step(1, 0, 1000),
        mark("forward", 0, 100), mark("backward", 100, 200), mark("optimizer", 200, 300),
        launch(1, 50), kernel("f", 400, 500, 1),
        launch(2, 150), kernel("b", 500, 700, 2),
        launch(3, 250), kernel("o", 700, 730, 3),
    ]  # fmt: skip
    busy = {p.phase: round(p.busy_s * 1e6) for p in rank_of(tmp_path, events).phases}
    assert busy == {"forward": 100, "backward": 200, "optimizer": 30, "data": 0, "other": 0}


# modules, operators, memory


def test_operators_count_without_what_they_called(tmp_path: Path) -> None:
    spans = (("linear", 10, 60), ("addmm", 20, 50), ("copy_", 25, 30), ("linear", 70, 75))
    report = report_of(tmp_path, [step(1, 0, 100), *(op(f"aten::{name}", *times) for name, *times in spans)])
    rows = {r.name: (r.count, round(r.total_s * 1e6), round(r.max_s * 1e6)) for r in report.top_operators}
    assert rows == {"aten::linear": (2, 25, 20), "aten::addmm": (1, 25, 25), "aten::copy_": (1, 5, 5)}


def test_memory_keeps_its_peak_when_thinned(tmp_path: Path) -> None:
    events = [memory(i, i % 100, 10_000) for i in range(5000)]
    events += [step(1, 0, 6000), op("aten::mm", 1, 2), memory(2500.5, 7777), memory(3, 5, 0, 0)]
    rank = rank_of(tmp_path, events)
    gpu, cpu = ({m.device: m for m in rank.memory}[name] for name in ("gpu:0", "cpu"))
    assert (gpu.peak_bytes, gpu.last_bytes, gpu.peak_reserved_bytes, cpu.peak_bytes) == (7777, 99, 10_000, 5)
    assert max(size for _, size in gpu.points) == 7777 and len(gpu.points) <= 402


def test_what_happens_between_two_steps_belongs_to_neither(tmp_path: Path) -> None:
    """An evaluation between steps must not look like traffic of the step before."""
    events = [
        step(1, 0, 100), *gloo("all_reduce", 10, 20, 30, [[[64]]]),
        *gloo("broadcast", 120, 125, 130, [[[7]]]),
        step(2, 200, 300), *gloo("all_reduce", 210, 220, 230, [[[64]]]),
    ]  # fmt: skip
    told = {(r.step, r.kind): r.count for r in report_of(tmp_path, events).launches}
    assert told == {(1, "all_reduce"): 1, (2, "all_reduce"): 1}


def test_calls_of_communication_that_nothing_else_tells_of_are_said(tmp_path: Path) -> None:
    """A trace of a GPU run without its kernels shows that ranks talked, not what and how long."""
    events = [step(1, 0, 1000), op("aten::mm", 10, 60), op("record_param_comms", 100, 140)]
    report = report_of(tmp_path, events)
    (told,) = [p for p in report.problems if p.kind == "calls_only"]
    assert "record_param_comms" in told.message and not report.collectives
    assert not [p for p in report_of(tmp_path, events[:2]).problems if p.kind == "calls_only"]


# several ranks: pairing, clocks, profilers that start apart


def run(folder: Path, *ranks: list[Event]) -> TraceReport:
    (report,) = analyse([trace_builder.write_ranks(folder, *ranks, backend="nccl")], workers=1)
    return report


def told(report: TraceReport, kind: str) -> list[str]:
    return [p.message for p in report.problems if p.kind == kind]


def calls(*events: tuple[str, int]) -> list[Event]:
    """A step with collectives, 100 us apart, each of a kind and a sequence number."""
    return [step(1, 0, 1000), *(nccl(kind, 100 * seq, 100 * seq + 50, seq) for kind, seq in events)]


def test_the_first_numbers_of_a_later_profiler_and_other_collectives_of_a_number_are_not_paired(tmp_path: Path) -> None:
    early, late = (calls(*(("allreduce", i) for i in range(first, 8))) for first in (1, 3))
    report = run(tmp_path / "a", early, late)
    assert (report.pairing.paired, report.pairing.unpaired) == (5, 2)
    one, other = (calls(("allreduce", 1), (kind, 2)) for kind in ("allreduce", "_allgather_base"))
    report = run(tmp_path / "b", one, other)
    assert (report.pairing.paired, report.pairing.unpaired) == (1, 2)


@pytest.mark.parametrize(
    ("name", "sizes", "paired"),
    [
        # as in samples of a long run: the ranks' n-th need not be the same; uneven shares of one are paired
        ("alltoallv", [(1000, 80, 500), (900_000, 90, 700)], (2, 2)),
        ("all_gather", [(1000, 1000), (960, 960)], (2, 0)),  # accepts uneven sizes
        ("_allgather_base", [(1000, 1000), (960, 960)], (0, 4)),
        ("_reduce_scatter_base", [(1000, 1000), (960, 960)], (0, 4)),
    ],
)
def test_order_alone_pairs_what_can_be_one(tmp_path: Path, name: str, sizes: Any, paired: tuple[int, int]) -> None:
    ranks = [
        [step(1, 0, 1000), *(nccl(name, 100 * n, 100 * n + 50, None, elements=size) for n, size in enumerate(own, 1))]
        for own in sizes
    ]
    report = run(tmp_path, *ranks)
    assert (report.pairing.by_order, report.pairing.unpaired) == paired


def test_a_send_and_its_receive_are_one(tmp_path: Path) -> None:
    to = {"Src Rank": 0, "Dst Rank": 1, "Group size": 2}
    back = {"Src Rank": 1, "Dst Rank": 0, "Group size": 2}
    one = [step(1, 0, 1000), nccl("send", 100, 200, 0, **to), nccl("recv", 300, 420, 1, **back)]
    report = run(tmp_path, one, [step(1, 0, 1000), nccl("recv", 50, 200, 0, **to), nccl("send", 400, 420, 1, **back)])
    assert [p.kind for p in report.pairing.longest] == ["send_recv", "send_recv"]
    assert [r.last for r in sorted(report.stragglers, key=lambda r: r.rank)] == [1, 1]
    assert report.ranks[0].clock_pairs == 0, "a receive may end long after its send: no clock"


def test_clocks_are_aligned_along_a_chain_of_groups(tmp_path: Path) -> None:
    def group(members: str, start: float, end: float, seq: int) -> Event:
        return nccl("allreduce", start, end, seq, **{"Process Group Name": members, "Process Group Ranks": members})

    rows = [
        [step(1, 0, 1000), group("[0, 1]", 100, 200, 0)],
        [step(1, 50, 1050), group("[0, 1]", 150, 250, 0), group("[1, 2]", 350, 450, 0)],
        [step(1, -930, 70), group("[1, 2]", -600, -500, 0)],
    ]
    report = run(tmp_path, *rows)
    assert [round(r.clock_offset_s * 1e6) for r in report.ranks] == [0, 50, -900]
    assert report.pairing.unpaired == 0


def test_ranks_without_a_common_collective_keep_their_clocks_and_it_is_said(tmp_path: Path) -> None:
    report = run(tmp_path, [step(1, 0, 100), kernel("a", 10, 20)], [step(1, 30, 130), kernel("a", 40, 50)])
    assert len(told(report, "not_aligned")) == 1
    assert [round(r.start_s * 1e6) for r in report.ranks] == [0, 30]


def test_a_rank_whose_first_step_began_late_is_paired_from_its_end(tmp_path: Path) -> None:
    second = [step(2, 1000, 2000), *gloo("all_reduce", 1100, 1110, 1200, [[[8]]])]
    late = [step(2, 1000, 2000), *gloo("all_reduce", 1100, 1150, 1200, [[[8]]])]
    first = gloo("all_reduce", 10, 20, 120, [[[8]]])
    one = [step(1, 0, 1000), *first, *gloo("all_reduce", 200, 210, 300, [[[8]]]), *second]
    report = run(tmp_path, one, [step(1, 0, 1000), *gloo("all_reduce", 200, 280, 300, [[[8]]]), *late])
    (text,) = told(report, "missing_collective")
    assert "step 1, all_reduce of 32 B: rank 1 has 1, the others have 2" in text
    assert report.pairing.wait_s == pytest.approx((70 + 40) * 1e-6)
    assert report.pairing.unpaired == 1
