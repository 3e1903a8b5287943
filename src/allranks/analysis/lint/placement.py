"""Count the processes that srun, mpirun, jsrun and horovodrun start, in total and on each node."""

from __future__ import annotations

import re

import msgspec

from allranks.analysis.lint.command_options import slurm_options
from allranks.analysis.lint.job import SETS_PATHS_ONLY, JobDescription, LauncherCall
from allranks.analysis.lint.records import ProgramCall
from allranks.utils.text import lazy_regex

MPI = {"mpirun", "mpiexec", "mpiexec.hydra", "orterun"}
STARTERS = MPI | {"srun", "jsrun", "aprun", "horovodrun"}
# https://docs.open-mpi.org (mpirun), the mpiexec of MPICH, Intel MPI and HPE's PALS, https://docs.olcf.ornl.gov (jsrun)
TOTAL = {"-np", "--np", "-n", "--n"}
EACH = {"-ppn", "--ppn", "-npernode", "--npernode", "-N", "-perhost", "--perhost", "-rpn", "--rpn"}
PER_RESOURCE = lazy_regex(r"ppr:(\d{1,6}):node")


class Started(msgspec.Struct, frozen=True):
    """Processes that one command starts; None if the file does not show it."""

    starter: ProgramCall
    total: int | None = None
    per_node: int | None = None


def started_by(job: JobDescription, launch: LauncherCall) -> Started | None:
    """Return what the nearest program that starts several processes starts of this launch; None if there is no such program."""
    starter = next((c for c in reversed(launch.call.under) if c.program in STARTERS), None)
    if starter is None:
        return None
    if starter.program == "srun":
        each, nodes = job.tasks_per_node(starter), job.srun_nodes(starter)
        option = slurm_options(starter).get("ntasks")
        asked = job.number(option.value) if option else None
        return Started(starter, asked or (each * nodes if each and nodes else None), each)
    if starter.program == "jsrun":
        return _of_jsrun(job, starter)
    return _of_mpirun(job, starter)


def _of_mpirun(job: JobDescription, starter: ProgramCall) -> Started:
    total, each = count_of(job, starter, TOTAL), count_of(job, starter, EACH)
    mapped = next((found for a in starter.args if (found := PER_RESOURCE.search(a.text))), None)
    each = each or (int(mapped[1]) if mapped else None)
    nodes = 1 if starter.program == "horovodrun" and not names_hosts(starter) else job.nodes
    if total and nodes and each is None:
        each = -(-total // nodes)
    return Started(starter, total or (each * nodes if each and nodes else None), each)


PLACES = lazy_regex(
    r"-+(?:H|hosts?|hostfile|machinefile|f|configfile|app|map-by|bynode|pernode|ppn|npernode|perhost|N|rf|rankfile|bind-to|x?loadbalance|rr)(?:=.*)?"
)
OF_SCHEDULER = lazy_regex(r"\"?\$\{?(?:PBS_NODEFILE|LSB_DJOB_HOSTFILE|OAR_NODEFILE)\}?\"?")


def is_placed(call: ProgramCall) -> bool:
    """Return whether an option, or an unknown one, says where mpirun is to start its processes."""
    unknown = any(n is not None and n.is_open and not a.text.startswith("-") for a, n in call.pairs())
    return unknown or any(a.is_open or PLACES.fullmatch(a.text) for a in call.args)


OTHER_MPI = lazy_regex(r"\w+[_-](?:mpirun|mpiexec|srun)|(?:mpirun|mpiexec)[_-]\w+")
"""Commands of sites that start processes in place of mpirun."""


def is_one_of_several(job: JobDescription, call: ProgramCall) -> bool:
    """Return whether its count depends on the branch, or another command of the site starts the processes of the job."""
    names = re.findall(r"\$\{?(\w+)", job.line_of(call.offset))
    changing = any(len({a.value for a in job.by_name.get(name, ())}) > 1 for name in names)
    return changing or call.after in ("||", "&&") or any(OTHER_MPI.fullmatch(c.written) for c in job.calls)


def fills_first(job: JobDescription, starter: ProgramCall) -> tuple[int, int] | None:
    """Return the processes of an mpirun, as many as nodes, and how many of them its first node takes before the others get any."""
    total, slots = count_of(job, starter, TOTAL), slots_of_node(job)
    if starter.program not in MPI or not total or not slots or slots < 2 or total < 2 or total != job.nodes:
        return None
    if any(n is not None and n.is_open and not a.text.startswith("-") for a, n in starter.pairs()):
        return None
    for arg, following in starter.pairs():
        listed = re.fullmatch(r"-+(?:hostfile|machinefile|f)", arg.text)
        own = following is not None and OF_SCHEDULER.fullmatch(following.text)
        if PLACES.fullmatch(arg.text) and not (listed and own):
            return None
    return total, min(total, slots)


def slots_of_node(job: JobDescription) -> int | None:
    """Return the places for processes that the batch system gives mpirun on each node; None if a setting tells it otherwise."""
    if re.search(r"(?:OMPI|PRTE)_MCA_rmaps|(?:I_MPI|MPIEXEC)_PERHOST", job.code):
        return None
    if job.pbs is not None:
        return job.pbs.lines
    if job.hosts is not None:
        return None
    return job.number(job.heads("ntasks-per-node"))


def names_hosts(starter: ProgramCall) -> bool:
    """Return whether a horovodrun is told on which hosts to start its processes."""
    return any(re.match(r"-H\Z|--hosts\b|--?hostfile\b|--host-discovery", a.text) for a in starter.args)


def _of_jsrun(job: JobDescription, starter: ProgramCall) -> Started:
    sets, per_host = count_of(job, starter, {"-n", "--nrs"}), count_of(job, starter, {"-r", "--rs_per_host"})
    tasks = count_of(job, starter, {"-a", "--tasks_per_rs"}) or 1
    total = sets * tasks if sets else None
    each = per_host * tasks if per_host else -(-total // job.nodes) if total and job.nodes else None
    return Started(starter, total, each)


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


SETS_UP = lazy_regex(
    r"(?i)(?:env|set_?up|init|modules?|profile|rc|venv|conda|paths?|load_?\w*|exports?)(?:[._-]\w+)*\Z"
)


def sources_unknown(job: JobDescription) -> bool:
    """Return whether the script reads a file that may start programs on the other nodes: none that sets up an environment, by its name."""
    sourced = [c.args[0].text for c in job.calls if c.program in ("source", ".") and c.args]
    return job.sources_files and not all(SETS_UP.search(name) or SETS_PATHS_ONLY.search(name) for name in sourced)
