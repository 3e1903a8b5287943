"""Registration of rules, and facts that rules of several topics need."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator

import msgspec

from allranks.analysis.lint.command_options import slurm_options
from allranks.analysis.lint.job import JobDescription, LauncherCall
from allranks.analysis.lint.records import ProgramCall, Severity, Violation
from allranks.utils.text import lazy_regex

RuleCheck = Callable[[JobDescription], Iterable[Violation]]
ANY = ("script", "environment", "spec")


class LintRule(msgspec.Struct, frozen=True, kw_only=True):
    """One rule: what happens (`why`), what to write (`cure`), where this is documented, and an example for its page.

    Tests lint both sides of every example, a fragment without ``#!`` in a batch script of two nodes.
    """

    id: str
    severity: Severity
    checks: list[RuleCheck]
    why: str
    cure: str
    source: str
    bad: str
    good: str
    files: tuple[str, ...]  # kinds of files it applies to

    def check(self, job: JobDescription) -> Iterator[Violation]:
        """Yield what all its checks find; of one place only the first."""
        places: set[int] = set()
        for part in self.checks:
            hits = [hit for hit in part(job) if hit.offset not in places]
            places.update(hit.offset for hit in hits)
            yield from hits


RULES: dict[str, LintRule] = {}
"""All rules by their ids, in the order of the topics."""


def _registering(severity: Severity) -> Callable[..., Callable[[RuleCheck], RuleCheck]]:
    """Return a decorator with the texts of a rule, which it registers with its first check."""

    def with_texts(
        id: str, *, cure: str = "", files: tuple[str, ...] = ("script",), **texts: str
    ) -> Callable[[RuleCheck], RuleCheck]:
        def register(check: RuleCheck) -> RuleCheck:
            RULES[id] = LintRule(id=id, severity=severity, checks=[check], cure=cure, files=files, **texts)
            return check

        return register

    return with_texts


error, warning, note = _registering("error"), _registering("warning"), _registering("note")


def also(id: str) -> Callable[[RuleCheck], RuleCheck]:
    """Add a check to a rule that is registered further up."""

    def register(check: RuleCheck) -> RuleCheck:
        RULES[id].checks.append(check)
        return check

    return register


STARTER_OPTION = lazy_regex(r"=[\"']?(?:srun|slurm|mpirun|mpiexec|aprun)\b")
"""Tells the program what it should start its own processes with."""
FIRST_WITHOUT_CPUS, FIRST_WITH_CPUS_AGAIN = (22, 5), (23, 11)
SPREADING = {
    "pbsdsh", "pbs_tmrsh", "blaunch", "srun", "mpirun", "mpiexec", "ssh", "pdsh", "clush", "parallel", "aprun", "jsrun",
    "lrun", "flux", "orterun", "mpiexec.hydra", "ibrun", "prun", "mpirun_rsh", "likwid-mpirun", "ddlrun",
}  # fmt: skip


def _launching(job: JobDescription):
    """Return the sruns that start ranks, each once."""
    steps = {id(la.srun): la.srun for la in job.launches if la.srun}
    return list({s.offset: s for s in steps.values() if s}.values())


def tasks_of_node(job: JobDescription) -> int | None:
    """Return the tasks per node that the job requests; None if they may be distributed unevenly."""
    per_node = job.number(job.heads("ntasks-per-node"))
    if per_node or "ntasks-per-node" in job.heading:
        return per_node
    if "ntasks" in job.heading:
        tasks = job.number(job.heads("ntasks"))
        even = tasks and job.nodes and tasks % job.nodes == 0
        return tasks // job.nodes if even and tasks and job.nodes else None
    return None if job.heading.keys() & {"ntasks-per-gpu", "ntasks-per-socket"} else 1


MPI = {"mpirun", "mpiexec", "mpiexec.hydra", "orterun"}
STARTERS = MPI | {"srun"}
# https://docs.open-mpi.org (mpirun), the mpiexec of MPICH, Intel MPI and HPE's PALS
TOTAL = {"-np", "--np", "-n", "--n"}
EACH = {"-ppn", "--ppn", "-npernode", "--npernode", "-N", "-perhost", "--perhost", "-rpn", "--rpn"}
PER_RESOURCE = lazy_regex(r"ppr:(\d{1,6}):node")


class Started(msgspec.Struct, frozen=True):
    """Processes that one command starts; None if the file does not show it."""

    starter: ProgramCall
    total: int | None = None
    per_node: int | None = None


def started_by(job: JobDescription, launch: LauncherCall) -> Started | None:
    """Return what the nearest program that starts several processes starts of this launch; None without one."""
    starter = next((c for c in reversed(launch.call.under) if c.program in STARTERS), None)
    if starter is None:
        return None
    if starter.program == "srun":
        each, nodes = job.tasks_per_node(starter), job.srun_nodes(starter)
        option = slurm_options(starter).get("ntasks")
        tasks = job.number(option.value) if option else None
        return Started(starter, tasks or (each * nodes if each and nodes else None), each)
    total, each = count_of(job, starter, TOTAL), count_of(job, starter, EACH)
    mapped = next((match for a in starter.args if (match := PER_RESOURCE.search(a.text))), None)
    each = each or (int(mapped[1]) if mapped else None)
    if total and job.nodes and each is None:
        each = -(-total // job.nodes)
    return Started(starter, total or (each * job.nodes if each and job.nodes else None), each)


def count_of(job: JobDescription, call: ProgramCall, names: set[str]) -> int | None:
    """Return the number that an option has: ``-n 4``, ``-n4``, ``--nrs=4``."""
    for arg, following in call.pairs():
        name, equals, value = arg.text.partition("=")
        if name in names:
            return job.number(value if equals else following.text if following else None)
        glued = re.fullmatch(r"(-[a-zA-Z])(\d{1,6})", arg.text)
        if glued and glued[1] in names:
            return int(glued[2])
    return None
