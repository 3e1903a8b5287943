"""How processes ended: what the agent's table and Slurm's last lines tell of the first failure."""

from __future__ import annotations

import re

from msgspec import Struct

from allranks.diagnose.judge.case import Case, in_order

_NUMBER = re.compile(r"\d+")


def decide(case: Case) -> None:
    """Where nothing but the end of a process is told, says so: the launcher's table hides the error itself."""
    _quiet(case)
    if case.candidates:
        return
    ended = [
        s
        for s in case.facts("agent_field")
        if s.groups["field"].lower() == "exitcode" and s.groups["value"].startswith("1 ")
    ]
    ended += [s for s in case.facts("agent_failed") if s.groups["code"] == "1"]
    ended += [s for s in case.facts("srun_exit") if re.search(r"exit code [1-9]\d?$", s.groups["how"])]
    if ended:
        found = case.propose("application_error", 0.5, in_order(ended))
        found.cause = "A process ended with an error code of its own; its error is not in these logs, only the launcher's report of it."
        found.next_test = (
            "give diagnose the logs of that rank; decorate the program's main function with torch.distributed.elastic's @record, or start with "
            "--log-dir and --redirects=3, so that the error is kept"
        )


def _quiet(case: Case) -> None:
    """A rank that ended by itself, with a code and without a word, where the others' words are of its absence alone."""
    if case.candidates.keys() - {"peer_died_first"}:
        return
    spoke = {s.rank for s in case.signals if s.kind == "class" or s.owner in ("exception", "event_error")}
    case.quiet_ends = [s for s in in_order(case.facts("rank_end")) if s.rank not in spoke and int(s.groups["code"]) > 0]
    if case.quiet_ends:
        first = case.quiet_ends[0]
        found = case.propose("application_error", 0.72, case.quiet_ends)
        found.rank, found.host = first.rank, first.host
        found.cause = (
            f"Rank {first.rank} ended itself with exit code {first.groups['code']} and wrote no error: sys.exit, os._exit, or a library that gave up. "
            "What the other ranks say is of its absence."
        )
        found.title = "the program ended itself without an error"
        found.fix = f"See in the program what ends it with {first.groups['code']} on rank {first.rank} alone; raise an exception there, which says why."
        found.next_test = f"read the end of the log of rank {first.rank}; it ends where the program did"


class FirstEnd(Struct, frozen=True):
    """Who ended first, by the word of torchrun's agent or of srun."""

    host: str | None
    rank: int | None


def first_end(case: Case) -> FirstEnd:
    """The agent's root cause; else the first task that srun saw fail: its host, and its rank where each task is one."""
    noted = in_order(case.facts("rank_end"))
    if noted:
        return FirstEnd(noted[0].host, noted[0].rank)
    for root in in_order(case.facts("agent_root")):
        fields = {
            s.groups["field"].lower(): s.groups["value"]
            for s in reversed(case.facts("agent_field"))
            if s.file == root.file and root.line < s.line <= root.line + 9
        }
        if fields:
            rank = _NUMBER.match(fields.get("rank", ""))
            return FirstEnd(fields.get("host"), int(rank.group()) if rank else None)
    ended = [s for s in in_order(case.facts("srun_exit")) if "terminated" not in s.groups["how"].lower()]
    if not ended:
        return FirstEnd(None, None)
    task = _NUMBER.search(ended[0].groups["tasks"])
    return FirstEnd(ended[0].groups["host"], int(task.group()) if task and case.tasks_are_ranks else None)
