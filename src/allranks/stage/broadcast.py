"""Staging in a running job: ask every node what it lacks, send that and nothing else, check it there, remove it after.

    with staged(bundle, Allocation.current()) as manifest:
        manifest.save(run.stage)
        ...                             # start each node's agent with manifest.of(node)

sbcast of Slurm before 24.11 knows no node list, but it sends to the nodes of one step if that is named: so a small step
is started on the nodes that lack something, makes the folder, and waits while ``sbcast --jobid=JOB.STEP`` writes there.
Where sbcast is not able, the same step takes the archives through srun's standard input.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from allranks.errors import AllranksError, EnvironmentNotAble, RunFailed
from allranks.stage import node
from allranks.stage.bundle import Bundle, Interpreter, Part, identity_of, interpreter, probe_of
from allranks.stage.manifest import NodeStage, StageManifest, node_stage
from allranks.stage.source import Source
from allranks.stage.steps import Allocation, Step, command

ANSWER_S = 180.0
SLOWEST_BYTES_PER_S = 5e6
Log = Callable[[str], None]
Answers = dict[str, dict[str, Any]]


@contextmanager
def staged(
    bundle: Bundle,
    allocation: Allocation,
    *,
    always: bool = False,
    method: str = "auto",
    log: Log = lambda _: None,
) -> Iterator[StageManifest]:
    """What each node of the job shall use, while the context lasts; what was staged is removed at its end.

    Args:
        always: stage every part on every node, whatever it sees (``cluster.stage: always``).
        method: ``sbcast``, ``stream`` (through srun), or ``auto``: sbcast, and stream where it fails.

    Raises:
        RunFailed: a node did not answer, a part arrived damaged, or there is no room for it.
        EnvironmentNotAble: a node lacks the packages, and the interpreter to run staged ones too.
    """
    began = time.monotonic()
    touched = allocation.nodes
    try:
        answers = ask(bundle, allocation, always=always)
        lacking = {name: answer for name, answer in answers.items() if answer["lacks"]}
        touched = tuple(lacking)
        _check_interpreters(bundle, lacking)
        sent, used = 0, set()
        for names, parts in _groups(bundle, lacking):
            log(f"staging {', '.join(part.name for part in parts)} on {', '.join(names)}")
            count, how = _send(bundle, allocation, {name: lacking[name] for name in names}, parts, method, log)
            sent += count
            used.add(how)
        yield StageManifest(
            job=allocation.folder,
            bundle=bundle.key,
            interpreter=bundle.python.executable,
            method="+".join(sorted(used)) or "none",
            bytes_sent=sent,
            seconds=time.monotonic() - began,
            nodes=[_node(bundle, name, answers[name]) for name in allocation.nodes],
        )
    finally:
        if touched:
            _remove(bundle, allocation, touched, log)


def ask(bundle: Bundle, allocation: Allocation, *, always: bool = False) -> Answers:
    """Which parts each node lacks, by one step over all of them."""
    request = {
        "verb": "ask",
        "always": always,
        "job": allocation.folder,
        "live": _live_jobs(allocation),
        "python": msgspec.to_builtins(bundle.python),
        "parts": [probe_of(part) for part in bundle.parts],
    }
    with Step(allocation, allocation.nodes, _pythons(bundle.python), request) as step:
        return step.answers(ANSWER_S)


def lacking(found: Sequence[Source], allocation: Allocation) -> set[str]:
    """Names of the parts that some node lacks, before any of them is packed; nothing is written anywhere."""
    python = interpreter()
    parts = [
        {"name": s.name, "path": str(s.path), "probe": list(s.probe), "identity": identity_of(s), "sha256": ""}
        for s in found
    ]
    asked = {"verb": "ask", "only_look": True, "always": False, "python": msgspec.to_builtins(python), "parts": parts}
    with Step(allocation, allocation.nodes, _pythons(python), asked) as step:
        return {name for answer in step.answers(ANSWER_S).values() for name in answer["lacks"]}


def _live_jobs(allocation: Allocation) -> list[str] | None:
    """This user's jobs that are not over; None if Slurm does not say: then nothing old is swept."""
    try:
        return command([*allocation.prefix, "squeue", "--me", "--noheader", "--format=%A"], timeout_s=60).split()
    except AllranksError:
        return None


def _pythons(python: Interpreter) -> list[str]:
    return list(dict.fromkeys([python.executable, *python.candidates]))


def _check_interpreters(bundle: Bundle, lacking: Answers) -> None:
    none = sorted(name for name, answer in lacking.items() if "env" in answer["lacks"] and not answer["python"])
    if none:
        raise EnvironmentNotAble(
            f"{', '.join(none)}: the packages are not there, and no Python {bundle.python.version} ({bundle.python.soabi}) to run staged ones "
            f"(looked for: {', '.join(bundle.python.candidates)}); load one with cluster.modules or cluster.setup, or exclude the node"
        )


def _groups(bundle: Bundle, lacking: Answers) -> Iterator[tuple[list[str], list[Part]]]:
    """Nodes that lack the same parts in the same folder."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for name, answer in sorted(lacking.items()):
        missing = sorted(set(answer["lacks"]) - set(answer["here"]))  # the batch host may have helped itself
        if missing:
            groups.setdefault((answer["folder"], *missing), []).append(name)
    for (_, *parts), names in groups.items():
        yield names, [part for part in bundle.parts if part.name in parts]


def _send(
    bundle: Bundle, allocation: Allocation, group: Answers, parts: list[Part], method: str, log: Log
) -> tuple[int, str]:
    """Give a group of nodes its parts; nodes that share the folder are served once."""
    folder = next(iter(group.values()))["folder"]
    total = sum(part.bytes for part in parts)
    limit = ANSWER_S + total / SLOWEST_BYTES_PER_S
    request = {
        "verb": "receive",
        "folder": folder,
        "interpreters": {name: answer.get("python") for name, answer in group.items()},
        "parts": [{"name": p.name, "sha256": p.sha256, "unpacked_bytes": p.unpacked_bytes} for p in parts],
    }
    with Step(allocation, list(group), _pythons(bundle.python), request) as step:
        ready = step.answers(ANSWER_S)
        first = {name: min(set(answer["sees"]) & set(group)) for name, answer in ready.items()}
        if all(name == one for name, one in first.items()):
            need = total + sum(part.unpacked_bytes for part in parts)
            _check_room(ready, folder, need)
            how = _transfer(allocation, step, next(iter(ready.values()))["step"], folder, parts, method, limit, log)
            step.order(do="unpack")
            step.answers(limit)
            return total * len(group), how
    log(f"{folder} is shared by several nodes: {first}")
    return _send(bundle, allocation, {one: group[one] for one in set(first.values())}, parts, method, log)


def _check_room(ready: Answers, folder: str, need: int) -> None:
    small = [
        f"{name} has {answer['free'] >> 20} MiB" for name, answer in sorted(ready.items()) if answer["free"] < need
    ]
    if small:
        raise RunFailed(
            f"staging: {folder} needs {(need >> 20) + 1} MiB, but {', '.join(small)}; set TMPDIR to a larger disk of the nodes"
        )


def _transfer(
    allocation: Allocation, step: Step, number: str, folder: str, parts: list[Part], method: str, limit: float, log: Log
) -> str:
    if method != "stream":
        try:
            for part in parts:
                target = node.incoming(folder, part.name)
                words = ["sbcast", "--force", f"--jobid={allocation.job_id}.{number}", part.archive, target]
                command([*allocation.prefix, *words], timeout_s=limit)
            return "sbcast"
        except AllranksError as error:
            if method == "sbcast":
                raise
            log(f"sbcast is not able here ({error}); sending through srun")
    for part in parts:
        step.stream(part.name, Path(part.archive), limit)
    return "stream"


def _node(bundle: Bundle, name: str, answer: dict[str, Any]) -> NodeStage:
    return node_stage(bundle, name, answer["lacks"], answer["folder"])


def _remove(bundle: Bundle, allocation: Allocation, nodes: tuple[str, ...], log: Log) -> None:
    """Remove the job's folders; a node that is gone must not hide why the job failed."""
    try:
        with Step(allocation, nodes, _pythons(bundle.python), {"verb": "remove", "job": allocation.folder}) as step:
            left = sorted(name for name, answer in step.answers(ANSWER_S).items() if not answer["gone"])
        if left:
            log(f"staging: {', '.join(left)} could not remove what was staged; the next job there tries again")
    except AllranksError as error:
        log(f"staging: what was staged may be left on {', '.join(nodes)}: {error}; the next job there removes it")
