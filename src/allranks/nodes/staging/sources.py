"""List the files of every part that nodes may lack: code, Python packages, model, data, from folders or the Hugging
Face cache.

For each part: its files, its path on nodes that have it, and the files that show that they have it. Only reads files.
"""

from __future__ import annotations

import glob
import importlib.metadata
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from allranks.errors import DataError, EnvironmentNotAble, SpecError
from allranks.nodes.rank_command import program_file, working_directory
from allranks.rundir.files import read_json
from allranks.spec.data_sources import data_files, is_pattern, looks_like_file, parts_of, source_of
from allranks.spec.records import DataSpec, RunSpec, ScriptSpec
from allranks.spec.validation import is_container
from allranks.utils.filesystem import PACKAGE_FOLDER, datasets_cache, hub_cache
from allranks.utils.inputs import read_text

_SKIPPED_FOLDERS = {
    *(".git", ".hg", ".venv", "venv", "__pycache__", "node_modules"),
    *(".pytest_cache", ".ruff_cache", ".mypy_cache", ".hypothesis"),
}


@dataclass(frozen=True)
class PartFiles:
    """One part before it is packed. ``override`` contains the changes of the spec on a node with the staged copy."""

    name: str
    path: Path
    files: tuple[tuple[str, Path], ...]
    probe: tuple[str, ...]
    revision: str | None = None
    override: dict[str, str | None] | None = None


def walk_files(folder: Path, *, compiled: bool = False) -> Iterator[Path]:
    """Yield files below a folder, sorted; links are followed, but never in a loop."""
    visited: set[str] = set()
    for base, folders, names in os.walk(folder, followlinks=True):
        real = os.path.realpath(base)
        if real in visited:
            folders.clear()
            continue
        visited.add(real)
        folders[:] = sorted(f for f in folders if f not in _SKIPPED_FOLDERS or (compiled and f == "__pycache__"))
        for name in sorted(names):
            path = Path(base, name)
            if path.is_file() and (compiled or path.suffix != ".pyc"):
                yield path


def environment_source(site: Path, prefix: Path | None = None) -> PartFiles:
    """Return the packages of an environment. Its identity is the RECORD of every package, which lists the file hashes.

    Args:
        site: the folder ``site-packages``.
        prefix: its environment, if it must be checked.

    Raises:
        EnvironmentNotAble: the packages would not run elsewhere, or there are none.
    """
    problem = ""
    if prefix is not None and (prefix / "conda-meta").is_dir():
        problem = "it is a conda environment, whose libraries are outside of the packages; use a venv or a container"
    elif prefix is not None and (prefix / "pyvenv.cfg").is_file():
        settings = read_text(prefix / "pyvenv.cfg").lower().replace(" ", "").splitlines()
        if "include-system-site-packages=true" in settings:
            problem = "it also uses the system's packages; create a venv without --system-site-packages"
    if problem:
        raise EnvironmentNotAble(f"the packages of {prefix} cannot be staged: {problem}")
    below = f"lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"
    files = tuple(
        (f"{below}/{p.relative_to(site)}", p) for p in walk_files(site, compiled=True) if not is_allranks_file(p, site)
    )
    probe = tuple(
        sorted(f"{p.parent.name}/RECORD" for p in site.glob("*.dist-info/RECORD") if not is_allranks_file(p, site))
    )
    if not probe:
        raise EnvironmentNotAble(
            f"{site} contains no installed packages; run allranks from the environment to be staged"
        )
    return PartFiles(name="env", path=site, files=files, probe=probe)


def is_allranks_file(path: Path, site: Path) -> bool:
    """Return whether a file belongs to the installed allranks, a part of its own: reinstalling changes no other."""
    top = path.relative_to(site).parts[0]
    return top == "allranks" or top.startswith("allranks-") or top in ("_editable_impl_allranks.pth", "__pycache__")


def brings_packages(environment: str | None) -> bool:
    """Return whether this interpreter's packages are those of ``cluster.python``; containers and conda have their own.

    Raises:
        EnvironmentNotAble: it is another virtual environment than the current one.
    """
    if environment is None:
        return True
    folder = Path(environment).expanduser()
    if environment.startswith("conda:") or is_container(environment):
        return False
    if folder.resolve() == Path(sys.prefix).resolve():
        return True
    raise EnvironmentNotAble(
        f"cluster.python {environment} is not the current environment ({sys.prefix}); "
        f"stage from it: {folder}/bin/python -m allranks stage SPEC"
    )


def package_versions() -> dict[str, str]:
    """Return name and version of every package that this interpreter sees, sorted."""
    versions = {d.metadata["Name"]: d.version for d in importlib.metadata.distributions() if d.metadata["Name"]}
    return dict(sorted(versions.items(), key=lambda item: item[0].lower()))


_COMMIT_HASH = re.compile(r"^[0-9a-f]{40}$")


def cached_model(name: str, revision: str | None) -> tuple[Path, str]:
    """Return folder and commit of a model of the hub.

    Raises:
        EnvironmentNotAble: it is missing or incomplete here.
    """
    repo = hub_cache() / f"models--{name.replace('/', '--')}"
    cure = f"on a machine with network: hf download {name}" + (f" --revision {revision}" if revision else "")
    commit = _commit(repo, revision)
    if commit is None:
        raise EnvironmentNotAble(
            f"model.name {name}: revision {revision or 'main'} is not in the cache {hub_cache()}; {cure}"
        )
    folder = repo / "snapshots" / commit
    missing = [shard for shard in _shards(folder) if not (folder / shard).is_file()]
    if missing or not any((*folder.glob("*.safetensors"), *folder.glob("*.bin"))):
        raise EnvironmentNotAble(
            f"model.name {name}: {folder} is incomplete: {', '.join(missing[:3]) or 'no weights'} missing; {cure}"
        )
    return folder, commit


def _commit(repo: Path, revision: str | None) -> str | None:
    wanted = revision or "main"
    if not _COMMIT_HASH.match(wanted):
        try:
            wanted = read_text(repo / "refs" / wanted, 4096).strip()
        except (OSError, UnicodeDecodeError):
            return None
    return wanted if (repo / "snapshots" / wanted).is_dir() else None


def _shards(folder: Path) -> set[str]:
    shards: set[str] = set()
    for index in folder.glob("*.index.json"):
        content: Any = read_json(index)
        if isinstance(content, dict) and isinstance(content.get("weight_map"), dict):
            shards |= set(content["weight_map"].values())
    return shards


def cached_dataset(name: str, config: str | None, revision: str | None) -> tuple[Path, Path, str]:
    """Return cache, folder and commit of a prepared data set of the hub:
    ``<cache>/<owner>___<name>/<config>/<version>/<commit>``.

    Raises:
        EnvironmentNotAble: that revision is missing here, or there are several and none is pinned.
    """
    cache = datasets_cache()
    parent = cache / name.replace("/", "___")
    entries = [p for p in parent.glob(f"{config or '*'}/*/*") if (p / "dataset_info.json").is_file()]
    if revision is not None:
        pinned = _commit(hub_cache() / f"datasets--{name.replace('/', '--')}", revision) or revision
        entries = [p for p in entries if p.name == pinned]
    if len(entries) == 1:
        return cache, entries[0], entries[0].name
    what = "several versions or configurations are" if entries else "it is not"
    pin = "pin data.revision and data.config" if entries else "load it once on a machine with network"
    raise EnvironmentNotAble(
        f"data.source {name}: {what} in the cache {cache}{' at revision ' + revision if revision else ''}; {pin}, "
        "or give a local file"
    )


MAX_PROBES = 2000
MAX_PROJECT_BYTES = 1 << 30
_TEMPORARY = (tempfile.gettempdir(), "/tmp", "/var/tmp", "/dev/shm", "/run")  # noqa: S108
TEMPORARY_FOLDERS = tuple(dict.fromkeys(map(Path, _TEMPORARY)))
"""Folders that each node usually has for itself."""
_NO_PROJECTS = (Path("/"), *TEMPORARY_FOLDERS)
_PROJECT_MARKERS = (".git", "pyproject.toml", "setup.py", "setup.cfg")


@dataclass(frozen=True)
class RequestedPart:
    """A part that a spec requests, before its files are listed. ``path`` is None for files in the hub's cache."""

    name: str
    path: Path | None
    find: Callable[[], list[PartFiles]]


def part_files(spec: RunSpec, *, packages: bool = True, without: Collection[str] = ()) -> list[PartFiles]:
    """Return every part that nodes need for a spec, except those in ``without``; ``packages=False`` omits the Python
    packages.

    Raises:
        SpecError, DataError: the script, the model folder or the data file does not exist.
        EnvironmentNotAble: a model or data set of the hub is not in this machine's cache.
    """
    sources = [package_source()]
    if packages and brings_packages(spec.cluster.python):
        sources.append(environment_source(Path(sysconfig.get_paths()["purelib"]), Path(sys.prefix)))
    return sources + [source for part in requested_parts(spec) if part.name not in without for source in part.find()]


def requested_parts(spec: RunSpec) -> list[RequestedPart]:
    """Return code, model and data that a spec names, without looking for the files."""
    parts: list[RequestedPart] = []
    if spec.script is not None:
        file, script = program_file(spec.script), spec.script
        if file is not None:
            parts.append(RequestedPart("project", file, lambda: [_program(script, file)]))
    if spec.model is not None and not spec.model.name.startswith(("tiny:", "mlp:")):
        name, revision = spec.model.name, spec.model.revision
        folder = Path(name).expanduser()
        parts.append(RequestedPart("model", folder if folder.is_dir() else None, lambda: [_model(name, revision)]))
    if spec.data is None:
        return parts
    mixed = spec.data.sources is not None
    for number, one in enumerate(parts_of(spec.data)):
        tail, prefix = (f"-{number + 1}", f"data.sources.{number}") if mixed else ("", "data")
        parts.append(_data_part(f"data{tail}", f"{prefix}.source", source_of(one), one))
        if one.template.endswith(".jinja") or "/" in one.template:
            template = Path(one.template).expanduser()
            files = partial(_single_file, f"template{tail}", f"{prefix}.template", template)
            parts.append(RequestedPart(f"template{tail}", template, lambda files=files: [files()]))
    if spec.eval.source is not None:
        parts.append(_data_part("eval-data", "eval.source", spec.eval.source, spec.data))
    return parts


def _data_part(part: str, key: str, source: str, data: DataSpec) -> RequestedPart:
    path = _data_root(source) if looks_like_file(source) else None
    return RequestedPart(part, path, partial(_data, part, key, source, data))


def package_source() -> PartFiles:
    """Return the package allranks itself."""
    parent = PACKAGE_FOLDER.parent
    return _tree("allranks", parent, [p.relative_to(parent) for p in walk_files(PACKAGE_FOLDER)])


def _program(script: ScriptSpec, file: Path) -> PartFiles:
    """Return the project of a user's program, with its working directory if that is in the project."""
    workdir = working_directory(script)
    project = project_source(file, workdir if script.module is not None else None)
    override = dict(project.override or {})
    if script.module is not None:
        override.pop("script.path", None)
    if (script.module is not None or script.workdir is not None) and workdir.is_relative_to(project.path):
        override["script.workdir"] = "" if workdir == project.path else str(workdir.relative_to(project.path))
    return replace(project, override=override)


def project_source(script: Path, top: Path | None = None) -> PartFiles:
    """Return the project of a script: the nearest parent folder with .git or pyproject.toml, else the script's own
    folder.

    In a git work tree, ignored files are omitted. A script directly in a home folder or a folder for temporary files,
    which contain unrelated files, is sent alone.

    Args:
        top: the folder that is sent if no folder above the script is marked as a project; default: the script's own.
    """
    script = script.expanduser().absolute()
    if not script.is_file():
        raise SpecError(f"script.path {script}: there is no such file")
    above = [f for f in script.parents if f != Path.home() and f not in Path.home().parents]
    root = next((f for f in above if any((f / mark).exists() for mark in _PROJECT_MARKERS)), top or script.parent)
    if root in _NO_PROJECTS or root == Path.home():
        return _single_file("project", "script.path", script)
    names = _git_names(root) if (root / ".git").exists() else None
    if names is None:
        names = [p.relative_to(root) for p in walk_files(root)]
    if script.relative_to(root) not in names:
        names.append(script.relative_to(root))  # the script itself is always needed, even if git ignores it
    total = sum((root / name).stat().st_size for name in names)
    if total > MAX_PROJECT_BYTES:
        large = sorted(names, key=lambda n: -(root / n).stat().st_size)[:3]
        raise SpecError(
            f"script.path: the project {root} has {total >> 20} MiB (largest: {', '.join(map(str, large))}), too much "
            "to send as code; move data out of it, or list it in .gitignore"
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


def _model(name: str, revision: str | None) -> PartFiles:
    folder = Path(name).expanduser()
    commit = None
    if not folder.is_dir():
        if name.startswith(("/", "./", "../", "~")):
            raise SpecError(f"model.name {name}: there is no such folder")
        folder, commit = cached_model(name, revision)
    if not (folder / "config.json").is_file():
        raise SpecError(f"model.name {name}: {folder} has no config.json")
    names = [p.relative_to(folder) for p in walk_files(folder)]
    tree = _tree("model", folder.absolute(), names, {"model.name": "", "model.revision": None})
    return replace(tree, revision=commit)


def _data(part: str, key: str, source: str, data: DataSpec) -> list[PartFiles]:
    if source.startswith("builtin:"):
        return []
    if looks_like_file(source):
        root, path, files = _data_root(source), Path(source).expanduser(), data_files(source)
        if files == [path]:
            return [_single_file(part, key, path)]
        below = "" if root == path else str(path.relative_to(root))
        return [_tree(part, root.absolute(), [file.relative_to(root) for file in files], {key: below})]
    cache, folder, commit = cached_dataset(source, data.config, data.revision)
    names = [p.relative_to(cache) for p in walk_files(folder)]
    tree = _tree(part, cache, names)
    return [replace(tree, revision=commit)]


def _data_root(source: str) -> Path:
    """Return the file or folder that holds local data; for a pattern, the folder above its first wildcard part."""
    path = Path(source).expanduser()
    if not is_pattern(source):
        return path
    return next(folder for folder in path.parents if not glob.has_magic(str(folder)))


def _single_file(part: str, key: str, path: Path) -> PartFiles:
    if not path.is_file():
        raise DataError(f"{key} {path}: there is no such file")
    path = path.absolute()
    return PartFiles(name=part, path=path, files=((path.name, path),), probe=("",), override={key: path.name})


def _tree(part: str, root: Path, names: list[Path], override: dict[str, str | None] | None = None) -> PartFiles:
    texts = sorted(str(name) for name in names)
    step = max(1, -(-len(texts) // MAX_PROBES))
    files = tuple((text, root / text) for text in texts)
    return PartFiles(name=part, path=root, files=files, probe=tuple(texts[::step]), override=override)
