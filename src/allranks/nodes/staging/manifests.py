"""Describe what each node of a job uses, the shared or the staged copy of each part, with its environment. Saved as
stage.json.

Nodes without network get variables that keep Hugging Face's libraries offline, each with its reason.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from allranks.planning.env_vars import EnvVar
from allranks.rundir.files import write_json
from allranks.spec.records import RunSpec
from allranks.utils.inputs import read_regular
from allranks.utils.machine import host_name

if TYPE_CHECKING:
    from allranks.nodes.staging.bundles import Bundle  # each rank reads manifests, and packs nothing


def offline_variables(datasets_cache: str | None) -> list[EnvVar]:
    """Return the variables of a node that must not access the network.

    Args:
        datasets_cache: a staged folder with prepared data sets of the hub.
    """
    reason = "a node without network would retry each request to the hub until it times out"
    variables = [EnvVar(name="HF_HUB_OFFLINE", value="1", reason=reason, source="stage")]
    if datasets_cache is not None:
        reason = "the data set was staged here, at its pinned revision"
        variables.append(EnvVar(name="HF_DATASETS_CACHE", value=datasets_cache, reason=reason, source="stage"))
    return variables


class PartUse(msgspec.Struct, frozen=True, kw_only=True):
    """The location of one part on a node."""

    name: str
    path: str
    staged: bool
    sha256: str


class NodeStage(msgspec.Struct, frozen=True, kw_only=True):
    """One node: its interpreter, its Python path, its environment, and the differences from the spec.

    ``folder`` is None if nothing was staged: nothing differs from the login node. None in ``overrides`` means null.
    """

    node: str
    folder: str | None
    python: str
    python_path: list[str]
    parts: list[PartUse]
    overrides: dict[str, str | None]
    variables: list[EnvVar]

    def environment(self, inherited: str | None = None) -> dict[str, str]:
        """Return the variables to set on this node; ``inherited``: a PYTHONPATH appended to the staged folders."""
        values = {v.name: v.value for v in self.variables if v.value is not None}
        if self.python_path:
            values["PYTHONPATH"] = ":".join([*self.python_path, *([inherited] if inherited else [])])
        return values


class StageManifest(msgspec.Struct, frozen=True, kw_only=True):
    """What was staged for one job, and how."""

    job: str
    bundle: str
    interpreter: str
    method: str
    bytes_sent: int
    seconds: float
    nodes: list[NodeStage]

    def of(self, node: str) -> NodeStage:
        """Return what one node uses; raise KeyError if the job does not have it."""
        for stage in self.nodes:
            if stage.node == node:
                return stage
        raise KeyError(node)

    def python(self, default: Sequence[str] | None = None) -> list[str]:
        """Return the command that replaces Python in one srun over all nodes: each node uses its own, with its
        variables.

        `default` starts Python on nodes that have the packages; if it is not given, the interpreter that built the
        bundle does (the current interpreter may itself be staged).
        """
        default = default or [self.interpreter]
        cases: dict[str, list[str]] = {}
        for node in self.nodes:
            if node.folder is not None:
                cases.setdefault(_shell(node, default), []).append(node.node)
        lines = [f"{'|'.join(shlex.quote(n) for n in names)}) {text};;" for text, names in cases.items()]
        script = f'case "$SLURMD_NODENAME" in {" ".join(lines)} *) exec {shlex.join(default)} "$@";; esac'
        return ["sh", "-c", script, "sh"] if lines else list(default)

    def save(self, path: Path) -> None:
        """Write stage.json atomically."""
        write_json(path, msgspec.to_builtins(self))


def load_manifest(path: Path) -> StageManifest:
    """Return a manifest that `StageManifest.save` wrote."""
    return msgspec.json.decode(read_regular(path), type=StageManifest)


def for_node(spec: RunSpec, stage: NodeStage) -> RunSpec:
    """Return the spec for the ranks of one node: with staged copies instead of missing files. Pure."""
    changed: Any = spec
    for key, value in stage.overrides.items():
        section, name, *inner = key.split(".")  # model.name, or data.sources.0.source
        part = getattr(changed, section)
        if inner:
            number, name = int(inner[0]), inner[1]
            sources = list(part.sources)
            sources[number] = msgspec.structs.replace(sources[number], **{name: value})
            part = msgspec.structs.replace(part, sources=sources)
        else:
            part = msgspec.structs.replace(part, **{name: value})
        changed = msgspec.structs.replace(changed, **{section: part})
    return changed


def spec_here(spec: RunSpec, manifest: Path) -> RunSpec:
    """Return the spec for this node, by a run's stage.json; unchanged if there is none or nothing was staged."""
    if not manifest.exists():
        return spec
    try:
        return for_node(spec, load_manifest(manifest).of(os.environ.get("SLURMD_NODENAME") or host_name()))
    except KeyError:
        return spec


def _shell(node: NodeStage, default: Sequence[str]) -> str:
    """Return a shell command that sets a node's variables and executes its Python."""
    words = [f"export {v.name}={shlex.quote(v.value)};" for v in node.variables if v.value is not None]
    if node.python_path:
        words.append(f"export PYTHONPATH={shlex.quote(':'.join(node.python_path))}${{PYTHONPATH:+:$PYTHONPATH}};")
    own = [node.python] if any(part.name == "env" and part.staged for part in node.parts) else default
    return f'{" ".join(words)} exec {shlex.join(own)} "$@"'


def node_stage(bundle: Bundle, node: str, lacks: list[str], folder: str) -> NodeStage:
    """Return what a node uses that lacks these parts and now has them in `folder`. Pure."""
    uses, python_path, overrides = [], [], {}
    for part in bundle.parts:
        staged = part.name in lacks
        path = f"{folder}/{part.name}" if staged else part.path
        uses.append(PartUse(name=part.name, path=path, staged=staged, sha256=part.sha256))
        if not staged:
            continue
        if part.name in ("allranks", "project"):
            python_path.append(path)
        for key, value in part.override.items():
            overrides[key] = None if value is None else f"{path}/{value}".rstrip("/")
    hub_parts = {p.name for p in bundle.parts if p.name.startswith(("data", "eval-data")) and p.revision is not None}
    datasets = next((use.path for use in uses if use.staged and use.name in hub_parts), None)
    return NodeStage(
        node=node,
        folder=folder if lacks else None,
        python=f"{folder}/env/bin/python" if "env" in lacks else bundle.python.executable,
        python_path=python_path,
        parts=uses,
        overrides=overrides,
        variables=offline_variables(datasets) if lacks else [],
    )
