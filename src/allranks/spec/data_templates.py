"""Convert rows to text: prompt (not trained with ``mask_prompt``) and response, or text with a label."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from allranks.errors import DataError, SpecError
from allranks.spec.data_chat import chat_renderer
from allranks.spec.data_columns import TEMPLATE_KINDS, Columns, columns_of, fitting_template, merged_row, require_roles
from allranks.spec.data_examples import Example, Render, encodable, is_missing, row_text
from allranks.spec.data_mixture import source_of
from allranks.spec.data_sources import Row, builtin_set
from allranks.spec.records import DataSpec
from allranks.utils.inputs import read_text
from allranks.utils.nearest import did_you_mean

MAX_TEMPLATE_BYTES = 1 << 20


@dataclass(frozen=True)
class Template:
    """Conversion of a row to an `Example`."""

    kind: str
    render: Render = field(repr=False)
    reason: str = ""
    """Why it was chosen."""


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
    name, reason = data.template, "by data.template"
    columns: Columns = data.columns
    if source_of(data).startswith("builtin:"):
        own = builtin_set(source_of(data))
        columns = {**own.columns, **columns}
        if name == "auto":
            labelled = own.template == "classification"
            name = (
                own.template if classifier or not labelled else "text"
            )  # a language model reads labelled texts as texts
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
    output = columns_of("output", data, columns, present)

    def render(row: Row, number: int) -> Example:
        extra = row_text(row, given, number)
        middle = f"### Input:\n{extra}\n\n" if extra.strip() else ""
        prompt = f"### Instruction:\n{row_text(row, instruction, number)}\n\n{middle}### Response:\n"
        answer = row_text(row, output, number)
        return Example(
            turns=((prompt, False), (answer, True)), answer=answer, empty="" if answer.strip() else output[0]
        )

    return render


def _completion(data: DataSpec, columns: Columns, present: Sequence[str]) -> Render:
    prompt = columns_of("prompt", data, columns, present)
    completion = columns_of("completion", data, columns, present)

    def render(row: Row, number: int) -> Example:
        answer = row_text(row, completion, number)
        return Example(
            turns=((row_text(row, prompt, number), False), (answer, True)),
            answer=answer,
            empty="" if answer.strip() else completion[0],
        )

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
                    encodable(part, f"data.template {path}, row {number}")
                return Example(
                    turns=((parts.get("prompt", ""), False), (parts["response"], True)),
                    answer=parts["response"],
                    empty="" if parts["response"].strip() else "response",
                )
            text = encodable(template.render(**row), f"data.template {path}, row {number}")
            return Example(turns=((text, True),), empty="" if text.strip() else "text")
        except TemplateError as error:
            raise DataError(
                f"data.template {path}, row {number}: {error}; the columns are: {', '.join(map(str, row))}"
            ) from None

    return render


_RENDERERS = {
    "alpaca": _alpaca,
    "chat": chat_renderer,
    "completion": _completion,
    "text": _plain,
    "classification": _classification,
}
