"""Match the columns of a data set with what the templates need: choose a template, or say what is missing and what to write."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from allranks.errors import DataError, SpecError
from allranks.spec.data_mixture import source_of
from allranks.spec.data_sources import Row
from allranks.spec.records import DataSpec

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
"""Columns that are taken for a role without ``data.columns``, the first one that exists; other roles have only their own name."""

NEEDS = (
    ("chat", "messages (or conversations), or prompt and response"),
    ("alpaca", "instruction and output; input may be missing"),
    ("completion", "prompt and completion"),
    ("text", "text"),
    ("classification", "text and label, for encoders such as bert"),
    ("a .jinja file", "the columns that the file names"),
)

QUESTION_NAMES = {"instruction", "prompt", "question", "query"}
ANSWER_NAMES = {"output", "response", "answer", "completion", "reply", "target"}
TEXT_NAMES = {"text", "content", "body", "article", "document", "sentence", "review", "passage"}
LABEL_NAMES = {"label", "labels", "class", "category", "sentiment", "target", "topic"}
CHAT_NAMES = {"messages", "conversations", "conversation", "dialog", "dialogue", "chat", "turns"}


def require_roles(columns: Columns, template: str) -> None:
    """Refuse a key of ``data.columns`` that the template does not use.

    Raises:
        SpecError: names the key, and those that the template takes.
    """
    roles = ROLES.get(template, ())
    for key in columns:
        if key not in roles:
            near = difflib.get_close_matches(key, roles, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
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
    near = difflib.get_close_matches(missing[0], present, n=1)
    separator = _separator_hint(present)
    hint = f"; did you mean {near[0]!r}?" if near and not separator else f"{separator}."
    raise DataError(
        f"data.source {data.source}: there is no column {missing[0]!r} (data.columns.{role}){hint} The columns are: {_listed(present)}"
    )


def fitting_template(data: DataSpec, columns: Columns, first: Row, *, classifier: bool) -> tuple[str, str]:
    """Return the template for the columns of the first row, and the columns that decided.

    Raises:
        DataError: none fits; the message has the line to add to the spec.
    """
    present = list(first)

    def has(*roles: str) -> bool:
        return all(has_role(role, columns, present) for role in roles)

    def by_role(role: str) -> list[str]:
        return columns_of(role, data, columns, present)

    joined = "completion" in columns or ("response" not in columns and "response" not in present)
    plain = joined and not (has("prompt") and isinstance(first.get(by_role("prompt")[0]), list))
    fitting: list[tuple[str, bool, tuple[str, ...]]] = [
        ("classification", classifier and has("text", "label"), ("text", "label")),
        ("chat", has("messages"), ("messages",)),
        ("alpaca", has("instruction", "output"), ("instruction", "input", "output")),
        ("completion", plain and has("prompt", "completion"), ("prompt", "completion")),
        ("chat", has("prompt", "response"), ("prompt", "response")),
        ("classification", classifier and has("label"), ("text", "label")),
        ("text", has("text"), ("text",)),
    ]
    found = next(((name, roles) for name, fits, roles in fitting if fits), None)
    if found is None:
        raise DataError(_no_template(source_of(data), present, classifier=classifier))
    template, roles = found
    if template == "text" and has("label"):
        raise DataError(
            f"data.source {data.source}: has a label column, which a language model does not learn; set data.template: text to train on "
            "the text alone, name a .jinja template that contains the label, or choose a model that classifies"
        )
    names = [name for role in roles if has(role) for name in by_role(role)]
    return template, f"column{'s' * (len(names) > 1)} {', '.join(names)}"


def _no_template(source: str, present: Sequence[str], *, classifier: bool) -> str:
    head = f"data.source {source}: no template fits the columns {_listed(present)}"
    if separator := _separator_hint(present):
        return head + separator
    needs = "\n".join(f"  {name:<15} {what}" for name, what in NEEDS)
    line = suggested_line(present, classifier=classifier)
    return f"{head}; say under data: which column is what, for example\n  {line}\nThe templates and their columns:\n{needs}"


def suggested_line(present: Sequence[str], *, classifier: bool) -> str:
    """Return the line of the spec that probably names the columns right."""
    pairs = _suggested(present, classifier=classifier)
    inner = ", ".join(f"{role}: {_yaml_text(name)}" for role, name in pairs.items() if role != name)
    return f"columns: {{{inner}}}"


def _suggested(present: Sequence[str], *, classifier: bool) -> dict[str, str]:
    def find(names: Collection[str]) -> str | None:
        lower = {name.lower().strip(): name for name in present}
        exact = next((lower[name] for name in lower if name in names), None)
        near = [near for name in sorted(names) for near in difflib.get_close_matches(name, lower, n=1, cutoff=0.8)]
        return exact or (lower[near[0]] if near else None)

    if classifier:
        label = find(LABEL_NAMES) or present[-1]
        return {"text": find(TEXT_NAMES) or next((n for n in present if n != label), present[0]), "label": label}
    instruction, output = find({"instruction"}), find(ANSWER_NAMES)
    if instruction and output:
        given = find({"input", "context"})
        return {"instruction": instruction, **({"input": given} if given else {}), "output": output}
    question = find(QUESTION_NAMES)
    if question and output:
        return {"prompt": question, "response": output}
    for role, names in (("messages", CHAT_NAMES), ("text", TEXT_NAMES)):
        if found := find(names):
            return {role: found}
    return {"prompt": present[0], "response": present[1]} if len(present) > 1 else {"text": present[0]}


def _yaml_text(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z_][\w.-]*", name) else json.dumps(name, ensure_ascii=False)


MAX_LISTED = 20


def _listed(names: Sequence[Any]) -> str:
    more = f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
    return ", ".join(map(str, names[:MAX_LISTED])) + more


def _separator_hint(present: Sequence[str]) -> str:
    """Return the fix for a table whose header was read as one column, or nothing."""
    mark = next((mark for mark in ";\t|" if len(present) == 1 and mark in str(present[0])), None)
    if mark is None:
        return ""
    return f": the columns are separated by {mark!r}; write the file with commas, or with tabs as .tsv"
