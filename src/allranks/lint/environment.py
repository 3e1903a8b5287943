"""Environment files (`env`, .env, lines of export) and a spec's cluster.env, as assignments."""

from __future__ import annotations

import re
from typing import Any

from allranks.lint.reading import Reading
from allranks.lint.records import Assignment
from allranks.lint.source import Source

LINE = re.compile(r"[ \t]*(?:(?:export|declare -x|set -x)[ \t]+)?([A-Za-z_][A-Za-z0-9_]*)[ \t]?=", re.MULTILINE)


def read_environment(text: str) -> Reading:
    """Lines ``NAME=value``. A quoted value may span lines; of an `env` dump the first line of a value counts."""
    reading = Reading()
    offset = 0
    for line in text.splitlines(keepends=True):
        found = LINE.match(line)
        if found:
            raw = line[found.end() :].rstrip("\r\n")
            value, start = _unquoted(raw)
            source = Source(value, range(offset + found.end() + start, offset + found.end() + start + len(value)))
            reading.assignments.append(Assignment(found[1], source, offset + found.start(1), True, raw=raw))
        offset += len(line)
    return reading


def _unquoted(raw: str) -> tuple[str, int]:
    value = raw.lstrip()
    start = len(raw) - len(value)
    if value[:1] in ("'", '"'):
        end = value.find(value[0], 1)
        return value[1 : end if end > 0 else len(value)], start + 1
    comment = re.search(r"\s#", value)
    return (value[: comment.start()] if comment else value).rstrip(), start


def read_spec(text: str, spec: Any) -> tuple[Reading, list[tuple[str, int]]]:
    """Assignments of ``cluster.env``, and the lines of ``cluster.setup`` with their offsets in the file."""
    reading = Reading()
    for name, value in spec.cluster.env.items():
        offset = _key(text, name)
        reading.assignments.append(Assignment(name, Source(str(value), [offset] * len(str(value))), offset, True))
    lines = [(line, max(0, text.find(line.split("\n")[0]))) for line in spec.cluster.setup]
    return reading, lines


def _key(text: str, name: str) -> int:
    found = re.search(rf"(?<![A-Za-z0-9_]){re.escape(name)}['\"]?\s*:", text)
    return found.start() if found else 0
