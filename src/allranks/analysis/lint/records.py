"""Records between the readers, the rules and the report."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import msgspec

from allranks.analysis.lint.shell_tokens import UNRESOLVED_OPEN, Branch, MappedText, restore_variables

Severity = Literal["error", "warning", "note"]


class Argument(msgspec.Struct, frozen=True):
    """A word after expansion; unknown parts stay unresolved (`shell_tokens.OPEN`)."""

    source: MappedText
    offset: int
    quoted: bool = False

    @property
    def text(self) -> str:
        return restore_variables(self.source.text)

    @property
    def is_open(self) -> bool:
        """Return whether it begins with an unquoted unknown value, which may be several options or none."""
        return self.source.text.startswith(UNRESOLVED_OPEN) and not self.quoted


class Assignment(msgspec.Struct, frozen=True):
    """``NAME=value`` on its own line, after ``export``, before a command, or in an environment file."""

    name: str
    source: MappedText
    offset: int
    exported: bool = False
    under: tuple[ProgramCall, ...] = ()
    items: tuple[MappedText, ...] | None = None
    removed: bool = False  # `unset NAME`
    in_substitution: bool = False
    in_function: bool = False

    @property
    def value(self) -> str:
        return restore_variables(self.source.text)


class Redirect(msgspec.Struct, frozen=True):
    operator: str
    target: str


class ProgramCall(msgspec.Struct, frozen=True):
    """One program with its arguments; `under` are the programs that start it, outermost first."""

    program: str
    args: tuple[Argument, ...]
    offset: int
    under: tuple[ProgramCall, ...] = ()
    prefix: tuple[Assignment, ...] = ()
    redirects: tuple[Redirect, ...] = ()
    before: str = ""  # operator before and after the command
    after: str = ""
    in_loop: bool = False
    in_function: bool = False
    in_substitution: bool = False
    tested: bool = False  # the condition of an if or a while
    module: bool = False  # started with python -m
    written: str = ""  # the program's word as written
    branch: Branch = ()

    def pairs(self) -> Iterator[tuple[Argument, Argument | None]]:
        """Yield each argument with the one after it."""
        return zip(self.args, [*self.args[1:], None], strict=True) if self.args else iter(())

    @property
    def srun(self) -> ProgramCall | None:
        """Return the nearest srun that starts it."""
        return next((c for c in reversed(self.under) if c.program == "srun"), None)

    @property
    def starter(self) -> ProgramCall:
        """Return the outermost program that starts it, or the call itself."""
        return self.under[0] if self.under else self

    @property
    def is_piped(self) -> bool:
        """Return whether its output goes into a pipe."""
        return self.after in ("|", "|&")

    @property
    def has_open_options(self) -> bool:
        """Return whether it has options that are unknown here: ``srun $SRUN_ARGS python train.py``."""
        return any(a.is_open for a in self.args)

    def instead_of(self, other: ProgramCall) -> bool:
        """Return whether only one of the two runs, because they are in different branches of one ``if`` or ``case``."""
        ways = dict(other.branch)
        return any(ways.get(number, way) != way for number, way in self.branch)


class VariableUse(msgspec.Struct, frozen=True):
    """``$NAME``, expanded by the shell that runs under `under`."""

    name: str
    offset: int
    under: tuple[ProgramCall, ...]
    program: str  # of the command that contains it; "=" for an assignment
    operator: str = ""  # what follows the name in ${NAME...}
    in_function: bool = False
    in_loop: bool = False
    in_redirect: bool = False  # in the name of a file to which the shell redirects


class Directive(msgspec.Struct, frozen=True):
    """One option of one ``#SBATCH`` line."""

    name: str  # long name without dashes
    value: str | None
    offset: int
    text: str  # of its line, from the option on
    late: bool = False  # after the first command: sbatch does not read it


class Comment(msgspec.Struct, frozen=True):
    offset: int
    text: str


class UnreadFile(msgspec.Struct, frozen=True):
    """Something that could not be read, and why."""

    file: str
    line: int | None
    why: str


class Edit(msgspec.Struct, frozen=True):
    """Replace the characters from `start` to `end` of the file by `text`."""

    start: int
    end: int
    text: str


class Violation(msgspec.Struct, frozen=True):
    """A violation of a rule at one place. `cure` and `why` replace those of the rule if set."""

    offset: int
    message: str
    cure: str | None = None
    why: str | None = None
    source: str | None = None
    severity: Severity | None = None
    fix: tuple[Edit, ...] = ()
    whatever_is_filled_in: bool = False  # it does not depend on a placeholder in the same line


class LintFinding(msgspec.Struct, frozen=True, kw_only=True):
    """One finding at one place, as ``--json`` prints it. Lines and columns count from 1."""

    id: str
    severity: Severity
    file: str
    line: int
    column: int
    text: str
    message: str
    why: str
    cure: str
    source: str
    fix: tuple[Edit, ...] = ()
    """What ``--fix`` changes; empty if it cannot repair this."""


class LintReport(msgspec.Struct, frozen=True, kw_only=True):
    """Findings by file and line; findings allowed by a comment; files that could not be read."""

    files: list[str]
    findings: list[LintFinding]
    allowed: list[LintFinding]
    unread: list[UnreadFile]
