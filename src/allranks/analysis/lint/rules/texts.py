"""Rules for texts that name something which is not there: interpreters, variables of Slurm, tokens, arrays that nothing reads."""

from __future__ import annotations

import re
from collections.abc import Iterator

from allranks.analysis.lint.job import PLACEHOLDER, JobDescription
from allranks.analysis.lint.records import ProgramCall, Violation
from allranks.analysis.lint.rules.dataflow import MORE_READ
from allranks.utils.redaction import holds_secret

# ------------------------------------------------------------------------------------------- tokens

WEBHOOK = re.compile(
    r"https://(?:hooks\.slack\.com/services/T\w{5,}/B\w{5,}/\w{16,}|discord(?:app)?\.com/api/webhooks/\d{10,}/[\w-]{30,})"
)
SERVICE_KEY = re.compile(
    r"(?:KAGGLE|COMET|CLEARML|NEPTUNE|WANDB|POLYAXON|SWANLAB|LANGCHAIN|SERPAPI)_(?:API_)?(?:KEY|TOKEN)"
)
HOOK_CURE = "make a new address; read it from a file that only you can read"


def more_secrets(job: JobDescription) -> Iterator[Violation]:
    """Report addresses that let everybody post, keys of services, and tokens in an --export of srun."""
    for found in WEBHOOK.finditer(job.text) if "https://" in job.text else ():
        if not PLACEHOLDER.search(found[0]) and len(set(found[0][-16:].lower())) > 5:
            yield Violation(found.start(), "the address of a webhook holds its token in clear text", cure=HOOK_CURE)
    for item in job.assignments:
        if (
            SERVICE_KEY.fullmatch(item.name)
            and re.fullmatch(r"[0-9a-f]{32}|[A-Za-z0-9]{25}", item.value)
            and _is_mixed(item.value)
        ):
            if not holds_secret(item.name, item.value):
                yield Violation(item.offset, f"{item.name} contains a token in clear text")
    for call in job.calls:
        for place, name, value in _passed(call):
            if (
                len(value) >= 16
                and "$" not in value
                and holds_secret(name, value)
                and _is_mixed(value)
                and not PLACEHOLDER.search(value)
            ):
                yield Violation(place, f"the arguments of {call.program} contain a token in clear text")


def _is_mixed(value: str) -> bool:
    return any(c.isdigit() for c in value) and any(c.isalpha() for c in value) and len(set(value.lower())) > 7


def _passed(call: ProgramCall) -> Iterator[tuple[int, str, str]]:
    """Yield the variables that srun and sbatch pass on with --export."""
    if call.program not in ("srun", "sbatch"):
        return
    for arg, following in call.pairs():
        name, equals, value = arg.text.partition("=")
        text = value if equals else following.text if following else ""
        for part in text.split(",") if name == "--export" else ():
            key, sign, secret = part.partition("=")
            if sign:
                yield arg.offset, key, secret


# -------------------------------------------------------------------------- values in single quotes

PLACE_NAME = re.compile(r"(?:\w+_(?:DIR|HOME|CACHE|PATH|ROOT|FOLDER)|PATH|LD_LIBRARY_PATH|PYTHONPATH)\Z")
LITERAL = re.compile(r"\$(?:\{([A-Z_][A-Z0-9_]*)\}|([A-Z_][A-Z0-9_]*))")
QUOTED_WHY = "Between single quotes $ is an ordinary character: programs get the name of the variable, and use a folder of this name."


def quoted_setting(job: JobDescription) -> Iterator[Violation]:
    """Report an exported setting whose value has a variable in single quotes."""
    for item in job.assignments:
        literal = (
            LITERAL.search(item.source.text) if item.exported and not item.removed and item.items is None else None
        )
        if literal is None or not (PLACE_NAME.match(item.name) or MORE_READ.match(item.name)) or item.under:
            continue
        written = job.text[item.offset + len(item.name) : item.offset + len(item.name) + 300].split("\n")[0]
        if re.match(r"='[^'\n]*\$[^'\n]*'[ \t]*(?:$|[#;])", written) and not re.search(
            rf"\beval\b.*{item.name}", job.text
        ):
            name = literal[1] or literal[2]
            yield Violation(item.offset, f"${name} is not expanded here: {item.name} gets the name", why=QUOTED_WHY,
                            cure=f'{item.name}="..." with double quotes')  # fmt: skip
