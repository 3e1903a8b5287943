"""Match the columns of a data set with what the templates need, choose a template, and suggest a mapping if none
fits."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from allranks.errors import DataError, SpecError
from allranks.spec.data_sources import Row, source_of
from allranks.spec.records import DataSpec
from allranks.utils.text import did_you_mean, format_list, nearest_name

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
"""Columns that are taken for a role without ``data.columns``, the first one that exists; other roles have only their
own name."""
MAX_VALUE_ROWS = 20
NEEDS = (
    ("chat", "messages (or conversations), or prompt and response"),
    ("alpaca", "instruction and output; input may be missing"),
    ("completion", "prompt and completion"),
    ("text", "text"),
    ("classification", "text and label, for encoders such as bert"),
    ("a .jinja file", "the columns that the file names"),
)
QUESTION_NAMES = {"instruction", "prompt", "question", "query"}
ANSWER_NAMES = {"output", "response", "answer", "completion", "reply", "target", "chosen"}
TEXT_NAMES = {"text", "content", "body", "article", "document", "sentence", "review", "passage"}
LABEL_NAMES = {
    "label", "labels", "class", "category", "sentiment", "target", "topic", "intent", "rating", "score", "stars",
}  # fmt: skip
CHAT_NAMES = {"messages", "conversations", "conversation", "dialog", "dialogue", "chat", "turns"}
ENCODER_NEEDED = "classification needs an encoder, such as model.name: distilbert-base-uncased (tiny:bert for a test)"
MAX_LISTED = 20
_NUMBER = re.compile(r"\s*[+-]?[\d.,]+\s*%?\s*")


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
    """Return the columns that any row has, in the order in which they appear, with a value of each where the first rows
    have one."""
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
        DataError: none fits; the message has the line to add to the spec.
    """
    merged = merged_row(rows)
    found = _fitting(data, columns, rows[0], classifier=classifier)
    if found is None and merged.keys() != rows[0].keys():
        found = _fitting(data, columns, merged, classifier=classifier)
    if found is None:
        known = sorted({role for roles in ROLES.values() for role in roles})
        if unknown := [key for key in columns if key not in known]:
            hint = did_you_mean(unknown[0], known)
            raise SpecError(f"data.columns: no template takes {unknown[0]!r}{hint} (known: {', '.join(known)})")
        separator = _separator_hint(list(merged))
        raise NoTemplateFits(
            no_template_message(source_of(data), merged, columns, classifier=classifier, separator=separator)
        )
    return found


class NoTemplateFits(DataError):
    """The columns of a data set are those of no template."""


def _fitting(data: DataSpec, columns: Columns, first: Row, *, classifier: bool) -> tuple[str, str] | None:
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
        return None
    template, roles = found
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


def no_template_message(
    source: str, row: Row, given: Mapping[str, str | list[str]], *, classifier: bool, separator: str = ""
) -> str:
    """Return what was found, and the lines to add to the spec.

    Args:
        source: the name of the data set.
        row: the columns, with the values of a row.
        given: ``data.columns`` as far as the spec has it.
        separator: the fix for a table that was read as one column, if it is one.
    """
    head = f"data.source {source}: no template fits the columns {listed(list(row))}"
    if separator:
        return head + separator
    needs = "\n".join(f"  {name:<15} {what}" for name, what in NEEDS)
    pairs = suggested_columns(row, given, classifier=classifier)
    if not pairs:
        return (
            f"{head}; their values are no texts, so write a Jinja file and name it under data:\n  template: "
            "rows.jinja\n"
            f"The file could begin with\n{textwrap.indent(suggested_jinja(row), '  ')}\n"
            f"The templates and their columns:\n{needs}"
        )
    note = (
        "\nPairs of preferences (chosen, rejected) are not compared with each other; chosen alone can be trained."
        if {"chosen", "rejected"} <= row.keys()
        else ""
    )
    note += label_note(row, pairs, classifier=classifier)
    line = columns_line(pairs)
    return (
        f"{head}; say under data: which column is what, for example\n  {line}{note}\nThe templates and their "
        f"columns:\n{needs}"
    )


def label_note(row: Row, pairs: Mapping[str, str | list[str]], *, classifier: bool) -> str:
    """Return what to do to learn a label that no role of a language model reads, on a line of its own; else an empty
    text."""
    label = None if classifier else _find(LABEL_NAMES, [name for name in row if name not in pairs.values()])
    return f"\nThe column {label} looks like a label: {ENCODER_NEEDED}." if label else ""


def columns_line(pairs: Mapping[str, str | list[str]]) -> str:
    """Return ``data.columns`` as one line of YAML; a role of its own name is left out if others stay."""
    shown = {role: name for role, name in pairs.items() if role != name} or pairs
    inner = ", ".join(f"{role}: {_yaml_name(name)}" for role, name in shown.items())
    return f"columns: {{{inner}}}"


def suggested_columns(
    row: Row, given: Mapping[str, str | list[str]], *, classifier: bool
) -> dict[str, str | list[str]]:
    """Return the columns by role that are probably right; nothing if no column has text and none is a chat."""
    texts = [name for name, value in row.items() if isinstance(value, str) and not _NUMBER.fullmatch(value)]
    flat = [name for name, value in row.items() if not isinstance(value, (dict, list))]
    lists = [name for name, value in row.items() if isinstance(value, (str, list)) or value is None]
    if classifier:
        label = _find(LABEL_NAMES, flat) or next(reversed(flat), None)
        text = _find(TEXT_NAMES, flat) or next((name for name in [*texts, *flat] if name != label), None)
        return {"text": text, "label": label, **given} if text and label else {}
    used = {name for value in given.values() for name in ([value] if isinstance(value, str) else value)}
    free = [name for name in flat if name not in used]
    instruction, output = _find({"instruction"}, free), _find(ANSWER_NAMES, free)
    if instruction and output and not given:
        context = _find({"input", "context"}, free)
        return {"instruction": instruction, **({"input": context} if context else {}), "output": output}
    if not given and not (_find(QUESTION_NAMES, free) and output):
        for role, names, among in (("messages", CHAT_NAMES, lists), ("text", TEXT_NAMES, flat)):
            if found := _find(names, among):
                return {role: found}
    rest = [name for name in texts if name not in used]
    answer_role = "completion" if "completion" in given else "output" if "instruction" in given else "response"
    question_role = "instruction" if "instruction" in given or "output" in given else "prompt"
    known = {question_role: _find(QUESTION_NAMES, free), answer_role: output}
    taken = {name for role, name in known.items() if role not in given}
    spare = iter(name for name in rest if name not in taken)
    pairs = {role: given.get(role) or name or next(spare, None) for role, name in known.items()}
    if all(pairs.values()):
        return {role: name for role, name in pairs.items() if name}
    return {"text": texts[0]} if texts and not given else {}


def suggested_jinja(row: Row) -> str:
    """Return the beginning of a Jinja file that uses the values of a row: all but the last one in the prompt."""
    leaves = list(_leaves(row))[:MAX_LISTED] or [f"{{{{ {name} }}}}" for name in row]
    prompt = "\n".join(leaves[:-1])
    return f"{{% block prompt %}}{prompt}\n{{% endblock %}}{{% block response %}}{leaves[-1]}{{% endblock %}}"


def listed(names: Sequence[Any]) -> str:
    """Return names in one line, at most `MAX_LISTED` of them."""
    return format_list(names, MAX_LISTED)


def _find(names: Collection[str], present: Sequence[str]) -> str | None:
    lower = {name.lower().strip(): name for name in present}
    exact = next((lower[name] for name in lower if name in names), None)
    near = next((near for name in sorted(names) if (near := nearest_name(name, lower, 0.8))), None)
    return exact or (lower[near] if near else None)


def _leaves(value: Any, path: str = "") -> Iterator[str]:
    """Yield the Jinja expressions of the texts in a value: ``{{ a.b }}``, lists of texts joined."""
    if isinstance(value, dict):
        for key, inner in value.items():
            step = str(key) if re.fullmatch(r"[A-Za-z_]\w*", str(key)) else None
            whole = f"{path}.{step}" if path and step else step or f"{path}[{json.dumps(str(key))}]"
            if path or step:
                yield from _leaves(inner, whole)
    elif isinstance(value, list) and all(isinstance(one, str) for one in value):
        yield f'{{{{ {path} | join("\\n") }}}}'
    elif isinstance(value, str):
        yield f"{{{{ {path} }}}}"


def _yaml_name(name: str | list[str]) -> str:
    if isinstance(name, list):
        return f"[{', '.join(map(_yaml_name, name))}]"
    return name if re.fullmatch(r"[A-Za-z_][\w.-]*", name) else json.dumps(name, ensure_ascii=False)
