"""Log lines as they may stand in a report: without tokens, keys and passwords."""

from __future__ import annotations

import re

from allranks.redact import HIDDEN, redact

_NAMED = re.compile(
    r"(?i)((?:[\w-]*(?:token|secret|passw(?:or)?d|passwd|api[_-]?key|access[_-]?key|private[_-]?key|credential|authorization|signature))[\"']?\s*(?:[=:]|\s(?=[\"']))\s*[\"']?)"
    r"(?!\s|None\b|null\b|true\b|false\b|\*\*\*)([^\s\"',;&}\])]{6,})"
)
_BEARER = re.compile(r"(?i)\b(bearer|basic)\s+[A-Za-z0-9._~+/=-]{8,}")
_JWT = re.compile(r"\beyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{4,}(?:\.[A-Za-z0-9_-]*)?")
_QUERY = re.compile(r"(?i)([?&](?:[\w-]*(?:token|key|sig|signature|secret|password|credential)[\w-]*)=)[^&\s\"']+")
_KNOWN = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{10,}|gh[pousr]_[A-Za-z0-9]{16,}|github_pat_[A-Za-z0-9_]{20,}|glpat-[\w-]{16,}|sk-[A-Za-z0-9_-]{16,}|xox[abprs]-[\w-]{10,}|AKIA[0-9A-Z]{12,}|ASIA[0-9A-Z]{12,}|AIza[\w-]{30,}|npm_[A-Za-z0-9]{20,}|pypi-[\w-]{20,})"
)
_FLAG = re.compile(r"(?i)(--?[\w-]*(?:token|secret|password|passwd|api[_-]?key|access[_-]?key)[=\s]+)(?!-)\S+")
_WANDB = re.compile(r"(?i)(wandb[^\n]{0,40}?)\b[0-9a-f]{40}\b")
_NOT_SECRET = re.compile(r"(?i)^[\"']?(?:[\w-]*tokens|[\w-]*token_(?:id|ids|count)|tokenizer[\w-]*)\b")


def clean(text: str) -> str:
    """The text with what looks like a secret replaced by stars."""
    text = _BEARER.sub(lambda m: f"{m.group(1)} {HIDDEN}", text)
    text = _QUERY.sub(lambda m: m.group(1) + HIDDEN, text)
    text = _FLAG.sub(lambda m: m.group(1) + HIDDEN, text)
    text = _NAMED.sub(lambda m: m.group(0) if _NOT_SECRET.match(m.group(1)) else m.group(1) + HIDDEN, text)
    text = _WANDB.sub(lambda m: m.group(1) + HIDDEN, text)
    return redact(_JWT.sub(HIDDEN, _KNOWN.sub(HIDDEN, text)))
