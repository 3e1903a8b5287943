"""What a bundle is made of: for each part its files, where nodes that see it find it, and how they would know it."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import allranks
from allranks.errors import DataError, SpecError
from allranks.spec.records import RunSpec
from allranks.stage.environment import brings_packages, environment_source
from allranks.stage.hub import cached_dataset, cached_model
from allranks.stage.source import Source, walk

MAX_PROBES = 2000
MAX_PROJECT_BYTES = 1 << 30
TEMPORARY = tuple(dict.fromkeys(map(Path, (tempfile.gettempdir(), "/tmp", "/var/tmp", "/dev/shm", "/run"))))  # noqa: S108
"""Folders that each node usually has for itself."""
_NO_PROJECTS = (Path("/"), *TEMPORARY)
_MARKS = (".git", "pyproject.toml", "setup.py", "setup.cfg")


@dataclass(frozen=True)
class Asked:
    """A part that a spec asks for, before its files are listed. ``path`` is None for what lies in the hub's cache."""

    name: str
    path: Path | None
    find: Callable[[], list[Source]]


def sources(spec: RunSpec, *, packages: bool = True, without: Collection[str] = ()) -> list[Source]:
    """Every part that nodes need for a spec, but those ``without``; ``packages=False`` leaves the Python packages out.

    Raises:
        SpecError, DataError: the script, the model folder or the data file is not there.
        EnvironmentNotAble: a model or data set of the hub is not in this machine's cache.
    """
    found = [package_source()]
    if packages and brings_packages(spec.cluster.environment):
        found.append(environment_source(Path(sysconfig.get_paths()["purelib"]), Path(sys.prefix)))
    return found + [source for part in asked(spec) if part.name not in without for source in part.find()]


def asked(spec: RunSpec) -> list[Asked]:
    """Code, model and data that a spec names; nothing is looked for yet."""
    from allranks.train.data.sources import looks_like_file

    found: list[Asked] = []
    if spec.script is not None:
        script = Path(spec.script.path).expanduser()
        found.append(Asked("project", script, lambda: [project_source(script)]))
    if spec.model is not None and not spec.model.name.startswith(("tiny:", "mlp:")):
        name, revision = spec.model.name, spec.model.revision
        folder = Path(name).expanduser()
        found.append(Asked("model", folder if folder.is_dir() else None, lambda: [_model(name, revision)]))
    for part, key, source in (
        ("data", "data.source", spec.data.source if spec.data else None),
        ("eval-data", "eval.source", spec.eval.source if spec.data else None),
    ):
        if source is not None:
            path = Path(source).expanduser() if looks_like_file(source) else None
            found.append(Asked(part, path, partial(_data, part, key, source, spec)))
    if spec.data is not None and (spec.data.template.endswith(".jinja") or "/" in spec.data.template):
        template = Path(spec.data.template).expanduser()
        found.append(Asked("template", template, lambda: [_one_file("template", "data.template", template)]))
    return found


def package_source() -> Source:
    """The package allranks itself."""
    folder = Path(allranks.__file__).resolve().parent
    return _tree("allranks", folder.parent, [p.relative_to(folder.parent) for p in walk(folder)])


def project_source(script: Path) -> Source:
    """The project of a script: the nearest folder above it with .git or pyproject.toml, else the script's own folder.

    In a git work tree, what git ignores is left out. A script that lies in a home folder or a folder for temporary files,
    where all sorts of things lie, is sent alone.
    """
    script = script.expanduser().absolute()
    if not script.is_file():
        raise SpecError(f"script.path {script}: there is no such file")
    above = [f for f in script.parents if f != Path.home() and f not in Path.home().parents]
    root = next((f for f in above if any((f / mark).exists() for mark in _MARKS)), script.parent)
    if root in _NO_PROJECTS or root == Path.home():
        return _one_file("project", "script.path", script)
    names = _git_names(root) if (root / ".git").exists() else None
    if names is None:
        names = [p.relative_to(root) for p in walk(root)]
    if script.relative_to(root) not in names:
        names.append(script.relative_to(root))  # the script itself is always needed, also if git ignores it
    total = sum((root / name).stat().st_size for name in names)
    if total > MAX_PROJECT_BYTES:
        large = sorted(names, key=lambda n: -(root / n).stat().st_size)[:3]
        raise SpecError(
            f"script.path: the project {root} has {total >> 20} MiB (largest: {', '.join(map(str, large))}), too much to send as code; "
            "move data out of it, or list it in .gitignore"
        )
    return _tree("project", root, names, {"script.path": str(script.relative_to(root))})


def _git_names(root: Path) -> list[Path] | None:
    command = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if done.returncode != 0:
        return None
    return sorted({Path(name) for name in done.stdout.split("\0") if name and (root / name).is_file()})


def _model(name: str, revision: str | None) -> Source:
    folder = Path(name).expanduser()
    commit = None
    if not folder.is_dir():
        if name.startswith(("/", "./", "../", "~")):
            raise SpecError(f"model.name {name}: there is no such folder")
        folder, commit = cached_model(name, revision)
    if not (folder / "config.json").is_file():
        raise SpecError(f"model.name {name}: {folder} has no config.json")
    names = [p.relative_to(folder) for p in walk(folder)]
    found = _tree("model", folder.absolute(), names, {"model.name": "", "model.revision": None})
    return Source(**{**found.__dict__, "revision": commit})


def _data(part: str, key: str, source: str, spec: RunSpec) -> list[Source]:
    from allranks.train.data.sources import check_file, looks_like_file

    assert spec.data is not None
    if source.startswith("builtin:"):
        return []
    if looks_like_file(source):
        check_file(Path(source).expanduser())
        return [_one_file(part, key, Path(source).expanduser())]
    cache, folder, commit = cached_dataset(source, spec.data.config, spec.data.revision)
    names = [p.relative_to(cache) for p in walk(folder)]
    found = _tree(part, cache, names)
    return [Source(**{**found.__dict__, "revision": commit})]


def _one_file(part: str, key: str, path: Path) -> Source:
    if not path.is_file():
        raise DataError(f"{key} {path}: there is no such file")
    path = path.absolute()
    return Source(name=part, path=path, files=((path.name, path),), probe=("",), override={key: path.name})


def _tree(part: str, root: Path, names: list[Path], override: dict[str, str | None] | None = None) -> Source:
    texts = sorted(str(name) for name in names)
    step = max(1, -(-len(texts) // MAX_PROBES))
    files = tuple((text, root / text) for text in texts)
    return Source(name=part, path=root, files=files, probe=tuple(texts[::step]), override=override)
