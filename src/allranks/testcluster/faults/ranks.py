"""Killing one rank of a job."""

from __future__ import annotations

import signal
from collections.abc import Mapping

from allranks.errors import RequestError
from allranks.testcluster import procs
from allranks.testcluster.box import Box
from allranks.testcluster.faults.kind import Fault


def kill_rank(box: Box, _node: str, arguments: Mapping[str, str]) -> dict[str, str]:
    """Sends ``signal`` (default KILL) to the process of ``rank``, of ``job`` if that is given."""
    rank, job = arguments["rank"], arguments.get("job", "")
    name = arguments.get("signal", "KILL").upper().removeprefix("SIG")
    number = getattr(signal, f"SIG{name}", None)
    if not isinstance(number, signal.Signals):
        raise RequestError(f"--signal {name}: no such signal. Use KILL, TERM, STOP, CONT, USR1 or the like.")
    found = find_rank(box, rank, job)
    where = f" of job {job}" if job else ""
    if not found:
        raise RequestError(f"No process of rank {rank}{where} runs on the nodes. See: allranks cluster exec -- squeue.")
    jobs = {owner for owner, _ in found.values()}
    if len(jobs) > 1:
        raise RequestError(f"Rank {rank} runs in several jobs: {', '.join(sorted(jobs))}. Say which with --job.")
    procs.kill(found, number)
    return {"rank": rank, "nodes": ",".join(sorted({node for _, node in found.values()})), "signal": name}


def find_rank(box: Box, rank: str, job: str = "") -> dict[int, tuple[str, str]]:
    """The topmost processes of a rank: pid to (job, node). RANK counts, which torchrun sets; else Slurm's own."""
    spaces = {procs.namespace(pid, "pid"): name for name, pid in box.inits().items() if name != box.plan.login}
    tasks: dict[int, tuple[dict[str, str], str]] = {}
    for pid in procs.in_namespaces("pid", [space for space in spaces if space]):
        values = procs.environment(pid)
        if not job or values.get("SLURM_JOB_ID") == job:
            tasks[pid] = (values, spaces[procs.namespace(pid, "pid")])
    by_torch = {pid for pid, (values, _) in tasks.items() if "RANK" in values}
    matches = {
        pid: (values.get("SLURM_JOB_ID", ""), node)
        for pid, (values, node) in tasks.items()
        if (values.get("RANK") if by_torch else _slurm_rank(values)) == rank
    }
    return {pid: value for pid, value in matches.items() if int(procs.status(pid).get("PPid", "0")) not in matches}


def _slurm_rank(values: Mapping[str, str]) -> str | None:
    """Slurm's number of a task; a batch script has one too, but is no rank and has no step."""
    return values.get("SLURM_PROCID") if "SLURM_STEP_ID" in values else None


FAULTS = (Fault(kind="kill-rank", summary="Kill (or stop) one rank of a job.", inject=kill_rank, on_node=False),)
