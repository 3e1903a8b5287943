"""Log lines as they may stand in a report: without tokens, keys and passwords."""

from __future__ import annotations

import re

from allranks.redact import HIDDEN, redact

_WORDS = r"token|secret|passw(?:or)?d|passwd|passphrase|api[_-]?key|(?:access|account|private|encryption|secret)[_-]?key|credential|authorization|signature"
# a name that says what it holds, then its value: quoted, or up to the next blank
_QUOTED = re.compile(rf"(?i)([\w-]*(?:{_WORDS})[\"']?\s*[=:]\s*)([\"'])(?!<\||\[)[^\"']{{6,}}\2")
_NAMED = re.compile(
    rf"(?i)((?:[\w-]*(?:{_WORDS}))[\"']?\]?\s*(?:[=:]|\s(?=[\"']))\s*[\"']?)"
    r"(?!\s|None\b|null\b|true\b|false\b|\*\*\*|<\||\[)([^\s\"',;&}\])]{6,})"
)
_SHORT_NAME = re.compile(
    r"(?i)((?:\b|_)(?:pass|pwd)[\"']?\s*[=:]\s*[\"']?)(?!/)(?=[^\s\"',;&]*[a-z])(?=[^\s\"',;&]*\d)[^\s\"',;&]{6,}"
)
_SPOKEN = re.compile(
    r"(?i)\b([\w-]*(?:api[_-]?key|access[_-]?key|token|secret|password)\s+(?:is\s+|was\s+)?[\"']?)(?=[\w/+.-]*\d)(?=[\w/+.-]*[a-z])[\w/+.-]{16,}"
)
_HEADER = re.compile(
    r"(?i)\b((?:proxy-)?authorization[\"']?\s*[:=]\s*[\"']?(?:(?:bearer|basic|digest|token|negotiate)\s+)?|(?:set-)?cookie[\"']?\s*[:=]\s*[\"']?)(?!\*\*\*)[^\s\"',]{6,}(?:;\s*[\w-]+=[^\s;\"',]+)*"
)
_BEARER = re.compile(r"(?i)\b(bearer)\s+[A-Za-z0-9._~+/=-]{8,}")
_BASIC = re.compile(r"(?i)\b(basic)\s+(?=[A-Za-z0-9+/=_-]*[0-9=])[A-Za-z0-9+/=_-]{12,}")
_JWT = re.compile(r"\beyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{4,}(?:\.[A-Za-z0-9_-]*)?")
_QUERY = re.compile(
    r"(?i)((?:[?&](?:[\w-]*(?:token|key|sig|signature|secret|password|credential)[\w-]*)|\bsig)=)[^&\s\"']{6,}"
)
_KNOWN = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{10,}|gh[pousr]_[A-Za-z0-9]{16,}|github_pat_[A-Za-z0-9_]{20,}|glpat-[\w-]{16,}|sk-[A-Za-z0-9_-]{16,}|xox[abprs]-[\w-]{10,}|AKIA[0-9A-Z]{12,}|ASIA[0-9A-Z]{12,}|AIza[\w-]{30,}|npm_[A-Za-z0-9]{20,}|pypi-[\w-]{20,})"
    r"|\bMUNGE:[A-Za-z0-9+/=]{16,}:?"
)
_FLAG = re.compile(r"(?i)(--?[\w-]*(?:token|secret|password|passwd|api[_-]?key|access[_-]?key)[=\s]+)(?!-)\S+")
_USER = re.compile(r"(\s(?:-u|--user)[\s=]+[^\s:]+:)\S+")
_ADDRESS = re.compile(r"(?<=://)[^/\s:@]*:[^/\s@]+(?=@)")
_WANDB = re.compile(r"(?i)(wandb[^\n]{0,60}?)\b[0-9a-f]{40}\b")
_KEY_BLOCK = re.compile(r"(-----BEGIN [A-Z ]*PRIVATE KEY-----).*?(?=-----END|$)", re.DOTALL)
_KEY_LINE = re.compile(r"^\s*[A-Za-z0-9+/]{60,}={0,2}\s*$|(?<![\w+/])[A-Za-z0-9+/]{60,}={1,2}(?!\w)")
_NOT_SECRET = re.compile(r"(?i)^[\"']?(?:[\w-]*tokens|[\w-]*token_(?:id|ids|count)|tokenizer[\w-]*)\b")
_AFTER_NAME = (_KEY_BLOCK, _FLAG, _USER, _QUERY, _HEADER, _SHORT_NAME, _WANDB)


def clean(text: str) -> str:
    """The text with what looks like a secret replaced by stars."""
    text = _KEY_LINE.sub(HIDDEN, _KNOWN.sub(HIDDEN, _JWT.sub(HIDDEN, text)))
    for pattern in _AFTER_NAME:
        text = pattern.sub(lambda m: m.group(1) + HIDDEN, text)
    text = _BASIC.sub(lambda m: f"{m.group(1)} {HIDDEN}", _BEARER.sub(lambda m: f"{m.group(1)} {HIDDEN}", text))
    for pattern in (_QUOTED, _NAMED, _SPOKEN):
        text = pattern.sub(lambda m: m.group(0) if _NOT_SECRET.match(m.group(1)) else m.group(1) + HIDDEN, text)
    return redact(_ADDRESS.sub(HIDDEN, text))
