"""Secrets in texts, arguments and addresses."""

from __future__ import annotations

import pytest

from allranks.planning.env_vars import EnvVar
from allranks.planning.rank_environment import as_variables, public_variables, secret_variables, with_hidden_secrets
from allranks.utils.redaction import redact, redact_arguments, redact_env


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("HF_TOKEN=abc x", "HF_TOKEN=*** x"),
        ("see https://me:pw@host/x", "see https://***@host/x"),
        ("postgres://u:pass/x@host/db", "postgres://***@host/db"),
        ("redis://:a/b@c@host:6379 x", "redis://***@host:6379 x"),
        ("tcp://host:29500/a@b", "tcp://host:29500/a@b"),
        ("git+https://github.com/o/r@v1:x", "git+https://github.com/o/r@v1:x"),
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
        ("cluster.env={HF_TOKEN: abcdef}", "cluster.env=***"),
        ("train.lr=1e-4", "train.lr=1e-4"),
    ],
)
def test_arguments(argument: str, kept: str) -> None:
    assert redact_arguments([argument]) == [kept]


def test_a_variable_with_a_secret_in_its_value_is_hidden_whole_and_reaches_the_ranks_all_the_same() -> None:
    """Half of a proxy's address would be set for the ranks of a resumed run, and be of no use there."""
    env = {"HTTPS_PROXY": "http://me:pw@proxy:3128", "HF_TOKEN": "abc", "PLAIN": "http://proxy:3128"}
    assert redact_env(env) == {"HTTPS_PROXY": "***", "HF_TOKEN": "***", "PLAIN": "http://proxy:3128"}
    decided = [EnvVar(name=name, value=value, reason="cluster.env", source="user") for name, value in env.items()]
    assert public_variables(decided) == {"PLAIN": "http://proxy:3128"}
    assert secret_variables(decided).keys() == {"HTTPS_PROXY", "HF_TOKEN"}
    assert [item.value for item in with_hidden_secrets(decided)] == ["***", "***", "http://proxy:3128"]
    assert as_variables(with_hidden_secrets(decided)) == {"PLAIN": "http://proxy:3128"}  # the rest is the starter's own
