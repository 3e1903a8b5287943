"""Rules for commands that end processes, containers and jobs: those that also end what belongs to other jobs, or to this one."""

from __future__ import annotations

import re
from collections.abc import Iterator

from allranks.analysis.lint.job import JobDescription
from allranks.analysis.lint.records import ProgramCall, Violation
from allranks.utils.text import lazy_regex

PKILL_WHY = (
    "It also kills processes of your other jobs on a shared node, and those of other users if it has the permission."
)
PKILL_CURE = "remove it; Slurm ends all processes of a job when the job ends"


def pkill(job: JobDescription) -> Iterator[Violation]:
    if job.whole_nodes:
        return
    for call in job.calls:
        words = " ".join(a.text for a in call.args)
        name = "fuser -k" if call.program == "fuser" else "kill"
        kills = call.program in ("kill", "fuser") or (
            call.program == "xargs" and any(a.text == "kill" for a in call.args)
        )
        if kills and (listed := _killed_by_list(job, call)):
            yield Violation(call.offset, f"{name} of all processes that {listed} finds also affects other jobs")
        if call.program in ("pkill", "killall") and re.search(r"python|torchrun|train|ray|accelerate|deepspeed", words):
            yield Violation(call.offset, f"{call.program} {words} also affects other jobs")


LISTED = lazy_regex(
    r"\bnvidia-smi\b[^\n]*(?:pid|grep|awk|\|\s*(?:sed|cut|tail|tr))|\blsof\b[^\n]*/dev/nvidia|\bpgrep\b[^\n]*\b(?:python|torchrun|train|ray|accelerate|deepspeed)|"
    r"\bps[ \t]+-?[aefux]+\b[^\n]*\|[ \t]*grep[^\n]*(?:python|torchrun|deepspeed|accelerate|train)"
)
OF_OWN = lazy_regex(
    r"\$\{?(?:\w*(?:PID|PORT|JOB|DIR|NAME|pid|port|job|dir|name)\w*|\$|[1!]|\{1)|ppid|pgrp|-P\b|-s\b|--id|-i[ =]|index"
)


def _killed_by_list(job: JobDescription, call: ProgramCall) -> str:
    """Return the command that lists the processes of a GPU or of Python, all of which are killed."""
    line = job.line_of(call.offset)
    if call.program == "fuser":
        told = any(re.match(r"-\w*k|--kill", a.text) for a in call.args)
        return "fuser" if told and any(re.match(r"/dev/nvidia(?:\*|\d|\Z)", a.text) for a in call.args) else ""
    texts = [a.text for a in call.args if a.text.startswith(("$(", "`"))] or [line]
    for arg in call.args if call.in_loop else ():
        name = re.fullmatch(r"\$\{?(\w+)\}?", arg.text)
        loop = (
            rf"(?m)^[^\n#]*(?:\bfor[ \t]+{name[1]}[ \t]+in\b|\bread[ \t]+(?:-r[ \t]+)?{name[1]}\b)[^\n]*"
            if name
            else ""
        )
        texts += [m[0] for m in re.finditer(loop, job.code[: call.offset])][-1:] if loop else []
    for text in texts:
        found = LISTED.search(text)
        if found and not OF_OWN.search(text):
            return found[0].split()[0]
    return ""


# ----------------------------------------------------------------------------------- users and containers

USER_WHY = "All processes of the user end, and the shell of this script is one of them: what follows never runs, and the job fails."
CONTAINERS_WHY = "docker lists the containers of everybody on the node: those of other jobs end too."
OWN_USER = lazy_regex(r"\$\{?(?:USER|LOGNAME|UID|EUID)\}?|\$\((?:whoami|id -un?|logname)\)|`(?:whoami|id -un?)`")
OF_OWN_USER = lazy_regex(r"(?:-u|-U|--user|--uid|--euid)[ =]?@")
CONTAINER_LIST = lazy_regex(r"(?:\$\(|`)\s*(?:sudo\s+)?(?:docker|podman)\s+(?:container\s+)?(?:ps|ls)\b([^)`]*)")


def of_user(job: JobDescription) -> Iterator[Violation]:
    """Report ``pkill -u $USER`` and ``docker kill $(docker ps -q)`` in a job."""
    if not job.runs_unattended:
        return
    for call in job.calls:
        words = [a.text for a in call.args]
        if call.in_substitution or call.under:
            continue
        if call.program in ("pkill", "killall") and _is_whole_user(words):
            text = f"{call.program} {' '.join(words)} also ends the shell that runs this script"
            yield Violation(call.offset, text, why=USER_WHY)
        elif call.program == "kill" and words[-1:] == ["-1"] and len(words) > 1:
            yield Violation(call.offset, "kill of process -1 ends all processes of the user", why=USER_WHY)
        elif call.program in ("docker", "podman") and set(words[:2]) & {"kill", "stop", "rm"} and not job.whole_nodes:
            listed = CONTAINER_LIST.search(job.line_of(call.offset))
            if listed and not re.search(r"-f\b|--filter|grep|--latest|-\w*l\b|-n\b", listed[1]):
                text = f"{call.program} {words[0]} of all containers on the node also ends those of other jobs"
                yield Violation(call.offset, text, why=CONTAINERS_WHY, cure="docker run --name job-$SLURM_JOB_ID, and that name here")  # fmt: skip


def _is_whole_user(words: list[str]) -> bool:
    """Return whether the options name the user, and nothing names a program."""
    joined = " ".join(words)
    found = OF_OWN_USER.search(joined := OWN_USER.sub("@", joined))
    return found is not None and not re.search(r"(?:^|\s)(?!-)\S", joined.replace(found[0], ""))


# -------------------------------------------------------------------------------------------- scancel

CANCEL_WHY = "Without a job's number scancel ends all jobs that the options describe, and this one is among them: what follows never runs."
CANCEL_CURE = "scancel <job id>; processes of this job end with it"
NARROW = {
    "-n", "--name", "--jobname", "-t", "--state", "-p", "--partition", "-A", "--account", "-q", "--qos", "-R", "--reservation", "-s",
    "--signal", "--wckey", "-i",
}  # fmt: skip
QUEUE = lazy_regex(r"\bsqueue\b([^|)`\n]*)")


def cancels_jobs(job: JobDescription) -> Iterator[Violation]:
    """Report a job that cancels all jobs of its user, or of its node."""
    if not job.runs_unattended:
        return
    for call in job.calls:
        if call.in_substitution or call.program not in ("scancel", "xargs"):
            continue
        words = [a.text for a in call.args]
        if call.program == "xargs":
            if "scancel" in words and not words[words.index("scancel") + 1 :] and (text := _from_queue(job, call)):
                yield Violation(call.offset, text, why=CANCEL_WHY, cure=CANCEL_CURE)
            continue
        names = {w.partition("=")[0] for w in words if w.startswith("-")}
        pairs = zip(["", *words], words, strict=False)
        numbers = [w for before, w in pairs if not w.startswith("-") and not before.startswith("-")]
        by_user, by_node = names & {"-u", "--user", "--me"}, names & {"-w", "--nodelist"}
        if (by_user or by_node) and not numbers and not names & NARROW:
            which = "its user" if by_user else "its node"
            own = "also ends this one, and all others" if by_user else "also ends this one, and the user's others there"
            yield Violation(call.offset, f"scancel of the jobs of {which} {own}", why=CANCEL_WHY, cure=CANCEL_CURE)
        elif any("squeue" in w for w in words) and (text := _from_queue(job, call)):
            yield Violation(call.offset, text, why=CANCEL_WHY, cure=CANCEL_CURE)


def _from_queue(job: JobDescription, call: ProgramCall) -> str:
    """Return the finding if all jobs that squeue lists are cancelled: nothing but the user is asked for."""
    line = job.line_of(call.offset)
    found = QUEUE.search(line)
    if found is None or re.search(r"\bgrep\b|\bhead\b|\btail\b|/\w+/|-v\b|==|!=", line):
        return ""
    options = {w.partition("=")[0] for w in found[1].split() if w.startswith("-")}
    return "" if options & NARROW - {"-i"} else "scancel of all jobs that squeue lists also ends this one"
