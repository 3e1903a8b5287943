"""Finds the files that may be traces under a path, and says what cannot be looked at."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from allranks.errors import RequestError
from allranks.rundir import is_run
from allranks.trace.records import Problem

SUFFIXES = (".json", ".json.gz")
SHOWN = 3


def find_files(path: Path) -> tuple[list[Path], list[Problem]]:
    """The file, or the files in a folder, by name; and what could not be looked at. Raises `RequestError` if there are no files."""
    if not _is_folder(path):
        return [path], []
    own = is_run(path)
    roots = [path / "traces", *sorted((path / "compare").glob("*/traces"))] if own else [path]
    problems: list[Problem] = []
    named = [p for root in roots for p in _walk(root, problems)]
    found = [p for p in named if not _hidden(p.relative_to(path)) and not _is_own_output(p)]
    files = [p for p in found if _is_there(p, problems)]
    if not files:
        raise RequestError(_nothing(path, own, problems))
    return files, problems


def _is_folder(path: Path) -> bool:
    """Raises `RequestError` where there is neither a folder nor a file."""
    try:
        path.stat()
    except OSError as error:
        if _is_link(path):
            raise RequestError(f"{path} is a link that leads to no file: {error.strerror}") from error
        if isinstance(error, FileNotFoundError):
            text = f"{path} does not exist; give a trace (.json, .json.gz), a folder of traces, or a run folder"
            raise RequestError(text) from error
        raise RequestError(f"{path} cannot be read: {error.strerror}") from error
    if not path.is_dir() and not path.is_file():
        raise RequestError(f"{path} is neither a file nor a folder; give a trace, a folder of traces, or a run folder")
    return path.is_dir()


def _walk(root: Path, problems: list[Problem]) -> Iterator[Path]:
    def tell(error: OSError) -> None:
        if isinstance(error, FileNotFoundError):  # a run without traces has no such folder
            return
        text = f"is a folder that cannot be read: {error.strerror}; what it holds is left out"
        problems.append(Problem(severity="error", kind="unreadable", message=text, file=str(error.filename)))

    found = []
    for folder, _, names in os.walk(root, onerror=tell):
        found += [Path(folder, name) for name in names if name.endswith(SUFFIXES)]
    return iter(sorted(found))


def _is_there(path: Path, problems: list[Problem]) -> bool:
    """Whether it is a file; a link to nothing is told."""
    try:
        path.stat()
    except OSError as error:
        text = f"cannot be read: {error.strerror}" + (" (it is a link)" if _is_link(path) else "")
        problems.append(Problem(severity="error", kind="unreadable", message=text, file=str(path)))
        return False
    return path.is_file()


def _is_link(path: Path) -> bool:
    return os.path.islink(path)  # noqa: PTH114 - the method raises where the folder may not be entered


def _nothing(path: Path, is_run: bool, problems: list[Problem]) -> str:
    if problems:
        told = "; ".join(f"{p.file} {p.message}" for p in problems[:SHOWN])
        return f"no trace under {path} can be read: {told}"
    if is_run:
        return f"the run {path} has no traces: set observe.profile in its spec (for example {{wait: 10, active: 3}}) and run again"
    return f"{path} holds no traces (.json or .json.gz); a run writes them if its spec has observe.profile"


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _is_own_output(path: Path) -> bool:
    """What an earlier analysis wrote beside the traces."""
    return path.parent.name == "analysis" or path.name.startswith(("summary.", "merged"))
