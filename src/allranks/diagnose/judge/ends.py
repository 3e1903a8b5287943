"""How processes ended: what the agent's table and Slurm's last lines tell of the first failure."""

from __future__ import annotations

import re

from msgspec import Struct

from allranks.diagnose.judge.case import Case, in_order

_NUMBER = re.compile(r"\d+")


class FirstEnd(Struct, frozen=True):
    """Who ended first, by the word of torchrun's agent or of srun."""

    host: str | None
    rank: int | None


def first_end(case: Case) -> FirstEnd:
    """The agent's root cause; else the host of the first task that srun saw fail."""
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
    return FirstEnd(ended[0].groups["host"] if ended else None, None)
