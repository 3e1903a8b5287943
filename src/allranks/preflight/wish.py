"""What a spec needs of a node: packages, folders, ports."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

import allranks
from allranks.preflight.records import Folder, Wish
from allranks.slurm.script import is_container
from allranks.spec.records import RunSpec

TRAINING = ["torch", "transformers", "tokenizers", "safetensors", "numpy"]


def needed_packages(spec: RunSpec) -> list[str]:
    """Packages that the ranks of this run import."""
    if is_container(spec.cluster.environment):
        return []  # the image brings them
    if spec.script is not None:
        return ["torch"]
    return TRAINING + (["peft"] if spec.adapter.type == "lora" else [])


def engine_packages(spec: RunSpec) -> list[str]:
    """The package of another library's engine. It is looked for on each node, not imported: that takes long, and talks."""
    if is_container(spec.cluster.environment) or spec.script is not None:
        return []
    if spec.strategy.name.startswith("deepspeed_"):
        return ["deepspeed"]
    return ["accelerate"] if spec.strategy.name == "hf_trainer" else []


def make_wish(
    spec: RunSpec, run_root: Path, *, ports: Sequence[int] = (), imports: bool = True, here: Path | None = None
) -> Wish:
    """What is asked of every node that this spec would use. Paths are the launcher's, made absolute from `here`."""
    packages = needed_packages(spec)
    return Wish(
        python=sys.executable,
        packages=packages + engine_packages(spec),
        imports=packages if imports else [],
        folders=_folders(spec, run_root, (here or Path.cwd())),
        ports=list(ports),
    )


def _folders(spec: RunSpec, run_root: Path, here: Path) -> list[Folder]:
    def full(path: str | Path) -> str:
        return str((here / Path(path).expanduser()).absolute())

    found = [
        Folder(role="project", path=str(Path(allranks.__file__).resolve().parent), fingerprint=True),
        Folder(role="run", path=full(existing(here / run_root)), write=True),
    ]
    if spec.script is not None:
        found.append(Folder(role="script", path=full(spec.script.path), fingerprint=True))
    for role, source in (("data", spec.data.source if spec.data else None), ("eval data", spec.eval.source)):
        if source and _is_path(source, here):
            found.append(Folder(role=role, path=full(source), fingerprint=True))
    if spec.model is not None and not spec.model.name.startswith("tiny:") and _is_path(spec.model.name, here):
        found.append(Folder(role="model", path=full(spec.model.name), fingerprint=True))
    if spec.cluster.cache:
        found.append(
            Folder(role="cache", path=full(existing(here / Path(spec.cluster.cache).expanduser())), write=True)
        )
    return found


def _is_path(text: str, here: Path) -> bool:
    return not text.startswith("builtin:") and (
        text.startswith(("/", "./", "../", "~")) or (here / text).exists() or text.endswith((".json", ".jsonl", ".csv"))
    )


def existing(path: Path) -> Path:
    """The folder itself, or the nearest one above it that is there."""
    path = path.absolute()
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


@contextmanager
def nonces(wish: Wish) -> Iterator[tuple[Wish, dict[str, str]]]:
    """Puts a file with a secret into every folder that must be shared; removed at the end.

    Gives the wish with the files' names, and the secret by role. A folder that cannot be written from here gets none.
    """
    secret, name = secrets.token_hex(16), f".allranks-nonce-{os.getpid()}-{secrets.token_hex(4)}"
    made: list[Path] = []
    folders, told = [], {}
    try:
        for item in wish.folders:
            path = Path(item.path) / name
            named = item
            if item.write:
                try:
                    path.write_text(secret)
                    made.append(path)
                    named, told[item.role] = msgspec.structs.replace(item, nonce=name), secret
                except OSError:
                    pass
            folders.append(named)
        yield msgspec.structs.replace(wish, folders=folders), told
    finally:
        for path in made:
            path.unlink(missing_ok=True)
