"""What the verb ``doctor`` does: where to look, look, and what follows from it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from allranks import fit as memory
from allranks.errors import EnvironmentNotAble
from allranks.fabric.gather import for_run
from allranks.fabric.job import NodePolicy, Policy
from allranks.fabric.judge import Outcome
from allranks.facts import machine_facts
from allranks.planning import LaunchPlan, make_plan, network_job
from allranks.preflight.allocation import allocation, inside_job, test_only
from allranks.preflight.collectives import Pair, measure, slow_pairs, verdict
from allranks.preflight.copytest import CopyResult, copy_test
from allranks.preflight.gather import Preflight, Where, examine, without_bad
from allranks.preflight.records import PreflightReport
from allranks.slurm.commands import find_slurm
from allranks.spec.records import RunSpec

Say = Callable[[str], None]


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """The verb's options."""

    collectives: bool = False
    exclude_bad: bool = False
    imports: bool = True
    wait_s: float = 600.0


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """What the doctor says."""

    preflight: Preflight
    ok: bool
    pairs: list[Pair] = []
    pairs_verdict: str = ""
    excluded: list[str] = []
    notes: list[str] = []
    policy: Policy = Policy(nodes=[])
    outcome: Outcome | None = None
    """What the ranks of the collectives really used."""
    copies: list[CopyResult] = []

    def as_json(self) -> dict[str, Any]:
        """One document: verdicts by node, the network, the pairs."""
        found = self.preflight
        return {
            "ok": self.ok,
            "nodes": [_node(report) for report in found.reports],
            "network": msgspec.to_builtins(found.network),
            "port": found.port,
            "pairs": [_pair(pair) for pair in self.pairs],
            "slow_pairs": [[pair.a, pair.b] for pair in slow_pairs(self.pairs)],
            "pairs_verdict": self.pairs_verdict,
            "environment": {node.host: _decided(node) for node in self.policy.nodes},
            "observed": msgspec.to_builtins(self.outcome),
            "copies": msgspec.to_builtins(self.copies),
            "excluded": self.excluded,
            "notes": self.notes,
            "seconds": {"probe": found.probe_s, "reach": found.reach_s},
        }


def _decided(node: NodePolicy) -> dict[str, Any]:
    return {
        "advice": [item.advice() for item in node.environment],
        "expected": msgspec.to_builtins(node.expected),
    }


def _pair(pair: Pair) -> dict[str, Any]:
    rates = {"copy_bytes_per_s": pair.copy_bytes_per_s, "all_reduce_bytes_per_s": pair.all_reduce_bytes_per_s}
    return {**msgspec.to_builtins(pair), **rates}


def _node(report: PreflightReport) -> dict[str, Any]:
    return {"host": report.host, "ok": report.ok, "checks": msgspec.to_builtins(report.checks)}


def doctor(spec: RunSpec, request: Request, say: Say) -> Diagnosis:
    """Examines this machine, or with `launcher: slurm` every node that the spec would use.

    Raises:
        SpecError: Slurm refuses account, partition or resources.
        EnvironmentNotAble: no Slurm answers, or the nodes are not free.
    """
    facts = machine_facts()
    plan = make_plan(spec, facts)
    if spec.model is not None:
        plan = msgspec.structs.replace(plan, rank_memory_bytes=memory.known_bytes(memory.fit(spec, plan, facts)))
    if spec.cluster.launcher != "slurm":
        notes = []
        if spec.cluster.launcher == "hosts":
            notes = [
                "launcher hosts: this machine only; run `allranks doctor SPEC` on each host, nothing else reaches them"
            ]
        return _examine(Where(), spec, plan, request, notes, say)
    slurm = find_slurm(Path.cwd())
    if not inside_job(slurm):
        say(test_only(slurm, spec.cluster))
    with allocation(slurm, spec.cluster, wait_s=request.wait_s) as job:
        where = Where(
            prefix=slurm.prefix,
            hosts=job.hosts,
            srun_args=job.srun_args,
            job_id=job.job_id,
            cpus=spec.cluster.slurm.cpus_per_task or 1,
        )
        return _examine(
            where, spec, plan, request, [f"no other Slurm answers: {slurm.label} is used"] if slurm.prefix else [], say
        )


def _examine(where: Where, spec: RunSpec, plan: LaunchPlan, request: Request, notes: list[str], say: Say) -> Diagnosis:
    found = examine(where, spec, plan, Path(spec.run_root), imports=request.imports)
    excluded: list[str] = []
    ok = found.ok
    if not ok and request.exclude_bad and where.hosts:
        found, excluded, note = _without(where, spec, plan, request, found)
        notes = [*notes, note]
        ok = bool(excluded)
        where = msgspec.structs.replace(where, hosts=[h for h in where.hosts if h not in excluded])
    pairs: list[Pair] = []
    outcome: Outcome | None = None
    copies: list[CopyResult] = []
    policy = _policy(spec, plan, found)
    if request.collectives and (ok or found.may_run):
        say("measuring all pairs ...")
        if plan.device == "cuda":
            copies = copy_test(where, found, Path(spec.run_root))
            policy = _policy(spec, plan, found)  # a copy that failed changes it
        procs = plan.procs_per_node if plan.device == "cuda" or len(where.hosts) < 2 else 1
        measured = measure(where, found, plan, procs, policy)
        pairs, outcome = measured.pairs, measured.outcome
    elif request.collectives:
        notes = [*notes, "collectives were not measured: first mend what failed"]
    return Diagnosis(
        preflight=found,
        ok=ok and not slow_pairs(pairs) and (outcome is None or outcome.ok) and not any(c.failed for c in copies),
        pairs=pairs,
        pairs_verdict=verdict(pairs) if pairs else "",
        excluded=excluded,
        notes=notes,
        policy=policy,
        outcome=outcome,
        copies=copies,
    )


def _policy(spec: RunSpec, plan: LaunchPlan, found: Preflight) -> Policy:
    planned = {item.name for item in plan.environment if item.value is not None}
    return for_run(network_job(spec, plan.device), found, Path(spec.run_root), planned)


def _without(
    where: Where, spec: RunSpec, plan: LaunchPlan, request: Request, found: Preflight
) -> tuple[Preflight, list[str], str]:
    """The rest is looked at again: what was hidden behind a bad node comes out. The bad nodes' verdicts stay."""
    bad = found.bad_hosts
    try:
        smaller = without_bad(spec, bad, machine_facts())
    except EnvironmentNotAble as error:
        return found, [], str(error)
    rest = msgspec.structs.replace(where, hosts=[host for host in where.hosts if host not in bad])
    again = examine(rest, smaller, plan, Path(spec.run_root), imports=False)
    shown = [report for report in found.reports if report.host in bad]
    merged = msgspec.structs.replace(again, reports=[*again.reports, *shown])
    if not again.ok:
        return merged, [], f"without {', '.join(bad)}, {', '.join(again.bad_hosts)} fail too"
    names = ",".join(bad)
    note = (
        f"goes on without {names}: --set cluster.nodes={smaller.cluster.nodes} --set 'cluster.slurm.exclude=[{names}]'"
    )
    return merged, bad, note
