"""Rules for programs that need somebody at a terminal: tools that ask for a choice, and sessions of tmux and screen."""

from __future__ import annotations

import re
from collections.abc import Iterator

from allranks.analysis.lint.job import JobDescription
from allranks.analysis.lint.records import ProgramCall, Violation
from allranks.utils.text import lazy_regex

# ------------------------------------------------------------------------------------ tools that ask

GROMACS_WHY = "A batch job has no input: the tool stops with 'Cannot read from input', writes no file, and the next steps use an old one or none."
GROMACS = lazy_regex(r"(?:\S*/)?gmx(?:_\w+)?")
ASKING = {
    "genion",
    "trjconv",
    "rms",
    "rmsf",
    "energy",
    "make_ndx",
    "genrestr",
    "covar",
    "anaeig",
    "cluster",
    "do_dssp",
    "mindist",
}
OLD_NAMES = {f"g_{name}" for name in ASKING} | {"genion", "trjconv", "make_ndx", "genrestr"}
HELP = {"-h", "-version", "--version"}
WRAPPERS = {"srun", "mpirun", "mpiexec", "time", "nohup", "singularity", "apptainer", "env"}


def asks_for_group(job: JobDescription) -> Iterator[Violation]:
    """Report GROMACS tools that ask for a group of atoms, without an answer on their standard input."""
    if not job.runs_unattended:
        return
    for call in job.calls:
        words = [a.text for a in call.args]
        if call.in_substitution or call.in_function or _has_input(job, call):
            continue
        if any(c.program not in WRAPPERS for c in call.under):
            continue
        tool = _tool(call, words)
        if tool is None or HELP & set(words) or "-n" in words:
            continue
        if tool == "pdb2gmx":
            if "-ff" in words:
                continue
            yield Violation(
                call.offset, "pdb2gmx without -ff asks for a force field", why=GROMACS_WHY, cure="-ff amber99sb-ildn"
            )
            return
        text = f"{tool} asks for a group, and gets no answer"
        yield Violation(call.offset, text, why=GROMACS_WHY, cure=f"echo <group> | {call.written} ...")
        return


def _tool(call: ProgramCall, words: list[str]) -> str | None:
    if call.program in ("mpirun", "mpiexec"):  # the program is one of its arguments
        start = next((i for i, w in enumerate(words) if GROMACS.fullmatch(w)), None)
        words = words[start + 1 :] if start is not None else []
    elif not GROMACS.fullmatch(call.written):
        words = []
    if words:
        name = next((w for w in words if not w.startswith("-")), "")
        return name if name in ASKING | {"pdb2gmx"} else None
    name = call.written.rpartition("/")[2]
    return name if name in OLD_NAMES else None


def _has_input(job: JobDescription, call: ProgramCall) -> bool:
    """Return whether something writes to the standard input of the command, or of the loop or the block around it."""
    for one in (call, *call.under):
        if one.before in ("|", "|&") or any(r.operator.startswith("<") for r in one.redirects):
            return True
    line = job.line_of(call.offset)
    return "|" in line[: job.lines.place(call.offset)[1]] or (
        (call.in_loop or bool(call.branch))
        and re.search(r"(?m)^[ \t]*(?:done|fi|\})[ \t]*<|\|[ \t]*while\b", job.text) is not None
    )


# ---------------------------------------------------------------------------------- tmux and screen

SESSION_WHY = "A batch job has no terminal: 'open terminal failed: not a terminal', and the program is not started."
SESSION_CURE = "run the program itself; the job is already in the background"
LEFT_WHY = "tmux runs what it is sent in a server of its own, and the job ends with the script: Slurm kills both, or the program runs on outside of the job."


def needs_terminal(job: JobDescription) -> Iterator[Violation]:
    """Report sessions of tmux and screen that a job starts in the foreground."""
    if not job.runs_unattended:
        return
    for call in job.calls:
        words = [a.text for a in call.args]
        if call.in_substitution or call.under or call.before in ("|", "|&"):
            continue
        new = words[:1] in (["new"], ["new-session"], [], ["attach"], ["a"])
        if call.program == "tmux" and new and not any(re.fullmatch(r"-\w*d\w*", w) for w in words):
            yield Violation(
                call.offset,
                f"tmux {' '.join(words[:1])} needs a terminal".replace("  ", " "),
                why=SESSION_WHY,
                cure=SESSION_CURE,
            )
        elif call.program == "screen" and not any(
            re.fullmatch(r"-(?:\w*[dDm]\w*|ls|X|list|wipe|v|Q)", w) for w in words
        ):
            yield Violation(call.offset, "screen needs a terminal", why=SESSION_WHY, cure=SESSION_CURE)


QUIET = {"echo", "printf", "date", "exit", "true", ":"}


def sent_to_session(job: JobDescription) -> Iterator[Violation]:
    """Report a job whose last command sends its work to a detached session of tmux or screen."""
    if not job.is_job:
        return
    own = [c for c in job.calls if not c.under and not c.in_substitution and c.program not in QUIET]
    if not own or job.work:
        return
    words = [a.text for a in own[-1].args]
    sends = (own[-1].program == "tmux" and words[:1] in (["send-keys"], ["send"])) or (
        own[-1].program == "screen" and "stuff" in words
    )
    if sends:
        text = f"{own[-1].program} runs the program in the background, and the script ends"
        yield Violation(own[-1].offset, text, why=LEFT_WHY, cure=SESSION_CURE)
