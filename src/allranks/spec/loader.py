"""Read YAML and ``--set`` into a checked `RunSpec`, and export the JSON Schema of the spec for editors.

Every error names the file, the key and the fix.
"""

from __future__ import annotations

import json
import math
import re
import typing
from pathlib import Path
from typing import Any

import msgspec
import yaml
from yaml.composer import ComposerError

from allranks.errors import SpecError
from allranks.spec import validation
from allranks.spec.data_sources import mixture_problems
from allranks.spec.launchers import LAUNCHERS, launchers_with
from allranks.spec.records import ClusterSpec, Record, RunSpec, StrategySpec
from allranks.spec.strategies import OPTION_DESCRIPTIONS, REGISTRY, read_options, resolve_options
from allranks.utils.inputs import FileTooLarge, is_stdin, read_input, read_regular
from allranks.utils.text import nearest_file_hint, nearest_name, suggest

_KEY_WORDS: dict[str, str] = json.loads((Path(__file__).parent / "key_synonyms.json").read_text())
KEY_SYNONYMS = {word: key for key, words in _KEY_WORDS.items() for word in words.split()}
"""Keys of other tools' configurations, and the key of the spec."""


_HELD_OUT = re.compile(r"(?:^|_)(?:eval|val|valid|test|dev|held_?out)|validation|evaluation")
"""Words for the rows to evaluate on; a similar name such as data.source would train on them."""


def json_schema() -> dict[str, Any]:
    """Return the schema, draft 2020-12. A strategy's options are next to its name, as in YAML."""
    (root,), components = msgspec.json.schema_components((RunSpec,), ref_template="#/$defs/{name}")
    for record, properties in ((name, part.get("properties", {})) for name, part in components.items()):
        for key, schema in properties.items():
            schema["description"] = validation.descriptions()[record, "async_" if key == "async" else key]
    options = sorted({option for entry in REGISTRY.values() for option in entry.options})
    components["StrategySpec"] = {
        "title": "StrategySpec",
        "description": "Name and options of the strategy.",
        "type": "object",
        "properties": {
            "name": {**components["StrategySpec"]["properties"]["name"], "enum": list(REGISTRY)},
            **{option: {"description": OPTION_DESCRIPTIONS.get(option, "")} for option in options},
        },
        "additionalProperties": False,
    }
    components["ClusterSpec"]["properties"]["launcher"]["enum"] = list(LAUNCHERS)
    components["DataSpec"]["oneOf"] = [
        {"required": [name], "properties": {name: {"not": {"type": "null"}}, other: {"type": "null"}}}
        for name, other in (("source", "sources"), ("sources", "source"))
    ]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "allranks run spec",
        **root,
        "$defs": components,
    }


MAX_SPEC_BYTES = 1_000_000
MAX_NODES = 20_000
"""Limit on keys, values and lists of one document; an alias counts every time it is used."""
MAX_DEPTH = 100
MAX_UNKNOWN = 20
"""Limit on unknown keys in one error; the search for the nearest known key is slow."""
MAX_KEY = 200
MAX_NUMBER = 100
"""Limit on the characters of an integer. Parsing a base-60 integer (``1:59:59``) takes quadratic time."""


class _Loader(yaml.SafeLoader):
    """SafeLoader with YAML 1.2 numbers (such as ``1e-4``), errors for duplicate keys, and bounded work.

    An alias is a copy of its anchor, so nested aliases grow exponentially in a document of a few hundred bytes. Every
    node is counted while the document is composed; composing stops at the limit.
    """

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._nodes = self._depth = 0
        self._sizes: dict[str, int] = {}

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()
        anchor, before = getattr(event, "anchor", None), self._nodes
        is_alias = isinstance(event, yaml.events.AliasEvent)
        self._nodes += self._sizes.get(str(anchor), 1) if is_alias else 1
        self._depth += 1
        if self._nodes > MAX_NODES:
            aliases = ", counting an alias every time it is used" if self._sizes else ""
            raise ComposerError(None, None, f"it has more than {MAX_NODES} keys and values{aliases}", event.start_mark)
        if self._depth > MAX_DEPTH:
            raise ComposerError(None, None, f"it is nested deeper than {MAX_DEPTH} levels", event.start_mark)
        node = super().compose_node(parent, index)
        self._depth -= 1
        if anchor is not None and not is_alias:
            self._sizes[str(anchor)] = self._nodes - before
        return node

    def construct_yaml_int(self, node: Any) -> int:
        if len(node.value) > MAX_NUMBER:
            raise yaml.constructor.ConstructorError(
                None, None, f"a number of {len(node.value)} characters; put strings in quotes", node.start_mark
            )
        return super().construct_yaml_int(node)


# YAML 1.1 asks for a dot and a signed exponent, so that 5e-5 would be a string.
_Loader.yaml_implicit_resolvers = {
    first: [(tag, regexp) for tag, regexp in resolvers if tag != "tag:yaml.org,2002:float"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(
        r"^[-+]?(?:[0-9][0-9_]*\.[0-9_]*(?:[eE][-+]?[0-9]+)?|[0-9][0-9_]*[eE][-+]?[0-9]+"
        r"|\.[0-9_]+(?:[eE][-+]?[0-9]+)?|\.(?:inf|Inf|INF|nan|NaN|NAN))$"
    ),
    list("-+0123456789."),
)


_LITERAL = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
_LITERAL_ARGUMENT = (*_LITERAL, "tag:yaml.org,2002:bool", "tag:yaml.org,2002:timestamp")


def _mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: set[Any] = set()
    for key_node, value_node in node.value:
        key = loader.construct_object(key_node, deep=True)
        # arguments and environment variables are text: their numbers stay as they are written (1.10, 007)
        if key == "args" and isinstance(value_node, yaml.SequenceNode):
            texts, tags = value_node.value, _LITERAL_ARGUMENT
        elif key == "env" and isinstance(value_node, yaml.MappingNode):
            texts, tags = [value for _, value in value_node.value], _LITERAL
        else:
            texts, tags = [], ()
        for text in texts:
            if text.tag in tags:
                text.tag = "tag:yaml.org,2002:str"
        if not isinstance(key, str):
            raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is not a string", key_node.start_mark)
        if key in seen:
            raise yaml.constructor.ConstructorError(None, None, f"duplicate key {key!r}", key_node.start_mark)
        seen.add(key)
    return loader.construct_mapping(node, deep=True)


_Loader.add_constructor("tag:yaml.org,2002:map", _mapping)
_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)


def parse_yaml(text: str, where: str) -> Any:
    """Parse one YAML document; `where` (a file name or a ``--set``) appears in the error."""
    return parse_yaml_nodes(text, where)[0]


def parse_yaml_nodes(text: str, where: str) -> tuple[Any, yaml.Node | None]:
    """Return the content of one YAML document, and its nodes, which know their lines."""
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        return (None if node is None else loader.construct_document(node)), node
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f", line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise SpecError(f"{where}{place}: invalid YAML: {problem}") from None
    except (ValueError, RecursionError) as error:
        raise SpecError(f"{where}: invalid YAML: {error}") from None


def load_spec(path: str | Path, sets: typing.Sequence[str] = ()) -> RunSpec:
    """Read, override with ``a.b=value`` items, and check a spec file.

    Raises:
        SpecError: the file cannot be read, or the spec is wrong.
    """
    path = Path(path)
    raw = parse_yaml(_read(path, named=True), str(path))
    if raw is None:
        raise SpecError(f"{path}: the file is empty; give at least model.name and data.source")
    return parse_spec(raw, sets, where=str(path))


def _read(path: Path, *, named: bool = False) -> str:
    """Return the text of a spec; a path `named` on the command line may be a pipe."""
    read = read_input if named and not is_stdin(path) else read_regular
    try:
        return read(path, MAX_SPEC_BYTES).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"{path}: {why_unreadable(error, path, MAX_SPEC_BYTES, 'a spec')}") from None


def why_unreadable(error: OSError | UnicodeDecodeError, path: Path, limit: int, what: str) -> str:
    """Return why a file that a user named as `what` could not be read as text."""
    match error:
        case FileTooLarge():
            return f"larger than {limit} bytes; this is not {what}"
        case FileNotFoundError():
            return f"there is no such file{nearest_file_hint(path)}"
        case IsADirectoryError():
            return f"expected {what} file, found a folder"
        case UnicodeDecodeError():
            return "this is not a UTF-8 text file"
        case _:
            return f"cannot be read: {error.strerror}"


def parse_spec(raw: Any, sets: typing.Sequence[str] = (), where: str = "spec") -> RunSpec:
    """Check a parsed document. The error lists all unknown keys, each with the nearest known one."""
    if not isinstance(raw, dict):
        raise SpecError(f"{where}: expected a mapping of keys, found a {type(raw).__name__}")
    raw = _copy(raw)
    for item in sets:
        _apply_set(raw, item)
    validation.require_sections(raw, where)
    raw = validation.without_empty_sections(raw)
    _apply_profile(raw, where)
    _read_strategy(raw, where)
    _numbers_as_text(raw, where)
    if problems := _unknown_keys(raw, RunSpec, "") or _not_finite(raw):
        raise SpecError(f"{where}: " + "; ".join(problems))
    try:
        spec = msgspec.convert(raw, RunSpec)
    except msgspec.ValidationError as error:
        raise SpecError(f"{where}: {validation.readable_error(str(error))}") from None
    _check_together(spec, where)
    return spec


def _apply_profile(raw: dict[str, Any], where: str) -> None:
    """Merge the cluster section of ``cluster.profile`` under this spec's own and remove the key."""
    cluster = raw.get("cluster")
    if not isinstance(cluster, dict) or (name := cluster.pop("profile", None)) is None:
        return
    if not isinstance(name, str):
        raise SpecError(f"{where}: cluster.profile: expected the path of another spec, got {name!r}")
    beside = Path(where).parent / name
    path = beside if beside.is_file() else Path(name)
    try:
        below = parse_yaml(_read(path), str(path))
    except SpecError as error:
        raise SpecError(f"{where}: cluster.profile: {error}") from None
    section = below.get("cluster") if isinstance(below, dict) else None
    if not isinstance(section, dict):
        raise SpecError(f"{path}: the file that cluster.profile of {where} names has no section cluster")
    if "profile" in section:
        raise SpecError(f"{path}: a profile cannot name another profile (cluster.profile)")
    raw["cluster"] = _over(section, cluster)


def _over(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Merge sections key by key; the upper section takes precedence. Lists and plain values are replaced."""
    merged = dict(below)
    for key, value in above.items():
        old = merged.get(key)
        merged[key] = _over(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged


def _copy(value: Any) -> Any:
    """Return a copy in which aliases of YAML are values of their own, so that ``--set`` changes one place only."""
    if isinstance(value, dict):
        return {k: _copy(v) for k, v in value.items()}
    return [_copy(v) for v in value] if isinstance(value, list) else value


def _apply_set(raw: dict[str, Any], item: str) -> None:
    key, eq, text = item.partition("=")
    parts = key.split(".")
    if not eq or not all(parts):
        raise SpecError(f"--set {item}: write it as section.key=value, for example train.lr=1e-4")
    target = raw
    for depth, part in enumerate(parts[:-1]):
        if target.get(part) is None:
            target[part] = {}
        target = target[part]
        if not isinstance(target, dict):
            raise SpecError(f"--set {item}: {'.'.join(parts[: depth + 1])} is a value, not a section")
    where, last = f"--set {key}", parts[-1]
    target[last] = (
        parse_yaml(f"{last}: {text}", where)[last]
        if last in ("args", "env")
        else parse_yaml(text, where)
        if text
        else ""
    )


def _read_strategy(raw: dict[str, Any], where: str) -> None:
    """Move a strategy's options, which are next to its name in YAML, to the record's `options`.

    Files that options name are replaced by their content, so that the run folder holds it and any machine can resume.
    """
    section = raw.get("strategy")
    if not isinstance(section, dict):
        return
    options = section.pop("options", None) or {}
    if not isinstance(options, dict):
        raise SpecError(
            f"{where}: strategy.options: write options next to the name, as in {{name: zero1, bucket_mb: 25}}"
        )
    named = {"name": section.pop("name")} if "name" in section else {}
    options = {**options, **section}
    if isinstance(name := named.get("name"), str):
        try:
            options = read_options(name, options)
        except SpecError as error:
            raise SpecError(f"{where}: {error}") from None
    raw["strategy"] = {**named, "options": options}


def _numbers_as_text(raw: dict[str, Any], where: str) -> None:
    """Convert numbers among ``script.args`` and ``cluster.env`` to strings, in a dictionary from Python."""
    script = raw.get("script")
    if isinstance(script, dict) and isinstance(args := script.get("args"), list):
        script["args"] = [str(a) if isinstance(a, (int, float)) and not isinstance(a, bool) else a for a in args]
    cluster = raw.get("cluster")
    env = cluster.get("env") if isinstance(cluster, dict) else None
    if isinstance(cluster, dict) and isinstance(env, dict):
        if bad := [k for k, v in env.items() if not isinstance(v, (str, int, float)) or isinstance(v, bool)]:
            raise SpecError(f"{where}: cluster.env.{bad[0]}: expected a string, got {env[bad[0]]!r}; put it in quotes")
        cluster["env"] = {k: str(v) for k, v in env.items()}


def _unknown_keys(raw: dict[str, Any], record: type[Record], path: str) -> list[str]:
    known = validation.fields_of(record)
    problems: list[str] = []
    for key, value in raw.items():
        key_path = f"{path}{key}"
        if key not in known:
            if len(problems) >= MAX_UNKNOWN:
                return [*problems, "and more"]
            shown = key_path if len(key_path) <= MAX_KEY else f"{key_path[:MAX_KEY]}..."
            problems.append(f"unknown key {shown!r}{_nearest(key[:MAX_KEY], path, known)}")
            continue
        inner = validation.record_class(known[key].type)
        if inner is not None and isinstance(value, dict) and inner is not StrategySpec:
            problems += _unknown_keys(value, inner, f"{key_path}.")
        if inner is not None and isinstance(value, list):
            for number, item in enumerate(value):
                problems += _unknown_keys(item, inner, f"{key_path}[{number}].") if isinstance(item, dict) else []
    return problems


def _nearest(key: str, path: str, known: typing.Iterable[str]) -> str:
    meant = KEY_SYNONYMS.get(key.lower().replace("-", "_"))  # in other tools
    if meant is not None and path in ("", f"{meant.rpartition('.')[0]}."):
        return suggest(repr(meant))
    word = key.lower().replace("-", "_")
    if (meant is None and _HELD_OUT.search(word)) or (path == "eval." and (meant or "").startswith("data")):
        return suggest("'eval.source' (rows of their own)", "'data.eval_fraction' (a share of the rows)")
    lower = {name.lower(): name for name in known}
    near = nearest_name(key.lower(), lower)
    if near:
        return suggest(repr(path + lower[near]))
    # The right key in the wrong section is the commonest mistake of all.
    elsewhere = [k for k in validation.all_keys(RunSpec) if k.rsplit(".", 1)[-1] == key]
    if elsewhere:
        return f"; it belongs to {elsewhere[0]!r}"
    if meant is not None and "." in meant:
        return suggest(repr(meant))
    return f" (known here: {', '.join(known)})"


def _not_finite(value: Any, path: str = "") -> list[str]:
    """Refuse infinite numbers and NaN: YAML has .inf and .nan and reads 1e999 as infinite."""
    if isinstance(value, dict):
        return [p for key, item in value.items() for p in _not_finite(item, f"{path}.{key}" if path else str(key))]
    if isinstance(value, list):
        return [p for i, item in enumerate(value) for p in _not_finite(item, f"{path}[{i}]")]
    if isinstance(value, float) and not math.isfinite(value):
        return [f"{path}: expected a finite number, got {value}"]
    return []


def _cluster_problems(cluster: ClusterSpec) -> list[str]:
    problems: list[str] = []
    launcher = cluster.launched_by
    if launcher.uses_hosts and not cluster.hosts:
        problems.append(
            f"cluster.launcher is {cluster.launcher}, but cluster.hosts is empty; list the nodes; the first one hosts "
            "the rendezvous"
        )
    if cluster.hosts and len(cluster.hosts) != cluster.nodes and launcher.uses_hosts:
        problems.append(f"cluster.hosts names {len(cluster.hosts)} hosts, cluster.nodes says {cluster.nodes}")
    if not launcher.uses_slurm and cluster.python is not None and cluster.python.startswith("pyxis:"):
        problems.append(
            "cluster.python: only srun can enter a pyxis: image; use launcher "
            f"{' or '.join(launchers_with(uses_slurm=True))}, or an Apptainer image (.sif)"
        )
    if launcher.runs_here and cluster.nodes != 1:
        problems.append(
            f"cluster.nodes is {cluster.nodes}, but launcher {cluster.launcher} uses only this machine; "
            f"use {' or '.join(launchers_with(runs_here=False))}"
        )
    if cluster.spares and not launcher.uses_slurm:
        problems.append(
            f"cluster.spares is {cluster.spares}, but launcher {cluster.launcher} has no spare nodes; set it to 0, or "
            f"use launcher {' or '.join(launchers_with(uses_slurm=True))}"
        )
    return problems


def _content_problems(spec: RunSpec) -> list[str]:
    """Return what is missing or too much of model, data and script."""
    if spec.script is not None:
        problems = []
        if (spec.script.path is None) == (spec.script.module is None):
            problems.append("set either script.path, the file of your program, or script.module, as for `python -m`")
        if spec.model is not None or spec.data is not None:
            problems.append("script replaces model, data and train; remove those sections")
        return problems
    missing = "model.name is missing; set a hub name, a path, or for example tiny:mistral"
    problems = [] if spec.model is not None else [missing]
    if spec.data is None:
        return [*problems, "data.source is missing; set a hub name, a file, or for example builtin:instructions"]
    return problems + mixture_problems(spec.data)


def _check_together(spec: RunSpec, where: str) -> None:
    """Check rules that concern more than one key."""
    problems = _content_problems(spec)
    for first, second in (("max_steps", "epochs"), ("grad_accum", "global_batch_size")):
        if getattr(spec.train, first) is not None and getattr(spec.train, second) is not None:
            problems.append(f"train.{first} and train.{second} are both set; set only one (--set train.{second}=null)")
    for rules in (
        validation.adapter_problems,
        validation.mlp_problems,
        validation.model_problems,
        validation.evaluation_problems,
        validation.notify_problems,
        validation.tracker_problems,
    ):
        problems += rules(spec)
    try:
        problems += _cluster_problems(spec.cluster)
    except SpecError as error:
        problems.append(str(error))
    try:
        resolve_options(spec.strategy.name, spec.strategy.options)
    except SpecError as error:
        problems.append(str(error))
    if problems:
        raise SpecError(f"{where}: " + "; ".join(problems))


def spec_to_dict(spec: RunSpec) -> dict[str, Any]:
    """Return the spec as plain values, with all defaults and strategy options next to the name."""
    raw = msgspec.to_builtins(spec)
    strategy = raw["strategy"]
    raw["strategy"] = {"name": strategy["name"], **strategy["options"]}
    return raw


def spec_to_yaml(spec: RunSpec) -> str:
    """Return the spec as YAML that `parse_spec` reads back to an equal record."""
    return yaml.safe_dump(spec_to_dict(spec), sort_keys=False, allow_unicode=True, width=120)
