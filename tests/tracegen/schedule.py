"""Lays the work of all ranks out on one true clock, in whole microseconds. Nothing here knows how traces look."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

ORIGIN = 100_000  # where the first step begins
GAP = 6  # between two pieces of work of a stream: the device idles
LEAD = 12  # a launch comes so much before its kernel
MAIN, SECOND, COPY, COMM, COMM2 = 7, 13, 9, 20, 24


@dataclass(frozen=True)
class Scenario:
    """One job and one way to trace it. Times in microseconds."""

    world: int = 8
    steps: int = 3
    layers: int = 4
    backend: Literal["nccl", "gloo"] = "nccl"
    names: Literal["dev", "old", "rccl"] = "dev"  # of the collective kernels
    metadata: Literal["full", "no_seq", "none"] = "full"
    # one a layer, in backward
    collectives: tuple[str, ...] = ("all_reduce", "all_reduce", "all_gather", "reduce_scatter")
    elements: int = 1_000_000  # of collective 0; each further one has as many more
    transfer_us: int = 700  # of collective 0; each further one takes 100 longer
    slow: dict[tuple[int, int], int] = field(default_factory=dict)  # (rank, step): this much longer in forward
    offset_us: dict[int, int] = field(default_factory=dict)  # rank: what its clock shows beyond the true one
    start_skew_us: dict[int, int] = field(default_factory=dict)  # rank: so much later its first step begins
    absent: frozenset[int] = frozenset()  # ranks whose file is missing
    dropped: tuple[int, int, int] | None = None  # (rank, step, index): this collective is not in that rank's trace
    second_group: bool = False  # each step one more all-reduce on another communicator, whose order differs by rank
    second_stream: bool = False  # compute kernels that overlap each other
    memcpy: bool = False
    step_marks: bool = True  # ProfilerStep#N
    part_marks: bool = True  # allranks.forward and so on
    twins: bool = False  # gpu_user_annotation over the same time as kernels
    syncs: bool = False  # cuda_sync events over the same time as collectives


@dataclass(frozen=True)
class Piece:
    """One stretch of work on one rank."""

    name: str
    what: str  # compute | memcpy
    stream: int
    start: int
    end: int
    part: str


@dataclass(frozen=True)
class Member:
    """One rank's share in a collective: it arrives, waits for the last, transfers."""

    rank: int
    launched: int
    arrived: int
    end: int


@dataclass
class Collective:
    """One collective of one step. ``key`` is its place in its group over all steps: NCCL's ``Seq``."""

    step: int
    index: int
    group: str
    key: int
    kind: str
    elements: int
    transfer: int
    part: str
    stream: int
    members: dict[int, Member] = field(default_factory=dict)


@dataclass
class StepOf:
    """One step of one rank, and where its parts lie."""

    start: int
    end: int = 0
    parts: dict[str, tuple[int, int]] = field(default_factory=dict)
    pieces: list[Piece] = field(default_factory=list)


@dataclass
class Timeline:
    """All ranks, all steps."""

    steps: list[list[StepOf]]  # [step][rank]
    collectives: list[Collective]


def lay_out(s: Scenario) -> Timeline:
    """The schedule: forward, backward with a collective after each layer, optimizer once all is reduced."""
    starts = [ORIGIN + s.start_skew_us.get(r, 0) for r in range(s.world)]
    keys = {"0": 0, "1": 0}
    timeline = Timeline([], [])
    for number in range(s.steps):
        steps = [_forward_and_backward(s, r, number, starts[r]) for r in range(s.world)]
        made = _collectives(s, number, steps, keys)
        for r, step in enumerate(steps):
            _finish(step, s, max(c.members[r].end for c in made))
            step.parts = _parts(s, step, [c.members[r].launched for c in made])
            starts[r] = step.end + 40
        timeline.steps.append(steps)
        timeline.collectives += made
    return timeline


def _forward_and_backward(s: Scenario, rank: int, number: int, start: int) -> StepOf:
    step, t = StepOf(start), start + 40
    if s.memcpy:
        step.pieces.append(Piece("Memcpy HtoD (Pinned -> Device)", "memcpy", MAIN, t, t + 100, "data"))
        t += 100 + GAP
    t += 20
    for layer in range(s.layers):
        longer = s.slow.get((rank, number), 0) if layer == 0 else 0
        end = t + 300 + 10 * layer + longer
        step.pieces.append(Piece(f"gemm_forward_{layer}", "compute", MAIN, t, end, "forward"))
        if s.second_stream:  # half of it beside the kernel, the rest beside the gap and the next one
            step.pieces.append(Piece("elementwise_forward", "compute", SECOND, end - 50, end + 50, "forward"))
        t = end + GAP
    t += 2 * GAP + (60 if s.second_stream else 0)
    for layer in reversed(range(s.layers)):
        end = t + 500 + 20 * layer
        step.pieces.append(Piece(f"gemm_backward_{layer}", "compute", MAIN, t, end, "backward"))
        if s.memcpy:  # partly under compute, partly in the gap
            step.pieces.append(Piece("Memcpy DtoD (Device -> Device)", "memcpy", COPY, end - 30, end + 4, "backward"))
        t = end + 30
    return step


def _ready(step: StepOf, s: Scenario, index: int) -> int:
    """A collective can start once its layer's backward is done; launches are apart, so that they do not overlap."""
    return [p for p in step.pieces if p.name.startswith("gemm_backward")][min(index, s.layers - 1)].end + LEAD


def _collectives(s: Scenario, number: int, steps: list[StepOf], keys: dict[str, int]) -> list[Collective]:
    made = []
    last_end = dict.fromkeys(range(s.world), 0)
    for index, kind in enumerate(s.collectives):
        c = Collective(
            number, index, "0", keys["0"], kind, s.elements * (index + 1), s.transfer_us + 100 * index, "backward", COMM
        )
        keys["0"] += 1
        arrived = {r: max(_ready(steps[r], s, index), last_end[r] + 1) for r in range(s.world)}
        end = max(arrived.values()) + c.transfer
        for r in range(s.world):
            c.members[r] = Member(r, _ready(steps[r], s, index) - LEAD + 2, arrived[r], end)
            last_end[r] = end
        made.append(c)
    if s.second_group:  # beside the others; even ranks launch it before the first, odd ranks after the second
        c = Collective(number, len(made), "1", keys["1"], "all_reduce", 77_000, 150, "backward", COMM2)
        keys["1"] += 1
        arrived = {r: _ready(steps[r], s, 0) - 7 if r % 2 == 0 else _ready(steps[r], s, 1) + 9 for r in range(s.world)}
        end = max(arrived.values()) + c.transfer
        for r in range(s.world):
            c.members[r] = Member(r, arrived[r] - LEAD + 2, arrived[r], end)
        made.append(c)
    return made


def _finish(step: StepOf, s: Scenario, reduced: int) -> None:
    t = max(reduced, *(p.end for p in step.pieces)) + 30
    step.pieces.append(Piece("fused_adamw", "compute", MAIN, t, t + 400, "optimizer"))
    t += 400
    if s.memcpy:
        step.pieces.append(
            Piece("Memcpy DtoH (Device -> Pageable)", "memcpy", MAIN, t + GAP, t + GAP + 20, "optimizer")
        )
        t += GAP + 20
    step.end = t + 30


def _parts(s: Scenario, step: StepOf, launches: list[int]) -> dict[str, tuple[int, int]]:
    """Where the host's parts lie: around its operators, which on a GPU only launch, and on a CPU are the work."""
    found = {"data": (step.start + 5, step.start + 15)}
    for part in ("data", "forward", "backward", "optimizer"):
        mine = [p for p in step.pieces if p.part == part]
        if not mine:
            continue
        lead, took = (LEAD + 2, 7) if s.backend == "nccl" else (0, None)
        begins = [p.start - lead for p in mine]
        ends = [p.start - lead + took if took else p.end for p in mine]
        if part == "backward":
            ends += [launched + 9 for launched in launches]
        found[part] = (min(begins) - 1, max(ends) + 1)
    return found
