"""Run the verb ``doctor``: check nodes, and draw conclusions."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import msgspec

from allranks.errors import EnvironmentNotAble
from allranks.launch.preview import PreparedRun, check_start
from allranks.nodes.network.facts import facts_of_nodes, policy_for_nodes
from allranks.nodes.network.traffic import NetworkOutcome
from allranks.nodes.preflight import link_bandwidth
from allranks.nodes.preflight.runner import PreflightResult, TargetNodes, exclude_nodes, run_preflight, unusable_nodes
from allranks.planning.network_policy import NetworkPolicy
from allranks.planning.planner import network_job
from allranks.planning.records import LaunchPlan
from allranks.spec.records import RunSpec

Log = Callable[[str], None]


class DoctorOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The verb's options."""

    collectives: bool = False
    exclude_bad: bool = False
    imports: bool = True


class DoctorReport(msgspec.Struct, frozen=True, kw_only=True):
    """The result of the doctor."""

    preflight: PreflightResult
    ok: bool
    starts: bool = True
    """Whether a run would start its ranks on these nodes; it stages what can be staged."""
    pairs: list[link_bandwidth.RankPair] = []
    pairs_verdict: str = ""
    sweep: list[link_bandwidth.CollectiveTime] = []
    """Collectives of all ranks, by size."""
    bandwidth: list[str] = []
    """Sentences about them, relative to the hardware."""
    excluded: list[str] = []
    notes: list[str] = []
    policy: NetworkPolicy = NetworkPolicy(nodes=[])
    outcome: NetworkOutcome | None = None
    """The network that the ranks of the collectives used."""
    copies: list[link_bandwidth.CopyResult] = []

    def as_json(self) -> dict[str, Any]:
        """Return one document: verdicts by node, the network, the pairs."""
        preflight = self.preflight
        return {
            "ok": self.ok,
            "starts": self.starts,
            "nodes": [{"host": r.host, "ok": r.ok, "checks": msgspec.to_builtins(r.checks)} for r in preflight.reports],
            "network": msgspec.to_builtins(preflight.network),
            "port": preflight.port,
            "pairs": [_with(pair, "copy_bytes_per_s", "all_reduce_bytes_per_s") for pair in self.pairs],
            "slow_pairs": [[pair.a, pair.b] for pair in link_bandwidth.slow_pairs(self.pairs)],
            "pairs_verdict": self.pairs_verdict,
            "sweep": [_with(one, "algorithm_bytes_per_s", "bus_bytes_per_s") for one in self.sweep],
            "bandwidth": self.bandwidth,
            "environment": {
                node.host: {
                    "advice": [item.advice() for item in node.environment],
                    "expected": msgspec.to_builtins(node.expected),
                }
                for node in self.policy.nodes
            },
            "observed": msgspec.to_builtins(self.outcome),
            "copies": msgspec.to_builtins(self.copies),
            "excluded": self.excluded,
            "notes": self.notes,
            "seconds": {"probe": preflight.probe_s, "reach": preflight.reach_s},
        }


def _with(record: msgspec.Struct, *properties: str) -> dict[str, Any]:
    return {**msgspec.to_builtins(record), **{name: getattr(record, name) for name in properties}}


def doctor(
    prepared: PreparedRun,
    request: DoctorOptions,
    nodes: AbstractContextManager[tuple[TargetNodes, list[str]]],
    say: Log,
) -> DoctorReport:
    """Check the nodes that the spec would use, as far as they can be reached from here.

    Args:
        nodes: returns the nodes, and notes for the reader (`launch.launchers.Launcher.nodes_to_examine`); entered once
        the spec is planned.

    Raises:
        SpecError, DataError: Slurm refuses account, partition or resources; or `check_start` refuses the spec, as for a
        run.
        EnvironmentNotAble: this machine lacks something, Slurm does not answer, or the nodes are not free.
    """
    plan = prepared.plan_with_memory
    check_start(prepared, plan, required=not prepared.spec.cluster.launched_by.runs_here)
    with nodes as (where, notes):
        return _run(where, prepared, plan, request, [*plan.warnings, *notes], say)


def _run(
    where: TargetNodes, prepared: PreparedRun, plan: LaunchPlan, request: DoctorOptions, notes: list[str], say: Log
) -> DoctorReport:
    spec = prepared.spec
    preflight = run_preflight(where, spec, plan, Path(spec.run_root), imports=request.imports)
    excluded: list[str] = []
    ok = preflight.ok
    if not ok and request.exclude_bad and where.programs_only:
        notes = [*notes, "hosts that fail are left out by their removal from cluster.hosts"]
    elif not ok and request.exclude_bad and where.hosts:
        preflight, excluded, note = _without_bad_nodes(where, prepared, plan, preflight)
        notes = [*notes, note]
        ok = bool(excluded)
        where = msgspec.structs.replace(where, hosts=[h for h in where.hosts if h not in excluded])
    measured = link_bandwidth.CollectiveMeasurements(pairs=[], outcome=None)
    bandwidth_notes: list[str] = []
    copies: list[link_bandwidth.CopyResult] = []
    policy = _policy(spec, plan, preflight)
    if request.collectives and where.programs_only:
        notes = [*notes, "collectives were not measured: launcher hosts starts no ranks for the doctor"]
    elif request.collectives and (ok or preflight.may_run):
        say("measuring collectives and pairs ...")
        if plan.device == "cuda":
            copies = link_bandwidth.run_copy_test(where, preflight, Path(spec.run_root))
            policy = _policy(spec, plan, preflight)  # a failed copy changes it
        procs = plan.procs_per_node if plan.device == "cuda" or len(where.hosts) < 2 else 1
        measured = link_bandwidth.measure_collectives(where, preflight, plan, procs, policy)
        bandwidth_notes = _judge_bandwidth(preflight, policy, procs, measured)
        done, planned = measured.rounds
        if done < planned:
            notes = [*notes, f"{done} of {planned} rounds of disjoint pairs were measured in the time for it"]
    elif request.collectives:
        notes = [*notes, "collectives were not measured: fix the failed checks first"]
    pairs, outcome = measured.pairs, measured.outcome
    used = [report for report in preflight.reports if report.host not in excluded]
    lacking = ", ".join(report.host for report in used if not report.may_run)
    starts = not unusable_nodes(spec, used)
    if lacking and starts:
        notes = [*notes, f"a run would copy to {lacking} what is missing there (cluster.stage: {spec.cluster.stage})"]
    return DoctorReport(
        preflight=preflight,
        starts=starts,
        ok=ok
        and not link_bandwidth.slow_pairs(pairs)
        and (outcome is None or outcome.ok)
        and not any(c.failed for c in copies),
        pairs=pairs,
        pairs_verdict=link_bandwidth.slow_pair_summary(pairs) if pairs else "",
        sweep=measured.sweep,
        bandwidth=bandwidth_notes,
        excluded=excluded,
        notes=notes,
        policy=policy,
        outcome=outcome,
        copies=copies,
    )


def _judge_bandwidth(
    preflight: PreflightResult, policy: NetworkPolicy, procs: int, measured: link_bandwidth.CollectiveMeasurements
) -> list[str]:
    """Compare the collectives of all ranks with the hardware."""
    if not measured.sweep:
        return []
    limit = link_bandwidth.hardware_limit(
        preflight.probes, facts_of_nodes(preflight.probes, preflight.network, {}), policy, procs
    )
    text = link_bandwidth.compare_with_hardware(measured.sweep, limit)
    return [text] if text else []


def _policy(spec: RunSpec, plan: LaunchPlan, preflight: PreflightResult) -> NetworkPolicy:
    planned = {item.name for item in plan.environment if item.value is not None}
    job = network_job(spec, plan.device)
    return policy_for_nodes(job, preflight.probes, preflight.network, Path(spec.run_root), planned)


def _without_bad_nodes(
    where: TargetNodes, prepared: PreparedRun, plan: LaunchPlan, preflight: PreflightResult
) -> tuple[PreflightResult, list[str], str]:
    """Check the other nodes again: a bad node may have hidden other failures. Verdicts on bad nodes are kept."""
    bad = preflight.bad_hosts
    try:
        smaller = exclude_nodes(prepared.spec, bad, len(where.hosts) - len(bad), prepared.facts)
    except EnvironmentNotAble as error:
        return preflight, [], str(error)
    rest = msgspec.structs.replace(where, hosts=[host for host in where.hosts if host not in bad])
    again = run_preflight(rest, smaller, plan, Path(smaller.run_root), imports=False)
    shown = [report for report in preflight.reports if report.host in bad]
    merged = msgspec.structs.replace(again, reports=[*again.reports, *shown])
    if not again.ok:
        return merged, [], f"without {', '.join(bad)}, {', '.join(again.bad_hosts)} fail too"
    names = ",".join(bad)
    spares = f" --set cluster.spares={smaller.cluster.spares}" if prepared.spec.cluster.spares else ""
    note = (
        f"continue without {names}: --set cluster.nodes={smaller.cluster.nodes}{spares} "
        f"--set 'cluster.slurm.exclude=[{names}]'"
    )
    return merged, bad, note
