"""Classify the kernels and operators of one rank by name, and store its events compactly.

Events are stored as numbers and name ids, not as dictionaries. Times are in microseconds, as in the file.
"""

from __future__ import annotations

import re
import struct
from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from operator import lt
from typing import Any

import msgspec
from msgspec import Struct

from allranks.analysis.trace.chrome_trace import EventArgs, TraceEvent

COMM_KERNEL = re.compile(
    r"nccl(?:Dev)?Kernel|ncclSymk|ncclSym|nccl[A-Z_]|rccl|msccl|nvshmem|oneccl"
    r"|cross_device_reduce|(?:one|two)_shot_all_?reduce|multimem_(?:all|one)"
)
_COMM_OPERATOR = re.compile(
    r"^(?:c10d::|_?c10d_functional(?:_autograd)?::|record_param_comms|(?:nccl|gloo|mpi|ucc|xccl|rccl):|symm_mem::)"
)
_LETTERS = re.compile(r"[^a-z]")
# the first entry contained in a name decides
_KINDS = (
    ("reducescatter", "reduce_scatter"), ("allreduce", "all_reduce"), ("allgather", "all_gather"),
    ("alltoall", "all_to_all"), ("broadcast", "broadcast"), ("barrier", "barrier"), ("sendrecv", "send_recv"),
    ("gather", "gather"), ("scatter", "scatter"), ("reduce", "reduce"), ("send", "send"), ("recv", "recv"),
)  # fmt: skip
POINT_TO_POINT = frozenset({"send", "recv", "send_recv"})
# all ranks end these together, so their ends can align clocks; the root of a broadcast may end earlier
SYNCHRONISING = frozenset({"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier"})

_SIZES = {
    "float": 4, "double": 8, "half": 2, "bfloat16": 2, "long": 8, "longint": 8, "longlong": 8, "int": 4, "short": 2,
    "shortint": 2, "byte": 1, "char": 1, "signedchar": 1, "unsignedchar": 1, "bool": 1, "complexfloat": 8,
    "complexdouble": 16, "complexhalf": 4, "float8e4m3fn": 1, "float8e5m2": 1, "float8e4m3fnuz": 1, "float8e5m2fnuz": 1,
    "float8e8m0fnu": 1, "uint16": 2, "uint32": 4, "uint64": 8, "unsignedshort": 2, "unsignedint": 4, "unsignedlong": 8,
    "qint8": 1, "quint8": 1, "qint32": 4,
}  # fmt: skip


def is_comm_kernel(name: str) -> bool:
    """Return whether a device kernel is communication: NCCL old and new, RCCL, MSCCL, NVSHMEM, custom all-reduces."""
    return COMM_KERNEL.search(name) is not None


def is_comm_operator(name: str) -> bool:
    """Return whether a host operator or annotation launches or waits for communication."""
    return _COMM_OPERATOR.match(name) is not None


def is_wait(name: str) -> bool:
    """Return whether an operator blocks its thread until a collective has ended."""
    return name.endswith(("::wait_tensor", "::wait"))


def collective_kind(name: str) -> str | None:
    """Return the kind of collective from a name (`_allgather_base`, `c10d::send`), or None."""
    letters = _LETTERS.sub("", name.lower())
    return next((kind for part, kind in _KINDS if part in letters), None)


def collective_kind_of_kernel(name: str) -> str | None:
    """Return the kind for a kernel, from the part of its name before parameters, types and operations."""
    head = re.split(r"[(<]|_(?:RING|TREE|COLLNET|NVLS|PAT|LL|LL128|SIMPLE|Sum|Max|Min|Prod)", name, maxsplit=1)[0]
    return collective_kind(re.sub(r"(?i)(?:nccl|rccl)?(?:Dev)?Kernel", "", head))


def element_bytes(dtype: str) -> int | None:
    """Return the size of one element of a type as NCCL (`BFloat16`) or the profiler (`c10::BFloat16`) names it."""
    plain = dtype.rsplit("::", 1)[-1] if "<" not in dtype else dtype.replace("c10::", "")
    return _SIZES.get(re.sub(r"[^a-z0-9]", "", plain.lower()))


def bus_factor(kind: str, n: int) -> float:
    """Return bus bandwidth over algorithmic bandwidth for `n` ranks (nccl-tests, doc/PERFORMANCE.md)."""
    if kind == "all_reduce":
        return 2 * (n - 1) / n
    if kind in ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter"):
        return (n - 1) / n
    return 1.0


COMPUTE, COMM, COPY = 0, 1, 2  # kinds of device events
COMPUTE_OP, WRAPPER_OP, COMM_OP, ANNOTATION = 0, 1, 2, 3  # kinds of host operators

# spans that contain the work of their node or hook, for example a blocking all-reduce, besides their own operators
_WRAPPER = re.compile(r"^autograd::engine::evaluate_function|^torch::autograd::|Backward\d*$|^torch/|^nn\.Module")
_OPERATOR, _RUNTIME, _ANNOTATION, _PYTHON = 3, 4, 5, 6  # and COMPUTE or COPY on a device
_CATEGORIES: dict[str | None, int] = {
    "kernel": COMPUTE, "Kernel": COMPUTE, "gpu_memcpy": COPY, "Memcpy": COPY, "gpu_memset": COPY, "Memset": COPY,
    "cuda_runtime": _RUNTIME, "cuda_driver": _RUNTIME, "hip_runtime": _RUNTIME, "hip_driver": _RUNTIME,
    "xpu_runtime": _RUNTIME, "privateuse1_runtime": _RUNTIME, "mtia_runtime": _RUNTIME, "Runtime": _RUNTIME,
    "user_annotation": _ANNOTATION, "Annotation": _ANNOTATION, "cpu_op": _OPERATOR, "Operator": _OPERATOR,
    "python_function": _PYTHON,
}  # fmt: skip
LONGEST_US = 1e13  # some months
LATEST_US = 1e17  # clocks count from 1970; larger 64-bit floats have no microsecond resolution


class CollectiveMetadata(Struct, gc=False):
    """Metadata of a collective; None: unknown. `elements` are of one rank, `bytes` are nccl-tests' size."""

    kind: str | None = None
    bytes: int | None = None
    group: str | None = None
    members: str | None = None
    size: int | None = None
    seq: int | None = None
    source: int | None = None
    target: int | None = None
    name: str | None = None


class HostCommCall(Struct, gc=False):
    """An operator or annotation on the host that launches, runs or waits for communication."""

    start: float
    end: float
    thread: int
    name: str
    kind: str | None
    tensors: tuple[tuple[int, int | None], ...]  # (elements, bytes of one) of each tensor argument, lists summed
    metadata: CollectiveMetadata | None


class CommKernel(Struct, gc=False):
    """A communication kernel."""

    start: float
    end: float
    name: str
    kind: str | None
    correlation: int | None
    metadata: CollectiveMetadata | None


class ThreadOperators:
    """The host operators of one thread, 20 bytes each. Iteration yields (start, duration, name id)."""

    __slots__ = ("durations", "names", "starts")

    def __init__(self) -> None:
        self.starts = array("d")
        self.durations = array("d")
        self.names = array("i")

    def __len__(self) -> int:
        return len(self.starts)

    def __iter__(self) -> Iterator[tuple[float, float, int]]:
        return zip(self.starts, self.durations, self.names, strict=True)

    def extend(self, rows: Sequence[tuple[float, float, int]]) -> None:
        """Add operators. `struct` converts a list of numbers several times faster than `array` does."""
        for slot, values in zip(("starts", "durations", "names"), zip(*rows, strict=True), strict=True):
            into = getattr(self, slot)
            into.frombytes(struct.pack(f"{len(rows)}{into.typecode}", *values))

    def sort(self) -> None:
        """Sort by start, the longer first: callers before callees."""
        if all(map(lt, self.starts, islice(self.starts, 1, None))):
            return
        order = sorted(range(len(self)), key=self.durations.__getitem__, reverse=True)
        order.sort(key=self.starts.__getitem__)
        for slot in self.__slots__:
            values = getattr(self, slot)
            setattr(self, slot, array(values.typecode, map(values.__getitem__, order)))


class RankEvents:
    """The events of one trace."""

    def __init__(self) -> None:
        self.count = 0
        self.odd = 0  # number of impossible times and durations
        self.names: list[str] = []
        self.classes: list[int] = []  # of each name as a host operator
        self._ids: dict[str, int] = {}
        self._kernel_ids: dict[str, int] = {}
        self.kernel_names: list[str] = []
        self.kernel_classes: list[int] = []
        self.threads: dict[tuple[int | str, int | str], int] = {}
        self.thread_names: dict[int, str] = {}
        self.operators: list[ThreadOperators] = []  # by thread
        self.device: list[tuple[float, float, int, int]] = []  # (start, end, kernel name, correlation)
        self.comm_kernels: list[CommKernel] = []
        self.host_comms: list[HostCommCall] = []
        self.marks: list[tuple[float, float, str, int]] = []
        self.backward_calls: list[tuple[float, float]] = []
        self.launches: dict[int, tuple[float, int]] = {}
        self.memory: dict[tuple[int, int], list[tuple[float, int, int]]] = {}

    def add(self, events: Iterable[TraceEvent]) -> None:  # noqa: PLR0912 - a call would cost more than its branch
        """Add the relevant events of a piece of the trace. Operators are the most frequent and have a fast path."""
        ids, classes, launches = self._ids, self.classes, self.launches
        pid: int | str | None = None
        tid: int | str | None = None
        thread = -1
        rows: dict[int, list[tuple[float, float, int]]] = {}
        row: list[tuple[float, float, int]] = []
        for e in events:
            self.count += 1
            ph = e.ph
            if not (0.0 <= e.dur < LONGEST_US and -LATEST_US < e.ts < LATEST_US) and ph != "M":
                self.odd += 1
                if not -LATEST_US < e.ts < LATEST_US:
                    continue
                e.dur = 0.0
            if ph != "X":
                if ph in ("i", "M"):
                    self._instant(e)
                continue
            what = _CATEGORIES.get(e.cat)
            if what == _OPERATOR:
                number = ids.get(e.name)
                if number is None:
                    number = self._new_name(e.name)
                what = classes[number]
                if what == ANNOTATION:
                    self._mark(e)
                    continue
                if e.tid != tid or e.pid != pid:
                    pid, tid, thread = e.pid, e.tid, self._thread(e)
                    row = rows.setdefault(thread, [])
                row.append((e.ts, e.dur, number))
                if what == COMM_OP:
                    self._host_comm(e, thread)
            elif what == _RUNTIME:
                args = e.args
                if args is not None and args.correlation is not None:
                    if e.tid != tid or e.pid != pid:
                        pid, tid, thread = e.pid, e.tid, self._thread(e)
                        row = rows.setdefault(thread, [])
                    launches[args.correlation] = (e.ts, thread)
            elif what == _PYTHON:
                if "method run_backward" in e.name:
                    self.backward_calls.append((e.ts, e.ts + e.dur))
            elif what == _ANNOTATION:
                self._mark(e)
            elif what is not None:
                self._on_device(e, what)
        for thread, spans in rows.items():
            if spans:
                self.operators[thread].extend(spans)

    def _instant(self, e: TraceEvent) -> None:
        if e.ph == "i":
            if e.name == "[memory]":
                self._memory(e)
        elif e.args is not None and e.name == "thread_name":
            thread = self._thread(e)
            # gloo's and autograd's threads are named twice; the specific name is kept
            if "pt_" in str(e.args.name) or thread not in self.thread_names:
                self.thread_names[thread] = str(e.args.name)

    def finish(self) -> None:
        """Sort operators by start, the longer first."""
        for operators in self.operators:
            operators.sort()

    def _thread(self, e: TraceEvent) -> int:
        key = (e.pid, e.tid)
        number = self.threads.get(key)
        if number is None:
            self.threads[key] = number = len(self.threads)
            self.operators.append(ThreadOperators())
        return number

    def _new_name(self, name: str) -> int:
        self._ids[name] = number = len(self.names)
        self.names.append(name)
        if is_comm_operator(name):
            what = COMM_OP
        elif name.startswith(("ProfilerStep", "Optimizer.", "enumerate(DataLoader)")):
            what = ANNOTATION
        else:
            what = WRAPPER_OP if _WRAPPER.search(name) else COMPUTE_OP
        self.classes.append(what)
        return number

    def _mark(self, e: TraceEvent) -> None:
        name, thread = e.name, self._thread(e)
        self.marks.append((e.ts, e.ts + e.dur, name, thread))
        if is_comm_operator(name):
            self._host_comm(e, thread)

    def _host_comm(self, e: TraceEvent, thread: int) -> None:
        args, name = e.args, e.name
        tensors = _tensors(args) if args is not None else ()
        self.host_comms.append(
            HostCommCall(e.ts, e.ts + e.dur, thread, name, collective_kind(name), tensors, _collective_metadata(args))
        )

    def _on_device(self, e: TraceEvent, what: int) -> None:
        name = e.name
        number = self._kernel_ids.get(name)
        if number is None:
            self._kernel_ids[name] = number = len(self.kernel_names)
            self.kernel_names.append(name)
            self.kernel_classes.append(COMM if what == COMPUTE and is_comm_kernel(name) else what)
        args = e.args
        correlation = args.correlation if args is not None else None
        end = e.ts + e.dur
        self.device.append((e.ts, end, number, -1 if correlation is None else correlation))
        if self.kernel_classes[number] == COMM:
            self.comm_kernels.append(
                CommKernel(e.ts, end, name, collective_kind_of_kernel(name), correlation, _collective_metadata(args))
            )

    def _memory(self, e: TraceEvent) -> None:
        args = e.args
        if args is None or args.allocated is None or args.device_type is None:
            return
        key = (args.device_type, args.device_id if args.device_id is not None else -1)
        self.memory.setdefault(key, []).append((e.ts, args.allocated, args.reserved or 0))


def _collective_metadata(args: EventArgs | None) -> CollectiveMetadata | None:
    """Return NCCL's metadata of a collective (kineto's output_json.cpp defines the keys)."""
    if args is None or (args.collective is None and args.in_elements is None and args.comm_seq is None):
        return None
    metadata = CollectiveMetadata(
        kind=collective_kind(args.collective) if args.collective else None,
        group=args.group,
        seq=as_int(args.comm_seq),
        name=args.collective,
    )
    metadata.size, metadata.source, metadata.target = as_int(args.group_size), as_int(args.source), as_int(args.target)
    metadata.members = str(args.group_ranks) if args.group_ranks is not None else None
    elements = [n for n in (as_int(args.in_elements), as_int(args.out_elements)) if n is not None]
    each = element_bytes(args.dtype) if args.dtype else None
    if elements and each is not None:
        metadata.bytes = max(elements) * each
    return metadata


def _tensors(args: EventArgs) -> tuple[tuple[int, int | None], ...]:
    """Return elements and element sizes of the tensors in an operator's arguments."""
    if not args.dims or not args.types:
        return ()
    try:
        dims, types = msgspec.json.decode(args.dims), msgspec.json.decode(args.types)
    except (msgspec.DecodeError, RecursionError):
        return ()
    if not isinstance(dims, list) or not isinstance(types, list):
        return ()
    tensors = []
    for shape, dtype in zip(dims, types, strict=False):
        if not isinstance(shape, list) or not isinstance(dtype, str):
            continue
        if dtype in ("", "Scalar", "ScalarList") and not shape:
            continue
        if shape and isinstance(shape[0], list):
            tensors.append((sum(_product(s) for s in shape), element_bytes(dtype)))
        elif shape or dtype not in ("", "Scalar", "ScalarList", "TensorList", "GenericList"):
            tensors.append((_product(shape), element_bytes(dtype)))
    return tuple(tensors)


def _product(shape: Any) -> int:
    n = 1
    for d in shape if isinstance(shape, list) else ():
        n *= d if isinstance(d, int) else 1
    return n


def as_int(value: Any) -> int | None:
    """Return a 64-bit integer, or None for anything else."""
    try:
        number = None if value is None or value == "" or isinstance(value, bool) else int(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if number is not None and abs(number) < 1 << 63 else None
