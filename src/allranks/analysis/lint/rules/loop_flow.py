"""Rules for loops whose passes change the shell: folders that add up, one variable for two loops, and lists that become texts."""

from __future__ import annotations

import re
from collections.abc import Iterator

from allranks.analysis.lint.job import JobDescription
from allranks.analysis.lint.records import Assignment, Violation
from allranks.utils.text import lazy_regex

LOOP = lazy_regex(
    r"(?m)^(?P<indent>[ \t]*)for[ \t]+(?P<name>[A-Za-z_]\w*)[ \t]+in[ \t]+(?P<words>[^\n;]+?)[ \t]*(?:;[ \t]*do\b|\n[ \t]*do\b)(?P<body>.*?)^(?P=indent)done\b",
    re.DOTALL,
)
STAYS_WHY = "cd changes the folder of the whole script: the second pass looks for its folder inside of the first one, and does not find it."


def folder_stays(job: JobDescription) -> Iterator[Violation]:
    """Report a loop that enters a relative folder in each pass and never leaves it."""
    for found in LOOP.finditer(job.code) if job.kind == "script" else ():
        body, name, start = found["body"], found["name"], found.start("body")
        entered = re.search(
            rf"(?m)^[ \t]*cd[ \t]+([\"']?(?:\./)?(?:[\w.-]+/)*(?:[\w.-]*\$(?:\{{{name}\}}|{name}\b)[\w.-]*)(?:/[\w.$-]*)*[\"']?)[ \t]*(?:;|&&|$)",
            body,
        )
        if (
            entered is None
            or re.search(
                r"\b(?:pushd|popd)\b|\bcd[ \t]*(?:$|[;&\n-]|\.\.|\"?\$|~|/)", body.replace(entered[0], "\n", 1)
            )
            or entered[1].strip("\"'").startswith("..")
        ):
            continue
        words = found["words"].strip()
        if re.search(r"[\"'`$(]|^[\"']?/|~|(?:^|\s)/", words) and not re.fullmatch(
            r"[\"']?\$\{\w+\[[@*]\]\}[\"']?|\$\w+", words
        ):
            continue
        if (
            not _is_relative(job, words)
            or len(re.findall(r"\bcd\b", body)) > 1
            or re.search(r"(?m)^[ \t]*\(|\([ \t]*$|\([ \t]*cd\b", body)
        ):
            continue
        text = f"cd {entered[1]} in a loop that never goes back: the second pass does not find its folder"
        yield Violation(
            start + entered.start(1) - 3,
            text,
            why=STAYS_WHY,
            cure=f"( cd {entered[1]} && ... ), or cd - at the end of the pass",
        )
        return


def _is_relative(job: JobDescription, words: str) -> bool:
    """Return whether the loop runs over several names of relative folders."""
    name = re.search(r"\$\{?(\w+)", words)
    if name is None:
        return len(words.split()) > 1 or "*" in words or "{" in words
    items = job.by_name.get(name[1], [])
    if len(items) != 1:
        return False
    parts = [i.text for i in items[0].items] if items[0].items is not None else items[0].value.split()
    return len(parts) > 1 and not any(re.search(r"^[/~$]|[$`(]", p) for p in parts)


SAME_WHY = "The inner loop changes the variable of the outer one: behind it the outer loop's value is gone."
INNER = lazy_regex(r"(?m)^[ \t]*for[ \t]+([A-Za-z_]\w*)[ \t]+in\b|\bfor[ \t]*\(\([ \t]*([A-Za-z_]\w*)[ \t]*=")


def same_variable(job: JobDescription) -> Iterator[Violation]:
    """Report two nested loops with one variable."""
    for found in LOOP.finditer(job.code) if job.kind == "script" else ():
        for inner in INNER.finditer(found["body"]):
            if (inner[1] or inner[2]) == found["name"] and not re.search(
                r"(?m)^[ \t]*(?:cat|tee)\b.*<<|\bawk\b", found["body"]
            ):
                if not _needs_own(found["name"], found["body"], inner):
                    continue
                place = found.start("body") + (inner.start(1) if inner[1] else inner.start(2))
                line = job.lines.place(found.start())[0]
                text = f"the loop in line {line} has the variable {found['name']}, too"
                yield Violation(place, text, why=SAME_WHY, cure="another name")
                return


def _needs_own(name: str, body: str, inner: re.Match[str]) -> bool:
    """Return whether the outer loop uses the variable behind the inner loop, or does not use its own value at all."""
    if re.search(r"\bdone\b", body.partition("\n")[0]):
        return False  # the outer loop is in one line
    depth, end = 0, len(body)
    for word in re.compile(r"(?<![\w$-])(for|while|until|select|done)(?![\w=-])").finditer(body, inner.start()):
        depth += -1 if word[1] == "done" else 1
        if depth == 0:
            end = word.end()
            break
    used = re.compile(rf"\$\{{?{name}\b")
    return used.search(body, end) is not None or used.search(body, 0, inner.start()) is None


# -------------------------------------------------------------------------------------- lists and texts

TEXT_WHY = "NAME=text changes the first element of a list: the words of the text stay one element, and the program gets them as one argument."


def list_as_text(job: JobDescription) -> Iterator[Violation]:
    """Report ``ARGS="$ARGS --lr 1"`` of a list, which is used as ``"${ARGS[@]}"``."""
    if job.kind != "script":
        return
    for name, items in job.by_name.items():
        if not items or items[0].items is None or not re.search(rf"\$\{{{name}\[[@*]\]", job.code):
            continue
        for found in re.finditer(rf"(?m)(?:^|;)[ \t]*{name}=\"\$(?:{name}\b|\{{{name}\}})[ \t][^\"\n]*\"", job.code):
            place = found.end() - len(found[0].lstrip("; \t"))
            if not re.compile(rf"\$\{{{name}\[[@*]\]").search(job.code, found.end()):
                continue  # used as one text from here on
            if place > items[0].offset and any(a.offset == place and a.items is None for a in items):
                text = f"{name} is a list: the text becomes one element of it"
                yield Violation(place, text, why=TEXT_WHY, cure=f"{name}+=(...)")
                return


# ------------------------------------------------------------------------- values that replace each other

REPLACED_WHY = "NAME=value replaces the value of the pass before: behind the loop only the last one is left."
PICKS_ONE = lazy_regex(r"(?i)last|latest|newest|final|best|max|current|prev|found|default")
SEVERAL_WORDS = lazy_regex(
    r"\$\(seq[ \t][^()]*\)|`seq[ \t][^`]*`|\{\w+(?:\.\.|,)[^{}]*\}|[\"']?\$\{\w+\[[@*]\]\}[\"']?|[\w./:-]+(?:[ \t]+[\w./:-]+)+"
)
ASSIGNS_OR_TELLS = lazy_regex(
    r"[ \t]*(?:(?:export[ \t]+)?[A-Za-z_]\w*(?:\[[^\]]*\])?\+?=.*|(?:echo|printf)\b[^|>]*|:|(?:\(\(|let[ \t]).*|do|)[ \t;]*"
)
LEAVES_OR_CHOOSES = lazy_regex(r"(?<![\w$-])(?:break|if|case|while|for|until|exit|return)(?![\w=-])|&&|\|\|")


def replaced_in_loop(job: JobDescription) -> Iterator[Violation]:
    """Report ``for i in 1 2; do ARGS="--data $i"; done``, where each pass replaces the value and only the last one is used."""
    for found in LOOP.finditer(job.code) if job.kind == "script" else ():
        body, start = found["body"], found.start("body")
        if not SEVERAL_WORDS.fullmatch(found["words"].strip()) or LEAVES_OR_CHOOSES.search(body):
            continue
        simple = all(ASSIGNS_OR_TELLS.fullmatch(line) for line in body.splitlines())
        for item in job.assignments:
            if start <= item.offset < found.end() and _replaces(job, found, item, simple):
                text = f"each pass of the loop replaces {item.name}: only the value of the last one is used"
                cure = f'{item.name}+=" ..." adds to it'
                yield Violation(item.offset, text, why=REPLACED_WHY, cure=cure)
                return


def _replaces(job: JobDescription, loop: re.Match[str], item: Assignment, simple: bool) -> bool:
    """Return whether an assignment makes a text of the loop's variable, and only commands behind the loop use it."""
    written = job.code[item.offset : job.code.find("\n", item.offset)]
    own = re.compile(rf"\$\{{?{loop['name']}\b")
    if item.items is not None or item.under or item.subshell is not None or not written.startswith(f"{item.name}="):
        return False
    if not own.search(written) or PICKS_ONE.search(item.name) or item.name == loop["name"]:
        return False
    if re.fullmatch(rf"[\"']?\$\{{?{loop['name']}\}}?[\"']?", written[len(item.name) + 1 :].strip(" ;")):
        return False  # takes the last one
    emptied = any(
        a.name == item.name and not a.value.strip() and a.items is None and a.offset < loop.start()
        for a in job.assignments
    )
    inside = [u for u in job.uses if u.name == item.name and loop.start() <= u.offset < loop.end()]
    if any(u.program not in ("echo", "printf") for u in inside) or not (simple or emptied):
        return False
    around = any(o.start() < loop.start() and o.end() > loop.end() for o in LOOP.finditer(job.code, 0, len(job.code)))
    return not around and any(u.name == item.name and u.offset >= loop.end() for u in job.uses)


# ------------------------------------------------------------------------ values of the pass before

EARLIER_WHY = "In the first pass the variable is empty, and in each later one it has the value of the pass before."
TESTED = lazy_regex(
    r"\[\[?[ \t]+[\"']?\$(?:\{(\w+)\}|(\w+))[\"']?[ \t]+(?:==?|!=)[ \t]+([\"']?)([A-Za-z][\w.+-]*)\3(?=[ \t]+(?:\]|&&|\|\|))"
)


def tested_too_early(job: JobDescription) -> Iterator[Violation]:
    """Report ``[ $KIND = a ]`` in a loop that computes KIND only below, from its own variable."""
    for loop in LOOP.finditer(job.code) if job.kind == "script" and not job.sources_files else ():
        start, end = loop.start("body"), loop.end("body")
        for found in TESTED.finditer(job.code, start, end):
            name = found[1] or found[2]
            items = [a for a in job.by_name.get(name, []) if not a.removed]
            inside = items and all(found.end() < a.offset < end for a in items)
            if not inside or name in job.reading.named | job.reading.exported or any(a.under for a in items):
                continue
            computed = all(_depends_on(a, loop["name"], job) for a in items)
            if computed and not any(a.value == found[4] for a in items):
                line = job.lines.place(items[0].offset)[0]
                text = f"${name} is set only below, in line {line}: here it is the value of the pass before"
                yield Violation(found.start(), text, why=EARLIER_WHY, cure=f"set {name} above the condition")
                return


def _depends_on(item: Assignment, name: str, job: JobDescription) -> bool:
    """Return whether a value is computed from the loop's variable."""
    written = job.line_of(item.offset)[job.lines.place(item.offset)[1] - 1 :]
    return re.search(rf"\$\{{?{name}\b", written) is not None and not re.match(
        rf"{item.name}=[\"']?\$\{{?{name}\}}?[\"']?\s*$", written
    )
