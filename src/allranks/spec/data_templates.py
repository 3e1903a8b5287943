"""Convert rows to text: prompt (not trained with ``mask_prompt``) and response, or text with a label."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from allranks.errors import DataError, SpecError
from allranks.spec.data_sources import Row, builtin_set
from allranks.spec.records import DataSpec
from allranks.utils.inputs import read_text

MAX_TEMPLATE_BYTES = 1 << 20
TEMPLATE_KINDS = ("alpaca", "chat", "text", "classification")


@dataclass(frozen=True)
class Example:
    """One row as text. ``turns`` alternate (text, trained?); ``answer`` is the correct reply, if known.

    ``empty`` is the column or part without which there is nothing to learn, where a row has no text in it.
    """

    turns: tuple[tuple[str, bool], ...] = ()
    messages: tuple[dict[str, str], ...] = ()
    label: str | None = None
    answer: str | None = None
    empty: str = ""
    row: int = -1
    """Number of the row in its file, from 0."""

    @property
    def prompt(self) -> str:
        """Return the text before the first trained turn."""
        head = []
        for text, trained in self.turns:
            if trained:
                break
            head.append(text)
        return "".join(head)


@dataclass(frozen=True)
class Template:
    """Conversion of a row to an `Example`."""

    kind: str
    render: Callable[[Row, int], Example] = field(repr=False)

    @property
    def is_classification(self) -> bool:
        return self.kind == "classification"


def require_task_template(kind: str, model: str, *, classifier: bool) -> None:
    """Check that a template gives what the model is trained on: labels for a classifier, text for a language model.

    Raises:
        DataError: it does not.
    """
    if classifier and kind != "classification":
        raise DataError(
            f"data.template {kind} gives text for a language model, but model.name {model} is trained as a classifier; set data.template: "
            "classification, with columns text and label, or choose a causal language model"
        )
    if not classifier and kind == "classification":
        raise DataError(
            f"data.template classification gives labels for a classifier, but model.name {model} is a causal language model; choose another "
            "template, or an encoder such as bert"
        )


def choose_template(data: DataSpec, rows: Sequence[Row], *, classifier: bool) -> Template:
    """Return the template that the spec names, or that fits the built-in set or the columns.

    Raises:
        DataError: columns that the template needs are missing; the message lists the existing ones.
        SpecError: an unknown template.
    """
    name = data.template
    columns = dict(data.columns)
    if data.source.startswith("builtin:"):
        own = builtin_set(data.source)
        columns = {**own.columns, **columns}
        if name == "auto":
            labelled = own.template == "classification"
            name = (
                own.template if classifier or not labelled else "text"
            )  # a language model reads labelled texts as texts
    present = list(rows[0])
    if name == "auto":
        name = _auto(present, columns, classifier, data.source)
    require_template(name)
    _require_roles(data.columns, name)
    if name in TEMPLATE_KINDS:
        return Template(name, _RENDERERS[name](data, columns, present))
    return Template("jinja", _jinja(Path(name).expanduser(), mask_prompt=data.mask_prompt))


ROLES = {
    "alpaca": ("instruction", "input", "output"),
    "chat": ("messages",),
    "text": ("text",),
    "classification": ("text", "label"),
}
"""Keys of ``data.columns`` by template. A Jinja template names the columns itself."""


def _require_roles(columns: Mapping[str, Any], template: str) -> None:
    roles = ROLES.get(template, ())
    for key in columns:
        if key not in roles:
            near = difflib.get_close_matches(key, roles, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            takes = f"takes {', '.join(roles)}" if roles else "names the columns itself"
            raise SpecError(f"data.columns: {key!r} is not used: template {template} {takes}{hint}")


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
        near = difflib.get_close_matches(name, TEMPLATE_KINDS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise SpecError(
            f"data.template: unknown template {name!r}{hint} (known: {', '.join(TEMPLATE_KINDS)}, or a .jinja file)"
        )
    if not path.is_file():
        raise DataError(f"data.template {path}: there is no such file")


def _auto(present: list[str], columns: dict[str, Any], classifier: bool, source: str) -> str:
    if "messages" in columns or "messages" in present:
        return "chat"
    if {"instruction", "output"} <= set(present) | set(columns):
        return "alpaca"
    if classifier and ("label" in columns or "label" in present):
        return "classification"
    if "text" in columns or "text" in present:
        if "label" in columns or "label" in present:
            raise DataError(
                f"data.source {source}: has a label column, which a language model does not learn; set data.template: text to train on "
                "the text alone, name a .jinja template that contains the label, or choose a model that classifies"
            )
        return "text"
    raise DataError(
        f"data.source {source}: no template fits the columns {', '.join(map(str, present))}{_separator_hint(present)}; "
        "name one with data.template (alpaca, chat, text, classification, a .jinja file) and its columns with data.columns"
    )


def _separator_hint(present: list[str]) -> str:
    """Return the fix for a table whose header was read as one column, or nothing."""
    mark = next((mark for mark in ";\t|" if len(present) == 1 and mark in str(present[0])), None)
    if mark is None:
        return ""
    return f": the columns are separated by {mark!r}; write the file with commas, or with tabs as .tsv"


def _column(
    data: DataSpec, columns: dict[str, Any], present: list[str], role: str, *, required: bool = True
) -> list[str]:
    """Return the columns for a role, checked against those of the data."""
    wanted = columns.get(role, role)
    names = [wanted] if isinstance(wanted, str) else list(wanted)
    missing = [n for n in names if n not in present]
    if not missing:
        return names
    if not required and role not in columns:
        return []
    near = difflib.get_close_matches(missing[0], present, n=1)
    separator = _separator_hint(present)
    hint = f"; did you mean {near[0]!r}?" if near and not separator else f"{separator}."
    raise DataError(
        f"data.source {data.source}: there is no column {missing[0]!r} (data.columns.{role}){hint} The columns are: {', '.join(map(str, present))}"
    )


def _text(row: Row, names: list[str], number: int) -> str:
    parts = []
    for name in names:
        value = row.get(name)
        if value is None or (
            isinstance(value, float) and math.isnan(value)
        ):  # NaN is how pandas writes a missing value
            continue
        if not isinstance(value, (str, int, float)):
            raise DataError(f"row {number}, column {name!r}: expected text, found a {type(value).__name__}")
        parts.append(_encodable(str(value), f"row {number}, column {name!r}"))
    return "\n".join(part for part in parts if part)


def _encodable(text: str, where: str) -> str:
    """Return the text, or refuse half of a surrogate pair, which JSON can express and UTF-8 cannot.

    Raises:
        DataError: names the row, the column and the code unit.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{where}: character {error.start} is \\u{ord(text[error.start]):04x}, half of a surrogate pair, which is not text; remove it, "
            "or write both halves"
        ) from None
    return text


def _alpaca(data: DataSpec, columns: dict[str, Any], present: list[str]) -> Callable[[Row, int], Example]:
    instruction = _column(data, columns, present, "instruction")
    given = _column(data, columns, present, "input", required=False)
    output = _column(data, columns, present, "output")

    def render(row: Row, number: int) -> Example:
        extra = _text(row, given, number)
        middle = f"### Input:\n{extra}\n\n" if extra.strip() else ""
        prompt = f"### Instruction:\n{_text(row, instruction, number)}\n\n{middle}### Response:\n"
        answer = _text(row, output, number)
        return Example(
            turns=((prompt, False), (answer, True)), answer=answer, empty="" if answer.strip() else output[0]
        )

    return render


def _chat(data: DataSpec, columns: dict[str, Any], present: list[str]) -> Callable[[Row, int], Example]:
    (name,) = _column(data, columns, present, "messages")

    def render(row: Row, number: int) -> Example:
        messages = row.get(name)
        if not isinstance(messages, list) or not messages:
            raise DataError(f"row {number}, column {name!r}: expected a list of messages")
        clean = []
        for message in messages:
            role, content = (message.get("role"), message.get("content")) if isinstance(message, dict) else (None, None)
            if not isinstance(role, str) or not isinstance(content, str):
                raise DataError(f"row {number}, column {name!r}: every message needs 'role' and 'content', both text")
            clean.append({"role": role, "content": _encodable(content, f"row {number}, column {name!r}")})
        if not any(message["role"] == "assistant" for message in clean):
            raise DataError(f"row {number}: chat without an assistant message; no token would be trained")
        last = clean[-1]["content"] if clean[-1]["role"] == "assistant" else None
        replies = [message["content"] for message in clean if message["role"] == "assistant"]
        return Example(
            messages=tuple(clean), answer=last, empty=name if replies and not any(map(str.strip, replies)) else ""
        )

    return render


def _plain(data: DataSpec, columns: dict[str, Any], present: list[str]) -> Callable[[Row, int], Example]:
    names = _column(data, columns, present, "text")

    def render(row: Row, number: int) -> Example:
        text = _text(row, names, number)
        return Example(turns=((text, True),), empty="" if text.strip() else names[0])

    return render


def _classification(data: DataSpec, columns: dict[str, Any], present: list[str]) -> Callable[[Row, int], Example]:
    names = _column(data, columns, present, "text")
    (label,) = _column(data, columns, present, "label")

    def render(row: Row, number: int) -> Example:
        value = row.get(label)
        if value is None or value == "" or (isinstance(value, float) and math.isnan(value)):
            raise DataError(f"row {number}, column {label!r}: the label is missing")
        text = _text(row, names, number)
        return Example(turns=((text, False),), label=str(value), empty="" if text.strip() else names[0])

    return render


def _jinja(path: Path, *, mask_prompt: bool) -> Callable[[Row, int], Example]:
    """Load a user's template. Blocks named ``prompt`` and ``response`` separate masked from trained text.

    Raises:
        DataError: no such file, or not a template; or no block named ``response``, where the prompt is to be masked.
    """
    from jinja2 import StrictUndefined, TemplateError
    from jinja2.sandbox import SandboxedEnvironment

    if not path.is_file():
        raise DataError(f"data.template {path}: there is no such file")
    environment = SandboxedEnvironment(undefined=StrictUndefined, keep_trailing_newline=True, autoescape=False)
    try:
        template = environment.from_string(read_text(path, MAX_TEMPLATE_BYTES))
    except (TemplateError, UnicodeDecodeError, OSError) as error:
        raise DataError(f"data.template {path}: {error}") from None
    if mask_prompt and "response" not in template.blocks:
        has = f"has the blocks {', '.join(template.blocks)}" if template.blocks else "has no blocks"
        raise DataError(
            f"data.template {path}: no block named response ({has}), so that the prompt would be trained although data.mask_prompt is "
            "true; write {% block prompt %}...{% endblock %}{% block response %}...{% endblock %}, or set data.mask_prompt: false"
        )

    def render(row: Row, number: int) -> Example:
        try:
            if "response" in template.blocks:
                parts = {
                    name: "".join(template.blocks[name](template.new_context(row)))
                    for name in ("prompt", "response")
                    if name in template.blocks
                }
                for part in parts.values():
                    _encodable(part, f"data.template {path}, row {number}")
                return Example(
                    turns=((parts.get("prompt", ""), False), (parts["response"], True)),
                    answer=parts["response"],
                    empty="" if parts["response"].strip() else "response",
                )
            text = _encodable(template.render(**row), f"data.template {path}, row {number}")
            return Example(turns=((text, True),), empty="" if text.strip() else "text")
        except TemplateError as error:
            raise DataError(
                f"data.template {path}, row {number}: {error}; the columns are: {', '.join(map(str, row))}"
            ) from None

    return render


_RENDERERS = {"alpaca": _alpaca, "chat": _chat, "text": _plain, "classification": _classification}


def prompt_of(kind: str, template: str, text: str) -> str | None:
    """Return a user's text as the prompt of a row of the template; None for chats, which need the tokenizer's own template.

    Args:
        kind: the template of the run's data, as its events name it.
        template: ``data.template``, the file of a Jinja template.

    Raises:
        DataError: the file is missing, or its prompt has more than one variable.
    """
    if kind == "chat":
        return None
    if kind == "alpaca":
        data = DataSpec(source="prompt", template="alpaca")
        return (
            choose_template(data, [{"instruction": text, "output": ""}], classifier=False)
            .render({"instruction": text, "output": ""}, 0)
            .prompt
        )
    return _jinja_prompt(Path(template).expanduser(), text) if kind == "jinja" else text


def _jinja_prompt(path: Path, text: str) -> str:
    from jinja2 import meta, nodes
    from jinja2.sandbox import SandboxedEnvironment

    render = _jinja(path, mask_prompt=False)
    environment = SandboxedEnvironment()
    parsed = environment.parse(read_text(path, MAX_TEMPLATE_BYTES))
    blocks = [block for block in parsed.find_all(nodes.Block) if block.name == "prompt"]
    if not blocks:
        return text  # the template renders whole texts
    alone = nodes.Template(blocks[0].body, lineno=1)
    alone.set_environment(environment)
    names = sorted(meta.find_undeclared_variables(alone))
    if len(names) != 1:
        raise DataError(
            f"data.template {path}: its prompt uses {len(names)} columns ({', '.join(names) or 'none'}), so one text cannot stand for them; "
            "give the whole prompt with --raw"
        )
    every = meta.find_undeclared_variables(parsed)
    return render({**dict.fromkeys(every, ""), names[0]: text}, 0).prompt
