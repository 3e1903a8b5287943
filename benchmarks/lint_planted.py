"""Plant mistakes into real scripts and count how many `allranks lint` finds: ``python -m benchmarks.lint_planted FOLDER``.

FOLDER has launch scripts of any origin, at any depth. Each form of `lint_mistakes` plants one mistake in one spelling. A script in which it cannot be planted
for certain is left out, as is one in which lint already reports a rule that would count. A mistake is found if a finding at warning level or above, of one of
the rules that say so, is on one of its lines. The scripts are divided by a hash of their path: `--half develop` is for work on the rules, `--half measure` for
the figures.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from allranks.analysis.lint import LintFinding, lint
from benchmarks.lint_mistakes import MAX_CHARACTERS, Form, Script
from benchmarks.lint_mistakes_lines import FORMS
from benchmarks.machine import facts


def scripts_in(folder: Path, half: str) -> Iterator[Script]:
    """Yield the scripts of one half, in an order that does not depend on the folder."""
    named = []
    for where, _, names in os.walk(folder):
        for name in names:
            path = Path(where, name)
            digest = hashlib.sha256(str(path.relative_to(folder)).encode()).hexdigest()
            if (int(digest[0], 16) < 8) == (half == "develop"):
                named.append((digest, path))
    for digest, path in sorted(named):
        text = path.read_text(encoding="utf-8", errors="replace")
        if "\r" not in text and text.startswith("#!") and len(text) < MAX_CHARACTERS:
            script = Script.of(digest[:12], text)
            if script.launches:
                yield script


def is_found(findings: list[LintFinding], form: Form, lines: set[int]) -> bool:
    return any(f.line in lines and f.severity != "note" and (not form.rules or f.id in form.rules) for f in findings)


def measure(
    scripts: list[Script], each: int, seed: int, chosen: str
) -> tuple[dict[str, dict[str, list[int]]], list[str]]:
    """Return found and planted by mistake and form, and the texts in which nothing was found."""
    counts: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(lambda: [0, 0]))
    missed: list[str] = []
    known: dict[str, list[LintFinding]] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "job.sh"

        def findings(text: str) -> list[LintFinding]:
            path.write_text(text, encoding="utf-8")
            return list(lint([path]).findings)

        for form in FORMS:
            if chosen and chosen not in form.mistake:
                continue
            rng = random.Random(f"{seed} {form.mistake} {form.name}")
            order = list(scripts)
            rng.shuffle(order)
            count = counts[form.mistake][form.name]
            for script in order:
                if count[1] >= each:
                    break
                planted = form.plant(script, rng)
                if planted is None:
                    continue
                if script.name not in known:
                    known[script.name] = findings(script.text + "\n")
                if any(f.id in form.rules and f.severity != "note" for f in known[script.name]):
                    continue
                count[1] += 1
                if is_found(findings(planted.text), form, planted.lines):
                    count[0] += 1
                else:
                    missed.append(
                        f"{form.mistake} / {form.name} in {script.name}, lines {min(planted.lines)}-{max(planted.lines)}\n{planted.text}"
                    )
    return counts, missed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--half", choices=("develop", "measure"), default="develop")
    parser.add_argument("--scripts", type=int, default=1000, help="scripts to plant in")
    parser.add_argument("--each", type=int, default=20, help="scripts per form")
    parser.add_argument("--only", default="", help="mistakes whose name has this text")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--missed", type=Path, help="write the texts in which nothing was found to this file")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    scripts = list(islice(scripts_in(arguments.folder, arguments.half), arguments.scripts))
    counts, missed = measure(scripts, arguments.each, arguments.seed, arguments.only)
    rows: dict[str, Any] = {}
    for mistake, forms in counts.items():
        found, planted = sum(c[0] for c in forms.values()), sum(c[1] for c in forms.values())
        rows[mistake] = {
            "planted": planted,
            "found": found,
            "forms": {n: {"planted": c[1], "found": c[0]} for n, c in forms.items()},
        }
        print(
            f"{mistake:28} {found:5} of {planted:5}",
            "  ".join(f"{n}: {c[0]}/{c[1]}" for n, c in forms.items() if c[0] < c[1]),
        )
    if arguments.missed:
        arguments.missed.write_text("\n=====\n".join(missed), encoding="utf-8")
    if arguments.out:
        document = {"machine": facts(), "half": arguments.half, "scripts": len(scripts), "mistakes": rows}
        arguments.out.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
