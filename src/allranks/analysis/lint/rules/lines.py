"""Rules for lines that are joined, cut or split in another way than meant, and for arguments and values that get lost with them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import pairwise

from allranks.analysis.lint.command_options import CONTAINERS, LAUNCHERS, PYTHON, SHELLS
from allranks.analysis.lint.job import JobDescription
from allranks.analysis.lint.placement import MPI
from allranks.analysis.lint.records import Argument, ProgramCall, VariableUse, Violation
from allranks.analysis.lint.rules.dataflow import GUARDS
from allranks.analysis.lint.rules.unset_variables import (
    RENDEZVOUS_OPTIONS,
    SLURM_NAMES,
    USUAL_OUTSIDE,
    guarded_names,
    set_by_module,
)
from allranks.analysis.lint.shell_tokens import UNRESOLVED_OPEN
from allranks.utils.text import lazy_regex

# ------------------------------------------------------------------------------------- joined lines

GLUED_WHY = "The shell removes the backslash and the line break, and nothing stays between the two words."
GLUED_CURE = "a blank before the backslash"
ASSIGNMENT_CUT_WHY = (
    "The command ends at the line without a backslash: the rest are assignments of the shell, which no program gets."
)
ASSIGNMENT_CUT_CURE = "end every line of the command but the last with a backslash"
HASH_WHY = "Inside of quotes # begins no comment: the words behind it are passed to the program."
HASH_CURE = "remove the line, or use an array, in which comments are possible"
JOINED = lazy_regex(r"[^\s\\]\\\r?\n(?=[-A-Za-z$\"'/])")


def joined_words(job: JobDescription) -> Iterator[Violation]:
    """Report two words that a backslash without a blank before it joins."""
    if job.kind != "script" or "\\\n" not in job.text:
        return
    ends = {found.start(): found.end() for found in JOINED.finditer(job.text) if not job.in_comment(found.start())}
    for call in job.work_calls if ends else ():
        for arg in call.args:
            places = set(arg.source.at)
            for start, end in ends.items():
                if start in places and end in places and not _inside_quotes(job, arg):
                    line = job.lines.place(start)[0]
                    text = f"the words of line {line} and {line + 1} become one: {_around(arg, start)!r}"
                    yield Violation(start, text, why=GLUED_WHY, cure=GLUED_CURE, severity="error")
                    return


def _inside_quotes(job: JobDescription, arg: Argument) -> bool:
    first = arg.source.where(0)
    return job.text[max(0, first - 1) : first] in ("'", '"')


def _around(arg: Argument, start: int) -> str:
    index = list(arg.source.at).index(start)
    return arg.source.text[max(0, index - 15) : index + 16]


def assignments_of_command(job: JobDescription) -> Iterator[Violation]:
    """Report ``name=value`` lines that were meant as arguments of the command above, whose last line has no backslash."""
    if job.kind != "script":
        return
    works = {job.lines.place(c.offset)[0]: c for c in job.work_calls}
    for item in job.set_values_at_top():
        line, column = job.lines.place(item.offset)
        above = job.lines.line(line - 1) if line > 1 else ""
        before = job.lines.line(line - 2) if line > 2 else ""
        if item.exported or column == 1 or not before.endswith("\\") or above.endswith("\\") or not above.strip():
            continue
        indented = len(above) - len(above.lstrip()) == column - 1
        same_form = re.match(r"\s*[+~]*[\w.@/-]+=\S", above)
        started = next((works[n] for n in range(line - 2, max(0, line - 60), -1) if n in works), None)
        between = started and all(
            job.lines.line(n).endswith("\\") for n in range(job.lines.place(started.offset)[0], line - 1)
        )
        if indented and same_form and between and item.name not in job.used_names:
            start = job.lines.start(line - 1) + len(above) - len(above.lstrip())
            text = f"no backslash at the end of the line: {item.name}=... in line {line} is a variable of the shell, no argument"
            yield Violation(start, text, why=ASSIGNMENT_CUT_WHY, cure=ASSIGNMENT_CUT_CURE)
            return


def hash_in_quotes(job: JobDescription) -> Iterator[Violation]:
    """Report a commented line inside of a quoted list of options."""
    for call in job.work_calls:
        for arg, following in call.pairs():
            word = arg.text
            if not re.fullmatch(r"#+|#+-{1,2}[A-Za-z][\w-]*(?:=\S*)?", word) or arg.quoted or following is None:
                continue
            place = arg.source.where(0)
            line, column = job.lines.place(place)
            if job.lines.line(line)[: column - 1].strip() in ("", '"', "'") and line != job.lines.place(call.offset)[0]:
                yield Violation(place, "# inside of quotes begins no comment: the program gets the words of this line",
                                why=HASH_WHY, cure=HASH_CURE)  # fmt: skip
                return


TAKES_WORDS = {"module", "ml", "export", "cd", "source", ".", "mkdir", "conda", "ulimit", "unset", "pip", "pip3"}


def swallowed_by(job: JobDescription) -> Iterator[Violation]:
    """Report a launch that became the arguments of the command above, which ends with a backslash."""
    for call in job.calls:
        if call.program not in TAKES_WORDS or call.in_substitution:
            continue
        for arg in call.args[1:]:
            line, column = job.lines.place(arg.source.where(0))
            starts = arg.text in LAUNCHERS | {"srun", "mpirun"} or PYTHON.fullmatch(arg.text) is not None
            if (
                starts
                and not arg.quoted
                and not job.lines.line(line)[: column - 1].strip()
                and job.lines.line(line - 1).endswith("\\")
            ):
                text = (
                    f"the line ends with a backslash: '{arg.text}' in line {line} becomes an argument of {call.written}"
                )
                yield Violation(job.lines.start(line - 1), text)
                return


# ---------------------------------------------------------------------------- commands that are cut

STARTERS = MPI | CONTAINERS | LAUNCHERS | {"srun", "jsrun", "horovodrun"}
BLOCK_OPENERS = lazy_regex(r"(?:\b(?:then|do|else|in)|[{(|;&])\s*(?:#.*)?\Z")
CUT_WHY = (
    "The command ends at the line without a backslash; what follows runs as another command, and its options are lost."
)
CUT_CURE = "end every line of the command but the last with a backslash that nothing follows"


def cut_commands(job: JobDescription) -> Iterator[Violation]:
    """Report the rest of a command that is indented below it, because a line has no backslash."""
    if job.kind != "script":
        return
    known = {job.lines.place(c.offset)[0] for c in job.calls}
    said: set[int] = set()
    for before, call in pairwise(c for c in job.calls if not c.in_substitution):
        line, column = job.lines.place(call.offset)
        above = job.lines.line(line - 1) if line > 1 else ""
        if line in said or call.in_substitution or job.lines.line(line)[: column - 1].strip():
            continue
        option = re.match(r"--?[A-Za-z][\w-]*", call.written) is not None
        if option and call.under and call.under[-1].program in SHELLS and above.strip() and not above.endswith("\\"):
            # The other part of the rule reads the script's own commands.
            said.add(line)
            start = job.lines.start(line - 1) + len(above) - len(above.lstrip())
            text = f"no backslash at the end of the line: {call.written.split('=')[0]} in line {line} runs as a command"
            yield Violation(start, text, why=CUT_WHY, cure=CUT_CURE)
            continue
        if (
            option
            or not above.strip()
            or above.lstrip().startswith("#")
            or above.endswith("\\")
            or BLOCK_OPENERS.search(above)
        ):
            continue
        first = _start_of(job, line - 1)
        indent = len(job.lines.line(first)) - len(job.lines.line(first).lstrip())
        bare = column - 1 <= indent and not (call.written.endswith(".py") and _lacks_program(job, before))
        if bare or first not in known or before.under[: len(call.under)] != call.under or before.tested:
            continue
        if _is_rest(job, before, call, first, line):
            said.add(line)
            start = job.lines.start(line - 1) + len(above) - len(above.lstrip())
            text = f"no backslash at the end of the line: '{call.written[:40]}' in line {line} runs as a command of its own"
            yield Violation(start, text, why=CUT_WHY, cure=CUT_CURE)


def _start_of(job: JobDescription, line: int) -> int:
    """Return the first of the lines that backslashes join with this one."""
    while (
        line > 1 and job.lines.line(line - 1).endswith("\\") and not job.lines.line(line - 1).lstrip().startswith("#")
    ):
        line -= 1
    return line


def _is_rest(job: JobDescription, before: ProgramCall, call: ProgramCall, first: int, line: int) -> bool:
    """Return whether a command is the rest of the one above: its program, or quoted arguments."""
    if not first <= job.lines.place(before.offset)[0] < line or before.redirects or before.after not in ("\n", ";", ""):
        return False
    column = job.lines.place(call.offset)[1]
    above = job.lines.line(line - 1)
    aligned = first < line - 1 and len(above) - len(above.lstrip()) == column - 1  # with the command's other lines
    quoted = job.text[call.offset : call.offset + 1] in ("'", '"')
    works = any(w.offset <= before.offset and job.lines.place(w.offset)[0] >= first for w in job.work)
    if before.args and before.args[-1].text == "-c" and before.program in SHELLS and quoted:
        return True
    if (
        aligned
        and (quoted or call.written.startswith("$") or DATA_FILE.search(call.written))
        and call.program not in USUAL
    ):
        return works or before.program in STARTERS or any(c.program in STARTERS for c in before.under)
    if quoted and works and (" " in call.written or re.search(r"[:=]", call.written)):
        return not re.match(r"[\"']?(?:\$|/|\./|~)", job.text[call.offset : call.offset + 3])
    starts = (
        PYTHON.match(call.program) is not None
        or call.program in LAUNCHERS | SHELLS
        or call.written.endswith((".py", ".sh"))
    )
    image = IMAGE.search(call.written) is not None and not call.written.startswith("$")
    return image or (starts and _lacks_program(job, before) and not call.written.startswith("/"))


DATA_FILE = lazy_regex(r"\.(?:ya?ml|json|jsonl|toml|cfg|ini|txt|csv|npy|pt|pth|h5)\Z")
IMAGE = lazy_regex(r"\.(?:sif|simg|sqsh|img)\Z")
USUAL = {"echo", "wait", "exit", "date", "cd", "rm", "mv", "cp", "eval", "exec", "source", "."}


def _lacks_program(job: JobDescription, call: ProgramCall) -> bool:
    """Return whether a command that starts another one has only options."""
    asked = {"--version", "--help"} & {a.text for a in call.args}
    return (
        call.program in STARTERS
        and not any(call in c.under for c in job.calls)
        and not _names_program(call)
        and not asked
    )


def _names_program(call: ProgramCall) -> bool:
    """Return whether one of the words may be the program, so that the command is complete."""
    words = [a.text for a in call.args]
    if call.program in CONTAINERS:
        return words[:1] not in (["exec"], ["run"]) and call.program != "shifter"
    return any(
        w.endswith((".py", ".sh")) or w in ("-m", "-c", "--module") or "/" in w for w in words if not w.startswith("--")
    )


def hydra_arguments(job: JobDescription) -> Iterator[Violation]:
    """Report ``name=value`` lines directly below a program whose line has no backslash."""
    if job.kind != "script":
        return
    works = {job.lines.place(c.offset)[0]: c for c in job.work_calls if not c.in_substitution}
    prefixes = [(a, c) for c in job.calls for a in c.prefix[:1]]
    places = [
        *((a.offset, a.name) for a in job.set_values_at_top() if not a.exported),
        *((a.offset, a.name) for a, _ in prefixes),
    ]
    for offset, name in places:
        line, column = job.lines.place(offset)
        above = job.lines.line(line - 1) if line > 1 else ""
        call = works.get(_start_of(job, line - 1)) if line > 1 else None
        if call is None or name in job.used_names or above.endswith("\\") or job.lines.line(line)[: column - 1].strip():
            continue
        indent = len(above) - len(above.lstrip())
        following = job.lines.line(line + 1) if line < job.text.count("\n") + 1 else ""
        goes_on = job.lines.line(line).endswith("\\") or re.match(rf"\s{{{column - 1}}}[\w.]+=\S", following)
        if column - 1 > indent and goes_on and above.split() and above.split()[-1].endswith(".py"):
            text = f"no backslash at the end of the line: {name}=... in line {line} is a variable of the shell, no argument"
            yield Violation(job.lines.start(line - 1) + indent, text, why=CUT_WHY, cure=CUT_CURE)
            return


NO_NAME = lazy_regex(r"[+~]{0,2}([A-Za-z_]\w*(?:[.@/-]\w+)+|[A-Za-z_]\w*(?<=\w)(?:[.@/-]\w+)*)(\+?=)")
NO_NAME_WHY = "A name has letters, digits and _ only: the shell looks for a program that is called like the whole word."


def no_assignments(job: JobDescription) -> Iterator[Violation]:
    """Report ``model.size=3`` and ``data-dir=/x`` where a command begins: the rest of the command above, or no name of a variable."""
    if job.kind != "script":
        return
    before = 0
    for call in job.calls:
        found = NO_NAME.match(call.written)
        if found is None or call.in_substitution or call.prefix or "$" in call.written[: found.end()]:
            continue
        if re.fullmatch(r"[A-Za-z_]\w*", found[1]) and call.written[:1] not in "+~":
            continue
        line, column = job.lines.place(call.offset)
        if job.lines.line(line)[: column - 1].strip() or line == before + 1:
            before = line if line == before + 1 else before
            continue  # it stands behind a word, or belongs to the line above, which is reported
        before = line
        above = job.lines.line(line - 1) if line > 1 else ""
        commands = {job.lines.place(c.starter.offset)[0] for c in job.work_calls}
        cut = line > 1 and bool(above.strip()) and _start_of(job, line - 1) in commands
        head = "no backslash at the end of the line: " if cut else ""
        start = job.lines.start(line - 1) + len(above) - len(above.lstrip()) if cut else call.offset
        text = f"{head}'{call.written[:40]}'{f' in line {line}' if cut else ''} runs as a command of its own"
        yield Violation(
            start, text, why=CUT_WHY if cut else NO_NAME_WHY, cure=CUT_CURE if cut else "a name with _ instead"
        )


MOUNT = lazy_regex(r"(?:/|\$\{?\w+\}?)[^\s:,]*:/[^\s:,]*(?::\w+)?(?:,\S*)?\Z")
MOUNT_OPTIONS = lazy_regex(r"(?:--container-mounts|--bind|-B|--mount)(?:=|\Z)")


def split_mounts(job: JobDescription) -> Iterator[Violation]:
    """Report a list of mounts that a blank cuts: its second part is taken for the program or the image."""
    if job.kind != "script":
        return
    for call in job.calls:
        for index, (arg, following) in enumerate(call.pairs()):
            option = MOUNT_OPTIONS.match(arg.text)
            rest = call.args[index + 2 :] if option and not option[0].endswith("=") else call.args[index + 1 :]
            value = arg if option and option[0].endswith("=") else following
            if option is None or value is None or value.quoted:
                continue
            second = rest[0].text if rest else _program_behind(job, call)
            mounts = value.text[option.end() :] if value is arg else value.text
            if MOUNT.match(mounts.rstrip(",")) and second and (MOUNT.match(second) or value.text.endswith(",")):
                text = f"the list of mounts ends at the blank: {second[:40]} is taken for the {'program' if 'container' in arg.text else 'image'}"
                yield Violation(
                    value.offset, text, why="The blank ends the option's value.", cure="no blanks in the list"
                )
                return


def _program_behind(job: JobDescription, call: ProgramCall) -> str:
    """Return the program that a command starts."""
    return next((c.written for c in job.calls if c.under and c.under[-1].offset == call.offset), "")


# --------------------------------------------------------------------------- a blank behind =

EXPORT_BLANK = lazy_regex(
    r"(?m)^[ \t]*(?:export|readonly|declare[ \t]+-x)[ \t]+([A-Za-z_]\w*)=[ \t]+(?![#;&|<>)\\]|[A-Za-z_]\w*(?:\[\w*\])?\+?=)(\S[^\n;#]*)"
)
PLAIN_BLANK = lazy_regex(
    r"(?m)^[ \t]*([A-Za-z_]\w*)=[ \t]+(?![#;&|<>)\\])(\"[^\"\n]*\"|'[^'\n]*'|\$\([^\n]*\)|\$\{?[\w!#]+\}?|`[^`\n]+`|[\w.-]+)[ \t]*;?[ \t]*(?:#.*)?$"
)
BLANK_VALUE_WHY = "The value ends at the blank: the variable is empty, and the rest is another word."
KNOWN_PROGRAMS = {
    "python", "python3", "bash", "sh", "srun", "torchrun", "accelerate", "deepspeed", "make", "read", "exec", "env", "time", "nohup", "wandb", "ls",
    "pytest", "jupyter", "command", "cmake", "pip", "conda", "ray", "mpirun", "tox", "date", "sort", "node", "npm", "R", "Rscript",
}  # fmt: skip


def blank_value(job: JobDescription) -> Iterator[Violation]:
    """Report ``export NAME= value``, which exports an empty variable, and ``NAME= value`` of a value that is no program."""
    if job.kind != "script":
        return
    exports = {a.offset for a in job.assignments}
    for found in EXPORT_BLANK.finditer(job.text):
        if not job.in_comment(found.start(1)) and found.start(1) in exports:
            text = f"a blank follows {found[1]}=: its value is empty, and {found[2].strip()[:40]} is another word"
            yield Violation(found.start(1), text, why=BLANK_VALUE_WHY, cure=f"{found[1]}={found[2].strip()[:40]}")
    yield from _blank_before(job)
    prefixes = {a.offset: c for c in job.calls for a in c.prefix if not a.value}
    later = {u.name: u.offset for u in job.uses}
    for found in PLAIN_BLANK.finditer(job.text):
        call = prefixes.get(found.start(1))
        word = found[2]
        if call is None or call.args or call.in_substitution or found[1] == "IFS":
            continue
        own = later.get(found[1], -1) > found.end()
        odd = re.fullmatch(r"\d+(?:\.\d+)?|[Tt]rue|[Ff]alse|TRUE|FALSE|yes|no|on|off", word)
        if odd and re.fullmatch(r"\d.*|true|false", word):
            continue  # `stray` and the shell's own true
        if odd or (own and word not in KNOWN_PROGRAMS and not word.endswith((".sh", ".py"))):
            text = f"a blank follows {found[1]}=: its value is empty, and {word[:40]} runs as a command"
            yield Violation(found.start(1), text, why=BLANK_VALUE_WHY, cure=f"{found[1]}={word[:40]}")


EXPORT_BEFORE = lazy_regex(
    r"(?m)^[ \t]*(?:export|readonly|local|declare(?:[ \t]+-\w+)?)[ \t]+([A-Za-z_]\w*)[ \t]+=(?![=~ \t])(\"|'|\$|`)"
)


def _blank_before(job: JobDescription) -> Iterator[Violation]:
    """Report ``export NAME ="value"`` and ``NAME ="value"``; `commands.value_split` has the values without quotes and variables."""
    why = "bash says 'not a valid identifier', or 'command not found', and goes on: the variable is not set."
    names = job.reading.exported | job.reading.named
    for found in EXPORT_BEFORE.finditer(job.text):
        if not job.in_comment(found.start(1)) and found[1] in names:
            text = f"{found[1]} = is no assignment: a blank stands before the ="
            yield Violation(found.start(1), text, why=why, cure=f"{found[1]}=... without blanks")
    for call in job.calls:
        first = call.args[0] if call.args else None
        if first is None or call.in_substitution or not re.fullmatch(r"[A-Za-z_]\w*", call.written):
            continue
        end = call.offset + len(call.written)
        own = call.written.isupper() or call.written in job.used_names
        if (first.quoted or not own) and re.match(r"[ \t]+=(?![=~ \t])\S", job.text[end : end + 40]):
            text = f"{call.written} = is no assignment: a blank stands before the ="
            yield Violation(call.offset, text, why=why, cure=f"{call.written}=... without blanks")


# -------------------------------------------------------------------------------- a missing $

NUMERIC = {
    "node_rank",
    "machine_rank",
    "master_port",
    "main_process_port",
    "nnodes",
    "nproc_per_node",
    "num_machines",
    "num_processes",
}
DOLLAR_WHY = "The shell expands only names with a $: the program gets the name as it is."
SHELL_NAMES = {"RANDOM", "HOSTNAME", "PBS_JOBID", "LSB_JOBID", "LSB_JOB_ID"}


def no_dollar_option(job: JobDescription) -> Iterator[Violation]:
    """Report an option of a launcher whose value is the name of a variable."""
    for launch in job.launches:
        for name in RENDEZVOUS_OPTIONS:
            option = launch.option(name)
            value = option.plain_value if option else ""
            if option is None or not re.fullmatch(r"[A-Za-z_]\w*", value) or _is_open(option.arg):
                continue
            known = value in SLURM_NAMES | SHELL_NAMES or (value in job.reading.named and name in NUMERIC)
            own = value in job.by_name and (name in NUMERIC or value not in {a.value for a in job.by_name[value]})
            if known or own:
                shown = option.written
                yield Violation(
                    option.arg.offset,
                    f"{shown} is the text {value}: the $ is missing",
                    why=DOLLAR_WHY,
                    cure=f"{shown}=${value}",
                )


def _is_open(arg: Argument) -> bool:
    return UNRESOLVED_OPEN in arg.source.text


# ------------------------------------------------------------------------------------- empty values

EMPTY_WHY = "The shell removes an unquoted empty value: the option takes the next word as its value, or the program stops with 'expected one argument'."
EMPTY_CURE = '${NAME:+--option "$NAME"}, which is nothing if NAME is empty'
EMPTY_VALUE = lazy_regex(r"""=(?:""|''|"?\$\{\w+:?-(?:""|'')?\}"?)?[ \t]*(?:#.*|;.*)?$""", re.MULTILINE)
LIST_NAME = lazy_regex(r"(?i)arg|opt|flag|extra|param|cmd|command|config|cfg|setting|override|more|other|add_|kw")
OPTION_BEFORE = lazy_regex(r"(?:\A|\s)(--?[A-Za-z][\w-]*)[ \t]+\$\{?\Z")
VALUE_ENDS = lazy_regex(r"\}?(?=[ \t]*(?:\\?\n|\Z|[;|&)\"'])|[ \t]+\S)")
SHORTEST = 4


def empty_value(job: JobDescription) -> Iterator[Violation]:
    """Report ``--option $NAME`` of a variable whose only value is the empty one."""
    tested = {
        u.name for u in job.uses if u.program in ("[", "[[", "test", "case", "read") or u.operator.startswith(GUARDS)
    }
    for use in job.uses:
        if (
            use.operator
            or use.index
            or use.program in ("echo", "printf")
            or use.in_redirect
            or not _is_empty(job, use.name)
        ):
            continue
        items = job.by_name[use.name]
        inherits = any(re.search(rf"\$\{{{use.name}:?-", a.value) for a in items)
        if (use.name in tested and not inherits) or _is_tested(job, use.name) or use.offset < items[0].offset:
            continue
        before = OPTION_BEFORE.search(job.text[max(0, use.offset - 80) : use.offset])
        end = use.offset + len(use.name)
        if before is None or not VALUE_ENDS.match(job.text, end) or LIST_NAME.search(use.name):
            continue
        if _akin(before[1], use.name):
            text = f"${use.name} is empty: {before[1]} gets no value"
            cure = f'${{{use.name}:+{before[1]} "${use.name}"}}, which is nothing if {use.name} is empty'
            yield Violation(use.offset, text, why=EMPTY_WHY, cure=cure)
            return


def _is_empty(job: JobDescription, name: str) -> bool:
    items = job.by_name.get(name, [])
    if not items or name in job.reading.named or job.placeholders:
        return False
    return all(
        a.items is None
        and not a.under
        and not a.in_function
        and EMPTY_VALUE.match(job.text, a.offset + len(name)) is not None
        for a in items
    )


def _is_tested(job: JobDescription, name: str) -> bool:
    """Return whether a condition looks at the variable, or at whether it is empty."""
    return any(
        u.name == name and (u.program in ("[", "[[", "test", "case") or u.operator.startswith((":+", "+", ":?", "?")))
        for u in job.uses
    )


def _akin(option: str, name: str) -> bool:
    """Return whether an option has the name of the variable: a flag in front of ``$MORE_OPTIONS`` has not."""
    first, second = (re.sub(r"[^a-z0-9]", "", text.lower()) for text in (option, name))
    return (
        first == second or (len(first) >= SHORTEST and first in second) or (len(second) >= SHORTEST and second in first)
    )


ASSIGNED = lazy_regex(r"[A-Za-z_]\w*=")
ASSIGNED_WHY = "Only a shell, and env, read NAME=value in front of a command: here it is taken for the program, which does not exist."
RUNS_NEXT_WORD = lazy_regex(r"\b(?:nohup|exec)[ \t]+\Z")
START_NEXT_WORD = {"srun", "timeout"}
START_BEHIND_OPTIONS = MPI | {"numactl", "nice", "stdbuf", "setsid", "taskset", "singularity", "apptainer"}


def assigned_program(job: JobDescription) -> Iterator[Violation]:
    """Report ``NAME=value`` that srun, mpirun, nohup or a container would start as the program."""
    for call in job.calls:
        outer = call.under[-1] if call.under else None
        line = job.text[max(0, call.offset - 20) : call.offset]
        word, starter = call.written, ""
        if ASSIGNED.match(word) and call.args:
            behind = RUNS_NEXT_WORD.search(line)
            starter = (
                outer.written if outer and outer.program in START_NEXT_WORD else behind[0].strip() if behind else ""
            )
        elif outer and outer.program in START_BEHIND_OPTIONS and len(outer.args) > 1:
            word = outer.args[-1].text
            if ASSIGNED.match(word) and not outer.args[-2].text.startswith("-"):
                starter = outer.written
        if starter:
            name = word.partition("=")[0]
            text, cure = (
                f"{starter} takes {name}=... for the program",
                f"env {name}=..., or the assignment in front of {starter}",
            )
            yield Violation(call.offset, text, why=ASSIGNED_WHY, cure=cure, severity="error")


# --------------------------------------------------------------------- values that only a comment sets


def _counted(job: JobDescription, names: Iterable[str]) -> Iterator[str]:
    """Yield names whose only tests compare numbers in ``[ ]``, which fails for an empty value."""
    for name in names:
        tests = [u for u in job.uses if u.name == name and u.program in ("[", "[[", "test", "case")]
        number = re.compile(rf"(?<!\[)\[[ \t]+\"?\$(?:{name}|\{{{name}\}})\"?[ \t]+-(?:eq|ne|gt|lt|ge|le)\b")
        guards = any(u.operator.startswith(GUARDS) for u in job.uses if u.name == name)
        filled = re.compile(rf"-[nz][ \t]+\"?\$\{{?{name}\b")
        lines = [job.line_of(u.offset) for u in tests]
        if tests and not guards and all(number.search(line) and not filled.search(line) for line in lines):
            yield name


COMMENTED = lazy_regex(r"#+\s*(?:export\s+|declare\s+)?([A-Za-z_]\w*)=(?!=)(\S.*|\S?)")
MAY_BE_EMPTY = lazy_regex(
    r"(?i)\w*(?:options?|opts?|args?|flags?|extras?|debug|dry_?run|profil\w*|prefix|suffix|resume\w*)"
)
COMMENTED_LOOP = lazy_regex(r"#+\s*for\s+([A-Za-z_]\w*)\s+in\s")


SWITCHED = lazy_regex(
    r"=\s*[\"']?\s*(?:-{1,2}[A-Za-z]|(?:srun|singularity|apptainer|docker|nsys|ncu|numactl|shifter|time|mpirun|env|(?:\S*/)?(?:rocprof\w*|omniperf|valgrind|perf|vtune|py-spy))\b)"
)


SUFFIX = lazy_regex(r"=[\"']?[_.-]")


def _is_switched_off(job: JobDescription, use: VariableUse, line: int) -> bool:
    """Return whether the comment takes out options or a wrapper that stand as words of their own: ``$CONTAINER python x.py``."""
    alone = re.search(rf"(?:^|[\s\"'=])\$(?:{use.name}|\{{{use.name}\}})(?=[\s\"';\\]|$)", job.line_of(use.offset))
    suffix = re.search(rf"[\w)}}]\$\{{?{use.name}\b", job.line_of(use.offset)) and SUFFIX.search(job.lines.line(line))
    return bool(suffix) or (alone is not None and SWITCHED.search(job.lines.line(line)) is not None)


def set_in_comment(job: JobDescription) -> Iterator[Violation]:
    """Report a variable that only a commented line sets."""
    if job.kind != "script" or not job.is_job or job.sources_files or job.submits or "export" in job.heading:
        return
    commented: dict[str, int] = {}
    for comment in job.reading.comments:
        line = job.lines.place(comment.offset)[0]
        found = COMMENTED.match(comment.text) or COMMENTED_LOOP.match(comment.text)
        if found and not re.search(r"\b(?:sbatch|qsub|bash|sh|export it|e\.g\.|usage)\b", comment.text):
            commented.setdefault(found[1], line)
    guarded, said = guarded_names(job) - set(_counted(job, commented)), set[str]()
    for use in job.uses if commented else ():
        name = use.name
        if name not in commented or name in guarded | said or use.in_function or use.program in ("echo", "printf"):
            continue
        if _is_switched_off(job, use, commented[name]):
            continue
        if re.fullmatch(r"\w+_(?:HOME|ROOT)", name) and any(c.program in ("module", "ml") for c in job.calls):
            continue  # modules set names of this form
        if (
            job.has(name)
            or name in job.reading.exported
            or USUAL_OUTSIDE.fullmatch(name)
            or MAY_BE_EMPTY.fullmatch(name)
        ):
            continue
        if set_by_module(job, name) or re.search(rf"(?m)^[^#\n]*\b{name}=|(?i:#.*--export\S*{name})", job.text):
            continue
        said.add(name)
        text = f"${name} is never set: line {commented[name]}, which sets it, is a comment"
        yield Violation(use.offset, text, cure="take out the # of that line, or the use")
