"""Check CONTRIBUTING.md's table of questions: counts of files, that they exist, that each `>` is an import or a start.

python scripts/count_paths.py    prints the counts; exit code 1 and the reasons where the table is wrong
"""

from __future__ import annotations

import itertools
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "allranks"
NEW = re.compile("<")  # a file that does not exist yet: <family>.py


def path_of(name: str) -> Path:
    return ROOT / name if name.startswith("tests/") else PACKAGE / name


def names_file(text: str, name: str) -> bool:
    """Return whether a file's text imports or names a module, a template or a package's member."""
    if not name.endswith(".py"):
        return Path(name).name in text
    *packages, module = name.removesuffix(".py").split("/")
    package = ".".join(["allranks", *packages])
    imported = (
        rf"from {re.escape(package)} import [^\n]*\b{module}\b|from {re.escape(package)} import \([^)]*\b{module}\b"
    )
    return bool(re.search(rf"\b{re.escape(package)}\.{module}\b|{imported}", text))


def problems() -> tuple[list[tuple[str, int, int]], list[str]]:
    """Return (question, number of files, goal) of each row, and what is wrong."""
    section = (ROOT / "CONTRIBUTING.md").read_text().partition("## Where to find what")[2].partition("\n## ")[0]
    rows = [line.strip("| ").split(" | ", 3) for line in section.splitlines() if line.startswith("| ")][1:]
    counts, wrong = [], []
    for question, goal, number, cell in rows:
        steps = [re.findall(r"`([\w/.<>]+\.(?:py|j2|tsv))`", step) for step in cell.split(" > ")]
        files = [name for step in steps for name in step]
        counts.append((question, len(files), int(goal)))
        if len(files) != int(number):
            wrong.append(f"{question}: {len(files)} files, the table says {number}")
        wrong += [
            f"{question}: {name} does not exist"
            for name in files
            if not NEW.search(name) and not path_of(name).is_file()
        ]
        for before, after in itertools.pairwise(steps):
            if path_of(before[-1]).is_file() and not names_file(path_of(before[-1]).read_text(), after[0]):
                wrong.append(f"{question}: {before[-1]} neither imports nor starts {after[0]}")
    return counts, wrong


def main() -> None:
    counts, wrong = problems()
    for question, number, goal in counts:
        print(f"{number:3} {question}{f' (goal {goal})' if number > goal else ''}")
    sys.exit("\n".join(wrong) or None)


if __name__ == "__main__":
    main()
