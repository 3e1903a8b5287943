"""Write the tables of benchmarks/README.md from benchmarks/results/train_throughput.json. ``python scripts/make_throughput_table.py``

A test checks that they are up to date. Without a result, the page says so.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.train_throughput.compare import tables  # noqa: E402

PAGE = ROOT / "benchmarks" / "README.md"
RESULT = ROOT / "benchmarks" / "results" / "train_throughput.json"
BEGIN = "<!-- written by scripts/make_throughput_table.py -->"
END = "<!-- end of what it writes -->"
NONE = "Not measured yet."


def text() -> str:
    """Return the page with the tables of the recorded result."""
    head, rest = PAGE.read_text().split(BEGIN)
    _, tail = rest.split(END)
    found = recorded(json.loads(RESULT.read_text())) if RESULT.exists() else NONE
    return f"{head}{BEGIN}\n\n{found}\n\n{END}{tail}"


def recorded(result: dict) -> str:
    """Return what was measured where, and the tables."""
    settings, machine = result["settings"], result["machine"]
    repeats = f"{settings['repeats']} repeat{'s' if settings['repeats'] > 1 else ''}"
    disturbed = ", beside other programs" if settings["accept_disturbed"] else ""
    where = f"{machine['date'][:10]}, {machine['cores']} cores ({machine['cpu']}), {repeats} of {settings['useful_tokens']:,} tokens{disturbed}"
    return f"`results/{RESULT.name}`, {where}; median (range):\n\n{tables(result)}"


def write() -> None:
    """Replace the tables."""
    PAGE.write_text(text())


if __name__ == "__main__":
    write()
