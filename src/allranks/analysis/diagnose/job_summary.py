"""Summarize the job: ranks, transports and versions, clock offsets of hosts, a timeline of events, and what changed
since the last good run.

Clock offsets come from steps that all ranks end together; the timeline converts all times to one clock. The last good
run is the newest successful run folder of the same spec.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any

from allranks.analysis.diagnose.catalogue import CATALOGUE
from allranks.analysis.diagnose.lines import YEAR_KNOWN, in_year_of, times_comparable
from allranks.analysis.diagnose.logs import started_runs
from allranks.analysis.diagnose.patterns import WEAK
from allranks.analysis.diagnose.records import ClockOffsets, DiagnosisCase, JobHealth, LastGoodRun, LogSignal, RunChange
from allranks.errors import RequestError
from allranks.rundir.events import read_events
from allranks.rundir.files import read_record
from allranks.rundir.paths import RunDir, list_runs
from allranks.utils.inputs import read_regular
from allranks.utils.redaction import redact
from allranks.utils.text import as_dict, as_dicts, finite_float, finite_int


def count_connections(paths: Iterable[Path]) -> dict[str, int]:
    """Count connections between ranks by interface (``{"TCP/eth0": 12}``) in each run folder's newest attempt."""
    counts: dict[str, int] = {}
    for run in started_runs(paths):
        for file in sorted(run.logs_of(max(run.attempts(), default=1)).glob("*.connections.json")):
            for name, count in as_dict(read_record(file).get("interfaces")).items():
                counts[f"TCP/{name}"] = counts.get(f"TCP/{name}", 0) + (finite_int(count) or 0)
    return counts


VERSIONS = ("nccl", "torch", "driver")


def describe_health(case: DiagnosisCase, connections: dict[str, int] | None = None) -> JobHealth:
    """Return the facts of a job from lines of NCCL and the program, and from connections recorded by allranks."""
    transports = dict(connections or {})
    for scan in case.scans:
        for via, count in scan.transports.items():
            transports[via] = transports.get(via, 0) + count
    ranks = {r for scan in case.scans for r in scan.ranks}
    network = _distinct(s.groups["net"] for s in (*case.facts("network"), *case.facts("net_device")))
    channels = [int(s.groups["channels"]) for s in case.facts("channels")]
    versions = {name: _distinct(s.groups["version"] for s in case.facts(f"{name}_version")) for name in VERSIONS}
    versions = {name: several for name, several in versions.items() if several}
    return JobHealth(
        world_size=case.world_size,
        ranks_seen=sorted(ranks)[:4096],
        hosts=sorted(case.hosts)[:4096],
        transports=dict(sorted(transports.items(), key=lambda pair: -pair[1])),
        network=network,
        channels=max(channels, default=None),
        interfaces=_distinct(s.groups["interface"] for s in case.facts("bootstrap")),
        versions=versions,
        communicators_ready=sum(scan.ready for scan in case.scans),
        progressed=any(scan.last_progress is not None for scan in case.scans),
        advice=_advice(case, transports, network, versions),
    )


def _distinct(values: object) -> list[str]:
    return list(dict.fromkeys(values))  # type: ignore[call-overload]


def _advice(
    case: DiagnosisCase, transports: dict[str, int], network: list[str], versions: dict[str, list[str]]
) -> list[str]:
    """Return advice on transports and versions that differ from the expected ones."""
    said: list[str] = []
    kinds = {name.split("/")[0].upper(): count for name, count in transports.items()}
    for name, several in versions.items():
        if len(several) > 1:
            said.append(f"{name} has different versions on the ranks ({', '.join(several[:4])}); they should be equal")
    if "SHM" in kinds and "P2P" not in kinds:
        said.append(
            "GPUs of one node exchange data through host memory (SHM); with NVLink or PCIe peer access they would use "
            "P2P"
        )
    if any(name.upper().startswith("NET/SOCKET") for name in transports) or [n.lower() for n in network] == ["socket"]:
        said.append(
            "data between nodes uses TCP sockets; normal on plain Ethernet, ten times too slow if InfiniBand or RoCE "
            "is available"
        )
    if len(case.hosts) == 1 and any(n.startswith("NET") for n in kinds) and "P2P" not in kinds:
        said.append("data within one node goes over the network; P2P or SHM is the usual transport")
    return said


MIN_OFFSET_S = 1.0  # smaller differences are not reported: ranks may end a step that far apart


def align_clocks(case: DiagnosisCase) -> ClockOffsets:
    """Find the clock offsets between hosts, and convert the times of all signals to the first host's clock.

    Ranks that exchange gradients end a step together, so the difference between two hosts' times of the same step is
    their clock offset. If hosts have no step in common, nothing is changed, and the result says so.
    """
    _add_missing_year(case)
    steps = _steps_by_host(case)
    timed = {host for s in case.signals if s.time is not None and (host := case.host_of(s))}
    if len(timed) < 2:
        return ClockOffsets()
    offsets, unknown = _offsets(steps, sorted(timed))
    for signal in case.signals:
        if signal.time is not None:
            signal.time -= offsets.get(case.host_of(signal) or "", 0.0)
    case.unsure_hosts = frozenset(unknown)
    return ClockOffsets(
        offsets_s={h: round(o, 3) for h, o in offsets.items() if o}, unknown=unknown, note=_note(offsets, unknown)
    )


def _add_missing_year(case: DiagnosisCase) -> None:
    """Set the year of kernel, syslog and NCCL lines, which have none, from lines that have one."""
    known = [s.time for s in case.signals if s.time is not None and s.time >= YEAR_KNOWN]
    if known:
        for signal in case.signals:
            if signal.time is not None and signal.time < YEAR_KNOWN:
                signal.time = in_year_of(signal.time, known[-1])


def _steps_by_host(case: DiagnosisCase) -> dict[str, dict[int, float]]:
    """Return the earliest time of each step on each host."""
    hosts: dict[str, dict[int, float]] = {}
    for scan in case.scans:
        host = case.file_host(scan.file)
        if host is None:
            continue
        times = hosts.setdefault(host, {})
        for step, time in scan.marks.items():
            times[step] = min(time, times.get(step, time))
    return hosts


def _offsets(steps: dict[str, dict[int, float]], hosts: list[str]) -> tuple[dict[str, float], list[str]]:
    """Return the offset of each host's clock to the first host's in seconds, and the hosts without a known offset."""
    first = next((h for h in hosts if steps.get(h)), None)
    if first is None:
        return {}, hosts
    offsets, unknown = {first: 0.0}, []
    for host in hosts:
        own = steps.get(host, {})
        apart = [
            t - steps[first][s] for s, t in own.items() if s in steps[first] and times_comparable(t, steps[first][s])
        ]
        if host != first and not apart:
            unknown.append(host)
        elif host != first:
            apart.sort()
            middle, spread = apart[len(apart) // 2], apart[-1] - apart[0]
            offsets[host] = middle if abs(middle) >= max(MIN_OFFSET_S, 2 * spread) else 0.0
    return offsets, unknown


def _note(offsets: dict[str, float], unknown: list[str]) -> str:
    first = next(iter(offsets), None)
    shifts = [f"{h} {abs(o):.0f} s {'ahead of' if o > 0 else 'behind'} {first}" for h, o in offsets.items() if o]
    said = []
    if shifts:
        said.append(
            f"clocks differ ({', '.join(shifts[:6])}, from steps in both logs); the times here use the clock of {first}"
        )
    if unknown:
        named = ", ".join(unknown[:6]) + (", ..." if len(unknown) > 6 else "")
        said.append(f"the order between hosts is uncertain: no step in both logs shows the clock offset of {named}")
    return "; ".join(said)


MAX_TIMELINE_LINES = 12
MAX_LINE_CHARACTERS = 140
_ENDS = ("exception", "event_error", "event_hang", "srun_exit", "step_over", "watchdog", "told_to_dump")


def build_timeline(case: DiagnosisCase, kept: Iterable[str] = ()) -> list[str]:
    """Return the first line of each kind from each rank or host, at most `MAX_TIMELINE_LINES`, with comparable times
    only.

    Clocks of nodes may differ: a cause can then appear after its consequence here, but not in the order of findings.
    """
    told_of = [s for s in case.signals if _is_shown(s) and (s.file, s.line) not in case.own_kills]
    timed = [s for s in [*told_of, *case.quiet_ends] if s.time is not None]
    if not timed:
        return []
    timed.sort(key=lambda s: (s.time or 0.0, s.file, s.line))
    era = [s for s in timed if times_comparable(s.time or 0.0, timed[-1].time or 0.0)]
    seen: set[object] = set()
    shown: list[str] = []
    kinds: dict[str, int] = {}
    for signal in era:
        kind = "exception" if signal.owner == "event_error" else signal.owner  # in the log and in the events
        who, where = (kind, signal.rank, case.host_of(signal)), (signal.file, signal.line)
        if who in seen or where in seen or kinds.get(kind, 0) >= 3 or len(shown) >= MAX_TIMELINE_LINES:
            continue
        seen |= {who, where}
        kinds[kind] = kinds.get(kind, 0) + 1
        shown.append(_timeline_line(case, signal, titled=signal.owner in kept))
    return shown


def _is_shown(signal: LogSignal) -> bool:
    if signal.owner == "event_error":
        return '"echo":true' not in signal.text
    return (signal.kind == "class" and signal.weight > WEAK) or signal.owner in _ENDS


def _timeline_line(case: DiagnosisCase, signal: LogSignal, *, titled: bool) -> str:
    """Return one line. A class that is no finding is not named: its message is a consequence."""
    moment = datetime.fromtimestamp(signal.time or 0.0, UTC)
    when = moment.strftime("%Y-%m-%d %H:%M:%S" if (signal.time or 0) > YEAR_KNOWN else "%m-%d %H:%M:%S")
    rank = f"rank {signal.rank}" if signal.rank is not None else ""
    host = signal.host or (case.rank_hosts.get(signal.rank) if signal.rank is not None else None) or ""
    who = " on ".join(part for part in (rank, host) if part) or case.names[signal.file]
    said = {
        "event_error": lambda g: f"{g['type']}: {g['message']}",
        "event_hang": lambda g: g["message"],
        "rank_end": lambda g: f"ended with exit code {g['code']}",
    }.get(signal.owner, lambda _: signal.text)(signal.groups)
    what = CATALOGUE[signal.owner].title if titled else redact(said)[:MAX_LINE_CHARACTERS]
    return f"{when}  {who}: {what}"


MAX_VALUE = 120
SLOWER = 1.2  # a step time that differs less is not a change
SET_UP_EVENTS = 100  # the events of the set-up are at the start of the file
MAX_SETTINGS = 2000  # aliases of YAML can repeat parts without end
_MISSING = "not set"


def compare_with_last_good(paths: list[Path]) -> LastGoodRun | None:
    """Return the comparison for the first run folder in `paths`; None without one, or with no good run beside it."""
    for run in started_runs(path.absolute() for path in paths):
        good = _newest_good(run)
        return _compare(good, run) if good is not None else None
    return None


def _newest_good(run: RunDir) -> RunDir | None:
    """Return the newest successful run with this run's spec, or else with its name."""
    try:
        others = [r for r in list_runs(run.root.parent) if r.root != run.root]
    except (RequestError, OSError):
        return None
    name = read_record(run.plan).get("run_name")
    named = [r for r in reversed(others) if name and read_record(r.plan).get("run_name") == name]
    succeeded = [r for r in named if read_record(r.metrics).get("status") == "succeeded"]
    own = _text(run.spec)
    return next((r for r in succeeded if _text(r.spec) == own), None) or next(iter(succeeded), None)


def _compare(good: RunDir, run: RunDir) -> LastGoodRun:
    before, now = _facts(good), _facts(run)
    changes = []
    for what in dict.fromkeys([*before, *now]):
        old, new = before.get(what), now.get(what)
        # a record that one run lacks (it ended before it was written) is no change; a setting that is absent is
        if old == new or (None in (old, new) and not what.startswith(("spec: ", "environment: "))):
            continue
        if what == "step time" and old and new:
            if max(old, new) <= SLOWER * min(old, new):
                continue
            old, new = f"{old:.3f} s", f"{new:.3f} s"
        changes.append(RunChange(what=what, before=_shown(old), now=_shown(new)))
    return LastGoodRun(run=good.name, same_spec=_text(good.spec) == _text(run.spec), changes=changes)


def _shown(value: Any) -> str:
    text = _MISSING if value is None else redact(str(value))
    return text if len(text) <= MAX_VALUE else f"{text[:MAX_VALUE]}..."


def _facts(run: RunDir) -> dict[str, Any]:
    """Return what may change between two runs of a spec, by name."""
    plan, arguments, metrics = read_record(run.plan), read_record(run.run_args), read_record(run.metrics)
    facts: dict[str, Any] = {f"version of {name}": arguments.get(name) for name in ("python", "allranks")}
    facts |= _node_versions(run)
    for key in ("launcher", "strategy", "device", "backend", "dtype", "world_size", "procs_per_node", "max_steps"):
        facts[key.replace("_", " ")] = plan.get(key)
    facts["nodes"] = ", ".join(sorted(str(node.get("host")) for node in as_dicts(plan.get("nodes")))) or None
    facts["transport"] = ", ".join(sorted(count_connections([run.root]))) or None
    sets = (e for e in islice(read_events(run.events_of(0)), SET_UP_EVENTS) if e["event"] == "data")
    facts["hash of the training data"] = next((str(event.get("train_hash")) for event in sets), None)
    facts["step time"] = finite_float(as_dict(metrics.get("step_time_s")).get("median"))
    for variable in as_dicts(plan.get("environment")):
        facts[f"environment: {variable.get('name')}"] = variable.get("value")
    return facts | {f"spec: {key}": value for key, value in islice(_settings(run), MAX_SETTINGS)}


def _node_versions(run: RunDir) -> dict[str, str]:
    """Return what the preflight found on the nodes: one value for each check of a version."""
    versions: dict[str, set[str]] = {}
    try:
        nodes = json.loads(read_regular(run.preflight))
    except (OSError, ValueError, RecursionError):
        return {}
    for check in (check for node in as_dicts(nodes) for check in as_dicts(node.get("checks"))):
        if check.get("name") in ("py", "torch", "nccl", "driver", "cuda", "plugin"):
            versions.setdefault(f"version of {check['name']}", set()).add(str(check.get("found")))
    return {name: ", ".join(sorted(values)) for name, values in versions.items()}


def _text(path: Path) -> bytes:
    try:
        return read_regular(path)
    except (OSError, ValueError):
        return b""


def _settings(run: RunDir) -> Iterator[tuple[str, str]]:
    """Yield the settings of the spec as dotted names and values."""
    import msgspec

    try:
        yield from _flat("", msgspec.yaml.decode(read_regular(run.spec)))
    except (OSError, ValueError, ImportError, RecursionError):  # DecodeError is a ValueError
        return


def _flat(prefix: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for key, below in value.items():
            yield from _flat(f"{prefix}.{key}" if prefix else str(key), below)
    else:
        yield prefix, str(value)
