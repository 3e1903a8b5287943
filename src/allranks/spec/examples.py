"""Specs to start from: the examples that come with the package, and the first spec that `init` writes.

The folder of examples is a link to `examples/` of the repository; a wheel has the files. A first spec has few keys, each with a comment,
and the next keys that one would set as comments.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from importlib import resources
from importlib.resources.abc import Traversable
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


COMMENT_COLUMN = 41
_NUMBERS = re.compile(r"[\d:.+~-]*")
_PLAIN = re.compile(r"[A-Za-z0-9_./~-][A-Za-z0-9_./:@+~-]*")


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
    name = choices.name or run_name(choices.model, choices.data)
    command = " ".join(shlex.quote(printable(file)).split())
    lines = [
        f"# allranks plan {command}   shows what would run; allranks run {command}   runs it.",
        "# Keys behind # are those that one sets next, with their defaults or an example; `allranks schema` has all keys.",
        _line("name", name, "the run folder is runs/NAME-TIME"),
        "model:",
        _line("  name", choices.model, "hub name, folder, or a tiny model with random weights"),
        *_model_keys(choices),
        "data:",
        _line("  source", choices.data, "hub name, file (`allranks data` shows its rows), folder, or built-in set"),
        *_data_keys(choices),
        *_adapter_keys(choices),
        "strategy:",
        _line("  name", choices.strategy, "pytorch_zero3 shards weights; `allranks compare` measures them"),
        "train:",
        _line("  max_steps", 10, "optimizer steps; instead of it, epochs: 1 for the whole data")
        if choices.data.startswith("builtin:")
        else _line("  epochs", 1, "times through the data; instead of it, max_steps: 500"),
        _line("  micro_batch_size", 1, "sequences per rank at a time; `plan` shows the memory that they need"),
        _line("  lr", "5e-5", "learning rate", plain=True),
        _later("  grad_accum", 4, "micro-batches per step and rank"),
        _later("  warmup_steps", 5, "steps until the learning rate is reached"),
        _later("eval", "{every: 50}", "evaluate on held-out rows every 50 steps, not only at the end"),
        _later("checkpoint", "{mode: full, every: 100}", "full: what `allranks resume` needs, every 100 steps"),
        "cluster:",
        *_cluster_keys(choices),
    ]
    return "\n".join(lines) + "\n"


def _model_keys(choices: StarterChoices) -> list[str]:
    keys = [_later("  dtype", "auto", "bfloat16 on GPUs, float32 on CPUs")]
    if not is_mlp(choices.model):
        keys.append(_later("  gradient_checkpointing", "true", "less memory, about a third slower"))
    return keys


def _data_keys(choices: StarterChoices) -> list[str]:
    if is_mlp(choices.model):
        return []
    given = []
    if choices.template:
        given.append(_line("  template", choices.template, "how a row becomes text; `allranks data` shows it"))
    if choices.columns:
        inner = ", ".join(f"{role}: {_scalar(name)}" for role, name in choices.columns)
        given.append(_line("  columns", f"{{{inner}}}", "which column is what", plain=True))
    if choices.packing:
        given.append(_line("  packing", choices.packing, "one row per sequence: there are few rows"))
    return [
        *given,
        _later("  max_length", 512, "tokens; longer rows are cut, and counted"),
        _later("  subset", 100, "only so many rows, chosen by data.seed"),
        _later("  eval_fraction", 0.05, "share of the rows that is held out"),
    ]


def _adapter_keys(choices: StarterChoices) -> list[str]:
    if is_mlp(choices.model):
        return []
    return [_later("adapter", "{type: lora, r: 8, alpha: 16}", "train small adapters, not all weights")]


def _cluster_keys(choices: StarterChoices) -> list[str]:
    launcher = LAUNCHERS[choices.launcher]
    lines = [_line("  launcher", choices.launcher, launcher.summary)]
    if launcher.uses_hosts:
        names = f"[{', '.join(map(_scalar, choices.hosts))}]"
        lines.append(_line("  hosts", names, "the first one hosts the rendezvous", plain=True))
    if not launcher.runs_here:
        lines.append(_line("  nodes", choices.nodes, "machines of the run"))
    ranks = "ranks per node; default: one per GPU, two without GPUs"
    if choices.procs_per_node is not None:
        lines.append(_line("  procs_per_node", choices.procs_per_node, ranks))
    else:
        lines.append(_later("  procs_per_node", choices.gpus_per_node or 2, ranks))
    if launcher.uses_slurm:
        lines += _slurm_keys(choices)
    if not launcher.runs_here:
        lines.append(_later("  env", "{NCCL_DEBUG: WARN}", "variables of the ranks; yours take precedence"))
        lines.append(_later("  setup", '["source /etc/profile"]', "shell lines before the ranks start"))
    return lines


def _slurm_keys(choices: StarterChoices) -> list[str]:
    examples = {"account": "my-account", "partition": "gpu", "gpus_per_node": 8, "time": '"01:00:00"'}
    comments = {
        "partition": "`sinfo -s` lists them; default: the cluster's",
        "gpus_per_node": "default: none is requested",
        "time": "the longer, the later it starts; default: the partition's",
        "account": "if your cluster needs one",
    }
    given = [
        _line(f"    {key}", value, comments[key]) for key in comments if (value := getattr(choices, key)) is not None
    ]
    open_keys = [key for key in comments if getattr(choices, key) is None]
    return ["  slurm:", *given, *(_later(f"    {key}", examples[key], comments[key]) for key in open_keys)]


def _line(key: str, value: Any, comment: str, *, plain: bool = False) -> str:
    text = f"{key}: {value if plain else _scalar(value)}"
    return f"{text:<{COMMENT_COLUMN}} # {comment}"


def _later(key: str, value: Any, comment: str) -> str:
    """Return a line for a key that is not set: it is valid without its first ``# ``."""
    indent = len(key) - len(key.lstrip())
    text = f"{' ' * indent}# {key.strip()}: {value}"
    return f"{text:<{COMMENT_COLUMN}} # {comment}"


def _scalar(value: Any) -> str:
    """Return a value as YAML that is read as the same value; text that YAML would read as another value is quoted."""
    if not isinstance(value, str):
        return str(value)
    if _PLAIN.fullmatch(value) and not _NUMBERS.fullmatch(value) and parse_yaml(value, "value") == value:
        return value
    return yaml.safe_dump(value, default_style='"', width=10**6, allow_unicode=True).rstrip("\n")
