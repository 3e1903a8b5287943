"""Rules for texts that reach a program with the signs of the shell in them: braces, backslashes, and names that nothing expands."""

from __future__ import annotations

import re
from collections.abc import Iterator

from allranks.analysis.lint.command_options import CONTAINERS, PYTHON, REMOTE_SHELLS, SHELLS
from allranks.analysis.lint.job import JobDescription
from allranks.analysis.lint.records import VariableUse, Violation
from allranks.analysis.lint.rules.dataflow import PRINTING
from allranks.analysis.lint.rules.mismatched_names import idle_variables
from allranks.analysis.lint.rules.quoting import QUOTED_CURE, QUOTED_WHY, quoted_documents
from allranks.utils.text import lazy_regex

# --------------------------------------------------------------------------------- braces around $

BRACES_WHY = "The shell knows ${NAME}: in {$NAME} the braces are ordinary characters, and become part of the text."
OTHER_LANGUAGES = PRINTING | {"awk", "gawk", "sed", "jq", "perl", "grep", "curl", "date", "parallel"}


def braces_around(job: JobDescription) -> Iterator[Violation]:
    """Report ``out/{$NAME}`` where ``out/${NAME}`` was meant."""
    for use in job.uses if job.kind == "script" else ():
        found = _in_braces(job, use)
        if found is None or use.program in OTHER_LANGUAGES:
            continue
        before, after = found
        path = (
            re.search(r"[\w./$}-][/_.-]\Z|=\Z|/\Z", before)
            or re.match(r"[/_.-]\w|/", after)
            or (not before.strip() and re.match(r"/", after))
        )
        if path and not _in_other_language(job, use):
            text = f"the braces of {{${use.name}}} become part of the text"
            yield Violation(use.offset, text, why=BRACES_WHY, cure=f"${{{use.name}}}")
            return


def _in_braces(job: JobDescription, use: VariableUse) -> tuple[str, str] | None:
    """Return what stands around ``{$NAME}`` or ``{${NAME}}`` in its word; None if it is not one."""
    line, column = job.line_of(use.offset), job.lines.place(use.offset)[1] - 1
    found = next(
        (
            m
            for m in re.finditer(rf"(?<![$\\{{\w])\{{\$(?:{use.name}|\{{{use.name}\}})\}}", line)
            if m.start() <= column <= m.end()
        ),
        None,
    )
    if found is None:
        return None
    before, after = re.split(r"[\s\"']", line[: found.start()])[-1], re.split(r"[\s\"']", line[found.end() :])[0]
    return (before, after) if "[" not in before and "{" not in re.sub(r"\$\{[^}]*\}", "", before) else None


def _in_other_language(job: JobDescription, use: VariableUse) -> bool:
    """Return whether the line is one of a text for another program: Python, or JSON."""
    line = job.line_of(use.offset)
    return re.search(r"\bf\"|\bprint\(|\"\s*:|:\s*\{\$|\bimport\b|\\\\|\{\"", line) is not None


CLOSING_WHY = "A } without its { is an ordinary character, and becomes part of the text."


def closing_brace(job: JobDescription) -> Iterator[Violation]:
    """Report ``out/$NAME}/x``."""
    for use in job.uses if job.kind == "script" else ():
        if use.program in OTHER_LANGUAGES or use.operator:
            continue
        line, column = job.line_of(use.offset), job.lines.place(use.offset)[1] - 1
        word = re.compile(rf"(?<!\S)[^\s{{}}`'()]*\$({use.name})\}}[^\s{{}}`'()]*(?=\s|$)")
        found = next((m for m in word.finditer(line) if m.start() <= column <= m.end()), None)
        if found and "{" not in line and line.count("}") == 1 and not _in_other_language(job, use):
            text = f"the }} behind ${use.name} becomes part of the text"
            yield Violation(use.offset, text, why=CLOSING_WHY, cure=f"${{{use.name}}}")
            return


TWO_CLOSING = lazy_regex(
    r"(?<![\w{}])[A-Za-z_]\w*=[\"']?[^\s{}()`\"']*\$\{[A-Za-z_]\w*(?:\[[^\]{}]*\])?\}(\})[\"']?(?=[ \t]*(?:$|[;#]))",
    re.MULTILINE,
)


def two_closing_braces(job: JobDescription) -> Iterator[Violation]:
    """Report ``NAME=${LIST[0]}}``."""
    for found in TWO_CLOSING.finditer(job.code) if job.kind == "script" else ():
        item = next((a for a in job.assignments if a.offset == found.start()), None)
        line = job.line_of(found.start())
        if item is not None and line.count("}") == line.count("{") + 1 and item.name in job.used_names:
            yield Violation(found.start(1), f"the second }} becomes part of {item.name}", why=CLOSING_WHY, cure="one }")
            return


# ------------------------------------------------------------------------------- behind a backslash

OWN = {"cd", "source", ".", "conda", "mamba", "module", "ml", "cp", "mv", "rm", "mkdir", "ln", "tar", "rsync", "cat", "ls", "touch", "unzip", "scontrol", "pip",
       "chmod", "pushd", "head", "tail", "nvidia-smi", "which", "test", "git"}  # fmt: skip
ESCAPED = lazy_regex(r"\\\$\{?([A-Za-z_]\w*)")
OUTSIDE = lazy_regex(
    r"(?:SLURM|PBS|LSB)_\w+|HOME|USER|TMPDIR|SCRATCH|WORK|PWD|PROJECT|STORE|HPCVAULT|WORKDIR|PATH|LD_LIBRARY_PATH|PYTHONPATH|CONDA_PREFIX"
)
MOST_ESCAPED = 0.5


def escaped(job: JobDescription) -> Iterator[Violation]:
    """Report ``cd \\$WORK/x`` and ``export DIR=\\$WORK/x`` in a script that is no template."""
    if job.kind != "script" or not job.text.startswith("#!") or job.source.text != job.text:
        return  # in a here-document the writing shell removes the backslash
    code = job.code
    places = list(ESCAPED.finditer(code))
    free = len(re.findall(r"\$\{?[A-Za-z_]", code)) - len(places)
    for call in job.calls:
        if call.program not in OWN or call.under or call.in_substitution or any(a.text == "-c" for a in call.args):
            continue
        for arg in call.args:
            found = re.search(r"(?<!\\)\$\{?([A-Za-z_]\w*)", arg.source.text)
            if not found or not (job.has(found[1]) or OUTSIDE.fullmatch(found[1])):
                continue
            at = arg.source.where(found.start())
            if job.text[at - 1 : at] == "\\" and free >= len(places) * MOST_ESCAPED and not _written_text(job, at):
                text = f"\\${found[1]} is not expanded: {call.written} gets the name"
                yield Violation(at, text, why=QUOTED_WHY, cure=f"${found[1]} without the backslash")
                return
    for item in job.assignments:
        found = ESCAPED.match(job.text, item.offset + len(item.name) + 1) or re.compile(
            r"\"\\\$\{?([A-Za-z_]\w*)"
        ).match(job.text, item.offset + len(item.name) + 1)
        known = found and (job.has(found[1]) or OUTSIDE.fullmatch(found[1])) and found[1] != item.name
        if (
            found
            and known
            and item.exported
            and not item.under
            and free >= len(places) * MOST_ESCAPED
            and not re.search(r"(?<![-\w])eval\b", code)
        ):
            text = f"\\${found[1]} is not expanded: {item.name} gets the name"
            yield Violation(item.offset, text, why=QUOTED_WHY, cure=f"${found[1]} without the backslash")
            return


def _written_text(job: JobDescription, place: int) -> bool:
    """Return whether the place is in a here-document, or in a text that another shell gets."""
    return any(
        len(b.at) and b.where(0) <= place <= b.where(len(b.text) - 1)
        for b in [*job.reading.files.values(), *job.reading.submitted]
    )


# --------------------------------------------------------------------------------- names in a text

JSON_WHY = (
    "Between single quotes $ is an ordinary character: the program reads the name of the variable, and not its value."
)
JSON_NAME = lazy_regex(r"[:\[,][ \t]*\"?[\w./-]*\$(?:\{([A-Za-z_]\w*)\}|([A-Za-z_]\w*))")


def json_in_quotes(job: JobDescription) -> Iterator[Violation]:
    """Report ``--config '{"lr": $LR}'`` where the script sets LR."""
    for call in job.work_calls:
        if any(c.program in REMOTE_SHELLS | SHELLS for c in call.under):
            continue
        for arg in call.args:
            text = arg.source.text
            place = arg.source.where(0) if len(arg.source.at) else 0
            found = JSON_NAME.search(text) if text.lstrip().startswith(("{", "[")) else None
            name = (found[1] or found[2]) if found else ""
            if found and job.has(name) and job.text[place - 1 : place] == "'":
                message = f"${name} in single quotes is not expanded: {call.written} gets the name"
                yield Violation(arg.source.where(found.start()), message, why=JSON_WHY, cure=QUOTED_CURE)
                return


DOCUMENT_WHY = "A quoted mark, <<'EOF', turns off the expansion of the whole text, and no reader of data expands it."
DOCUMENT = r"[ \t]*(?:cat|tee)\b(?P<words>[^\n]*)"
DATA_FILE = lazy_regex(r"(?:>|\btee\b)[ \t]*[\"']?[^\s\"'|;&]*\.(?:ya?ml|json|ini|toml|cfg|conf|txt)[\"']?(?:\s|\Z)")


def own_names_in_documents(job: JobDescription) -> Iterator[Violation]:
    """Report a file of data with a variable of the script, which a quoted here-document writes."""
    if job.kind != "script" or re.search(r"\b(?:envsubst|sed|perl|jinja2?)\b|(?<![-\w])eval\b", job.text):
        return
    for document in quoted_documents(job, DOCUMENT):
        body = job.text[document.start : document.end]
        for found in (
            re.finditer(r"(?<![\\$])\$(?:\{([A-Za-z_]\w*)\}|([A-Za-z_]\w*))", body)
            if DATA_FILE.search(document.head[0].strip())
            else ()
        ):
            name = found[1] or found[2]
            own = [a for a in job.by_name.get(name, []) if not a.under and a.offset < document.start]
            if own and "```" not in body:
                text = f"the file gets the text {found[0]}: the here-document's mark is quoted"
                cure = f"<<{document.mark} without quotes"
                yield Violation(document.start + found.start(), text, why=DOCUMENT_WHY, cure=cure)
                return


PERCENT_WHY = "The shell expands $NAME and ${NAME} only: {NAME} is text, and all runs use one name."


def name_in_braces(job: JobDescription) -> Iterator[Violation]:
    """Report ``runs/lr_{LR}`` of a program's option beside ``$LR``, which Python alone would format."""
    for call in job.work_calls:
        if any(c.program in REMOTE_SHELLS for c in call.under):
            continue
        for arg in call.args:
            for found in re.finditer(r"(?<![${\\])\{([A-Za-z_]\w*)\}", arg.source.text):
                looped = found[1] in job.reading.named and re.search(rf"\bfor[ \t]+{found[1]}[ \t]+in\b", job.code)
                if re.fullmatch(r"(?:--?[\w-]+=)?\{\w+\}", arg.source.text):
                    continue  # `quoting.names_as_text`
                line = job.line_of(arg.source.where(found.start()))
                composed = re.search(
                    rf"\$[\w{{}}./-]*/\{{{found[1]}\}}", line
                )  # a path of the shell, and no text for Python
                unused = found[1].isupper() or found[1] not in job.used_names or composed
                if (
                    (job.has(found[1]) or looped)
                    and unused
                    and len(found[1]) > 1
                    and "{" + found[1] + "}" in job.line_of(arg.source.where(found.start()))
                ):
                    message = f"{found[0]} is text: the value of {found[1]} is meant"
                    yield Violation(arg.source.where(found.start()), message, why=PERCENT_WHY, cure=f"${{{found[1]}}}")
                    return


# ------------------------------------------------------------------------- a program in a variable

PATH_WHY = (
    "Without the $ the shell looks for the program in PATH and runs the one that it finds there, with other packages."
)
OWN_PROGRAM = lazy_regex(r"\S*/bin/(python|torchrun|accelerate|deepspeed|mpirun|mpiexec)[\d.]*")
GIVES_PYTHON = lazy_regex(r"\b(?:python|conda|torch|env)", re.IGNORECASE)


def bare_program(job: JobDescription) -> Iterator[Violation]:
    """Report ``python x.py`` below ``python=/envs/a/bin/python``, which nothing uses."""
    if job.kind != "script" or job.sources_files or job.has("PATH"):
        return
    for item in idle_variables(job):
        found = OWN_PROGRAM.fullmatch(item.value)
        if found is None:
            continue
        own = [c for c in job.calls if not c.in_substitution]
        set_up = any(
            c.program in ("source", ".", "conda", "mamba", "eval", "spack")
            or (c.program in ("module", "ml") and GIVES_PYTHON.search(" ".join(a.text for a in c.args)))
            for c in own
        )
        bare = re.compile(rf"{found[1]}[\d.]*")
        call = next((c for c in own if c.offset > item.offset and bare.fullmatch(c.written)), None)
        named = re.sub(r"[^a-z]", "", item.name.lower())
        if (
            call is None
            or set_up
            or not (named == found[1] or named in ("py", "interpreter", "pythonbin", "pythonexe"))
        ):
            continue
        if any(c.program in CONTAINERS for c in call.under):
            continue
        line = job.lines.place(item.offset)[0]
        text = (
            f"{call.written} is the program of PATH: {item.name} of line {line}, which nothing uses, was probably meant"
        )
        yield Violation(call.offset, text, why=PATH_WHY, cure=f"${item.name}", severity="warning")
        return


# ------------------------------------------------------------------------------- names of processes

NUMBERS_WHY = "Without $ it is the name and not the value of the variable: the command takes numbers only, and does nothing but report an error."
OF_NUMBERS = {"kill": "a process", "wait": "a process", "sleep": "a time", "exit": "a number", "return": "a number"}


def process_names(job: JobDescription) -> Iterator[Violation]:
    """Report ``kill SERVER_PID`` and ``exit RC``, where the script sets that variable."""
    for call in job.calls if job.kind == "script" else ():
        if call.written not in OF_NUMBERS or any(c.program in REMOTE_SHELLS for c in call.under):
            continue
        before = ""
        for arg in call.args:
            text, before, behind = arg.text, arg.text, before
            if behind in ("-s", "-n", "--signal") or not re.fullmatch(r"[A-Za-z_]\w*", text) or not job.has(text):
                continue
            if job.text[arg.offset : arg.offset + len(text) + 1].strip("\"'")[: len(text)] == text:
                message = f"{call.written} {text}: the $ is missing, and {text} is not {OF_NUMBERS[call.written]}"
                yield Violation(arg.offset, message, why=NUMBERS_WHY, cure=f"{call.written} ${text}")
                break


PATH_OF_NAME = lazy_regex(r"([A-Z][A-Z0-9_]{2,})(/[^\s]*)")
FOLDER_WHY = "Without the $ this is a folder of that name in the current one, which is not there."
TAKES_PATHS = {
    "tee",
    "cp",
    "mv",
    "rsync",
    "mkdir",
    "cd",
    "tar",
    "rm",
    "ls",
    "source",
    ".",
    "bash",
    "python",
    "python3",
    "cat",
}


def name_as_folder(job: JobDescription) -> Iterator[Violation]:
    """Report ``tee LOG_DIR/out.txt`` in a script that sets LOG_DIR to a path."""
    if job.kind != "script":
        return
    for call in job.calls:
        if call.in_substitution:
            continue
        words = [(r.target, call.offset) for r in call.redirects]
        if call.program in TAKES_PATHS or PYTHON.match(call.program):
            words += [(a.source.text, a.source.where(0)) for a in call.args if a.source.text]
        for word, place in words:
            found = PATH_OF_NAME.fullmatch(word)
            items = job.by_name.get(found[1], []) if found else []
            paths = [
                a for a in items if re.search(r"[/$]", a.value) and not re.search(rf"(?:\A|/){a.name}/?\Z", a.value)
            ]
            written = found and re.search(rf"(?<![\w$/{{.-]){found[1]}/", job.line_of(place))
            if not (found and paths and written) or len(paths) != len(items) or job.has_folder(found[1]):
                continue
            if not re.search(
                rf"\bmkdir[^\n]*[ /]{found[1]}\b|\b(?:clone|ln|tar|unzip)\b[^\n]*\b{found[1]}\b", job.code
            ):
                text = f"{found[1]} is a text here, and no variable: the $ is missing"
                yield Violation(place, text, why=FOLDER_WHY, cure=f"${found[1]}{found[2]}")
                return


LOOP_OVER = lazy_regex(r"(?m)^[ \t]*for[ \t]+([A-Za-z_]\w{2,})[ \t]+in\b")
LOOP_BODY = 3000  # characters
LOOP_WHY = "Without the $ it is the same text in every run of the loop."


def name_of_loop(job: JobDescription) -> Iterator[Violation]:
    """Report ``rm -r $TMPDIR/part`` in a loop over ``part`` that has ``$TMPDIR/$part`` too."""
    for loop in LOOP_OVER.finditer(job.code) if job.kind == "script" else ():
        name = loop[1]
        body = re.split(r"(?m)^[ \t]*done\b", job.code[loop.end() : loop.end() + LOOP_BODY], maxsplit=1)[0]
        for found in re.finditer(
            rf"(?<![\w/.$}}-])((?:[\w./-]*\$\{{?\w+\}}?|[\w.-]+)/)\$(?:{name}\b|\{{{name}\}})", body
        ):
            plain = re.search(rf"(?<![\w/.$}}-]){re.escape(found[1])}{name}(?=[\s\"']|\Z)", body)
            if plain is not None:
                text = f"{name} in {plain[0]} is a text, and not the loop's variable: the $ is missing"
                yield Violation(
                    loop.end() + plain.start(), text, why=LOOP_WHY, cure=f"{found[1]}${name}", severity="warning"
                )
                break
