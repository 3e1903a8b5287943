"""Rules for commands that run elsewhere than meant: terminals that a job lacks, SSH sessions and containers that end too early."""

from __future__ import annotations

import re
from collections.abc import Iterator

from allranks.analysis.lint.command_options import SHELLS, slurm_option, slurm_options
from allranks.analysis.lint.job import JobDescription
from allranks.analysis.lint.records import Argument, ProgramCall, Severity, Violation
from allranks.analysis.lint.rules.rendezvous import CONTAINERS
from allranks.analysis.lint.shell_tokens import UNRESOLVED_CLOSE, UNRESOLVED_OPEN

TERMINAL_WHY = "A batch job has no terminal: docker refuses with 'the input device is not a TTY', and the job ends."
TERMINAL_CURE = "remove -t (and -i, which only keeps standard input open)"
SESSION_WHY = (
    "Without a command ssh opens a login shell, which ends at once because a batch job has no input. "
    "The commands below it run on the first node."
)
SESSION_CURE = 'ssh "$node" "mkdir ...; cp ..."; or srun --ntasks-per-node=1 mkdir ...'
ENDED_WHY = "The container's shell ends with its script, and with it what the script has set. Later commands run on the host, with its Python."
ENDED_CURE = 'put the launch into the same script: bash -c "source env.sh; torchrun ..."'
NO_COMMAND_WHY = "srun starts no task and fails; what was meant to be its command runs once, in the batch script."
NO_COMMAND_CURE = "a backslash at the end of the line, so that the next one is its command"
DOCKER = {"docker", "podman", "nerdctl"}
DOCKER_FLAGS = re.compile(
    r"-[ditPq]+|--(?:detach|interactive|tty|publish-all|quiet|rm|init|privileged|read-only|no-healthcheck|oom-kill-disable|replace)(?:=\w+)?"
)
LONG_FLAGS = {"detach": "d", "interactive": "i", "tty": "t"}
SSH_VALUED = set("bcDEeFIiJLlmOopQRSWw")
NO_SESSION = set("NfOVGQWT")  # of ssh: tunnels, the background, control commands, queries
HOST_NAME = re.compile(r"host|node|server|machine|worker|client|(?:^|_)ip|addr", re.IGNORECASE)
# What a shell script can do that only changes its own shell.
SETTING_UP = {"source", ".", "conda", "mamba", "micromamba", "module", "ml", "cd", "echo", "ulimit", "set", "true", ":"}


def terminal(job: JobDescription) -> Iterator[Violation]:
    """Report ``docker run -it`` in a batch job."""
    if not job.runs_unattended:
        return
    for call in job.calls:
        if any(c.program in ("script", "unbuffer") or _has_terminal(c) for c in call.under):
            continue
        name, flags, arg = _docker_flags(call)
        if arg is None or "t" not in flags or "d" in flags:
            continue
        refused = name == "docker" and "i" in flags
        severity: Severity = "error" if refused else "note"
        yield Violation(arg.offset, f"{name} {arg.text} asks for a terminal", severity=severity)


def _has_terminal(call: ProgramCall) -> bool:
    return call.program == "srun" and any(a.text == "--pty" for a in call.args)


def _docker_flags(call: ProgramCall) -> tuple[str, set[str], Argument | None]:
    """Return the program, the letters of the flags of ``docker run``, and the argument that asks for a terminal."""
    args = list(call.args)
    name = call.program
    if name not in DOCKER:  # `sudo docker run ... image torchrun` is one call of sudo
        index = next((i for i, a in enumerate(args) if a.text in DOCKER), None)
        if index is None or name not in ("sudo", "srun", "nice", "time"):
            return name, set(), None
        name, args = args[index].text, args[index + 1 :]
    if not args or args[0].text not in ("run", "exec", "container"):
        return name, set(), None
    letters: set[str] = set()
    asking: Argument | None = None
    i = 2 if args[0].text == "container" else 1
    while i < len(args) and args[i].text.startswith("-"):
        word = args[i].text
        own: set[str] = set()
        if DOCKER_FLAGS.fullmatch(word):
            name_of_flag = word[2:].partition("=")[0]
            own = {LONG_FLAGS.get(name_of_flag, "")} if word.startswith("--") else set(word[1:])
            i += 1
        else:
            i += 1 if "=" in word or (not word.startswith("--") and len(word) > 2) else 2
        if "t" in own:
            asking = asking or args[i - 1]  # a flag is one word
        letters |= own
    return name, letters, asking


def ssh_session(job: JobDescription) -> Iterator[Violation]:
    """Report ``ssh HOST`` without a command, if commands follow."""
    if not job.runs_unattended:
        return
    for index, call in enumerate(job.calls):
        if call.program != "ssh" or call.in_substitution or call.before in ("|", "|&"):
            continue
        started = any(call in c.under for c in job.calls[index + 1 :])
        if started or any(r.operator.startswith("<") for r in call.redirects) or not _is_bare(job, call):
            continue
        follows = next((c for c in job.calls[index + 1 :] if not c.in_substitution and not c.under), None)
        if follows:
            line = job.lines.place(follows.offset)[0]
            text = f"ssh without a command: '{follows.written}' in line {line} does not run on the other host"
            yield Violation(call.offset, text)


def _is_bare(job: JobDescription, call: ProgramCall) -> bool:
    """Return whether the arguments are options and a host, and no command."""
    hosts: list[Argument] = []
    i = 0
    while i < len(call.args):
        word = call.args[i].text
        if word.startswith("-") and not hosts:
            if set(word[1:2]) & NO_SESSION or "RemoteCommand" in word:
                return False
            i += 2 if len(word) == 2 and word[1] in SSH_VALUED else 1
            continue
        hosts.append(call.args[i])
        i += 1
    if len(hosts) != 1:
        return False
    unknown = re.fullmatch(f"{UNRESOLVED_OPEN}(\\w+)(?:\\[.*\\])?{UNRESOLVED_CLOSE}", hosts[0].source.text)
    if unknown and not hosts[0].quoted:  # $REMOTE may hold a command, too
        return bool(HOST_NAME.search(unknown[1])) or unknown[1] in job.reading.named
    return not re.search(r"\s", hosts[0].text)


def container_ended(job: JobDescription) -> Iterator[Violation]:
    """Report a container whose shell only prepares an environment, with the work after it on the host."""
    for call in job.calls:
        if not _prepares_only(job, call):
            continue
        work = [c for c in job.work_calls if c.offset > call.offset and not c.in_function and not c.in_substitution]
        if not work or any(_in_container(c) for c in job.work_calls) or work[0].written.startswith("/"):
            continue
        outer = call.under[0] if call.under else call
        prepared = any(
            outer.offset < c.offset < work[0].offset and not c.under and c.program in SETTING_UP - {"cd", "echo"}
            for c in job.calls
        )
        own_shell = call.program not in SHELLS  # `singularity shell`: what follows was meant to run in it
        line = job.lines.place(work[0].offset)[0]
        text = f"the container's shell ends here, and {work[0].written} in line {line} runs on the host"
        yield Violation(outer.offset, text, severity="note" if prepared and not own_shell else "warning")
        return


def _in_container(call: ProgramCall) -> bool:
    images = any(
        a.text.startswith(("--container-image", "--image", "--environment")) for c in call.under for a in c.args
    )
    return images or any(c.program in CONTAINERS for c in call.under)


def _prepares_only(job: JobDescription, call: ProgramCall) -> bool:
    if call.in_function or any(r.operator.startswith("<") for r in call.redirects) or call.before in ("|", "|&"):
        return False
    if call.program in ("singularity", "apptainer"):
        words = [a.text for a in call.args if not a.text.startswith("-")]
        return words[:1] == ["shell"] and job.runs_unattended
    if call.program not in SHELLS or not any(c.program in CONTAINERS for c in call.under):
        return False
    inner = [c for c in job.calls if call in c.under]
    return bool(inner) and all(c.program in SETTING_UP for c in inner)


ASKING = {"version", "help", "usage"}


def no_command(job: JobDescription) -> Iterator[Violation]:
    """Report an srun that has options only."""
    for index, call in enumerate(job.calls):
        if call.program != "srun" or call.in_substitution or not job.is_batch or "multi-prog" in slurm_options(call):
            continue
        if any(call in c.under for c in job.calls[index + 1 :]) or call.redirects or call.before in ("|", "|&"):
            continue
        if not call.args or _has_other_words(call) or slurm_options(call).keys() & ASKING:
            continue
        follows = next((c for c in job.calls[index + 1 :] if not c.in_substitution and c.offset > call.offset), None)
        line = job.lines.place(call.args[-1].offset)[0]
        told = f": {follows.written} in the next line runs without it" if follows and _next(job, line, follows) else ""
        yield Violation(call.offset, f"srun has no command{told}")


def _next(job: JobDescription, line: int, call: ProgramCall) -> bool:
    return job.lines.place(call.offset)[0] == line + 1


def _has_other_words(call: ProgramCall) -> bool:
    """Return whether an argument is no option nor its value, or unknown: ``srun $ARGS`` may have a command."""
    i = 0
    while i < len(call.args):
        word = call.args[i].source.text
        if not word.startswith("-"):
            return True
        i += 2 if slurm_option(call.args[i].text)[2] else 1
    return i != len(call.args)
