"""Read and check everything that the report shows from a run folder. Missing or damaged parts become empty."""

from __future__ import annotations

import signal
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import yaml

from allranks.analysis.metrics import progress_events, without_repeated_steps
from allranks.errors import SpecError
from allranks.rundir.checkpoints import MANIFEST
from allranks.rundir.events import read_events, read_telemetry
from allranks.rundir.files import read_json
from allranks.rundir.paths import RunDir
from allranks.spec.loader import MAX_SPEC_BYTES, parse_yaml
from allranks.utils.inputs import read_appended, read_text
from allranks.utils.redaction import redact_arguments, redact_env
from allranks.utils.text import as_dict, as_dicts, as_list, finite_float, finite_int, sanitize, sanitize_tree

PARTS = ("data", "forward", "backward", "optimizer")
_PART_KEYS = tuple((part, f"{part}_s") for part in PARTS)
_REQUIRED_INT = {"step": "step", "eval": "step", "checkpoint": "step", "stop": "step", "resume": "from_step"}
Events = list[dict[str, Any]]


class StepRecord(msgspec.Struct, frozen=True, gc=False):
    """One "step" event: `count` optimizer steps (``observe.log_every``), up to `step`."""

    step: int
    count: int
    loss: float | None
    lr: float | None
    grad_norm: float | None
    tokens: float | None
    trained: float | None
    seconds: tuple[float, ...]
    parts: dict[str, float]
    memory: float | None
    peak: float | None


@dataclass
class AttemptRecord:
    """One start of the run: from its "start" event to the next one."""

    number: int
    began: float | None
    ended: float | None = None
    resumed_from: int | None = None
    last_step: int | None = None
    end: str = ""
    phases: list[tuple[str, float]] = field(default_factory=list)


@dataclass(frozen=True)
class RankHistory:
    """The events of one rank, without steps that a resumed attempt repeated. `events` are all except steps."""

    steps: list[StepRecord] = field(default_factory=list)
    events: Events = field(default_factory=list)
    attempts: list[AttemptRecord] = field(default_factory=list)

    def of(self, kind: str) -> Events:
        """Return the events of a kind."""
        return [e for e in self.events if e["event"] == kind]

    def last(self, kind: str) -> dict[str, Any]:
        """Return the last event of a kind, or an empty one."""
        return next((e for e in reversed(self.events) if e["event"] == kind), {})


def read_history(events: Iterable[dict[str, Any]]) -> RankHistory:
    """Check events and sort them; incomplete events are skipped."""
    sound = [checked for e in events if (checked := _checked(e)) is not None]
    kept = without_repeated_steps(sound)
    program = [_step(e) for e in progress_events(sound) if finite_int(e.get("step")) is not None]
    steps = sorted([*(_step(e) for e in kept if e["event"] == "step"), *program], key=lambda s: s.step)
    return RankHistory(steps, [e for e in kept if e["event"] != "step"], _attempts(sound))


def _checked(event: dict[str, Any]) -> dict[str, Any] | None:
    needed = _REQUIRED_INT.get(event["event"])
    if needed is not None:
        at = finite_int(event.get(needed))
        if at is None:
            return None
        event[needed] = at
    if event["event"] == "eval":
        names = ("prompt", "expected", "reply")
        rows = as_dicts(event.get("samples"))
        event["samples"] = [{name: sanitize(sample.get(name) or "") for name in names} for sample in rows]
    return event


def _step(event: dict[str, Any]) -> StepRecord:
    each = event.get("step_times_s")
    times = each if isinstance(each, list) and each else [event.get("step_time_s")]
    seconds = tuple(t for t in map(finite_float, times) if t is not None and t >= 0)
    parts = {part: t for part, key in _PART_KEYS if (t := finite_float(event.get(key))) is not None}
    return StepRecord(
        step=int(event["step"]),
        count=max(finite_int(event.get("steps")) or 1, 1),
        loss=finite_float(event.get("loss")),
        lr=finite_float(event.get("lr")),
        grad_norm=finite_float(event.get("grad_norm")),
        tokens=finite_float(event.get("tokens")) if seconds else None,
        trained=finite_float(event.get("tokens_trained")),
        seconds=seconds,
        parts=parts,
        memory=finite_float(event.get("memory_bytes")),
        peak=finite_float(event.get("peak_memory_bytes")),
    )


def _attempts(events: Events) -> list[AttemptRecord]:
    attempts: list[AttemptRecord] = []
    for event in events:
        at = finite_float(event.get("time"))
        if event["event"] == "start" or not attempts:
            attempts.append(AttemptRecord(finite_int(event.get("attempt")) or len(attempts) + 1, at))
            attempts[-1].resumed_from = finite_int(event.get("resumed_from"))
        now = attempts[-1]
        now.ended = at if at is not None else now.ended
        _update_attempt(now, event, at)
    return attempts


def _update_attempt(attempt: AttemptRecord, event: dict[str, Any], at: float | None) -> None:
    kind = event["event"]
    if kind == "step":
        attempt.last_step = event["step"]
    elif kind == "stop":
        attempt.end = f"stopped after step {event['step']} ({sanitize(event.get('reason'), 200)})"
    elif kind == "error":
        attempt.end = f"failed: {sanitize(event.get('type'), 200)}"
    elif kind == "hang":
        attempt.end = "ended because of a hang"
    elif kind == "phase":
        name = sanitize(event.get("name"), 40)
        if at is not None:
            attempt.phases.append((name, at))
        if name == "done" and not attempt.end.startswith("stopped"):
            attempt.end = "done"


def versions_of(story: RankHistory) -> dict[str, str]:
    """Return the package versions that a rank has reported."""
    return {sanitize(k): sanitize(v) for k, v in as_dict(story.last("model").get("versions")).items()}


LOG_LINES = 40
LOG_BYTES = 16_384
MAX_SPEC_LENGTH = 100_000
SIGTERM = -signal.SIGTERM  # how torchrun ends the ranks that have not failed


@dataclass(frozen=True)
class RunData:
    """All data of a run. `log` is the end of the log of the failed rank: (name, text)."""

    name: str
    metrics: dict[str, Any]
    plan: dict[str, Any]
    run_args: dict[str, Any]
    preflight: list[dict[str, Any]]
    spec: str
    histories: dict[int, RankHistory]
    telemetry: dict[str, list[dict[str, Any]]]
    checkpoints: dict[int, dict[str, Any]]
    log: tuple[str, str] | None
    hang: dict[str, Any] = field(default_factory=dict)
    ends: list[dict[str, Any]] = field(default_factory=list)
    """How ranks of all attempts failed, by the records of their agents, earliest first."""

    @property
    def zero(self) -> RankHistory:
        """Return the history of rank 0, which alone has the data common to all ranks."""
        return self.histories.get(0, RankHistory())

    @property
    def own_program(self) -> bool:
        """Return whether the run is a user's own program, without steps, strategy or data."""
        return "batch" in self.plan and self.plan["batch"] is None

    @property
    def status(self) -> str:
        return str(self.metrics.get("status") or "unknown")

    @property
    def world_size(self) -> int | None:
        return finite_int(self.plan.get("world_size")) or finite_int(self.metrics.get("world_size"))

    @property
    def total_steps(self) -> int | None:
        """Return the number of planned steps."""
        totals = [n for e in self.zero.of("phase") if (n := finite_int(e.get("total_steps"))) is not None]
        return totals[-1] if totals else finite_int(self.plan.get("max_steps"))

    def errors(self) -> list[dict[str, Any]]:
        """Return the errors of all ranks: last attempt first, and causes before consequences.

        A killed rank has written none; its agent's record stands for it.
        """
        errors = [e for story in self.histories.values() for e in story.of("error")]
        known = {(finite_int(e.get("attempt")), finite_int(e.get("rank"))) for e in errors}
        for end in self.ends:
            code = finite_int(end.get("exitcode"))
            if code not in (None, 0, SIGTERM) and (end["attempt"], finite_int(end.get("rank"))) not in known:
                message = "the rank was killed" if code < 0 else "the rank ended without an error message"
                errors.append({**end, "type": _exit_cause(code), "message": message})
        return sorted(
            errors,
            key=lambda e: (
                -(finite_int(e.get("attempt")) or 0),
                e.get("echo") is True,
                finite_float(e.get("time")) or 0.0,
            ),
        )


def _exit_cause(code: int) -> str:
    try:
        return signal.Signals(-code).name if code < 0 else f"exit code {code}"
    except ValueError:
        return f"signal {-code}"


def read_run_data(run: RunDir, metrics: dict[str, Any] | None = None) -> RunData:
    """Read the run folder; `metrics` stand for its metrics.json, which a running run has not written yet."""
    data = RunData(
        name=sanitize(run.name),
        metrics=sanitize_tree(as_dict(read_json(run.metrics) if metrics is None else metrics)),
        plan=sanitize_tree(as_dict(read_json(run.plan))),
        run_args=sanitize_tree(as_dict(read_json(run.run_args))),
        preflight=sanitize_tree(as_dicts(read_json(run.preflight))),
        spec=_spec(run.spec),
        # one rank at a time: the checked records are much smaller than the events
        histories={rank: read_history(read_events(path)) for rank, path in run.event_files().items()},
        telemetry=_telemetry(run),
        checkpoints={step: _checkpoint(run.checkpoint(step)) for step in run.checkpoint_steps()},
        log=None,
        hang=sanitize_tree(as_dict(read_json(run.hang_report(max(run.attempts(), default=1))))),
        ends=_ends(run),
    )
    return data if data.status != "failed" else _with_log(run, data)


def _ends(run: RunDir) -> list[dict[str, Any]]:
    ends = [
        {**end, "attempt": attempt}
        for attempt in run.attempts()
        for path in run.logs_of(attempt).glob("*.exit.json")
        for end in as_dicts(sanitize_tree(as_dict(read_json(path))).get("failed"))
    ]
    return sorted(ends, key=lambda end: finite_float(end.get("time")) or 0.0)


def _telemetry(run: RunDir) -> dict[str, list[dict[str, Any]]]:
    samples = {}
    for path in sorted(run.telemetry.glob("*.jsonl")):
        rows = [row for row in read_telemetry(path) if finite_float(row.get("time")) is not None]
        if rows:
            samples[sanitize(path.stem, 60)] = rows
    return samples


def _spec(path: Path) -> str:
    """Return the text of the spec, with the secrets of ``cluster.env`` and ``script.args`` redacted."""
    try:
        text = read_text(path, MAX_SPEC_BYTES, errors="replace")
    except OSError:
        return ""
    try:
        spec = as_dict(parse_yaml(text, str(path)))  # limits the cost of a malicious document
    except SpecError:
        return sanitize(text, MAX_SPEC_LENGTH)
    cluster, script = as_dict(spec.get("cluster")), as_dict(spec.get("script"))
    if as_dict(cluster.get("env")):
        cluster["env"] = redact_env({str(k): str(v) for k, v in cluster["env"].items()})
    if as_list(script.get("args")):
        script["args"] = redact_arguments([str(word) for word in script["args"]])
    if cluster.get("env") or script.get("args"):
        text = yaml.safe_dump(spec, sort_keys=False, allow_unicode=True, width=120)
    return sanitize(text, MAX_SPEC_LENGTH)


def _checkpoint(folder: Path) -> dict[str, Any]:
    manifest = as_dict(read_json(folder / MANIFEST))
    files = [as_dict(f) for f in as_dict(manifest.get("files")).values()]
    return {
        "mode": manifest.get("mode"),
        "created": manifest.get("created"),
        "files": len(files),
        "bytes": sum(finite_float(f.get("bytes")) or 0 for f in files),
        "whole": bool(files),
    }


def _with_log(run: RunDir, data: RunData) -> RunData:
    attempts = run.attempts()
    rank = _rank_to_show(data, attempts[-1]) if attempts else None
    path = run.rank_logs(attempts[-1]).get(rank) if rank is not None else None
    tail = _tail(path) if path else ""
    return RunData(**{**vars(data), "log": (sanitize(path.name), tail)}) if path and tail else data


def _rank_to_show(data: RunData, attempt: int) -> int | None:
    """Return the rank whose log is most informative.

    A stalled rank of a hang, else the first with its own error, else the first with a bad exit code.
    """
    stalled = as_dicts(data.hang.get("stalled"))
    if stalled:
        return finite_int(stalled[0].get("rank"))
    for event in data.errors():
        if finite_int(event.get("attempt")) == attempt and event.get("echo") is not True:
            return finite_int(event.get("rank"))
    ends = [e for e in data.ends if e["attempt"] == attempt and e.get("exitcode") != SIGTERM]
    return finite_int(ends[0].get("rank")) if ends else None


def _tail(path: Path) -> str:
    try:
        lines = read_appended(path, 0, LOG_BYTES).data.decode("utf-8", "replace").splitlines()
    except OSError:
        return ""
    return sanitize("\n".join(line[:400] for line in lines[-LOG_LINES:]), LOG_BYTES)
