"""Compare a run folder with the newest successful run of the same spec: what changed since then."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from allranks.analysis.diagnose.records import LastGoodRun, RunChange
from allranks.errors import RequestError
from allranks.rundir.files import read_record
from allranks.rundir.paths import RunDir, is_run, list_runs
from allranks.utils.inputs import read_regular
from allranks.utils.redaction import redact

MAX_VALUE = 120
SLOWER = 1.2  # a step time that differs less is not a change
EVENT_BYTES = 1 << 20  # the events of the set-up are at the start of the file
MAX_SETTINGS = 2000  # aliases of YAML can repeat parts without end
_MISSING = "not set"


def compare_with_last_good(paths: list[Path]) -> LastGoodRun | None:
    """Return the comparison for the first run folder among `paths`; None if there is none, or no successful run beside it."""
    for path in paths:
        if is_run(path) and (path / "plan.json").is_file():
            run = RunDir(path.absolute())
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
        if what == "step time":
            changed = old is not None and new is not None and max(old, new) > SLOWER * min(old, new)
            old, new = (f"{old:.3f} s", f"{new:.3f} s") if changed else (None, None)
        else:
            # a record that one run lacks (it ended before it was written) is no change; a setting that is absent is
            absent_counts = what.startswith(("spec: ", "environment: "))
            changed = old != new and (absent_counts or (old is not None and new is not None))
        if changed:
            changes.append(RunChange(what=what, before=_shown(old), now=_shown(new)))
    return LastGoodRun(run=good.name, same_spec=_text(good.spec) == _text(run.spec), changes=changes)


def _shown(value: Any) -> str:
    text = _MISSING if value is None else redact(str(value))
    return text if len(text) <= MAX_VALUE else f"{text[:MAX_VALUE]}..."


def _facts(run: RunDir) -> dict[str, Any]:
    """Return what may change between two runs of a spec, by name."""
    plan, arguments, metrics = read_record(run.plan), read_record(run.run_args), read_record(run.metrics)
    facts: dict[str, Any] = {}
    for name in ("python", "allranks"):
        facts[f"version of {name}"] = arguments.get(name)
    facts.update(_node_versions(run))
    for key in ("launcher", "strategy", "device", "backend", "dtype", "world_size", "procs_per_node", "max_steps"):
        facts[key.replace("_", " ")] = plan.get(key)
    facts["nodes"] = (
        ", ".join(sorted(str(n.get("host")) for n in plan.get("nodes") or [] if isinstance(n, dict))) or None
    )
    facts["transport"] = _transport(run)
    facts["hash of the training data"] = _data_hash(run)
    facts["step time"] = (metrics.get("step_time_s") or {}).get("median")
    for variable in plan.get("environment") or []:
        facts[f"environment: {variable.get('name')}"] = variable.get("value")
    facts.update({f"spec: {key}": value for key, value in islice(_settings(run), MAX_SETTINGS)})
    return facts


def _node_versions(run: RunDir) -> dict[str, str]:
    """Return what the preflight found on the nodes: one value for each check of a version."""
    found: dict[str, set[str]] = {}
    try:
        nodes = json.loads(read_regular(run.preflight))
    except (OSError, ValueError, RecursionError):
        return {}
    for node in nodes if isinstance(nodes, list) else []:
        for check in node.get("checks") or []:
            if check.get("name") in ("py", "torch", "nccl", "driver", "cuda", "plugin"):
                found.setdefault(f"version of {check['name']}", set()).add(str(check.get("found")))
    return {name: ", ".join(sorted(values)) for name, values in found.items()}


def _transport(run: RunDir) -> str | None:
    """Return the interfaces of the connections that ranks had, without their number."""
    names: set[str] = set()
    for file in run.logs_of(max(run.attempts(), default=1)).glob("*.connections.json"):
        names |= set(read_record(file).get("interfaces") or {})
    return ", ".join(f"TCP/{name}" for name in sorted(names)) or None


def _data_hash(run: RunDir) -> str | None:
    try:
        with run.events_of(0).open("rb") as file:
            head = file.read(EVENT_BYTES).splitlines()
    except OSError:
        return None
    for line in head:
        if b'"event":"data"' in line:
            try:
                return str(json.loads(line).get("train_hash"))
            except (ValueError, RecursionError):
                return None
    return None


def _text(path: Path) -> bytes:
    try:
        return read_regular(path)
    except (OSError, ValueError):
        return b""


def _settings(run: RunDir) -> Iterator[tuple[str, str]]:
    """Yield the settings of the spec as dotted names and values."""
    import msgspec

    try:
        spec = msgspec.yaml.decode(read_regular(run.spec))
    except (OSError, ValueError, ImportError, RecursionError):  # DecodeError is a ValueError
        return
    yield from _flat("", spec)


def _flat(prefix: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for key, below in value.items():
            yield from _flat(f"{prefix}.{key}" if prefix else str(key), below)
    else:
        yield prefix, str(value)
