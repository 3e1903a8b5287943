"""Scores ``allranks diagnose`` on logs that its rules have never seen: once, before any rule is changed for them.

``python -m benchmarks.diagnose --first-look FOLDER [--round N] [--json FILE]``. FOLDER has ``labels.tsv`` with the columns file, verdict,
id and also_ok (further classes that are right, separated by commas). The same scorer runs with an older version of the package on
PYTHONPATH: one without a verdict is silent where it has no finding.

A failed log is right if the verdict and the first finding's class are the label's, or the class is in also_ok; for the label `unexplained`
the verdict `unexplained` is right, and any class in also_ok. Silence is a failed log that is called healthy. A false alarm is `found` or
`unexplained` on a healthy log, or a finding on an incomplete one.
"""

from __future__ import annotations

import csv
import json
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any


def answer(path: Path) -> dict[str, Any]:
    """Return verdict, first class, its confidence and the kind of rule behind it."""
    import allranks.analysis.diagnose as package

    both = getattr(package, "diagnose_with_kinds", None)
    found, kinds = both([path], workers=1) if both else (package.diagnose([path], workers=1), [])
    first = found.findings[0] if found.findings else None
    verdict = getattr(found, "verdict", "found" if first else "healthy")
    return {
        "verdict": verdict,
        "id": first.id if first else None,
        "confidence": first.confidence if first else None,
        "kind": kinds[0] if kinds else None,
        "all": [f.id for f in found.findings],
    }


def judge(label: dict[str, str], got: dict[str, Any]) -> dict[str, bool]:
    """Compare an answer with its label."""
    also = set(re.split(r"[\s,;|]+", (label.get("also_ok") or "").strip())) - {"", "-"}
    wanted = label["verdict"]
    failed = wanted in ("found", "unexplained")
    if wanted == "found":
        right = got["verdict"] == "found" and got["id"] in {label["id"], *also}
    elif wanted == "unexplained":
        right = got["verdict"] == "unexplained" or got["id"] in also
    else:
        right = got["verdict"] == wanted
    return {
        "failed": failed,
        "right": right,
        "silent": failed and got["verdict"] == "healthy",
        "alarm": (wanted == "healthy" and got["verdict"] in ("found", "unexplained"))
        or (wanted == "incomplete" and got["id"] is not None),
    }


def first_look(folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the figures of a folder, and a row for each log."""
    with (folder / "labels.tsv").open() as file:
        labels = [row for row in csv.DictReader(file, delimiter="\t") if row.get("file")]
    rows = []
    for label in labels:
        got = answer(folder / label["file"])
        rows.append({**{f"label_{k}": v for k, v in label.items() if k}, **got, **judge(label, got)})
    return figures(rows), rows


def figures(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Count what the rows say."""
    failed = [r for r in rows if r["failed"]]
    named = [r for r in failed if r["label_verdict"] == "found"]
    healthy = [r for r in rows if r["label_verdict"] == "healthy"]
    incomplete = [r for r in rows if r["label_verdict"] == "incomplete"]
    sure = [r for r in rows if r["confidence"] is not None]
    return {
        "failed": len(failed),
        "right_first": sum(r["right"] for r in failed),
        "with_a_class": len(named),
        "with_a_class_right_first": sum(r["right"] for r in named),
        "another_class_first": sum(not r["right"] and r["verdict"] == "found" for r in failed),
        "unexplained_instead_of_a_class": sum(r["verdict"] == "unexplained" for r in named),
        "called_incomplete": sum(r["verdict"] == "incomplete" for r in failed),
        "silent": sum(r["silent"] for r in failed),
        "healthy": len(healthy),
        "healthy_right": sum(r["right"] for r in healthy),
        "incomplete": len(incomplete),
        "incomplete_right": sum(r["right"] for r in incomplete),
        "false_alarms": sum(r["alarm"] for r in rows),
        "confidence": confidence(sure),
        "kinds": kinds(sure),
    }


def confidence(sure: list[dict[str, Any]]) -> dict[str, float]:
    """Return how far stated confidences are from hits: their mean, the hit rate, and the Brier score (0 is best, 0.25 is a coin)."""
    if not sure:
        return {}
    return {
        "stated_mean": round(sum(r["confidence"] for r in sure) / len(sure), 3),
        "hit_rate": round(sum(r["right"] for r in sure) / len(sure), 3),
        "brier": round(sum((r["confidence"] - r["right"]) ** 2 for r in sure) / len(sure), 3),
    }


def kinds(sure: list[dict[str, Any]]) -> dict[str, dict[str, int]]:
    """Count answers and hits for each kind of rule."""
    found: dict[str, dict[str, int]] = {}
    for row in sure:
        if row["kind"]:
            counts = found.setdefault(row["kind"], {"answers": 0, "right": 0})
            counts["answers"] += 1
            counts["right"] += row["right"]
    return dict(sorted(found.items()))


def run(folder: Path, number: int, path: Path | None, key: str, details: Path | None) -> dict[str, Any]:
    """Score a folder; keep its figures as a round in the result file. A round that was taken is not overwritten."""
    got, rows = first_look(folder)
    if details:
        details.write_text("\n".join(json.dumps(r) for r in rows) + "\n")
    if path:
        document = json.loads(path.read_text())
        rounds = document.setdefault("verdict_rounds", [])
        entry = next((r for r in rounds if r["round"] == number), None)
        if entry is None:
            entry = {"round": number, "date": datetime.now(UTC).date().isoformat()}
            rounds.append(entry)
        if key in entry:
            raise SystemExit(f"round {number} has its {key} already: logs are unseen only once")
        entry[key] = got
        path.write_text(json.dumps(document, indent=2) + "\n")
    return got


CALIBRATION = Path("src/allranks/analysis/diagnose/causes/__init__.py")
PAGE = Path("docs/diagnose.md")


def calibrate(results: Path) -> dict[str, tuple[int, int]]:
    """Write the hit rates of all first looks into the package and its page; every answer counts once, as it was first given."""
    table: dict[str, tuple[int, int]] = {}
    for entry in json.loads(results.read_text()).get("verdict_rounds", []):
        for kind, counts in entry.get("first_look", {}).get("kinds", {}).items():
            answers, right = table.get(kind, (0, 0))
            table[kind] = (answers + counts["answers"], right + counts["right"])
    table = dict(sorted(table.items()))
    rows = [f'    "{kind}": ({answers}, {right}),' for kind, (answers, right) in table.items()]
    _replace(
        CALIBRATION, "# begin generated\n", "# end generated", ["MEASURED: dict[str, tuple[int, int]] = {", *rows, "}"]
    )
    shown = [
        f"| {kind} | {answers} | {right} | {100 * right / answers:.0f} % |" for kind, (answers, right) in table.items()
    ]
    _replace(
        PAGE,
        "<!-- begin calibration -->\n",
        "<!-- end calibration -->",
        ["| kind of rule | answers | right | hit rate |", "|---|---|---|---|", *shown],
    )
    return table


def _replace(path: Path, begin: str, end: str, lines: list[str]) -> None:
    """Replace the text between two marks."""
    text = path.read_text()
    start = text.index(begin) + len(begin)
    path.write_text(text[:start] + "\n".join(lines) + "\n" + text[text.index(end) :])
