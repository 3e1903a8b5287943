"""Functions that a script calls behind their definition: their launches run as if they stood at the call."""

from __future__ import annotations

import re
from collections.abc import Iterator

import msgspec

from allranks.analysis.lint.command_options import LAUNCHERS, PYTHON
from allranks.analysis.lint.readers import ShellReader
from allranks.analysis.lint.records import ProgramCall, VariableUse
from allranks.utils.text import lazy_regex

FUNCTION = lazy_regex(r"(?m)^(?:function[ \t]+)?([A-Za-z_]\w*)[ \t]*(?:\(\))?[ \t]*\n?\{[ \t]*(?:#.*)?$")
END = lazy_regex(r"(?m)^\}")
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
    "vllm",
    "ray",
    "ollama",
    "sglang",
    "jupyter",
    "tensorboard",
    "nvidia-smi",
    "wait",
}


def place_single_calls(reading: ShellReader, text: str) -> None:
    """Take the launches of functions that the script itself calls for commands outside of functions.

    They run where the function is called: in a loop if that is in one or if it is called several times, and in the branch of an ``if``.
    """
    places = dict(_called(reading, text)) if "{" in text else {}
    if places:
        reading.calls[:] = [_moved(call, places) for call in reading.calls]
        reading.uses[:] = [
            msgspec.structs.replace(u, in_function=False)
            if u.program in STARTERS | LAUNCHERS and _within(u, places)
            else u
            for u in reading.uses
        ]


def _called(reading: ShellReader, text: str) -> Iterator[tuple[tuple[int, int], list[ProgramCall]]]:
    """Yield the extent of functions and their calls, if the script does nothing in between that a launch may depend on."""
    bodies: dict[str, tuple[int, int]] = {}
    for found in FUNCTION.finditer(text):
        end = END.search(text, found.end())
        if end is None or found[1] in bodies:
            return
        bodies[found[1]] = (found.end(), end.start())
    plain = re.sub(r"(?m)^\s*#.*$|\s#\s.*$", "", text)
    for name, (start, end) in bodies.items():
        calls = [c for c in reading.calls if c.program == name]
        if not calls or calls[0].offset < end or not all(_is_plain(c) for c in calls):
            continue
        if len(re.findall(rf"\b{name}\b", plain)) != 1 + len(calls):
            continue
        between = [c for c in reading.calls if end < c.offset < calls[0].offset and not c.in_function]
        names = {a.name for a in reading.assignments if end < a.offset < calls[0].offset and not a.in_function}
        body = text[start:end]
        reaches = any(ENVIRONMENT.match(n) or re.search(rf"\$\{{?{n}\b|\b{n}\b\s*[-+*/)]", body) for n in names)
        if not reaches and not any(_starts(c) for c in between):
            yield (start, end), calls


ENVIRONMENT = lazy_regex(r"(?:MASTER|NCCL|GLOO|CUDA|HF|TORCH|PET|SLURM|OMP|WORLD|RANK|LOCAL|WANDB)(?:_|\Z)")


def _is_plain(call: ProgramCall) -> bool:
    """Return whether a call runs in the foreground of the script's own shell, and nothing reads its output or result."""
    apart = call.in_function or call.in_substitution or call.tested or call.subshell is not None
    return (
        not (apart or call.under or call.redirects) and call.after in ("", "\n", ";") and call.before in ("", "\n", ";")
    )


def _starts(call: ProgramCall) -> bool:
    return call.program in LAUNCHERS or call.program in STARTERS or bool(PYTHON.match(call.program))


def _within(use: VariableUse, places: dict[tuple[int, int], list[ProgramCall]]) -> bool:
    return any(start < use.offset < end for start, end in places)


def _moved(call: ProgramCall, places: dict[tuple[int, int], list[ProgramCall]]) -> ProgramCall:
    at = next((calls for (start, end), calls in places.items() if start < call.offset < end), None)
    if at is None or not call.in_function or not _starts(call.starter):
        return call
    looped = call.in_loop or len(at) > 1 or any(c.in_loop for c in at)
    branch = (*at[0].branch, *call.branch)
    under = tuple(msgspec.structs.replace(c, in_function=False, in_loop=looped, branch=branch) for c in call.under)
    return msgspec.structs.replace(call, in_function=False, in_loop=looped, branch=branch, under=under)
