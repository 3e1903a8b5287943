"""Runs the copy test on all nodes at once, and keeps what it found for later runs."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import msgspec

from allranks.fabric import evidence
from allranks.preflight.gather import Preflight, Where

LIMIT_S = 300.0
PAIR_S = 20.0


class CopyResult(msgspec.Struct, frozen=True, kw_only=True):
    """One node: ordered pairs tested, pairs that failed (``GPU0-GPU1``), and why it could not be tested."""

    host: str
    tested: int = 0
    failed: list[str] = []
    error: str = ""

    def line(self) -> str:
        """One line for people."""
        if self.failed:
            return f"{self.host}: copies between {', '.join(self.failed)} hang or come out wrong; runs there go around peer-to-peer"
        told = f" ({self.error})" if self.error else ""
        return f"{self.host}: {self.tested} copies between GPUs came out right{told}"


def copy_test(where: Where, found: Preflight, run_root: Path) -> list[CopyResult]:
    """Copies between all pairs of GPUs of every node that has several. Nodes that give no answer have an error."""
    probes = {probe.host: probe for probe in found.probes if len(probe.gpus) > 1}
    if not probes:
        return []
    argv = [sys.executable, "-m", "allranks.preflight.copies", "--json-args", json.dumps({"limit_s": PAIR_S})]
    answers = where.run(argv, LIMIT_S, None, list(probes)).by_host()
    results = []
    for host, probe in probes.items():
        facts = answers[host].facts() if host in answers else None
        result = msgspec.convert(facts or {"host": host, "error": "no answer"}, CopyResult)
        if result.tested:
            evidence.save(run_root, probe, result.failed, result.tested)
        results.append(result)
    return results
