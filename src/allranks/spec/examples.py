"""Specs to start from: the examples that come with the package, and the first spec that `init` writes.

The folder of examples is a link to `examples/` of the repository; a wheel has the files. A first spec (starter.yaml.j2)
has few keys, each with a comment, and the next keys that one would set as comments.
"""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import asdict, dataclass
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

import yaml

from allranks.errors import RequestError
from allranks.spec.launchers import DEFAULT_LAUNCHER, LAUNCHERS
from allranks.spec.loader import parse_yaml
from allranks.spec.models import NOISE_SOURCE, TINY_ENCODERS, is_mlp
from allranks.utils.text import did_you_mean, printable

FOLDERS = ("", "clusters/")
"""Folders with examples for users; others hold jobs that need files of their own."""


def example_files() -> dict[str, Traversable]:
    """Return the examples by name, those of this machine first."""
    root = resources.files("allranks") / "examples"
    by_name: dict[str, Traversable] = {}
    for folder in FOLDERS:
        files = (root / folder if folder else root).iterdir()
        for file in sorted(files, key=lambda file: file.name):
            if file.name.endswith(".yaml"):
                by_name[f"{folder}{file.name.removesuffix('.yaml')}"] = file
    return by_name


def example_key(name: str) -> str:
    """Return the name without a folder ``examples/`` in front and without ``.yaml``."""
    return name.removeprefix("examples/").removesuffix(".yaml")


def find_example(name: str) -> Traversable:
    """Return the file of an example.

    Raises:
        RequestError: there is none of this name; the message names the nearest one.
    """
    files, key = example_files(), example_key(name)
    if key in files:
        return files[key]
    hint = did_you_mean(key, files, 0.4, "{}")
    raise RequestError(f"there is no example {name!r}{hint} (allranks examples lists them)")


def describe_example(name: str) -> dict[str, Any]:
    """Return name, first line, launcher, nodes, model and data of an example, and whether it downloads nothing."""
    text = example_files()[name].read_text("utf-8")
    raw = parse_yaml(text, name)
    cluster, model, data = raw.get("cluster", {}), raw["model"]["name"], raw["data"]["source"]
    return {
        "name": name,
        "summary": text.splitlines()[0].removeprefix("# "),
        "launcher": cluster.get("launcher", DEFAULT_LAUNCHER),
        "nodes": cluster.get("nodes", 1),
        "model": model,
        "data": data,
        "offline": model.startswith(("tiny:", "mlp:")) and data.startswith("builtin:"),
    }


COMMENT_COLUMN = 41


@dataclass(frozen=True)
class StarterChoices:
    """What the user chose; None: left at its default."""

    model: str
    data: str
    launcher: str
    """A name of `LAUNCHERS`."""
    strategy: str
    nodes: int = 1
    hosts: tuple[str, ...] = ()
    procs_per_node: int | None = None
    partition: str | None = None
    account: str | None = None
    gpus_per_node: int | None = None
    time: str | None = None
    name: str | None = None
    columns: tuple[tuple[str, str], ...] = ()
    """Roles and their columns."""
    template: str | None = None
    packing: str | None = None


def default_data(model: str) -> str:
    """Return the built-in set that suits a model."""
    if is_mlp(model):
        return NOISE_SOURCE
    return "builtin:news" if model.removeprefix("tiny:") in TINY_ENCODERS else "builtin:instructions"


def run_name(model: str, data: str) -> str:
    """Return a name for the run, made of the last parts of model and data: ``llama-instructions``."""
    parts = [re.split(r"[/:]", text.rstrip("/"))[-1].split(".json")[0].split(".csv")[0] for text in (model, data)]
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", "-".join(parts)).strip("-._").lower()[:60]
    return name if re.match(r"[a-z0-9]", name) else "run"


def starter_text(choices: StarterChoices, file: str) -> str:
    """Return the spec as YAML with comments. `file` is its path, for the commands in the first lines."""
    from jinja2 import Environment, StrictUndefined

    environment = Environment(trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined)  # noqa: S701 - YAML
    environment.filters["scalar"] = scalar
    template = environment.from_string((Path(__file__).parent / "starter.yaml.j2").read_text("utf-8"))
    values = asdict(choices) | {
        "name": choices.name or run_name(choices.model, choices.data),
        "command": " ".join(shlex.quote(printable(file)).split()),
        "is_mlp": is_mlp(choices.model),
        "info": LAUNCHERS[choices.launcher],
    }
    lines = []
    for line in template.render(values).splitlines():
        text, mark, comment = line.rpartition(" ## ")
        lines.append(f"{text:<{COMMENT_COLUMN}} # {comment}" if mark else line)
    return "\n".join(lines) + "\n"


def scalar(value: Any) -> str:
    """Return a value as YAML that is read as the same value, also within a list."""
    text = yaml.safe_dump([value], default_flow_style=True, width=10**6, allow_unicode=True).strip()[1:-1]
    return text if parse_yaml(text, "value") == value else json.dumps(value)
