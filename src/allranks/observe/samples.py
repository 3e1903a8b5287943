"""Sample answers of the first and the last evaluation, side by side. Pure."""

from __future__ import annotations

from typing import Any


def before_and_after(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows with ``prompt``, ``expected``, ``before`` (None without a baseline) and ``after``, from rank 0's events."""
    evals = [e for e in events if e["event"] == "eval" and e.get("samples")]
    if not evals:
        return []
    start = {s["prompt"]: s["reply"] for s in evals[0]["samples"]} if len(evals) > 1 or evals[0]["step"] == 0 else {}
    end = evals[-1] if evals[-1]["step"] > 0 else None
    return [
        {
            "prompt": s["prompt"],
            "expected": s["expected"],
            "before": start.get(s["prompt"]),
            "after": s["reply"] if end else None,
        }
        for s in (end or evals[0])["samples"]
    ]
