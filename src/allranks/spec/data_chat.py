"""Convert a row to chat messages: chats of OpenAI's and of ShareGPT's form, prompt and response, or alpaca's columns."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from allranks.errors import DataError
from allranks.spec.data_columns import Columns, columns_of, has_role
from allranks.spec.data_examples import Example, Render, encodable, is_missing, row_text
from allranks.spec.data_sources import Row
from allranks.spec.records import DataSpec

SHAREGPT_ROLES = {
    "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "chatgpt": "assistant", "bot": "assistant",
    "model": "assistant", "system": "system", "tool": "tool", "function": "tool", "observation": "tool",
}  # fmt: skip
"""Roles of the key ``from``, and what they are called in the key ``role``."""

Message = dict[str, Any]


def chat_renderer(data: DataSpec, columns: Columns, present: Sequence[str]) -> Render:
    """Return the conversion of a row to an `Example` with messages; the chat template follows when it is tokenized.

    Raises:
        DataError: no columns for a chat.
    """
    system = columns_of("system", data, columns, present, required=False)
    tools = columns_of("tools", data, columns, present, required=False)
    if has_role("messages", columns, present) or not _has_pair(columns, present):
        (name,) = columns_of("messages", data, columns, present)
        asked, given, answer = [name], [], []
    elif has_role("prompt", columns, present) and has_role("response", columns, present):
        asked, given = columns_of("prompt", data, columns, present), []
        answer = columns_of("response", data, columns, present)
    else:
        asked = columns_of("instruction", data, columns, present)
        given = columns_of("input", data, columns, present, required=False)
        answer = columns_of("output", data, columns, present)

    def render(row: Row, number: int) -> Example:
        head = [{"role": "system", "content": row_text(row, system, number)}] if system else []
        if answer:
            before = _part(row, asked, number, "user", given)
            after = _part(row, answer, number, "assistant")
        else:
            before, after = [], _messages(row.get(asked[0]), f"row {number}, column {asked[0]!r}")
        if head and head[0]["content"].strip() and (before or after)[0]["role"] != "system":
            before = head + before if answer else before
            after = after if answer else head + after
        return _example(before, after, answer[0] if answer else asked[0], number, _tools(row, tools, number))

    return render


def _has_pair(columns: Columns, present: Sequence[str]) -> bool:
    return any(
        all(has_role(role, columns, present) for role in roles)
        for roles in (("prompt", "response"), ("instruction", "output"))
    )


def _part(row: Row, names: list[str], number: int, role: str, given: Sequence[str] = ()) -> list[Message]:
    """Return a prompt or a response as messages; its cell is a text, or already a list of messages."""
    value = row.get(names[0])
    if isinstance(value, list):
        return _messages(value, f"row {number}, column {names[0]!r}")
    more = row_text(row, list(given), number)
    text = row_text(row, names, number)
    return [{"role": role, "content": f"{text}\n\n{more}" if more.strip() else text}]


def _example(before: list[Message], after: list[Message], column: str, number: int, tools: tuple[Any, ...]) -> Example:
    messages = [*before, *after]
    replies = [m for m in after if m["role"] == "assistant"]
    if not replies:
        roles = ", ".join(dict.fromkeys(m["role"] for m in messages))
        raise DataError(
            f"row {number}: chat without an assistant message; no token would be trained (its roles: {roles})"
        )
    last = messages[-1]
    said = any(m["content"].strip() or m.get("tool_calls") for m in replies)
    return Example(
        messages=tuple(messages),
        answer=last["content"] if last["role"] == "assistant" else None,
        empty="" if said else column,
        first_trained=len(before),
        tools=tools,
    )


def _messages(value: Any, where: str) -> list[Message]:
    if not isinstance(value, list) or not value:
        raise DataError(f"{where}: expected a list of messages")
    return [_message(one, where) for one in value]


def _message(message: Any, where: str) -> Message:
    if not isinstance(message, dict):
        raise DataError(
            f"{where}: every message needs 'role' and 'content' (or 'from' and 'value'), found a {type(message).__name__}"
        )
    if "role" not in message and "from" in message:
        said = message["from"]
        role, content = SHAREGPT_ROLES.get(str(said).lower()), message.get("value")
        if role is None:
            raise DataError(f"{where}: unknown speaker {said!r} in 'from' (known: {', '.join(SHAREGPT_ROLES)})")
    else:
        role, content = message.get("role"), message.get("content")
    # a table with one type for all messages, such as Parquet, fills the keys that a message does not have with null
    rest = {k: v for k, v in message.items() if k not in ("role", "content", "from", "value") and v is not None}
    if content is None and rest.get("tool_calls"):
        content = ""
    if isinstance(content, list):
        content = _joined(content, where)
    if not isinstance(role, str) or not isinstance(content, str):
        raise DataError(f"{where}: every message needs 'role' and 'content' (or 'from' and 'value'), both text")
    return {"role": role, "content": encodable(content, where), **rest}


def _joined(parts: list[Any], where: str) -> str:
    """Return the text of a content that is a list of parts, as in OpenAI's format."""
    for part in parts:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise DataError(f"{where}: a message has a part of type {kind!r}; only text can be trained")
    return "".join(part["text"] for part in parts)


def _tools(row: Row, names: list[str], number: int) -> tuple[Any, ...]:
    value = row.get(names[0]) if names else None
    if is_missing(value) or value == "":
        return ()
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            value = None
    if not isinstance(value, list):
        raise DataError(f"row {number}, column {names[0]!r}: expected a list of tools, or one as JSON")
    return tuple(value)
