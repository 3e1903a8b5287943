"""Format values as text, and make text from files safe for terminals, pages and CSV files. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from allranks.utils.formatting import NO_VALUE

_FORMULA = (
    "=",
    "+",
    "-",
    "@",
    "\t",
    "\r",
    "\n",
    "\uff1d",
    "\uff0b",
    "\uff0d",
    "\uff20",
)  # the last four are full-width forms
MAX_TEXT_LENGTH = 4000
# Sequences of ECMA-48: control strings (OSC, DCS, ...) up to their end, CSI sequences, other escapes; 7-bit and 8-bit forms.
_ESCAPES = re.compile(
    r"(?:\x1b[\]PX^_]|[\x9d\x90\x98\x9e\x9f])[^\x07\x1b\x9c\n]{0,4096}(?:\x07|\x1b\\|\x9c)"
    r"|(?:\x1b\[|\x9b)[0-?]{0,64}[ -/]{0,8}[@-~]|\x1b[ -/]{0,8}[0-~]"
)
_STYLE = re.compile(r"(\x1b\[[0-9;]{0,64}m)")
# Control and invisible characters except tab and line feed, and characters that change the direction of text.
_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ufeff]")
_CONTROL_OR_RETURN = re.compile(f"{_CONTROL.pattern}|[\r\ud800-\udfff]")


def csv_cell(value: Any) -> Any:
    """Return a cell, with a quote before text that a spreadsheet would run as a formula.

    A carriage return becomes a line feed: the csv module does not quote it, and readers end the row there.
    """
    if not isinstance(value, str):
        return value
    text = value.replace("\r", "\n")
    return f"'{text}" if text.lstrip(" ").startswith(_FORMULA) else text


def printable(text: str, *, styled: bool = False) -> str:
    """Return text that is safe for a terminal: without escape sequences, control characters and changes of direction.

    A carriage return becomes a blank, so that the text after it does not overwrite the text before it.

    Args:
        styled: keep colour and weight sequences that the program itself has added.
    """
    if text.isascii() and text.isprintable():
        return text
    if styled:
        return "".join(part if i % 2 else printable(part) for i, part in enumerate(_STYLE.split(text)))
    text = _CONTROL.sub("", _ESCAPES.sub("", text)).replace("\r\n", "\n").replace("\r", " ")
    return text.encode("utf-8", "replace").decode("utf-8")  # lone surrogates cannot be encoded


def escaped(text: str) -> str:
    """Return text whose control and invisible characters are written out, such as ``\\x1b``; tabs and line feeds stay."""
    return _CONTROL_OR_RETURN.sub(lambda match: _escape(match.group()), text)


def _escape(character: str) -> str:
    code = ord(character)
    return "\\r" if character == "\r" else f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"


def sanitize(value: Any, longest: int = MAX_TEXT_LENGTH) -> str:
    """Return text without secrets, escape sequences and control characters, truncated if it is too long for a page."""
    from allranks.utils.redaction import redact  # its patterns take longer to compile than a verb may take to start

    text = redact(printable(str(value)))
    return text if len(text) <= longest else f"{text[:longest]} … ({len(text) - longest:,} more characters)"


def sanitize_tree(value: Any) -> Any:
    """Return the tree with every string sanitized."""
    if isinstance(value, str):
        return sanitize(value)
    if isinstance(value, dict):
        return {sanitize(key): sanitize_tree(item) for key, item in value.items()}
    if isinstance(value, list):
        return [sanitize_tree(item) for item in value]
    return value


def format_value(value: Any) -> str:
    """Return a value as text, or a dash if there is none."""
    if value is None or value == "":
        return NO_VALUE
    if isinstance(value, bool):
        return "yes" if value else "no"
    return sanitize(value)


def nearest_name(name: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the most similar of the known names, or None if none is similar.

    Args:
        cutoff: least similarity, between 0 and 1 (``difflib.SequenceMatcher.ratio``).
    """
    import difflib  # only after a mistake: every verb imports this module

    near = difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)
    return near[0] if near else None


def did_you_mean(name: str, known: Iterable[str], cutoff: float = 0.6, form: str = "{!r}") -> str:
    """Return ``; did you mean 'a'?``, or an empty text if no known name is similar.

    Args:
        form: how the suggestion is shown, such as ``tiny:{}``.
    """
    near = nearest_name(name, known, cutoff)
    return "" if near is None else suggest(form.format(near))


def suggest(*names: str) -> str:
    """Return ``; did you mean a or b?``; empty without names."""
    return f"; did you mean {' or '.join(names)}?" if names else ""


def nearest_file_hint(path: Path) -> str:
    """Return ``; did you mean job.sh?`` if the folder of a missing file has one of a similar name; else an empty text."""
    try:
        names = [entry.name for entry in path.parent.iterdir()]
    except (OSError, ValueError):
        return ""
    near = nearest_name(path.name, names)
    return "" if near is None else suggest(str(path.with_name(near)))
