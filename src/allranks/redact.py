"""Keeps tokens and passwords out of files: what looks like a secret is replaced before it is written."""

from __future__ import annotations

import re

HIDDEN = "***"
_SECRET_NAME = re.compile(r"(TOKEN|SECRET|PASSW(OR)?D|API_?KEY|ACCESS_?KEY|PRIVATE_?KEY|CREDENTIAL)", re.IGNORECASE)
_NOT_SECRET = re.compile(r"^(TOKENIZERS_|.*_TOKENS$)", re.IGNORECASE)
_SECRET_VALUE = re.compile(
    r"\b(hf_[A-Za-z0-9]{16,}|gh[pousr]_[A-Za-z0-9]{20,}|sk-[A-Za-z0-9_-]{20,}|AKIA[0-9A-Z]{16})\b"
)


def is_secret_name(name: str) -> bool:
    """True for names such as HF_TOKEN or WANDB_API_KEY (not TOKENIZERS_PARALLELISM)."""
    return bool(_SECRET_NAME.search(name)) and not _NOT_SECRET.match(name)


def redact(text: str) -> str:
    """The text with anything that has the form of a known access token replaced."""
    return _SECRET_VALUE.sub(HIDDEN, text)


def redact_env(env: dict[str, str]) -> dict[str, str]:
    """Environment variables with secret values replaced."""
    return {name: HIDDEN if is_secret_name(name) else redact(value) for name, value in env.items()}
