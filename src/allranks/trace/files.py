"""Which files are traces, which run, window and rank each belongs to."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

from msgspec import Struct

from allranks.trace.claims import rank_count, rank_number
from allranks.trace.decode import distributed_info, read_head
from allranks.trace.find import find_files
from allranks.trace.records import Problem

_RANK = re.compile(r"rank[_.-]?(\d+)", re.IGNORECASE)
_RANK_FOLDER = re.compile(r"^(?:rank|r)[_.-]?(\d+)$", re.IGNORECASE)
_ATTEMPT = re.compile(r"^attempt-(\d{1,18})$")
_DIGITS = re.compile(r"\d+")
_HANDLER = re.compile(
    r"\.(\d{10,20})\.pt\.trace$"
)  # torch's tensorboard_trace_handler: <worker>.<nanoseconds>.pt.trace.json
SAME_START_US = 1000.0


class TraceFile(Struct):
    """One file that may be a trace."""

    path: Path
    run: Path  # the folder that stands for its run
    stem: str  # what all files of a run have in common in their names
    window: tuple[int, ...]  # orders the windows of a rank; from names
    rank: int | None
    world: int | None
    start_us: float | None
    told: bool  # the rank is the trace's own word, not the name's


class TraceSet(Struct):
    """The files of one run and window, by rank."""

    name: str
    path: Path
    window: str | None
    files: dict[int, Path]
    world: int | None
    problems: list[Problem]


def find_sets(paths: Sequence[Path], select: Literal["latest", "all"]) -> tuple[list[TraceSet], list[Problem]]:
    """The runs and windows under `paths`, oldest first, and what could not be looked at.

    Raises `RequestError` where a path is not there or holds no such file.
    """
    files: dict[tuple[Path, str], list[TraceFile]] = {}
    problems: list[Problem] = []
    for path in paths:
        under, told = find_files(path)
        problems += told
        for file in under:
            found = _describe(file, path)
            files.setdefault((found.run, found.stem), []).append(found)
    out: list[TraceSet] = []
    for group in _joined(list(files.values())):
        out += _windows(group, select)
    return out, problems


def _describe(file: Path, given: Path) -> TraceFile:
    head, start = read_head(file)
    info = distributed_info(head)
    own = rank_number(info.get("rank"))
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
        world=rank_count(info.get("world_size")),
        start_us=base / 1000 + start if start is not None else None,
        told=own is not None,
    )


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(n[:4000]) for n in _DIGITS.findall(text)[:8])


def _joined(groups: list[list[TraceFile]]) -> list[list[TraceFile]]:
    """Files of one folder whose names have nothing in common are one run still if they say so: other ranks of the same world."""
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
    _settle_ranks(group, problems)
    by_rank: dict[int, list[TraceFile]] = {}
    for file in group:
        assert file.rank is not None
        by_rank.setdefault(file.rank, []).append(file)
    for rank, files in by_rank.items():
        files.sort(key=lambda f: (f.window[0], f.start_us if f.start_us is not None else 0.0, f.window))
        by_rank[rank] = _without_doubles(rank, files, problems)
    depth = max(len(files) for files in by_rank.values())
    run = group[0].run.resolve()
    name = run.parent.name if run.name == "traces" else run.name  # a run folder keeps them there
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
        text = f"{depth} windows were found; the newest of each rank is shown (--select all shows each)"
        out[0].problems.append(Problem(severity="note", kind="windows", message=text))
    return out


def _settle_ranks(group: list[TraceFile], problems: list[Problem]) -> None:
    """Every file gets a rank. Traces that all claim one rank are believed less than names that tell them apart."""
    named = {f.path: _name_rank(f.path) for f in group}
    claimed = {f.rank for f in group}
    distinct = {n for n in named.values() if n is not None}
    if len(group) > 1 and len(claimed) == 1 and len(distinct) == len(group):
        text = f"all {len(group)} traces say that they are rank {next(iter(claimed))}; their ranks are taken from their names"
        if next(iter(claimed)) is not None:
            problems.append(Problem(severity="warning", kind="rank_from_name", message=text))
        for f in group:
            f.rank = named[f.path]
    free = iter(n for n in range(len(group) * 2 + 1) if n not in {f.rank for f in group})
    for f in group:
        if f.rank is None:
            f.rank = next(free)
            text = f"tells no rank, and neither does its name; it is called rank {f.rank} here"
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
    return rank_number(found.group(1)) if found else None


def _without_doubles(rank: int, files: Iterable[TraceFile], problems: list[Problem]) -> list[TraceFile]:
    """Two files of a rank that begin at the same moment are the same window twice."""
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
            text = f"is a second trace of rank {rank} of the same moment as {other}; it is left out"
            problems.append(
                Problem(severity="warning", kind="duplicate_rank", message=text, file=str(file.path), rank=rank)
            )
            continue
        kept.append(file)
    return kept
