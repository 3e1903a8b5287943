"""What can be asked of the generator."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class Scenario:
    """One job and one way to trace it. Times in microseconds."""

    world: int = 8
    steps: int = 3
    layers: int = 4
    backend: Literal["nccl", "gloo"] = "nccl"
    names: Literal["dev", "old", "rccl"] = "dev"  # of the collective kernels
    metadata: Literal["full", "no_seq", "none"] = "full"
    collectives: tuple[str, ...] = (
        "all_reduce",
        "all_reduce",
        "all_gather",
        "reduce_scatter",
    )  # one a layer, in backward
    elements: int = 1_000_000  # of collective 0; each further one has as many more
    transfer_us: int = 700  # of collective 0; each further one takes 100 longer
    slow: dict[tuple[int, int], int] = field(default_factory=dict)  # (rank, step): this much longer in forward
    offset_us: dict[int, int] = field(default_factory=dict)  # rank: what its clock shows beyond the true one
    drift_ppm: dict[int, int] = field(default_factory=dict)
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
    filler_ops: int = 0  # further small CPU operators a step, for size
