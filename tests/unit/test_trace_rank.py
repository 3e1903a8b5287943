"""One rank: small traces whose figures can be read off by eye."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from allranks.analysis.trace import analyse
from allranks.analysis.trace.records import RankReport, TraceReport
from tests.trace_totals import collectives_per_step
from tests.unit.trace_builder import AUTOGRAD, GLOO, Event, kernel, launch, mark, nccl, op, span, step, thread, write

MS = 1e-3


def report_of(tmp_path: Path, events: list[Event], **more: Any) -> TraceReport:
    (report,) = analyse([write(tmp_path / "rank0.json", events, **more)])
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
        step(1, 0, 1000),
        kernel("gemm", 100, 300, stream=7),
        kernel("gemm", 200, 400, stream=13),
        nccl("allreduce", 350, 600, 0),
        span("gpu_memcpy", "Memcpy DtoH", 550, 700, 7, 0),
        span("gpu_memset", "Memset", 300, 320, 7, 0),
        span("gpu_user_annotation", "nccl:all_reduce", 350, 900, 20, 0),
        span("gpu_user_annotation", "backward", 0, 1000, 7, 0),
        span("cuda_sync", "Context Sync", 400, 900, 7, 0),
        span("overhead", "Activity Buffer Request", 400, 900, 7, 0),
    ]
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
        thread(AUTOGRAD, "thread 101 (pt_autograd_0)"),
        launch(1, 100, AUTOGRAD), nccl("_reduce_scatter_base", 110, 210, 0, 1, **{"In msg nelems": 4000, "Out msg nelems": 2000, "dtype": "BFloat16"}),
        mark("Optimizer.step#AdamW.step", 500, 700),
        launch(2, 600), nccl("_allgather_base", 610, 650, 1, 2, **{"In msg nelems": 2000, "Out msg nelems": 4000}),
        launch(3, 800), nccl("allreduce", 820, 830, 2, 3, elements=10),
    ]  # fmt: skip
    report = report_of(tmp_path, events)
    told = {(r.kind, r.phase): (r.count, r.bytes) for r in report.launches}
    assert told == {
        ("reduce_scatter", "backward"): (1, 8000),
        ("all_gather", "optimizer"): (1, 16000),
        ("all_reduce", "other"): (1, 40),
    }
    row = next(r for r in report.collectives if r.kind == "reduce_scatter")
    assert row.group_size == 2
    assert row.algbw_bytes_s == pytest.approx(8000 / 100e-6)
    assert row.busbw_bytes_s == pytest.approx(8000 / 100e-6 / 2)
    assert collectives_per_step(report, 0, "backward")[4]["reduce_scatter"].bytes == 8000
    assert set(collectives_per_step(report, 0)[4]) == {"reduce_scatter", "all_gather", "all_reduce"}


def test_a_kernel_that_tells_nothing_is_named_by_the_call_that_launched_it(tmp_path: Path) -> None:
    dims = {"in_dims": [[4096], [1024], [], []], "in_types": ["float", "float", "", "Scalar"]}
    events = [
        step(1, 0, 1000),
        op("c10d::_allgather_base_", 100, 140, **dims),
        op("record_param_comms", 105, 135, in_dims=[[], []], in_types=["", "Scalar"]),
        mark("nccl:_all_gather_base", 110, 130, in_dims=[[1024]], in_types=["float"]),
        launch(1, 120), kernel("ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclDevComm*, unsigned long, ncclWork*)", 200, 300, 1),
    ]  # fmt: skip
    (row,) = report_of(tmp_path, events).launches
    assert (row.kind, row.count, row.bytes) == ("all_gather", 1, 4096 * 4)


# CPU and gloo


def gloo_pair(
    kind: str, call: str, at: float, start: float, end: float, dims: list[Any], own: int, tid: Any = GLOO
) -> list[Event]:
    types = ["float", "float", "", "Scalar"][: len(dims)]
    return [
        op(call, at, at + 5, in_dims=dims, in_types=types),
        mark(f"gloo:{kind}", start, end, tid, in_dims=[[own]], in_types=["float"]),
    ]


def test_gloo_spans_are_named_by_their_calls(tmp_path: Path) -> None:
    events = [
        step(1, 0, 1000), thread(GLOO, "thread 111 (pt_gloo_runloop)"), thread(GLOO + 1, "thread 112 (pt_gloo_runloop)"),
        *gloo_pair("all_reduce", "c10d::allreduce_", 10, 40, 60, [[[64]]], 64),
        *gloo_pair("all_reduce", "c10d::_reduce_scatter_base_", 20, 41, 70, [[16], [64]], 64, GLOO + 1),
        *gloo_pair("all_gather", "c10d::_allgather_base_", 80, 90, 99, [[64], [16]], 16),
        *gloo_pair("broadcast", "c10d::broadcast_", 110, 120, 140, [[[7]]], 7),
        *gloo_pair("all_reduce", "c10d::_reduce_scatter_base_", 150, 160, 170, [[8], [32]], 32),
    ]  # fmt: skip
    report = report_of(tmp_path, events, world=4)
    told = {r.kind: (r.count, r.bytes) for r in report.launches}
    assert told == {
        "all_reduce": (1, 256),
        "reduce_scatter": (2, 256 + 128),
        "all_gather": (1, 256),
        "broadcast": (1, 28),
    }
    by_kind = {r.kind: r for r in report.collectives}
    assert by_kind["reduce_scatter"].total_s == pytest.approx(39e-6)
    assert by_kind["all_reduce"].busbw_bytes_s == pytest.approx(256 / 20e-6 * 2 * 3 / 4)


def test_a_hook_that_blocks_in_backward_is_exposed_communication_and_not_compute(tmp_path: Path) -> None:
    """The node's span holds the hook's waiting; HTA and a sum over outermost operators would call it compute."""
    node = "autograd::engine::evaluate_function: torch::autograd::AccumulateGrad"
    events = [
        step(1, 0, 1000), thread(GLOO, "thread 111 (pt_gloo_runloop)"),
        op("autograd::engine::evaluate_function: MmBackward0", 100, 300, sequence=1), op("aten::mm", 120, 290),
        op(node, 300, 800), op("torch::autograd::AccumulateGrad", 310, 790),
        op("aten::detach", 320, 330), op("c10d::allreduce_", 340, 360),
        mark("gloo:all_reduce", 370, 780, GLOO, in_dims=[[9]], in_types=["float"]),
    ]  # fmt: skip
    found = times(rank_of(tmp_path, events))
    assert found["exposed_comm"] == found["comm"] == 410
    assert found["compute"] == (340 - 100) + (370 - 360) + (800 - 780)


def test_compute_of_another_thread_hides_communication(tmp_path: Path) -> None:
    events = [
        step(1, 0, 1000),
        op("aten::mm", 200, 400, AUTOGRAD), op("aten::addmm", 100, 250),
        op("_c10d_functional::wait_tensor", 500, 700), op("aten::copy_", 550, 560),
        mark("gloo:all_reduce", 300, 650, GLOO, in_dims=[[9]], in_types=["float"]),
    ]  # fmt: skip
    found = times(rank_of(tmp_path, events))
    assert found["compute"] == 300
    assert found["comm"] == 400  # the wait lasts longer than gloo's span
    assert found["overlapped_comm"] == 100


def test_what_gloos_own_threads_run_is_part_of_the_collective(tmp_path: Path) -> None:
    events = [
        step(1, 0, 1000), thread(GLOO, "thread 111 (pt_gloo_runloop)"),
        mark("gloo:all_reduce", 300, 650, GLOO, in_dims=[[9]], in_types=["float"]), op("aten::copy_", 310, 600, GLOO),
    ]  # fmt: skip
    found = times(rank_of(tmp_path, events))
    assert (found["compute"], found["exposed_comm"]) == (0, 350)


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
    rank = rank_of(tmp_path, events)
    assert {p.phase: round(p.busy_s * 1e6) for p in rank.phases} == {
        "forward": 100,
        "backward": 200,
        "optimizer": 30,
        "data": 0,
        "other": 0,
    }


# modules, operators, memory


def test_operators_count_without_what_they_called(tmp_path: Path) -> None:
    events = [
        step(1, 0, 100),
        op("aten::linear", 10, 60),
        op("aten::addmm", 20, 50),
        op("aten::copy_", 25, 30),
        op("aten::linear", 70, 75),
    ]
    rows = {
        r.name: (r.count, round(r.total_s * 1e6), round(r.max_s * 1e6))
        for r in report_of(tmp_path, events).top_operators
    }
    assert rows == {"aten::linear": (2, 25, 20), "aten::addmm": (1, 25, 25), "aten::copy_": (1, 5, 5)}


def test_memory_keeps_its_peak_when_thinned(tmp_path: Path) -> None:
    def memory(t: float, allocated: int, device: int = 1) -> Event:
        args = {
            "Total Allocated": allocated,
            "Total Reserved": 10_000,
            "Bytes": 1,
            "Device Id": 0 if device else -1,
            "Device Type": device,
        }
        return {
            "ph": "i",
            "cat": "cpu_instant_event",
            "name": "[memory]",
            "s": "t",
            "pid": 1,
            "tid": 1,
            "ts": t,
            "args": args,
        }

    events = [
        step(1, 0, 6000),
        op("aten::mm", 1, 2),
        *(memory(i, i % 100) for i in range(5000)),
        memory(2500.5, 7777),
        memory(3, 5, 0),
    ]
    found = {m.device: m for m in rank_of(tmp_path, events).memory}
    assert (found["gpu:0"].peak_bytes, found["gpu:0"].last_bytes, found["gpu:0"].peak_reserved_bytes) == (
        7777,
        99,
        10_000,
    )
    assert found["cpu"].peak_bytes == 5
    assert max(size for _, size in found["gpu:0"].points) == 7777
    assert len(found["gpu:0"].points) <= 402


def test_what_happens_between_two_steps_belongs_to_neither(tmp_path: Path) -> None:
    """An evaluation between steps must not look like traffic of the step before."""
    events = [
        step(1, 0, 100), *gloo_pair("all_reduce", "c10d::allreduce_", 10, 20, 30, [[[64]]], 64),
        *gloo_pair("broadcast", "c10d::broadcast_", 120, 125, 130, [[[7]]], 7),
        step(2, 200, 300), *gloo_pair("all_reduce", "c10d::allreduce_", 210, 220, 230, [[[64]]], 64),
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
