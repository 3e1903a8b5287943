"""Rules for ``docker run``: folders inside of the container, and containers that nothing ends."""

from __future__ import annotations

import re
from collections.abc import Iterator

from allranks.analysis.lint.job import JobDescription
from allranks.analysis.lint.records import Argument, ProgramCall, Violation
from allranks.utils.text import lazy_regex

DOCKER = {"docker", "nvidia-docker", "podman", "nerdctl"}
ENGINES = {*DOCKER, "podman-hpc"}
DOCKER_FLAG = lazy_regex(
    r"-[ditPq]+|--(?:detach|interactive|tty|publish-all|quiet|rm|init|privileged|read-only|no-healthcheck|oom-kill-disable|replace|sig-proxy)(?:=\w+)?"
)
"""Options of ``docker run`` that take no value in a word of its own."""


def options_of_run(call: ProgramCall) -> tuple[list[tuple[str, str, Argument]], list[str]]:
    """Return the options of ``docker run`` with their values, and the words from the image on."""
    args = list(call.args)
    if call.program in ("sudo", "srun"):  # `sudo docker run image` is one call of sudo
        index = next((i for i, a in enumerate(args) if a.text in ENGINES), len(args))
        args = args[index + 1 :]
    elif call.program not in ENGINES:
        return [], []
    if args and args[0].text == "container":
        args = args[1:]
    if not args or args[0].text not in ("run", "create"):
        return [], []
    found: list[tuple[str, str, Argument]] = []
    i = 1
    while i < len(args) and args[i].text.startswith("-"):
        word = args[i].text
        name, equals, value = word.partition("=")
        if DOCKER_FLAG.fullmatch(word):
            found.append((word, "", args[i]))
        elif equals and word.startswith("--"):
            found.append((name, value, args[i]))
        elif not word.startswith("--") and len(word) > 2:
            found.append((word[:2], word[2:], args[i]))
        elif i + 1 < len(args):
            i += 1
            found.append((word, args[i].text, args[i]))
        i += 1
    return found, [a.text for a in args[i:]]


SOURCE = "docker run reference"

# ------------------------------------------------------------------------------ folders in the container

RELATIVE_WHY = "A folder in the container needs its full path: docker stops with 'mount path must be absolute', and starts nothing."
RELATIVE = lazy_regex(r"(?:\.{1,2}|~|[\w-][\w.-]*)(?:/[^:]*)?")
ONE_NAME = lazy_regex(r"\$(?:(\w+)|\{(\w+)\})(?:/[^:]*)?")
MODES = lazy_regex(
    r"(?:ro|rw|z|Z|U|delegated|cached|consistent|nocopy|r?(?:shared|slave|private)|idmap|exec|noexec|,)+"
)


def relative_folder(job: JobDescription) -> Iterator[Violation]:
    """Report ``docker run -v ./out:./out``."""
    for call in job.calls if job.kind == "script" else ():
        for name, value, arg in options_of_run(call)[0]:
            parts = value.split(":")
            if name not in ("-v", "--volume") or len(parts) < 2 or "\\" in value or MODES.fullmatch(parts[1]):
                continue
            default = _default(job, parts[1])
            if RELATIVE.fullmatch(parts[1]):
                text = f"{parts[1]} in {value} is no full path of the container"
            elif default and RELATIVE.fullmatch(default):
                text = f"{parts[1]} is {default} by default, which is no full path of the container"
            else:
                continue
            place = min(arg.offset, arg.source.where(0))  # an item of a list stands further up
            severity = "warning" if default else None
            yield Violation(place, text, why=RELATIVE_WHY, cure="-v $PWD/out:/out", severity=severity, source=SOURCE)
            break


def _default(job: JobDescription, value: str) -> str | None:
    """Return the default that the script gives the variable that a path begins with."""
    name = ONE_NAME.fullmatch(value)
    if name is None:
        return None
    given = re.search(rf"\$\{{{name[1] or name[2]}:?[-=]([^{{}}\"'$]+)\}}", job.code)
    return given[1] if given else None


# ------------------------------------------------------------------------------ containers that run on

ENDLESS = lazy_regex(r"\bsleep\s+(?:inf|infinity|\d{5,}|\d+d)\b|\btail\s+-[fF]\s+/dev/null\b")
ENDS = lazy_regex(
    r"(?<![\w-])(?:stop|kill|trap|cleanup\w*|docker[ \t]+(?:container[ \t]+)?(?:rm|restart)|podman[ \t]+rm)\b"
    r"|\brm[ \t]+(?:-f[ \t]+)?[\"']?\$\{?\w*(?i:cont|docker|name|id)"
)
LEFT_WHY = "docker's service runs the container, not the job: it keeps its memory and GPUs, and the next run of this name is refused."
LEFT_CURE = "trap 'docker rm -f NAME' EXIT, behind docker run"


def left_running(job: JobDescription) -> Iterator[Violation]:
    """Report a detached container of a job whose program never ends, and that nothing stops."""
    if not job.is_job or ENDS.search(job.code):
        return
    for call in job.calls:
        options, rest = options_of_run(call)
        detached = any(re.fullmatch(r"-\w*d\w*|--detach(?:=true)?", name) and not value for name, value, _ in options)
        if detached and ENDLESS.search(" ".join(rest)) and not call.in_substitution and not call.in_function:
            text = "the container of docker run -d never ends by itself, and nothing stops it"
            yield Violation(call.offset, text, why=LEFT_WHY, cure=LEFT_CURE, severity="warning", source=SOURCE)
            return
