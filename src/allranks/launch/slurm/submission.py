"""Prepare a user's own batch script for sbatch: lint, and a copy with one line that checks the nodes of the job.

What cannot be read here is passed on unchanged, so that sbatch says what is wrong with it.
"""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from allranks.analysis.diagnose.job_logs import MAX_SCRIPT_BYTES
from allranks.analysis.lint import LintReport, lint
from allranks.analysis.lint.command_options import sbatch_options
from allranks.analysis.lint.files import SHELL_LINE
from allranks.errors import EXIT_ENVIRONMENT
from allranks.utils.inputs import read_regular

WRAP_HEAD = "#!/bin/sh\n"
CHECK = (
    "import runpy, sys; from importlib.util import find_spec; "
    'module = "allranks.launch.slurm.job_preflight"; find_spec("allranks") and find_spec(module) or sys.exit(1); '
    'runpy.run_module(module, run_name="__main__")'
)


class BatchScript(msgspec.Struct, frozen=True, kw_only=True):
    """What a command line of sbatch submits: its options, and the script with its arguments."""

    options: dict[str, str | None]
    words: list[str]
    """The options as the user wrote them."""
    arguments: list[str]
    """The script and its arguments; empty if it is in ``--wrap`` or on standard input."""
    name: str
    text: str | None
    """None: it cannot be read here."""

    def lint(self, folder: Path) -> LintReport:
        """Lint a copy in `folder`, with the options of the command line as its last directive. Findings about these are
        left to sbatch."""
        options = [word for word in self.words if "\n" not in word and "wrap" not in self.options]
        text, number, added = insert_line(self.text or "", f"#SBATCH {shlex.join(options)}" if options else "#")
        copy = folder / Path(self.name).name
        copy.write_text(text, errors="surrogateescape")
        report = lint([copy])
        findings = [
            msgspec.structs.replace(item, file=self.name, line=item.line - (added and item.line > number))
            for item in report.findings
            if item.line != number
        ]
        return msgspec.structs.replace(report, files=[self.name], findings=findings)

    def why_no_preflight(self) -> str:
        """Return why the line cannot be added; empty if it can, or if sbatch will refuse the script."""
        if self.text is not None and not SHELL_LINE.match(self.text):
            return "the script is not for a shell"
        return "the script asks Slurm for its own path, a copy's" if "Command=" in (self.text or "") else ""

    def command(self, folder: Path, *, preflight: bool) -> tuple[list[str], Path | None]:
        """Return the words for sbatch, and the file that is its standard input if the script was read from there.

        Args:
            folder: a private folder for the copy of the script, until sbatch ends.
        """
        changed = preflight and self.text is not None and not self.why_no_preflight()
        text = insert_line(self.text or "", preflight_line())[0] if changed else self.text
        if text is None or (not changed and (self.arguments or "wrap" in self.options)):
            return [*self.words, *self.arguments], None
        if not self.arguments and "wrap" in self.options:
            return [*self.words, f"--wrap={text.removeprefix(WRAP_HEAD)}"], None
        copy = folder / Path(self.name).name
        copy.touch(mode=0o600)
        copy.write_text(text, errors="surrogateescape")
        return ([*self.words, str(copy), *self.arguments[1:]], None) if self.arguments else (self.words, copy)


def read_submission(words: Sequence[str], own: Sequence[str]) -> BatchScript:
    """Split a command line of sbatch, without the options in `own`, and read the script, also from standard input."""
    options, place = sbatch_options(words, [word.removeprefix("--") for word in own])
    arguments, name, text = list(words[place:]), "standard input", None
    if arguments:
        name = arguments[0]
        path = name if "/" in name or Path(name).exists() else shutil.which(name, mode=0) or name
        try:
            text = read_regular(path, MAX_SCRIPT_BYTES).decode(errors="surrogateescape")
        except OSError:
            text = None
    elif options.get("wrap") is not None:
        name, text = "wrap", f"{WRAP_HEAD}{options['wrap']}\n"
    elif not options.keys() & {"help", "usage", "version", "wrap"} and sys.stdin:
        text = sys.stdin.buffer.read().decode(errors="surrogateescape")
    kept = [word for word in words[:place] if word not in own]
    return BatchScript(options=options, words=kept, arguments=arguments, name=name, text=text)


def insert_line(text: str, line: str) -> tuple[str, int, bool]:
    """Put a line behind the directives of a script, if possible in the place of a blank one, which moves no other.

    Returns:
        The text, the number of the line, and whether the lines behind it moved.
    """
    lines = text.split("\n")
    commands = (i for i, one in enumerate(lines) if one.strip() and not one.lstrip().startswith("#"))
    first = next(commands, len(lines))
    blank = not lines[first - 1].strip()
    lines[first - blank : first] = [line]
    return "\n".join(lines), first - blank + 1, not blank


def preflight_line() -> str:
    """Return the line that checks the nodes. Only its verdict ends the job, no failure to make it, also with ``-e``."""
    python = shlex.quote(sys.executable)
    missing = f'echo "allranks: no preflight: $(uname -n) has no allranks in "{python} >&2'
    check = f"{python} -P -c {shlex.quote(CHECK)} </dev/null >&2"
    return f"[ -x {python} ] && {check} || case $? in {EXIT_ENVIRONMENT}) exit {EXIT_ENVIRONMENT};; *) {missing};; esac"
