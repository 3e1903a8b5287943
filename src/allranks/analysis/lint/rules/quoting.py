"""Rules for words that reach a program in another form than meant: not expanded, joined, with quotes, or as the name of a variable."""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

from allranks.analysis.lint.command_options import LAUNCHERS, PYTHON, REMOTE_SHELLS, SHELLS
from allranks.analysis.lint.job import JobDescription, LauncherCall
from allranks.analysis.lint.records import Argument, Assignment, ProgramCall, Violation
from allranks.analysis.lint.rules.dataflow import INHERITED, MORE_READ
from allranks.analysis.lint.shell_tokens import UNRESOLVED_CLOSE, UNRESOLVED_OPEN
from allranks.utils.text import lazy_regex

# -------------------------------------------------------------------- single quotes and backslashes

PROCESS_ID = lazy_regex(r"(?<![\\$\w])\$\$\{?([A-Z][A-Z0-9_]{2,})\b")
LITERAL = lazy_regex(r"\$(?:\{([A-Za-z_]\w*)\}|([A-Za-z_]\w*))")
REMOTE = {"ssh", "pdsh", "clush", "parallel", "xargs", "blaunch", "pbsdsh", "docker", "podman", "sudo"}
QUOTED_WHY = "Between single quotes, and after a backslash, $ is an ordinary character: the program gets the name, not the value."
QUOTED_CURE = 'use double quotes, or none: "$NAME"'


def _runs_own_script(call: ProgramCall) -> bool:
    """Return whether the image's own script gets the arguments: that of a Docker image expands them again."""
    return call.program in ("singularity", "apptainer") and any(a.text == "run" for a in call.args[:3])


def not_expanded(job: JobDescription) -> Iterator[Violation]:
    """Report a variable in single quotes, or behind a backslash, in an argument of a program that is no shell."""
    template = "$$(" in job.text  # a program that fills it in writes $ as $$
    for twice in PROCESS_ID.finditer(job.text) if not template else ():
        if twice[1] in job.by_name and not job.in_comment(twice.start()):
            text = f"$${twice[1]} is the shell's process id, followed by the text {twice[1]}"
            yield Violation(twice.start(), text, why="$$ is a variable of its own.", cure=f"${twice[1]}")
            break
    for call in job.work_calls:
        if any(c.program in REMOTE or _runs_own_script(c) for c in call.under):
            continue
        for arg in call.args:
            text = arg.source.text
            if "$" not in text or re.search(r"\s", text) or (not text.startswith("-") and "=" in text):
                continue
            found = LITERAL.search(text)
            name = (found[1] or found[2]) if found else ""
            if not found or text[: found.start()].count(UNRESOLVED_OPEN) > text[: found.start()].count(
                UNRESOLVED_CLOSE
            ):
                continue
            if name in job.by_name or name.startswith("SLURM_") or name in ("HOME", "USER", "TMPDIR", "SCRATCH"):
                known = RENDEZVOUS_ID.match(text)
                yield Violation(
                    arg.source.where(found.start()),
                    f"${name} is not expanded here: {call.written} gets the name",
                    why=SAME_TEXT_WHY if known else None,
                    severity="note" if known else None,
                )
                break


PLACE_NAME = lazy_regex(r"(?:\w+_(?:DIR|HOME|CACHE|PATH|ROOT|FOLDER)|PATH|LD_LIBRARY_PATH|PYTHONPATH)\Z")
CAPITAL_NAME = lazy_regex(r"\$(?:\{([A-Z_][A-Z0-9_]*)\}|([A-Z_][A-Z0-9_]*))")
QUOTED_SETTING_WHY = "Between single quotes $ is an ordinary character: programs get the name of the variable, and use a folder of this name."


def quoted_setting(job: JobDescription) -> Iterator[Violation]:
    """Report an exported setting whose value has a variable in single quotes."""
    for item in job.assignments:
        literal = (
            CAPITAL_NAME.search(item.source.text) if item.exported and not item.removed and item.items is None else None
        )
        if literal is None or not (PLACE_NAME.match(item.name) or MORE_READ.match(item.name)) or item.under:
            continue
        written = job.text[item.offset + len(item.name) : item.offset + len(item.name) + 300].split("\n")[0]
        if re.match(r"='[^'\n]*\$[^'\n]*'[ \t]*(?:$|[#;])", written) and not re.search(
            rf"\beval\b.*{item.name}", job.text
        ):
            name = literal[1] or literal[2]
            yield Violation(item.offset, f"${name} is not expanded here: {item.name} gets the name", why=QUOTED_SETTING_WHY,
                            cure=f'{item.name}="..." with double quotes')  # fmt: skip


# -------------------------------------------------------------- joined words, and words with quotes

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


QUOTE = lazy_regex(r"(?:\A|=)(['\"])")


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
                severity = "note" if text in ("''", '""') else None  # some programs take it for an empty text
                yield Violation(arg.source.where(0), message, why=QUOTES_WHY, cure=ONE_WORD_CURE, severity=severity)


def _owner(job: JobDescription, arg: Argument, call: ProgramCall) -> str | None:
    """Return the variable whose value an argument is, if it is set by a plain assignment above the call."""
    if call.under and any(c.program in SHELLS for c in call.under):
        return None
    item = assignment_at(job, arg.source.where(0))
    return item.name if item is not None and item.offset < call.offset else None


def assignment_at(job: JobDescription, place: int) -> Assignment | None:
    """Return the plain assignment in whose text a place stands."""
    for item in job.assignments:
        if item.under or item.items is not None or place <= item.offset or not len(item.source.at):
            continue
        if place in item.source.at and is_written_here(job, item, place):
            return item
    return None


def is_written_here(job: JobDescription, item: Assignment, place: int) -> bool:
    """Return whether the place lies in the text of this assignment, and not in that of a variable in its value."""
    return (
        job.text[item.offset : item.offset + len(item.name)] == item.name
        and place - item.offset < len(item.source.text) + 40
    )


APPENDED = lazy_regex(r"(?m)^[ \t]*([A-Za-z_]\w*)\+=(?!\()(\S)")


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
LOOP_HEAD = lazy_regex(
    r"(?m)^[ \t]*for[ \t]+(\w+)[ \t]+in[ \t]+(?:(seq[ \t]+[^;\n]+?)|\"([^\"\n]*)\"|'([^'\n]*)')[ \t]*(?:;|$)"
)
PLAIN_LIST = lazy_regex(r"[\w.:/=+-]+(?:[ \t]+[\w.:/=+-]+)+")


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
        several = values and all(v.items is None and PLAIN_LIST.fullmatch(v.value.strip()) for v in values)
        uses = [u for u in job.uses if u.name == found[1]]
        if uses and all(u.quoted for u in uses) and not re.fullmatch(r"[\d.\s]+", words):
            continue  # a name with blanks
        if PLAIN_LIST.fullmatch(words.strip()) or (several and name and (name[1] or name[2]) not in job.reading.named):
            text = f"the loop runs once: {found.group(0).strip().rstrip(';').partition(' in ')[2].strip()} in quotes is one word"
            yield Violation(found.start(1), text, why=ONE_RUN_WHY, cure=f"for {found[1]} in ... without the quotes")


# ------------------------------------------------- values that no shell expands, and lists of nodes

TEXT_WHY = "srun starts the program without a shell, and single quotes or \\$ keep the batch shell from expanding it: the program gets the text."
TEXT_CURE = "srun bash -c '... $SLURM_NODEID ...', whose shell expands it in every task"
PRODUCT_WHY = (
    "The shell calculates only in $((...)): the program gets the text, and stops with 'invalid literal for int()'."
)
ARRAY_WHY = "The list of nodes is one word with line breaks, so element 0 is the whole list, not the first node."
ARRAY_CURE = 'nodes=( $(scontrol show hostnames "$SLURM_JOB_NODELIST") ) without quotes around $(...); or head -n 1'
LITERAL_ARGUMENT = lazy_regex(
    r"\$\{?(SLURM_(?:NODEID|PROCID|LOCALID|NNODES|JOB_NUM_NODES|NTASKS|GPUS_ON_NODE|JOB_ID)|MASTER_ADDR|MASTER_PORT)\b"
)
RENDEZVOUS_ID = lazy_regex(r"--rdzv[-_]id=")
SAME_TEXT_WHY = "The text is the same on every node, so the nodes still meet; jobs that use the same endpoint also have the same id."
RANK_NAMES = {"RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "WORLD_SIZE"}
COUNTS = ("nnodes", "nproc_per_node", "num_machines", "num_processes", "num_nodes", "num_gpus")
PRODUCT = lazy_regex(r"[\w${}#@\[\]]+[*+][\w${}#@\[\]]+")
OWN_SHELL = REMOTE_SHELLS | {"parallel", "xargs", "flux"}


def literal(job: JobDescription) -> Iterator[Violation]:
    """Report options and variables of tasks that are the text ``$NAME``, and products that nobody calculates."""
    for launch in job.launches:
        if not any(c.program in OWN_SHELL for c in launch.call.under):
            yield from _literal_options(launch)
        yield from _products(launch)
    if not any(la.kind == "python" for la in job.launches):
        return
    for item in job.assignments:
        if item.name not in RANK_NAMES or item.removed or item.name in job.used_names:
            continue
        text = item.source.text
        if LITERAL_ARGUMENT.fullmatch(text.rstrip("}")):
            yield Violation(item.offset, f"{item.name} is the text {text}: no shell expands it")
        elif item.name == "WORLD_SIZE" and _is_exported(job, item) and PRODUCT.fullmatch(item.value):
            cure = f"{item.name}=$(({item.value}))"
            yield Violation(item.offset, f"{item.name} is the text {item.value}", why=PRODUCT_WHY, cure=cure)


def _is_exported(job: JobDescription, item: Assignment) -> bool:
    return item.exported or item.name in job.reading.exported


def _literal_options(launch: LauncherCall) -> Iterator[Violation]:
    if launch.srun is None:
        return
    same: Violation | None = None
    for arg in launch.call.args:
        found = LITERAL_ARGUMENT.search(arg.source.text)
        whole = found and re.fullmatch(r"(?:--?[\w-]+=)?(?:tcp://)?[\w.:${}]*", arg.source.text)
        if found and whole:
            text = f"the program gets the text {found[0]}{'}' if '{' in found[0] else ''}: no shell expands it"
            if RENDEZVOUS_ID.match(arg.source.text):
                same = Violation(arg.offset, text, why=SAME_TEXT_WHY, severity="note")
                continue
            yield Violation(arg.offset, text)
            return
    if same is not None:
        yield same


def _products(launch: LauncherCall) -> Iterator[Violation]:
    for name in COUNTS:
        option = launch.option(name)
        value = option.plain_value if option else ""
        if option and PRODUCT.fullmatch(value) and re.search(r"[*+]", value):
            cure = f"{option.written} $(({value}))"
            yield Violation(option.arg.offset, f"--{name} is the text {value}", why=PRODUCT_WHY, cure=cure)


NAME_WHY = "The shell expands only $NAME and ${NAME}: the program gets the text, or nothing."


def names_as_text(job: JobDescription) -> Iterator[Violation]:
    """Report the name of a variable that nothing uses, where its value is meant: ``--data DATA``, ``{DATA}``, ``%DATA%``."""
    unused = (
        {a.name for a in job.set_values_at_top() if a.value and not a.exported}
        - job.used_names
        - job.reading.exported
        - INHERITED
    )
    for call in job.work_calls:
        if any(c.program in ("ssh", "docker") for c in call.under):
            continue
        before = ""
        for arg, following in call.pairs():
            text, before, behind = arg.text, arg.text, before
            if text == "$" and following is not None and re.match(r"\{\w+\}", following.text):
                yield Violation(
                    arg.offset,
                    f"$ {following.text}: a blank stands behind the $",
                    why=NAME_WHY,
                    cure=f"${following.text}",
                )
            found = re.fullmatch(
                r"(?:--?[\w-]+=)?(?:\{([A-Za-z_]\w{2,})\}|%([A-Za-z_]\w{2,})%|([A-Z][A-Z0-9_]{2,}))", text
            )
            name = (found[1] or found[2] or found[3]) if found else None
            if (
                found is None
                and re.fullmatch(r"[a-z]+(?:_[a-z0-9]+)+", text)
                and re.fullmatch(r"--?[A-Za-z][\w-]*", behind)
            ):
                name = text if any("/" in a.value for a in job.by_name.get(text, ())) else None
            if name in unused and not arg.quoted:
                yield Violation(
                    arg.offset,
                    f"{text} is text: the value of {name} is meant, which nothing uses",
                    why=NAME_WHY,
                    cure=f"${name}",
                )
                return
    for call in job.calls:
        if (
            call.in_substitution
            and not call.args
            and call.written in job.by_name
            and re.fullmatch(r"[A-Z_][A-Z0-9_]+", call.written)
        ):
            if job.text[max(0, call.offset - 2) : call.offset] == "$(":
                text = f"$({call.written}) runs {call.written} as a command"
                yield Violation(
                    call.offset,
                    text,
                    why="$(...) is the output of a command, ${...} the value of a variable.",
                    cure=f"${{{call.written}}}",
                )


# ----------------------------------------------------------------------- texts written into files

NEWLINE_WHY = "echo of bash writes \\n as it is, unless it is called with -e: the file has one line, and its reader finds one host, or none."
SOURCE_OR_LOG = lazy_regex(r"(?i)\.(?:py|c|cpp|tex|R|m|json|out|err)\Z|log|/dev/")
FOR_EXPANSION = lazy_regex(r"\b(?:envsubst|eval|sed|perl|jinja2?|gomplate|m4)\b|\bsource\s|^\s*\.\s", re.MULTILINE)
DATA_DOCUMENT = r"[ \t]*(?:cat|tee)\b(?P<words>[^\n]*)"
DATA_NAME = lazy_regex(
    r"(?:>|\btee\b)[ \t]*[\"']?[^\s\"'|;&]*(?:\.(?:ya?ml|json|ini|toml|cfg|conf|txt|hosts?)|host_?file|hosts)[\"']?(?:\s|\Z)"
)
DATA_VALUE = lazy_regex(
    r"\$\{?(?:SLURM|MASTER|WORLD|PBS|NNODES|NODE|NPROC|HEAD|GPUS|NUM|RANK|HOME|USER|PWD)\w*\}?|\$\(\w"
)


def echoed_newlines(job: JobDescription) -> Iterator[Violation]:
    """Report ``echo "a\\nb" > file`` without ``-e`` in a script of bash."""
    if not re.match(r"#!.*\bbash\b", job.lines.line(1)) or re.search(r"\bxpg_echo\b", job.text):
        return
    for call in job.calls:
        if call.program != "echo" or call.in_substitution or not call.args or call.is_piped:
            continue
        if re.fullmatch(r"-[neE]*e[neE]*", call.args[0].text) or not any(
            r.operator in (">", ">>") for r in call.redirects
        ):
            continue
        end = job.text.find("\n", call.offset)
        written = re.sub(r"`[^`]*`|\$\([^)]*\)", "", job.text[call.offset : end if end >= 0 else len(job.text)])
        if re.search(r"echo[^|;]*\becho\b|\bprintf\b|\bprint\(", written):
            continue  # a line of a program
        if not re.search(r"[^\\\s]\\n[^\"'\\\s]", written) or any(
            SOURCE_OR_LOG.search(r.target) for r in call.redirects
        ):
            continue
        yield Violation(call.offset, "echo without -e writes \\n as two characters", why=NEWLINE_WHY, cure="printf, or echo -e",
                        severity="warning")  # fmt: skip
        return


# ------------------------------------------------------------------------------ Python in the script

INLINE_WHY = "Python gets the text as the shell passes it on, and ends with a SyntaxError before it runs any of it."
INDENTED_WHY = (
    "Python before 3.14 does not remove the common indentation of the text, and ends with an IndentationError."
)
OLD_PYTHON = lazy_regex(r"Missing parentheses|invalid token|leading zeros|multiple exception types")


def inline_python(job: JobDescription) -> Iterator[Violation]:
    """Report a text for ``python -c`` that Python cannot parse, such as ``'print(\\"a\\")'``: in single quotes a backslash stays."""
    for call in job.calls:
        if not PYTHON.match(call.program) or call.program.startswith("python2") or _in_other_text(call):
            continue
        for before, arg in pairwise(call.args):
            if before.text == "-c":
                yield from _unparsed(arg)
            if not before.text.startswith("-"):
                break


def _in_other_text(call: ProgramCall) -> bool:
    """Return whether another shell reads the command, or another program passes it on: how often it is unquoted is unknown here."""
    return any(
        c.program not in ("srun", "singularity", "apptainer", "time", "env", "mpirun", "mpiexec") for c in call.under
    )


def _unparsed(arg: Argument) -> Iterator[Violation]:
    code = arg.source.text
    if not arg.quoted or UNRESOLVED_OPEN in code or re.search(r"[$`]|\{\{|<\w+>", code):
        return
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ast.parse(code)
    except SyntaxError as problem:
        if OLD_PYTHON.search(problem.msg):
            return
        lines = code.split("\n")
        index = sum(len(line) + 1 for line in lines[: (problem.lineno or 1) - 1]) + max((problem.offset or 1) - 1, 0)
        text = f"Python cannot parse this text: {problem.msg}"
        indented = isinstance(problem, IndentationError) and code.lstrip("\n")[:1] in (" ", "\t")
        why = INDENTED_WHY if indented else INLINE_WHY
        yield Violation(arg.source.where(min(index, len(code) - 1)), text, why=why, cure="check its quotes and its indentation",
                        severity="warning" if indented else None)  # fmt: skip
    except (ValueError, RecursionError, MemoryError):
        return


class QuotedDocument(NamedTuple):
    """A here-document with a quoted mark, which no shell expands. ``head`` has the groups ``words``, in front of <<, and ``rest``."""

    head: re.Match[str]
    mark: str
    start: int
    end: int


def quoted_documents(job: JobDescription, command: str) -> Iterator[QuotedDocument]:
    """Yield the here-documents with a quoted mark of a command, a pattern from the start of its line with a group ``words``."""
    head = re.compile(rf"(?m)^{command}<<-?[ \t]*(?:'(\w+)'|\"(\w+)\"|\\(\w+))(?P<rest>[^\n]*)\n")
    for found in head.finditer(job.text):
        mark = next(group for group in found.groups()[1:4] if group)
        end = re.compile(rf"(?m)^[ \t]*{mark}[ \t]*$").search(job.text, found.end())
        if end is not None and not job.in_comment(found.start("words")):
            yield QuotedDocument(found, mark, found.end(), end.start())


def literal_documents(job: JobDescription) -> Iterator[Violation]:
    """Report a file of data with names of variables in it, which a quoted here-document writes."""
    if job.kind != "script" or FOR_EXPANSION.search(job.text):
        return
    for document in quoted_documents(job, DATA_DOCUMENT):
        if not DATA_NAME.search(document.head[0].strip()):
            continue
        value = DATA_VALUE.search(job.text, document.start, document.end)
        if value and "```" not in job.text[document.start : document.end]:
            text = f"the file gets the text {value[0]}: the here-document's mark is quoted"
            yield Violation(value.start(), text, why="A quoted mark, <<'EOF', turns off the expansion of the whole text, and no reader of data expands it.",
                            cure=f"<<{document.mark} without quotes")  # fmt: skip
            return
