"""Write chats with the tokenizer's chat template, and find in the text what the model has to write.

Each reply is trained after exactly the text that the model reads when it has to write this reply. Most templates only
append, so that one text has all replies of a chat. Others write a reply differently once messages follow, such as
without its reasoning: the next reply then begins a row of its own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from jinja2 import TemplateError

from allranks.errors import DataError
from allranks.spec.data_templates import Example, Message

DEFAULT_CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>\n{{ m['content'] }}{{ eos_token if m['role'] == 'assistant' else '' "
    "}}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
"""For models without a chat template: base models, and those that are built from a config."""
FIELDS = (("tool_calls",), ("function_call",), ("tool_plan",), ("reasoning_content", "reasoning", "thinking"))
"""Message fields that are text for the model, grouped by meaning. Others (``name``, ``id``) may be left out."""
MARK = "qzX{}Xzq"
"""Added to a content to see whether the template writes it; JSON does not escape it."""

REMEDY = "use a model whose chat template does, remove it from the row, or use a .jinja file as data.template"
Turn = tuple[str, bool]


class ChatWriter:
    """Write chats with a tokenizer's chat template, or the default one."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        added = getattr(tokenizer, "added_tokens_decoder", {}).values()
        special = {token.content for token in added if token.special} | set(tokenizer.all_special_tokens)
        self.special = re.compile("|".join(map(re.escape, sorted(special, key=len, reverse=True))) or r"(?!)")

    def rows(self, example: Example, *, mask_prompt: bool = True) -> list[Example]:
        """Return the rows of a chat as turns, each up to its last reply; a row that is no chat as it is.

        Raises:
            DataError: the template refuses messages, does not write a part, or does not show where a reply begins.
        """
        if not example.messages:
            return [example]
        last = max(i for i, message in enumerate(example.messages) if message["role"] == "assistant")
        count = last + 1 if mask_prompt else len(example.messages)
        chat = _Chat(self, example.place, example.messages[:count], example.tools)
        chat.require_written()
        rows = _joined_replies(chat, example.first_trained) if mask_prompt else [[(self.ended(chat.text(count)), True)]]
        return [msgspec.structs.replace(example, turns=tuple(row), messages=()) for row in rows]

    def prompt(self, messages: Sequence[Message], tools: Sequence[Any] = (), place: str = "the prompt") -> str:
        """Return the text after which the model has to reply.

        Raises:
            DataError: the template refuses the messages, or does not write a part of them.
        """
        chat = _Chat(self, place, messages, tools, prompt=True)
        chat.require_written()
        return chat.text(len(messages), prompt=True)

    def ended(self, reply: str) -> str:
        """Return a reply without the white space after the token that ends it: generation stops at that token."""
        stripped = reply.rstrip()
        return stripped if self.ends(stripped) else reply

    def ends(self, text: str) -> bool:
        """Return whether a special token ends the text."""
        return any(match.end() == len(text) for match in self.special.finditer(text))


class _Chat:
    """Messages, and what the template writes for the first ones of them."""

    def __init__(
        self, writer: ChatWriter, place: str, messages: Sequence[Message], tools: Sequence[Any], *, prompt: bool = False
    ) -> None:
        self.writer, self.place, self._at_end = writer, place, prompt
        own, self._tools = writer.tokenizer.chat_template, list(tools) or None
        default = own in (None, DEFAULT_CHAT_TEMPLATE)
        self._named = "the default chat template (the model has none)" if default else "the model's chat template"
        self.template: str = writer.tokenizer.get_chat_template(tools=self._tools) if own else DEFAULT_CHAT_TEMPLATE
        self._marked = re.search(r"\{%-?\s*generation\s*-?%\}", self.template) is not None
        self.messages = [_with_arguments(message, as_text=False) for message in messages]
        if self.messages != (as_text := [_with_arguments(message, as_text=True) for message in messages]):
            try:
                whole = self._render(self.messages, self._tools, prompt)[0]
                objects = [call["arguments"] for message in self.messages for call in _functions(message)]
                wrong = any(isinstance(one, dict) and one and str(one) in whole for one in objects)
            except DataError:
                wrong = True
            if wrong:  # a template of the older form, which joins the arguments as text
                self.messages = as_text

    def text(self, count: int, *, prompt: bool = False) -> str:
        """Return the first `count` messages as text, with `prompt` up to where the next reply begins."""
        return self._render(self.messages[:count], self._tools, prompt)[0]

    def reply(self, number: int) -> tuple[str, list[Turn]]:
        """Return the text before a reply and the reply, as the model has to write it: nothing follows it.

        Raises:
            DataError: the text with the reply does not begin with the prompt's, and the template marks no reply.
        """
        for options in ({}, {"enable_thinking": False}, {"enable_thinking": True}):
            before, earlier = self._render(self.messages[:number], self._tools, True, options)
            whole, spans = self._render(self.messages[: number + 1], self._tools, False, options)
            follows = whole.startswith(before)
            if self._marked:
                first = len(before) if follows else 0
                spans = [(max(start, first), end) for start, end in spans[len(earlier) :] if end > first]
            elif follows:
                spans = [(len(before), len(whole))]
            if spans:
                break
        else:
            twice = number > 0 and self.messages[number - 1]["role"] == "assistant"
            join = f"join it with message {number - 1}, which is the assistant's too, or " if twice else ""
            raise DataError(
                f"{self.place}, message {number} (assistant): it cannot be located in the output of the model's chat "
                f"template: the text with it does not begin with the text before it, which ends with {before[-40:]!r}; "
                f"{join}use a .jinja file as data.template"
            )
        turns: list[Turn] = []
        at = spans[0][0]
        for start, end in spans:
            if turns and start == at:
                turns[-1] = (turns[-1][0] + whole[start:end], True)
            else:
                turns += [(whole[at:start], False), (whole[start:end], True)]
            at = end
        turns[-1] = (self.writer.ended(turns[-1][0]), True)
        return whole[: spans[0][0]], turns[1:]

    def require_written(self) -> None:
        """Check that the text has every message and field, and the tools.

        Raises:
            DataError: names what the template leaves out.
        """
        marked = [_marked(message, MARK.format(number)) for number, message in enumerate(self.messages)]
        try:
            text = self._render(marked, self._tools, self._at_end)[0]
        except DataError:
            text = ""
        for number, message in enumerate(self.messages):
            if (
                message["content"].strip()
                and MARK.format(number) not in text
                and self._same(number, self._tools, content="")
            ):
                self._refuse(
                    number, "its content" if message["role"] in ("user", "assistant") else "messages of this role"
                )
            for group in FIELDS:
                given = [name for name in group if message.get(name)]
                if given and self._same(number, self._tools, **dict.fromkeys(given)):
                    self._refuse(number, " and ".join(given))
            calls = message.get("tool_calls") or []
            for i in range(len(calls) if len(calls) > 1 else 0):
                if self._same(number, self._tools, tool_calls=[*calls[:i], *calls[i + 1 :]]):
                    self._refuse(number, f"tool_calls[{i}]")
        if self._tools and self._same(len(self.messages) - 1, None):
            raise DataError(f"{self.place}: {self._named} does not write the tools (column tools); {REMEDY}")

    def _same(self, number: int, tools: list[Any] | None, **changed: Any) -> bool:
        """Return whether text up to the next reply is the same with other tools or message fields (None: removed)."""
        ends = [i for i, message in enumerate(self.messages) if i >= number and message["role"] == "assistant"]
        upto = self.messages[: ends[0] + 1 if ends else None]
        prompt = self._at_end and not ends
        other = {k: v for k, v in {**upto[number], **changed}.items() if v is not None}
        try:
            without = self._render([*upto[:number], other, *upto[number + 1 :]], tools, prompt)[0]
        except DataError:
            return False
        return without == self._render(upto, self._tools, prompt)[0]

    def _refuse(self, number: int, what: str) -> None:
        role = self.messages[number]["role"]
        raise DataError(f"{self.place}, message {number} ({role}): {self._named} does not write {what}; {REMEDY}")

    def _render(
        self, messages: list[Message], tools: list[Any] | None, prompt: bool, options: dict[str, Any] | None = None
    ) -> tuple[str, list[tuple[int, int]]]:
        """Return the text, and where the template marks with ``{% generation %}`` what the model writes."""
        tokenizer = self.writer.tokenizer
        try:
            if not self._marked:
                text: Any = tokenizer.apply_chat_template(
                    messages,
                    tools=tools,
                    chat_template=self.template,
                    tokenize=False,
                    add_generation_prompt=prompt,
                    **(options or {}),
                )
                return text, []
            from transformers.utils.chat_template_utils import render_jinja_template

            rendered: Any = render_jinja_template(
                [messages],
                tools=tools,
                chat_template=self.template,
                return_assistant_tokens_mask=True,
                add_generation_prompt=prompt,
                **tokenizer.special_tokens_map,
                **(options or {}),
            )
            return rendered[0][0], rendered[1][0]
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            roles = ", ".join(message["role"] for message in self.messages[:8])
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise DataError(
                f"{self.place}: the model's chat template refuses these messages (roles {roles}): {reason}; correct "
                "the row, or use a .jinja file as data.template"
            ) from None


def _joined_replies(chat: _Chat, first: int) -> list[list[Turn]]:
    """Return rows with all replies from message `first` on; a reply continues a row that begins the text before it."""
    rows: list[list[Turn]] = []
    for number in range(first, len(chat.messages)):
        if chat.messages[number]["role"] != "assistant":
            continue
        before, reply = chat.reply(number)
        for row in _as_history(rows[-1], chat.writer) if rows else []:
            text = "".join(part for part, _ in row)
            if before.startswith(text):
                rest = before[len(text) :]
                if row is rows[-1] and not chat.writer.ends(text) and chat.messages[number - 1]["role"] != "assistant":
                    # no token ends this reply: generation stops at the one that begins the next message
                    end = match.end() if (match := chat.writer.special.match(rest)) else 0
                    row = [*row[:-1], (row[-1][0] + rest[:end], True)]  # noqa: PLW2901
                    rest = rest[end:]
                rows[-1] = [*row, (rest, False), *reply]
                break
        else:
            rows.append([(before, False), *reply])
    return rows


def _as_history(row: list[Turn], writer: ChatWriter) -> Iterator[list[Turn]]:
    """Yield a row, and it without special tokens at its end, which many templates write only after a conversation."""
    yield row
    reply = row[-1][0].rstrip()
    while starts := [match.start() for match in writer.special.finditer(reply) if match.end() == len(reply)]:
        reply = writer.ended(reply[: starts[0]])
        if reply:
            yield [*row[:-1], (reply, True)]
        reply = reply.rstrip()


def _functions(message: Message) -> list[dict[str, Any]]:
    """Return the functions of a message's tool calls."""
    calls = message.get("tool_calls")
    functions = (
        [call.get("function", call) for call in calls if isinstance(call, dict)] if isinstance(calls, list) else []
    )
    return [one for one in functions if isinstance(one, dict) and "arguments" in one]


def _with_arguments(message: Message, *, as_text: bool) -> Message:
    """Return a message with tool-call arguments as objects, as transformers documents, or as OpenAI's JSON text."""
    if not _functions(message):
        return message
    calls = []
    for call in message["tool_calls"]:
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or "arguments" not in function:
            calls.append(call)
            continue
        changed = {**function, "arguments": _arguments(function["arguments"], as_text=as_text)}
        calls.append({**call, "function": changed} if "function" in call else changed)
    return {**message, "tool_calls": calls}


def _arguments(given: Any, *, as_text: bool) -> Any:
    if as_text:
        return given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
    if not isinstance(given, str):
        return given
    try:
        arguments = json.loads(given or "{}")
    except ValueError:
        return given
    return arguments if isinstance(arguments, dict) else given


def _marked(message: Message, mark: str) -> Message:
    content = message["content"]
    text = content.rstrip()
    return {**message, "content": f"{text}{mark}{content[len(text) :]}"} if text else message
