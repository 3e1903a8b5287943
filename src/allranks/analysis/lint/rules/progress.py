"""Rules for commands that keep a script from its work, and for ranks and GPUs that all nodes or programs share."""

from __future__ import annotations

import re
from collections.abc import Iterator

from allranks.analysis.lint.job import JobDescription
from allranks.analysis.lint.records import Violation

# ------------------------------------------------------------------------- commands before the work


def asks_more(job: JobDescription) -> Iterator[Violation]:
    """Report a question of accelerate, or of the script itself, in a batch job."""
    if not job.is_job:
        return
    for call in job.calls:
        words = [a.text for a in call.args]
        if (
            call.in_substitution
            or call.before in ("|", "|&")
            or call.in_function
            or any(r.operator.startswith("<") for r in call.redirects)
        ):
            continue
        if call.program == "accelerate-other" and "config" in job.line_of(call.offset).split() and not words:
            yield Violation(
                call.offset,
                "accelerate config asks its questions at the terminal",
                cure="accelerate config default, or --config_file",
            )
        elif (
            call.program == "read"
            and any(re.fullmatch(r"-\w*p\w*", w) for w in words)
            and not call.tested
            and not call.under
        ):
            yield Violation(
                call.offset, "read -p waits for an answer, and gets an empty one", cure="an argument of the script"
            )
