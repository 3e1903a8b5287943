"""How collectives are called: by kernels, by metadata, by operators."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """Names of one kind of collective; ``shard_in`` and ``shard_out`` say which side holds 1/W of the elements."""

    kernel: str
    metadata: str
    operator: str
    annotation: str
    gloo: str
    shard_in: bool = False
    shard_out: bool = False


SHAPES = {
    "all_reduce": Shape("AllReduce", "allreduce", "c10d::allreduce_", "nccl:all_reduce", "gloo:all_reduce"),
    "all_gather": Shape("AllGather", "_allgather_base", "c10d::_allgather_base_", "nccl:_all_gather_base", "gloo:all_gather", shard_in=True),
    "reduce_scatter": Shape(
        "ReduceScatter",
        "_reduce_scatter_base",
        "c10d::_reduce_scatter_base_",
        "nccl:_reduce_scatter_base",
        "gloo:all_reduce",  # gloo runs a reduce-scatter as an all-reduce, and calls it so
        shard_out=True,
    ),
    "broadcast": Shape("Broadcast", "broadcast", "c10d::broadcast_", "nccl:broadcast", "gloo:broadcast"),
}  # fmt: skip


def kernel_name(kind: str, names: str) -> str:
    """The collective's kernel as NCCL from 2.19 on, NCCL before, or RCCL calls it."""
    verb = SHAPES[kind].kernel
    if names == "rccl":
        return "rcclGenericKernel(ncclDevComm*, unsigned long, ncclWork*) [clone .kd]"
    if names == "old":
        return f"ncclKernel_{verb}_RING_LL_Sum_float(ncclDevComm*, unsigned long, ncclWork*)"
    return f"ncclDevKernel_{verb}{'_Sum_f32' if 'educe' in verb else ''}_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
