"""Say what to write in the spec where no template fits the columns of a data set: ``data.columns``, or a Jinja file. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from allranks.spec.data_sources import Row
from allranks.utils.formatting import format_list
from allranks.utils.nearest import nearest_name

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
MAX_LISTED = 20
_NUMBER = re.compile(r"\s*[+-]?[\d.,]+\s*%?\s*")


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
            f"{head}; their values are no texts, so write a Jinja file and name it under data:\n  template: rows.jinja\n"
            f"The file could begin with\n{_indented(suggested_jinja(row))}\nThe templates and their columns:\n{needs}"
        )
    note = (
        "\nPairs of preferences (chosen, rejected) are not compared with each other; chosen alone can be trained."
        if {"chosen", "rejected"} <= row.keys()
        else ""
    )
    line = columns_line(pairs)
    return f"{head}; say under data: which column is what, for example\n  {line}{note}\nThe templates and their columns:\n{needs}"


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


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())
