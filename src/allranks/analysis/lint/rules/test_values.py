"""Rules for conditions that have one result whatever the run: a word instead of a comparison, an unquoted variable, a value in another case."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise

from allranks.analysis.lint.job import JobDescription
from allranks.analysis.lint.records import Violation
from allranks.analysis.lint.rules.conditions import NEVER_WHY, NUMERIC_TESTS
from allranks.analysis.lint.shell_tokens import UNRESOLVED_OPEN
from allranks.utils.text import lazy_regex

TEST_START = r"(?m)(?:^|[;&|({]|\b(?:if|elif|while|until|then|do|else|not)\b|!)[ \t]*"
ONE_VALUE = lazy_regex(
    TEST_START + r"(?P<test>(?:\[\[?|test)[ \t]+\"?\$(?:\{(\w+)\}|(\w+))\"?[ \t]*(?:\]\]?|;|&&|\|\||$))"
)
FALSE_WORDS = {"false", "0", "no", "off", "none", "n", "f"}
WORD_WHY = "[ ] with one word is true for every word that is not empty, false and 0 among them."


def tested_word(job: JobDescription) -> Iterator[Violation]:
    """Report ``[ $DEBUG ]`` where the script sets DEBUG=false."""
    if job.kind != "script" or "zsh" in job.lines.line(1):
        return
    for found in ONE_VALUE.finditer(job.code):
        name = found[2] or found[3]
        values = [a for a in job.by_name.get(name, []) if not a.under and not a.in_substitution]
        off = [a for a in values if a.value.lower() in FALSE_WORDS and a.offset < found.start("test")]
        place = found.start("test")
        if off and name not in job.reading.named and not any(a.value == "" for a in values):
            line = job.lines.place(off[-1].offset)[0]
            text = f"[ ${name} ] is true for the value {off[-1].value} of line {line}, too"
            yield Violation(place, text, why=WORD_WHY, cure=f'[ "${name}" = true ]')
            return


NOT_EMPTY = lazy_regex(
    TEST_START + r"(?P<test>(?:\[|test)[ \t]+(?:![ \t]+)?-n[ \t]+(?P<value>\$(?:\{(\w+)\}|(\w+)|[1-9]))[ \t]*(?:\]|$))"
)
EMPTY_WHY = "Without quotes an empty value is no word at all, and [ -n ] is true for its one word, -n."


def unquoted_not_empty(job: JobDescription) -> Iterator[Violation]:
    """Report ``[ -n $NAME ]``, which is true for an empty value, too."""
    if job.kind != "script" or "zsh" in job.lines.line(1):
        return
    for found in NOT_EMPTY.finditer(job.code):
        name = found[3] or found[4] or ""
        values = job.by_name.get(name, []) if name else []
        never_empty = values and all(re.match(r"[\w./-]", a.source.text) for a in values)
        # Within the job these have a value.
        known = re.match(r"(?:SLURM|PBS|LSB)_", name) is not None and job.is_job
        if never_empty or known or name in job.reading.named:
            continue
        text = f"-n {found['value']} without quotes is true for an empty value, too"
        yield Violation(found.start("test"), text, why=EMPTY_WHY, cure=f'[ -n "{found["value"]}" ]')
        return


BARE_WORD = r"(?P<word>\"[\w./-]+\"|'[\w./-]+'|[A-Za-z][\w./-]*)"
OR_WORD = (
    lazy_regex(rf"\[\[[ \t][^\n\]]*?(?:==?|!=|=~)[^\n\]]*?\|\|[ \t]*{BARE_WORD}[ \t]*(?:\]\]|\|\||&&)"),
    lazy_regex(rf"(?<!\[)\[[ \t][^\n\]]*?[ \t](?:==?|!=)[ \t]+[^\n\]]*?[ \t]-o[ \t]+{BARE_WORD}[ \t]+(?:\]|-[ao])"),
)
OR_WHY = "Each side of the or is a condition of its own: a word that is not empty is true, and so is the whole."


def or_word(job: JobDescription) -> Iterator[Violation]:
    """Report ``[[ $A == x || y ]]``, which is always true."""
    for pattern in OR_WORD if job.kind == "script" else ():
        for found in pattern.finditer(job.code):
            if not job.in_quotes(found.start()):
                text = f"{found['word']} alone behind the or is always true"
                yield Violation(found.start("word"), text, why=OR_WHY, cure="write the whole comparison on both sides")
                return


COMPARED = lazy_regex(
    r"\[\[?[ \t]+[\"']?\$(?:\{(\w+)\}|(\w+))[\"']?[ \t]+(?P<sign>==?|!=)[ \t]+(?P<q>[\"']?)(?P<word>[A-Za-z]\w*)(?P=q)[ \t]+\]"
)


def other_case_of_value(job: JobDescription) -> Iterator[Violation]:
    """Report ``[ "$USE" = true ]`` where all values of USE are True or False."""
    if job.kind != "script" or re.search(r"\bnocasematch\b", job.code):
        return
    for found in COMPARED.finditer(job.code):
        name, word = found[1] or found[2], found["word"]
        values = job.by_name.get(name, [])
        texts = [a.source.text for a in values]
        literal = texts and all(re.fullmatch(r"[A-Za-z]\w*", t) and UNRESOLVED_OPEN not in t for t in texts)
        if (
            not literal
            or name in job.reading.named
            or word in texts
            or any(a.under or a.in_substitution for a in values)
        ):
            continue
        near = next((t for t in texts if t.lower() == word.lower()), None)
        written = near is not None and re.search(rf"(?m)(?<![\w$]){name}=[\"']?{near}\b", job.code)
        if near and written:
            truth = "true" if found["sign"] == "!=" else "false"
            text = f"{name} is {near}, not {word}: the comparison is always {truth}"
            yield Violation(found.start("word"), text, why=NEVER_WHY, cure=f"{found['sign']} {near}")
            return


ZERO_WHY = "In [[ ]] a word beside -eq is the name of a variable. Nothing sets it, so that it counts as 0, and so does any other text."


def text_as_number(job: JobDescription) -> Iterator[Violation]:
    """Report ``[[ $USE -eq true ]]``, which compares 0 with 0."""
    for call in job.calls if job.kind == "script" else ():
        words = call.args if call.program == "[[" else ()
        for sign, word in pairwise(words):
            name, place = word.source.text, word.source.where(0) if word.source.text else 0
            known = job.has(name) or name in job.reading.named | job.reading.exported
            if sign.text not in NUMERIC_TESTS or sign.quoted or known or not re.fullmatch(r"[A-Za-z]\w*", name):
                continue
            if job.text[place : place + len(name)] == name and 0 < place - call.offset < NEAR:
                text = f"{sign.text} compares integers: {name} is taken for a variable that nothing sets, and so for 0"
                yield Violation(place, text, why=ZERO_WHY, cure="== and != compare texts")
                return


NEAR = 200
