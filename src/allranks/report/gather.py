"""Reads all that the page shows out of a run folder; what is absent or damaged is empty."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from allranks.integrity import MANIFEST
from allranks.observe.events import read_events
from allranks.observe.telemetry import read_telemetry
from allranks.redact import redact_env
from allranks.report.story import Story, read_story
from allranks.report.text import clean, number, plain, record, records, whole
from allranks.rundir import RunDir, read_json

LOG_LINES = 40
LOG_BYTES = 16_384
LONGEST_SPEC = 100_000
SIGTERM = -15  # how torchrun ends the ranks that have not failed
_RANK_FILE = re.compile(r"^rank(\d{1,9})\.jsonl$")


@dataclass(frozen=True)
class RunData:
    """All that is known about a run. `log` is the end of the log of the rank that failed: (name, text)."""

    name: str
    metrics: dict[str, Any]
    plan: dict[str, Any]
    run_args: dict[str, Any]
    preflight: list[dict[str, Any]]
    spec: str
    stories: dict[int, Story]
    telemetry: dict[str, list[dict[str, Any]]]
    checkpoints: dict[int, dict[str, Any]]
    log: tuple[str, str] | None
    hang: dict[str, Any] = field(default_factory=dict)

    @property
    def zero(self) -> Story:
        """Rank 0's story: it alone has what is the same everywhere."""
        return self.stories.get(0, Story())

    @property
    def own_program(self) -> bool:
        """A program of the user's own: allranks starts and watches it, and knows no steps, strategy or data of it."""
        return "batch" in self.plan and self.plan["batch"] is None

    @property
    def status(self) -> str:
        return str(self.metrics.get("status") or "unknown")

    @property
    def world_size(self) -> int | None:
        return whole(self.plan.get("world_size")) or whole(self.metrics.get("world_size"))

    @property
    def total_steps(self) -> int | None:
        """Steps that were planned."""
        asked = [n for e in self.zero.of("phase") if (n := whole(e.get("total_steps"))) is not None]
        return asked[-1] if asked else whole(self.plan.get("max_steps"))

    def errors(self) -> list[dict[str, Any]]:
        """Error events of all ranks: last attempt first, and in each the cause before what followed from it."""
        found = [e for story in self.stories.values() for e in story.of("error")]
        return sorted(
            found,
            key=lambda e: (-(whole(e.get("attempt")) or 0), e.get("echo") is True, number(e.get("time")) or 0.0),
        )


def gather(run: RunDir) -> RunData:
    """Read the run folder."""
    data = RunData(
        name=plain(run.name),
        metrics=clean(record(read_json(run.metrics))),
        plan=clean(record(read_json(run.plan))),
        run_args=clean(record(read_json(run.run_args))),
        preflight=clean(records(read_json(run.preflight))),
        spec=_spec(run.spec),
        stories=_stories(run),
        telemetry=_telemetry(run),
        checkpoints={step: _checkpoint(run.checkpoint(step)) for step in run.checkpoint_steps()},
        log=None,
        hang=clean(record(read_json(run.hang_report(max(run.attempts(), default=1))))),
    )
    return data if data.status != "failed" else _with_log(run, data)


def _stories(run: RunDir) -> dict[int, Story]:
    # one rank at a time: the checked records are a fraction of the size of the events
    found = {}
    for path in run.events.glob("rank*.jsonl"):
        match = _RANK_FILE.match(path.name)
        if match:
            found[int(match.group(1))] = read_story(read_events(path))
    return dict(sorted(found.items()))


def _telemetry(run: RunDir) -> dict[str, list[dict[str, Any]]]:
    found = {}
    for path in sorted(run.telemetry.glob("*.jsonl")):
        rows = [row for row in read_telemetry(path) if number(row.get("time")) is not None]
        if rows:
            found[plain(path.stem, 60)] = rows
    return found


def _spec(path: Path) -> str:
    """Its text, with the secrets of ``cluster.env`` hidden."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    try:
        spec = record(yaml.safe_load(text))
    except (yaml.YAMLError, ValueError):
        return plain(text, LONGEST_SPEC)
    cluster = record(spec.get("cluster"))
    if record(cluster.get("env")):
        cluster["env"] = redact_env({str(k): str(v) for k, v in cluster["env"].items()})
        text = yaml.safe_dump(spec, sort_keys=False, allow_unicode=True, width=120)
    return plain(text, LONGEST_SPEC)


def _checkpoint(folder: Path) -> dict[str, Any]:
    manifest = record(read_json(folder / MANIFEST))
    files = [record(f) for f in record(manifest.get("files")).values()]
    return {
        "mode": manifest.get("mode"),
        "created": manifest.get("created"),
        "files": len(files),
        "bytes": sum(number(f.get("bytes")) or 0 for f in files),
        "whole": bool(files),
    }


def _with_log(run: RunDir, data: RunData) -> RunData:
    attempts = run.attempts()
    rank = _culprit(run, data, attempts[-1]) if attempts else None
    path = run.rank_logs(attempts[-1]).get(rank) if rank is not None else None
    tail = _tail(path) if path else ""
    return RunData(**{**vars(data), "log": (plain(path.name), tail)}) if path and tail else data


def _culprit(run: RunDir, data: RunData, attempt: int) -> int | None:
    """The rank whose log tells most: one that fell out of a hang, the first with an error of its own, else the first that
    ended badly."""
    fallen = records(data.hang.get("fallen"))
    if fallen:
        return whole(fallen[0].get("rank"))
    for event in data.errors():
        if whole(event.get("attempt")) == attempt and event.get("echo") is not True:
            return whole(event.get("rank"))
    ends = [
        end
        for path in run.logs_of(attempt).glob("*.exit.json")
        for end in records(record(read_json(path)).get("failed"))
        if end.get("exitcode") != SIGTERM
    ]
    ends.sort(key=lambda end: number(end.get("time")) or 0.0)
    return whole(ends[0].get("rank")) if ends else None


def _tail(path: Path) -> str:
    try:
        with path.open("rb") as file:
            file.seek(max(path.stat().st_size - LOG_BYTES, 0))
            lines = file.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return ""
    return plain("\n".join(line[:400] for line in lines[-LOG_LINES:]), LOG_BYTES)
