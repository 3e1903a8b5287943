"""Batch scripts that a script writes or passes on: here-documents that sbatch or a file gets."""

from __future__ import annotations

from collections.abc import Iterator

from allranks.analysis.lint.command_options import srun_end
from allranks.analysis.lint.readers import ShellReader
from allranks.analysis.lint.records import Argument
from allranks.analysis.lint.shell_tokens import MappedText
from allranks.utils.text import lazy_regex

HEAD = lazy_regex(r"\s*#!\s*/\S*(?:\s+-?\w*)?\b(?:ba|z|k)?sh\b|\s*#SBATCH\s")
REQUEST = lazy_regex(r"(?m)^#(?:SBATCH|PBS)\s+-")
CHANGING = ("sed", "perl", "envsubst", "awk", "python", "python3")
OF_SUBMISSION = lazy_regex(r"-(?:d|-dependency|-parsable|W|-wait|H|-hold|J|-job-name|o|-output|e|-error)(?:\b|=|$).*")


def generated_jobs(reading: ShellReader) -> Iterator[MappedText]:
    """Yield batch scripts that a script passes to sbatch or writes to files, unless a command line may request more."""
    for script, call in zip(reading.submitted, reading.submitting, strict=True):
        if not _requests(call.args[: srun_end(call.args)]):
            yield script
    calls = [c for c in reading.calls if c.program == "sbatch"]
    if any(_requests(c.args[: srun_end(c.args)]) for c in calls):
        return
    extended = {r.target for c in reading.calls for r in c.redirects if r.operator == ">>"}
    changed = {a.text for c in reading.calls if c.program in CHANGING for a in c.args}
    for name, text in reading.files.items():
        if name not in extended | changed and HEAD.match(text.text) and REQUEST.search(text.text):
            yield text


def _requests(options: tuple[Argument, ...]) -> bool:
    """Return whether an option of sbatch may request something."""
    return any(a.text.startswith(("-", "$")) and not OF_SUBMISSION.fullmatch(a.text) for a in options)
