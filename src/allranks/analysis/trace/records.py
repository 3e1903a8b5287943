"""Records of a trace report, and sums of its collectives by phase.

One `TraceReport` covers all ranks of one run (or one window of it). Times are in seconds, sizes in bytes. Points in
time (`start_s`, `end_s`) count from the earliest window start of any rank, on the clock derived from paired
collectives: equal points on two ranks are the same time, as far as the traces show. docs/trace.md defines each metric.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from allranks.utils.text import format_bytes

Device = Literal["gpu", "cpu"]
Phase = Literal["forward", "backward", "optimizer", "data", "other"]
PHASES: tuple[Phase, ...] = ("forward", "backward", "optimizer", "data", "other")
Severity = Literal["error", "warning", "note"]


class Record(Struct, frozen=True, kw_only=True):
    """Base of all records of a trace report."""


class Problem(Record, frozen=True):
    """A limitation of the figures; `error`: a file was not read, `note`: how a figure was computed."""

    severity: Severity
    # one of: unreadable, truncated, damaged_events, not_a_trace, no_rank, missing_ranks, no_steps, ...
    kind: str
    message: str
    file: str | None = None
    rank: int | None = None


class Breakdown(Record, frozen=True):
    """The parts of a span of time. compute_s + exposed_comm_s + copy_s + idle_s = span_s."""

    span_s: float
    compute_s: float
    exposed_comm_s: float  # communication while no compute ran
    copy_s: float  # memory copies and sets while neither compute nor communication ran
    idle_s: float
    comm_s: float  # all communication, spans merged; exposed + overlapped
    overlapped_comm_s: float
    copy_total_s: float  # all copies, spans merged

    @property
    def overlap(self) -> float | None:
        """Return the share of communication hidden by compute, 0 to 1; None without communication."""
        return self.overlapped_comm_s / self.comm_s if self.comm_s > 0 else None


class PhaseRow(Record, frozen=True):
    """Time of one phase of training."""

    phase: Phase
    host_s: float  # wall time of the phase on the host
    busy_s: float  # GPU: sum of the kernels launched in it; CPU: time of operators in it (compute only)
    comm_s: float  # sum of the collectives launched in it


class StepReport(Record, frozen=True):
    """One step (one `ProfilerStep#N` mark) of one rank."""

    step: int
    start_s: float
    end_s: float
    trimmed: bool  # its start was cut because profilers started at different times
    breakdown: Breakdown
    phases: tuple[PhaseRow, ...] = ()


CPU_MEMORY = (
    "On the CPU PyTorch counts allocations since the profiler started: weights allocated before are not included."
)


class MemoryReport(Record, frozen=True):
    """The allocator statistics of one device of one rank, from the profiler's memory events."""

    device: str  # "cpu", "gpu:0", ...
    peak_bytes: int
    last_bytes: int
    peak_reserved_bytes: int | None
    n_events: int
    points: tuple[tuple[float, int], ...]  # (time_s, allocated bytes), thinned to a few hundred, with the peak


class TopRow(Record, frozen=True):
    """A kernel or an operator, summed over the ranks that were read."""

    name: str
    kind: Literal["compute", "comm", "copy"]
    count: int
    total_s: float  # kernels: sum of durations; operators: sum of self times (without children on the same thread)
    mean_s: float
    max_s: float
    share: float  # of the sum over all rows, shown or not


class LaunchRow(Record, frozen=True):
    """Collectives that one rank launched in one step, by kind and by the phase they were launched in."""

    rank: int
    step: int | None
    kind: str
    phase: Phase
    count: int
    bytes: int | None  # None: unknown
    time_s: float


MAX_DISTINCT_SIZES = 2


class CollectiveRow(Record, frozen=True):
    """All collectives of one kind (in `TraceReport.collectives`), or of one kind and size bucket (in `.sizes`).

    Bandwidths are bytes over *transfer* time if the collective was paired across ranks, over its own duration
    otherwise; None without sizes.
    """

    kind: str
    group_size: int | None  # None: unknown, or several
    size_bucket: str | None  # "<= 64 KiB"; None in the sums over all sizes
    count: int  # over all ranks that were read
    bytes: int | None  # sum, nccl-tests' "size" of each
    # sizes that occurred, ascending; of more than `MAX_DISTINCT_SIZES` the smallest and the largest
    distinct_bytes: tuple[int, ...]
    n_distinct: int
    total_s: float  # sum of durations over all ranks
    transfer_s: float | None  # part of it after the last rank had arrived; None if unpaired
    wait_s: float | None  # part of it waiting for the last rank
    mean_s: float
    max_s: float
    algbw_bytes_s: float | None
    busbw_bytes_s: float | None

    @property
    def sizes_text(self) -> str:
        """Return the sizes of messages that occurred: all of a few, else the smallest and the largest."""
        shown = [format_bytes(size, digits=4) for size in self.distinct_bytes]
        return (" to " if self.n_distinct > len(shown) else ", ").join(shown) or "-"


class PairReport(Record, frozen=True):
    """One collective, found on several ranks."""

    kind: str
    group: str
    key: str  # "seq 17" or "step 4, 3rd all_reduce of 1.0 MiB"
    step: int | None
    bytes: int | None
    transfer_s: float  # the shortest of the ranks' durations
    last_rank: int  # the rank that waited least
    ranks: tuple[int, ...]
    wait_s: tuple[float, ...]  # by rank, as in `ranks`
    start_s: tuple[float, ...]
    end_s: tuple[float, ...]


class Pairing(Record, frozen=True):
    """How many collectives were matched across ranks."""

    paired: int  # collectives found on at least two ranks
    by_sequence: int  # of them, by communicator and sequence number
    by_order: int
    unpaired: int  # found on one rank only, although more ranks of the group were read
    transfer_s: float  # sums over pairs and ranks
    wait_s: float
    longest: tuple[PairReport, ...]  # the pairs with most waiting, at most 50


class StragglerRow(Record, frozen=True):
    """The arrival of one rank at the collectives that it shares with others."""

    rank: int
    pairs: int
    last: int  # how often it was last
    last_share: float
    wait_s: float  # its own wait
    caused_wait_s: float  # when it was last, sum over pairs of the longest wait of another rank
    mean_late_s: float  # when it was last, mean over those pairs of the longest wait of another rank
    max_late_s: float


class StartupTrim(Record, frozen=True):
    """Profilers that started at different times, and the time that was left out because of it."""

    skew_s: float  # between the first and the last start, on the common clock
    until: str  # description of the event after which the windows start
    removed_s: dict[int, float]  # by rank
    fake_wait_s: dict[int, float]  # by rank: waits for a profiler that started later


class RankReport(Record, frozen=True):
    """One rank."""

    rank: int
    path: str
    file_bytes: int
    n_events: int
    device: Device
    device_name: str | None
    world_size: int | None
    backend: str | None
    whole: bool  # False: the file is truncated or damaged, figures use the readable part
    base_time_ns: int  # wall clock of ts 0 (0 if unknown)
    clock_offset_s: float  # subtract it from this rank's clock to get the common one
    clock_pairs: int  # collectives that the offset was estimated from; 0: not aligned
    clock_spread_s: float | None  # median absolute deviation of the estimate
    zero_us: float  # this rank's `ts` (microseconds, as in its file) at the report's zero; ts -> (ts - zero_us) / 1e6 s
    start_s: float
    end_s: float
    total: Breakdown
    steps: tuple[StepReport, ...]
    phases: tuple[PhaseRow, ...]
    memory: tuple[MemoryReport, ...]


class TraceReport(Record, frozen=True):
    """One run, or one window of it."""

    name: str
    path: str
    window: str | None  # None: the only one
    device: Device
    backend: str | None
    world_size: int | None
    missing_ranks: tuple[int, ...]
    definition: str  # how compute and communication were distinguished, in one or two sentences
    ranks: tuple[RankReport, ...]
    collectives: tuple[CollectiveRow, ...]
    sizes: tuple[CollectiveRow, ...]
    launches: tuple[LaunchRow, ...]
    pairing: Pairing
    stragglers: tuple[StragglerRow, ...]
    startup: StartupTrim | None
    top_kernels: tuple[TopRow, ...]
    top_operators: tuple[TopRow, ...]
    problems: tuple[Problem, ...]


def totals_by_phase(report: TraceReport) -> tuple[dict[tuple[str, Phase], list[float]], bool, int]:
    """Return (count, bytes, seconds) by kind and phase; whether all sizes are known; ranks times steps."""
    sums: dict[tuple[str, Phase], list[float]] = {}
    for r in report.launches:
        row = sums.setdefault((r.kind, r.phase), [0, 0, 0.0])
        row[0] += r.count
        row[1] += r.bytes or 0
        row[2] += r.time_s
    has_bytes = all(r.bytes is not None for r in report.launches)
    return sums, has_bytes, sum(max(len(r.steps), 1) for r in report.ranks)
