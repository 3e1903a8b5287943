"""Scan many files, in parallel if it saves time: logs, flight-recorder dumps, and the exit records of a run folder."""

from __future__ import annotations

from pathlib import Path

import msgspec
from msgspec import Struct

from allranks.analysis.diagnose.logs import LogFile, UnreadableLog, read_blocks
from allranks.analysis.diagnose.records import EMPTY_FILE, FileScan, LogSignal
from allranks.analysis.diagnose.scanner import Scanner
from allranks.analysis.flight_recorder import HEAD, is_flight_record, read_flight_record
from allranks.analysis.nccl_ras import TABLE, read_ras, report_lines
from allranks.utils.inputs import open_regular, read_regular
from allranks.utils.machine import usable_cpus
from allranks.utils.workers import map_in_processes

EXIT_RECORD_SUFFIX = ".exit.json"
_STOPPED = (0, -15)  # completed, or stopped because another process had failed


class _Exit(Struct):
    rank: int
    host: str
    exitcode: int
    time: float | None = None
    failure: str = ""
    killed_for_memory: bool | None = None


class _Exits(Struct):
    failed: list[_Exit] = []
    succeeded: list[_Exit] = []


def add_exit_records(scan: FileScan, path: Path) -> None:
    """Set ranks in the signals of a node's exit records, and add the failed processes, the first failure first."""
    try:
        data = read_regular(path)
        exits = msgspec.json.decode(data, type=_Exits)
        failed = [e for e in exits.failed if e.exitcode not in _STOPPED]
    except (OSError, msgspec.DecodeError, RecursionError):
        return  # truncated by a kill: its text was scanned
    text = data.decode("utf-8", "replace").splitlines()
    # the agent's own words, such as why it stopped its ranks, are no sign of a failure
    scan.signals = [s for s in scan.signals if (s.kind, s.emitter) != ("sign", "allranks")]
    for signal in scan.signals:
        signal.emitter = "launcher"  # agents of allranks write these records

    def place_of(end: _Exit) -> int:
        return next((i for i, line in enumerate(text, 1) if line.strip().startswith(f'"rank": {end.rank},')), 1)

    for end in failed:
        at = place_of(end)
        for signal in scan.signals:
            if at <= signal.line <= at + 5 and signal.rank is None:
                signal.rank, signal.host, signal.time = end.rank, end.host, end.time
        scan.signals.append(_signal("rank_end", scan.file, at, end))
    early = [("rank_early", e) for e in exits.failed if e.exitcode == 0]
    for owner, end in [*early, *(("rank_done", e) for e in exits.succeeded)]:
        scan.signals.append(_signal(owner, scan.file, place_of(end), end))


def _signal(owner: str, file: int, line: int, end: _Exit) -> LogSignal:
    kind, _, said = end.failure.partition(": ")
    groups = {
        "code": str(end.exitcode),
        "for_memory": {None: "", True: "yes", False: "no"}[end.killed_for_memory],
        "said": said if kind == "sys.exit" and not said.startswith("exit code ") else "",
    }
    return LogSignal(
        kind="fact",
        owner=owner,
        weight=0.5,
        file=file,
        line=line,
        time=end.time,
        rank=end.rank,
        host=end.host,
        text=f"rank {end.rank} on {end.host} ended with exit code {end.exitcode}",
        groups=groups,
    )


PARALLEL_BYTES = 48 << 20  # below this, starting processes costs more than it saves
AGENT_LOG_SUFFIX = ".agent.log"  # the agent only writes errors to it

_scanner: Scanner | None = None


def scan_files(sources: list[LogFile], workers: int | None = None) -> list[FileScan]:
    """Scan every file; the results are in the order of `sources`."""
    count = min(workers or usable_cpus(), len(sources))
    if count < 2 or (workers is None and sum(s.size for s in sources) < PARALLEL_BYTES):
        return [scan_file(pair) for pair in enumerate(sources)]
    # so that the processes end at about the same time
    queue = sorted(enumerate(sources), key=lambda pair: -pair[1].size)
    scans = [
        _unread(number, f"was not read: {scan}") if isinstance(scan, ChildProcessError) else scan
        for (number, _), scan in zip(queue, map_in_processes(scan_file, queue, count), strict=True)
    ]
    return sorted(scans, key=lambda scan: scan.file)


def scan_file(numbered: tuple[int, LogFile]) -> FileScan:
    """Scan one file; an error in one file does not affect the others."""
    global _scanner  # one per process: it caches line forms for all files  # noqa: PLW0603
    _scanner = _scanner or Scanner()
    try:
        return _scan_one(_scanner, *numbered)
    except Exception as error:  # noqa: BLE001 - files are untrusted; one must not stop the others
        return _unread(numbered[0], f"was not read: {type(error).__name__} while it was analysed: {str(error)[:200]}")


def _unread(number: int, why: str) -> FileScan:
    scan = FileScan(file=number)
    scan.problems = [why]
    return scan


def _scan_one(scanner: Scanner, number: int, source: LogFile) -> FileScan:
    problems: list[str] = []
    head = _head(source)
    if is_flight_record(head):
        return _flight(number, source)

    def pieces():
        try:
            yield from read_blocks(source)
        except UnreadableLog as error:
            problems.append(str(error))

    scan = scanner.scan(number, pieces())
    if not scan.bytes_read and not problems and not source.path.name.endswith(AGENT_LOG_SUFFIX):
        problems.append(EMPTY_FILE)
    scan.problems = problems
    if TABLE.encode() in head:
        text = read_regular(source.path).decode(errors="replace")
        reports = {first + n for first, lines in report_lines(text) for n in range(len(lines))}
        scan.ras = read_ras(text)  # its headings, such as TIMEOUT, are not messages of other programs
        scan.signals = [signal for signal in scan.signals if signal.line not in reports]
    if source.path.name.endswith(EXIT_RECORD_SUFFIX):
        add_exit_records(scan, source.path)
    return scan


def _head(source: LogFile) -> bytes:
    try:
        with open_regular(source.path) as file:
            return file.read(HEAD)
    except OSError:
        return b""  # the scan reports it


def _flight(number: int, source: LogFile) -> FileScan:
    scan = FileScan(file=number)
    try:
        scan.flight = read_flight_record(source.path)
        scan.bytes_read = source.size
    except (ValueError, OSError, MemoryError) as error:
        scan.problems = [str(error) or "needs more memory than there is"]
    return scan
