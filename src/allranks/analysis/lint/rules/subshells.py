"""Rules for what subshells, pipes and redirections lose, and for commands of the shell that are started as programs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise

from allranks.analysis.lint.command_options import PYTHON, REMOTE_SHELLS, SHELLS
from allranks.analysis.lint.job import JobDescription
from allranks.analysis.lint.records import Assignment, ProgramCall, VariableUse, Violation
from allranks.analysis.lint.rules.conditions import DEFINES
from allranks.analysis.lint.rules.dataflow import HARMLESS
from allranks.analysis.lint.rules.exit_codes import shell_flags
from allranks.analysis.lint.rules.tasks import sources_settings
from allranks.analysis.lint.shell_tokens import MappedText
from allranks.utils.text import lazy_regex

# ------------------------------------------------------------------------------ subshells and pipes

LOST_WHY = (
    "The parts of a pipe, ( ... ) and commands in the background run in shells of their own: what they set, load, activate or change is gone "
    "when they end."
)
LOST_CURE = "run it in the script's own shell: { ...; } instead of ( ... ), and no pipe or & behind it"
READ_CURE = 'read A B <<< "$(command)", or done < <(command) behind the loop'
EXIT_WHY = "exit ends only the shell of ( ... ); without set -e the script goes on after the error."
EXIT_CURE = "command || { echo message; exit 1; }"
SETS_UP = lazy_regex(r"(?:\bactivate|\.?bashrc|(?<![\w-])profile|conda\.sh|mamba\.sh|setvars\.sh|modules?\.sh)\Z")
OWN_LAST_PART = lazy_regex(r"#!\S*(?:zsh|ksh)|#!\s*/usr/bin/env\s+(?:zsh|ksh)")
COUNTED = lazy_regex(r"(?:\(\(|let[ \t]+)[ \t]*([A-Za-z_]\w*)(?:\+\+|--|[-+*/]=)")
PARTS = ("|", "|&")


def keeps_last_part(job: JobDescription) -> bool:
    """Return whether the last part of a pipe runs in the script's own shell."""
    return bool(OWN_LAST_PART.match(job.lines.line(1))) or "lastpipe" in job.code


def lost(job: JobDescription) -> Iterator[Violation]:
    """Report activations, modules, folders and variables that end with the shell in which they are set."""
    own = [c for c in job.calls if not c.under and not c.in_substitution]
    for call in own:
        what = sets_up(call)
        if not what or not any(c.offset > call.offset and c.subshell is None for c in own):
            continue
        if call.after == "&":
            yield Violation(call.offset, f"& runs '{what}' in a shell of its own: the script goes on without it")
        elif call.after in PARTS or (call.before in PARTS and not _in_group(job, call) and not keeps_last_part(job)):
            yield Violation(call.offset, f"the pipe runs '{what}' in a shell of its own: the script goes on without it")
        elif call.subshell is not None and job.source.text[call.subshell : call.subshell + 1] == "(":
            if _is_last(job, call) and not call.in_function:
                text = f"'{what}' is the last command in ( ... ): the script goes on without it"
                yield Violation(call.offset, text)
    yield from _lost_values(job)


def sets_up(call: ProgramCall) -> str | None:
    """Return the command if it is only there to change its own shell."""
    words = [a.text for a in call.args]
    first = words[0] if words else ""
    if call.tested or call.program not in ("conda", "mamba", "micromamba", "source", ".", "module", "ml", "cd"):
        return None
    changes = {
        "conda": first == "activate",
        "mamba": first == "activate",
        "micromamba": first == "activate",
        "module": first in ("load", "add", "use", "swap", "restore"),
        "source": SETS_UP.search(first) is not None,
        ".": SETS_UP.search(first) is not None,
        "cd": call.after not in ("&&", "||") and call.before not in PARTS and bool(first),
    }.get(call.program, False)
    return " ".join([call.program, *words])[:60] if changes else None


def _in_group(job: JobDescription, call: ProgramCall) -> bool:
    """Return whether the command is the first in a group behind a pipe, ``| { read a; ...; }``."""
    return re.search(r"[{(]\s*\Z", job.text[max(0, call.offset - 40) : call.offset]) is not None


def _is_last(job: JobDescription, call: ProgramCall) -> bool:
    """Return whether nothing follows in the same ( ... ); for cd, whose result may be tested, its end must be that of the line."""
    if call.after not in (")", "\n", ";"):
        return False
    if any(i.subshell == call.subshell and i.offset > call.offset for i in (*job.calls, *job.assignments)):
        return False
    rest = re.match(r"[^()]*\)([^\n]*)", job.text[call.offset :])
    return rest is not None and (call.program != "cd" or re.fullmatch(r"[ \t]*(?:#.*|;[ \t]*)?", rest[1]) is not None)


def _lost_values(job: JobDescription) -> Iterator[Violation]:
    """Report variables that a piped loop, ( ... ) or ``| read`` sets, and that are used behind it."""
    said: set[str] = set()
    piped = not keeps_last_part(job)
    for call in job.calls if piped else ():
        if call.program not in ("read", "mapfile", "readarray") or call.before not in PARTS or call.under:
            continue
        if call.tested or call.in_substitution or call.in_function or call.after in PARTS or _in_group(job, call):
            continue
        names = [a.text for a in call.args if re.fullmatch(r"[A-Za-z_]\w*", a.text)] or ["REPLY"]
        for name in names:
            used = any(u.name == name and u.offset > call.offset for u in job.uses)
            if used and not job.has(name) and name not in said:
                said.add(name)
                text = f"{call.program} behind a pipe sets {name} in a shell of its own: ${name} is empty below"
                yield Violation(call.offset, text, cure=READ_CURE)
    counted = [
        Assignment(found[1], MappedText(""), c.offset, subshell=c.subshell)
        for c in job.calls
        if c.subshell is not None and not c.under and (found := COUNTED.match(job.text, c.offset))
    ]
    for item in [*job.assignments, *counted]:
        if item.subshell is None or item.removed or item.under or item.in_substitution or item.name in said:
            continue
        loop = job.source.text[item.subshell : item.subshell + 1] != "("
        counts = item in counted
        if item.in_function or (loop and not piped) or not _is_needed(job, item, counts):
            continue
        said.add(item.name)
        where = "in a loop behind a pipe" if loop else "in ( ... )"
        cure = READ_CURE if loop else None
        yield Violation(item.offset, f"{item.name} is set {where}: ${item.name} below has its old value", cure=cure)


def _is_needed(job: JobDescription, item: Assignment, counts: bool) -> bool:
    """Return whether the variable is used behind its subshell, and no other value reaches that use."""
    others = [a for a in job.by_name.get(item.name, []) if a.subshell != item.subshell]
    if others and re.match(
        rf"=[\"']?\$(?:{item.name}\b|\{{{item.name}\}})[\"']?\s", job.text[item.offset + len(item.name) :]
    ):
        return False  # NAME=$NAME keeps the value
    if any(a.offset > item.offset or a.under for a in others) or (item.name in job.reading.named and not counts):
        return False
    use = next((u for u in job.uses if u.name == item.name and _is_behind(job, u, item)), None)
    if use is None or use.operator or use.in_function:
        return False
    return use.program not in HARMLESS - {"[", "[[", "echo", "printf"}


def _is_behind(job: JobDescription, use: VariableUse, item: Assignment) -> bool:
    """Return whether the command that contains the use is one of the script's own shell, below the subshell."""
    outer = (i for i in (*job.calls, *job.assignments) if not i.under and not i.in_substitution)
    last = max((i for i in outer if i.offset <= use.offset), key=lambda i: i.offset, default=None)
    return last is not None and last.subshell is None and last.offset > item.offset


MESSAGES = {"echo", "printf", "exit", "date", "logger", ">&2"}


def exit_inside(job: JobDescription) -> Iterator[Violation]:
    """Report ``command || (echo message; exit 1)``, which does not end the script."""
    if shell_flags(job)[0]:
        return
    for call in job.calls:
        place = call.subshell
        if call.program != "exit" or place is None or call.under or call.in_substitution or call.in_function:
            continue
        if job.source.text[place : place + 1] != "(" or call.after != ")":
            continue
        inside = [c.program for c in job.calls if c.subshell == place]
        above = job.text[max(0, place - 40) : place]
        behind = re.search(r"(?:\|\||&&)\s*(?:\\\n\s*)?\Z", above) or (
            call.branch and re.search(r"(?:\n|;|\bthen)[ \t]*\Z", above)
        )
        rest = re.match(r"[^()\n]*\)[ \t]*(?:\\\n[ \t]*)?(\S*)", job.text[call.offset :])
        if behind and set(inside) <= MESSAGES and rest and rest[1][:2] in ("", "#", ";") and rest[1] != "&":
            if any(c.offset > call.offset and c.subshell is None and not c.in_function for c in job.calls):
                yield Violation(call.offset, "exit in ( ... ) does not end the script", why=EXIT_WHY, cure=EXIT_CURE)


# ---------------------------------------------------------------------------- commands of the shell

BUILTIN_WHY = "It is a command of the shell itself, or a function: started as a program it is not found, or changes only its own process."
BUILTIN_CURE = "run it in the script itself, or in the same bash -c as the program that needs it"
INPUT_WHY = "The command in the loop reads the rest of the list as its own input: the loop ends after its first run."
ALIAS_WHY = "bash expands aliases only at a terminal: in a script the name is not found, or is another program."
BUILTINS = {"source", ".", "cd", "export", "module", "ml", "unset", "ulimit", "alias"}
STARTERS = {"srun", "mpirun", "mpiexec", "timeout", "env"}
ENDS_SUBSTITUTION = lazy_regex(r"[^;&|\n()`]*[)`]")
PIPED_READ = lazy_regex(r"\|[ \t]*while\b[^\n]{0,80}\bread\b")
MOST = 2000  # characters of a loop
READ_LOOP = lazy_regex(r"(?m)(?:^|[;|])[ \t]*while\b[^\n]*?\bread\b(?![^\n]*(?:-u|<&|<<<))[^\n]*")


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
            words = " ".join([call.program, *(a.text for a in call.args)])[:60]
            yield Violation(call.offset, f"'{words}' is all that this shell does: the script goes on without it")
        elif call.program == "ssh" and (prepared := _prepared_elsewhere(job, call)):
            text = f"'{prepared}' is all that ssh does there: what follows runs here, without it"
            yield Violation(call.offset, text)
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


PREPARES = lazy_regex(
    r"(?:cd[ \t]+\S+|(?:source|\.)[ \t]+\S*(?:activate|env\w*\.sh|setup\w*\.sh|bashrc|profile|conda\.sh)(?:[ \t]+\S+)?|"
    r"(?:module|ml)[ \t]+(?:load|add|use|purge)\b[^;&|]*|conda[ \t]+activate\b[^;&|]*|export[ \t]+\w+=\S*)\Z"
)


def _prepared_elsewhere(job: JobDescription, call: ProgramCall) -> str | None:
    """Return the command of ssh, if it only sets up the shell that ends with it."""
    if call.under or call.tested or call.after in ("||", "|", "|&") or call.before in ("|", "||") or call.redirects:
        return None
    words = [a.text for a in call.args]
    if written := _written_setup(job, words):
        return written
    names = ("cd", "source", ".", "module", "ml", "conda", "export")
    first = next((n for n, w in enumerate(words) if n and (w in names or PREPARES.match(w))), None)
    if first is None or words[first - 1] in ("-w", "-c", "-o", "-i", "-p", "-l", "--"):
        return None
    text = " ".join(words[first:]).strip().rstrip(";").strip()
    return text[:60] if PREPARES.match(text) and "bash" not in words and "sh" not in words else None


def _written_setup(job: JobDescription, words: list[str]) -> str | None:
    """Return ``bash setup.sh``, if this script writes the file, and it only sets up the shell that reads it."""
    found = re.search(r"(?:^| )((?:bash|sh) +(?:\S*/)?([\w.-]+\.sh))\Z", " ".join(words[1:]))
    files = {target.rpartition("/")[2]: source.text for target, source in job.reading.files.items()}
    if found is None or found[2] not in files:
        return None
    lines = [line.strip() for line in files[found[2]].splitlines()]
    lines = [line for line in lines if line and not line.startswith(("#", "echo ", "set "))]
    return (
        found[1][:60]
        if lines and all(PREPARES.match(line) or line.startswith(("source ", ". ", "export ")) for line in lines)
        else None
    )


def _alone_in_shell(job: JobDescription, call: ProgramCall) -> bool:
    """Return whether a command that sets up its shell is the last one of ``bash -c``."""
    if not call.under or call.in_substitution or call.under[-1].program not in SHELLS or not sets_up(call):
        return False
    inner, outer = call.under[-1], call.under[:-1]
    if not any(a.text == "-c" for a in inner.args) or call.program in ("conda", "mamba"):
        return False  # `programs.conda_in_shell`
    alone = all(c.program in STARTERS for c in outer)
    return alone and not any(c.offset > call.offset and inner in c.under for c in job.calls)


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


# ------------------------------------------------------------------------------------- redirections

OVER_WHY = "> truncates the file each time it is opened: only the output of the last run stays."
SAME_WHY = "The shell truncates the file before the program reads it: it is empty."
NUMBER_WHY = "2>1 writes to a file with the name 1, and 2>&1 to where the output goes."
ORDER_WHY = (
    "Redirections count from left to right: 2>&1 is where the output goes at that moment, not the file behind it."
)
READS_WHOLE = {
    "cat",
    "sort",
    "uniq",
    "sed",
    "grep",
    "awk",
    "tr",
    "cut",
    "head",
    "tail",
    "jq",
    "shuf",
    "column",
    "envsubst",
    "tac",
    "paste",
}
FILE_ONE = lazy_regex(r"(?<![\w$\[<>&(])(?:2|&)>[ \t]*1(?=[ \t]*(?:$|[;|&)\n]))", re.MULTILINE)
WRONG_ORDER = lazy_regex(r"[ \t]2>&1[ \t]+1?>{1,2}[ \t]*([^\s;|&()]+)")


def overwritten(job: JobDescription) -> Iterator[Violation]:
    """Report logs that each run of a loop truncates, files that are their own input, and ``2>1``."""
    for call in job.calls:
        if call.in_substitution:
            continue
        for redirect in call.redirects:
            target = redirect.target
            plain = re.fullmatch(r"[\w./~-]+", target) is not None and not target.startswith("/dev/")
            if redirect.operator not in (">", "&>") or not plain:
                continue
            words = [a.text for a in call.args]
            if call.program in READS_WHOLE and target in words and "-i" not in words and not call.under:
                text = f"{call.program} reads {target}, which > has already truncated"
                yield Violation(
                    call.offset,
                    text,
                    why=SAME_WHY,
                    cure=f"{call.program} ... > {target}.new && mv {target}.new {target}",
                )
    for found in FILE_ONE.finditer(job.text):
        if not job.in_comment(found.start()) and _in_command(job, found.start()):
            yield Violation(
                found.start(), f"{found[0].strip()} writes a file with the name 1", why=NUMBER_WHY, cure="2>&1"
            )
    loops = [c for c in job.work_calls if c.in_loop and not c.in_substitution and not c.in_function and not c.tested]
    for call in loops:
        outer = call.under[0] if call.under else call
        for redirect in outer.redirects:
            plain = re.fullmatch(r"[\w./~-]+", redirect.target) is not None and not redirect.target.startswith("/dev/")
            if (
                redirect.operator in (">", "&>")
                and plain
                and not (_kept(job, redirect.target) or runs_once(job, outer))
            ):
                text = f"each run of the loop truncates {redirect.target}"
                yield Violation(
                    outer.offset, text, why=OVER_WHY, cure=f">> {redirect.target}, or a name with the loop's variable"
                )
                return


def tee_in_loop(job: JobDescription) -> Iterator[Violation]:
    """Report ``program | tee file`` without -a in a loop."""
    works = {
        (c.under[0] if c.under else c).offset
        for c in job.work_calls
        if c.in_loop and not c.tested and not c.in_function
    }
    for before, call in pairwise(c for c in job.calls if not c.under and not c.in_substitution):
        words = [a.text for a in call.args]
        if call.program != "tee" or call.before not in ("|", "|&") or before.offset not in works or len(words) != 1:
            continue
        target = words[0]
        if (
            re.fullmatch(r"[\w./~-]+", target)
            and not target.startswith(("/dev/", "-"))
            and not (_kept(job, target) or runs_once(job, call))
        ):
            text = f"each run of the loop truncates {target}"
            yield Violation(call.offset, text, cure=f"tee -a {target}, or a name with the loop's variable")
            return


def _kept(job: JobDescription, target: str) -> bool:
    """Return whether something else in the script reads, moves or empties the file: it is a temporary one."""
    return (
        len(re.findall(rf"(?<![\w./-]){re.escape(target)}(?![\w/-])", job.text)) > 1
        or re.search(r"(?m)^[^#\n]*\b(?:cd|pushd)\b", job.text) is not None
    )


def runs_once(job: JobDescription, call: ProgramCall) -> bool:
    """Return whether the nearest loop above the call has one value, or repeats the same command until it succeeds."""
    heads = list(
        re.finditer(r"(?m)^[ \t]*(?:for[ \t]+\w+[ \t]+in[ \t]+([^;\n]*)|while\b|until\b)", job.text[: call.offset])
    )
    if not heads or (heads[-1][1] is None and "read" not in job.line_of(heads[-1].end())):
        return True  # a loop until it succeeds
    value = (heads[-1][1] or "").strip()
    return re.fullmatch(r"[\w.:/=-]+", value) is not None


def _in_command(job: JobDescription, offset: int) -> bool:
    line, column = job.lines.place(offset)
    before = job.lines.line(line)[: column - 1]
    if job.in_quotes(offset) or "((" in before or "[[" in before:
        return False
    return any(r.operator in (">", "&>", ">&") and r.target == "1" for c in job.calls for r in c.redirects)


def wrong_order(job: JobDescription) -> Iterator[Violation]:
    """Report ``2>&1 > file``, which keeps the errors out of the file."""
    for found in WRONG_ORDER.finditer(job.text):
        rest = job.text[found.end() : found.end() + 5].lstrip(" \t")
        if job.in_comment(found.start()) or rest.startswith("|") or found[1].startswith(("/dev/", "&")):
            continue
        if any(r.target == "1" and r.operator == ">&" for c in job.calls for r in c.redirects):
            text = f"2>&1 stands before > {found[1]}: the errors do not go to the file"
            yield Violation(found.start() + 1, text, why=ORDER_WHY, cure=f"> {found[1]} 2>&1", severity="note")


# ---------------------------------------------------------------------------------- buffered output

BUFFERED_WHY = "Python buffers some kB of output if it does not write to a terminal; when a rank is killed, its last lines are lost."


def buffered(job: JobDescription) -> Iterator[Violation]:
    if job.has("PYTHONUNBUFFERED") or sources_settings(job) or not job.is_batch:
        return
    for call in job.calls:
        words = [a.text for a in call.args]
        alone = not call.under and not job.launches
        ranks = any(la.call is call for la in job.launches)
        if (
            PYTHON.match(call.program)
            and not call.module
            and (alone or ranks)
            and any(w.endswith(".py") for w in words)
        ):
            if not any(
                re.match(r"-[a-zA-Z]*u", w) for w in words[: next(i for i, w in enumerate(words) if w.endswith(".py"))]
            ):
                yield Violation(
                    call.offset,
                    "Python's output is buffered: no PYTHONUNBUFFERED and no -u (torchrun passes -u itself, srun does not)",
                )
                return


SET_BY_BASH = {
    "BASH_REMATCH", "PIPESTATUS", "FUNCNAME", "BASH_SOURCE", "BASH_LINENO", "BASH_ARGV", "BASH_VERSINFO", "DIRSTACK", "GROUPS", "COMP_WORDS", "COPROC",
    "MAPFILE", "argv", "path",
}  # fmt: skip
ARRAY_WHY = "An array cannot be exported: a script that another one starts does not have it, so the value is empty."
POSITIONAL = lazy_regex(r"\$\{?[1-9]\b")


def foreign_arrays(job: JobDescription) -> Iterator[Violation]:
    """Report an element of an array that nothing in the script sets."""
    if job.kind != "script" or job.sources_files or not (job.is_job or POSITIONAL.search(job.text)):
        return
    said: set[str] = set()
    for use in job.uses:
        index = use.index[1:-1]
        if not index or index in ("0", "@", "*") or use.operator or use.name in said | SET_BY_BASH:
            continue
        known = job.has(use.name) or use.name in job.reading.named | job.reading.exported
        if (
            known
            or use.under
            or (use.in_function and not job.is_job)
            or OWN_LAST_PART.match(job.text)
            or re.search(
                rf"(?<![$\w{{]){use.name}(?:\+?=|\[.*\]\+?=|\b[ \t]*(?:<|$))|[ \t]{use.name}[ \t;\n]",
                job.text,
                re.M,
            )
        ):
            continue
        said.add(use.name)
        text = f"${{{use.name}[{index}]}}: nothing in this script sets the array {use.name}"
        yield Violation(use.offset, text, why=ARRAY_WHY, cure="pass the element as an argument, or set the array here")


# ------------------------------------------------------------ exits in pipes, and functions without a call

PIPE_WHY = "Each part of a pipe runs in a shell of its own: exit ends that one, and the pipe has the result of its last command."
PIPE_CURE = "set -o pipefail at the top of the script, and { ...; } | tee log || exit 1"
READ_LOOP_CURE = "done < <(command), or done < file, instead of the pipe"
NEVER_CALLED_WHY = "A function runs only when its name stands as a command somewhere below its definition."
PIPED_END = lazy_regex(r"(?m)^([ \t]*)(\}|\)|done)[ \t]*(?:2>&1[ \t]*)?\|&?[ \t]*(\w+)")
OPENERS = {"}": r"(?<!\))\n{}\{{[ \t]*(?:#.*)?$", ")": r"\n{}\([ \t]*(?:#.*)?$", "done": r"\n{}(?:for|while|until)\b"}


def exit_in_pipe(job: JobDescription) -> Iterator[Violation]:
    """Report ``exit 1`` in ``{ ...; } | tee log``, and in a loop behind a pipe, where the script goes on."""
    if job.kind != "script" or "pipefail" in job.code or "PIPESTATUS" in job.code:
        return
    exits = [
        c
        for c in job.calls
        if c.program == "exit" and c.args and c.args[0].text != "0"
        and not (c.under or c.in_substitution or c.in_function)
    ]  # fmt: skip
    for end in PIPED_END.finditer(job.text) if exits else ():
        opener = OPENERS[end[2]].format(re.escape(end[1]))
        starts = [m.start() for m in re.finditer(opener, job.text[: end.start()], re.MULTILINE)]
        inside = [c for c in exits if starts and starts[-1] < c.offset < end.start()]
        tested = re.match(r"[^\n]*(?:\|\||&&)", job.text[end.end() :])
        if inside and not tested and not job.in_comment(end.start(2)):
            text = f"exit ends only its part of the pipe: the script goes on with the result of {end[3]}"
            yield Violation(inside[-1].offset, text, why=PIPE_WHY, cure=PIPE_CURE)
            return
    if shell_flags(job)[0] or keeps_last_part(job):
        return
    own = [c for c in job.calls if not (c.under or c.in_substitution or c.in_function)]
    for call in exits:
        place = call.subshell
        if place is None or job.source.text[place : place + 1] == "(" or not call.in_loop:
            continue
        later = next((c for c in own if c.offset > call.offset and c.subshell is None), None)
        between = job.text[call.offset : later.offset + 40] if later else ""
        done = re.search(r"(?m)^[ \t]*done\b([^\n]*)", between)
        if later and done and not re.search(r"\|\||&&|\|", done[1]) and "$?" not in between[done.start() :]:
            text = f"exit ends only the loop behind the pipe: the script goes on with {later.written}"
            yield Violation(call.offset, text, why=PIPE_WHY, cure=READ_LOOP_CURE)
            return


def never_called(job: JobDescription) -> Iterator[Violation]:
    """Report a job whose work stands in functions that nothing calls."""
    if not job.is_job or not job.work or not all(w.in_function for w in job.work):
        return
    defined = [
        (m.start() + len(m[0]) - len(m[0].lstrip()), m[1] or m[2])
        for m in DEFINES.finditer(job.text)
        if not job.in_comment(m.start())
    ]
    owners = {max((d for d in defined if d[0] < w.offset), default=None) for w in job.work}
    code = "\n".join(line for line in job.text.split("\n") if not line.lstrip().startswith("#"))
    for owner in owners:
        if owner is None or len(re.findall(rf"(?<![\w.-]){re.escape(owner[1])}(?![\w-])", code)) > 1:
            return
    if DISPATCHES.search(code):
        return
    place, name = min(owner for owner in owners if owner is not None)
    text = f"nothing calls {name}: the job ends without its work"
    yield Violation(place, text, why=NEVER_CALLED_WHY, cure=f"{name} as the last line")


DISPATCHES = lazy_regex(r"(?m)^[ \t]*(?:eval[ \t]+|exec[ \t]+)?[\"']?\$\{?[@*\w]|\beval\b|\$\{?FUNCNAME")
