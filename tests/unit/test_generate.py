"""How prompts of a user become those of a run's template, and which runs and prompts are refused."""

import io
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

from allranks.cli.generate import _prompts
from allranks.errors import DataError, RequestError
from allranks.launch.generation import GenerationRequest, generate
from allranks.rundir.paths import RunDir
from allranks.spec.data_templates import prompt_of, row_prompt
from allranks.spec.records import ModelSpec
from allranks.train.data.tokenization import train_tokenizer
from allranks.train.evaluation import end_tokens, generate_replies
from tests.dist.making import build_model


def test_a_jinja_prompt_is_made_of_columns(tmp_path: Path) -> None:
    path = tmp_path / "t.jinja"
    path.write_text("{% block prompt %}Q: {{ q }}\n{% endblock %}{% block response %}{{ reply }}{% endblock %}")
    with pytest.raises(DataError, match=r"its prompt is made of columns; .*--row.*--raw"):
        prompt_of("jinja", str(path), "x")
    path.write_text("{{ a }} {{ b }}")
    assert prompt_of("jinja", str(path), "x") == "x"


def test_the_columns_of_a_row_without_its_response_make_a_prompt(tmp_path: Path) -> None:
    path = tmp_path / "t.jinja"
    prompt = "{% block prompt %}{{ ticket.subject }} ({{ eur }})\n{% endblock %}"
    path.write_text(prompt + "{% block response %}{{ s.steps | join }}{% endblock %}")
    assert row_prompt("jinja", str(path), {}, {"ticket": {"subject": "S"}, "eur": 2.5}) == "S (2.5)\n"
    with pytest.raises(DataError, match="'eur' is undefined; the row has: ticket"):
        row_prompt("jinja", str(path), {}, {"ticket": {"subject": "S"}})
    alpaca = row_prompt("alpaca", "auto", {"instruction": "q"}, {"q": "Add", "input": "2"})
    assert isinstance(alpaca, str) and alpaca.endswith("Add\n\n### Input:\n2\n\n### Response:\n")
    assert row_prompt("completion", "auto", {}, {"prompt": "a"}) == "a"
    assert row_prompt("text", "auto", {"text": "t"}, {"t": "a"}) == "a"
    user = [{"role": "user", "content": "Wo?"}]
    system = [{"role": "system", "content": "s"}, *user]
    for template, columns, given, wanted in (
        ("auto", {"prompt": "frage", "response": "antwort"}, {"frage": "Wo?"}, user),
        ("auto", {}, {"prompt": "Wo?", "system": "s"}, system),
        ("chat", {}, {"instruction": "Wo?"}, user),
        ("auto", {}, {"messages": system}, system),
        ("auto", {}, {"conversations": [{"from": "human", "value": "Wo?"}], "system": "s"}, system),
    ):
        chat = row_prompt("chat", template, columns, given)
        assert not isinstance(chat, str)
        assert list(chat.messages) == wanted
    for kind, given, words in (
        ("chat + text", {"prompt": "x"}, "mixed rows of several templates"),
        ("alpaca", {"input": "x"}, "there is no column 'instruction'"),
        ("chat", {"messages": "x"}, "expected a list of messages"),
        ("chat", {"messages": []}, "expected a list of messages"),
    ):
        with pytest.raises(DataError, match=words.replace("+", r"\+")):
            row_prompt(kind, "auto", {}, given)


def from_stdin(monkeypatch: pytest.MonkeyPatch, content: bytes, *, terminal: bool = False) -> list[str]:
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(content), isatty=lambda: terminal))
    return _prompts(())


def test_prompts_are_lines_or_options(monkeypatch: pytest.MonkeyPatch) -> None:
    assert from_stdin(monkeypatch, "\ufeffä b\r\n\n  \n c\u2028d".encode()) == ["ä b", " c\u2028d"]
    assert _prompts(("a\nb", "'$x'")) == ["a\nb", "'$x'"]
    for content, terminal, words in (
        (b"", True, "give --prompt TEXT, or prompts on standard input"),
        (b"\n \n", False, "no prompt: give --prompt TEXT"),
        (b"ok\n\xff\n", False, "not UTF-8 text: byte 3 is 0xff"),
    ):
        with pytest.raises(RequestError, match=words):
            from_stdin(monkeypatch, content, terminal=terminal)
    with pytest.raises(RequestError, match="prompt 2 is not UTF-8 text"):
        _prompts(("a", "b\udcff"))
    with pytest.raises(RequestError, match="prompt 1 is empty"):
        _prompts((" \n",))


TEXTS = {"model": {"name": "tiny:llama"}, "data": {"source": "builtin:news"}}


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"model": {"name": "mlp:8x3"}, "data": {"source": "builtin:noise"}}, "mlp:8x3 is trained on noise"),
        ({"script": {"path": "train.py"}}, "runs your own program"),
        (TEXTS, "none has been saved yet"),
        ({**TEXTS, "checkpoint": {"mode": "none"}}, r"no checkpoint to try: checkpoint\.mode is none"),
    ],
)  # fmt: skip
def test_runs_without_a_model_to_try_are_refused(tmp_path: Path, spec: dict[str, Any], words: str) -> None:
    run = RunDir(tmp_path)
    run.spec.write_text(yaml.safe_dump(spec))
    with pytest.raises(RequestError, match=words), generate(run, ["x"], GenerationRequest()):
        pass


def test_a_reply_ends_at_any_end_token_of_the_generation_config() -> None:
    tokenizer = train_tokenizer(["hello world 123"], 300, classifier=False)
    model: Any = build_model(ModelSpec(name="tiny:llama"), tokenizer, dtype="float32", labels={}, seed=1)
    (whole,) = generate_replies(model, tokenizer, ["hello"], 6, torch.device("cpu"), temperature=1.0)
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, whole[2]]
    (reply,) = generate_replies(model, tokenizer, ["hello"], 6, torch.device("cpu"), temperature=1.0)
    assert reply == whole[: whole.index(whole[2]) + 1] and len(reply) < len(whole)
    assert end_tokens(model, tokenizer) == sorted([tokenizer.eos_token_id, whole[2]])
