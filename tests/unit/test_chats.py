"""Chats of several turns: every reply is trained, as the model has to write it, after the text that it then reads.

The templates and the masks of reference are those of the package trl; texts of reference are written by transformers.
"""

import importlib.util
import json
import re
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from allranks.errors import DataError
from allranks.spec.data_templates import Example, choose_template, row_prompt
from allranks.spec.records import DataSpec
from allranks.train.data.chats import ChatWriter
from allranks.train.data.tokenization import encode_text, train_tokenizer

Message = dict[str, Any]

ENDS = {
    "phi3": "<|endoftext|>", "phi3_5": "<|endoftext|>", "gptoss": "<|return|>", "glm4moe": "<|endoftext|>",
    "llama3": "<|eot_id|>", "llama3_1": "<|eot_id|>", "gemma": "<eos>", "gemma3": "<eos>",
    "cohere": "<|END_OF_TURN_TOKEN|>",
}  # fmt: skip
"""End-of-text token of the family's tokenizer; the others have ``<|im_end|>``."""
SPECIAL = re.compile(r"<\|[^|<>\s]+\|?>|<[^|<>\s]*\|>|<(?:start|end)_of_\w+>|\[gMASK\]|<sop>")
QUESTIONS = ["What is 1+1?", "Say: It is two. 🙂", "ok"]
REPLIES = ["It is two.", "It is two.", "Bye é🙂"]
PAIRS = zip(QUESTIONS, REPLIES, strict=True)
TURNS = [turn for question, reply in PAIRS for turn in (("user", question), ("assistant", reply))]
CHAT = [{"role": role, "content": text} for role, text in TURNS]
"""The second question has the text of a reply, and two replies are the same."""
THINKING = [m | ({"reasoning_content": "hmm", "thinking": "hmm"} if m["role"] == "assistant" else {}) for m in CHAT]
SUB = {"function": {"name": "sub", "arguments": {}}}
CALL = {"type": "function", "id": "c1", "function": {"name": "add", "arguments": '{"a": 1, "b": "ü"}'}}
TOOL_CHAT = [
    {"role": "user", "content": "Add."},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "3", "name": "add", "tool_call_id": "c1"},
    {"role": "assistant", "content": "It is 3."},
]
FUNCTION = {"name": "add", "description": "adds", "parameters": {"type": "object", "properties": {}}}
TOOLS = ({"type": "function", "function": FUNCTION},)


def template(name: str) -> str:
    found = importlib.util.find_spec("trl")
    if found is None or not found.submodule_search_locations:
        pytest.skip("the package trl is not installed; its chat templates are needed")
    return (Path(found.submodule_search_locations[0]) / "chat_templates" / f"{name}.jinja").read_text()


def tokenizer_of(family: str, text: str | None = None) -> Any:
    """Return a tokenizer with the special tokens of a family; the original template, or `text`."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    end = ENDS.get(family, "<|im_end|>")
    special = sorted({*SPECIAL.findall(template(family)), end, "<bos>", "<pad>"})
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made_of = {"special_tokens": special, "initial_alphabet": pre_tokenizers.ByteLevel.alphabet()}
    trainer = trainers.BpeTrainer(vocab_size=500, show_progress=False, **made_of)
    raw.train_from_iterator(["user assistant system tool hmm What is It is two. Bye"] * 3, trainer)
    raw.add_tokens([AddedToken("<think>", special=False), AddedToken("</think>", special=False)])
    made = PreTrainedTokenizerFast(tokenizer_object=raw)
    made.add_special_tokens({"eos_token": end, "bos_token": "<bos>", "pad_token": "<pad>"})
    made.chat_template = text or template(family)
    return made


def trained(messages: list[Message], tokenizer: Any, **options: Any) -> Iterator[tuple[list[int], list[int]]]:
    """Yield the tokens before each trained part of a chat, and those of the part."""
    chat = Example(messages=tuple(messages), row=0, **options)
    for row in encode_text([chat], tokenizer, max_length=None, mask_prompt=True):
        ids, at = row.ids.tolist(), 0
        for wanted, group in groupby(row.mask.tolist()):
            size = len(list(group))
            if wanted:
                yield ids[:at], ids[at : at + size]
            at += size


def parts(messages: list[Message], tokenizer: Any, **options: Any) -> list[str]:
    return [tokenizer.decode(ids) for _, ids in trained(messages, tokenizer, **options)]


NAMED = [
    # family, what ends a reply within a row, and at the end of a row; None: no reply ends within a row
    ("phi3", CHAT, "<|end|>", "<|end|>\n<|endoftext|>"),
    ("gptoss", CHAT, "", "<|return|>"),
    ("gptoss", THINKING, None, "<|return|>"),
    ("glm4moe", CHAT, "<|user|>", "<|endoftext|>"),
    ("glm4moe", THINKING, None, "<|endoftext|>"),
    ("qwen3", THINKING, None, "<|im_end|>"),
    ("qwen3_5_think", CHAT, None, "<|im_end|>"),
    ("qwen3_5_nothink", CHAT, None, "<|im_end|>"),
    ("llama3", CHAT, "<|eot_id|>", "<|eot_id|>"),
    ("qwen2_5", CHAT, "<|im_end|>", "<|im_end|>"),
    ("gemma3", CHAT, "<end_of_turn>", "<end_of_turn><eos>"),
]


@pytest.mark.parametrize(("family", "messages", "within", "last"), NAMED)
def test_every_reply_is_trained_after_what_the_model_reads(
    family: str, messages: list[Message], within: str | None, last: str
) -> None:
    """Compared with transformers alone: the prompt of each reply, and the reply after it, both as token ids."""
    tokenizer = tokenizer_of(family)
    end = tokenizer(last, add_special_tokens=False)["input_ids"]
    middle = tokenizer(within or "", add_special_tokens=False)["input_ids"]
    found = list(trained(messages, tokenizer))
    numbers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    assert len(found) == len(numbers)
    for number, (before, reply) in zip(numbers, found, strict=True):
        prompt = tokenizer.apply_chat_template(messages[:number], add_generation_prompt=True)["input_ids"]
        whole = tokenizer.apply_chat_template(messages[: number + 1])["input_ids"]
        if before[:1] == [tokenizer.bos_token_id] != prompt[:1]:
            before = before[1:]  # noqa: PLW2901
        assert before == prompt
        ends = end if within is None or number == numbers[-1] else middle
        content = reply[: len(reply) - len(ends)]
        assert content == whole[len(prompt) :][: len(content)] and reply[len(content) :] == ends
        text = tokenizer.decode(content)
        assert text.endswith(messages[number]["content"]) and messages[number].get("thinking", "") in text


@pytest.mark.parametrize(
    ("family", "messages", "given"),
    [
        ("phi3", CHAT, ""),
        ("glm4moe", CHAT, ""),
        ("gptoss", CHAT, "<|start|>assistant"),
        ("qwen2_5", CHAT, "\n"),
        ("qwen3_instruct_2507", CHAT, ""),
        ("gemma3", CHAT, ""),
        ("cohere", CHAT, ""),
        ("qwen3", THINKING, ""),
        ("qwen3_5_think", CHAT, "<think>\n"),
        ("qwen3_5_nothink", CHAT, "<think>\n\n</think>\n\n"),
    ],
)
def test_the_same_is_trained_as_by_trl(family: str, messages: list[Message], given: str) -> None:
    """Compared with the masks of TRL's template for training, which trains `given`, although the prompt has it."""
    tokenizer = tokenizer_of(family)
    by_trl = tokenizer.apply_chat_template(
        messages, chat_template=template(f"{family}_training"), return_dict=True, return_assistant_tokens_mask=True
    )
    runs = groupby(zip(by_trl["input_ids"], by_trl["assistant_masks"], strict=True), key=lambda pair: pair[1])
    theirs = [tokenizer.decode([token for token, _ in group]) for wanted, group in runs if wanted]
    assert all(text.startswith(given) for text in theirs)
    ends = {"<|end|>", tokenizer.eos_token, "<|user|>"}  # gpt-oss, GLM-4 and Gemma: see the test above

    def without(text: str) -> str:
        """Return a reply without white space and end tokens at its end, of which TRL trains others."""
        while any((text := text.rstrip()).endswith(end) for end in ends):
            text = text.removesuffix(next(end for end in ends if text.endswith(end)))
        return text

    ours = [without(text) for text in parts(messages, tokenizer)]
    assert [without(text.removeprefix(given)) for text in theirs] == ours


@pytest.mark.parametrize("family", ["phi3", "gptoss", "glm4moe", "qwen3_5_think", "gemma3", "llama3"])
def test_marks_of_the_template_are_used(family: str) -> None:
    """TRL's template marks with ``{% generation %}`` what it trains; what the prompt has already is not trained."""
    found = parts(CHAT, tokenizer_of(family, template(f"{family}_training")))
    assert all(reply in text for reply, text in zip(REPLIES, found, strict=True))
    assert not any("assistant" in text or "What" in text for text in found)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5_think", "phi3", "glm4moe", "gptoss", "gemma4_v5"])
def test_edges_of_chats(family: str) -> None:
    """A system message, consecutive and empty replies, a border between emojis, white space, and a last question."""
    tokenizer = tokenizer_of(family)
    texts = ("Be brief.", "🙂", "🙂🙂", "é", "What\n", "", "ok")
    roles = ("system", "user", "assistant", "assistant", "user", "assistant", "user")
    chat = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)]
    if family in ("qwen3", "gemma4_v5"):  # two replies as one, or the first differently in the prompt of the second
        wrong = r"row 0, message 3 \(assistant\): it cannot be located .* join it with message 2"
        with pytest.raises(DataError, match=wrong):
            parts(chat, tokenizer)
        del chat[3]
    numbers = [i for i, message in enumerate(chat) if message["role"] == "assistant"]
    found = list(trained(chat, tokenizer))
    for (before, reply), number in zip(found, numbers, strict=True):
        prompt = tokenizer.apply_chat_template(chat[:number], tokenize=False, add_generation_prompt=True)
        assert tokenizer.decode(before).removeprefix("<bos>") == prompt.removeprefix("<bos>")
        assert chat[number]["content"] in tokenizer.decode(reply)
    assert "<|user|>" not in tokenizer.decode(found[0][1]), "no user follows the first reply of two"


def test_the_prompt_is_trained_too_if_asked_for() -> None:
    chat = Example(messages=(*CHAT, {"role": "user", "content": "ok"}))
    (whole,) = encode_text([chat], tokenizer := tokenizer_of("qwen3"), max_length=None, mask_prompt=False)
    assert whole.mask.all()
    assert tokenizer.decode(whole.ids) == tokenizer.apply_chat_template(list(chat.messages), tokenize=False).rstrip()


def test_messages_of_the_prompt_are_not_trained() -> None:
    assert len(parts(CHAT, tokenizer_of("qwen3"), first_trained=3)) == 2
    assert len(parts(CHAT, tokenizer_of("phi3"), first_trained=4)) == 1


def test_rows_of_a_chat_are_cut_by_themselves() -> None:
    chat, tokenizer = Example(messages=tuple(CHAT)), tokenizer_of("qwen3")
    whole = encode_text([chat, chat], tokenizer, max_length=None, mask_prompt=True)
    cut = encode_text([chat, chat], tokenizer, max_length=len(whole[1].ids) - 2, mask_prompt=True)
    assert [row.example for row in cut] == [0, 0, 0, 1, 1, 1]
    assert [row.cut_tokens for row in cut[:3]] == [0, 2, len(whole[2].ids) - len(whole[1].ids) + 2]
    assert [int(row.mask.sum()) for row in cut[:2]] == [int(whole[0].mask.sum()), int(whole[1].mask.sum()) - 2]


@pytest.mark.parametrize("family", ["qwen3_5_think", "glm4moe", "gptoss", "qwen2_5", "llama3_1"])
@pytest.mark.parametrize("as_text", [True, False])
def test_arguments_of_tool_calls_are_encoded_once(family: str, as_text: bool) -> None:
    """As text, which is OpenAI's form, and as an object, which is that of transformers."""
    arguments = CALL["function"]["arguments"]
    call = {**CALL, "function": {"name": "add", "arguments": arguments if as_text else json.loads(arguments)}}
    chat = [TOOL_CHAT[0], {**TOOL_CHAT[1], "tool_calls": [call]}, *TOOL_CHAT[2:]]
    found = parts(chat, tokenizer_of(family), tools=TOOLS)
    assert len(found) == 2 and "add" in found[0] and "ü" in found[0] and "\\" not in found[0]
    assert "3" not in found[0], "what the tool says is not trained"


def test_templates_of_the_older_form_get_arguments_as_text() -> None:
    """One that fails on objects, and one that would write them as Python does."""
    tokenizer = train_tokenizer(["user assistant add"] * 3, 400, classifier=False)
    for written in ("'(' + c.function.arguments + ')'", "c.function.arguments"):
        call = "{{ c.function.name }}{{ " + written + " }}"
        tokenizer.chat_template = (
            "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% for c in m.tool_calls or [] %}"
            + call
            + "{% endfor %}"
            "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
            "{% if add_generation_prompt %}[assistant]{% endif %}"
        )
        assert '{"a": 1, "b": "ü"}' in parts(TOOL_CHAT, tokenizer)[0]


@pytest.mark.parametrize(
    ("family", "change", "named"),
    [
        ("phi3", {1: {"tool_calls": [CALL]}}, r"message 1 \(assistant\): .* does not write tool_calls"),
        ("llama3", {1: {"function_call": {"name": "add"}}}, "function_call"),
        ("phi3", {1: {"reasoning_content": "hmm"}}, "reasoning_content"),
        ("gemma4_v2", {1: {"thinking": "hmm"}}, "thinking"),
        ("phi3", {0: {"role": "developer"}}, r"message 0 \(developer\): .* does not write messages of this role"),
        ("phi3", {2: {"role": "tool"}}, r"message 2 \(tool\)"),
        ("gptoss", {1: {"content": "", "tool_calls": [CALL, SUB]}}, r"tool_calls\[1\]"),
        ("llama3_1", {1: {"tool_calls": [CALL]}}, "does not write its content"),
    ],
)
def test_what_the_template_leaves_out_is_an_error(family: str, change: dict[int, Message], named: str) -> None:
    chat = [{**message, **change.get(number, {})} for number, message in enumerate(CHAT)]
    with pytest.raises(DataError, match=named):
        parts(chat, tokenizer_of(family))


def test_tools_that_are_not_written_are_an_error() -> None:
    with pytest.raises(DataError, match=r"row 0: .* does not write the tools"):
        parts(CHAT, tokenizer_of("phi3"), tools=TOOLS)
    default = train_tokenizer(["user assistant"] * 3, 400, classifier=False)
    with pytest.raises(DataError, match=r"row 0, message 1 \(assistant\): .* does not write tool_calls"):
        parts(TOOL_CHAT, default)
    assert parts([{"role": "developer", "content": "x"}, *CHAT], default) == [f"{text}</s>" for text in REPLIES]


def test_a_reply_that_cannot_be_located_is_refused() -> None:
    tokenizer = train_tokenizer(["user assistant"] * 3, 400, classifier=False)
    tokenizer.chat_template = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]<think>{% endif %}"
    )
    with pytest.raises(DataError, match=r"row 0, message 1 \(assistant\): it cannot be located .*\[assistant\]<think>"):
        parts(CHAT, tokenizer)


SLOW = (
    "{% for m in messages %}{{ '[U]' + m.content + '[A]' if m.role == 'user' else m.content + eos_token }}{% endfor %}"
)


@pytest.mark.parametrize("joined", [True, False])
def test_a_tokenizer_without_offsets(tmp_path: Path, joined: bool) -> None:
    """CTRL's is written in Python; its words end at white space: ``[A]It`` is one if the row is encoded at once."""
    from transformers import CTRLTokenizer

    pieces = [p for c in sorted(set("".join(QUESTIONS + REPLIES) + "[UA]</s>") - {" "}) for p in (c, f"{c}@@")] + ["It"]
    (tmp_path / "vocab.json").write_text(json.dumps({p: i for i, p in enumerate(["<unk>", *pieces])}))
    (tmp_path / "merges.txt").write_text("#version\nI t</w>\n")
    tokenizer = CTRLTokenizer(str(tmp_path / "vocab.json"), str(tmp_path / "merges.txt"))
    tokenizer.add_special_tokens({"eos_token": "</s>"})
    assert not tokenizer.is_fast
    tokenizer.chat_template = SLOW.replace("[A]", "[A] ").replace("[U]", " [U]") if joined else SLOW
    chat = CHAT[:4]
    assert [text.replace(" ", "") for text in parts(chat, tokenizer)] == ["Itistwo.</s>"] * 2
    (row,) = encode_text([Example(messages=tuple(chat))], tokenizer, max_length=None, mask_prompt=True)
    at_once = tokenizer(tokenizer.apply_chat_template(chat, tokenize=False), add_special_tokens=False)["input_ids"]
    assert (row.ids.tolist() == at_once) == joined


def test_generate_writes_the_prompt_as_it_was_trained() -> None:
    """With the tools of the row, and refusing the same."""
    tokenizer = tokenizer_of("qwen2_5")
    row = {"messages": TOOL_CHAT[:3], "tools": list(TOOLS)}
    asked = row_prompt("chat", "chat", {}, row)
    assert isinstance(asked, Example)
    prompt = ChatWriter(tokenizer).prompt(asked.messages, asked.tools)
    whole = choose_template(DataSpec(source="x"), [{**row, "messages": TOOL_CHAT}], classifier=False)
    (trained_row,) = ChatWriter(tokenizer).rows(whole.render({**row, "messages": TOOL_CHAT}, 0))
    assert prompt == "".join(text for text, _ in trained_row.turns[:-1])
    with pytest.raises(DataError, match="does not write the tools"):
        ChatWriter(tokenizer_of("phi3")).prompt(CHAT[:1], TOOLS)
