"""A policy as lines for people, and its file in the run folder."""

from __future__ import annotations

from pathlib import Path

import msgspec

from allranks.fabric.job import Policy
from allranks.rundir import read_json, write_json

USUAL = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "NCCL_DEBUG")


def lines(policy: Policy) -> list[str]:
    """One line a node with what is set; nodes with the same settings share one. Then what there is to note."""
    by_words: dict[str, list[str]] = {}
    for node in policy.nodes:
        words = " ".join(f"{item.name}={item.value}" for item in node.environment if item.value is not None)
        expected = node.expected.transport
        by_words.setdefault(f"{words or 'nothing set'}{f'; expected: {expected}' if expected else ''}", []).append(
            node.host
        )
    found = [f"network {_hosts(hosts)}: {words}" for words, hosts in by_words.items()]
    found += [f"network why {name}: {why}" for name, why in _reasons(policy).items()]
    return [*found, *(f"network note: {note}" for note in policy.notes)]


def _reasons(policy: Policy) -> dict[str, str]:
    """Why the less usual ones are set; the same words for several nodes come once."""
    told: dict[str, str] = {}
    for node in policy.nodes:
        for item in node.environment:
            if item.value is not None and item.name not in USUAL and item.source == "policy":
                told.setdefault(f"{item.name}={item.value}", item.reason)
    return told


def _hosts(hosts: list[str]) -> str:
    return ", ".join(hosts) if len(hosts) <= 4 else f"{', '.join(hosts[:3])} and {len(hosts) - 3} more"


def save(path: Path, policy: Policy) -> None:
    """For the agents, and for the comparison afterwards."""
    write_json(path, msgspec.to_builtins(policy))


def load(path: Path) -> Policy | None:
    """None where there is none, or it is damaged."""
    raw = read_json(path)
    try:
        return msgspec.convert(raw, Policy) if raw is not None else None
    except msgspec.ValidationError:
        return None
