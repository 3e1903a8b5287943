"""The examples that come with the package. The folder is a link to `examples/` of the repository; a wheel has the files."""

from __future__ import annotations

from importlib import resources
from importlib.resources.abc import Traversable
from typing import Any

from allranks.errors import RequestError
from allranks.spec.launchers import DEFAULT_LAUNCHER
from allranks.spec.loader import parse_yaml
from allranks.utils.text import did_you_mean

FOLDERS = ("", "clusters/")
"""Folders with examples for users; others hold jobs that need files of their own."""


def example_files() -> dict[str, Traversable]:
    """Return the examples by name, those of this machine first."""
    root = resources.files("allranks") / "examples"
    found: dict[str, Traversable] = {}
    for folder in FOLDERS:
        files = (root / folder if folder else root).iterdir()
        for file in sorted(files, key=lambda file: file.name):
            if file.name.endswith(".yaml"):
                found[f"{folder}{file.name.removesuffix('.yaml')}"] = file
    return found


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
