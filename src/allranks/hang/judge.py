"""Which rank fell out, and where it stands. Pure: evidence of the nodes in, one report out.

Kinds of evidence from the hardest to the softest; the first that names somebody decides: a node that does not answer; a
process that cannot run; a network that is down; what the ranks have called (a rank that never came, or came with another
call); how far each is; and where their stacks stand.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from allranks.hang.case import Case, Verdict, open_call
from allranks.hang.kinds import KINDS
from allranks.hang.records import Alarm, HangReport, NodeEvidence, Waiting
from allranks.hang.stacks import standing
from allranks.hang.telling import notes, sentence

_CHECKPOINT = re.compile(r"checkpoint|state_dict|save_pretrained|:save\w*$", re.IGNORECASE)
_LOADER = re.compile(r"utils/data/|/data/|data_?loader|:(_next_data|_try_get_data|__next__|__getitem__|make_batch)$")


def judge(nodes: Sequence[NodeEvidence], hosts: dict[int, str], alarm: Alarm, attempt: int, now: float) -> HangReport:
    """The report.

    Args:
        nodes: what came in; a node that does not answer is absent.
        hosts: the host of each rank of the job.
        now: seconds since the epoch.
    """
    case = Case(nodes, hosts, alarm)
    verdict = next((v for ask in KINDS if (v := ask(case)) is not None), _nobody(case))
    named = {f.rank for f in verdict.fallen}
    waiting = [
        Waiting(rank=r.rank, host=case.hosts.get(r.rank, ""), where=standing(r.stack), call=open_call(r))
        for r in case.ranks.values()
        if r.rank not in named
    ]
    kind = _special(case, verdict)
    return HangReport(
        attempt=attempt,
        kind=kind,
        sentence=sentence(verdict, waiting, alarm, now),
        fallen=verdict.fallen,
        waiting=waiting,
        alarm=alarm,
        judged=round(now, 3),
        missing_hosts=sorted({case.hosts[r] for r in case.missing}),
        notes=notes(case),
    )


def _nobody(case: Case) -> Verdict:
    if len(case.ranks) < 2:
        return Verdict(kind="collective_hang", fallen=[], cause="alone")
    waits = any(case.waits(r) for r in case.ranks.values())
    return Verdict(kind="collective_hang", fallen=[], cause="same" if waits else "outside")


def _special(case: Case, verdict: Verdict) -> str:
    """What the place where the rank stands says of the cause."""
    if verdict.kind != "collective_mismatch" or verdict.cause == "order" or len(verdict.fallen) != 1:
        return verdict.kind
    rank = case.ranks.get(verdict.fallen[0].rank if verdict.fallen[0].rank is not None else -1)
    if rank is None:
        return verdict.kind
    lines = [f"{f.file}:{f.function}" for f in rank.stack[:14]]
    if rank.part == "data" or any(_LOADER.search(line) for line in lines):
        return "dataloader_hang"
    if rank.phase == "save" or any(_CHECKPOINT.search(line) for line in lines[:8]):
        return "checkpoint_collective"
    return verdict.kind
