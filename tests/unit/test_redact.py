"""Secrets in texts, arguments and addresses."""

from __future__ import annotations

import pytest

from allranks.redact import redact, redact_argument


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("HF_TOKEN=abc x", "HF_TOKEN=*** x"),
        ("see https://me:pw@host/x", "see https://***@host/x"),
        ("TOKENIZERS_PARALLELISM=false", "TOKENIZERS_PARALLELISM=false"),
        ("plain words", "plain words"),
    ],
)
def test_texts(text: str, kept: str) -> None:
    assert redact(text) == kept


@pytest.mark.parametrize(
    ("argument", "kept"),
    [
        ("cluster.env.DB_PASSWORD=x y", "cluster.env.DB_PASSWORD=***"),
        ("cluster.env={HF_TOKEN: abc}", "cluster.env={HF_TOKEN:***"),
        ("train.lr=1e-4", "train.lr=1e-4"),
    ],
)
def test_arguments(argument: str, kept: str) -> None:
    assert redact_argument(argument) == kept
