"""The whole way: ask every node, choose the network, let the nodes reach each other, judge, write."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import msgspec

from allranks.errors import EnvironmentNotAble, SpecError
from allranks.facts import MachineFacts
from allranks.planning import LaunchPlan, make_plan
from allranks.preflight import probe as prober
from allranks.preflight.checks import Need, Survey, judge
from allranks.preflight.network import ChosenNetwork, choose_network
from allranks.preflight.nodes import Answers, program, run_here, run_on_nodes, with_python
from allranks.preflight.port import candidates
from allranks.preflight.records import Check, FolderFacts, PreflightReport, Probe, Reach, Wish
from allranks.preflight.wish import make_wish, nonces
from allranks.rundir import RunDir, write_json, write_text_atomic
from allranks.spec.records import RunSpec

PROBE_LIMIT_S = 60.0
REACH_LIMIT_S = 30.0
RETRIES = 3
INTERFACE_NAMES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_UNREACHABLE = re.compile(r"failed on node ([^\s:]+)")


class Where(msgspec.Struct, frozen=True, kw_only=True):
    """The nodes to ask: a job's, through srun; without hosts, this machine."""

    prefix: list[str] = []
    """Words before srun; the box's, or none."""
    hosts: list[str] = []
    srun_args: list[str] = []
    """Such as ``--jobid=12``; nothing inside the allocation."""
    job_id: str = "local"
    cpus: int = 1
    """Cores of a node's task: those that the job has there."""

    def run(self, argv: list[str], timeout_s: float, text: str | None, only: Sequence[str] = ()) -> Answers:
        """A program on all nodes, or on some."""
        if not self.hosts:
            return run_here(argv, timeout_s, text)
        hosts = list(only) or self.hosts
        args = [*self.srun_args, f"--nodelist={','.join(hosts)}"]
        return run_on_nodes(self.prefix, len(hosts), argv, timeout_s, args, text=text, cpus=self.cpus)


class Preflight(msgspec.Struct, frozen=True, kw_only=True):
    """What was found out: the verdicts, and what the launcher goes on with."""

    reports: list[PreflightReport]
    probes: list[Probe]
    network: ChosenNetwork | None
    port: int | None
    """Free on the first node a moment ago."""
    probe_s: float
    reach_s: float

    @property
    def ok(self) -> bool:
        return all(report.ok for report in self.reports)

    @property
    def may_run(self) -> bool:
        """Nothing failed that a run cannot do without."""
        return all(report.may_run for report in self.reports)

    @property
    def bad_hosts(self) -> list[str]:
        return [report.host for report in self.reports if not report.ok]


def examine(
    where: Where, spec: RunSpec, plan: LaunchPlan, run_root: Path, *, imports: bool = True, wish: Wish | None = None
) -> Preflight:
    """Asks all nodes at once, and judges them. Two steps of srun: facts, then who reaches whom.

    `wish` replaces what the spec would ask for.
    """
    fixed = spec.cluster.rendezvous.port
    ports = [fixed] if fixed else candidates(where.job_id)
    asked = wish or make_wish(spec, run_root, ports=ports, imports=imports)
    with nonces(asked) as (asked, secrets):
        limit = PROBE_LIMIT_S + (asked.import_limit_s if asked.imports else 0)
        argv = with_python(asked.python, msgspec.to_builtins(asked))
        answers, silent = _ask(where, argv, limit, program("probe.py"))
        here = _own_folders(asked)
    lines = answers.by_host()
    probes = [msgspec.convert(line.facts(), Probe) for line in lines.values()]
    probes.sort(key=lambda probe: probe.node_id)
    network, network_error = _choose(probes, spec.cluster.rendezvous.interface)
    reach, reach_s = _reach(where, asked, probes, network)
    survey = Survey(
        probes=probes,
        wish=asked,
        need=_need(plan, fixed),
        network=network,
        network_error=network_error,
        reach=reach,
        nonces=secrets,
        remote=bool(where.hosts),
        received={host: line.received for host, line in lines.items()},
        here=here,
    )
    reports = [*(judge(survey) if probes else []), *silent]
    return Preflight(
        reports=reports,
        probes=probes,
        network=network,
        port=next(iter(probes[0].free_ports), None) if probes else None,
        probe_s=round(answers.seconds, 3),
        reach_s=round(reach_s, 3),
    )


def _need(plan: LaunchPlan, port: int | None) -> Need:
    threads = next((e.value for e in plan.environment if e.name == "OMP_NUM_THREADS"), None)
    return Need(
        procs_per_node=plan.procs_per_node,
        threads=int(threads) if threads and threads.isdigit() else None,
        device=plan.device,
        port=port,
        rank_memory_bytes=plan.rank_memory_bytes,
        named={
            e.name: e.value for e in plan.environment if e.name in INTERFACE_NAMES and e.value and e.source != "policy"
        },
    )


def _own_folders(wish: Wish) -> dict[str, FolderFacts]:
    """The launcher's own view of the same folders."""
    seen = {}
    for item in wish.folders:
        asked = msgspec.to_builtins(msgspec.structs.replace(item, write=False, nonce=None))
        value, error = prober.Later(prober.FOLDER_LIMIT_S, prober.folder, asked).get()
        seen[item.role] = msgspec.convert({**(value or {}), "error": error}, FolderFacts)
    return seen


def _choose(probes: list[Probe], wanted: str | None) -> tuple[ChosenNetwork | None, str | None]:
    if len(probes) < 2:
        return None, None
    try:
        return choose_network(probes, wanted), None
    except EnvironmentNotAble as error:
        return None, str(error)


def _reach(
    where: Where, wish: Wish, probes: list[Probe], network: ChosenNetwork | None
) -> tuple[dict[str, Reach] | None, float]:
    if network is None:
        return None, 0.0
    peers = {
        p.host: {
            "address": network.seats[p.host].address,
            "ports": sorted({*p.free_ports[:1], p.unused_port} - {0}),
        }
        for p in probes
    }
    argv = with_python(wish.python, {"peers": peers})
    answers = where.run(argv, REACH_LIMIT_S, program("reach.py"), [p.host for p in probes])
    found = {host: line.facts() for host, line in answers.by_host().items()}
    good = {host: msgspec.convert(facts, Reach) for host, facts in found.items() if facts and "unreached" in facts}
    return good, answers.seconds


def _ask(where: Where, argv: list[str], limit_s: float, text: str) -> tuple[Answers, list[PreflightReport]]:
    """Every node's line, and a report on each that gave none.

    Slurm ends the whole step if one node cannot be reached, so the others are asked again without it.
    """
    hosts, silent = where.hosts, []
    answers = where.run(argv, limit_s, text)
    for _ in range(RETRIES):
        unreachable = [host for host in hosts if host in _UNREACHABLE.findall(answers.said)]
        left = [host for host in hosts if host not in unreachable]
        if not unreachable or not left:
            break
        silent += _silent(unreachable, answers)
        hosts = left
        answers = where.run(argv, limit_s, text, hosts)
    lines = answers.by_host()
    return answers, [*silent, *_silent([host for host in hosts if host not in lines], answers)]


def _silent(hosts: Sequence[str], answers: Answers) -> list[PreflightReport]:
    """Nodes that gave no line, with what srun said of them."""
    reports = []
    for host in hosts:
        said = [text for text in answers.said.splitlines() if re.search(rf"\b{re.escape(host)}\b", text)]
        why = (said or answers.said.splitlines() or ["nothing was said"])[0].strip()
        cure = f"{host} did not answer within {answers.seconds:.0f} s ({why}): leave it out (--exclude-bad, cluster.slurm.exclude)"
        reports.append(PreflightReport(host=host, checks=[Check(name="probe", ok=False, found="NO-ANSWER", cure=cure)]))
    return reports


def text_line(report: PreflightReport) -> str:
    """``n1 proj=ok pkgs=ok py=3.11.7 ... OK``; a failing item is in capitals: ``pkgs=MISSING(torch)``."""
    items = " ".join(f"{check.name}={check.found}" for check in report.checks)
    return f"{report.host} {items} {'OK' if report.ok else 'FAIL'}"


def cures(reports: Sequence[PreflightReport]) -> list[str]:
    """One line a failed check: the node, what is wrong, what to do. The same words for several nodes come once."""
    bad = [(report.host, check) for report in reports for check in report.checks if not check.ok]
    hosts: dict[tuple[str, str], list[str]] = {}
    for host, check in bad:
        hosts.setdefault((check.name, check.cure), []).append(host)
    return [f"{', '.join(names)}: {name}: {cure}" for (name, cure), names in hosts.items()]


def require_nodes(reports: Sequence[PreflightReport]) -> None:
    """Refuse to start on nodes that a run cannot use.

    Raises:
        EnvironmentNotAble: every failing node with its cure.
    """
    blocked = [
        PreflightReport(host=r.host, checks=[c for c in r.checks if c.ok or c.blocks]) for r in reports if not r.may_run
    ]
    if blocked:
        raise EnvironmentNotAble("nodes are not ready: " + "; ".join(cures(blocked)))


def write(run_dir: RunDir, found: Preflight) -> None:
    """preflight.json and preflight.txt of a run."""
    write_json(run_dir.preflight, msgspec.to_builtins(found.reports))
    lines = [*map(text_line, found.reports), *cures(found.reports)]
    write_text_atomic(run_dir.preflight_text, "\n".join(lines) + "\n")


def without_bad(spec: RunSpec, bad: Sequence[str], facts: MachineFacts) -> RunSpec:
    """The same run without some nodes, if the spec allows fewer.

    Raises:
        EnvironmentNotAble: no node is left, or the batch cannot be shared out among the rest.
    """
    left = spec.cluster.nodes - len(bad)
    names = ", ".join(bad)
    if left < 1:
        raise EnvironmentNotAble(f"without {names} no node is left")
    slurm = msgspec.structs.replace(spec.cluster.slurm, exclude=[*spec.cluster.slurm.exclude, *bad])
    smaller = msgspec.structs.replace(spec, cluster=msgspec.structs.replace(spec.cluster, nodes=left, slurm=slurm))
    try:
        make_plan(smaller, facts)
    except SpecError as error:
        raise EnvironmentNotAble(f"the spec does not allow to go on without {names}: {error}") from None
    return smaller
