"""Functions that a script calls once, behind their definition: their launches run as if they stood at the call."""

from __future__ import annotations

import re
from collections.abc import Iterator

import msgspec

from allranks.analysis.lint.command_options import LAUNCHERS, PYTHON
from allranks.analysis.lint.readers import ShellReader
from allranks.analysis.lint.records import ProgramCall

FUNCTION = re.compile(r"(?m)^(?:function[ \t]+)?([A-Za-z_]\w*)[ \t]*(?:\(\))?[ \t]*\n?\{[ \t]*(?:#.*)?$")
END = re.compile(r"(?m)^\}")
STARTERS = {
    "srun",
    "mpirun",
    "mpiexec",
    "ssh",
    "singularity",
    "apptainer",
    "docker",
    "bash",
    "sh",
    "time",
    "env",
    "nsys",
    "conda",
}


def place_single_calls(reading: ShellReader, text: str) -> None:
    """Take the launches of functions that run once, unconditionally, for commands outside of functions."""
    spans = list(_run_once(reading, text)) if "{" in text else []
    if spans:
        reading.calls[:] = [_moved(call, spans) for call in reading.calls]


def _run_once(reading: ShellReader, text: str) -> Iterator[tuple[int, int]]:
    """Yield the extent of functions whose only call is the next thing that the script does outside of functions."""
    bodies: dict[str, tuple[int, int]] = {}
    for found in FUNCTION.finditer(text):
        end = END.search(text, found.end())
        if end is None or found[1] in bodies:
            return
        bodies[found[1]] = (found.end(), end.start())
    plain = re.sub(r"(?m)^\s*#.*$|\s#\s.*$", "", text)
    for name, (start, end) in bodies.items():
        calls = [c for c in reading.calls if c.program == name]
        if (
            len(calls) != 1
            or calls[0].offset < end
            or not _is_plain(calls[0])
            or len(re.findall(rf"\b{name}\b", plain)) != 2
        ):
            continue
        places = [c.offset for c in reading.calls if not c.in_function and _starts(c)]
        places += [a.offset for a in reading.assignments if not a.in_function]
        if not any(end < place < calls[0].offset for place in places):
            yield start, end


def _is_plain(call: ProgramCall) -> bool:
    """Return whether a call runs once, in the foreground, whatever the script finds."""
    apart = call.in_loop or call.in_function or call.in_substitution or call.tested or call.subshell is not None
    return (
        not (apart or call.branch or call.under or call.redirects)
        and call.after in ("", "\n", ";")
        and call.before in ("", "\n", ";")
    )


def _starts(call: ProgramCall) -> bool:
    return call.program in LAUNCHERS or call.program in STARTERS or bool(PYTHON.match(call.program))


def _moved(call: ProgramCall, spans: list[tuple[int, int]]) -> ProgramCall:
    if not call.in_function or not _starts(call) or not any(start < call.offset < end for start, end in spans):
        return call
    under = tuple(msgspec.structs.replace(c, in_function=False) for c in call.under)
    return msgspec.structs.replace(call, in_function=False, under=under)
