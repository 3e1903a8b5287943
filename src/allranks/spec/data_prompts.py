"""Make the prompt of a template from a user's text, or from the columns of a row without its response."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from allranks.errors import DataError
from allranks.spec.data_columns import Columns, columns_of
from allranks.spec.data_templates import MAX_TEMPLATE_BYTES, choose_template, row_text
from allranks.spec.records import DataSpec
from allranks.utils.inputs import read_text

ANSWER_ROLES = {"alpaca": ("output",), "completion": ("completion",), "chat": ("response", "completion", "output")}
"""Roles of what the model should write; a row for a prompt does not need them."""


def prompt_of(kind: str, template: str, text: str) -> str | None:
    """Return a user's text as the prompt of a row of the template; None for chats, which need the tokenizer's own template.

    Args:
        kind: the template of the run's data, as its events name it.
        template: ``data.template``, the file of a Jinja template.

    Raises:
        DataError: the rows had several templates; the file is missing, or its prompt has more than one variable.
    """
    _require_one_template(kind)
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


def row_prompt(kind: str, template: str, columns: Columns, row: Mapping[str, Any]) -> str | list[dict[str, Any]]:
    """Return the prompt of a row without its response; of a chat the messages, which need the tokenizer's own template.

    Args:
        kind: the template of the run's data, as its events name it.
        template: ``data.template``, the file of a Jinja template.
        columns: ``data.columns``.

    Raises:
        DataError: the rows had several templates, or the row lacks a column of the prompt.
    """
    _require_one_template(kind)
    if kind == "jinja":
        return _jinja_row_prompt(Path(template).expanduser(), row)
    whole = dict(row)
    data = DataSpec(source="--row", template=kind, columns=dict(columns))
    if kind in ("text", "classification"):
        return row_text(whole, columns_of("text", data, columns, list(whole)), 0)
    messages = columns_of("messages", data, columns, list(whole), required=False) if kind == "chat" else []
    if messages:
        return list(_checked_messages(whole[messages[0]]))
    for role in ANSWER_ROLES[kind]:
        if isinstance(name := columns.get(role), str):
            whole.setdefault(name, "?")
    if not any(role in columns or role in whole for role in ANSWER_ROLES[kind]):
        whole["output" if "instruction" in [*columns, *whole] else ANSWER_ROLES[kind][0]] = "?"
    example = choose_template(data, [whole], classifier=False).render(whole, 0)
    return list(example.messages[: example.first_trained or -1]) if kind == "chat" else example.prompt


def _checked_messages(value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not all(isinstance(m, dict) and m.keys() >= {"role", "content"} for m in value):
        raise DataError("--row: expected a list of messages with role and content")
    return value


def _require_one_template(kind: str) -> None:
    if " + " in kind:
        raise DataError(
            f"the run mixed rows of several templates ({kind}), so one text is not a prompt; give the whole prompt with --raw"
        )


def _jinja_row_prompt(path: Path, row: Mapping[str, Any]) -> str:
    from jinja2 import StrictUndefined, TemplateError
    from jinja2.sandbox import SandboxedEnvironment

    environment = SandboxedEnvironment(undefined=StrictUndefined, keep_trailing_newline=True, autoescape=False)
    try:
        template = environment.from_string(read_text(path, MAX_TEMPLATE_BYTES))
        if "prompt" not in template.blocks:
            raise DataError(
                f"data.template {path}: it has no block prompt; give the beginning of the text with --prompt"
            )
        return "".join(template.blocks["prompt"](template.new_context(dict(row))))
    except TemplateError as error:
        raise DataError(f"--row: data.template {path}: {error}; the row has: {', '.join(row)}") from None
    except OSError as error:
        raise DataError(f"data.template {path}: {error.strerror or error}") from None


def _jinja_prompt(path: Path, text: str) -> str:
    from jinja2 import meta, nodes
    from jinja2.sandbox import SandboxedEnvironment

    if not path.is_file():
        raise DataError(f"data.template {path}: there is no such file")
    environment = SandboxedEnvironment()
    parsed = environment.parse(read_text(path, MAX_TEMPLATE_BYTES))
    blocks = [block for block in parsed.find_all(nodes.Block) if block.name == "prompt"]
    if not blocks:
        return text  # the template renders whole texts
    alone = nodes.Template(blocks[0].body, lineno=1)
    alone.set_environment(environment)
    names = sorted(meta.find_undeclared_variables(alone))
    parts = [*alone.find_all(nodes.Getattr), *alone.find_all(nodes.Getitem)]
    inside = sorted({part.node.name for part in parts if isinstance(part.node, nodes.Name) and part.node.name in names})
    if len(names) != 1 or inside:
        what = f"parts of {', '.join(inside)}" if inside else f"{len(names)} columns ({', '.join(names) or 'none'})"
        raise DataError(
            f"data.template {path}: its prompt uses {what}, so one text is not sufficient; give the columns with --row, such as "
            f"--row '{_row_example(names)}', or the whole prompt with --raw"
        )
    return _jinja_row_prompt(path, {names[0]: text})


def _row_example(names: list[str]) -> str:
    return "{" + ", ".join(f'"{name}": ...' for name in names) + "}"
