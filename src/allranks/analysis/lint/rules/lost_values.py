"""Rules for values that are computed and reach no program, and for arguments that a function does not get."""

from __future__ import annotations

import re
from collections.abc import Iterator

from allranks.analysis.lint.command_options import slurm_option
from allranks.analysis.lint.job import JobDescription
from allranks.analysis.lint.records import ProgramCall, Violation
from allranks.analysis.lint.rules.dataflow import GUARDS, INHERITED, is_only_shown
from allranks.analysis.lint.rules.mismatched_names import idle_variables, plain_name
from allranks.analysis.lint.rules.ports import PORT_NAME, backend, is_torchrun
from allranks.analysis.lint.rules.quoting import quoted_documents
from allranks.analysis.lint.rules.rendezvous import BRACKET_TEST
from allranks.utils.text import lazy_regex

# --------------------------------------------------------------------------------------------- ports

PORT_LOST_WHY = "The launcher takes the port from its option only, and sets MASTER_PORT for its ranks itself: two jobs on one node meet at 29500."
PORT_OPTIONS = ("standalone", "master_port", "main_process_port", "rdzv_endpoint", "config_file")


def port_reaches_nothing(job: JobDescription) -> Iterator[Violation]:
    """Report a port that the script computes and does not pass to its launchers, which use their default."""
    if job.kind != "script" or job.whole_nodes or not job.launches or job.has("PET_MASTER_PORT"):
        return
    kinds = ("torchrun", "torch.distributed.launch", "deepspeed")
    if any(la.kind not in kinds or la.open_ended or la.option(*PORT_OPTIONS) for la in job.launches):
        return
    if any(is_torchrun(la) and backend(la) != "static" for la in job.launches):
        return
    if any(c not in {la.call.starter.offset for la in job.launches} for c in (w.offset for w in job.work)):
        return  # a program without a launcher may read it from the environment
    for item in job.assignments:
        name = item.name
        if item.removed or item.under or item.in_substitution or not PORT_NAME.match(name) or "$" not in item.value:
            continue
        if re.fullmatch(r"\$\{?\d+\}?|\$\{\w+:?-\d*\}", item.value) or _mentioned(job, name):
            continue
        launch = next((la for la in job.launches if la.call.offset > item.offset), None)
        if launch is not None:
            text = f"{name} is computed, but {launch.kind} has no --master_port: it uses 29500"
            severity = "note" if job.is_batch and not job.shared_nodes else "warning"
            yield Violation(item.offset, text, why=PORT_LOST_WHY, cure=f"--master_port=${name}", severity=severity)
            return


def _mentioned(job: JobDescription, name: str) -> bool:
    """Return whether the script uses the value for more than a message."""
    lines = [line for line in job.code.split("\n") if re.search(rf"\$\{{?{name}\b|\(\([^\n]*\b{name}\b", line)]
    return any(not re.match(r"[ \t]*(?:echo|printf)\b(?!.*>)", line) for line in lines)


# ------------------------------------------------------------------------------------- lists of nodes

COMPRESSED_WHY = (
    "Slurm writes the nodes of a job as node[01-04]: what stands between the commas is in general no name of a host."
)
COMPRESSED_CURE = 'scontrol show hostnames "$SLURM_JOB_NODELIST"'
LIST = r"SLURM_(?:JOB_|STEP_)?NODELIST"
NAMES_LIST = lazy_regex(rf"\A\$\{{?{LIST}\}}?\Z")
ASKS_LIST = lazy_regex(
    r"\bscontrol\s+show\s+job\b.*\bNodeList|\bsqueue\b.*(?:%\d*N\b|-O\s*nodelist)", re.DOTALL | re.IGNORECASE
)
EXPANDS = lazy_regex(
    r"\bshow[ \t]+hostname|nodeset|hostlist|expand|python|\\\[|\[\^?\[|perl|slurm_hl2hl|scontrol\s+show\s+hostlist"
)
CUT = r"(?:tr[ \t]+[\"']?,|sed[ \t]+(?:-e[ \t]+)?[\"']s(?P<mark>.),(?P=mark)|cut[ \t]+(?:-f[ \t]*\d+[ \t]+)?-d[ \t]*[\"']?,|awk[ \t]+-F[ \t]*[\"']?,)"
TAKES_APART = (
    r"IFS=[\"']?,[\"']?[ \t]+read\b[^\n<]*<<<[ \t]*[\"']?\$\{?(NAME)\}?",
    r"\$\{(NAME)//?,/",
    r"echo[ \t]+[\"']?\$\{?(NAME)\}?[\"']?[ \t]*\|[ \t]*" + CUT,
)
WRITTEN_PART = lazy_regex(r"\|[ \t]*" + CUT)


READS_ARRAY = lazy_regex(r"\bread\b[^<|;]*\s-\w*a\s+(\w+)")


def list_at_commas(job: JobDescription) -> Iterator[Violation]:
    """Report a compressed list of nodes that is taken apart at its commas."""
    one = job.nodes == 1 and (job.is_batch or not job.multi_node) and "nodes" in job.heading
    if job.kind != "script" or one or BRACKET_TEST.search(job.code):
        return
    names = {
        name
        for name, items in job.by_name.items()
        if items
        and all((NAMES_LIST.match(a.value) or ASKS_LIST.search(a.value)) and not EXPANDS.search(a.value) for a in items)
    }
    names |= {"SLURM_JOB_NODELIST", "SLURM_NODELIST", "SLURM_STEP_NODELIST"} - job.by_name.keys()
    for pattern in TAKES_APART:
        for found in re.finditer(pattern.replace("NAME", "|".join(map(re.escape, sorted(names)))), job.code):
            line = job.line_of(found.start(1))
            array = READS_ARRAY.search(line)
            if array and not any(u.name == array[1] for u in job.uses):
                continue
            if not EXPANDS.search(line) and not re.match(r"\s*(?:export\s+)?\w*(?:ADDR|MASTER)\w*=", line):
                yield Violation(
                    found.start(1),
                    f"${found[1]} is the compressed list, which is node[01-04] and not node01,node02",
                    why=COMPRESSED_WHY,
                    cure=COMPRESSED_CURE,
                    severity="warning",
                )
                return
    for item in job.assignments:
        if ASKS_LIST.search(item.value) and WRITTEN_PART.search(item.value) and not EXPANDS.search(item.value):
            yield Violation(
                item.offset,
                f"{item.name} is cut from the compressed list, which is node[01-04] and not node01,node02",
                why=COMPRESSED_WHY,
                cure=COMPRESSED_CURE,
                severity="warning",
            )
            return


# ----------------------------------------------------------------------------- arguments of functions

FUNCTION = lazy_regex(
    r"(?m)^([ \t]*)(?:function[ \t]+([\w-]+)[ \t]*(?:\(\))?|([\w-]+)[ \t]*\(\))[ \t]*(?:\n[ \t]*)?\{[ \t]*$"
)
TAKES_ANY = lazy_regex(
    r"\bshift\b|\$[@*#]|\$\{[@*#!]|\bset[ \t]+--|\bgetopts\b|\bawk\b|\bperl\b|<<|\b(?:bash|sh)[ \t]+-c\b"
)
ARGUMENTS_WHY = (
    "In a function $1 is its own first argument, not the script's: the option gets no value, or takes the next word."
)


def missing_arguments(job: JobDescription) -> Iterator[Violation]:
    """Report a call of a function with fewer arguments than the function takes for its options."""
    if job.kind != "script" or job.placeholders:
        return
    code = job.code
    for found in FUNCTION.finditer(code):
        name = found[2] or found[3]
        end = re.compile(rf"(?m)^{found[1]}\}}").search(code, found.end())
        if (
            end is None
            or len(re.findall(rf"(?m)^[ \t]*(?:function[ \t]+)?{re.escape(name)}[ \t]*(?:\(\)|\{{)", code)) > 1
        ):
            continue
        body = code[found.end() : end.start()]
        if TAKES_ANY.search(body) or FUNCTION.search(body):
            continue
        needed = _needed(body)
        loops = {m[1] for m in re.finditer(r"\bfor[ \t]+\(*[ \t]*([A-Za-z_]\w*)", code)}
        calls = [c for c in job.calls if c.written == name and not found.start() < c.offset < end.start()]
        if not needed or any(_is_open(c, loops) for c in calls):
            continue
        for call in calls:
            number = min((n for n in needed if n > len(call.args)), default=None)
            if number is not None:
                given = f"{len(call.args)} argument{'s' if len(call.args) != 1 else ''}" if call.args else "no argument"
                line = job.lines.place(found.start())[0]
                text = f"{name} gets {given}, but the function in line {line} uses ${number}"
                yield Violation(call.offset, text, why=ARGUMENTS_WHY, cure=f'{name} ... "$@", or the missing argument')
                return


def _needed(body: str) -> set[int]:
    """Return the arguments that the body uses as the value of an option, or in a name, without a default or test."""
    found: set[int] = set()
    for use in re.finditer(r"\$(?:([1-9])|\{([1-9])\})", body):
        number = int(use[1] or use[2])
        taken = re.search(
            r"(?m)(?:^|[;&]|\blocal|\bdeclare|\breadonly)[ \t]*([A-Za-z_]\w*)=[\"']?\Z", body[: use.start()]
        )
        named = [rf"\$\{{?{taken[1]}\b"] if taken else []
        forms = [rf"\$\{{?{number}\b", *named]
        if any(re.search(rf"\[[^\n]*{f}|\bcase\b[^\n]*{f}", body) for f in forms) or _has_default(body, number, taken):
            return {n for n in found if n < number}
        places = [m.start() for m in re.finditer(named[0], body)] if named else [use.start()]
        if any(
            re.search(r"(?:\s|\A)--?[A-Za-z][\w.-]*(?:=|[ \t]+)[\"']?\Z|[\w/.]=?[\"']?\Z", body[:p]) for p in places
        ):
            found.add(number)
    return found


def _has_default(body: str, number: int, taken: re.Match[str] | None) -> bool:
    names = [str(number), *([taken[1]] if taken else [])]
    return any(re.search(rf"\$\{{{n}(?::?[-=+?])", body) for n in names)


def _is_open(call: ProgramCall, loops: set[str]) -> bool:
    """Return whether the number of its arguments is unknown; the variable of a loop is one word."""
    words = [a for a in call.args if re.sub(r"[${}]", "", a.text) not in loops]
    return any(a.is_open or re.search(r"[@*?{]", a.text) for a in words) or bool(call.under)


# ------------------------------------------------------------------------------- values of functions

FUNCTION_WHY = "The variable has no value outside of the function: the command gets an empty one."


def set_only_inside(job: JobDescription) -> Iterator[Violation]:
    """Report a variable that is local to a function, or set in one that nothing calls, and used outside."""
    if job.kind != "script" or job.sources_files or job.placeholders:
        return
    code, said = job.code, set[str]()
    tested = {u.name for u in job.uses if u.program in ("[", "[[", "test", "case") or u.operator.startswith(GUARDS)}
    for use in job.uses:
        name, own = use.name, job.by_name.get(use.name, [])
        if not own or use.in_function or use.under or name in said | tested | INHERITED | job.reading.named:
            continue
        if not all(a.in_function and not a.under and not a.in_substitution and not a.exported for a in own):
            continue
        said.add(name)
        if is_only_shown(job, name) or re.search(rf"\bexport\b[^\n]*\b{name}\b", code):
            continue
        local = all(re.match(rf"\s*local[ \t]+(?!-\w*g)[^\n;]*\b{name}\b", job.line_of(a.offset)) for a in own)
        around = {_function_around(code, a.offset) for a in own}
        if _function_around(code, use.offset) in around - {None}:
            continue  # the reader has moved a function's body to its call
        uncalled = None not in around and not any(_is_called(code, f) for f in around if f)
        if local or uncalled:
            line = job.lines.place(own[0].offset)[0]
            how = (
                f"local to the function in line {line}"
                if local
                else f"set only in {own and min(f for f in around if f)}, which nothing calls"
            )
            yield Violation(use.offset, f"${name} is empty: it is {how}", why=FUNCTION_WHY)


def _function_around(code: str, offset: int) -> str | None:
    """Return the name of the function whose body has the place."""
    for found in FUNCTION.finditer(code):
        end = re.compile(rf"(?m)^{found[1]}\}}").search(code, found.end())
        if end and found.end() <= offset < end.start():
            return found[2] or found[3]
    return None


def _is_called(code: str, name: str) -> bool:
    """Return whether the script has the function's name in another place than its definition, or runs words of its caller."""
    words = re.findall(rf"(?<![\w-]){re.escape(name)}(?![\w-])", code)
    return (
        len(words) > 1
        or re.search(r"(?m)^[ \t]*(?:eval\b|[\"']?\$(?:@|\{?1\b|\{?\w+\}?[\"']?[ \t]*(?:$|\")))", code) is not None
    )


BLOCKS = lazy_regex(r"(?m)(?:^|[;&|])[ \t]*(?:for|while|until|if|elif|else|fi|case|esac|done|\}|\w+[ \t]*\(\))(?!\w)")
CARRIED = lazy_regex(r"(?i)\w*(?:prev|last|old|dep|jid|job|init|resume|pid|state|cur|seen|first)\w*")
FIRST_WHY = "In the first pass the variable is empty, and in each later one it has the value of the pass before."


def used_before_in_block(job: JobDescription) -> Iterator[Violation]:
    """Report a value that a pass of a loop, or a function, uses before it sets it."""
    if job.kind != "script" or job.sources_files or job.placeholders:
        return
    said: set[str] = set()
    tested = {u.name for u in job.uses if u.program in ("[", "[[", "test", "case") or u.operator.startswith(GUARDS)}
    for use in job.uses:
        name, own = use.name, job.by_name.get(use.name, [])
        if (
            not own
            or use.under
            or not (use.in_loop or use.in_function)
            or use.program in ("echo", "printf", "sbatch", "=")
        ):
            continue
        if name in said | tested | INHERITED | job.reading.named | job.reading.exported or CARRIED.fullmatch(name):
            continue
        said.add(name)
        first = own[0]
        if use.offset > first.offset or any(
            a.in_substitution or a.under or re.search(rf"\$\{{?{name}\b", a.value) for a in own
        ):
            continue
        between = job.code[use.offset : first.offset]
        line = job.lines.place(first.offset)[0]
        if line > job.lines.place(use.offset)[0] and not BLOCKS.search(between) and job.lines.line(line)[:1].isspace():
            yield Violation(use.offset, f"${name} is used before it is set, in line {line}", why=FIRST_WHY)


# ----------------------------------------------------------------- values of the caller, and for jobs

IGNORED_WHY = "What the caller passes is dropped without a message: the program always gets the value in the script."
OF_CALLER = lazy_regex(r"\A\$(?:[1-9]|\{[1-9]\}|\{?OPTARG\}?)\Z")


def option_ignored(job: JobDescription) -> Iterator[Violation]:
    """Report an argument of the script that nothing uses, where the program gets a fixed value for the option of this name."""
    if job.kind != "script" or job.sources_files:
        return
    for idle in idle_variables(job):
        if not OF_CALLER.match(idle.value) or len(job.by_name.get(idle.name, ())) != 1:
            continue
        given: list[tuple[str, str]] = []
        for call in job.work_calls:
            for arg, following in call.pairs():
                word, equals, value = arg.text.partition("=")
                value = value if equals else following.text if following and word.startswith("-") else ""
                if plain_name(word) == plain_name(idle.name) and value and not value.startswith("-"):
                    given.append((word, value))
        if given and not any(re.search(r"[$`]", value) for _, value in given):
            word, value = given[0]
            text = f"{idle.name} has the caller's value, and no command uses it: {word} is always {value}"
            yield Violation(idle.offset, text, why=IGNORED_WHY, cure=f"{word} ${idle.name}")


PARSED = lazy_regex(r"(?m)^[ \t]*(-[-\w |]*)\)[ \t]*(?:export[ \t]+)?(\w+)=[\"']?\$\{?(?:2|OPTARG)\b")
OVERWRITTEN_WHY = "The caller's value is lost: the program never gets what the option says."


def option_overwritten(job: JobDescription) -> Iterator[Violation]:
    """Report an option of the script whose variable every way to its first use sets again."""
    if job.kind != "script" or job.sources_files:
        return
    for found in PARSED.finditer(job.code):
        option, name = found[1].split("|")[0].strip(), found[2]
        end = re.compile(r"(?m)^done\b.*$").search(job.code, found.end())
        if end is None or name in ("OPTIND", "SHIFT"):
            continue
        others = [m for m in PARSED.finditer(job.code) if m[2] == name]
        rest = job.code[end.end() :]
        use = re.search(rf"\$\{{?[#!]?{name}\b|\b(?:unset|local|eval|read)\b[^\n]*\b{name}\b|-v[ \t]+{name}\b", rest)
        before = rest[: use.start()] if use else ""
        place = _set_again(before, name)
        if place is not None and len(others) == 1 and not re.search(r"(?m)^\S*\(\)|^function\b|^exec\b", before):
            line = job.lines.place(end.end() + place)[0]
            text = f"{option} is put into {name}, which line {line} sets again in any case"
            yield Violation(found.start(1), text, why=OVERWRITTEN_WHY, cure=f'[ -z "${name}" ] in front of it')


def _set_again(code: str, name: str) -> int | None:
    """Return where code sets a variable whatever happens: in a line of its own, or in all branches of a ``case``."""
    places = [m.start() for m in re.finditer(rf"(?m)^(?:export[ \t]+)?{name}=", code[: code.rfind("\n") + 1])]
    for block in re.finditer(r"(?ms)^case\b[^\n]*\bin\b(.*?)^esac\b", code):
        parts = [p for p in block[1].split(";;") if p.strip() and p.strip() != "esac"]
        complete = len(re.findall(r"(?m)^[ \t]*\*\)", block[1])) == len(re.findall(r"\bcase\b", block[0]))
        if complete and parts and all(_sets_or_ends(p, name) for p in parts) and re.search(rf"\b{name}=", block[1]):
            places.append(block.start())
    return min(places, default=None)


def _sets_or_ends(part: str, name: str) -> bool:
    """Return whether a branch of a ``case`` sets the variable, or ends the script."""
    if re.search(r"(?:^|[;\s])(?:exit|return)\b", part) and not re.search(r"\bif\b|&&|\|\|", part):
        return True
    sets, tests = len(re.findall(rf"(?<![\w-]){name}=", part)), len(re.findall(r"(?:^|[\s;])if\b", part))
    if tests == 0:
        return sets > 0 and not re.search(rf"(?:&&|\|\|)[ \t]*{name}=", part)
    return tests == 1 and sets > 1 and len(re.findall(r"(?:^|[\s;])else\b", part)) == 1 and "elif" not in part


NAMED_WHY = "--export=NAME passes the value that NAME has in the environment of sbatch: a variable that is not exported is not there."


def named_not_exported(job: JobDescription) -> Iterator[Violation]:
    """Report ``sbatch --export=lr`` of a variable that the script sets and does not export."""
    if job.kind != "script" or re.search(r"\bset\s+-(?:\w*a\w*|o\s+allexport)\b", job.code):
        return
    for call in job.calls:
        for arg, following in call.pairs() if call.program in ("sbatch", "qsub") else ():
            if call.program == "sbatch":
                name, value, follows = slurm_option(arg.text)
                value = value if value is not None else following.text if follows and following else ""
            else:
                name, value = arg.text, following.text if following else ""
            if name not in ("export", "-v"):
                continue
            prefixed = {a.name for a in call.prefix}
            for word in value.split(","):
                own = job.by_name.get(word, [])
                looped = word in job.reading.named and re.search(rf"\bfor[ \t]+{word}[ \t]+in\b", job.code) is not None
                known = word in prefixed | job.reading.exported or any(a.exported for a in own)
                if not (own or looped) or known or word in INHERITED:
                    continue
                option = "--export=" if name == "export" else "-v "
                text = f"{word} is set but not exported: {option}{word} passes no value"
                yield Violation(arg.offset, text, why=NAMED_WHY, cure=f"{option}{word}=${word}")
                return


QUOTED_TEXT = lazy_regex(
    r"(?m)^[^#\n]*?\b(?:sbatch\b[^\n']*--wrap[= \t]|tmux\b[^\n']*[ \t]|screen\b[^\n']*[ \t]|parallel\b[^\n':]*[ \t])'([^'\n]*)'"
)
QUOTED_WHY = "In single quotes this script expands nothing, and the shell that runs the text has only exported variables: the value is empty."


def quoted_for_another_shell(job: JobDescription) -> Iterator[Violation]:
    """Report own variables in the quoted command of ``sbatch --wrap``, ``tmux``, ``screen`` and ``parallel``."""
    if job.kind != "script" or re.search(r"\bset\s+-(?:\w*a\w*|o\s+allexport)\b", job.code):
        return
    for found in QUOTED_TEXT.finditer(job.code):
        for use in re.finditer(r"(?<!\\)\$\{?([A-Za-z_]\w*)", found[1]):
            name = use[1]
            own = [a for a in job.by_name.get(name, []) if not a.under]
            looped = name in job.reading.named and re.search(rf"\bfor[ \t]+{name}[ \t]+in\b", job.code[: found.start()])
            known = name in job.reading.exported | INHERITED or any(a.exported or f"${name}" in a.value for a in own)
            inside = re.search(rf"(?<!\w){name}=|\b(?:for|read)[ \t]+{name}\b", found[1])
            if (own or looped) and not (known or inside or name.startswith("SLURM_")):
                text = f"${name} is set in the script but not exported: it is empty in the shell that runs this text"
                yield Violation(
                    found.start(1) + use.start(), text, why=QUOTED_WHY, cure=f"double quotes; or export {name}"
                )
                break


def quoted_for_ssh(job: JobDescription) -> Iterator[Violation]:
    """Report own variables in a quoted here-document that the shell of another host reads."""
    for document in quoted_documents(job, r"[^#\n]*\bssh\b(?P<words>[^\n|;]*)") if job.kind == "script" else ():
        body = job.text[document.start : document.end]
        if "SendEnv" in document.head["words"]:
            continue
        for use in re.finditer(r"(?<!\\)\$\{?([A-Za-z_]\w*)(?!\w*:?[-=])", body):
            name = use[1]
            own = [a for a in job.by_name.get(name, []) if not a.under and a.offset < document.start]
            looped = name in job.reading.named and re.search(
                rf"\bfor[ \t]+{name}[ \t]+in\b", job.text[: document.start]
            )
            inside = re.search(rf"(?<![\w$]){name}=|\b(?:for|read)\b[^\n]*\b{name}\b|<<", body)
            if (own or looped) and not inside and name not in INHERITED:
                text = f"${name} is expanded by the shell on the other host, where it is not set"
                yield Violation(
                    document.start + use.start(), text, why="ssh passes no variables on.", cure="<<EOF without quotes"
                )
                break


def exported_list(job: JobDescription) -> Iterator[Violation]:
    """Report ``export NAME=(...)`` of a list that the script itself does not use: no program gets it."""
    for item in job.set_values_at_top() if job.kind == "script" else ():
        if item.exported and item.items is not None and item.name not in job.used_names and not job.sources_files:
            why = "A list is not part of the environment: bash passes it to no program."
            text = f"{item.name} is a list, and export passes none on: no program gets it"
            yield Violation(
                item.offset, text, why=why, cure=f"export {item.name}='...' with one text", severity="warning"
            )
            return


CUDA_WHY = "A program only has the exported variables: all of them use the first GPU, or every one."


def devices_not_exported(job: JobDescription) -> Iterator[Violation]:
    """Report ``CUDA_VISIBLE_DEVICES=0; python x.py`` in a script that no batch system runs, which has not exported it before."""
    name = "CUDA_VISIBLE_DEVICES"
    items = job.by_name.get(name, [])
    if job.kind != "script" or job.runs_unattended or job.unknown_settings or not items or not job.work or job.launches:
        return
    if any(a.exported or a.under or a.in_substitution for a in items) or name in job.reading.exported | job.used_names:
        return
    if re.search(r"\bset\s+-(?:\w*a\w*|o\s+allexport)\b|\bSLURM_|\bPBS_", job.code):
        return
    fronts = {a.offset for c in job.calls for a in c.prefix}
    below = [a for a in items if a.offset not in fronts and any(w.offset > a.offset for w in job.work)]
    if below and len(below) == len(items):
        text = f"{name} is set but not exported: no program gets it"
        yield Violation(below[0].offset, text, why=CUDA_WHY, cure=f"export {name}", severity="warning")


def path_of_misspelt(job: JobDescription) -> Iterator[Violation]:
    """Report ``PATH=/x/bin:$PAHT``, which loses what the variable had."""
    for item in job.set_values_at_top() if job.kind == "script" else ():
        if item.name not in ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH"):
            continue
        for found in re.finditer(r"\$\{?([A-Z_]+)\b", job.line_of(item.offset)):
            name = found[1]
            if name != item.name and sorted(name) == sorted(item.name) and not job.has(name):
                text = f"${name} is never set: {item.name} loses the value that it had"
                yield Violation(item.offset, text, cure=f"${item.name}")


OVER_WHY = "The job has only the CPUs that it requests: the threads take turns on them. Slurm sets the variable to what the job has."


def set_over_request(job: JobDescription) -> Iterator[Violation]:
    """Report ``SLURM_CPUS_PER_TASK=20`` in a job that requests fewer, and whose programs take their threads from it."""
    asked = job.number(job.heads("cpus-per-task"))
    items = job.by_name.get("SLURM_CPUS_PER_TASK", [])
    if job.kind != "script" or not asked or len(items) != 1 or not items[0].value.isdecimal() or items[0].under:
        return
    number = int(items[0].value[:6])
    direct = [u for u in job.uses if u.name == "SLURM_CPUS_PER_TASK" and u.offset > items[0].offset]
    direct = [u for u in direct if u.program not in ("=", "export", "echo", "printf", "[", "[[", "test", "srun")]
    if number > asked and job.number(job.heads("ntasks")) in (None, 1) and direct and not job.whole_nodes:
        text = f"SLURM_CPUS_PER_TASK is set to {number}, but the job requests {asked} CPUs per task"
        yield Violation(items[0].offset, text, why=OVER_WHY, cure="remove the line", severity="warning")
