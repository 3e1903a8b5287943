"""Rules for lists of nodes that are used compressed, or whole where the first node is meant."""

from __future__ import annotations

import re
from collections.abc import Iterator

from allranks.analysis.lint.command_options import slurm_options
from allranks.analysis.lint.job import JobDescription
from allranks.analysis.lint.placement import MPI
from allranks.analysis.lint.records import Argument, Assignment, ProgramCall, Violation
from allranks.utils.text import lazy_regex

NODE_LISTS = {"SLURM_JOB_NODELIST", "SLURM_NODELIST"}
LIST_WHY = "Slurm's list is compressed, node[01-04]: only Slurm's own commands, pdsh and clush read it."
LIST_CURE = 'for node in $(scontrol show hostnames "$SLURM_JOB_NODELIST"); do'


def compressed(job: JobDescription) -> Iterator[Violation]:
    """Report a compressed list of nodes in a loop, or as the hosts of mpirun and ssh."""
    if not job.is_batch or not job.multi_node:
        return
    for use in job.uses:
        if use.program == "for" and use.name in NODE_LISTS and not use.operator:
            yield Violation(use.offset, f"the loop runs once, over the compressed list ${use.name}")
    for call in job.calls:
        for arg, following in call.pairs():
            value = _hosts(call.program, arg, following)
            if value and any(value.strip("\"'").strip("${}") == name for name in NODE_LISTS):
                cure = '-H "$(scontrol show hostnames "$SLURM_JOB_NODELIST" | paste -sd,)"'
                yield Violation(arg.offset, f"{call.program} gets the compressed list {value} as its hosts", cure=cure)


def _hosts(program: str, arg: Argument, following: Argument | None) -> str | None:
    """Return the hosts that an option of mpirun, horovodrun or ssh names."""
    if program in MPI or program == "horovodrun":
        name, equals, value = arg.text.partition("=")
        if name in ("-H", "-host", "--host", "--hosts", "-hosts"):
            return value if equals else following.text if following else None
    return arg.text if program == "ssh" and "NODELIST" in arg.text else None


def node_list(job: JobDescription) -> Iterator[Violation]:
    """Report the whole list of nodes where the first node is meant."""
    lists: dict[str, Assignment] = {}
    for item in job.assignments:
        if item.removed:
            continue
        whole = _is_whole_list(item, lists)
        if whole and (item.items is None or (item.quoted_items and len(item.items) == 1)):
            lists[item.name] = item
        else:
            lists.pop(item.name, None)
    for name, item in lists.items():
        if any(u.name == name and u.index == "[0]" for u in job.uses):
            yield Violation(item.offset, f"${{{name}[0]}} is the whole list of nodes: {name} has one element")
    for item in job.assignments:
        addressed = re.search(r"MASTER_ADDR|(?:HEAD|MASTER)_(?:NODE|ADDR|IP|HOST)|RDZV_HOST", item.name, re.IGNORECASE)
        if addressed and job.multi_node and not item.removed and item.items is None:
            written = job.text[item.offset + len(item.name) : item.offset + 200].split("\n")[0]
            name = re.match(r"=\"?\$\{?(\w+)\}?\"?\s*(?:[;#]|\Z)", written)
            if (
                re.match(r"=\"?\$\(\s*scontrol\s+show\s+hostnames?(?:\s+\"?\$\{?\w+\}?\"?)?\s*\)", written)
                or HOST_FILE.match(written.removeprefix("=").removeprefix('"'))
                or (name and name[1] in lists)
            ):
                yield Violation(item.offset, f"{item.name} is the whole list of nodes")


HOST_FILE = lazy_regex(
    r"\$\(\s*(?:(?:cat|uniq|sort(?:\s+-u)?)\s+|<\s*)\"?\$\{?(?:PBS_NODEFILE|LSB_DJOB_HOSTFILE|COBALT_NODEFILE)\}?\"?"
    r"(?:\s*\|\s*(?:uniq|sort(?:\s+-u)?))*\s*\)"
)


def _is_whole_list(item: Assignment, lists: dict[str, Assignment]) -> bool:
    value = item.value.strip()
    if HOST_FILE.fullmatch(value):
        return True
    if re.fullmatch(r"\$\(\s*scontrol\s+show\s+hostnames?\b[^|]*\)", value):
        return True
    source = re.fullmatch(r"\$\{?(\w+)\}?", value)
    return bool(source and source[1] in lists)


FIXED_WHY = "The batch system chooses the nodes of the job: on another node the launcher fails, or starts processes outside of the job."
HOST_NAME = lazy_regex(r"(?!localhost|node\b|host\b)[A-Za-z][\w-]*\d[\w-]*(?:\.[\w-]+)*")


def fixed_hosts(job: JobDescription) -> Iterator[Violation]:
    """Report hosts with literal names in calls of mpirun, horovodrun and srun, in a job that asks for no such hosts."""
    if not job.is_job or job.submits or job.hosts is not None or "nodelist" in job.heading:
        return
    if job.pbs is not None and re.search(r"(?m)^#PBS\s.*\b(?:v?host|nodes)=[A-Za-z]", job.text):
        return
    for call in job.calls:
        if call.in_substitution:
            continue
        for arg, following in call.pairs():
            value = _hosts(call.program, arg, following) if call.program != "ssh" else None
            names = [part.partition(":")[0] for part in (value or "").split(",")]
            if value and all(HOST_NAME.fullmatch(name) for name in names) and not _may_run_there(job, call):
                text = f"{call.program} starts on {names[0]}, but Slurm may give the job any node"
                text = text if job.is_batch else text.replace("Slurm", "PBS")
                cure = "remove it: mpirun takes the hosts of the job" if call.program in MPI else "the hosts of the job"
                yield Violation(arg.offset, text, why=FIXED_WHY, cure=cure)
                return
        own = slurm_options(call).get("nodelist") if call.program == "srun" else None
        if own and own.value and HOST_NAME.fullmatch(own.value.split(",")[0]):
            text = f"srun asks for {own.value.split(',')[0]}, but Slurm may give the job any node"
            yield Violation(own.arg.offset, text, why=FIXED_WHY, cure="#SBATCH --nodelist=<the same hosts>")
            return


def _may_run_there(job: JobDescription, call: ProgramCall) -> bool:
    """Return whether the call is for a run outside of the job, in one of several branches."""
    return bool(call.branch) or call.in_function
