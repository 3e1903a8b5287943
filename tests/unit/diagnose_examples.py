"""Lines of diagnose_examples.tsv: of each failure class an example and a near miss, and an example of each harmless message."""

from __future__ import annotations

import csv
from pathlib import Path

with Path(__file__).with_suffix(".tsv").open(newline="") as _file:
    _ROWS = list(csv.DictReader(_file, delimiter="\t", quoting=csv.QUOTE_NONE))
NEAR_MISSES = {row["id"]: row["near_miss"] for row in _ROWS if row["near_miss"]}
EXAMPLES = {row["id"]: row["example"] for row in _ROWS if row["near_miss"]}
HARMLESS = {row["id"]: row["example"] for row in _ROWS if not row["near_miss"]}
