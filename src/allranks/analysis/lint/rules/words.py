"""Rules for words that reach a program in another form than meant: joined, with quotes, or as the name of a variable."""

from __future__ import annotations

import re
from collections.abc import Iterator

from allranks.analysis.lint.command_options import LAUNCHERS, PYTHON, REMOTE_SHELLS, SHELLS
from allranks.analysis.lint.job import JobDescription
from allranks.analysis.lint.records import Argument, Assignment, ProgramCall, Violation
from allranks.analysis.lint.rules.commands import LITERAL, QUOTED_CURE, QUOTED_WHY
from allranks.analysis.lint.shell_tokens import UNRESOLVED_CLOSE, UNRESOLVED_OPEN

ONE_WORD_WHY = "In quotes the value is one word: the program gets all options as one argument, and refuses it."
ONE_WORD_CURE = 'an array: args=(--lr 1 --epochs 2), then "${args[@]}"'
QUOTES_WHY = "The shell looks for quotes before it inserts values: those in a value are ordinary characters, and blanks between them separate words."
APPEND_WHY = "NAME+=text changes the first element: the new text is glued to it."
FIRST_WHY = "$NAME of an array is its first element."

EXPANDS_ITSELF = {
    "awk", "gawk", "mawk", "sed", "perl", "trap", "eval", "find", "xargs", "parallel", "envsubst", "grep", "egrep", "echo", "printf", "jq", "expr",
    "watch", "tmux", "screen", "su", "sudo", "git", "docker", "podman", "kubectl", "make", "ruby", "env", "rename", "alias", "logger", "[", "[[",
    "test", "case", "sqlite3", "psql", "yq", "export", "declare", "sbatch", "qsub", "bsub", "salloc", "flock", "script", "timeout", "hyperfine",
    "pbsdsh", "blaunch", "complete", "rg", "cat", "tee", "vim", "R", "Rscript", "julia", "matlab", "node", "mongo", "mysql", "entr", "nohup", "run",
}  # fmt: skip


def quoted_name(job: JobDescription) -> Iterator[Violation]:
    """Report an argument that is exactly ``'$NAME'``, of a program that expands no variables."""
    works = {c.offset for c in job.work_calls}
    for call in job.calls:
        outer = {c.program for c in call.under}
        if call.program in EXPANDS_ITSELF | SHELLS | REMOTE_SHELLS or outer & (REMOTE_SHELLS | EXPANDS_ITSELF):
            continue
        if call.in_substitution or "$" in call.written or (call.in_function and call.written in job.reading.named):
            continue
        for before, arg in zip((None, *call.args), call.args, strict=False):
            text = arg.source.text
            setting = re.match(r"[A-Za-z_][\w.]*=(?=\$\w+\Z)", text)  # of Hydra, whose interpolations have braces
            start = setting.end() if setting else 0
            found = LITERAL.fullmatch(text, start)
            place = arg.source.where(start)
            if found is None or job.text[place - 1 : place] != "'":
                continue
            name = found[1] or found[2]
            known = job.has(name) or name in job.reading.named
            option = before is not None and before.text.startswith("--") and found[2] is not None and name.isupper()
            if known or (option and call.offset in works):
                text = f"'{found[0]}' is not expanded in single quotes: {call.written} gets the name"
                yield Violation(place, text, why=QUOTED_WHY, cure=QUOTED_CURE)
                return


def _starts_training(call: ProgramCall) -> bool:
    return PYTHON.match(call.program) is not None or call.program in LAUNCHERS


def joined_options(job: JobDescription) -> Iterator[Violation]:
    """Report ``"$ARGS"`` of a list of options, and ``"$*"``: the program gets one word."""
    for call in job.work_calls:
        if not _starts_training(call) or call.in_substitution:
            continue
        for number, arg in enumerate(call.args):
            before = call.args[number - 1].text if number else ""
            if not arg.quoted or (before.startswith("-") and "=" not in before) or not before:
                continue
            place = job.text[max(0, arg.offset - 1) : arg.offset + 40]
            name = re.match(r"[\s]?\"\$\{?([A-Za-z_]\w*|\*)\}?\"(?=\s|\Z|\\)", place)
            if name is None:
                continue
            if name[1] == "*":
                text = '"$*" is one word: the program gets all arguments of the script as one'
                yield Violation(arg.offset, text, why=ONE_WORD_WHY, cure='"$@"')
                return
            values = job.by_name.get(name[1], [])
            several = [v for v in values if re.match(r"\s*--?[A-Za-z][\w-]*[= ]\S+\s+--?[A-Za-z]", _plain(v))]
            if values and len(several) == len(values) and all(v.items is None for v in values):
                text = f'"${name[1]}" is one word: the program gets all its options as one argument'
                yield Violation(arg.offset, text, why=ONE_WORD_WHY, cure=ONE_WORD_CURE)
                return


def _plain(item: Assignment) -> str:
    return re.sub(f"{UNRESOLVED_OPEN}[^{UNRESOLVED_CLOSE}]*{UNRESOLVED_CLOSE}", "x", item.source.text)


QUOTE = re.compile(r"(?:\A|=)(['\"])")


def quotes_in_value(job: JobDescription) -> Iterator[Violation]:
    """Report quotes in the value of an unquoted variable that become part of the program's arguments."""
    said: set[str] = set()
    for call in job.work_calls:
        if not _starts_training(call) or any(c.program in REMOTE_SHELLS for c in call.under):
            continue
        for arg in call.args:
            owner = _owner(job, arg, call)
            if owner is None or owner in said or arg.quoted:
                continue
            text = re.sub(f"{UNRESOLVED_OPEN}[^{UNRESOLVED_CLOSE}]*{UNRESOLVED_CLOSE}", "x", arg.source.text)
            opened = QUOTE.search(text)
            if opened and ((text.endswith(opened[1]) and text.count(opened[1]) == 2) or text.count(opened[1]) == 1):
                said.add(owner)
                shown = arg.text[:40]
                message = f"the quotes in the value of {owner} become part of the argument: {shown}"
                yield Violation(arg.source.where(0), message, why=QUOTES_WHY, cure=ONE_WORD_CURE)


def _owner(job: JobDescription, arg: Argument, call: ProgramCall) -> str | None:
    """Return the variable whose value an argument is, if it is set by a plain assignment above the call."""
    place = arg.source.where(0)
    if call.under and any(c.program in SHELLS for c in call.under):
        return None
    for item in job.assignments:
        if item.under or item.items is not None or item.offset >= call.offset or not len(item.source.at):
            continue
        if place in item.source.at and place > item.offset and _written_here(job, item, place):
            return item.name
    return None


def _written_here(job: JobDescription, item: Assignment, place: int) -> bool:
    """Return whether the place lies in the text of this assignment, and not in that of a variable in its value."""
    return (
        job.text[item.offset : item.offset + len(item.name)] == item.name
        and place - item.offset < len(item.source.text) + 40
    )


APPENDED = re.compile(r"(?m)^[ \t]*([A-Za-z_]\w*)\+=(?!\()(\S)")


def appended_text(job: JobDescription) -> Iterator[Violation]:
    """Report ``NAME+=text`` of an array."""
    arrays = {a.name for a in job.assignments if a.items is not None}
    for found in APPENDED.finditer(job.text) if arrays else ():
        place = found.start(1)
        before = [a for a in job.assignments if a.name == found[1] and a.offset < place]
        if (
            before
            and before[-1].items
            and len(before[-1].items) > 0
            and any(a.offset == place for a in job.assignments)
        ):
            text = f"{found[1]} is an array: += without ( ) appends the text to its first element"
            yield Violation(place, text, why=APPEND_WHY, cure=f"{found[1]}+=(...)")


OTHER_USES = {
    "echo", "printf", "[", "[[", "test", "?", "export", "declare", "local", "case", "read", "unset", "readonly", "typeset", "let", "ssh", "date", "srun",
    "logger", ":", "scontrol", "eval", "return", "shift", "set",
}  # fmt: skip


def first_element(job: JobDescription) -> Iterator[Violation]:
    """Report ``$NAME`` of an array as the value of an option of any program: `loops.loops` has those of Python and its launchers."""
    said: set[str] = set()
    for use in job.uses:
        items = job.by_name.get(use.name, [])
        if not items or any(a.items is None or len(a.items) < 2 for a in items) or use.name in said | job.reading.named:
            continue
        if use.index or use.operator or use.under or use.in_redirect or use.program in OTHER_USES - {"srun"}:
            continue
        if PYTHON.match(use.program) or use.program in LAUNCHERS or use.program == "for":
            continue
        if items[0].offset > use.offset or job.text[use.offset - 1 : use.offset] in "#!" or "zsh" in job.lines.line(1):
            continue
        option = re.search(r"[\s\"']--?[A-Za-z][\w-]*[= ]\s*\"?\$\{?\Z", job.text[max(0, use.offset - 80) : use.offset])
        literal = not any(UNRESOLVED_OPEN + "(" in i.text for a in items for i in a.items or ())
        if option and literal:
            said.add(use.name)
            text = f"${use.name} is the first of the {len(items[0].items or ())} elements of the array"
            yield Violation(use.offset, text, why=FIRST_WHY, cure=f'"${{{use.name}[@]}}"')


ONE_RUN_WHY = "The shell takes the words behind in as they are: those in quotes are one, and the name of a command is not its output."
LOOP_HEAD = re.compile(
    r"(?m)^[ \t]*for[ \t]+(\w+)[ \t]+in[ \t]+(?:(seq[ \t]+[^;\n]+?)|\"([^\"\n]*)\"|'([^'\n]*)')[ \t]*(?:;|$)"
)
LIST = re.compile(r"[\w.:/=+-]+(?:[ \t]+[\w.:/=+-]+)+")


def quoted_list(job: JobDescription) -> Iterator[Violation]:
    """Report ``for x in "1 2 3"``, ``for x in "$LIST"`` and ``for i in seq 1 9``."""
    for found in LOOP_HEAD.finditer(job.text):
        if job.in_comment(found.start(1)) or "zsh" in job.lines.line(1):
            continue
        if found[2]:
            text = f"the loop runs over the words '{found[2]}': $( ) is missing"
            yield Violation(found.start(2), text, why=ONE_RUN_WHY, cure=f"for {found[1]} in $({found[2]})")
            continue
        words = found[3] if found[3] is not None else found[4]
        name = LITERAL.fullmatch(words)
        values = job.by_name.get(name[1] or name[2], []) if name and found[3] is not None else []
        several = values and all(v.items is None and LIST.fullmatch(v.value.strip()) for v in values)
        uses = [u for u in job.uses if u.name == found[1]]
        if uses and all(u.quoted for u in uses) and not re.fullmatch(r"[\d.\s]+", words):
            continue  # a name with blanks
        if LIST.fullmatch(words.strip()) or (several and name and (name[1] or name[2]) not in job.reading.named):
            text = f"the loop runs once: {found.group(0).strip().rstrip(';').partition(' in ')[2].strip()} in quotes is one word"
            yield Violation(found.start(1), text, why=ONE_RUN_WHY, cure=f"for {found[1]} in ... without the quotes")
