"""Write docs/lint/, a page for each rule of lint, and the table of rules in docs/lint.md. ``python scripts/make_lint_pages.py``

The pages come from the rules' records (`rules/__init__.py`) and their examples (`rules/examples.py`, `rules/script_examples.py`).
"""

from __future__ import annotations

import re
from pathlib import Path

from allranks.analysis.lint.job import LintRule
from allranks.analysis.lint.rules import RULES
from allranks.analysis.lint.rules.examples import EXAMPLES

DOCS = Path(__file__).resolve().parent.parent / "docs"
FOLDER = DOCS / "lint"
START, END = "<!-- rules -->", "<!-- end of rules -->"
FILES = {"script": "scripts", "environment": "environment files", "spec": "specs of allranks"}


def page(rule: LintRule) -> str:
    """Return the page of one rule."""
    example = EXAMPLES[rule.id]
    files = " and ".join(", ".join(FILES[kind] for kind in rule.files).rsplit(", ", 1))
    cure = rule.cure or "what the finding names"
    return (
        f"# {rule.id}\n\n*{rule.severity}*, in {files}\n\n"
        f"Symptom: {example.symptom}\n\nWhy: {rule.why}\n\nReported:\n\n{_code(example.bad)}\nNot reported:\n\n{_code(example.good)}\n"
        f"Fix: {cure}\n\nSource: {rule.source}\n\nIgnore it with a comment on its line or above: `# allranks: ignore[{rule.id}]`. "
        "[All rules](../lint.md#rules)\n"
    )


def _code(text: str) -> str:
    shown = text.replace("\r", "^M")
    return f"```bash\n{shown}\n```\n"


def table() -> str:
    """Return the list of all rules."""
    rows = "".join(f"| [{rule.id}](lint/{rule.id}.md) | {rule.severity} | {rule.why} |\n" for rule in RULES)
    return f"{START}\n| rule | severity | why |\n|---|---|---|\n{rows}{END}"


def overview(text: str) -> str:
    """Return docs/lint.md with the current table."""
    return re.sub(f"{START}.*{END}", lambda _: table(), text, flags=re.DOTALL)


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for old in FOLDER.glob("*.md"):
        old.unlink()
    for one in RULES:
        (FOLDER / f"{one.id}.md").write_text(page(one))
    (DOCS / "lint.md").write_text(overview((DOCS / "lint.md").read_text()))
