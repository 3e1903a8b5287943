"""Scanning many files, in parallel where that pays."""

from __future__ import annotations

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor

from allranks.diagnose.flightrec import HEAD, is_flight_record, read_flight_record
from allranks.diagnose.records import IS_EMPTY
from allranks.diagnose.rundata import ENDS, note_ends
from allranks.diagnose.scan import Scanner
from allranks.diagnose.signals import FileScan
from allranks.diagnose.sources import Source, Unreadable, blocks

PARALLEL_BYTES = 48 << 20  # below this, starting processes costs more than it saves
AGENT_LOG = ".agent.log"  # the agent writes to it only where something is wrong
SHARES = 4  # portions a worker, so that uneven files even out

_scanner: Scanner | None = None


def scan_all(sources: list[Source], workers: int | None = None) -> list[FileScan]:
    """Scan every file; the results are in the order of `sources`."""
    numbered = list(enumerate(sources))
    count = workers or len(os.sched_getaffinity(0))
    count = min(count, len(sources))
    if count < 2 or (workers is None and sum(s.size for s in sources) < PARALLEL_BYTES):
        return _scan_some(numbered)
    portions = _portions(numbered, count * SHARES)
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(count, mp_context=context) as pool:
        scans = [scan for part in pool.map(_scan_some, portions) for scan in part]
    return sorted(scans, key=lambda s: s.file)


def _portions(numbered: list[tuple[int, Source]], count: int) -> list[list[tuple[int, Source]]]:
    """Files dealt out, largest first, so that portions are about equal in bytes."""
    portions: list[list[tuple[int, Source]]] = [[] for _ in range(count)]
    sizes = [0] * count
    for number, source in sorted(numbered, key=lambda pair: -pair[1].size):
        at = sizes.index(min(sizes))
        portions[at].append((number, source))
        sizes[at] += source.size
    return [p for p in portions if p]


def _scan_some(numbered: list[tuple[int, Source]]) -> list[FileScan]:
    global _scanner  # one a process: what it learned of forms and words serves all files  # noqa: PLW0603
    if _scanner is None:
        _scanner = Scanner()
    return [_scan_one(_scanner, number, source) for number, source in numbered]


def _scan_one(scanner: Scanner, number: int, source: Source) -> FileScan:
    problems: list[str] = []
    if _is_flight_record(source):
        return _flight(number, source)

    def pieces():
        try:
            yield from blocks(source)
        except Unreadable as error:
            problems.append(str(error))

    scan = scanner.scan(number, pieces())
    if not scan.bytes_read and not problems and not source.path.name.endswith(AGENT_LOG):
        problems.append(IS_EMPTY)
    scan.problems = problems
    if source.path.name.endswith(ENDS):
        note_ends(scan, source.path)
    return scan


def _is_flight_record(source: Source) -> bool:
    try:
        with source.path.open("rb") as file:
            return is_flight_record(file.read(HEAD))
    except OSError:
        return False  # the scan says so


def _flight(number: int, source: Source) -> FileScan:
    scan = FileScan(file=number, bytes_read=source.size)
    try:
        scan.flight = read_flight_record(source.path)
    except (ValueError, OSError) as error:
        scan.problems = [str(error)]
    return scan
