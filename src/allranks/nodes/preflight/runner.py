"""Run the preflight: probe every node, choose the network, test connections, apply all checks, write the result.

The checks are those of `allranks.nodes.checks.registry`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import msgspec

from allranks.errors import EnvironmentNotAble, SpecError
from allranks.nodes.checks import NodeSurvey, PlanRequirements
from allranks.nodes.checks.registry import CHECKS
from allranks.nodes.network.choose import ChosenNetwork, choose_network
from allranks.nodes.network.links import NodeLinks, judge_links, sampled_links
from allranks.nodes.preflight.requirements import node_requirements, port_candidates, write_nonces
from allranks.nodes.probes import connectivity_probe as reacher
from allranks.nodes.probes import probe as prober
from allranks.nodes.records import Check, ConnectionResults, FolderFacts, NodeRequirements, PreflightReport, Probe
from allranks.nodes.slurm.srun import NodeAnswers, program_text, python_command, run_command, run_with_srun
from allranks.planning.planner import make_plan
from allranks.planning.records import LaunchPlan
from allranks.rundir.files import write_json, write_text_atomic
from allranks.rundir.paths import RunDir
from allranks.spec.records import RunSpec
from allranks.utils.machine import MachineFacts


def run_checks(survey: NodeSurvey) -> list[PreflightReport]:
    """Return one report per node, in the order of the nodes."""
    verdicts = [check(survey) for check in CHECKS]
    return [
        PreflightReport(host=probe.host, checks=[verdict[probe.host] for verdict in verdicts if probe.host in verdict])
        for probe in sorted(survey.probes, key=lambda probe: probe.node_id)
    ]


PROBE_TIMEOUT_S = 60.0
CONNECTIVITY_TIMEOUT_S = 24.0
"""Time to start and end the step, in addition to the time in which nodes connect."""
RETRIES = 3
INTERFACE_NAMES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_UNREACHABLE = re.compile(r"failed on node ([^\s:]+)")


class NodeProgram(msgspec.Struct, frozen=True, kw_only=True):
    """A program of `nodes.probes` with its input. `argument` must not grow with the number of nodes; `request` may."""

    name: str
    python: str
    argument: dict[str, Any] | None = None
    request: dict[str, Any] | None = None


class TargetNodes(msgspec.Struct, frozen=True, kw_only=True):
    """The nodes to query: those of a job, through srun; without hosts, this machine."""

    prefix: list[str] = []
    """Prefix of srun: that of the box, or empty."""
    hosts: list[str] = []
    slurm_job: str | None = None
    """The job for srun; None: the one in which this process runs."""
    job_id: str = "local"
    """Different for each job: candidates for its ports are derived from it."""
    cpus: int = 1
    """Cores of a node's task: those of the job there."""

    programs_only: bool = False
    """Only the programs of `nodes.probes` can be run there, not other commands."""

    def run(self, argv: list[str], timeout_s: float, text: str | None, only: Sequence[str] = ()) -> NodeAnswers:
        """Run a program on all nodes, or on some."""
        if not self.hosts:
            return run_command(argv, timeout_s, text)
        hosts = list(only) or self.hosts
        return run_with_srun(
            hosts, argv, timeout_s, prefix=self.prefix, job_id=self.slurm_job, text=text, cpus=self.cpus
        )

    def run_program(self, program: NodeProgram, timeout_s: float, only: Sequence[str] = ()) -> NodeAnswers:
        """Run one of the programs of the preflight on all nodes, or on some."""
        text = program_text(program.name, program.request)
        return self.run(python_command(program.python, program.argument), timeout_s, text, only)

    def silence_cure(self, host: str, answers: NodeAnswers, why: str) -> str:
        """Return what to do about a node without an answer."""
        return (
            f"{host} did not answer within {answers.seconds:.0f} s ({why}): exclude it (--exclude-bad, "
            "cluster.slurm.exclude)"
        )


class PreflightResult(msgspec.Struct, frozen=True, kw_only=True):
    """The verdicts, and the data that the launcher needs."""

    reports: list[PreflightReport]
    probes: list[Probe]
    network: ChosenNetwork | None
    port: int | None
    """Ports that were free on the first node at the time of the check."""
    probe_s: float
    reach_s: float

    @property
    def ok(self) -> bool:
        return all(report.ok for report in self.reports)

    @property
    def may_run(self) -> bool:
        """Return whether no check failed that blocks a run."""
        return all(report.may_run for report in self.reports)

    @property
    def bad_hosts(self) -> list[str]:
        return [report.host for report in self.reports if not report.ok]

    def of_hosts(self, hosts: Sequence[str], interface: str | None) -> PreflightResult:
        """Return the result for some of the nodes: their network, and the port of the first; the reports are kept."""
        probes = [probe for probe in self.probes if probe.host in hosts]
        if len(probes) == len(self.probes):
            return self
        network = choose_network(probes, interface) if len(probes) > 1 else None
        return msgspec.structs.replace(self, probes=probes, network=network, port=_first_port(probes))


def run_preflight(
    where: TargetNodes,
    spec: RunSpec,
    plan: LaunchPlan | PlanRequirements,
    run_root: Path,
    *,
    imports: bool = True,
    required: NodeRequirements | None = None,
) -> PreflightResult:
    """Query all nodes at once, and evaluate the answers, in two srun steps: facts, then connections.

    `required` replaces the requirements of the spec.
    """
    fixed = spec.cluster.rendezvous.port
    ports = [fixed] if fixed else port_candidates(where.job_id)
    requirements = required or node_requirements(spec, run_root, ports=ports, imports=imports)
    with write_nonces(requirements) as (requirements, secrets):
        limit = PROBE_TIMEOUT_S + (requirements.import_limit_s if requirements.imports else 0)
        program = NodeProgram(name="probe.py", python=requirements.python, argument=msgspec.to_builtins(requirements))
        answers, silent = _ask(where, program, limit)
        own_folders = _launcher_folders(requirements) if where.hosts else {}  # without hosts, the node is this machine
    lines = answers.by_host()
    probes = [msgspec.convert(line.facts(), Probe) for line in lines.values()]
    probes.sort(key=lambda probe: probe.node_id)
    network = network_error = None
    if len(probes) > 1:
        try:
            network = choose_network(probes, spec.cluster.rendezvous.interface)
        except EnvironmentNotAble as error:
            network_error = str(error)
    reach, reach_s = _test_connectivity(where, requirements, probes, network)
    survey = NodeSurvey(
        probes=probes,
        required=requirements,
        need=plan if isinstance(plan, PlanRequirements) else _plan_requirements(plan, fixed),
        network=network,
        network_error=network_error,
        reach=reach,
        nonces=secrets,
        remote=bool(where.hosts),
        received={host: line.received for host, line in lines.items()},
        own_folders=own_folders,
        program_here={name: prober.has_module(name) for name in requirements.program},
    )
    reports = [*(run_checks(survey) if probes else []), *silent]
    return PreflightResult(
        reports=reports,
        probes=probes,
        network=network,
        port=_first_port(probes),
        probe_s=round(answers.seconds, 3),
        reach_s=round(reach_s, 3),
    )


def _first_port(probes: Sequence[Probe]) -> int | None:
    return next(iter(probes[0].free_ports), None) if probes else None


def choose_nodes(usable: Sequence[str], needed: int, suspects: Collection[str]) -> tuple[list[str], list[str]]:
    """Return the nodes of the ranks, in the same order, and the others. Suspected nodes are used last."""
    used = set(sorted(usable, key=lambda host: host in suspects)[:needed])
    return [host for host in usable if host in used], [host for host in usable if host not in used]


def _plan_requirements(plan: LaunchPlan, port: int | None) -> PlanRequirements:
    threads = next((e.value for e in plan.environment if e.name == "OMP_NUM_THREADS"), None)
    return PlanRequirements(
        procs_per_node=plan.procs_per_node,
        threads=int(threads) if threads and threads.isdigit() else None,
        device=plan.device,
        share_gpus=plan.backend == "gloo",
        port=port,
        rank_memory_bytes=plan.rank_memory_bytes,
        named={
            e.name: e.value for e in plan.environment if e.name in INTERFACE_NAMES and e.value and e.source != "policy"
        },
    )


def _launcher_folders(required: NodeRequirements) -> dict[str, FolderFacts]:
    """Return the launcher's own view of the same folders."""
    seen = {}
    for item in required.folders:
        request = msgspec.to_builtins(msgspec.structs.replace(item, write=False, nonce=None))
        value, error = prober.Later(prober.FOLDER_LIMIT_S, prober.folder, request).get()
        seen[item.role] = msgspec.convert({**(value or {}), "error": error}, FolderFacts)
    return seen


def connect_window_s(nodes: int) -> float:
    """Return how long nodes try to connect: one second more for each doubling of the number of nodes."""
    return reacher.WINDOW_S + max(0, (nodes - 1).bit_length() - (reacher.MESH_NODES - 1).bit_length())


def _test_connectivity(
    where: TargetNodes, required: NodeRequirements, probes: list[Probe], network: ChosenNetwork | None
) -> tuple[dict[str, NodeLinks] | None, float]:
    """Test connections with one srun step; return each node's verdict, and the seconds."""
    if network is None:
        return None, 0.0
    # The rendezvous port if it is free, and one port of the range that Gloo and NCCL use.
    seats = [[p.host, network.seats[p.host].address, sorted({*p.free_ports[:1], p.unused_port} - {0})] for p in probes]
    limit = connect_window_s(len(seats))
    request = {"seats": reacher.encode_seats(seats), "window_s": limit, "seed": where.job_id}
    program = NodeProgram(name="connectivity_probe.py", python=required.python, request=request)
    hosts = [probe.host for probe in probes]
    answers, _ = _ask(where, program, limit + CONNECTIVITY_TIMEOUT_S, hosts)
    facts_by_host = {host: line.facts() for host, line in answers.by_host().items()}
    results = {
        host: msgspec.convert(facts, ConnectionResults)
        for host, facts in facts_by_host.items()
        if facts and "unreached" in facts
    }
    return judge_links(sampled_links(hosts, where.job_id), results), answers.seconds


def _ask(
    where: TargetNodes, program: NodeProgram, limit_s: float, only: Sequence[str] = ()
) -> tuple[NodeAnswers, list[PreflightReport]]:
    """Return every node's line, and a report on each node without one. `only` restricts the query to some nodes.

    Slurm ends the whole step if one node cannot be reached, so the others are queried again without it.
    """
    hosts, silent = list(only) or where.hosts, []
    answers = where.run_program(program, limit_s, hosts)
    for _ in range(RETRIES):
        named = set(_UNREACHABLE.findall(answers.said))
        unreachable = [host for host in hosts if host in named]
        left = [host for host in hosts if host not in named]
        if not unreachable or not left:
            break
        silent += _no_answer_reports(where, unreachable, answers)
        hosts = left
        answers = where.run_program(program, limit_s, hosts)
    lines = answers.by_host()
    return answers, [*silent, *_no_answer_reports(where, [host for host in hosts if host not in lines], answers)]


def _no_answer_reports(where: TargetNodes, hosts: Sequence[str], answers: NodeAnswers) -> list[PreflightReport]:
    """Return reports on nodes without an answer, with srun's messages about them."""
    reports = []
    for host in hosts:
        said = [text for text in answers.said.splitlines() if re.search(rf"\b{re.escape(host)}\b", text)]
        why = (said or answers.said.splitlines() or ["no output"])[0].strip()
        cure = where.silence_cure(host, answers, why)
        reports.append(PreflightReport(host=host, checks=[Check(name="probe", ok=False, found="NO-ANSWER", cure=cure)]))
    return reports


def failure_lines(reports: Sequence[PreflightReport]) -> list[str]:
    """Return one line per failed check: node, problem and fix. Equal lines of several nodes are combined."""
    bad = [(report.host, check) for report in reports for check in report.checks if not check.ok]
    hosts: dict[tuple[str, str], list[str]] = {}
    for host, check in bad:
        hosts.setdefault((check.name, check.cure), []).append(host)
    return [f"{', '.join(names)}: {name}: {cure}" for (name, cure), names in hosts.items()]


STAGEABLE_CHECKS = {"proj", "py", "pkgs", "imports", "program", "data", "model", "hub"}


def unusable_nodes(spec: RunSpec, reports: Sequence[PreflightReport]) -> list[PreflightReport]:
    """Return the nodes that cannot run the job, whatever a run would stage for them."""
    staging = spec.cluster.launched_by.uses_slurm and spec.cluster.stage != "never"

    def staged(check: Check) -> bool:  # a bundle provides what is missing
        return staging and check.name in STAGEABLE_CHECKS and check.stageable

    return [r for r in reports if not all(c.ok or not c.blocks or staged(c) for c in r.checks)]


def require_usable_nodes(reports: Sequence[PreflightReport]) -> None:
    """Refuse to start on nodes that cannot run the job.

    Raises:
        EnvironmentNotAble: every failing node with its fix.
    """
    blocked = [
        PreflightReport(host=r.host, checks=[c for c in r.checks if c.ok or c.blocks]) for r in reports if not r.may_run
    ]
    if blocked:
        raise EnvironmentNotAble("nodes are not ready: " + "; ".join(failure_lines(blocked)))


def write_preflight(run_dir: RunDir, preflight: PreflightResult) -> None:
    """Write preflight.json and preflight.txt of a run."""
    write_json(run_dir.preflight, msgspec.to_builtins(preflight.reports))
    lines = [*(report.line() for report in preflight.reports), *failure_lines(preflight.reports)]
    write_text_atomic(run_dir.preflight_text, "\n".join(lines) + "\n")


def without_nodes(spec: RunSpec, hosts: Sequence[str], **counts: int) -> RunSpec:
    """Return the same run with nodes that it does not use; `counts` replaces other keys of the section cluster."""
    slurm = msgspec.structs.replace(spec.cluster.slurm, exclude=[*spec.cluster.slurm.exclude, *hosts])
    return msgspec.structs.replace(spec, cluster=msgspec.structs.replace(spec.cluster, slurm=slurm, **counts))


def exclude_nodes(spec: RunSpec, bad: Sequence[str], usable: int, facts: MachineFacts) -> RunSpec:
    """Return the same run without some nodes: with fewer spare ones, and with fewer others if the spec allows it.

    Args:
        usable: how many nodes are left.

    Raises:
        EnvironmentNotAble: no node is left, or the batch cannot be divided among the others.
    """
    left = min(spec.cluster.nodes, usable)
    names = ", ".join(bad)
    if left < 1:
        raise EnvironmentNotAble(f"without {names} no node is left")
    smaller = without_nodes(spec, bad, nodes=left, spares=usable - left)
    try:
        make_plan(smaller, facts)
    except SpecError as error:
        raise EnvironmentNotAble(f"the spec does not allow a run without {names}: {error}") from None
    return smaller
