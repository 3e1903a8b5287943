"""Match the columns of a data set with what the templates need, and choose a template."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from allranks.errors import DataError, SpecError
from allranks.spec.data_sources import Row, source_of
from allranks.spec.records import DataSpec
from allranks.utils.text import did_you_mean, format_list

Columns = Mapping[str, str | list[str]]
"""Column names by role: ``data.columns``, or those of a built-in set."""

TEMPLATE_KINDS = ("alpaca", "chat", "completion", "text", "classification")
ROLES = {
    "alpaca": ("instruction", "input", "output"),
    "chat": ("messages", "prompt", "response", "instruction", "input", "output", "system", "tools"),
    "completion": ("prompt", "completion"),
    "text": ("text",),
    "classification": ("text", "label"),
}
"""Keys of ``data.columns`` by template. A Jinja template names the columns itself."""

USUAL_NAMES = {
    "messages": ("messages", "conversations", "conversation"),
    "response": ("response", "completion"),
    "completion": ("completion", "response"),
}
"""Columns taken for a role without ``data.columns``, the first that exists; other roles have only their own name."""
MAX_VALUE_ROWS = 20
NEEDS = (
    ("chat", "messages (or conversations), or prompt and response"),
    ("alpaca", "instruction and output; input may be missing"),
    ("completion", "prompt and completion"),
    ("text", "text"),
    ("classification", "text and label, for encoders such as bert"),
    ("a .jinja file", "the columns that the file names"),
)
ENCODER_NEEDED = "classification needs an encoder, such as model.name: distilbert-base-uncased (tiny:bert for a test)"
MAX_LISTED = 20


def require_roles(columns: Columns, template: str) -> None:
    """Refuse a key of ``data.columns`` that the template does not use.

    Raises:
        SpecError: names the key, and those that the template takes.
    """
    roles = ROLES.get(template, ())
    for key in columns:
        if key not in roles:
            hint = did_you_mean(key, roles)
            takes = f"takes {', '.join(roles)}" if roles else "names the columns itself"
            raise SpecError(f"data.columns: {key!r} is not used: template {template} {takes}{hint}")


def has_role(role: str, columns: Columns, present: Collection[str]) -> bool:
    """Return whether a role has a column: by ``data.columns``, or by its usual names."""
    return role in columns or any(name in present for name in USUAL_NAMES.get(role, (role,)))


def columns_of(
    role: str, data: DataSpec, columns: Columns, present: Sequence[str], *, required: bool = True
) -> list[str]:
    """Return the columns for a role.

    Raises:
        DataError: one of them does not exist; the message lists those that do.
    """
    usual = next((name for name in USUAL_NAMES.get(role, ()) if name in present), role)
    wanted = columns.get(role, usual)
    names = [wanted] if isinstance(wanted, str) else list(wanted)
    missing = [n for n in names if n not in present]
    if not missing:
        return names
    if not required and role not in columns:
        return []
    separator = _separator_hint(present)
    hint = (not separator and did_you_mean(missing[0], present)) or f"{separator}."
    raise DataError(
        f"data.source {data.source}: there is no column {missing[0]!r} (data.columns.{role}){hint} The columns are: "
        f"{listed(present)}"
    )


def merged_row(rows: Sequence[Row]) -> Row:
    """Return the columns that any row has, in order of appearance, each with a value if the first rows have one."""
    merged: Row = {}
    for number, row in enumerate(rows):
        if number < MAX_VALUE_ROWS or not row.keys() <= merged.keys():
            merged |= {name: value for name, value in row.items() if merged.get(name) is None}
    return merged


def fitting_template(data: DataSpec, columns: Columns, rows: Sequence[Row], *, classifier: bool) -> tuple[str, str]:
    """Return the template for the columns of the first row, and the columns that decided.

    If none fits because the first row lacks a column, the columns of all rows are taken.

    Raises:
        SpecError: ``data.columns`` has a key that no template takes.
        DataError: none fits; the message lists the columns and what to set.
    """
    merged = merged_row(rows)
    template = _fitting(data, columns, rows[0], classifier=classifier)
    if template is None and merged.keys() != rows[0].keys():
        template = _fitting(data, columns, merged, classifier=classifier)
    if template is None:
        known = sorted({role for roles in ROLES.values() for role in roles})
        if unknown := [key for key in columns if key not in known]:
            hint = did_you_mean(unknown[0], known)
            raise SpecError(f"data.columns: no template takes {unknown[0]!r}{hint} (known: {', '.join(known)})")
        needs = "\n".join(f"  {name:<15} {what}" for name, what in NEEDS)
        raise NoTemplateFits(
            f"data.source {source_of(data)}: no template fits the columns {listed(list(merged))}"
            + (
                _separator_hint(list(merged))
                or "; say which column is what, such as data.columns: {prompt: COLUMN, response: COLUMN}, or name a "
                f"Jinja file as data.template. The templates and their columns:\n{needs}"
            )
        )
    return template


class NoTemplateFits(DataError):
    """The columns of a data set are those of no template."""


def _fitting(data: DataSpec, columns: Columns, first: Row, *, classifier: bool) -> tuple[str, str] | None:
    present = list(first)

    def has(*roles: str) -> bool:
        return all(has_role(role, columns, present) for role in roles)

    def by_role(role: str) -> list[str]:
        return columns_of(role, data, columns, present)

    plain = "completion" in columns or ("response" not in columns and "response" not in present)
    if plain and has("prompt"):  # a list of messages is a chat
        plain = not isinstance(first.get(by_role("prompt")[0]), list)
    fitting: list[tuple[str, bool, tuple[str, ...]]] = [
        ("classification", classifier and has("text", "label"), ("text", "label")),
        ("chat", has("messages"), ("messages",)),
        ("alpaca", has("instruction", "output"), ("instruction", "input", "output")),
        ("completion", plain and has("prompt", "completion"), ("prompt", "completion")),
        ("chat", has("prompt", "response"), ("prompt", "response")),
        ("classification", classifier and has("label"), ("text", "label")),
        ("text", has("text"), ("text",)),
    ]
    match = next(((name, roles) for name, fits, roles in fitting if fits), None)
    if match is None:
        return None
    template, roles = match
    if template == "text" and has("label"):
        raise DataError(
            f"data.source {data.source}: has a label column, which a language model does not learn; {ENCODER_NEEDED}. "
            "Or set data.template: text to train on the text alone, or name a .jinja template that contains the label"
        )
    names = [name for role in roles if has(role) for name in by_role(role)]
    return template, f"column{'s' * (len(names) > 1)} {', '.join(names)}"


def _separator_hint(present: Sequence[str]) -> str:
    """Return the fix for a table whose header was read as one column, or nothing."""
    mark = next((mark for mark in ";\t|," if len(present) == 1 and mark in str(present[0])), None)
    if mark is None:
        return ""
    return f": the columns are separated by {mark!r}; write the file with commas, or with tabs as .tsv"


def listed(names: Sequence[Any]) -> str:
    """Return names in one line, at most `MAX_LISTED` of them."""
    return format_list(names, MAX_LISTED)
