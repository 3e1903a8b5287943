"""Rules for texts that another program reads: programs for awk and sed, scripts for ``bash -c`` and ssh, commands in variables, patterns in quotes."""

from __future__ import annotations

import re
from collections.abc import Iterator

from allranks.analysis.lint.command_options import REMOTE_SHELLS, SHELLS
from allranks.analysis.lint.job import JobDescription
from allranks.analysis.lint.records import Assignment, ProgramCall, Violation
from allranks.analysis.lint.rules.quoting import EXPANDS_ITSELF, assignment_at
from allranks.utils.text import lazy_regex

# ------------------------------------------------------------------------------ commands in variables

OPERATORS_WHY = "The shell looks for operators before it inserts values: those in a value are ordinary words, which the program gets as arguments."
OPERATORS_CURE = "write the operator behind the variable, or use a function instead of the variable"
PREFIX_WHY = "The shell looks for NAME=value in front of a command before it inserts values: it looks for a program of this name, and finds none."
OPERATOR = lazy_regex(r"&&|\|\|?|;|[12&]?>>?(?:&[12])?|[12&]?>>?[\w./$-]\S*")
PREFIX = lazy_regex(r"[A-Z_][A-Z0-9_]*=\S*")


def operators_in_values(job: JobDescription) -> Iterator[Violation]:
    """Report ``$CMD`` whose value has ``&&``, a pipe or a redirection, or begins with ``NAME=value``."""
    if job.kind != "script":
        return
    for call in job.calls:
        outer = {call.program, *(c.program for c in call.under)}
        if outer & (EXPANDS_ITSELF | SHELLS | REMOTE_SHELLS) or call.in_substitution:
            continue
        if not call.under and PREFIX.fullmatch(call.written) and call.args:
            item = assignment_at(job, call.offset)
            place = _bare_use(job, item) if item else None
            if item is not None and place is not None:
                text = f"{call.written} in the value of {item.name} is taken for the name of a program"
                cure = f'"env {call.written} ..." as the value, or eval'
                yield Violation(place, text, why=PREFIX_WHY, cure=cure)
                return
        for arg in call.args:
            word = arg.text
            item = assignment_at(job, arg.source.where(0)) if OPERATOR.fullmatch(word) and not arg.quoted else None
            place = _bare_use(job, item) if item else None
            if item is not None and place is not None:
                text = f"{word} in the value of {item.name} is an argument of {call.written}, and no operator"
                yield Violation(place, text, why=OPERATORS_WHY, cure=OPERATORS_CURE)
                return


def _bare_use(job: JobDescription, item: Assignment) -> int | None:
    """Return where the script has the variable below, without quotes, in a command that is not for another shell."""
    use = re.compile(rf"(?<![\"'\\w=])\$(?:\{{{item.name}\}}|{item.name}\b)(?![\"'/.\w])")
    for found in use.finditer(job.text, item.offset + len(item.source.text)):
        before = job.line_of(found.start())[: job.lines.place(found.start())[1] - 1]
        if not job.in_comment(found.start()) and not job.in_quotes(found.start()) and not FOR_OTHERS.search(before):
            return found.start()
    return None


FOR_OTHERS = lazy_regex(r"\beval\b|<<|\b(?:ba|z)?sh\s+-\w*c\b|\b(?:echo|ssh|printf|log)\b")


# ------------------------------------------------------------------------------- programs of awk and sed

SINGLE_WHY = "Between single quotes $ is an ordinary character: the program gets the name, and not the value."
AWK_WHY = "awk has variables of its own: $NAME is there a field of the line, here the whole line, whatever the variable of the shell is."
IN_SINGLE = lazy_regex(r"(?<!\\)\$(?:\{([A-Za-z_]\w*)\}|([A-Za-z_]\w*))")
SCRIPT_FILE = lazy_regex(r"\.(?:sh|bash|sbatch|slurm|job|pbs|batch|sub|tmpl|template|j2)\b|\$0\b")
FROM_SHELL = lazy_regex(r"SLURM_[A-Z_]*[A-Z]|PBS_[A-Z_]*[A-Z]|LSB_[A-Z_]*[A-Z]")


def shell_names_in_programs(job: JobDescription) -> Iterator[Violation]:
    """Report variables of the shell in the single-quoted program of awk or sed."""
    for call in job.calls:
        if call.program not in ("awk", "gawk", "mawk", "sed") or any(c.program in REMOTE_SHELLS for c in call.under):
            continue
        for arg in call.args:
            place = arg.source.where(0) if len(arg.source.at) else 0
            if "$" not in arg.source.text or job.text[place - 1 : place] != "'":
                continue
            closing = job.text.find("'", place)
            text = job.text[place:closing] if closing > 0 else ""
            for found in IN_SINGLE.finditer(text):
                name = found[1] or found[2]
                known = FROM_SHELL.match(name)
                name = known[0] if known else name
                if not (known or _is_set_above(job, name, call)):
                    continue
                if text.strip() == found[0]:
                    continue  # the program itself may be in the variable
                if call.program == "sed" and _is_replaced(job, call, text, found):
                    why, cure = SINGLE_WHY, f'sed "...${{{name}}}..." with double quotes'
                elif call.program != "sed" and found[1] is None and not _is_of_awk(call, text, name):
                    why, cure = AWK_WHY, f"awk -v n=\"${name}\" '... n ...'"
                else:
                    continue
                message = f"{found[0]} in single quotes is not the variable {name} of the shell"
                yield Violation(place + found.start(), message, why=why, cure=cure)
                return


def _is_set_above(job: JobDescription, name: str, call: ProgramCall) -> bool:
    own = any(a.offset < call.offset and not a.under for a in job.by_name.get(name, ()))
    return own or (name in job.reading.named and len(name) > 1)


def _is_of_awk(call: ProgramCall, text: str, name: str) -> bool:
    """Return whether the awk program has a variable of this name: assigned in it, or given with -v."""
    own = re.search(
        rf"\b{name}[ \t]*(?:[-+*/%]?=(?!=)|\+\+|--|[ \t]in\b)|(?:\+\+|--){name}\b|\bfor[ \t]*\({name}\b", text
    )
    return own is not None or any(a.text.startswith((f"{name}=", f"-v{name}=")) for a in call.args)


def _is_replaced(job: JobDescription, call: ProgramCall, text: str, found: re.Match[str]) -> bool:
    """Return whether the name stands in what sed inserts, or in the number of a line."""
    if SCRIPT_FILE.search(" ".join(a.text for a in call.args)) or SCRIPT_FILE.search(
        " ".join(r.target for r in call.redirects)
    ):
        return False  # it writes a script, which is to have the variable
    address = re.match(r"\$\{?\w+\}?(?:,\S*)?(?:[pdq!]|\{)?\Z", text[found.start() :])
    if found.start() == 0:
        return address is not None
    command = re.match(r"(?:[^sy]*[;/\d,$ ])?s([^\w\s\\])", text)
    if command is None or command.end() > found.start():
        return False
    before = re.sub(r"\\.", "xx", text[command.end() : found.start()])
    return before.count(command[1]) == 1 and text[found.end() :].count(command[1]) >= 1


# ----------------------------------------------------------------------------- scripts for other shells

ONE_WORD = {
    "cd", "source", ".", "export", "module", "ml", "conda", "mamba", "mkdir", "pip", "pip3", "torchrun", "accelerate", "deepspeed", "rm", "cp",
    "mv", "git", "make", "srun", "mpirun", "python", "python3", "bash", "sh", "ls", "cat", "nvidia-smi", "set", "ulimit", "unset", "wget",
    "curl", "tar", "pkill", "kill", "ray", "julia", "Rscript", "nohup", "echo",
}  # fmt: skip
FIRST_WORD_WHY = "The shell takes only the first word behind -c as its script, and the others as $0, $1, ...: the command runs without its arguments."
FIRST_WORD_CURE = "quotes around the whole script: bash -c 'cd /folder && python train.py'"
SSH_WHY = "ssh joins its arguments to one text, without their quotes, and the other host's shell splits it again: its bash -c gets only the first word."
SSH_CURE = "ssh host 'cd /folder && python train.py' without bash -c, or quotes around bash -c '...' as a whole"
MOST_WHY = "$@ is one word for each argument of the script: the first ends the text of -c, and the others become $0, $1, ... of the inner shell."
MOST_CURE = 'bash -c \'python train.py "$@"\' _ "$@", or $* in the text'
ALL_IN_TEXT = lazy_regex(
    r"\b(?:ba|z)?sh[ \t]+(?:-[a-z]+[ \t]+)*-[a-z]*c[ \t]+(?:\\\n\s*)?\"((?:[^\"\\]|\\[\s\S])*?)(?<!\\)(\$@|\$\{@(?::[^}]*)?\}|\"\$@)"
)


def split_scripts(job: JobDescription) -> Iterator[Violation]:
    """Report ``bash -c cd /folder``, ``ssh host bash -c 'cd /folder'`` and ``bash -c "... $@"``."""
    for call in job.calls:
        if call.program not in SHELLS or call.in_substitution:
            continue
        words = list(call.args)
        flag = next((n for n, a in enumerate(words) if re.fullmatch(r"-[a-z]*c", a.text)), None)
        if flag is None or flag + 1 >= len(words) or any(not a.text.startswith("-") for a in words[:flag]):
            continue
        script, rest = words[flag + 1], words[flag + 2 :]
        if rest and not script.quoted and script.text in ONE_WORD and job.text[script.offset] not in "'\"":
            if not (script.text in ("echo", "ls", "nvidia-smi", "python", "make") and rest[0].text.startswith("#")):
                text = f"{call.written} {words[flag].text} runs '{script.text}' alone: '{rest[0].text}' is not part of its script"
                yield Violation(script.offset, text, why=FIRST_WORD_WHY, cure=FIRST_WORD_CURE)
                return
        remote = call.under and call.under[-1].program == "ssh" and not job.in_quotes(call.offset)
        first = re.match(r"\s*(\S+)[ \t]+(?![;&|])\S", script.source.text)
        if remote and first and first[1] in ONE_WORD and job.text[script.source.where(0) - 1] in "'\"":
            text = f"the other host runs {call.written} -c {first[1]}: ssh drops the quotes around the rest"
            yield Violation(script.offset, text, why=SSH_WHY, cure=SSH_CURE)
            return
    for found in ALL_IN_TEXT.finditer(job.text):
        if not found[1].strip() or job.in_comment(found.start()) or "\n\n" in found[1]:
            continue
        place = found.start(2)
        text = "$@ in the text of bash -c: only the first argument of the script becomes part of it"
        yield Violation(place, text, why=MOST_WHY, cure=MOST_CURE)
        return


# ------------------------------------------------------------------------------------ patterns in quotes

GLOB_WHY = "In quotes * is an ordinary character: the program looks for a file of this very name."
GLOB_CURE = 'end the quotes in front of the pattern: "$DIR"/*.tar'
TAKES_FILES = {"cp", "mv", "rm", "ls", "cat", "chmod", "ln", "head", "tail", "wc", "du"}


def quoted_patterns(job: JobDescription) -> Iterator[Violation]:
    """Report ``cp "data/*.tar"``, whose pattern no shell expands."""
    for call in job.calls:
        if (
            call.program not in TAKES_FILES
            or call.in_substitution
            or any(c.program in REMOTE_SHELLS for c in call.under)
        ):
            continue
        if any(c.program in ("docker", "podman", "kubectl", "find", "xargs") for c in call.under):
            continue
        for arg in call.args:
            if arg.text.startswith("-") or not len(arg.source.at):
                continue
            star = re.search(r"(?:^|/)[\w.${}-]*\*[\w.*-]*\Z", arg.text)
            opening = job.text[arg.offset : arg.offset + 1]
            end = job.text.find(opening, arg.offset + 1) if star and opening and opening in "'\"" else -1
            inside = job.text[arg.offset + 1 : end] if end > 0 else ""
            if re.search(r"\*[\w.*-]*\Z", inside) and re.match(r"[\s;&|)]|\Z", job.text[end + 1 : end + 2]):
                text = f"* in quotes is not expanded: {call.written} looks for a file called {inside}"
                yield Violation(arg.offset, text, why=GLOB_WHY, cure=GLOB_CURE)
                return


TESTED_WHY = "[[ ]] and quotes expand no pattern: the test looks for one file with a * in its name, and is false."
TESTED_CURE = 'compgen -G "$DIR/*.pt" > /dev/null'
TESTED_PATTERN = lazy_regex(
    r"\[\[[ \t]+(?:![ \t]+)?-[edfsL][ \t]+((?:[^\s\]\"'*$]|\"[^\"\n]*\"|\$\{?\w+\}?)*\*[^\s\]\"'(|]*)[ \t]+(?:\]\]|&&|\|\|)"
    r"|\[[ \t]+(?:![ \t]+)?-[edfsL][ \t]+[\"']([^\"'\n$`]*(?:\$\{?\w+\}?[^\"'\n$`]*)*/?\*[\w./-]*)[\"'][ \t]+\]"
)


def tested_patterns(job: JobDescription) -> Iterator[Violation]:
    """Report ``[[ -f data/*.pt ]]`` and ``[ -f "data/*.pt" ]``."""
    for found in TESTED_PATTERN.finditer(job.text) if job.kind == "script" else ():
        if not job.in_comment(found.start()):
            text = f"{found[1] or found[2]} is not expanded here: the test looks for a file of this very name"
            yield Violation(found.start(), text, why=TESTED_WHY, cure=TESTED_CURE)
            return
