"""Batch scripts that a script writes or passes on: here-documents and lines of ``echo`` in a file, and ``sbatch --wrap``."""

from __future__ import annotations

import re
from collections.abc import Iterator

from allranks.analysis.lint.command_options import slurm_option, srun_end
from allranks.analysis.lint.readers import ShellReader
from allranks.analysis.lint.records import Argument, ProgramCall
from allranks.analysis.lint.shell_tokens import UNRESOLVED_OPEN, MappedText, join_texts
from allranks.utils.text import lazy_regex

HEAD = lazy_regex(r"\s*#!\s*/\S*(?:\s+-?\w*)?\b(?:ba|z|k)?sh\b|\s*#SBATCH\s")
REQUEST = lazy_regex(r"(?m)^#(?:SBATCH|PBS|BSUB)\s+-")
CHANGING = ("sed", "perl", "envsubst", "awk", "python", "python3")
OF_ECHO = lazy_regex(r"-[neE]+")
MIN_LINES = 4
OF_SUBMISSION = lazy_regex(r"-(?:d|-dependency|-parsable|W|-wait|H|-hold|J|-job-name|o|-output|e|-error)(?:\b|=|$).*")


def generated_jobs(reading: ShellReader) -> Iterator[MappedText]:
    """Yield the batch scripts that a script passes to sbatch, or writes to files with their requests."""
    for script, call in zip(reading.submitted, reading.submitting, strict=True):
        yield _with_options(script, list(call.args[: srun_end(call.args)]))
    named = _submissions(reading)
    written = {**_echoed(reading), **_documents(reading)}
    for name, script in written.items():
        options = named.get(name)
        if options is None and None in named:
            continue  # the command line of sbatch may request more
        yield _with_options(script, options or [])
    for call in reading.calls:
        if call.program == "sbatch" and not call.in_substitution:
            wrapped = _wrapped(call)
            if wrapped:
                yield wrapped


def _submissions(reading: ShellReader) -> dict[str | None, list[Argument]]:
    """Return the options of sbatch by the script's name; under None those of a script of unknown name that may request anything."""
    found: dict[str | None, list[Argument]] = {}
    written = set(reading.files) | {r.target for c in reading.calls for r in c.redirects}
    for call in reading.calls:
        if call.program != "sbatch":
            continue
        end = srun_end(call.args)
        options = list(call.args[:end])
        name = call.args[end].text if end < len(call.args) else None
        known = name if name in written else None
        requests = [a for a in options if not OF_SUBMISSION.fullmatch(a.text)]
        if known is not None or (requests and not any(a.text.startswith("--wrap") for a in options)):
            found[known] = options
    return found


def _documents(reading: ShellReader) -> dict[str, MappedText]:
    """Return the files of here-documents that are whole batch scripts."""
    extended = {r.target for c in reading.calls for r in c.redirects if r.operator == ">>"}
    changed = {a.text for c in reading.calls if c.program in CHANGING for a in c.args}
    return {
        name: text
        for name, text in reading.files.items()
        if name not in extended and name not in changed and HEAD.match(text.text) and REQUEST.search(text.text)
    }


def _echoed(reading: ShellReader) -> dict[str, MappedText]:
    """Return the files that lines of ``echo`` build, one after another, under the same conditions."""
    parts: dict[str, list[ProgramCall]] = {}
    broken: set[str] = set()
    for call in reading.calls:
        for redirect in call.redirects:
            if redirect.operator not in (">", ">>"):
                continue
            plain = call.program == "echo" and not call.is_piped and len(call.redirects) == 1
            if not plain or (redirect.operator == ">" and redirect.target in parts):
                broken.add(redirect.target)
            parts.setdefault(redirect.target, []).append(call)
    found: dict[str, MappedText] = {}
    for name, calls in parts.items():
        same = {(c.branch, c.in_loop, c.in_function, c.under) for c in calls}
        if name in broken or name in reading.files or len(calls) < MIN_LINES or len(same) > 1:
            continue
        lines = [_line(c) for c in calls]
        if any(line is None for line in lines):
            continue
        script = join_texts([line for line in lines if line is not None])
        if HEAD.match(script.text) and REQUEST.search(script.text):
            found[name] = script
    return found


def _line(call: ProgramCall) -> MappedText | None:
    """Return what ``echo`` writes; None if it depends on an option of it."""
    args = list(call.args)
    escapes = False
    while args and OF_ECHO.fullmatch(args[0].text) and not args[0].quoted:
        escapes = escapes or "e" in args[0].text
        if "n" in args[0].text:
            return None
        args.pop(0)
    if escapes and any("\\" in a.text for a in args):
        return None
    pieces: list[MappedText] = []
    for arg in args:
        pieces += [MappedText(" ", [arg.offset])] * bool(pieces) + [arg.source]
    return join_texts([*pieces, MappedText("\n", [call.offset])])


def _with_options(script: MappedText, options: list[Argument]) -> MappedText:
    """Return a script with the options of sbatch's command line, which replace its own, behind its first line."""
    if not options or any(a.is_open for a in options):
        return script
    names = {slurm_option(a.text)[0] for a in options if a.text.startswith("-")}
    first = script.text.find("\n") + 1 if script.text.startswith("#!") else 0
    pieces = [script.part(0, first), *_directives(options)]
    for line in re.finditer(r"[^\n]*\n|[^\n]+\Z", script.text[first:]):
        words = line[0].split()
        if words[:1] != ["#SBATCH"] or len(words) < 2 or slurm_option(words[1])[0] not in names:
            pieces.append(script.part(first + line.start(), first + line.end()))
    return join_texts(pieces)


def _directives(options: list[Argument]) -> list[MappedText]:
    """Return ``#SBATCH`` lines for options of a command line."""
    pieces: list[MappedText] = []
    for arg in options:
        new = arg.text.startswith("-")
        if new:
            pieces += [MappedText("\n", [arg.offset])] * bool(pieces) + [MappedText("#SBATCH ", [arg.offset] * 8)]
        else:
            pieces.append(MappedText(" ", [arg.offset]))
        pieces.append(MappedText(re.sub(r"\s", "_", arg.source.text), arg.source.at))
    return [*pieces, MappedText("\n", [options[-1].offset])] if pieces else []


def _wrapped(call: ProgramCall) -> MappedText | None:
    """Return the command of ``sbatch --wrap`` as a batch script with the options of the command line."""
    args = list(call.args[: srun_end(call.args)])
    place = next((i for i, a in enumerate(args) if re.match(r"--wrap(?:=|\Z)", a.text)), None)
    if place is None:
        return None
    joined = args[place].text.startswith("--wrap=")
    last = place if joined else place + 1
    if last >= len(args):
        return None
    source = args[last].source
    command = source.part(len("--wrap="), len(source.text)) if joined else source
    options = args[:place] + args[last + 1 :]
    if not options or any(
        a.text.startswith(UNRESOLVED_OPEN) or a.is_open for a in options if not a.text.startswith("-")
    ):
        return None
    start = args[0].offset
    shebang = "#!/bin/sh\n"
    return join_texts(
        [MappedText(shebang, [start] * len(shebang)), *_directives(options), command, MappedText("\n", [start])]
    )
