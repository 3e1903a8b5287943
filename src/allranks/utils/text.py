"""Format values with units as text; make file text safe for terminals, pages, CSV; suggest the nearest name. Pure."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast

import msgspec


def format_seconds(value: float | None) -> str:
    """Format a duration with a suitable unit."""
    if value is None:
        return "-"
    for limit, factor, unit in ((1e-3, 1e6, "us"), (1.0, 1e3, "ms")):
        if abs(value) < limit:
            return f"{value * factor:.4g} {unit}" if abs(value * factor) < 1000 else f"{value * factor:.0f} {unit}"
    return f"{value:.4g} s"


def format_bandwidth(value: float | None) -> str:
    """Format bytes per second in units of 10^9, like nccl-tests."""
    if value is None:
        return "-"
    return f"{value / 1e9:.3g}" if value >= 1e6 else "< 0.001"


def format_percent_of(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %" if whole > 0 else "-"


NO_VALUE = "-"


def finite_float(value: Any) -> float | None:
    """Return a finite number, or None for anything else: files of an aborted run may contain anything."""
    if type(value) is float:  # fast path for the most frequent case
        return value if math.isfinite(value) else None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        as_float = float(value)
    except OverflowError:
        return None
    return as_float if math.isfinite(as_float) else None


def finite_int(value: Any) -> int | None:
    """Return an integer, or None for anything else."""
    number = finite_float(value)
    return int(number) if number is not None and abs(number) < 2**63 else None


def as_dicts(value: Any) -> list[dict[str, Any]]:
    """Return the dictionaries in a list; an empty list if the value is not a list."""
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


R = TypeVar("R")


def as_records(value: Any, record: type[R]) -> list[R]:
    """Return the items of a list that have the form of a record; damaged ones are left out."""
    parts = []
    for item in as_dicts(value):
        try:
            parts.append(msgspec.convert(item, record))
        except msgspec.ValidationError:
            continue
    return parts


def as_list(value: Any) -> list[Any]:
    """Return the value if it is a list, else an empty list."""
    return value if isinstance(value, list) else []


def as_dict(value: Any) -> dict[str, Any]:
    """Return the value if it is a dictionary, else an empty one."""
    return value if isinstance(value, dict) else {}


def format_count(value: Any) -> str:
    """Format 40572 as 40,572."""
    number = finite_int(value)
    return NO_VALUE if number is None else f"{number:,}"


def format_short_count(value: Any) -> str:
    """Format 5198080 as 5.20 M."""
    number = finite_float(value)
    if number is None:
        return NO_VALUE
    for unit in ("", " k", " M", " B"):
        if abs(number) < 1000:
            return f"{number:.0f}" if not unit else f"{number:.3g}{unit}"
        number /= 1000
    return f"{number:,.3g} T"


BINARY_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def byte_unit(count: float) -> tuple[float, str]:
    """Return (divisor, unit) of the largest unit of which a number of bytes contains at least one."""
    power = next((p for p in range(len(BINARY_UNITS) - 1, 0, -1) if abs(count) >= 1024**p), 0)
    return 1024.0**power, BINARY_UNITS[power]


def format_bytes(value: Any, digits: int | None = None) -> str:
    """Format 711147520 as 678 MiB.

    Args:
        digits: number of significant digits; None: one decimal below 100.
    """
    number = finite_float(value)
    if number is None:
        return NO_VALUE
    divisor, unit = byte_unit(number)
    number /= divisor
    if digits is not None:
        return f"{number:.{digits}g} {unit}"
    if unit == "TiB":
        return f"{number:,.1f} TiB"
    return f"{number:.0f} {unit}" if unit == "B" or number >= 100 else f"{number:.1f} {unit}"


def format_bytes_word(count: int) -> str:
    """Format 711147520 as 678MiB: one word, without decimals, for the lines of checks."""
    return f"{count / 2**30:.0f}GiB" if count >= 2**30 else f"{count >> 20}MiB"


def format_duration(value: Any) -> str:
    """Format 0.0313 as 31.3 ms, 3720 as 1 h 02 min."""
    number = finite_float(value)
    if number is None:
        return NO_VALUE
    if number < 0.9995:
        return f"{number * 1000:.3g} ms" if number else "0 s"
    if number < 59.95:
        return f"{number:.2f} s" if number < 9.995 else f"{number:.1f} s"
    minutes, seconds = divmod(round(number), 60)
    if minutes < 60:
        return f"{minutes} min {seconds:02d} s" if seconds else f"{minutes} min"
    return f"{minutes // 60:,} h {minutes % 60:02d} min"


def format_loss(value: Any) -> str:
    """Format a loss with four significant digits."""
    number = finite_float(value)
    if number is None:
        return NO_VALUE
    if number != 0 and abs(number) < 0.001:
        return f"{number:.1e}"
    if abs(number) >= 1e6:
        return f"{number:.2e}"
    return f"{number:.3f}" if abs(number) < 10 else f"{number:,.1f}"


def format_percent(value: Any, digits: int = 1) -> str:
    """Format 0.123 as 12.3 %."""
    number = finite_float(value)
    return NO_VALUE if number is None else f"{number * 100:.{digits}f} %"


def format_rate(value: Any) -> str:
    """Format a rate with a suitable number of digits."""
    number = finite_float(value)
    if number is None:
        return NO_VALUE
    return f"{number:,.0f}" if abs(number) >= 100 else f"{number:.3g}"


def format_perplexity(value: Any) -> str:
    """Format a perplexity with decimals only where they matter: 2.80, 84.1, 1,445, 1.9e+130."""
    number = finite_float(value)
    if number is not None and number >= 1e9:
        return f"{number:.2g}"
    return f"{number:.2f}" if number is not None and abs(number) < 10 else format_rate(value)


def format_timestamp(value: Any) -> str:
    """Format seconds since the epoch as local date and time."""
    number = finite_float(value)
    if number is None:
        return NO_VALUE
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(number))
    except (ValueError, OverflowError, OSError):
        return NO_VALUE


def format_ranks(ranks: list[int]) -> str:
    """Format [0, 1, 2, 5] as 0-2, 5."""
    return format_ranges(ranks, ", ") or NO_VALUE


def format_ranges(numbers: Iterable[int], separator: str = ",", width: int = 0) -> str:
    """Format 0, 1, 2, 5 as 0-2,5.

    Args:
        width: least number of digits, filled with zeros.
    """
    ranges: list[list[int]] = []
    for number in sorted(numbers):
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return separator.join(
        f"{low:0{width}d}" if low == high else f"{low:0{width}d}-{high:0{width}d}" for low, high in ranges
    )


def parse_ranges(text: str) -> set[int]:
    """Return the numbers of a list such as ``0-2,5``, as `format_ranges` and the kernel write it.

    Raises:
        ValueError: it is no such list, or a range is longer than any machine has cores.
    """
    numbers: set[int] = set()
    for part in text.strip().split(",") if text.strip() else []:
        low, dash, high = part.partition("-")
        first, last = int(low), int(high if dash else low)
        if last - first > 1 << 16:
            raise ValueError(f"{part}: too many numbers")
        numbers.update(range(first, last + 1))
    return numbers


def format_list(items: Sequence[object], most: int) -> str:
    """Format a, b, c, d, e as a, b, c and 2 more."""
    more = f" and {len(items) - most} more" if len(items) > most else ""
    return ", ".join(map(str, items[:most])) + more


_FORMULA = tuple("=+-@\t\r\n\uff1d\uff0b\uff0d\uff20")  # the last are full-width forms
MAX_TEXT_LENGTH = 4000
# Sequences of ECMA-48: control strings (OSC, DCS, ...) up to their end, CSI sequences, other escapes; 7-bit and 8-bit
# forms.
_ESCAPES = (
    r"(?:\x1b[\]PX^_]|[\x9d\x90\x98\x9e\x9f])[^\x07\x1b\x9c\n]{0,4096}(?:\x07|\x1b\\|\x9c)"
    r"|(?:\x1b\[|\x9b)[0-?]{0,64}[ -/]{0,8}[@-~]|\x1b[ -/]{0,8}[0-~]"
)
_STYLE = r"(\x1b\[[0-9;]{0,64}m)"
# Control and invisible characters except tab and line feed, and characters that change the direction of text.
_CONTROL = "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ufeff]"
_CONTROL_OR_RETURN = f"{_CONTROL}|[\r\ud800-\udfff]"
_compiled = cache(re.compile)  # when it is first used: every verb imports this module, and few need the patterns


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
    if text.replace("\n", "").isprintable():  # no character of the patterns is printable
        return text
    if styled:
        return "".join(part if i % 2 else printable(part) for i, part in enumerate(_compiled(_STYLE).split(text)))
    text = _compiled(_CONTROL).sub("", _compiled(_ESCAPES).sub("", text)).replace("\r\n", "\n").replace("\r", " ")
    return text.encode("utf-8", "replace").decode("utf-8")  # lone surrogates cannot be encoded


def wrapped(text: str, width: int) -> str:
    """Return text with lines broken between words to fit the width, with their indentation; longer words stay whole."""
    import textwrap  # only for a terminal

    lines = []
    for line in text.split("\n"):
        indent = line[: len(line) - len(line.lstrip())]
        rest = textwrap.wrap(
            line,
            width,
            subsequent_indent=indent,
            break_long_words=False,
            break_on_hyphens=False,
            replace_whitespace=False,
        )
        lines += rest or [line]
    return "\n".join(lines)


def escaped(text: str) -> str:
    """Return text with control and invisible characters written out, such as ``\\x1b``; tabs and line feeds stay."""
    return _compiled(_CONTROL_OR_RETURN).sub(lambda match: _escape(match.group()), text)


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
    """Return ``; did you mean job.sh?`` if a missing file's folder has one of a similar name; else an empty text."""
    try:
        names = [entry.name for entry in path.parent.iterdir()]
    except (OSError, ValueError):
        return ""
    near = nearest_name(path.name, names)
    return "" if near is None else suggest(str(path.with_name(near)))


class _LazyRegex:
    """A regular expression that is compiled when it is used for the first time."""

    def __init__(self, pattern: str, flags: int) -> None:
        self.pattern, self._flags = pattern, flags

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        method = getattr(re.compile(self.pattern, self._flags), name)
        setattr(self, name, method)  # found without this function from now on
        return method


def lazy_regex(pattern: str, flags: int = 0) -> re.Pattern[str]:
    """Return an expression that compiles at its first use; of hundreds in `lint`, a file needs a third.

    Use its methods: the functions of ``re`` refuse it.
    """
    return cast("re.Pattern[str]", _LazyRegex(pattern, flags))
