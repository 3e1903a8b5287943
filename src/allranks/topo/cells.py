"""The words of one line: escape codes taken out, link types, core ranges. Pure."""

from __future__ import annotations

import re

_ESCAPES = re.compile(r"\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?|\x1b\[[0-?]*[ -/]*[@-~]|\x1b[@-_]|\^\[\[[0-9;]*m")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f\u200b\ufeff]")
_BARS = re.compile(r"[|\u2500-\u257f]")
_MARK = re.compile(r"^(\s*)([#*>]+|//+|;+)(?=\s)")
_SRUN_LABEL = re.compile(r"^\s*\d+: ")
GPU = re.compile(r"GPU\d+(?:[-/.:][A-Za-z0-9_.:/-]+)?", re.ASCII)
DEVICE = re.compile(r"[A-Za-z][A-Za-z0-9_.:/-]*\d[A-Za-z0-9_.:/-]*", re.ASCII)
_PATH = r"NV\d{1,3}|C2C|PIX|PXB|PHB|NODE|SYS|SOC"
LINK = re.compile(rf"X|{_PATH}", re.ASCII)
GLUED = re.compile(_PATH, re.ASCII)
P2P = re.compile(r"X|OK|CNS|GNS|TNS|NS|DR|U")
NO_VALUE = {"N/A", "NA", "-", "None", "[N/A]"}
_RANGES = re.compile(r"\d+(-\d+)?(,\d+(-\d+)?)*", re.ASCII)


def clean(line: str) -> str:
    """A line without escape codes, control characters, table bars, the mark of a comment or a quotation (``#``, ``*``,
    ``//``, ``>``) and the label that ``srun --label`` puts before it.
    """
    plain = _CONTROL.sub("", _ESCAPES.sub("", line))
    plain = _BARS.sub("\t", plain) if _BARS.search(plain) and not plain.lstrip().startswith("$") else plain
    plain = _SRUN_LABEL.sub("", plain.replace("\xa0", " "))
    return _MARK.sub("", plain)


def parted(word: str) -> list[str]:
    """``NODEPIX`` is NODE and PIX whose gap was lost; one word otherwise."""
    kinds = GLUED.findall(word)
    return kinds if len(kinds) > 1 and "".join(kinds) == word else [word]


def ranges(text: str) -> str | None:
    """Cores or NUMA nodes as printed, ``0-31,64-95``; None for N/A or anything else."""
    return text if _RANGES.fullmatch(text) else None


def first_number(text: str | None) -> int | None:
    """The NUMA node, if it is one; the first of several (``0-1``), since NVIDIA prints them from the nearest."""
    if text is None or _RANGES.fullmatch(text) is None:
        return None
    return int(re.split(r"[,-]", text)[0][:9])


def is_no_value(text: str) -> bool:
    """Whether a cell says that there is nothing to say."""
    return text in NO_VALUE
