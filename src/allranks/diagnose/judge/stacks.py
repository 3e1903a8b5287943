"""Stack dumps of several ranks (py-spy, faulthandler): who stands outside of the collective in which the others wait."""

from __future__ import annotations

import re
from pathlib import PurePath

from msgspec import Struct

from allranks.diagnose.judge.case import Case
from allranks.diagnose.signals import Signal, Stack

DEEP = 14  # frames from the innermost that tell what a thread is doing
_COLLECTIVE = re.compile(
    r"distributed/(distributed_c10d|c10d|nn/functional|_functional_collectives|utils|algorithms)|:(barrier|all_?reduce|all_?gather\w*|reduce_scatter\w*|broadcast\w*|"
    r"all_to_all\w*|_allgather_base|gather_object|monitored_barrier|wait_tensor|synchronize|gather|scatter)$|c10d_logger",
)
_CHECKPOINT = re.compile(
    r"checkpoint|:(save\w*|state_dict|load_state_dict|_save_\w+|torch_save|write\w*)$|serialization\.py|safetensors",
    re.IGNORECASE,
)
_DATA = re.compile(
    r"utils/data/|/data/|data_?loader|:(_next_data|_try_get_data|_get_data|__next__)$|multiprocessing/(queues|connection|pool)|:?queue\.py",
    re.IGNORECASE,
)
_IDLE = re.compile(
    r"_pin_memory_loop|tqdm/_monitor|_monitor\.py|concurrent/futures|_watchdog|heartbeat|prefetch", re.IGNORECASE
)


class Standing(Struct, frozen=True):
    """What one process is doing: collective, checkpoint, data or other, by its main thread."""

    doing: str
    rank: int | None
    host: str | None
    where: str
    signal: Signal


def decide(case: Case) -> None:
    """Names the rank that fell out, where most ranks wait in a collective and one does not."""
    standing = [s for scan in case.scans for s in _of_file(case, scan.file, scan.stacks)]
    waiting = [s for s in standing if s.doing == "collective"]
    others = [s for s in standing if s.doing != "collective"]
    if not waiting or len(others) > max(1, len(waiting)):
        if standing and all(s.doing == "checkpoint" for s in standing):
            case.propose("checkpoint_collective", 0.7, [s.signal for s in standing[:4]])
        return
    if not others:
        places = {s.where for s in waiting}
        if len(places) > 1:
            found = case.propose("collective_mismatch", 0.7, [s.signal for s in waiting[:4]])
            found.cause = (
                "All ranks wait in collectives, but not in the same: "
                + "; ".join(f"{_name(s)} in {s.where}" for s in waiting[:4])
                + "."
            )
        else:
            case.propose("collective_hang", 0.62, [s.signal for s in waiting[:4]])
        return
    out = others[0]
    kind = {"data": "dataloader_hang", "checkpoint": "checkpoint_collective"}.get(out.doing, "collective_mismatch")
    found = case.propose(kind, 0.88, [o.signal for o in others[:3]] + [w.signal for w in waiting[:2]])
    found.rank, found.host = out.rank, out.host
    found.cause = (
        f"{len(waiting)} of {len(standing)} processes wait in a collective, {_name(out)} stands in {out.where} instead."
    )


def _name(standing: Standing) -> str:
    return (
        f"rank {standing.rank}"
        if standing.rank is not None
        else f"the process in {PurePath(standing.signal.groups['file']).name}"
    )


def _of_file(case: Case, file: int, stacks: list[Stack]) -> list[Standing]:
    """One process a file, or one for each main thread where a file holds several dumps."""
    main = [s for s in stacks if s.frames and "MainThread" in s.head]
    if not main:
        whole = [s for s in stacks if any(f.endswith(":<module>") for f in s.frames)]
        main = whole or sorted((s for s in stacks if s.frames), key=lambda s: -len(s.frames))[:1]
    return [_standing(case, file, stack) for stack in main]


def _standing(case: Case, file: int, stack: Stack) -> Standing:
    near = [f for f in stack.frames if not _IDLE.search(f)][:DEEP]
    doing = "other"
    for name, pattern in (("data", _DATA), ("checkpoint", _CHECKPOINT), ("collective", _COLLECTIVE)):
        if any(pattern.search(f) for f in near):
            doing = name
    if (
        doing == "collective"
        and any(_CHECKPOINT.search(f) for f in near)
        and not any(_COLLECTIVE.search(f) for f in near[:6])
    ):
        doing = "checkpoint"
    own = next(
        (
            f
            for f in near
            if ("site-packages" not in f and "lib/python" not in f and "/" in f) or f.endswith((":main", ":train"))
        ),
        near[0],
    )
    scan = case.scans[file]
    rank = stack.rank if stack.rank is not None else case.file_rank(file)
    host = (
        stack.host
        or (scan.hosts[0] if len(scan.hosts) == 1 else None)
        or (case.rank_hosts.get(rank) if rank is not None else None)
    )
    signal = Signal(
        kind="fact", owner="stack_head", rule=-1, weight=0.6, passing=False, file=file, line=stack.line, time=None, rank=rank, local=None,
        task=None, host=host, text=f"{stack.head.strip()} {near[0]} ... {own}", groups={"file": case.names[file]},
    )  # fmt: skip
    return Standing(doing, rank, host, own.replace(":", ", "), signal)
