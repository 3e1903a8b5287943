"""Convert rows to text: prompt (not trained with ``mask_prompt``) and response, chat messages, or text with a label.

A prompt for generation is made by the same template, from a user's text or a row's columns without its response.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from allranks.errors import DataError, SpecError
from allranks.spec.data_columns import (
    TEMPLATE_KINDS,
    Columns,
    columns_of,
    fitting_template,
    has_role,
    merged_row,
    require_roles,
)
from allranks.spec.data_sources import Row, builtin_set, source_of
from allranks.spec.records import DataSpec
from allranks.utils.inputs import read_text
from allranks.utils.text import did_you_mean

MAX_TEMPLATE_BYTES = 1 << 20
SHAREGPT_ROLES = {
    "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system", "tool": "tool",
    "function": "tool", "observation": "tool",
}  # fmt: skip
"""Roles of the key ``from``, and what they are called in the key ``role``."""
Message = dict[str, Any]


class Template(msgspec.Struct, frozen=True):
    """Conversion of a row to an `Example`."""

    kind: str
    render: Render
    reason: str = ""
    """Why it was chosen."""


def require_task_template(kind: str, model: str, *, classifier: bool) -> None:
    """Check that a template suits the model: labels for a classifier, text for a language model; else `DataError`."""
    if classifier and kind != "classification":
        raise DataError(
            f"data.template {kind} gives text for a language model, but model.name {model} is trained as a classifier; "
            "set data.template: classification, with columns text and label, or choose a causal language model"
        )
    if not classifier and kind == "classification":
        raise DataError(
            f"data.template classification gives labels for a classifier, but model.name {model} is a causal language "
            "model; choose another template, or an encoder such as bert"
        )


def choose_template(data: DataSpec, rows: Sequence[Row], *, classifier: bool) -> Template:
    """Return the template that the spec names, or that fits the built-in set or the columns.

    Raises:
        DataError: columns that the template needs are missing; the message lists the existing ones.
        SpecError: an unknown template.
    """
    name, reason = data.template, "by data.template"
    columns: Columns = data.columns
    if source_of(data).startswith("builtin:"):
        own = builtin_set(source_of(data))
        columns = {**own.columns, **columns}
        if name == "auto":
            # a language model reads labelled texts as texts
            name = "text" if own.template == "classification" and not classifier else own.template
            reason = "of the built-in set"
    if name == "auto":
        name, reason = fitting_template(data, columns, rows, classifier=classifier)
    require_template(name)
    require_roles(data.columns, name)
    if name in TEMPLATE_KINDS:
        return Template(name, _RENDERERS[name](data, columns, list(merged_row(rows))), reason)
    return Template("jinja", _jinja(Path(name).expanduser(), mask_prompt=data.mask_prompt), f"{reason}: {name}")


def require_template(name: str) -> None:
    """Refuse a name that is not a template, independent of the data.

    Raises:
        SpecError: unknown template; the message names the nearest one.
        DataError: the file does not exist.
    """
    if name in ("auto", *TEMPLATE_KINDS):
        return
    path = Path(name).expanduser()
    if path.suffix not in (".j2", ".jinja", ".jinja2"):
        hint = did_you_mean(name, TEMPLATE_KINDS)
        raise SpecError(
            f"data.template: unknown template {name!r}{hint} (known: {', '.join(TEMPLATE_KINDS)}, or a .jinja file)"
        )
    if not path.is_file():
        raise DataError(f"data.template {path}: there is no such file")


def _alpaca(data: DataSpec, columns: Columns, present: Sequence[str]) -> Render:
    instruction = columns_of("instruction", data, columns, present)
    given = columns_of("input", data, columns, present, required=False)

    def prompt(row: Row, number: int) -> str:
        extra = row_text(row, given, number)
        middle = f"### Input:\n{extra}\n\n" if extra.strip() else ""
        return f"### Instruction:\n{row_text(row, instruction, number)}\n\n{middle}### Response:\n"

    return _answered(prompt, columns_of("output", data, columns, present))


def _completion(data: DataSpec, columns: Columns, present: Sequence[str]) -> Render:
    names = columns_of("prompt", data, columns, present)
    answer = columns_of("completion", data, columns, present)
    return _answered(lambda row, number: row_text(row, names, number), answer)


def _answered(prompt: Callable[[Row, int], str], output: list[str]) -> Render:
    def render(row: Row, number: int) -> Example:
        answer = row_text(row, output, number)
        empty = "" if answer.strip() else output[0]
        return Example(turns=((prompt(row, number), False), (answer, True)), answer=answer, empty=empty)

    return render


def _plain(data: DataSpec, columns: Columns, present: Sequence[str]) -> Render:
    names = columns_of("text", data, columns, present)

    def render(row: Row, number: int) -> Example:
        text = row_text(row, names, number)
        return Example(turns=((text, True),), empty="" if text.strip() else names[0])

    return render


def _classification(data: DataSpec, columns: Columns, present: Sequence[str]) -> Render:
    names = columns_of("text", data, columns, present)
    (label,) = columns_of("label", data, columns, present)

    def render(row: Row, number: int) -> Example:
        value = row.get(label)
        if is_missing(value) or value == "":
            raise DataError(f"row {number}, column {label!r}: the label is missing")
        text = row_text(row, names, number)
        return Example(turns=((text, False),), label=str(value), empty="" if text.strip() else names[0])

    return render


def _jinja(path: Path, *, mask_prompt: bool) -> Render:
    """Load a user's template. Blocks named ``prompt`` and ``response`` separate masked from trained text.

    Raises:
        DataError: no such file, or not a template; or no block named ``response``, where the prompt is to be masked.
    """
    from jinja2 import TemplateError

    template = _jinja_template(path)
    if mask_prompt and "response" not in template.blocks:
        raise DataError(
            f"data.template {path}: no block named response, so that the prompt would be trained although "
            "data.mask_prompt is true; write {% block prompt %}...{% endblock %}{% block response %}...{% "
            "endblock %}, or set data.mask_prompt: false"
        )

    def render(row: Row, number: int) -> Example:
        where = f"data.template {path}, row {number}"
        try:
            if "response" not in template.blocks:
                text = encodable(template.render(**row), where)
                return Example(turns=((text, True),), empty="" if text.strip() else "text")
            prompt = encodable(_block(template, "prompt", row), where) if "prompt" in template.blocks else ""
            answer = encodable(_block(template, "response", row), where)
        except TemplateError as error:
            raise DataError(f"{where}: {error}; the columns are: {', '.join(map(str, row))}") from None
        empty = "" if answer.strip() else "response"
        return Example(turns=((prompt, False), (answer, True)), answer=answer, empty=empty)

    return render


def _jinja_template(path: Path) -> Any:
    from jinja2 import StrictUndefined, TemplateError
    from jinja2.sandbox import SandboxedEnvironment

    environment = SandboxedEnvironment(undefined=StrictUndefined, keep_trailing_newline=True, autoescape=False)
    try:
        return environment.from_string(read_text(path, MAX_TEMPLATE_BYTES))
    except (TemplateError, UnicodeDecodeError) as error:
        raise DataError(f"data.template {path}: {error}") from None
    except OSError as error:
        raise DataError(f"data.template {path}: {error.strerror or error}") from None


def _block(template: Any, name: str, row: Mapping[str, Any]) -> str:
    return "".join(template.blocks[name](template.new_context(dict(row))))


class Example(msgspec.Struct, frozen=True):
    """One row as text. ``turns`` alternate (text, trained?); ``answer`` is the correct reply, if known.

    ``empty`` is the column or part without which there is nothing to learn, where a row has no text in it.
    """

    turns: tuple[tuple[str, bool], ...] = ()
    messages: tuple[dict[str, Any], ...] = ()
    label: str | None = None
    answer: str | None = None
    empty: str = ""
    row: int = -1
    """Number of the row in its file, from 0."""
    source: str = ""
    """Name of its source in a mixture."""
    first_trained: int = 0
    """Assistant messages before this one belong to the prompt."""
    tools: tuple[dict[str, Any], ...] = ()
    """Descriptions of tools, for the chat template."""

    @property
    def place(self) -> str:
        """Return where the row is, for messages."""
        return f"{self.source}, row {self.row}" if self.source else f"row {self.row}"

    @property
    def prompt(self) -> str:
        """Return the text before the trained turn, of a row that is no chat."""
        return "".join(text for text, trained in self.turns if not trained)


Render = Callable[[Row, int], Example]


def is_missing(value: Any) -> bool:
    """Return whether a cell has no value; NaN is how pandas writes a missing one."""
    return value is None or (isinstance(value, float) and math.isnan(value))


def row_text(row: Row, names: list[str], number: int) -> str:
    """Return the cells of these columns as text, a line each; missing ones are left out.

    Raises:
        DataError: a cell is a list or an object.
    """
    parts = []
    for name in names:
        value = row.get(name)
        if is_missing(value):
            continue
        if not isinstance(value, (str, int, float)):
            raise DataError(f"row {number}, column {name!r}: expected text, found a {type(value).__name__}")
        parts.append(encodable(str(value), f"row {number}, column {name!r}"))
    return "\n".join(part for part in parts if part)


def encodable(text: str, where: str) -> str:
    """Return the text, or refuse half of a surrogate pair, which JSON can express and UTF-8 cannot.

    Raises:
        DataError: names the row, the column and the code unit.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{where}: character {error.start} is \\u{ord(text[error.start]):04x}, half of a surrogate pair, which is "
            "not text; remove it, or write both halves"
        ) from None
    return text


def chat_renderer(data: DataSpec, columns: Columns, present: Sequence[str]) -> Render:
    """Return the conversion of a row to an `Example` with messages; the chat template follows when it is tokenized.

    Raises:
        DataError: no columns for a chat.
    """

    def named(role: str, *, required: bool = True) -> list[str]:
        return columns_of(role, data, columns, present, required=required)

    def has(*roles: str) -> bool:
        return all(has_role(role, columns, present) for role in roles)

    system, tools, context, answer = named("system", required=False), named("tools", required=False), [], []
    if not has("messages") and has("prompt", "response"):
        question, answer = named("prompt"), named("response")
    elif not has("messages") and has("instruction", "output"):
        question, context, answer = named("instruction"), named("input", required=False), named("output")
    else:
        question = named("messages")[:1]

    def render(row: Row, number: int) -> Example:
        before = _part(row, question, number, "user", context) if answer else []
        after = (
            _part(row, answer, number, "assistant")
            if answer
            else _messages(row.get(question[0]), f"row {number}, column {question[0]!r}")
        )
        first, text = before or after, row_text(row, system, number)
        if text.strip() and first[0]["role"] != "system":
            first.insert(0, {"role": "system", "content": text})
        return _example(before, after, answer[0] if answer else question[0], number, _tools(row, tools, number))

    return render


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
    return [_message(one, f"{where}, message {number}") for number, one in enumerate(value)]


def _message(message: Any, where: str) -> Message:
    if not isinstance(message, dict):
        raise DataError(
            f"{where}: every message needs 'role' and 'content' (or 'from' and 'value'), found a "
            f"{type(message).__name__}"
        )
    if "role" not in message and "from" in message:
        said = message["from"]
        role, content = SHAREGPT_ROLES.get(str(said).lower()), message.get("value")
        if role is None:
            raise DataError(f"{where}: unknown speaker {said!r} in 'from' (known: {', '.join(SHAREGPT_ROLES)})")
    else:
        role, content = message.get("role"), message.get("content")
    # a table with one type for all messages, such as Parquet, fills the keys that a message does not have with null
    rest = {k: v for k, v in message.items() if k not in ("role", "content", "from", "value") and v not in (None, [])}
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


_RENDERERS = {
    "alpaca": _alpaca, "chat": chat_renderer, "completion": _completion, "text": _plain,
    "classification": _classification,
}  # fmt: skip


ANSWER_ROLES = {"alpaca": ("output",), "completion": ("completion",), "chat": ("response", "completion", "output")}
"""Roles of what the model should write; a row for a prompt does not need them."""


def prompt_of(kind: str, template: str, text: str) -> str | None:
    """Return a user's text as the prompt of a row of the template; None for chats, which need the tokenizer's own
    template.

    Args:
        kind: the template of the run's data, as its events name it.
        template: ``data.template``, the file of a Jinja template.

    Raises:
        DataError: the rows had several templates; the file is missing, or it makes the prompt of columns.
    """
    _require_one_template(kind)
    if kind == "chat":
        return None
    if kind == "alpaca":
        return str(row_prompt(kind, template, {}, {"instruction": text}))
    if kind == "jinja" and "prompt" in _jinja_template(Path(template).expanduser()).blocks:
        raise DataError(
            f"data.template {template}: its prompt is made of columns; give them with --row, or the whole prompt with "
            "--raw"
        )
    return text


def row_prompt(kind: str, template: str, columns: Columns, row: Mapping[str, Any]) -> str | Example:
    """Return the prompt of a row without its response; of a chat the messages and tools, which need the tokenizer's own
    template.

    Args:
        kind: the template of the run's data, as its events name it.
        template: ``data.template``, the file of a Jinja template.
        columns: ``data.columns``.

    Raises:
        DataError: the rows had several templates, or the row lacks a column of the prompt.
    """
    _require_one_template(kind)
    if kind == "jinja":
        from jinja2 import TemplateError

        file = _jinja_template(Path(template).expanduser())
        if "prompt" not in file.blocks:
            raise DataError(f"data.template {template}: it has no block prompt; give the beginning with --prompt")
        try:
            return _block(file, "prompt", row)
        except TemplateError as error:
            raise DataError(f"--row: data.template {template}: {error}; the row has: {', '.join(row)}") from None
    whole = dict(row)
    data = DataSpec(source="--row", template=kind, columns=dict(columns))
    if kind in ("text", "classification"):
        return row_text(whole, columns_of("text", data, columns, list(whole)), 0)
    if kind == "chat" and (messages := columns_of("messages", data, columns, list(whole), required=False)):
        if not isinstance(whole[messages[0]], list) or not whole[messages[0]]:
            raise DataError("--row: expected a list of messages with role and content")
        whole[messages[0]] = [*whole[messages[0]], {"role": "assistant", "content": "?"}]
    for role in ANSWER_ROLES[kind]:
        if isinstance(name := columns.get(role), str):
            whole.setdefault(name, "?")
    if not any(role in columns or role in whole for role in ANSWER_ROLES[kind]):
        whole["output" if "instruction" in [*columns, *whole] else ANSWER_ROLES[kind][0]] = "?"
    example = choose_template(data, [whole], classifier=False).render(whole, 0)
    if kind != "chat":
        return example.prompt
    return msgspec.structs.replace(example, messages=example.messages[: example.first_trained or -1])


def _require_one_template(kind: str) -> None:
    if " + " in kind:
        raise DataError(
            f"the run mixed rows of several templates ({kind}), so one text is not a prompt; give the whole prompt "
            "with --raw"
        )
