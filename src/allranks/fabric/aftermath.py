"""After a run, or while it goes on: what its logs say the ranks got, against what was decided for them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from allranks.fabric.job import Policy
from allranks.fabric.judge import Outcome, judge
from allranks.fabric.observed import Collector
from allranks.fabric.report import load
from allranks.rundir import RunDir, read_json

MAX_BYTES = 8 * 2**20
"""NCCL says what it took at its start; of a long log only the beginning is read."""


def outcome_of(run: RunDir, attempt: int) -> Outcome | None:
    """None where nothing was decided: runs of an older version, or ones that never came so far."""
    policy = load(run.network(attempt))
    if policy is None:
        return None
    seen = _connections(run, attempt, policy)
    collectors: dict[str, Collector] = {}
    for path in run.rank_logs(attempt).values():
        host = path.name.rsplit(".rank", 1)[0]
        node = next((name for name, facts in seen.items() if host in facts["names"]), host)
        collectors.setdefault(node, Collector(node)).take(_lines(path))
    observed = [c.observed(seen.get(host, {}).get("interfaces")) for host, c in sorted(collectors.items())]
    return judge({node.host: node.expected for node in policy.nodes}, observed)


def as_metrics(outcome: Outcome | None) -> dict[str, Any] | None:
    """The part of ``metrics.json``."""
    if outcome is None:
        return None
    return {"line": outcome.line(), "ok": outcome.ok, **msgspec.to_builtins(outcome)}


def _connections(run: RunDir, attempt: int, policy: Policy) -> dict[str, dict[str, Any]]:
    """What each node's agent wrote down, by the name that the policy has for the node."""
    found: dict[str, dict[str, Any]] = {}
    for path in run.logs_of(attempt).glob("*.connections.json"):
        facts = read_json(path)
        if not isinstance(facts, dict) or not isinstance(facts.get("names"), list):
            continue
        known = next((name for name in facts["names"] if policy.of(name)), None)
        found[known or path.name.removesuffix(".connections.json")] = facts
    return found


def _lines(path: Path) -> Iterator[str]:
    try:
        with path.open("rb") as file:
            text = file.read(MAX_BYTES)
    except OSError:
        return
    for line in text.splitlines():
        if b"NCCL" in line or b"connected peers" in line:
            yield line.decode(errors="replace")
