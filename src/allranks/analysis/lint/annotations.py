"""Findings for other programs: workflow commands of GitHub Actions, and SARIF 2.1.0 for code scanning."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import quote

from allranks.analysis.lint.records import LintFinding, LintReport
from allranks.analysis.lint.rules import RULES
from allranks.analysis.lint.terminal import summary
from allranks.version import __version__

# https://docs.github.com/actions/reference/workflow-commands-for-github-actions
COMMANDS = {"error": "error", "warning": "warning", "note": "notice"}
SARIF_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"


def github_commands(report: LintReport) -> Iterator[str]:
    """Yield one workflow command per finding and per unread file, then a summary that the log shows."""
    for finding in report.findings:
        text = f"{finding.message}. {finding.why} Fix: {finding.cure}"
        place = {
            "file": finding.file,
            "line": finding.line,
            "col": finding.column,
            "title": f"allranks lint: {finding.id}",
        }
        yield _command(COMMANDS[finding.severity], place, text)
    for problem in report.unread:
        place = {
            "file": problem.file,
            **({"line": problem.line} if problem.line else {}),
            "title": "allranks lint: not read",
        }
        yield _command("error", place, problem.why)
    yield summary(report)


def _command(name: str, properties: dict[str, Any], message: str) -> str:
    shown = ",".join(f"{key}={_escape(str(value), ':,')}" for key, value in properties.items())
    return f"::{name} {shown}::{_escape(message)}"


def _escape(text: str, more: str = "") -> str:
    """Return the text with the characters escaped that end a command or a property."""
    for char in "%\r\n" + more:
        text = text.replace(char, f"%{ord(char):02X}")
    return text


def sarif(report: LintReport) -> dict[str, Any]:
    """Return one SARIF document with all rules that have findings."""
    used = {finding.id for finding in report.findings}
    rules = [rule for rule in RULES if rule.id in used]
    numbers = {rule.id: number for number, rule in enumerate(rules)}
    driver = {
        "name": "allranks lint",
        "version": __version__,
        "rules": [
            {
                "id": rule.id,
                "shortDescription": {"text": rule.id.replace("-", " ")},
                "fullDescription": {"text": rule.why},
                "help": {"text": f"Fix: {rule.cure or 'see the message'}. Source: {rule.source}"},
                "defaultConfiguration": {"level": rule.severity},
            }
            for rule in rules
        ],
    }
    notes = [
        {
            "level": "error",
            "message": {"text": f"{problem.file}{f':{problem.line}' if problem.line else ''}: {problem.why}"},
        }
        for problem in report.unread
    ]
    run = {
        "tool": {"driver": driver},
        "columnKind": "unicodeCodePoints",
        "results": [_result(finding, numbers[finding.id]) for finding in report.findings]
        + [{**_result(finding), "suppressions": [{"kind": "inSource"}]} for finding in report.allowed],
        "invocations": [{"executionSuccessful": not report.unread, "toolExecutionNotifications": notes}],
    }
    return {"$schema": SARIF_SCHEMA, "version": "2.1.0", "runs": [run]}


def _result(finding: LintFinding, number: int | None = None) -> dict[str, Any]:
    region = {"startLine": finding.line, "startColumn": finding.column, "snippet": {"text": finding.text}}
    index = {} if number is None else {"ruleIndex": number}
    return {
        "ruleId": finding.id,
        **index,
        "level": finding.severity,
        "message": {"text": f"{finding.message}. {finding.why} Fix: {finding.cure}"},
        "locations": [{"physicalLocation": {"artifactLocation": {"uri": _uri(finding.file)}, "region": region}}],
    }


def _uri(name: str) -> str:
    path = PurePosixPath(name)
    return ("file://" if path.is_absolute() else "") + quote(str(path))
