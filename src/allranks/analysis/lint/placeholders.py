"""Parts of a script that its author left open for others to fill in."""

from __future__ import annotations

import re
from functools import lru_cache

from allranks.utils.text import lazy_regex

PLACEHOLDER = lazy_regex(
    r"(?<![<\w$])<[A-Za-z][\w ./:|$-]{0,60}>|(?<=[/=\"'])<<[A-Za-z][\w -]{0,40}>>|\{\{-?\s*[\w. $|()'\",+*/-]{1,60}\s*-?\}\}|(?<![\w$])\{ [A-Za-z_][\w.]* \}"
    r"|\bX{3,}[a-z]\w{0,40}?X{3,}(?![A-Za-z0-9])|(?<=[= ])[Yy]our (?:e-?mail|name|account|project|partition|job)\w*"
    r"|(?<![A-Za-z0-9_])[A-Za-z_/-]*X{3,}(?![A-Za-z0-9])|\b(?:YOUR|REPLACE|INSERT|CHANGE)[-_ ]?[A-Z_-]{2,}\b|\b[Yy]our[-_]\w+(?:[-_]\w+)*"
    r"|/path[-_]?to(?:/[\w./-]*|\b)|\bproject_46[0-9]{0,4}x+|\bTODO\b|(?<![\w$}\])])\{[A-Z][a-z]+(?: [A-Za-z][a-z]+){1,4}\}"
    r"|%\([A-Za-z_]\w*\)[sdi]|\{\d{1,2}\.[ ]?[A-Za-z][\w '.,-]{0,60}\}"
    r"|(?<=\w=)# ?[A-Za-z]{2,}[/\w.-]* [^\n]*"
    r"|(?<![\w$}\])])[\[{](?i:your|replace|fill|insert|enter|put|specify|change|choose)\b[\w ,./'-]{0,60}[\]}]"
)


def find_placeholders(text: str, comments: set[int]) -> list[tuple[int, str]]:
    """Return places and texts of the parts that a template leaves open; comments other than #SBATCH are left out."""
    found: list[tuple[int, str]] = []
    for offset, line in _lines_with_placeholders(text):
        start = line.lstrip()
        if not start.startswith("#") or start.startswith("#SBATCH"):
            end = min((c - offset for c in comments if offset < c < offset + len(line)), default=len(line))
            end = len(line) if start.startswith("#SBATCH") else end
            found += [(offset + m.start(), m[0]) for m in PLACEHOLDER.finditer(line[:end]) if "mktemp" not in line]
    return found


@lru_cache(maxsize=4)
def _lines_with_placeholders(text: str) -> tuple[tuple[int, str], ...]:
    """Return offsets and texts of the lines; every script that a file submits asks for those of the whole file."""
    lines = ((m.start(), m[0]) for m in re.finditer(r"(?m)^.*$", text))
    return tuple((offset, line) for offset, line in lines if PLACEHOLDER.search(line))


def neutralise_placeholders(text: str) -> str:
    """Return the text with the signs of placeholders replaced that a shell would read: <, >, %( ), and those of a text behind ``=#``."""
    return PLACEHOLDER.sub(_neutral, text)


def _neutral(found: re.Match[str]) -> str:
    if found[0].startswith("<"):
        return re.sub(r"[<>|]", "_", found[0])
    if found[0].startswith("#"):
        return re.sub(r"[^\w/]", "_", found[0])
    return re.sub(r"[%()]", "_", found[0]) if found[0].startswith("%(") else found[0]
