"""Nodes' clocks: how far they are apart, by steps that ranks end together, and times brought to one clock."""

from __future__ import annotations

from allranks.diagnose.judge.case import Case
from allranks.diagnose.lines import YEAR_KNOWN, comparable, with_year
from allranks.diagnose.records import Clocks

APART_S = 1.0  # below this a difference between clocks is no news: ranks end a step that far apart


def align(case: Case) -> Clocks:
    """Find how far the hosts' clocks are apart, and bring the times of all signals to the first host's clock.

    Ranks that exchange gradients end a step together, so the difference between the times that two hosts give to one step is
    that of their clocks. Where hosts share no such step nothing is changed, and the answer says so.
    """
    _lend_year(case)
    steps = _steps_by_host(case)
    timed = {host for s in case.signals if s.time is not None and (host := case.host_of(s))}
    if len(timed) < 2:
        return Clocks()
    offsets, unknown = _offsets(steps, sorted(timed))
    for signal in case.signals:
        if signal.time is not None:
            signal.time -= offsets.get(case.host_of(signal) or "", 0.0)
    case.unsure_hosts = frozenset(unknown)
    return Clocks(
        offsets_s={h: round(o, 3) for h, o in offsets.items() if o}, unknown=unknown, note=_note(offsets, unknown)
    )


def _lend_year(case: Case) -> None:
    """Kernel, syslog and NCCL lines have no year: beside lines that have one they are taken to be of the same time."""
    known = [s.time for s in case.signals if s.time is not None and s.time >= YEAR_KNOWN]
    if known:
        for signal in case.signals:
            if signal.time is not None and signal.time < YEAR_KNOWN:
                signal.time = with_year(signal.time, known[-1])


def _steps_by_host(case: Case) -> dict[str, dict[int, float]]:
    """The earliest time that each host gives to each step."""
    found: dict[str, dict[int, float]] = {}
    for scan in case.scans:
        host = case.file_host(scan.file)
        if host is None:
            continue
        times = found.setdefault(host, {})
        for step, time in scan.marks.items():
            times[step] = min(time, times.get(step, time))
    return found


def _offsets(steps: dict[str, dict[int, float]], hosts: list[str]) -> tuple[dict[str, float], list[str]]:
    """Seconds that each host's clock is ahead of the first's, and the hosts of which nothing is known."""
    first = next((h for h in hosts if steps.get(h)), None)
    if first is None:
        return {}, hosts
    offsets, unknown = {first: 0.0}, []
    for host in hosts:
        own = steps.get(host, {})
        apart = [t - steps[first][s] for s, t in own.items() if s in steps[first] and comparable(t, steps[first][s])]
        if host != first and not apart:
            unknown.append(host)
        elif host != first:
            apart.sort()
            middle, spread = apart[len(apart) // 2], apart[-1] - apart[0]
            offsets[host] = middle if abs(middle) >= max(APART_S, 2 * spread) else 0.0
    return offsets, unknown


def _note(offsets: dict[str, float], unknown: list[str]) -> str:
    first = next(iter(offsets), None)
    told = [f"{h} {abs(o):.0f} s {'ahead of' if o > 0 else 'behind'} {first}" for h, o in offsets.items() if o]
    said = []
    if told:
        said.append(
            f"clocks differ ({', '.join(told[:6])}, by steps that both logs tell); the times here are brought to that of {first}"
        )
    if unknown:
        named = ", ".join(unknown[:6]) + (", ..." if len(unknown) > 6 else "")
        said.append(
            f"the order between hosts is uncertain: no step that both tell shows how the clock of {named} stands"
        )
    return "; ".join(said)
