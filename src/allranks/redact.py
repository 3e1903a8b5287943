"""Keeps tokens and passwords out of files: what looks like a secret is replaced before it is written."""

from __future__ import annotations

import re

HIDDEN = "***"
_SECRET_NAME = re.compile(r"(TOKEN|SECRET|PASSW(OR)?D|API_?KEY|ACCESS_?KEY|PRIVATE_?KEY|CREDENTIAL)", re.IGNORECASE)
_NOT_SECRET = re.compile(r"^(TOKENIZERS_|.*_TOKENS$)", re.IGNORECASE)
_VARIABLE = re.compile(r"\b([A-Z][A-Z0-9_]+)=([^\s'\"]+)")
_CREDENTIALS = re.compile(r"(?<=://)[^/\s:@]+:[^/\s@]+(?=@)")
_ASSIGNMENT = re.compile(r"([A-Za-z0-9_\-]+)\s*[=:]")
_SECRET_VALUE = re.compile(
    r"\b(hf_[A-Za-z0-9]{16,}|gh[pousr]_[A-Za-z0-9]{20,}|sk-[A-Za-z0-9_-]{20,}|AKIA[0-9A-Z]{16})\b"
)


def is_secret_name(name: str) -> bool:
    """True for names such as HF_TOKEN or WANDB_API_KEY (not TOKENIZERS_PARALLELISM)."""
    return bool(_SECRET_NAME.search(name)) and not _NOT_SECRET.match(name)


def redact(text: str) -> str:
    """The text without known forms of access tokens, values of ``SECRET_NAME=...``, and passwords in addresses."""
    text = _VARIABLE.sub(lambda m: f"{m.group(1)}={HIDDEN}" if is_secret_name(m.group(1)) else m.group(0), text)
    return _SECRET_VALUE.sub(HIDDEN, _CREDENTIALS.sub(HIDDEN, text))


def redact_argument(argument: str) -> str:
    """A command-line argument such as ``cluster.env.DB_PASSWORD=x`` without its secret."""
    for match in _ASSIGNMENT.finditer(argument):
        if is_secret_name(match.group(1)):
            return argument[: match.end()] + HIDDEN
    return redact(argument)


def holds_secret(name: str, value: str) -> bool:
    """Whether a variable's value is one by its name (HF_TOKEN) or by its form (a password in a proxy's address)."""
    return is_secret_name(name) or redact(value) != value


def redact_env(env: dict[str, str]) -> dict[str, str]:
    """Environment variables with secret values replaced as a whole: a value of which a part is hidden is of no use."""
    return {name: HIDDEN if holds_secret(name, value) else value for name, value in env.items()}
