"""Rules for conditions, loops and arrays that do something else than meant, and for commands out of place."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise

from allranks.analysis.lint.command_options import LAUNCHERS, PYTHON
from allranks.analysis.lint.job import JobDescription
from allranks.analysis.lint.records import Argument, Assignment, ProgramCall, Violation
from allranks.analysis.lint.shell_tokens import UNRESOLVED_OPEN
from allranks.utils.text import lazy_regex

# ----------------------------------------------------------- conditions that always have one result

NEVER_WHY = "The condition does not depend on the run: one of its branches is never taken."
NUMBER_WHY = "[ ] compares integers only: it stops with 'integer expression expected', and the condition is false."
TEXT_ORDER_WHY = "In [[ ]], > and < compare texts: 9 is greater than 10."
REGEX_WHY = "Quoted parts of the pattern behind =~ are ordinary text: . * ^ $ | match only themselves."
NUMERIC_TESTS = {"-eq", "-ne", "-gt", "-lt", "-ge", "-le"}
ORDER = {">": "-gt", "<": "-lt"}
TESTS = ("[", "[[", "test")


def constant(job: JobDescription) -> Iterator[Violation]:
    """Report comparisons whose result is fixed."""
    if job.work_calls:
        yield from _folders(job)
    if job.kind != "script" or not (job.is_job or job.text.startswith("#!")):
        return
    for call in job.calls:
        if call.program not in TESTS:
            continue
        words = [a for a in call.args if a.text not in ("]", "]]")]
        for number, (left, sign, right) in enumerate(zip(words, words[1:], words[2:], strict=False)):
            if number and words[number - 1].text in (*NUMERIC_TESTS, "=", "==", "!=", "=~"):
                continue
            found = (
                _numeric(job, call, left, sign, right)
                or _same_texts(job, call, left, sign, right)
                or _pattern_as_text(job, call, left, sign, right)
            )
            if found:
                yield found
                break
        if (
            len(words) == 1
            and words[0].text in ("false", "False", "FALSE", "0", "no")
            and _written_in(job, call, words[0])
        ):
            text = f"[ {words[0].text} ] is true: a word that is not empty is"
            yield Violation(call.offset, text, why=NEVER_WHY, cure="if false; then, or compare it with a value")
        yield from _name_for_value(job, call, words)
    yield from _regex(job)
    yield from _order(job)


BETWEEN_TESTS = {"-a", "-o", "!", "(", "&&", "||"}


def _name_for_value(job: JobDescription, call: ProgramCall, words: list[Argument]) -> Iterator[Violation]:
    """Report ``-z NAME``, alone or as a part of a longer condition."""
    for number, (sign, name) in enumerate(pairwise(words)):
        first = (
            number == 0
            or words[number - 1].text in BETWEEN_TESTS
            or OR_AND.search(job.text, max(0, sign.offset - 20), sign.offset)
        )
        known = job.has(name.text) or name.text in job.used_names or SHOUTED.fullmatch(name.text)
        if sign.text in ("-z", "-n") and not sign.quoted and first and known and _written_in(job, call, name):
            text = f"{sign.text} {name.text} tests the text {name.text}, not its value: the $ is missing"
            yield Violation(name.offset, text, why=NEVER_WHY, cure=f'{sign.text} "${name.text}"')
            return


OR_AND = lazy_regex(r"(?:\|\||&&)[ \t]*(?:![ \t]*)?\(?[ \t]*\Z")
SHOUTED = lazy_regex(r"[A-Z][A-Z0-9]*_[A-Z0-9_]+|[A-Z]{3,}")


def _is_literal(job: JobDescription, arg: Argument) -> bool:
    """Return whether the word is written here as it is, and is not the value of a variable."""
    text = arg.source.text
    place = arg.source.where(0)
    return (
        bool(text)
        and UNRESOLVED_OPEN not in text
        and job.text[place : place + len(text)] == text
        and job.lines.place(place) == job.lines.place(arg.source.where(len(text) - 1) - len(text) + 1)
    )


def _written_in(job: JobDescription, call: ProgramCall, arg: Argument) -> bool:
    """Return whether a literal word stands in the condition itself."""
    return (
        _is_literal(job, arg) and 0 <= arg.source.where(0) - call.offset < LONGEST and arg.source.where(0) > call.offset
    )


LONGEST = 200


def _numeric(
    job: JobDescription, call: ProgramCall, left: Argument, sign: Argument, right: Argument
) -> Violation | None:
    if sign.text not in NUMERIC_TESTS or sign.quoted:
        return None
    for arg in (left, right):
        if not _written_in(job, call, arg):
            continue
        if re.fullmatch(r"-?\d+\.\d+|-?\d+[eE]-?\d+", arg.text):
            return Violation(arg.source.where(0), f"{sign.text} compares integers, and {arg.text} is none", why=NUMBER_WHY,
                             cure='[ "$(echo "$a > 1.5" | bc)" = 1 ], or integers')  # fmt: skip
        if call.program != "[[" and re.fullmatch(r"[A-Za-z][\w.-]*", arg.text):
            named = job.has(arg.text)
            cure = f'"${arg.text}"' if named else "= and != compare texts"
            return Violation(
                arg.source.where(0),
                f"{sign.text} compares integers, and {arg.text} is a text",
                why=NUMBER_WHY,
                cure=cure,
            )
    return None


def _same_texts(
    job: JobDescription, call: ProgramCall, left: Argument, sign: Argument, right: Argument
) -> Violation | None:
    """Report ``[ NAME = value ]`` of a variable whose $ is missing."""
    if sign.text not in ("=", "==", "!=") or not re.fullmatch(r"[A-Za-z_]\w*", left.text):
        return None
    shouted = re.fullmatch(r"[A-Z][A-Z0-9_]{2,}", left.text) is not None
    if (
        not _written_in(job, call, left)
        or not _written_in(job, call, right)
        or not (shouted or (job.has(left.text) and not left.quoted))
    ):
        return None
    if left.text == right.text:
        return None
    text = f"{left.text} is compared as a text: the $ is missing, and the condition is always {'true' if sign.text == '!=' else 'false'}"
    return Violation(left.source.where(0), text, why=NEVER_WHY, cure=f'"${left.text}"')


PATTERN_WHY = (
    "Only [[ ]] compares with a pattern, and only with one that is not quoted: here the * is an ordinary character."
)
WRITTEN_WORD = lazy_regex(r"\"([^\"\n]*)\"(?=[\s;])|'([^'\n]*)'(?=[\s;])|([^\s;\"'$`]+)(?=[\s;])")
NAME_PATTERN = lazy_regex(r"[\w./-]*[A-Za-z]{2}[\w./-]*\*|\*[\w./-]*[A-Za-z]{2}[\w./-]*\*?")


def _pattern_as_text(
    job: JobDescription, call: ProgramCall, left: Argument, sign: Argument, right: Argument
) -> Violation | None:
    """Report a pattern with ``*`` in ``[ ]``, or in quotes, which is compared as a text."""
    start = len(job.text[: left.offset].rstrip('"${'))
    variable = re.match(r"\"?\$\{?([A-Za-z_]\w*)\}?\"?[ \t]", job.text[start : start + 80])
    written = WRITTEN_WORD.match(job.text, right.offset)
    if sign.text not in ("=", "==", "!=") or variable is None or written is None or call.in_function:
        return None
    quoted, name = written[3] is None, variable[1]
    text = written[1] or written[2] or written[3] or ""
    if not NAME_PATTERN.fullmatch(text) or (call.program == "[[" and not quoted):
        return None
    # A loop or an array over files that do not exist has the pattern itself as its value.
    if name in job.reading.named or any("*" in a.value for a in job.by_name.get(name, ())):
        return None
    truth = "true" if sign.text == "!=" else "false"
    said = f"{text} is compared as a text, not as a pattern: the comparison is always {truth}"
    return Violation(right.offset, said, why=PATTERN_WHY, cure=f"[[ ${name} {sign.text} {text} ]]")


QUOTED_PATTERN = lazy_regex(
    r"\[\[[^\n]*?=~[ \t]*([\"'])(\^[^\n\"']*|[^\n\"']*(?:\.\*|\.\+|\$|\]\+|\]\*))\1[ \t]*(?:\]\]|&&|\|\|)"
)
TEXT_ORDER = lazy_regex(r"\[\[[ \t]+\"?(\$\{?#?\w+(?:\[@\])?\}?)\"?[ \t]*([<>])[ \t]*([1-9]\d*)[ \t]+(?:\]\]|&&|\|\|)")


def _regex(job: JobDescription) -> Iterator[Violation]:
    for found in QUOTED_PATTERN.finditer(job.text):
        pattern = found[2]
        if job.in_comment(found.start(1)) or (
            pattern.endswith("$") and not pattern.startswith("^") and ".*" not in pattern and found[1] == '"'
        ):
            continue
        if found[1] == '"' and re.search(r"\$\w|\$\{", pattern):
            continue
        text = f"the pattern {found[1]}{pattern}{found[1]} is quoted: it is compared as a plain text"
        yield Violation(found.start(1), text, why=REGEX_WHY, cure=f"=~ {pattern}")


def _order(job: JobDescription) -> Iterator[Violation]:
    for found in TEXT_ORDER.finditer(job.text):
        if not job.in_comment(found.start()):
            text = f"{found[1]} {found[2]} {found[3]} in [[ ]] compares texts, not numbers"
            cure = f"{ORDER[found[2]]}, or (( ... {found[2]} {found[3]} ))"
            # Every whole number above 1 also stands behind it as a text.
            severity = "note" if found[3] == "1" else None
            yield Violation(found.start(1), text, why=TEXT_ORDER_WHY, cure=cure, severity=severity)


FOLDER_LOOP = lazy_regex(r"(?m)^[ \t]*for[ \t]+(\w+)[ \t]+in[ \t]+[^\s;#]*\*/[ \t]*(?:;|\n|#)")


def _folders(job: JobDescription) -> Iterator[Violation]:
    """Report a folder of ``*/``, whose name ends in /, that is compared with a name without /."""
    for found in FOLDER_LOOP.finditer(job.text):
        name = found[1]
        if job.has(name) or job.in_comment(found.start(1)):
            continue
        test = re.compile(rf"\[\[?[ \t]+\"?\$\{{?{name}\}}?\"?[ \t]+(=|==|!=)[ \t]+([\"']?)([\w.-]+)\2[ \t]+\]").search(
            job.text, found.end()
        )
        if (
            test
            and len(re.findall(rf"(?m)^[ \t]*for[ \t]+{name}\b", job.text)) == 1
            and not job.in_comment(test.start())
        ):
            truth = "true" if test[1] == "!=" else "false"
            text = f"${name} is a path that ends in /: the comparison with {test[3]} is always {truth}"
            yield Violation(test.start(), text, why=NEVER_WHY, cure=f'[ "$(basename "${name}")" {test[1]} {test[3]} ]')


# ------------------------------------------------------------------------------------- out of place

PLACE_WHY = "The shell reads a script from top to bottom: a function is unknown above its definition, and the command is not found."
RETURN_WHY = (
    "return works only in functions and in sourced files: elsewhere it prints an error, and the script goes on."
)
EXEC_WHY = "exec replaces the shell by the program: nothing below it runs."
LOCAL_WHY = "local works only in functions: elsewhere it prints an error, and the variable is not set."
DEFINES = lazy_regex(
    r"(?m)^[ \t]*(?:function[ \t]+([\w-]+)[ \t]*(?:\([ \t]*\))?|([\w-]+)[ \t]*\([ \t]*\))[ \t]*(?:\{|\n[ \t]*\{|$)"
)


def out_of_place(job: JobDescription) -> Iterator[Violation]:
    """Report calls of functions above their definition, ``return`` and ``local`` outside of functions, and commands below exec."""
    if job.kind != "script" or not (job.is_job or job.text.startswith("#!")):
        return
    places: dict[str, int] = {}
    for found in DEFINES.finditer(job.text):
        if not job.in_comment(found.start()):
            places.setdefault(found[1] or found[2], found.start())
    for call in job.calls:
        place = places.get(call.written)
        if place is None or call.offset >= place or call.under or call.in_function or call.in_substitution:
            continue
        if (
            job.sources_files
            or call.branch
            or re.search(rf"\b(?:alias|command|type)\b[^\n]*{re.escape(call.written)}", job.text)
        ):
            continue
        if not any(
            c.written in ("exit", "exec") and c.offset < place for c in job.calls if not c.branch and not c.in_function
        ):
            text = f"{call.written} is called above its definition in line {job.lines.place(place)[0]}"
            yield Violation(call.offset, text, why=PLACE_WHY, cure="move the function up")
            break
    for call in job.calls:
        own = not (call.under or call.in_function or call.in_substitution)
        if call.program == "return" and own and job.is_job and job.source.text.startswith("#!"):
            if not places or all(call.offset < p for p in places.values()) or _outside(job, call.offset, places):
                yield Violation(
                    call.offset, "return outside of a function does not end the script", why=RETURN_WHY, cure="exit"
                )
                break
    for found in re.finditer(r"(?m)^[ \t]*local[ \t]+(?:-\w+[ \t]+)?(\w+)=", job.text):
        item = next((a for a in job.assignments if a.offset == found.start(1)), None)
        if item is not None and not item.in_function and not item.under and not places and job.text.startswith("#!"):
            yield Violation(
                found.start(),
                f"local outside of a function: {item.name} is not set",
                why=LOCAL_WHY,
                cure=f"{item.name}=...",
            )
            break
    yield from _below_exec(job)


def _outside(job: JobDescription, offset: int, places: dict[str, int]) -> bool:
    """Return whether the place is below the end of the last function above it, by the } at the start of a line."""
    above = [p for p in places.values() if p < offset]
    return all(re.search(r"(?m)^\}", job.text[p:offset]) for p in above)


def _below_exec(job: JobDescription) -> Iterator[Violation]:
    for found in re.finditer(r"(?m)^exec[ \t]+(?![<>&\d-])(\S+)", job.text):
        calls = [c for c in job.calls if not (c.in_function or c.in_substitution or c.under) or c.under]
        here = next(
            (
                c
                for c in calls
                if job.lines.place(c.offset)[0] == job.lines.place(found.start())[0] and c.offset > found.start()
            ),
            None,
        )
        if (
            here is None
            or here.branch
            or here.in_loop
            or here.in_function
            or job.in_comment(found.start())
            or here.tested
        ):
            continue
        if (
            here.before in ("&&", "||")
            or here.subshell is not None
            or any(r.operator.startswith("<<") for r in here.redirects)
        ):
            continue
        if here.written.startswith("$") and not any(c.offset > here.offset for c in job.work_calls):
            continue
        later = [c for c in job.work_calls if c.offset > here.offset and here not in c.under and not c.in_function
                 and c.offset != here.offset and job.lines.place(c.offset)[0] > job.lines.place(here.offset)[0]]  # fmt: skip
        later = [
            c
            for c in later
            if not any(p.offset == here.offset for p in c.under)
            and not (c.under and c.under[0].offset < found.start() + 60)
        ]
        if later and not any(
            job.text[found.start() : c.offset].count("\\\n") >= job.text[found.start() : c.offset].count("\n")
            for c in later
        ):
            text = f"exec ends the script: {later[0].written} in line {job.lines.place(later[0].offset)[0]} never runs"
            yield Violation(found.start(), text, why=EXEC_WHY, cure=f"{found[1]} ... without exec")
            return


# --------------------------------------------------------------------------------- loops and arrays

FOR = lazy_regex(r"(?m)^[ \t]*for[ \t]+([A-Za-z_]\w*)[ \t]+in[ \t]+([^\n;#]+?)[ \t]*(?:;|\\?$|#)")
BRACES_WHY = "bash expands {a..b} before variables: the loop runs once, with the text."
BRACES_CURE = 'for i in $(seq 0 "$LAST"); do, or for ((i = 0; i < N; i++)); do'
FIRST_WHY = "$NAME of an array is its first element: the others are never used."
COMMA_WHY = "The comma becomes part of the word, and the program gets it."
SAME_WHY = "Every round runs the same command: nothing that depends on the loop reaches the program."
COUNTERS = lazy_regex(
    r"_+|[ijknxt]|(?:run|trial|rep|repeat|iter|attempt|round|retry|restart|try|time|count|idx|num|step)\w*",
    re.IGNORECASE,
)


def loops(job: JobDescription) -> Iterator[Violation]:
    """Report loops over a text, over the first element of an array, and loops whose variable nothing uses."""
    if job.kind != "script":
        return
    for found in FOR.finditer(job.text):
        if job.in_comment(found.start(1)) or not _is_code(job, found.start(1)):
            continue
        words = found[2].split()
        if (
            "$(" not in re.sub(r"\$\(\(", "", found[2])
            and "eval" not in found[2]
            and re.search(r"\{[^{}]*\$[^{}]*\.\.|\.\.\s*\$", found[2])
            and _is_bash(job)
        ):
            yield Violation(found.start(2), f"{found[2].strip()} is not expanded", why=BRACES_WHY, cure=BRACES_CURE)
        elif (
            len(words) > 1
            and all(re.fullmatch(r"[\w.+-]+,", w) for w in words[:-1])
            and re.fullmatch(r"[\w.+-]+", words[-1])
        ):
            cure = f"for {found[1]} in {' '.join(w.rstrip(',') for w in words)}; do"
            yield Violation(
                found.start(2), f"the commas become part of the words: {words[0]!r}", why=COMMA_WHY, cure=cure
            )
        elif re.match(r"\[\w", words[0]) and re.search(r"\w\]\Z", words[-1]) and len(words) > 1:
            cure = f"for {found[1]} in {found[2].strip('[]')}; do"
            yield Violation(
                found.start(2), f"the brackets become part of the words: {words[0]!r}", why=COMMA_WHY, cure=cure
            )
        else:
            yield from _unused(job, found, words)
    yield from _first_only(job)


def _is_code(job: JobDescription, offset: int) -> bool:
    """Return whether the loop is one of the script, and not of a text that it writes or prints."""
    line = job.lines.place(offset)[0]
    return any(c.in_loop and job.lines.place(c.offset)[0] >= line for c in job.calls)


def _is_bash(job: JobDescription) -> bool:
    return re.match(r"#!.*\b(?:ba|da)?sh\b", job.lines.line(1)) is not None and "zsh" not in job.lines.line(1)


def _unused(job: JobDescription, found: re.Match[str], words: list[str]) -> Iterator[Violation]:
    name = found[1]
    literal = len(words) > 1 and all(re.fullmatch(r"[\w.+/-]+", w) for w in words) and len(set(words)) == len(words)
    files = len(words) == 1 and re.search(r"\*", words[0]) is not None
    if not (literal or files) or COUNTERS.fullmatch(name):
        return
    end = re.compile(r"(?m)^[ \t]*done\b").search(job.text, found.end())
    if end is None or re.search(r"(?m)^[ \t]*(?:for|while|until)\b", job.text[found.end() : end.start()]):
        return
    if _mentions(job.text[found.end() :], name) and not _only_for_logs(job, name, found.end(), end.start()):
        return
    inside = [c for c in job.work if found.end() < c.offset < end.start()]
    whole = [c for c in job.calls if found.end() < c.offset < end.start() and c.in_loop and not c.in_substitution]
    if inside and all(c in inside or c.program in PRINTS or c.under for c in whole):
        yield Violation(
            found.start(1), f"no program in the loop gets ${name}", why=SAME_WHY, cure=f"pass ${name} to the program"
        )


PRINTS = {"echo", "date", "printf", "sleep", "tee", "mkdir"}


def _only_for_logs(job: JobDescription, name: str, start: int, end: int) -> bool:
    """Return whether the loop uses its variable, and what it sets from it, for messages and names of logs only."""
    names, values = {name}, [a for a in job.assignments if start < a.offset < end]
    for item in values:
        if any(re.search(rf"\$\{{?{n}\b", item.value) for n in names):
            if item.exported or item.name.isupper():
                return False
            names.add(item.name)
    inside = [u for u in job.uses if u.name in names and u.offset > start]
    taken = rf"\$\([^()\n]*\$\{{?(?:{'|'.join(map(re.escape, names))})\b"
    if any(re.search(taken, job.line_of(c.offset)) for c in job.work if start < c.offset < end):
        return False  # the program gets a part of it: --name $(basename $file)
    if not inside or any(u.offset > end for u in inside) or any(n in job.reading.exported for n in names):
        return False
    if re.search(r"(?m)^[^#\n]*(?:\bif\b|\[|\bcase\b|\bcontinue\b|\bexport\b|\beval\b)", job.text[start:end]):
        return False
    return all(u.in_redirect or u.program in PRINTS | {"=", "basename", "dirname", "cut", "awk", "sed"} for u in inside)


def _mentions(text: str, name: str) -> bool:
    """Return whether a text uses a variable: expanded, in arithmetic, or assigned."""
    return (
        re.search(rf"\$\{{?[!#]?{name}\b|\(\([^\n]*\b{name}\b|(?<![-\w]){name}(?:\+\+|--|[-+*/%]?=)", text) is not None
    )


def _first_only(job: JobDescription) -> Iterator[Violation]:
    """Report ``$NAME`` of an array in a loop, or as an argument of the program."""
    arrays = {
        name: items
        for name, items in job.by_name.items()
        if all(a.items is not None for a in items) and max(len(a.items or ()) for a in items) > 1
    }
    if not arrays:
        return
    said: set[str] = set()
    for use in job.uses:
        items = arrays.get(use.name)
        if not items or use.index or use.operator or use.name in said | job.reading.named or use.under:
            continue
        if items[0].offset > use.offset or job.text[use.offset - 1 : use.offset] in "#!" or _is_zsh(job):
            continue
        started = PYTHON.match(use.program) is not None or use.program in LAUNCHERS
        if use.program == "for" or started:
            said.add(use.name)
            count = len(items[0].items or ())
            text = f"${use.name} is the first of the {count} elements of the array"
            yield Violation(use.offset, text, why=FIRST_WHY, cure=f'"${{{use.name}[@]}}"')


def _is_zsh(job: JobDescription) -> bool:
    return "zsh" in job.lines.line(1)


# --------------------------------------------------------------------------------- array tasks

OUT_OF_RANGE_WHY = "An element that does not exist is empty: the option gets no value, or takes the next word."
OUT_OF_RANGE_CURE = "#SBATCH --array=0-<number of elements - 1>"
TASK = r"(?:\$\{?)?SLURM_ARRAY_TASK_ID\}?"
INDEX = lazy_regex(rf"\[(?:\$\(\()?\s*{TASK}\s*(?:([-+])\s*(\d{{1,4}}))?\s*(?:\)\))?\]")


def array_range(value: str | None) -> tuple[int, int] | None:
    """Return the first and the last number of ``--array=0-9,12%4``; None if it is not literal."""
    text = re.sub(r"%\d+\Z", "", (value or "").strip("[]\"'"))
    if not re.fullmatch(r"\d{1,7}(?:-\d{1,7}(?::\d{1,5})?)?(?:,\d{1,7}(?:-\d{1,7}(?::\d{1,5})?)?)*", text):
        return None
    low, high = [], []
    for part in text.split(","):
        bounds, _, step = part.partition(":")
        first, _, last = bounds.partition("-")
        start, end = int(first), int(last or first)
        if end < start or (step and int(step) == 0):
            return None
        low.append(start)
        high.append(start + (end - start) // int(step or 1) * int(step or 1))
    return min(low), max(high)


FRACTION_WHY = "The shell calculates with whole numbers only: a decimal point in $(( )) is a syntax error, and the line is not executed."
ARITHMETIC = lazy_regex(r"\$\(\(([^()\n;#]*)\)\)")
FRACTION = lazy_regex(r"(?<![\w.$])\d*\.\d+(?![\w.])")


def fractions(job: JobDescription) -> Iterator[Violation]:
    """Report a number with a decimal point in ``$(( ))``, written there or as the value of a variable."""
    if job.kind != "script" or not re.match(r"#!\S*(?:/|env\s+)(?:ba|da)?sh\b", job.lines.line(1)):
        return
    for found in ARITHMETIC.finditer(job.text):
        if job.in_comment(found.start()) or "'" in job.line_of(found.start()).split("$((")[0]:
            continue  # the text may be one for awk or Python
        number = FRACTION.search(found[1])
        values = {name: {a.value for a in job.by_name.get(name, ())} for name in re.findall(r"[A-Za-z_]\w*", found[1])}
        name = next((n for n, own in values.items() if own and all(FRACTION.fullmatch(v) for v in own)), None)
        what = number[0] if number else f"{name}={min(values[name])}" if name else None
        if what:
            text = f"$(( )) calculates with whole numbers: {what} is a syntax error there"
            yield Violation(found.start(), text, why=FRACTION_WHY, cure=f'$(echo "{found[1].strip()}" | bc -l)')


def _last_of(job: JobDescription, items: list[Assignment]) -> list[Assignment]:
    """Return the last of several lists of one name, if all of them stand at the start of a line and none adds to another."""
    starts = [job.text[a.offset - 1 : a.offset] in ("", "\n") for a in items]
    adds = any(job.text[a.offset + len(a.name) : a.offset + len(a.name) + 2] != "=(" for a in items)
    plain = all(starts) and not adds and not any(a.under or a.in_function or a.subshell for a in items)
    indented = (
        re.search(r"(?m)^(?:if|for|while|case|until)\b", job.code[items[0].offset : items[-1].offset])
        if items
        else None
    )
    return items[-1:] if plain and not indented else items


def out_of_range(job: JobDescription) -> Iterator[Violation]:
    """Compare the numbers of a job array with the elements of a list that they select."""
    span = array_range(job.heads("array"))
    if span is None or job.submits:
        return
    for use in job.uses:
        items = _last_of(job, job.by_name.get(use.name, []))
        found = INDEX.fullmatch(use.index)
        if not found or len(items) != 1 or items[0].items is None or items[0].offset > use.offset or use.operator:
            continue
        if any(not i.text or UNRESOLVED_OPEN in i.text or re.search(r"[*?{]", i.text) for i in items[0].items):
            continue
        if f"#{use.name}[" in job.text or re.search(r"(?m)^[^#\n]*\bSLURM_ARRAY_TASK_ID=", job.text):
            continue
        shift = int(found[2] or 0) * (-1 if found[1] == "-" else 1)
        count, last = len(items[0].items), span[1] + shift
        if last >= count > 1:
            text = (
                f"task {span[1]} of the array takes element {last} of {use.name}, which has {count} (0 to {count - 1})"
            )
            cure = f"#SBATCH --array={-shift}-{count - 1 - shift}" if shift <= 0 else None
            yield Violation(use.offset, text, cure=cure)
            return


# ------------------------------------------------------------------------ comparisons in conditions

COMPARISON_SIGNS = {"==", "!=", "-eq", "-ne", "-gt", "-lt", "-ge", "-le", "=~"}
COMPARED_WHY = "The shell runs the value as a command; without [ ] it compares nothing, and the condition is false."
ASSIGNED = lazy_regex(
    r"(?m)^[ \t]*(?:if|elif|while)[ \t]+([A-Za-z_]\w*)=([^\s=$`(;][^\s;]*|\"[^\"$`\n]*\")[ \t]*(?:;[ \t]*(?:then|do)\b.*)?$"
)
DOLLAR = lazy_regex(r"(?m)^[ \t]*\$\{?([A-Za-z_]\w*)\}?=(?=[^\s=~])")
LET = lazy_regex(r"(?m)^[ \t]*let[ \t]+([A-Za-z_]\w*)[ \t]+=")


def conditions(job: JobDescription) -> Iterator[Violation]:
    """Report comparisons without brackets, assignments as conditions, and ``$NAME=value``."""
    if job.kind != "script" or not (job.is_job or job.text.startswith("#!")):
        return
    for call in job.calls:
        first = call.args[0].text if call.args else ""
        plain = call.program not in ("[", "[[", "test", "expr", "((", "echo", "let") and not call.in_substitution
        if plain and first in COMPARISON_SIGNS and len(call.args) == 2 and not call.args[0].quoted and not call.under:
            place = call.args[0].offset
            shown = re.search(r"(?:\$\{?\w+\}?|\"[^\"\n]*\")[ \t]+\Z", job.text[max(0, place - 60) : place])
            if shown and re.search(r"(?m)^[ \t]*(?:if|elif|while|until)\b", job.line_of(place)):
                text = f"{shown[0].strip()} {first} ... is a command, not a comparison"
                yield Violation(place, text, why=COMPARED_WHY, cure='if [ "$NAME" = value ]; then')
    for found in ASSIGNED.finditer(job.text):
        if not job.in_comment(found.start(1)) and any(a.offset == found.start(1) for a in job.assignments):
            text = f"{found[1]}={found[2]} is an assignment, which is always true"
            yield Violation(found.start(1), text, why="The branch is always taken, and the variable has another value.",
                            cure=f'[ "${found[1]}" = {found[2]} ]')  # fmt: skip
    starts = {c.offset for c in job.calls if not c.under}
    for found in DOLLAR.finditer(job.text):
        start = found.start() + len(found[0]) - len(found[0].lstrip())
        if not job.in_comment(start) and starts & {start, start + 1, start + 2}:
            text = f"${found[1]}=... runs as a command: an assignment begins with the name, without $"
            yield Violation(
                start,
                text,
                why="The shell expands $NAME first, and looks for a program of that name.",
                cure=f"{found[1]}=...",
            )
    for found in LET.finditer(job.text):
        if not job.in_comment(found.start(1)):
            yield Violation(found.start(1), "let takes each word as an expression of its own: = alone is a syntax error",
                            why="The variable is not set.", cure=f"{found[1]}=$((...))")  # fmt: skip
