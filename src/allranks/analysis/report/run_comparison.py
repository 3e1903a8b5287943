"""Compare runs: their results at the end, at equal steps and at equal tokens, and what differs between them. Pure."""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from typing import Any

import msgspec

from allranks.analysis.report.figures import common_steps, rates, smooth, smoothing_width
from allranks.analysis.report.run_data import RunData, versions_of
from allranks.errors import SpecError
from allranks.spec.loader import parse_yaml
from allranks.utils.text import as_dict, as_dicts, finite_float, finite_int, format_list

FIGURES = {
    "status": "status",
    "steps": "steps",
    "tokens_real": "tokens",
    "train_loss_last": "train loss",
    "eval_loss": "held-out loss",
    "best_eval_loss": "best held-out loss",
    "accuracy": "accuracy",
    "exact_match": "exact match",
    "tokens_per_s": "tokens/s",
    "step_time_s": "median step",
    "peak_memory_bytes": "peak memory",
    "wall_time_s": "wall time",
}
"""Compared values of ``metrics.json``, and their titles."""
LOWER_IS_BETTER = {"train_loss_last", "eval_loss", "best_eval_loss", "step_time_s", "peak_memory_bytes"}
HIGHER_IS_BETTER = {"accuracy", "exact_match", "tokens_per_s"}
_ROUNDING = (
    "train.param_dtype",
    "train.deterministic",
    "model.dtype",
    "model.attention",
    "model.float8",
    "model.compile",
)
_SPEED = ("model.gradient_checkpointing", "strategy", "cluster", "torch", "device", "host", "cpu", "gpu")
# The first prefix of a key decides what a difference of it changes.
EFFECTS = (
    ("data.seed", "order of the data"),
    ("train.seed", "initial weights and dropout"),
    (_ROUNDING, "rounding, speed and memory"),
    (_SPEED, "speed and memory"),
    (("model", "adapter", "data", "train", "script", "world_size", "global_batch_size"), "what is trained"),
    ("eval", "what is measured"),
    (("transformers", "peft", "tokenizers", "datasets", "deepspeed", "accelerate", "package."), "possibly the result"),
)  # fmt: skip
NO_EFFECT = "neither result nor speed"
UNKNOWN = "unknown"


class ComparedRun(msgspec.Struct, frozen=True, kw_only=True):
    """One run: the values of `FIGURES`, and its curves as (step, tokens, value). Unknown values are None."""

    run: str
    folder: str
    figures: dict[str, Any]
    train: list[tuple[int, float | None, float]]
    held_out: list[tuple[int, float | None, float]]
    speed: list[tuple[int, float]]


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """A key of the specs or of the environment with different values, one for each run, and what that changes."""

    key: str
    values: list[Any]
    changes: str


class EqualPoint(msgspec.Struct, frozen=True, kw_only=True):
    """Values of all runs at the last step (``axis`` step) or token count (tokens) that all of them have reached.

    Values between two points are interpolated linearly; of train losses the running mean is taken, as in the page.
    """

    axis: str
    at: float
    name: str
    values: list[float | None]


class RunComparison(msgspec.Struct, frozen=True, kw_only=True):
    """All that is compared. ``data_equal`` is None if it is unknown whether all runs trained on the same rows."""

    runs: list[ComparedRun]
    equal: list[EqualPoint]
    differences: list[Difference]
    data_equal: bool | None


def compare_runs(data: Sequence[RunData], folders: Sequence[str]) -> RunComparison:
    """Return the comparison of at least two runs, in the given order."""
    runs = [_compared(one, folder) for one, folder in zip(data, folders, strict=True)]
    hashes = [one.zero.last("data").get("train_hash") for one in data]
    return RunComparison(
        runs=runs,
        equal=[point for axis in ("step", "tokens") for point in _equal_points(runs, axis)],
        differences=_differences([_settings(one) for one in data]),
        data_equal=None if None in hashes else len(set(hashes)) == 1,
    )


def _compared(data: RunData, folder: str) -> ComparedRun:
    steps = {rank: story.steps for rank, story in data.histories.items()}
    total, tokens = 0.0, dict[int, float]()
    for row in common_steps(steps):
        known = [step.tokens for step in row]
        if None in known:
            break  # the sum would be wrong from here on
        total += math.fsum(filter(None, known))
        tokens[row[0].step] = total
    logged = [step for step in data.zero.steps if step.loss is not None]
    width = smoothing_width(len(logged))
    losses = [step.loss for step in logged]
    shown = smooth(losses, width) if width else losses
    figures = {key: data.metrics.get(key) for key in FIGURES}
    figures["step_time_s"] = as_dict(figures["step_time_s"]).get("median")
    evals = [(e["step"], finite_float(e.get("loss"))) for e in data.zero.of("eval")]
    counted = sorted(tokens)

    def tokens_at(step: int) -> float | None:
        """Return the tokens until an evaluation, which may come after a step that was not logged."""
        place = bisect.bisect_right(counted, step) - 1
        return 0.0 if step == 0 else tokens[counted[place]] if place >= 0 else None

    return ComparedRun(
        run=data.name,
        folder=folder,
        figures=figures,
        train=[(s.step, tokens.get(s.step), v) for s, v in zip(logged, shown, strict=True) if v is not None],
        held_out=[(step, tokens_at(step), loss) for step, loss in evals if loss is not None],
        speed=[(step, real) for step, real, _ in rates(steps)],
    )


def _equal_points(runs: Sequence[ComparedRun], axis: str) -> list[EqualPoint]:
    points = []
    for name in ("train", "held_out"):
        curves = []
        for run in runs:
            rows = [(step if axis == "step" else tokens, value) for step, tokens, value in getattr(run, name)]
            curves.append([(float(x), value) for x, value in rows if x is not None])
        if not all(curves):
            continue
        at = min(curve[-1][0] for curve in curves)
        values = [_interpolated(curve, at) for curve in curves]
        if at > 0 and sum(value is not None for value in values) > 1:
            points.append(EqualPoint(axis=axis, at=at, name=name, values=values))
    return points


def _interpolated(curve: Sequence[tuple[float, float]], at: float) -> float | None:
    place = bisect.bisect_left(curve, (at, -math.inf))
    if place < len(curve) and curve[place][0] == at:
        return curve[place][1]
    if not 0 < place < len(curve):
        return None
    (x0, y0), (x1, y1) = curve[place - 1], curve[place]
    return y0 + (y1 - y0) * (at - x0) / (x1 - x0)


def _settings(data: RunData) -> dict[str, Any]:
    """Return the flat spec with all defaults, and the facts of the environment that the run has recorded."""
    flat = dict[str, Any]()
    try:
        _flatten("", as_dict(parse_yaml(data.spec, data.name)), flat)
    except SpecError:
        flat["spec"] = UNKNOWN
    for key in ("name", "run_root"):
        flat.pop(key, None)
    flat["world_size"] = data.world_size
    flat["global_batch_size"] = finite_int(as_dict(data.plan.get("batch")).get("global_batch_size"))
    flat["device"] = data.metrics.get("device") or data.plan.get("device")
    probes = as_dicts(data.preflight)
    flat["host"] = format_list(sorted({str(probe.get("host")) for probe in probes}), 4) or None
    versions = versions_of(data.zero) | {"allranks": str(data.run_args.get("allranks") or UNKNOWN)}
    flat |= {f"package.{name}": version for name, version in versions.items()}
    return flat


def _flatten(prefix: str, value: Any, flat: dict[str, Any]) -> None:
    if isinstance(value, dict) and value:
        for key, part in value.items():
            _flatten(f"{prefix}.{key}" if prefix else str(key), part, flat)
    else:
        flat[prefix] = value or None if isinstance(value, (dict, list)) else value


def _differences(settings: Sequence[dict[str, Any]]) -> list[Difference]:
    keys = {key: None for flat in settings for key in flat}
    rows = [Difference(key=k, values=[f.get(k) for f in settings], changes=effect_of(k)) for k in keys]
    differing = [row for row in rows if any(value != row.values[0] for value in row.values[1:])]
    order = {text: place for place, text in enumerate(("what is trained", "what is measured", "possibly the result"))}
    last = {NO_EFFECT: 9}
    return sorted(differing, key=lambda row: ({**order, **last}.get(row.changes, 5), row.key))


def effect_of(key: str) -> str:
    """Return what a difference of a key changes.

    >>> effect_of("train.lr"), effect_of("observe.log_every")
    ('what is trained', 'neither result nor speed')
    """
    name = key.removeprefix("package.") if key.startswith("package.torch") else key
    for prefixes, effect in EFFECTS:
        for prefix in (prefixes,) if isinstance(prefixes, str) else prefixes:
            if name == prefix or name.startswith(prefix if prefix.endswith(".") else f"{prefix}."):
                return effect
    return NO_EFFECT
