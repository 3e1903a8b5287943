"""Read the Linux kernel's counters: CPU time that this process got and waited for, and its TCP connections by peer
address.

`judge_machine` says from the differences of two samples who took the CPU time that this process did not get. Gloo, and
NCCL over sockets, send on the TCP connections; connections within one host are left out. What cannot be read is None,
or is left out: absence is not evidence.
"""

from __future__ import annotations

import math
import os
import re
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from allranks.utils.text import format_ranges, parse_ranges

NS = 1e-9
BUSY_THREAD_SHARE = 0.1
"""Share of the time that a thread must have run or waited for a core to count as busy."""
OVERLOADED = 0.1
"""Taken share of ranks' CPU time from which a measurement is disturbed; a run's agent and command take some, too."""
COMPETING = 0.2
"""Share of the ranks' CPU time that they wait for each other from which it is reported."""
CLOCK_ERROR_S = 0.02
"""Error of the kernel's count of busy time on each core: it counts in ticks."""
MIN_SECONDS = 0.05


class CpuUse(msgspec.Struct, frozen=True, kw_only=True):
    """CPU time during some seconds, in seconds: of this process, and of all processes on the cores that it may use.

    ``queued_s`` is the time in which threads of this process could run but had no core (run-queue wait), summed over
    threads, and ``queued_main_s`` the same for the main thread. ``machine_s`` and ``steal_s`` are of ``cores``.
    """

    seconds: float
    cores: str
    core_count: int
    cpu_s: float
    queued_s: float | None = None
    queued_main_s: float | None = None
    busy_threads: int | None = None
    machine_s: float | None = None
    steal_s: float | None = None
    throttled_s: float | None = None


class CpuSample(msgspec.Struct, frozen=True, kw_only=True):
    """Counters at one moment. ``threads`` has for each thread the seconds that it ran and that it waited for a core."""

    at_s: float
    cores: tuple[int, ...]
    cpu_s: float
    threads: dict[int, tuple[float, float]] | None
    machine_s: float | None
    steal_s: float | None
    throttled_s: float | None


class RunQueueClock:
    """The time that the calling thread could run but had no core, in seconds; None if the kernel does not report it.

    The file stays open, so that one call costs about a microsecond.
    """

    def __init__(self) -> None:
        self._fd: int | None = None
        with suppress(OSError):
            file = f"/proc/self/task/{threading.get_native_id()}/schedstat"
            self._fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        self.available = self.read() is not None

    def read(self) -> float | None:
        """Return the seconds so far; only differences are meaningful."""
        if self._fd is None:
            return None
        try:
            return int(os.pread(self._fd, 80, 0).split()[1]) * NS
        except (OSError, IndexError, ValueError):
            return None


def sample_cpu() -> CpuSample:
    """Return the counters of this process and of its cores."""
    cores = tuple(sorted(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else ()
    machine_s, steal_s = _core_times(cores)
    return CpuSample(
        at_s=time.monotonic(),
        cores=cores,
        cpu_s=time.process_time(),
        threads=_threads(),
        machine_s=machine_s,
        steal_s=steal_s,
        throttled_s=_throttled(),
    )


def use_between(first: CpuSample, last: CpuSample) -> CpuUse:
    """Return the CPU time between two samples of the same process. Counters that went back or are missing give None."""
    seconds = max(last.at_s - first.at_s, 0.0)
    queued = main = busy = None
    if first.threads is not None and last.threads is not None:
        grown = {tid: _grown_thread(first.threads.get(tid, (0.0, 0.0)), now) for tid, now in last.threads.items()}
        queued = sum(q for _, q in grown.values())
        main = grown[os.getpid()][1] if os.getpid() in grown else None
        busy = sum(ran + q > BUSY_THREAD_SHARE * seconds for ran, q in grown.values()) if seconds else 0
    return CpuUse(
        seconds=round(seconds, 6),
        cores=format_ranges(last.cores),
        core_count=len(last.cores),
        cpu_s=round(max(last.cpu_s - first.cpu_s, 0.0), 6),
        queued_s=_grown(0.0, queued),
        queued_main_s=_grown(0.0, main),
        busy_threads=busy,
        machine_s=_grown(first.machine_s, last.machine_s) if first.cores == last.cores else None,
        steal_s=_grown(first.steal_s, last.steal_s) if first.cores == last.cores else None,
        throttled_s=_grown(first.throttled_s, last.throttled_s),
    )


def _grown_thread(before: tuple[float, float], now: tuple[float, float]) -> tuple[float, float]:
    ran, queued = before
    if now[0] < ran or now[1] < queued:  # another thread with the number of one that has ended
        return now
    return now[0] - ran, now[1] - queued


def _grown(before: float | None, now: float | None) -> float | None:
    return None if before is None or now is None or now < before else round(now - before, 6)


def _cores_of(use: CpuUse) -> set[int]:
    """Return the core numbers of a record; none if it is malformed."""
    try:
        return parse_ranges(use.cores)
    except ValueError:
        return set()


def _threads() -> dict[int, tuple[float, float]] | None:
    times: dict[int, tuple[float, float]] = {}
    try:
        tasks = list(Path("/proc/self/task").iterdir())
    except OSError:
        return None
    for task in tasks:
        try:
            ran, queued, *_ = (task / "schedstat").read_bytes().split()
            times[int(task.name)] = (int(ran) * NS, int(queued) * NS)
        except (OSError, ValueError):  # the thread has ended
            continue
    return times or None


def _core_times(cores: tuple[int, ...]) -> tuple[float | None, float | None]:
    """Return busy and stolen seconds of these cores; None if they are not known.

    Interrupts are not counted: no process causes them alone.
    """
    import psutil  # takes long to import

    try:
        times = psutil.cpu_times(percpu=True)
        online = Path("/sys/devices/system/cpu/online").read_text()
    except (OSError, ValueError):
        return None, None
    # psutil lists the cores that are online, without their numbers
    if not cores or cores[-1] >= len(times) or parse_ranges(online) != set(range(len(times))):
        return None, None
    own = [times[core] for core in cores]
    return sum(t.user + t.nice + t.system for t in own), sum(t.steal for t in own)


def _throttled() -> float | None:
    """Return how long a CPU quota has stopped this process's group (cgroups version 2); None without a quota."""
    with suppress(OSError):
        path = Path("/proc/self/cgroup").read_text().strip().removeprefix("0::")
        for folder in (f"/sys/fs/cgroup{path}", "/sys/fs/cgroup"):  # the second one in a container
            with suppress(OSError):
                match = re.search(r"^throttled_usec (\d+)$", Path(folder, "cpu.stat").read_text(), re.MULTILINE)
                return int(match[1]) * 1e-6 if match else None
    return None


class MachineLoad(msgspec.Struct, frozen=True, kw_only=True):
    """What happened to the CPU time of ranks on one host. Shares are relative to the CPU time that ranks requested.

    ``taken_share`` is None if unknown. ``others_cores`` and ``steal_cores`` are means over the time: at 2.0, other
    processes, or the hypervisor, used two cores all the time. ``competing_share`` is what ranks took from each other.
    """

    host: str
    seconds: float
    cores: int
    busy_threads: int | None = None
    taken_share: float | None = None
    others_cores: float | None = None
    steal_cores: float | None = None
    competing_share: float | None = None
    throttled_share: float | None = None
    compute_threads: int | None = None
    """Threads that each rank computes with, the largest number; None if not known."""

    @property
    def overloaded(self) -> bool:
        """Return whether others are known to have taken CPU time."""
        return self.taken_share is not None and self.taken_share >= OVERLOADED


def judge_machine(host: str, uses: Sequence[CpuUse]) -> MachineLoad:
    """Return what happened to the ranks of a host.

    Args:
        uses: one record of each rank on that host, for about the same time. All of them: the CPU time of a rank that is
            left out counts as that of other processes.
    """
    good = [u for u in uses if u.seconds > 0 and u.core_count > 0 and _sound(u)]
    cores = set[int]().union(*map(_cores_of, good))
    seconds = min((u.seconds for u in good), default=0.0)
    known = [u for u in good if u.queued_s is not None and u.machine_s is not None]
    if len(known) < len(uses) or not known or seconds < MIN_SECONDS:
        return MachineLoad(host=host, seconds=round(seconds, 3), cores=len(cores))
    wanted = queued = taken = others = steal = 0.0
    for own in {u.cores for u in known}:
        g = _judge_group([u for u in known if u.cores == own], known)
        queued, taken, wanted = queued + g.queued, taken + g.taken, wanted + g.wanted
        others, steal = others + g.others, steal + g.steal
    throttled = [u.throttled_s / u.seconds for u in good if u.throttled_s is not None]
    threads = [u.busy_threads for u in good if u.busy_threads is not None]
    return MachineLoad(
        host=host,
        seconds=round(seconds, 3),
        cores=len(cores),
        busy_threads=sum(threads) if len(threads) == len(good) else None,
        taken_share=round(taken / wanted, 4) if wanted > 0 else 0.0,
        others_cores=round(others, 2),
        steal_cores=round(steal, 2),
        competing_share=round(max(queued - taken, 0.0) / wanted, 4) if wanted > 0 else 0.0,
        throttled_share=round(max(throttled), 4) if throttled else None,
    )


def _sound(use: CpuUse) -> bool:
    values = (use.seconds, use.cpu_s, use.queued_s, use.queued_main_s, use.machine_s, use.steal_s, use.throttled_s)
    return all(v is None or (math.isfinite(v) and v >= 0) for v in values)


class _Group(msgspec.Struct, frozen=True):
    """Rates of the ranks of one set of cores, in CPU-seconds per second."""

    wanted: float
    queued: float
    taken: float
    others: float
    steal: float


def _judge_group(group: list[CpuUse], every: Sequence[CpuUse]) -> _Group:
    cores = _cores_of(group[0])
    cpu = sum(u.cpu_s / u.seconds for u in group)
    # a quota stops threads without any other process
    throttled = max((u.throttled_s or 0.0) / u.seconds for u in group)
    queued = max(sum((u.queued_s or 0.0) / u.seconds for u in group) - throttled, 0.0)
    machine = sum((u.machine_s or 0.0) / u.seconds for u in group) / len(group)
    stolen = sum((u.steal_s or 0.0) / u.seconds for u in group) / len(group)
    # Ranks with other sets of cores may have run on these, too; in doubt they did.
    near = sum(u.cpu_s / u.seconds for u in every if u.cores != group[0].cores and _cores_of(u) & cores)
    error = CLOCK_ERROR_S * len(cores) / min(u.seconds for u in group)
    others = max(machine - cpu - near - error, 0.0)
    steal = stolen * min(cpu / machine, 1.0) if machine > 0 else 0.0
    steal = max(steal - error, 0.0)
    return _Group(cpu + queued + steal, queued, min(queued, others) + steal, others, stolen)


def add_uses(uses: Sequence[CpuUse]) -> CpuUse | None:
    """Return the sum of consecutive records of one rank; None without records or if its cores changed."""
    if not uses or len({u.cores for u in uses}) > 1:
        return None
    threads = [u.busy_threads for u in uses if u.busy_threads is not None]
    added = ("seconds", "cpu_s", "queued_s", "queued_main_s", "machine_s", "steal_s", "throttled_s")
    sums = {name: _sum([getattr(u, name) for u in uses]) for name in added}
    return msgspec.structs.replace(uses[0], busy_threads=max(threads) if threads else None, **sums)


def _sum(values: Sequence[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return sum(known) if len(known) == len(values) else None


def describe_load(load: MachineLoad) -> str:
    """Return what took the CPU time, with numbers, for the end of a sentence."""
    parts = []
    if load.others_cores is not None and load.others_cores >= 0.05:
        parts.append(f"other processes used {load.others_cores:.1f} of {load.cores} cores")
    if load.steal_cores is not None and load.steal_cores >= 0.05:
        parts.append(f"the hypervisor took {load.steal_cores:.1f} of {load.cores} cores (steal)")
    if load.competing_share is not None and load.competing_share >= COMPETING:
        threads = f"{load.busy_threads} busy threads of its ranks" if load.busy_threads else "the threads of its ranks"
        parts.append(f"{'its ranks' if load.compute_threads == 1 else threads} share {load.cores} cores")
    if load.throttled_share is not None and load.throttled_share >= OVERLOADED:
        parts.append(f"its CPU quota stopped the ranks for {load.throttled_share:.0%} of the time")
    return "; ".join(parts) or f"on {load.cores} cores"


MAX_LINKS = 64
_FAMILIES = (socket.AF_INET, socket.AF_INET6)


class LinkCounters(msgspec.Struct, frozen=True, kw_only=True):
    """Counters of all connections to one address since they were opened.

    ``segments`` and ``resent`` count segments with data that were sent, and sent again. ``acked_bytes`` arrived.
    ``busy_s`` is the time in which data was on its way, ``receiver_s`` the part in which the receiver's window was
    full: the receiver did not read. ``rtt_s`` is the largest smoothed round-trip time, ``min_rtt_s`` the smallest ever.
    """

    peer: str
    connections: int
    segments: int
    resent: int
    acked_bytes: int
    busy_s: float
    receiver_s: float
    rtt_s: float
    min_rtt_s: float


def read_tcp_info(peer: str, data: bytes) -> LinkCounters | None:
    """Return a connection's counters from a struct tcp_info (linux/tcp.h); None if a kernel before 4.10 lacks some."""
    if len(data) < 192:
        return None
    (rtt_us,) = struct.unpack_from("=I", data, 68)
    (resent,) = struct.unpack_from("=I", data, 100)
    (acked,) = struct.unpack_from("=Q", data, 120)
    (min_rtt_us,) = struct.unpack_from("=I", data, 148)
    (segments,) = struct.unpack_from("=I", data, 156)
    busy_us, receiver_us = struct.unpack_from("=QQ", data, 168)
    return LinkCounters(
        peer=peer,
        connections=1,
        segments=segments,
        resent=resent,
        acked_bytes=acked,
        busy_s=busy_us * 1e-6,
        receiver_s=receiver_us * 1e-6,
        rtt_s=rtt_us * 1e-6,
        min_rtt_s=min_rtt_us * 1e-6,
    )


def tcp_links() -> tuple[list[str], list[LinkCounters]]:
    """Return this process's own addresses and its links to other hosts, those with most data first."""
    if socket.getdefaulttimeout() is not None:  # Python would change the connections to non-blocking
        return [], []
    own: set[str] = set()
    by_peer: dict[str, list[LinkCounters]] = {}
    for local, one in _connections():
        own.add(local)
        by_peer.setdefault(one.peer, []).append(one)
    links = [_sum_counters(peer, connections) for peer, connections in by_peer.items()]
    return sorted(own), sorted(links, key=lambda link: (-link.acked_bytes, link.peer))[:MAX_LINKS]


def _connections() -> list[tuple[str, LinkCounters]]:
    connections: list[tuple[str, LinkCounters]] = []
    try:
        files = list(Path("/proc/self/fd").iterdir())
    except OSError:
        return connections
    for file in files:
        with suppress(OSError, ValueError):  # closed meanwhile, not connected, or no TCP
            if str(file.readlink()).startswith("socket:") and (one := _connection(int(file.name))):
                connections.append(one)
    return connections


def _connection(fd: int) -> tuple[str, LinkCounters] | None:
    own = os.dup(fd)  # so that another thread that closes it does not pull it away
    try:
        connection = socket.socket(fileno=own)
    except OSError:
        os.close(own)
        return None
    with connection:
        if connection.family not in _FAMILIES or connection.type != socket.SOCK_STREAM:
            return None
        local, peer = _address(connection.getsockname()), _address(connection.getpeername())
        if _is_local(local, peer):
            return None
        counters = read_tcp_info(peer, connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256))
    return (local, counters) if counters else None


def _is_local(local: str, peer: str) -> bool:
    return local == peer or peer.startswith("127.") or peer == "::1"


def _address(name: tuple[object, ...]) -> str:
    return str(name[0]).removeprefix("::ffff:").partition("%")[0]


def _sum_counters(peer: str, connections: list[LinkCounters]) -> LinkCounters:
    added = ("segments", "resent", "acked_bytes", "busy_s", "receiver_s")
    return LinkCounters(
        peer=peer,
        connections=len(connections),
        **{name: round(sum(getattr(c, name) for c in connections), 6) for name in added},
        rtt_s=round(max(c.rtt_s for c in connections), 6),
        min_rtt_s=round(min(c.min_rtt_s for c in connections), 6),
    )


def connection_addresses(
    pids: Iterable[int], *, peers: Iterable[str] | None = None, without_ports: Iterable[int] = ()
) -> Counter[str]:
    """Count the local addresses of these processes' connections.

    Excluded are the store's ports, and with `peers` (addresses of the nodes) connections to other hosts. A connection
    between two processes of this node counts at both ends. Processes that have ended are skipped.
    """
    import psutil  # takes long to import

    known, skip = None if peers is None else set(peers), set(without_ports)
    ends: set[tuple[Any, Any]] = set()  # forked processes share connections
    for pid in pids:
        with suppress(psutil.Error, OSError):
            for one in psutil.Process(pid).net_connections("tcp"):
                if one.status == psutil.CONN_ESTABLISHED:
                    ends.add((one.laddr, one.raddr))
    counts: Counter[str] = Counter()
    for (local, own), (peer, other) in ends:
        remote = peer.removeprefix("::ffff:")
        if (known is None or remote in known or remote.startswith("127.")) and not {own, other} & skip:
            counts[local.removeprefix("::ffff:")] += 1
    return counts


def count_by_interface(addresses: Counter[str], names: dict[str, str]) -> dict[str, int]:
    """Return counts by interface; an address without an interface is listed by itself."""
    counts: Counter[str] = Counter()
    for address, count in addresses.items():
        counts["lo" if address.startswith("127.") or address == "::1" else names.get(address, address)] += count
    return dict(sorted(counts.items()))
