"""``#SBATCH`` lines: which options they give, and which of them sbatch does not read."""

from __future__ import annotations

import re

from allranks.lint.options import slurm_option
from allranks.lint.records import Directive
from allranks.lint.source import Source

WORD = re.compile(r"""(?:[^\s"'\\]|\\.|"[^"]*"?|'[^']*'?)+""")


def read_directives(source: Source, comments: set[int]) -> list[Directive]:
    """Options of every line that begins with ``#SBATCH``; `comments` are offsets in the file where a comment really begins."""
    found: list[Directive] = []
    late = False
    offset = 0
    for line in source.text.split("\n"):
        if line.startswith("#SBATCH") and line[7:8] in (" ", "\t", "-", "\r", "") and source.where(offset) in comments:
            found += _options(source.part(offset, offset + len(line.rstrip())), late)
        elif line.strip() and not line.lstrip().startswith("#"):
            late = True
        offset += len(line) + 1
    return found


def _options(source: Source, late: bool) -> list[Directive]:
    line = source.text
    words: list[tuple[str, int]] = []
    for word in WORD.finditer(line, 7):
        if word[0].startswith("#"):
            break
        words.append((word[0], word.start()))
    found: list[Directive] = []
    i = 0
    while i < len(words):
        text, column = words[i]
        i += 1
        if not text.startswith("-") or len(text) < 2:
            found.append(Directive("", text, source.where(column), line[column:], late))
            continue
        name, value, follows = slurm_option(text)
        if follows and i < len(words):
            value = words[i][0]
            i += 1
        found.append(Directive(name, _plain(value), source.where(column), line[column:], late))
    return found


def _plain(value: str | None) -> str | None:
    return None if value is None else re.sub(r"[\"']", "", value)
