"""Find trace files, report unreadable ones, and assign each file to a run, a window and a rank."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from msgspec import Struct

from allranks.analysis.trace.chrome_trace import distributed_info, parse_rank, read_metadata
from allranks.analysis.trace.records import Problem
from allranks.errors import RequestError
from allranks.rundir.paths import is_run

SUFFIXES = (".json", ".json.gz")
OWN_OUTPUT = ("merged.json.gz", "comparison.json")
MAX_SHOWN_PROBLEMS = 3


def find_trace_files(path: Path) -> tuple[list[Path], list[Problem]]:
    """Return the file, or the files in a folder by name, and problems.

    Raises:
        RequestError: there are no files.
    """
    wanted = "give a trace (.json, .json.gz), a folder of traces, or a run folder"
    try:
        mode = path.stat().st_mode
    except OSError as error:
        raise RequestError(f"{path} cannot be read: {error.strerror}; {wanted}") from error
    if stat.S_ISREG(mode):
        return [path], []
    if not stat.S_ISDIR(mode):
        raise RequestError(f"{path} is neither a file nor a folder; {wanted}")
    problems: list[Problem] = []

    def report(error: OSError) -> None:
        problems.append(Problem("error", "unreadable", f"cannot be read: {error.strerror}", str(error.filename)))

    roots = [path]
    if is_run(path):
        roots = [f for f in (path / "traces", *sorted((path / "compare").glob("*/traces"))) if f.exists()]
    files = []
    for root in roots:
        paths = [Path(folder, name) for folder, _, names in os.walk(root, onerror=report) for name in names]
        for file in sorted(f for f in paths if f.name.endswith(SUFFIXES) and f.name not in OWN_OUTPUT):
            if any(part.startswith(".") for part in file.relative_to(path).parts):
                continue
            try:
                if stat.S_ISREG(file.stat().st_mode):
                    files.append(file)
            except OSError as error:
                report(error)
    if problems and not files:
        details = "; ".join(f"{p.file} {p.message}" for p in problems[:MAX_SHOWN_PROBLEMS])
        raise RequestError(f"no trace under {path} can be read: {details}")
    if not files:
        raise RequestError(
            f"{path} has no traces (.json or .json.gz); a run writes them if its spec has observe.profile (for example "
            "{wait: 10, active: 3})"
        )
    return files, problems


_RANK = re.compile(r"rank[_.-]?(\d+)", re.IGNORECASE)
_RANK_FOLDER = re.compile(r"^(?:rank|r)[_.-]?(\d+)$", re.IGNORECASE)
_ATTEMPT = re.compile(r"^attempt-(\d{1,18})$")
_DIGITS = re.compile(r"\d+")
# torch's tensorboard_trace_handler: <worker>.<nanoseconds>.pt.trace.json
_HANDLER = re.compile(r"\.(\d{10,20})\.pt\.trace$")
LAST_ATTEMPT = 1 << 62  # traces outside of a folder attempt-N are newer than those in one


class TraceFile(Struct):
    """One file that may be a trace."""

    path: Path
    run: Path  # the folder of its run
    stem: str  # the common part of the names of a run's files
    window: tuple[int, ...]  # order of the windows of a rank, from names
    rank: int | None
    world: int | None
    rank_in_trace: bool  # not from the name


class TraceSet(Struct):
    """The files of one run and window, by rank."""

    name: str
    path: Path
    window: str | None
    files: dict[int, Path]
    world: int | None
    problems: list[Problem]


def find_trace_sets(paths: Sequence[Path], select: Literal["latest", "all"]) -> tuple[list[TraceSet], list[Problem]]:
    """Return the runs and windows under `paths`, oldest first, and problems.

    Raises:
        RequestError: a path does not exist or has no such file.
    """
    folders: dict[Path, list[TraceFile]] = {}
    problems: list[Problem] = []
    for path in paths:
        under, unreadable = find_trace_files(path)
        problems += unreadable
        for file in under:
            trace = _describe(file, path)
            folders.setdefault(trace.run, []).append(trace)
    return [one for files in folders.values() for run in _runs(files) for one in _windows(run, select)], problems


def _describe(file: Path, given: Path) -> TraceFile:
    info = distributed_info(read_metadata(file))
    own = parse_rank(info.get("rank"))
    stem = file.name.removesuffix(".gz").removesuffix(".json")
    named, attempt = _named_rank(_RANK, stem), LAST_ATTEMPT
    folder = file.parent
    while (rank_folder := _RANK_FOLDER.match(folder.name)) or _ATTEMPT.match(folder.name):
        if rank_folder and named is None:
            named = _named_rank(_RANK_FOLDER, folder.name)
        if folder in (given, folder.parent):
            break
        if earlier := _ATTEMPT.match(folder.name):
            attempt = int(earlier.group(1))
        folder = folder.parent
    handler = _HANDLER.search(stem)
    numbers = [handler.group(1)] if handler else _DIGITS.findall(_RANK.sub("", stem))
    return TraceFile(
        path=file,
        run=folder,
        stem="" if handler else _DIGITS.sub("#", _RANK.sub("rank", stem)),
        window=(attempt, *map(int, numbers)),
        rank=own if own is not None else named,
        world=parse_rank(info.get("world_size")) or None,
        rank_in_trace=own is not None,
    )


def _named_rank(pattern: re.Pattern[str], name: str) -> int | None:
    match = pattern.search(name)
    return parse_rank(match.group(1)) if match else None


def _runs(files: list[TraceFile]) -> list[list[TraceFile]]:
    """Return a folder's files by run: one if all are ranks of one world, else by names without numbers."""
    worlds = {f.world for f in files}
    if (
        len(worlds) == 1
        and worlds.isdisjoint({None, 1})
        and len({f.rank for f in files if f.rank_in_trace}) == len(files)
    ):
        return [files]
    groups: dict[str, list[TraceFile]] = {}
    for file in files:
        groups.setdefault(file.stem, []).append(file)
    return list(groups.values())


def _windows(group: list[TraceFile], select: Literal["latest", "all"]) -> list[TraceSet]:
    problems = _number_ranks(group)
    by_rank: dict[int, list[TraceFile]] = {}
    for file in sorted(group, key=lambda f: f.window):
        assert file.rank is not None
        by_rank.setdefault(file.rank, []).append(file)
    depth = max(len(files) for files in by_rank.values())
    run = group[0].run.resolve()
    name = run.parent.name if run.name == "traces" else run.name  # the folder of traces in a run folder
    if len(group) == 1:
        name = group[0].path.name
    if select == "latest" and depth > 1:
        text = f"{depth} windows were found; the newest of each rank is shown (--select all shows all)"
        problems.append(Problem("note", "windows", text))
    out = []
    for at in [depth - 1] if select == "latest" else range(depth):
        files = {r: f[at - depth].path for r, f in sorted(by_rank.items()) if len(f) >= depth - at}
        window = None if depth == 1 else f"{at + 1} of {depth}"
        world = max((f.world for f in group if f.world is not None), default=None)
        out.append(TraceSet(name, group[0].run, window, files, world, list(problems)))
    return out


def _number_ranks(group: list[TraceFile]) -> list[Problem]:
    """Number the files without a rank; return the problems."""
    problems = []
    free = iter(n for n in range(len(group) * 2 + 1) if n not in {f.rank for f in group})
    for f in group:
        if f.rank is None:
            f.rank = next(free)
            text = f"has no rank, neither in the file nor in its name; it is shown as rank {f.rank}"
            problems.append(Problem("warning" if len(group) > 1 else "note", "no_rank", text, str(f.path), f.rank))
    return problems
