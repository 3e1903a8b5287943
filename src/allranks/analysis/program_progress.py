"""Compute steps, losses and throughput of a user's own program from its events ``progress``. Pure; what was not said stays absent."""

from __future__ import annotations

from typing import Any

from allranks.rundir.progress import PROGRESS, READ_IN_LOG, REPORTED
from allranks.utils.formatting import finite_float, finite_int

Events = list[dict[str, Any]]


def progress_events(events: Events) -> Events:
    """Return a rank's events of progress; those read in its log only if it has reported nothing itself."""
    found = [e for e in events if e.get("event") == PROGRESS and e.get("source") in (REPORTED, READ_IN_LOG)]
    reported = [e for e in found if e["source"] == REPORTED]
    return reported or found


def progress_metrics(ranks: dict[int, Events]) -> dict[str, Any]:
    """Return the values of metrics.json that a user's own program has made known; empty if there are none.

    ``progress_source`` is ``report`` or ``log``. Steps and losses are those of the lowest rank that has said any. Rates are measured from the
    first record to the last one; ``tokens_per_s`` adds up the ranks that have reported tokens.
    """
    story = {rank: found for rank, events in sorted(ranks.items()) if (found := progress_events(events))}
    if any(e["source"] == REPORTED for found in story.values() for e in found):
        story = {rank: found for rank, found in story.items() if found[0]["source"] == REPORTED}
    if not story:
        return {}
    metrics: dict[str, Any] = {"progress_source": next(iter(story.values()))[0]["source"]}
    stepped = next((found for events in story.values() if (found := [e for e in events if _step(e) is not None])), [])
    if stepped:
        metrics["steps"] = max(_step(e) or 0 for e in stepped)
        metrics["steps_per_s"] = _rate(stepped, (_step(stepped[-1]) or 0) - (_step(stepped[0]) or 0))
    lossy = next((found for events in story.values() if (found := [e for e in events if "loss" in e])), [])
    if lossy:
        metrics["train_loss_first"], metrics["train_loss_last"] = (
            finite_float(lossy[0]["loss"]),
            finite_float(lossy[-1]["loss"]),
        )
        if (at := _not_finite_since(lossy)) is not None:
            metrics["loss_not_finite"] = {"step": _step(lossy[at]), "source": metrics["progress_source"]}
    held_out = [e for events in story.values() for e in events if "eval_loss" in e]
    if held_out:
        metrics["eval_loss_first"] = finite_float(held_out[0]["eval_loss"])
        metrics["eval_loss"] = finite_float(held_out[-1]["eval_loss"])
    told = {
        rank: found
        for rank, events in story.items()
        if (found := [e for e in events if finite_int(e.get("tokens")) is not None])
    }
    if told:
        metrics["tokens_reported"] = sum(finite_int(e["tokens"]) or 0 for found in told.values() for e in found)
        rates = [_rate(found, sum(finite_int(e["tokens"]) or 0 for e in found[1:])) for found in told.values()]
        if all(rate is not None for rate in rates):
            metrics["tokens_per_s"] = sum(rate or 0.0 for rate in rates)
    return {name: value for name, value in metrics.items() if value is not None or name.startswith(("train_", "eval_"))}


def _not_finite_since(lossy: Events) -> int | None:
    """Return the index of the first loss after which none was finite; None if the last one was. JSON has no NaN: its value is null."""
    finite = [i for i, e in enumerate(lossy) if finite_float(e["loss"]) is not None]
    first = finite[-1] + 1 if finite else 0
    return first if first < len(lossy) else None


def describe_non_finite_loss(metrics: dict[str, Any]) -> str:
    """Return since when the loss of a user's own program is not finite, as a sentence without a full stop; empty if it is, or nothing is known."""
    found = metrics.get("loss_not_finite")
    if not isinstance(found, dict):
        return ""
    step = finite_int(found.get("step"))
    since = f"from step {step} on" if step is not None else "in all that is known of it"
    by = "as the program reported" if found.get("source") == REPORTED else "as the output of rank 0 says"
    return f"the loss is not finite (NaN or infinite) {since}, {by}"


def _step(event: dict[str, Any]) -> int | None:
    return finite_int(event.get("step"))


def _rate(events: Events, amount: int) -> float | None:
    """Return an amount per second, from the first of these events to the last one; None if that is not known."""
    began, ended = (finite_float(e.get("last", e.get("time"))) for e in (events[0], events[-1]))
    if began is None or ended is None or ended <= began or amount <= 0:
        return None
    return amount / (ended - began)
