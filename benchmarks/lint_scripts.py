"""Score `allranks lint` on labelled scripts: ``python -m benchmarks.lint_scripts --first-look FOLDER``.

FOLDER has the scripts and ``labels.tsv`` (file, kind, line, trap, why, source), and perhaps ``minor.tsv`` and ``placeholders.tsv``, which
list what may be reported or not. A script is correct if it has no trap. Three figures result, all at the default level: the share of
correct scripts without output, the share of traps with a finding, and the share of findings at warning level and above that are true.

A trap counts as found if a finding is on its line; whether a finding elsewhere means the same trap, and whether a finding on no
label is true, is judged by hand, in a TSV file of judgements (what, file, line, key, verdict, reason; `what` is trap or finding, the
key is the trap or the rule, the verdict yes or no). Without a judgement a trap counts as missed and a finding as false. `--source`
scores another version of the package, whose folder holds `allranks`.

`--in-repositories` lays each script into a checkout of its own, as a user would have it, with the log folders that ``folders.tsv`` (file,
folder, exists) says its repository has: a script alone does not show whether a folder exists. `--slurm-version` gives lint the version
of Slurm; from 23.02 on, traps whose lines ``slurm_folders.tsv`` (file, line) lists do not count, as newer versions do not have them: folders
that they create, and steps that get the CPUs of the job again (23.11).
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.machine import facts

NOT_SCRIPTS = {
    *(
        "labels.tsv",
        "minor.tsv",
        "placeholders.tsv",
        "folders.tsv",
        "slurm_folders.tsv",
        "judgements.tsv",
        "sources.tsv",
    ),
    *("DONE", "README.md"),
}
LIMIT_S = 120


@dataclass
class Score:
    """One version's findings on a folder, with the verdict on each trap and finding."""

    correct: list[str]
    traps: list[dict[str, str]]
    findings: list[dict[str, Any]]
    verdicts: dict[tuple[str, str, str, str], tuple[bool, str]]
    silent: list[str] = field(default_factory=list)
    found: list[dict[str, str]] = field(default_factory=list)
    true: list[dict[str, Any]] = field(default_factory=list)
    serious: list[dict[str, Any]] = field(default_factory=list)

    def compute(self) -> None:
        """Fill the lists behind the three figures."""
        noisy = {f["file"] for f in self.findings}
        self.silent = [name for name in self.correct if name not in noisy]
        self.found = [trap for trap in self.traps if self.is_found(trap)]
        self.serious = [f for f in self.findings if f["severity"] != "note"]
        self.true = [f for f in self.serious if self.is_true(f)]

    def is_found(self, trap: dict[str, str]) -> bool:
        judged = self.verdicts.get(("trap", trap["file"], trap["line"], trap["trap"]))
        on_line = any(f["file"] == trap["file"] and str(f["line"]) in lines_of(trap["line"]) for f in self.findings)
        return judged[0] if judged else on_line

    def is_true(self, finding: dict[str, Any]) -> bool:
        judged = self.verdicts.get(("finding", finding["file"], str(finding["line"]), finding["id"]))
        on_line = any(t["file"] == finding["file"] and str(finding["line"]) in lines_of(t["line"]) for t in self.traps)
        return judged[0] if judged else on_line

    def figures(self) -> dict[str, Any]:
        serious = [trap for trap in self.traps if trap.get("matters") == "1"]
        of_serious = {"serious_traps": len(serious), "serious_found": sum(trap in self.found for trap in serious)}
        return {
            "correct_scripts": len(self.correct),
            "correct_silent": len(self.silent),
            "traps": len(self.traps),
            "traps_found": len(self.found),
            "findings": len(self.serious),
            "findings_true": len(self.true),
            **(of_serious if serious else {}),
        }


def lines_of(text: str) -> set[str]:
    """Return the lines of ``12``, ``12-15`` or ``12,30``."""
    found: set[str] = set()
    for part in text.replace(";", ",").split(","):
        first, dash, last = part.strip().partition("-")
        if dash and first.isdecimal() and last.isdecimal():
            found.update(str(n) for n in range(int(first), int(last) + 1))
        elif first:
            found.add(first)
    return found


def rows(path: Path) -> list[dict[str, str]]:
    """Return the rows of a TSV file with a header; none if there is no file."""
    if not path.is_file():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return [
            {k: (v or "").strip() for k, v in row.items() if k}
            for row in csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
        ]


def run_lint(folder: Path, names: list[str], source: Path | None, slurm_version: str | None) -> list[dict[str, Any]]:
    """Return the findings that the command reports by default."""
    env = {**os.environ, **({"PYTHONPATH": str(source.resolve())} if source else {})}
    known = ["--slurm-version", slurm_version] if slurm_version else []
    command = [sys.executable, "-m", "allranks.cli.main", "lint", "--json", *known, *names]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    if done.returncode not in (0, 1, 2) or not done.stdout.startswith("{"):
        raise SystemExit(f"lint failed with {done.returncode}: {done.stderr[-500:]}")
    document = json.loads(done.stdout)
    for problem in document["unread"]:
        print(f"not read: {problem}")
    return document["findings"]


def in_repositories(
    folder: Path, names: list[str], source: Path | None, slurm_version: str | None
) -> list[dict[str, Any]]:
    """Return the findings of each script in a checkout with the log folders that its repository has."""
    known = [
        r for r in rows(folder / "folders.tsv") if r["exists"] != "no" and not r["folder"].startswith(("/", "~", "$"))
    ]
    findings = []
    for name in names:
        with tempfile.TemporaryDirectory() as place:
            checkout = Path(place)
            (checkout / ".git").mkdir()
            for row in known:
                if row["file"] == name:
                    (checkout / row["folder"]).mkdir(parents=True, exist_ok=True)
            shutil.copy(folder / name, checkout / name)
            findings += run_lint(checkout, [name], source, slurm_version)
    return findings


def score(
    folder: Path, judgements: Path | None, source: Path | None, slurm_version: str | None, *, checkouts: bool
) -> Score:
    """Run one version on a folder."""
    labels = rows(folder / "labels.tsv")
    names = sorted(p.name for p in folder.iterdir() if p.is_file() and p.name not in NOT_SCRIPTS)
    traps = [row for row in labels if row.get("trap") and row.get("kind", "trap") not in ("correct", "good", "minor")]
    if slurm_version and tuple(map(int, slurm_version.split(".")[:2])) >= (23, 2):
        created = {(r["file"], r["line"]) for r in rows(folder / "slurm_folders.tsv")}
        traps = [row for row in traps if (row["file"], row["line"]) not in created]
    faulty = {row["file"] for row in traps}
    verdicts = {
        (r["what"], r["file"], r["line"], r["key"]): (r["verdict"] == "yes", r["reason"])
        for r in rows(judgements or Path("-"))
    }
    findings = (in_repositories if checkouts else run_lint)(folder, names, source, slurm_version)
    result = Score([n for n in names if n not in faulty], traps, findings, verdicts)
    result.compute()
    return result


def show(folder: Path, result: Score) -> None:
    """Print the tables to judge by hand."""
    print("== traps: found, file:line, trap, findings of the file on or near the line")
    for trap in result.traps:
        near = [f"{f['line']}:{f['id']}" for f in result.findings if f["file"] == trap["file"]]
        print(
            f"{'+' if trap in result.found else '-'} {trap['file']}:{trap['line']}\t{trap['trap']}\t{', '.join(near)}"
        )
    print("== findings: true, file:line, rule, message")
    labelled = {
        (r["file"], line): name
        for name in ("minor", "placeholders")
        for r in rows(folder / f"{name}.tsv")
        for line in lines_of(r.get("line", ""))
    }
    for item in result.serious:
        judged = result.verdicts.get(("finding", item["file"], str(item["line"]), item["id"]), (None, ""))[1]
        label = labelled.get((item["file"], str(item["line"])), "")
        correct = " CORRECT" if item["file"] in result.correct else ""
        print(
            f"{'+' if item in result.true else '-'} {item['file']}:{item['line']}\t{item['id']}\t{item['message']}\t{label}{correct}\t{judged}"
        )
    print("== correct scripts with output:", ", ".join(n for n in result.correct if n not in result.silent) or "none")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first-look", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--judgements", type=Path)
    parser.add_argument("--source", type=Path, help="score this version, and beside it the one that runs")
    parser.add_argument("--slurm-version", metavar="23.11", help="the version that the clusters have")
    parser.add_argument("--in-repositories", action="store_true", help="lay each script into a checkout of its own")
    parser.add_argument("--json", type=Path, help="add the figures to this file")
    parser.add_argument("--name", default="", help="name of this round in the file")
    args = parser.parse_args()
    sides = {"after": None, **({"before": args.source} if args.source else {})}
    figures = {}
    for side, source in sides.items():
        print(f"\n######## {side}")
        result = score(args.first_look, args.judgements, source, args.slurm_version, checkouts=args.in_repositories)
        show(args.first_look, result)
        figures[side] = result.figures()
        print(json.dumps(figures[side]))
    if args.json:
        old = json.loads(args.json.read_text()) if args.json.is_file() else {"rounds": {}}
        old["rounds"][args.name or args.first_look.name] = {"machine": {"date": facts()["date"]}, **figures}
        args.json.write_text(json.dumps(old, indent=2) + "\n")


if __name__ == "__main__":
    main()
