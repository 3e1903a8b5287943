"""Lines of diagnose_examples.tsv: a near miss of each failure class, and an example of each harmless message."""

from __future__ import annotations

from pathlib import Path

_LINES = dict(line.split("\t") for line in Path(__file__).with_suffix(".tsv").read_text().splitlines()[1:])
HARMLESS = {name.removeprefix("harmless "): line for name, line in _LINES.items() if name.startswith("harmless ")}
NEAR_MISSES = {name: line for name, line in _LINES.items() if " " not in name}
