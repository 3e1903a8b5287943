"""What names say: kernels, operators, kinds of collectives, types of elements."""

from __future__ import annotations

import re

COMM_KERNEL = re.compile(
    r"nccl(?:Dev)?Kernel|ncclSymk|ncclSym|nccl[A-Z_]|rccl|msccl|nvshmem|oneccl"
    r"|cross_device_reduce|(?:one|two)_shot_all_?reduce|multimem_(?:all|one)",
)
_COMM_OPERATOR = re.compile(
    r"^(?:c10d::|_?c10d_functional(?:_autograd)?::|record_param_comms|(?:nccl|gloo|mpi|ucc|xccl|rccl):|symm_mem::)"
)
_LETTERS = re.compile(r"[^a-z]")
# the first that is contained in a name decides
_KINDS = (
    ("reducescatter", "reduce_scatter"),
    ("allreduce", "all_reduce"),
    ("allgather", "all_gather"),
    ("alltoall", "all_to_all"),
    ("broadcast", "broadcast"),
    ("barrier", "barrier"),
    ("sendrecv", "send_recv"),
    ("gather", "gather"),
    ("scatter", "scatter"),
    ("reduce", "reduce"),
    ("send", "send"),
    ("recv", "recv"),
)
POINT_TO_POINT = frozenset({"send", "recv", "send_recv"})
# all ranks end these together, so that their ends can align clocks; a broadcast's root may be gone long before
SYNCHRONISING = frozenset({"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier"})

_SIZES = {
    "float": 4, "double": 8, "half": 2, "bfloat16": 2, "long": 8, "longint": 8, "longlong": 8, "int": 4, "short": 2,
    "shortint": 2, "byte": 1, "char": 1, "signedchar": 1, "unsignedchar": 1, "bool": 1, "complexfloat": 8,
    "complexdouble": 16, "complexhalf": 4, "float8e4m3fn": 1, "float8e5m2": 1, "float8e4m3fnuz": 1, "float8e5m2fnuz": 1,
    "float8e8m0fnu": 1, "uint16": 2, "uint32": 4, "uint64": 8, "unsignedshort": 2, "unsignedint": 4, "unsignedlong": 8,
    "qint8": 1, "quint8": 1, "qint32": 4,
}  # fmt: skip


def is_comm_kernel(name: str) -> bool:
    """Whether a device kernel is communication: NCCL old and new, RCCL, MSCCL, NVSHMEM, hand-written all-reduces."""
    return COMM_KERNEL.search(name) is not None


def is_comm_operator(name: str) -> bool:
    """Whether a host operator or annotation launches or waits for communication."""
    return _COMM_OPERATOR.match(name) is not None


def is_wait(name: str) -> bool:
    """Whether an operator blocks its thread until a collective has ended."""
    return name.endswith(("::wait_tensor", "::wait"))


def kind_of(name: str) -> str | None:
    """The kind of collective that a name tells (`ncclDevKernel_AllReduce_Sum_f32`, `_allgather_base`, `c10d::send`), or None."""
    letters = _LETTERS.sub("", name.lower())
    return next((kind for part, kind in _KINDS if part in letters), None)


def kind_of_kernel(name: str) -> str | None:
    """As `kind_of`, for a kernel: only the part before its parameters counts, which also name types and operations."""
    head = re.split(r"[(<]|_(?:RING|TREE|COLLNET|NVLS|PAT|LL|LL128|SIMPLE|Sum|Max|Min|Prod)", name, maxsplit=1)[0]
    return kind_of(re.sub(r"(?i)(?:nccl|rccl)?(?:Dev)?Kernel", "", head))


def element_bytes(dtype: str) -> int | None:
    """Size of one element of a type as NCCL's metadata (`BFloat16`) or the profiler's shapes (`c10::BFloat16`) name it."""
    plain = dtype.rsplit("::", 1)[-1] if "<" not in dtype else dtype.replace("c10::", "")
    return _SIZES.get(re.sub(r"[^a-z0-9]", "", plain.lower()))


def bus_factor(kind: str, n: int) -> float:
    """Bus bandwidth over algorithmic bandwidth for `n` ranks (nccl-tests, doc/PERFORMANCE.md)."""
    if kind == "all_reduce":
        return 2 * (n - 1) / n
    if kind in ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter"):
        return (n - 1) / n
    return 1.0
