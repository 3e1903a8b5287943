"""Rules for commands of the shell itself that are started as programs, and for what a loop or a script does not get."""

from __future__ import annotations

import re
from collections.abc import Iterator

from allranks.analysis.lint.command_options import REMOTE_SHELLS, SHELLS
from allranks.analysis.lint.job import JobDescription
from allranks.analysis.lint.records import ProgramCall, Violation
from allranks.analysis.lint.rules.lost import sets_up

BUILTIN_WHY = "It is a command of the shell itself, or a function: started as a program it is not found, or changes only its own process."
BUILTIN_CURE = "run it in the script itself, or in the same bash -c as the program that needs it"
INPUT_WHY = "The command in the loop reads the rest of the list as its own input: the loop ends after its first run."
ALIAS_WHY = "bash expands aliases only at a terminal: in a script the name is not found, or is another program."

BUILTINS = {"source", ".", "cd", "export", "module", "ml", "unset", "ulimit", "alias"}
STARTERS = {"srun", "mpirun", "mpiexec", "timeout", "env"}
ENDS_SUBSTITUTION = re.compile(r"[^;&|\n()`]*[)`]")
PIPED_READ = re.compile(r"\|[ \t]*while\b[^\n]{0,80}\bread\b")
MOST = 2000  # characters of a loop
READ_LOOP = re.compile(r"(?m)(?:^|[;|])[ \t]*while\b[^\n]*?\bread\b(?![^\n]*(?:-u|<&|<<<))[^\n]*")


def elsewhere(job: JobDescription) -> Iterator[Violation]:
    """Report ``srun source``, ``sudo cd``, ``$(module load ...)``, ``bash -c "module load ..."`` and exports in a piped loop."""
    own = [c.offset for c in job.calls if not c.under and not c.in_substitution]
    for call in job.calls:
        later = any(place > call.offset for place in own)
        activates = call.program in ("conda", "mamba") and [a.text for a in call.args[:1]] == ["activate"]
        if not later or call.in_function:
            continue
        if call.under and (call.program in BUILTINS or activates) and all(c.program in STARTERS for c in call.under):
            starter = call.under[-1].program
            yield Violation(
                call.offset,
                f"{starter} starts programs, and {call.program} is none",
                why=BUILTIN_WHY,
                cure=BUILTIN_CURE,
            )
        elif call.program == "sudo" and call.args and call.args[0].text in BUILTINS - {"module", "ml"}:
            yield Violation(
                call.offset,
                f"sudo starts programs, and {call.args[0].text} is none",
                why=BUILTIN_WHY,
                cure=BUILTIN_CURE,
            )
        elif call.in_substitution and not call.under and call.program != "cd" and sets_up(call):
            if ENDS_SUBSTITUTION.match(job.text, call.offset):
                text = f"$( ) runs '{sets_up(call)}' in a shell of its own: the script goes on without it"
                yield Violation(call.offset, text)
        elif _alone_in_shell(job, call):
            yield Violation(
                call.offset, f"'{sets_up(call)}' is all that this shell does: the script goes on without it"
            )
    for found in PIPED_READ.finditer(job.text) if job.kind == "script" else ():
        body = re.split(r"\bdone\b", job.text[found.end() : found.end() + MOST], maxsplit=1)
        export = re.search(r"\bexport\b", body[0]) if len(body) > 1 else None
        if export is None or "zsh" in job.lines.line(1):
            continue
        place = found.end() + export.start()
        inside = any(found.start() < c.offset < found.end() + len(body[0]) for c in job.work_calls)
        if not inside and not job.in_comment(place):
            text = "export in a loop behind a pipe: the script does not get the variables"
            yield Violation(place, text, cure="while read ...; do ...; done < file; or set -a; source file; set +a")


def _alone_in_shell(job: JobDescription, call: ProgramCall) -> bool:
    """Return whether a command that sets up its shell is the last one of ``bash -c``."""
    if len(call.under) != 1 or call.under[0].program not in SHELLS or not sets_up(call) or call.in_substitution:
        return False
    if not any(a.text == "-c" for a in call.under[0].args) or call.program in ("conda", "mamba"):
        return False  # `programs.conda_in_shell`
    return not any(c.offset > call.offset and call.under[0] in c.under for c in job.calls)


def reads_the_list(job: JobDescription) -> Iterator[Violation]:
    """Report ssh and srun in ``while read``, which take the rest of the list as their input."""
    for found in READ_LOOP.finditer(job.text):
        end = re.search(r"(?m)^[ \t]*done\b|;[ \t]*done\b", job.text[found.start() : found.start() + MOST])
        if end is None or job.in_comment(found.end() - 1):
            continue
        for call in job.calls:
            if not found.start() < call.offset < found.start() + end.start() or call.program not in REMOTE_SHELLS | {
                "srun"
            }:
                continue
            words = [a.text for a in call.args]
            given = any(r.operator.startswith("<") for r in call.redirects) or any(
                re.match(r"-\w*n\w*\Z|-f\Z", w) for w in words[:3]
            )
            none = any(re.match(r"--input|-i\Z|--stdin", w) for w in words)
            if call.program == "srun":
                given = any(r.operator.startswith("<") for r in call.redirects)
            if (
                call.under
                or call.in_substitution
                or given
                or none
                or call.after in ("&", "|")
                or call.before == "|"
                or not call.in_loop
            ):
                continue
            cure = "ssh -n ..." if call.program != "srun" else "srun --input=none ..., or < /dev/null"
            text = f"{call.program} in this loop reads the rest of the list: the loop ends after its first run"
            yield Violation(call.offset, text, why=INPUT_WHY, cure=cure)
            break


def aliases(job: JobDescription) -> Iterator[Violation]:
    """Report the use of an alias in a script of bash."""
    if "expand_aliases" in job.text or not re.match(r"#!\S*(?:/|env\s+)bash\b(?!.*\s-\w*i)", job.lines.line(1)):
        return
    for found in re.finditer(r"(?m)^[ \t]*alias[ \t]+([\w.-]+)=", job.text):
        name = found[1]
        used = next((c for c in job.calls if c.written == name and c.offset > found.end() and not c.under), None)
        defined = re.search(rf"(?m)^[ \t]*(?:function[ \t]+)?{re.escape(name)}[ \t]*\(\)", job.text)
        if used is not None and not defined and not job.in_comment(found.start(1)):
            text = f"{name} is an alias, which a script does not expand"
            yield Violation(used.offset, text, why=ALIAS_WHY, cure=f'{name}() {{ ... "$@"; }}')
            return
