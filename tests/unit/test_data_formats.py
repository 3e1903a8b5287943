"""The formats of rows that are read without configuration, what is trained of them, and what a row that fits none is
told.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from allranks.errors import DataError
from allranks.spec.data_templates import Example, Template, choose_template
from allranks.spec.records import DataSpec
from allranks.train.data.tokenization import encode_text, train_tokenizer

Row = dict[str, Any]

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3 = (
    "{% for m in messages %}<|start_header_id|>{{ m['role'] }}<|end_header_id|>\n\n{{ m['content'] | trim }}"
    "{{ m['tool_calls'] | tojson if m['tool_calls'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
STRICT = (
    "{% for m in messages %}{% if m.role not in ('user', 'assistant') %}"
    "{{ raise_exception('Only user and assistant roles!') }}"
    "{% endif %}[{{ m['role'] }}]{{ m['content'] }}{{ eos_token if m['role'] == 'assistant' else '' }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
TOOLS = "{% if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}" + CHATML


@pytest.fixture
def tokenizer() -> Any:
    return train_tokenizer(["user assistant system tool question answer 1 2 3 " * 3], 400, classifier=False)


def chosen(rows: list[Row], *, classifier: bool = False, **options: Any) -> Template:
    return choose_template(DataSpec(source="rows.jsonl", **options), rows, classifier=classifier)


def rendered(rows: list[Row], **options: Any) -> list[Example]:
    template = chosen(rows, **options)
    return [template.render(row, number) for number, row in enumerate(rows)]


def parts(row: Row, tokenizer: Any, **options: Any) -> tuple[str, str]:
    """Return the text that is not trained, and the text that is."""
    (encoded,) = encode_text(rendered([row], **options), tokenizer, max_length=512, mask_prompt=True)
    texts = [
        tokenizer.decode([int(i) for i, m in zip(encoded.ids, encoded.mask, strict=True) if m == trained])
        for trained in (0, 1)
    ]
    return texts[0], texts[1]


ONE = [{"role": "user", "content": "question"}, {"role": "assistant", "content": "answer"}]
DEFAULT = ("<|user|>\nquestion\n<|assistant|>\n", "answer</s>")


@pytest.mark.parametrize(
    ("row", "kind", "reason", "untrained", "trained"),
    [
        ({"messages": ONE}, "chat", "column messages", *DEFAULT),
        ({"conversations": ONE}, "chat", "column conversations", *DEFAULT),
        (
            {"conversations": [{"from": "human", "value": "question"}, {"from": "gpt", "value": "answer"}]},
            "chat",
            "column conversations",
            *DEFAULT,
        ),
        ({"prompt": "question", "response": "answer"}, "chat", "columns prompt, response", *DEFAULT),
        ({"prompt": "question", "completion": " 1"}, "completion", "columns prompt, completion", "question", " 1</s>"),
        ({"prompt": ONE[:1], "completion": ONE[1:]}, "chat", "columns prompt, completion", *DEFAULT),
        (
            {"instruction": "question", "input": "2", "output": "answer"},
            "alpaca",
            "columns instruction, input, output",
            "### Instruction:\nquestion\n\n### Input:\n2\n\n### Response:\n",
            "answer</s>",
        ),
        ({"text": "answer", "id": 4}, "text", "column text", "", "answer</s>"),
    ],
)
def test_it_is_read_without_configuration(
    tokenizer: Any, row: Row, kind: str, reason: str, untrained: str, trained: str
) -> None:
    template = chosen([row])
    assert (template.kind, template.reason) == (kind, reason)
    assert parts(row, tokenizer) == (untrained, trained)


def test_speakers_and_their_roles() -> None:
    said = [("system", "s"), ("human", "a"), ("gpt", "b"), ("tool", "t"), ("observation", "o"), ("gpt", "c")]
    (example,) = rendered([{"conversations": [{"from": who, "value": what} for who, what in said]}])
    assert [m["role"] for m in example.messages] == ["system", "user", "assistant", "tool", "tool", "assistant"]
    with pytest.raises(
        DataError, match=r"row 0, column 'conversations', message 0: unknown speaker 'npc' in 'from' \(known: human"
    ):
        rendered([{"conversations": [{"from": "npc", "value": "x"}]}])


def test_replies_are_trained_and_tools_and_users_are_not(tokenizer: Any) -> None:
    calls = [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}]
    chat = [
        {"role": "system", "content": "system"},
        {"role": "user", "content": "1 2"},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "ipython", "content": "3", "name": None},
        {"role": "assistant", "content": [{"type": "text", "text": "answer"}]},
    ]
    tokenizer.chat_template = LLAMA3
    untrained, trained = parts({"messages": chat}, tokenizer)
    assert trained == f"{json.dumps(calls)}</s>answer</s>"
    assert "ipython" in untrained
    (example,) = rendered([{"messages": chat}])
    assert example.messages[2]["tool_calls"] == calls
    assert "name" not in example.messages[3]
    tokenizer.chat_template = STRICT
    with pytest.raises(
        DataError, match=r"row -1: .* refuses these messages \(roles system, user, .*Only user and assistant"
    ):
        parts({"messages": chat}, tokenizer)
    with pytest.raises(DataError, match="a part of type 'image'; only text can be trained"):
        rendered([{"messages": [{"role": "user", "content": [{"type": "image"}]}]}])


def test_messages_of_a_prompt_are_not_trained(tokenizer: Any) -> None:
    tokenizer.chat_template = STRICT
    before = [*ONE, {"role": "user", "content": "2"}]
    row = {"prompt": before, "completion": [{"role": "assistant", "content": "3"}]}
    assert parts(row, tokenizer) == ("[user]question[assistant]answer</s>[user]2[assistant]", "3</s>")


def test_system_and_tools_have_columns_of_their_own(tokenizer: Any) -> None:
    tokenizer.chat_template = TOOLS
    row = {"system": "be 1", "conversations": ONE, "tools": '[{"name": "add"}]'}
    untrained, trained = parts(row, tokenizer)
    assert untrained.startswith('<tools>[{"name": "add"}]</tools><|im_start|>system\nbe 1<|im_end|>\n<|im_start|>user')
    assert trained == "answer<|im_end|>\n</s>"
    untrained, _ = parts({"system": "be 1", "prompt": "question", "response": "answer"}, tokenizer)
    assert untrained.startswith("<|im_start|>system\nbe 1<|im_end|>\n<|im_start|>user\nquestion")
    with pytest.raises(DataError, match="row 0, column 'tools': expected a list of tools"):
        rendered([{**row, "tools": "add"}])
