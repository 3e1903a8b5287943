"""Find a script's errors in any shell: by ShellCheck, else only syntax errors by ``bash -n``. The script is not run."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from allranks.analysis.lint.records import Severity

CODES = {
    *range(1000, 1100), 1101, 1110, 2043, 2066, 2068, 2069, 2070, 2072, 2077, 2088, 2089, 2115, 2121, 2124, 2145, 2158,
    2170, 2215, 2216, 2218, 2221, 2283, 2290, 2320,
} - {1090, 1091}  # fmt: skip
"""Codes that are reported: syntax, and what does something else than it says. Style is ShellCheck's own business."""
ONLY_NOTES = {2068}
"""``${ARGS[@]}`` without quotes: right as long as no option has a blank."""
PARSER = {"SC1009", "SC1072", "SC1073"}
"""They say that ShellCheck's parser stopped, beside the code of the reason."""
ONCE = {1017}
"""A carriage return at the end of a line, which is at the end of all."""
SYNTAX = range(1000, 2000)
SYNTAX_WHY = "The shell stops at this place: what stands above has run already, what stands below never runs."
LIMIT_S = 20
OTHER_SHELL = re.compile(r"#!.*\b(?:zsh|fish|csh|tcsh|mksh)\b")


class GeneralFinding(NamedTuple):
    """A finding about the shell in general; lines and columns count from 1."""

    id: str
    severity: Severity
    line: int
    column: int
    message: str
    why: str
    cure: str
    source: str


def general_findings(text: str) -> list[GeneralFinding]:
    """Return what ShellCheck or bash says about a script."""
    if OTHER_SHELL.match(text.split("\n", 1)[0]):
        return []
    syntax = list(_of_bash(text))
    checker = shutil.which("shellcheck") or shutil.which("shellcheck", path=str(Path(sys.executable).parent))
    if checker is None:
        return syntax
    findings = list(_of_shellcheck(checker, text))
    named = [f for f in findings if f.id not in PARSER]
    # A script that bash accepts has no syntax error, whatever ShellCheck's parser says.
    return named + (
        syntax if syntax and not any(f.severity == "error" and f.id.startswith("SC1") for f in named) else []
    )


def _output(command: list[str], text: str) -> tuple[str, str]:
    """Return the output of a program that reads the script; nothing if it cannot be started or does not end."""
    try:
        # Without the caller's environment: BASH_ENV would name a file that bash runs.
        done = subprocess.run(
            command, input=text, capture_output=True, text=True, timeout=LIMIT_S, check=False, env={"LC_ALL": "C.UTF-8"}
        )
    except (OSError, subprocess.TimeoutExpired):
        return "", ""
    return done.stdout, done.stderr


def _of_bash(text: str) -> Iterator[GeneralFinding]:
    bash = shutil.which("bash")
    said = _output([bash, "--norc", "-n", "/dev/stdin"], text.replace("\r\n", "\n"))[1] if bash else ""
    for number, what in re.findall(r"line (\d+): (?!`)(.+)", said):
        delimited = re.match(r"warning: here-document at line (\d+) (.*)", what)
        line, message = (delimited[1], f"the here-document is {delimited[2]}") if delimited else (number, what)
        cure = "the reported place is where bash noticed it; an open quote or block may begin further up"
        yield GeneralFinding(
            "shell-syntax", "warning" if delimited else "error", int(line), 1, message, SYNTAX_WHY, cure, "bash -n"
        )
        if not delimited:
            return


def _of_shellcheck(checker: str, text: str) -> Iterator[GeneralFinding]:
    options = ["--format=json1", "--norc", "--shell=bash", "-"]
    said = _output([checker, *options], text)[0]
    try:
        comments = json.loads(said)["comments"] if said else []
    except (ValueError, KeyError):
        return
    said_once: set[int] = set()
    for item in comments:
        code = item["code"]
        if code in CODES and code not in said_once:
            said_once |= {code} & ONCE
            level = item["level"] if code not in ONLY_NOTES else "info"
            severity: Severity = "error" if level == "error" else "warning" if level == "warning" else "note"
            cure = f"https://www.shellcheck.net/wiki/SC{code}"
            why = SYNTAX_WHY if code in SYNTAX else "ShellCheck's page about this code says what happens."
            yield GeneralFinding(
                f"SC{code}", severity, item["line"], item["column"], item["message"].strip(), why, cure, "ShellCheck"
            )
