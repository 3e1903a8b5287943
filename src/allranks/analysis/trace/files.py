"""Find trace files, report unreadable ones, and assign each file to a run, a window and a rank."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

from msgspec import Struct

from allranks.analysis.trace.chrome_trace import distributed_info, parse_rank, parse_world_size, read_metadata
from allranks.analysis.trace.records import Problem
from allranks.errors import RequestError
from allranks.rundir.paths import is_run

SUFFIXES = (".json", ".json.gz")
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
        raise RequestError(f"{path} cannot be read: {_reason(path, error)}; {wanted}") from error
    if stat.S_ISREG(mode):
        return [path], []
    if not stat.S_ISDIR(mode):
        raise RequestError(f"{path} is neither a file nor a folder; {wanted}")
    own = is_run(path)
    problems: list[Problem] = []

    def report(error: OSError) -> None:
        if (
            not isinstance(error, FileNotFoundError) or Path(error.filename).name != "traces"
        ):  # a run may have no such folder
            file = Path(error.filename)
            text = f"cannot be read: {_reason(file, error)}"
            problems.append(Problem(severity="error", kind="unreadable", message=text, file=str(file)))

    files = []
    for root in [path / "traces", *sorted((path / "compare").glob("*/traces"))] if own else [path]:
        found = [Path(folder, name) for folder, _, names in os.walk(root, onerror=report) for name in names]
        for file in sorted(f for f in found if f.name.endswith(SUFFIXES)):
            if _hidden(file.relative_to(path)) or _is_own_output(file):
                continue
            try:
                if stat.S_ISREG(file.stat().st_mode):
                    files.append(file)
            except OSError as error:
                report(error)
    if not files:
        raise RequestError(_no_traces_message(path, own, problems))
    return files, problems


def _reason(path: Path, error: OSError) -> str:
    is_link = os.path.islink(path)  # noqa: PTH114 - the method raises where the folder may not be entered
    return f"{error.strerror}{' (it is a broken link)' if is_link else ''}"


def _no_traces_message(path: Path, is_run: bool, problems: list[Problem]) -> str:
    if problems:
        told = "; ".join(f"{p.file} {p.message}" for p in problems[:MAX_SHOWN_PROBLEMS])
        return f"no trace under {path} can be read: {told}"
    if is_run:
        return (
            f"the run {path} has no traces: set observe.profile in its spec (for example {{wait: 10, active: 3}}) and "
            "run again"
        )
    return f"{path} has no traces (.json or .json.gz); a run writes traces if its spec has observe.profile"


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _is_own_output(path: Path) -> bool:
    """Return whether an earlier analysis wrote the file."""
    return path.parent.name == "analysis" or path.name.startswith(("summary.", "merged"))


_RANK = re.compile(r"rank[_.-]?(\d+)", re.IGNORECASE)
_RANK_FOLDER = re.compile(r"^(?:rank|r)[_.-]?(\d+)$", re.IGNORECASE)
_ATTEMPT = re.compile(r"^attempt-(\d{1,18})$")
_DIGITS = re.compile(r"\d+")
# torch's tensorboard_trace_handler: <worker>.<nanoseconds>.pt.trace.json
_HANDLER = re.compile(r"\.(\d{10,20})\.pt\.trace$")
SAME_START_US = 1000.0


class TraceFile(Struct):
    """One file that may be a trace."""

    path: Path
    run: Path  # the folder of its run
    stem: str  # the common part of the names of a run's files
    window: tuple[int, ...]  # order of the windows of a rank, from names
    rank: int | None
    world: int | None
    start_us: float | None
    told: bool  # the rank is from the trace, not from the name


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
    files: dict[tuple[Path, str], list[TraceFile]] = {}
    problems: list[Problem] = []
    for path in paths:
        under, told = find_trace_files(path)
        problems += told
        for file in under:
            found = _describe(file, path)
            files.setdefault((found.run, found.stem), []).append(found)
    out: list[TraceSet] = []
    for group in _joined(list(files.values())):
        out += _windows(group, select)
    return out, problems


def _describe(file: Path, given: Path) -> TraceFile:
    head, start = read_metadata(file)
    info = distributed_info(head)
    own = parse_rank(info.get("rank"))
    base = head.base_ns if isinstance(head.base_ns, int) and abs(head.base_ns) < 1 << 63 else 0
    folder, attempt, in_folder = file.parent, None, None
    while folder not in (given, folder.parent):
        if _RANK_FOLDER.match(folder.name) and in_folder is None:
            in_folder = _named_rank(_RANK_FOLDER, folder.name)
        elif earlier := _ATTEMPT.match(folder.name):
            attempt = int(earlier.group(1))
        else:
            break
        folder = folder.parent
    if in_folder is None and _RANK_FOLDER.match(folder.name) and folder == given:
        in_folder = _named_rank(_RANK_FOLDER, folder.name)
    stem = file.name.removesuffix(".gz").removesuffix(".json")
    named = _named_rank(_RANK, stem)
    handler = _HANDLER.search(stem)
    window = (
        attempt if attempt is not None else 1 << 30,
        *((int(handler.group(1)),) if handler else _numbers(_RANK.sub("", stem))),
    )
    common = "" if handler else _DIGITS.sub("#", _RANK.sub("rank", stem))
    by_name = named if named is not None else in_folder
    return TraceFile(
        path=file,
        run=folder,
        stem=common,
        window=window,
        rank=own if own is not None else by_name,
        world=parse_world_size(info.get("world_size")),
        start_us=base / 1000 + start if start is not None else None,
        told=own is not None,
    )


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(n[:4000]) for n in _DIGITS.findall(text)[:8])


def _joined(groups: list[list[TraceFile]]) -> list[list[TraceFile]]:
    """Join files of one folder with unrelated names into one run if their metadata says so: other ranks of the same
    world."""
    out: list[list[TraceFile]] = []
    for group in groups:
        worlds, ranks = {f.world for f in group}, {f.rank for f in group}
        for other in out:
            same = (
                other[0].run == group[0].run
                and worlds == {f.world for f in other}
                and None not in worlds
                and len(worlds) == 1
            )
            if same and all(f.told for f in [*group, *other]) and not ranks & {f.rank for f in other} and worlds != {1}:
                other.extend(group)
                break
        else:
            out.append(list(group))
    return out


def _windows(group: list[TraceFile], select: Literal["latest", "all"]) -> list[TraceSet]:
    problems: list[Problem] = []
    _assign_ranks(group, problems)
    by_rank: dict[int, list[TraceFile]] = {}
    for file in group:
        assert file.rank is not None
        by_rank.setdefault(file.rank, []).append(file)
    for rank, files in by_rank.items():
        files.sort(key=lambda f: (f.window[0], f.start_us if f.start_us is not None else 0.0, f.window))
        by_rank[rank] = _without_duplicates(rank, files, problems)
    depth = max(len(files) for files in by_rank.values())
    run = group[0].run.resolve()
    name = run.parent.name if run.name == "traces" else run.name  # the folder of traces in a run folder
    if len(group) == 1:
        name = group[0].path.name
    chosen = [depth - 1] if select == "latest" else range(depth)
    out = []
    for at in chosen:
        files = {r: f[at - depth].path for r, f in sorted(by_rank.items()) if len(f) >= depth - at}
        window = None if depth == 1 else f"{at + 1} of {depth}"
        worlds = [f.world for f in group if f.world is not None]
        out.append(TraceSet(name, group[0].run, window, files, max(worlds, default=None), list(problems)))
    if select == "latest" and depth > 1:
        text = f"{depth} windows were found; the newest of each rank is shown (--select all shows all)"
        out[0].problems.append(Problem(severity="note", kind="windows", message=text))
    return out


def _assign_ranks(group: list[TraceFile], problems: list[Problem]) -> None:
    """Assign a rank to every file. If all traces claim one rank, names that differ take precedence."""
    named = {f.path: _name_rank(f.path) for f in group}
    claimed = {f.rank for f in group}
    distinct = {n for n in named.values() if n is not None}
    if len(group) > 1 and len(claimed) == 1 and len(distinct) == len(group):
        text = (
            f"all {len(group)} traces claim to be rank {next(iter(claimed))}; the ranks are taken from the file names"
        )
        if next(iter(claimed)) is not None:
            problems.append(Problem(severity="warning", kind="rank_from_name", message=text))
        for f in group:
            f.rank = named[f.path]
    free = iter(n for n in range(len(group) * 2 + 1) if n not in {f.rank for f in group})
    for f in group:
        if f.rank is None:
            f.rank = next(free)
            text = f"has no rank, neither in the file nor in its name; it is shown as rank {f.rank}"
            problems.append(
                Problem(
                    severity="warning" if len(group) > 1 else "note",
                    kind="no_rank",
                    message=text,
                    file=str(f.path),
                    rank=f.rank,
                )
            )


def _name_rank(path: Path) -> int | None:
    named = _named_rank(_RANK, path.name)
    return named if named is not None else _named_rank(_RANK_FOLDER, path.parent.name)


def _named_rank(pattern: re.Pattern[str], name: str) -> int | None:
    found = pattern.search(name)
    return parse_rank(found.group(1)) if found else None


def _without_duplicates(rank: int, files: Iterable[TraceFile], problems: list[Problem]) -> list[TraceFile]:
    """Drop duplicates: two files of a rank that start at the same time are the same window."""
    kept: list[TraceFile] = []
    for file in files:
        last = kept[-1] if kept else None
        if (
            last
            and last.start_us is not None
            and file.start_us is not None
            and abs(file.start_us - last.start_us) < SAME_START_US
        ):
            other = last.path.name if last.path.name != file.path.name else last.path
            text = f"is a second trace of rank {rank} with the same start time as {other}; it is skipped"
            problems.append(
                Problem(severity="warning", kind="duplicate_rank", message=text, file=str(file.path), rank=rank)
            )
            continue
        kept.append(file)
    return kept
