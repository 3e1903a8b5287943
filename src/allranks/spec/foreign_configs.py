"""Read configurations of accelerate, DeepSpeed, axolotl and TRL, and write the spec that they describe.

What a key means is in foreign_configs.yaml. Every line of the file is either in the spec, with a comment that names it,
or in a comment that says why not.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import yaml

from allranks.errors import RequestError, SpecError
from allranks.spec.examples import COMMENT_COLUMN, run_name, scalar
from allranks.spec.loader import parse_spec, parse_yaml, parse_yaml_nodes, why_unreadable
from allranks.utils.inputs import read_input
from allranks.utils.redaction import holds_secret, redact
from allranks.utils.text import printable

MAX_BYTES = 1_000_000
MAX_VALUE = 60  # characters of a value in a comment
MAX_SOURCES = 1000
_SOURCE = re.compile(r"data\.sources\[(\d+)\]")
PLACEHOLDERS = {"model.name": "tiny:llama", "data.source": "builtin:instructions"}
UNKNOWN = "no key of a spec is known for it"
SECTIONS = ("name", "model", "data", "adapter", "strategy", "train", "eval", "checkpoint", "cluster", "observe")


class Line(msgspec.Struct, frozen=True):
    """A key of the file that has a value."""

    key: str
    number: int
    value: Any
    remark: str = ""
    """Why it is not in the spec, or what stands for it."""

    def __str__(self) -> str:
        value = re.sub(r"\s+", " ", printable(scalar(self.value) if self.value is not None else "null"))
        text = "***" if holds_secret(self.key.rpartition(".")[2], str(self.value)) else redact(value)
        short = text if len(text) <= MAX_VALUE else text[:MAX_VALUE] + "..."
        return f"{self.number} {printable(self.key)}: {short}" + f"  ({self.remark})" * bool(self.remark)


class Conversion(msgspec.Struct, frozen=True, kw_only=True):
    """What a file says in the words of a spec."""

    kind: str
    file: str
    values: dict[str, Any]
    """By key of the spec, as ``train.lr``, also ``data.sources[1].weight``."""
    origins: dict[str, list[Line]]
    """The lines that gave a value; none for a default of the tool."""
    same: list[Line]
    left: list[Line]
    notes: list[str]
    chosen: frozenset[str] = frozenset()
    """Keys that an option set."""

    def without(self, key: str, why: str) -> Conversion:
        """Return the same without a value, whose lines are then among those that are not taken over."""
        values = {name: value for name, value in self.values.items() if name != key}
        origins = {name: lines for name, lines in self.origins.items() if name != key}
        used = {line.key for source in origins.values() for line in source}
        lost = [line for line in self.origins.get(key, []) if line.key not in used]
        lines = [msgspec.structs.replace(line, remark=why) for line in lost]
        return msgspec.structs.replace(self, values=values, origins=origins, left=[*self.left, *lines])

    def with_values(self, values: dict[str, Any]) -> Conversion:
        """Return the same with values of options."""
        return msgspec.structs.replace(self, values={**self.values, **values}, chosen=frozenset(values))

    def spec(self) -> dict[str, Any]:
        """Return the spec, with a tiny model and a built-in set where the file names none."""
        tree: dict[str, Any] = {}
        given = {"name": run_name(Path(self.file).stem, ""), **PLACEHOLDERS}
        if any(key.startswith("data.sources[") for key in self.values):
            del given["data.source"]
        for key, value in {**given, **self.values}.items():
            *sections, last = key.split(".")
            place = tree
            for section in sections:
                name, _, index = section.rstrip("]").partition("[")
                below = place.setdefault(name, [] if index else {})
                if index:
                    below += [{} for _ in range(int(index) + 1 - len(below))]
                    below = below[int(index)]
                place = below
            place[last] = value
        return tree


@cache
def tables() -> dict[str, Any]:
    """Return the table of each kind."""
    read = parse_yaml(Path(__file__).with_suffix(".yaml").read_text("utf-8"), "foreign_configs.yaml")
    for table in read.values():
        table["keys"] |= {
            key: entry
            for key, entry in read.get(table.get("also"), {}).get("keys", {}).items()
            if key not in table["keys"]
        }
    return read


def read_foreign(path: Path) -> Conversion:
    """Read a configuration of another tool.

    Raises:
        RequestError: it cannot be read, or is none that is known.
    """
    where = printable(str(path))
    try:
        text = read_input(path, MAX_BYTES).decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"--from {where}: {why_unreadable(error, path, MAX_BYTES, 'a configuration')}") from None
    return convert(text, where)


def convert(text: str, where: str) -> Conversion:
    """Return what a configuration says in the words of a spec; see `read_foreign`."""
    with suppress(ValueError, RecursionError):
        json.loads(text)
        text = text.replace("\t", " ")  # outside of strings, where JSON allows tabs and YAML does not
    content, node = parse_yaml_nodes(text, f"--from {where}")
    if content is None:
        raise RequestError(f"--from {where}: the file is empty")
    if not isinstance(content, dict) or not isinstance(node, yaml.MappingNode):
        raise RequestError(f"--from {where}: expected keys and values, found a {type(content).__name__}")
    kind = next((name for name, table in tables().items() if any(key in content for key in table["needs"])), None)
    if kind is None:
        known = "; ".join(f"{table['title']} has {' or '.join(table['needs'])}" for table in tables().values())
        own = "; a spec of allranks needs no conversion: allranks plan" if {"model", "script"} & content.keys() else ""
        raise RequestError(f"--from {where}: this is no configuration that is known{own}. {known}")
    table, lines = tables()[kind], list(_lines(node, content))
    conversion = Conversion(
        kind=kind, file=Path(where).name, values={}, origins={}, same=[], left=[], notes=table.get("notes", [])
    )
    order = {pattern: place for place, pattern in enumerate(table["keys"])}
    entries = [(line, _pattern(line.key, order)) for line in lines]
    for line, pattern in sorted(entries, key=lambda pair: order.get(pair[1] or "", len(order))):
        conversion = _take(conversion, line, table["keys"].get(pattern))
    if "model.quantize" in conversion.values and content.get("load_in_4bit") is not True:
        conversion = conversion.without("model.quantize", "load_in_4bit is not true")
    conversion = _numbered_sources(_ranks_per_node(conversion))
    for key, value in table.get("defaults", {}).items():
        trial = msgspec.structs.replace(conversion, values={**conversion.values, key: value})
        if key not in conversion.values and _problem(trial) is None:
            conversion = trial
    return conversion


def _lines(node: yaml.MappingNode, content: dict[str, Any], before: str = "") -> Iterator[Line]:
    """Yield the keys that have a plain value or a list of them, in the order of the file."""
    for key_node, value_node in node.value:
        key, value = key_node.value, content[key_node.value]
        place = f"{before}{key}"
        if isinstance(value, dict) and value:
            yield from _lines(value_node, value, f"{place}.")
        elif isinstance(value, list) and value and all(isinstance(item, dict) and item for item in value):
            for i, (item_node, item) in enumerate(zip(value_node.value, value, strict=True)):
                yield from _lines(item_node, item, f"{place}[{i}].")
        else:
            yield Line(place, key_node.start_mark.line + 1, value)


def _pattern(key: str, patterns: dict[str, int]) -> str | None:
    general = re.sub(r"\[\d+\]", "[]", key)
    return general if general in patterns else next((p for p in patterns if "*" in p and fnmatchcase(key, p)), None)


def _take(conversion: Conversion, line: Line, entry: Any) -> Conversion:
    """Add a line, by its entry in the table."""
    entry = {"to": entry} if isinstance(entry, str) else entry or {}
    text = _word(line.value)
    if line.value is None or line.value in ("", {}, []):
        return msgspec.structs.replace(
            conversion, same=[*conversion.same, msgspec.structs.replace(line, remark="no value")]
        )
    if any(_fits(text, same) for same in entry.get("same", [])):
        return msgspec.structs.replace(conversion, same=[*conversion.same, line])
    why, target = entry.get("note", UNKNOWN), entry.get("to", "")
    value = line.value
    if "values" in entry:
        matches = [v for k, v in entry["values"].items() if _fits(text, k)]
        target = target if matches else ""
        value = line.value if matches == ["*"] else matches[0] if matches else None
        why = why if matches or why != UNKNOWN else f"no counterpart of {line.value!r} is known"
        if matches and isinstance(value, dict):
            several = matches if isinstance(line.value, list) else matches[:1]  # report_to: [tensorboard, wandb]
            for key, one in ((key, one) for match in several for key, one in match.items()):
                conversion = _set(conversion, key, line.value if one == "*" else one, line)
            return conversion
    if not target:
        return msgspec.structs.replace(conversion, left=[*conversion.left, msgspec.structs.replace(line, remark=why)])
    for index in re.findall(r"\[\d+\]", line.key):
        target = target.replace("[]", index, 1)
    target = target.replace("*", line.key.rpartition(".")[2])
    return _set(conversion, target, value, line, entry.get("note", ""))


def _set(conversion: Conversion, key: str, value: Any, line: Line, note: str = "") -> Conversion:
    """Set a value if it can stand in a spec with the others; a later line replaces the value of an earlier one."""
    origins = {**conversion.origins, key: [*conversion.origins.get(key, []), line]}
    trial = msgspec.structs.replace(conversion, values={**conversion.values, key: value}, origins=origins)
    why = "it looks like a secret" if redact(str(value)) != str(value) else _problem(trial)
    if why is None:
        return trial
    return msgspec.structs.replace(
        conversion, left=[*conversion.left, msgspec.structs.replace(line, remark=note or why)]
    )


def _problem(conversion: Conversion) -> str | None:
    """Return why a spec with these values would be refused."""
    tree = _ranks_per_node(conversion).spec()
    for i, source in enumerate(tree.get("data", {}).get("sources", [])):
        source.setdefault("source", f"source-{i}")  # its line may come later
    try:
        parse_spec(tree)
    except SpecError as error:
        return re.sub(r"\s+", " ", str(error).removeprefix("spec: "))
    return None


def _ranks_per_node(conversion: Conversion) -> Conversion:
    """Replace the number of all ranks by that of a node."""
    world, nodes = conversion.values.get("cluster.world_size"), conversion.values.get("cluster.nodes", 1)
    if world is None:
        return conversion
    lines = conversion.origins["cluster.world_size"]
    rest = conversion.without("cluster.world_size", f"{world} ranks cannot be shared by {nodes} nodes equally")
    if not isinstance(world, int) or not isinstance(nodes, int) or nodes < 1 or world % nodes:
        return rest
    values = {**rest.values, "cluster.procs_per_node": world // nodes}
    origins = {**rest.origins, "cluster.procs_per_node": lines}
    return msgspec.structs.replace(rest, values=values, origins=origins, left=conversion.left)


def _numbered_sources(conversion: Conversion) -> Conversion:
    """Number the sources that have a name, and write a single one as ``data.source``."""
    old = [i for i in range(MAX_SOURCES) if f"data.sources[{i}].source" in conversion.values]
    for key in [key for key in conversion.values if (m := _SOURCE.match(key)) and int(m[1]) not in old]:
        conversion = conversion.without(key, "its source is not taken over")
    if len(old) == 1:
        conversion = conversion.without(f"data.sources[{old[0]}].weight", "there is only one source")
    names = {f"data.sources[{i}]": "data" if len(old) == 1 else f"data.sources[{new}]" for new, i in enumerate(old)}

    def renamed(parts: dict[str, Any]) -> dict[str, Any]:
        return {_SOURCE.sub(lambda match: names[match[0]], key): part for key, part in parts.items()}

    return msgspec.structs.replace(conversion, values=renamed(conversion.values), origins=renamed(conversion.origins))


def _fits(text: str, pattern: Any) -> bool:
    return text == _word(pattern) or fnmatchcase(text, _word(pattern))


def _word(value: Any) -> str:
    return scalar(value).lower() if isinstance(value, (bool, list)) else str(value).lower()


def spec_text(conversion: Conversion, output: str) -> str:
    """Return the spec as YAML, each value with the line of the file that it comes from, and the other lines as
    comments."""
    title = tables()[conversion.kind]["title"]
    plan = f"allranks plan {printable(output)}"
    rows = [
        f"# From {conversion.file}, {title}: behind each value is its line there. Next: {plan}",
        *(f"# Note: {note}." for note in conversion.notes),
    ]
    tree = conversion.spec()
    _write(rows, {key: tree[key] for key in (*SECTIONS, *tree) if key in tree}, "", "", conversion)
    blocks = (
        (f"Lines of {conversion.file} that are not taken over", conversion.left),
        (f"Lines of {conversion.file} that need no key", conversion.same),
    )
    for head, lines in blocks:
        rows += [f"# {head}:"] * bool(lines) + [f"#   {line}" for line in sorted(lines, key=lambda one: one.number)]
    return "\n".join(rows) + "\n"


def _write(rows: list[str], tree: dict[str, Any], key: str, indent: str, conversion: Conversion) -> None:
    for name, value in tree.items():
        place = f"{key}.{name}" if key else name
        if isinstance(value, dict):
            rows.append(f"{indent}{scalar(name)}:")
            _write(rows, value, place, indent + "  ", conversion)
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            rows.append(f"{indent}{scalar(name)}:")
            for i, item in enumerate(value):
                start = len(rows)
                _write(rows, item, f"{place}[{i}]", indent + "    ", conversion)
                rows[start] = f"{indent}  - {rows[start].lstrip()}"
        else:
            lines = conversion.origins.get(place, [])
            absent = (
                f"default of {conversion.kind}"
                if place in conversion.values
                else f"not in {conversion.file}: set yours"
            )
            absent = "by option" if place in conversion.chosen else absent
            why = ", ".join(f"{line.number} {line.key}" for line in lines) or absent
            rows.append(f"{f'{indent}{scalar(name)}: {scalar(value)}':<{COMMENT_COLUMN}} # {printable(why)}")
