"""Rules for values that no shell expands or calculates, and for lists of nodes that nobody takes apart."""

from __future__ import annotations

import re
from collections.abc import Iterator

from allranks.analysis.lint.command_options import REMOTE_SHELLS
from allranks.analysis.lint.job import JobDescription, LauncherCall
from allranks.analysis.lint.placement import MPI
from allranks.analysis.lint.records import Argument, Assignment, Violation

TEXT_WHY = "srun starts the program without a shell, and single quotes or \\$ keep the batch shell from expanding it: the program gets the text."
TEXT_CURE = "srun bash -c '... $SLURM_NODEID ...', whose shell expands it in every task"
PRODUCT_WHY = (
    "The shell calculates only in $((...)): the program gets the text, and stops with 'invalid literal for int()'."
)
LIST_WHY = "Slurm's list is compressed, node[01-04]: only Slurm's own commands, pdsh and clush read it."
LIST_CURE = 'for node in $(scontrol show hostnames "$SLURM_JOB_NODELIST"); do'
ARRAY_WHY = "The list of nodes is one word with line breaks, so element 0 is the whole list, not the first node."
ARRAY_CURE = 'nodes=( $(scontrol show hostnames "$SLURM_JOB_NODELIST") ) without quotes around $(...); or head -n 1'
LITERAL = re.compile(
    r"\$\{?(SLURM_(?:NODEID|PROCID|LOCALID|NNODES|JOB_NUM_NODES|NTASKS|GPUS_ON_NODE|JOB_ID)|MASTER_ADDR|MASTER_PORT)\b"
)
RANK_NAMES = {"RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "WORLD_SIZE"}
COUNTS = ("nnodes", "nproc_per_node", "num_machines", "num_processes", "num_nodes", "num_gpus")
PRODUCT = re.compile(r"[\w${}#@\[\]]+[*+][\w${}#@\[\]]+")
LISTS = {"SLURM_JOB_NODELIST", "SLURM_NODELIST"}
OWN_SHELL = REMOTE_SHELLS | {"parallel", "xargs", "flux"}


def literal(job: JobDescription) -> Iterator[Violation]:
    """Report options and variables of tasks that are the text ``$NAME``, and products that nobody calculates."""
    for launch in job.launches:
        if not any(c.program in OWN_SHELL for c in launch.call.under):
            yield from _literal_options(launch)
        yield from _products(launch)
    if not any(la.kind == "python" for la in job.launches):
        return
    for item in job.assignments:
        if item.name not in RANK_NAMES or item.removed or item.name in job.used_names:
            continue
        text = item.source.text
        if LITERAL.fullmatch(text.rstrip("}")):
            yield Violation(item.offset, f"{item.name} is the text {text}: no shell expands it")
        elif item.name == "WORLD_SIZE" and _is_exported(job, item) and PRODUCT.fullmatch(item.value):
            cure = f"{item.name}=$(({item.value}))"
            yield Violation(item.offset, f"{item.name} is the text {item.value}", why=PRODUCT_WHY, cure=cure)


def _is_exported(job: JobDescription, item: Assignment) -> bool:
    return item.exported or item.name in job.reading.exported


def _literal_options(launch: LauncherCall) -> Iterator[Violation]:
    if launch.srun is None:
        return
    for arg in launch.call.args:
        found = LITERAL.search(arg.source.text)
        whole = found and re.fullmatch(r"(?:--?[\w-]+=)?(?:tcp://)?[\w.:${}]*", arg.source.text)
        if found and whole:
            yield Violation(
                arg.offset, f"the program gets the text {found[0]}{'}' if '{' in found[0] else ''}: no shell expands it"
            )
            return


def _products(launch: LauncherCall) -> Iterator[Violation]:
    for name in COUNTS:
        option = launch.option(name)
        value = (option.value or "").strip("\"'") if option else ""
        if option and PRODUCT.fullmatch(value) and re.search(r"[*+]", value):
            cure = f"{option.arg.text.partition('=')[0]} $(({value}))"
            yield Violation(option.arg.offset, f"--{name} is the text {value}", why=PRODUCT_WHY, cure=cure)


def compressed(job: JobDescription) -> Iterator[Violation]:
    """Report a compressed list of nodes in a loop, or as the hosts of mpirun and ssh."""
    if not job.is_batch or not job.multi_node:
        return
    for use in job.uses:
        if use.program == "for" and use.name in LISTS and not use.operator:
            yield Violation(use.offset, f"the loop runs once, over the compressed list ${use.name}")
    for call in job.calls:
        for arg, following in call.pairs():
            value = _hosts(call.program, arg, following)
            if value and any(value.strip("\"'").strip("${}") == name for name in LISTS):
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


HOST_FILE = re.compile(
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
