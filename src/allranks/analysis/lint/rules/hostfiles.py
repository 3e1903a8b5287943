"""Rules for lists of hosts: the files that deepspeed reads, and what its options choose of them."""

from __future__ import annotations

import re
from collections.abc import Iterator

from allranks.analysis.lint.command_options import Option, slurm_options
from allranks.analysis.lint.job import JobDescription, LauncherCall
from allranks.analysis.lint.placement import slots_of_node
from allranks.analysis.lint.records import ProgramCall, Violation
from allranks.utils.text import lazy_regex

HOSTFILE_WHY = "deepspeed reads lines of the form '<host> slots=<GPUs>' and stops at any other, or takes only the hosts that it understands."
HOSTFILE_CURE = 'for host in $(scontrol show hostnames); do echo "$host slots=8"; done > hostfile.$SLURM_JOB_ID'
WRITES = {"echo", "printf", "cat", "scontrol", "sed", "awk", "cp", "tee", "sort", "uniq", "head"}


def _hostfile(launch: LauncherCall) -> Option | None:
    return launch.option("hostfile", "H") if launch.kind == "deepspeed" else launch.option("deepspeed_hostfile")


def _writers(job: JobDescription, name: str) -> list[tuple[ProgramCall, str]]:
    """Return the commands that write a file, each with its operator."""
    return [
        (call, redirect.operator)
        for call in job.calls
        if not call.in_substitution
        for redirect in call.redirects
        if redirect.operator in (">", ">>") and redirect.target.strip("\"'") == name
    ]


LIST_NAME = lazy_regex(r"(?i)(?:host|node|machine)[\w-]*(?:file|list|s)?(?:\.\w+)?\Z")


def one_line(job: JobDescription) -> Iterator[Violation]:
    """Report ``\\n`` that echo writes into a list of hosts as it is."""
    if not re.match(r"#!\s*\S*(?:/|env\s+)bash\b", job.lines.line(1)):
        return
    for call in job.calls:
        flags = any(re.fullmatch(r"-\w*e\w*", a.text) for a in call.args[:2])
        target = next((r.target.strip("\"'") for r in call.redirects if r.operator in (">", ">>")), "")
        if call.program != "echo" or flags or call.in_substitution or not LIST_NAME.search(target):
            continue
        literal = any(re.search(r"\S\\n(?:\S|\Z)", a.text) for a in call.args)
        if literal and "xpg_echo" not in job.text:
            text = f"echo writes \\n as two characters: {target} has one line"
            yield Violation(call.offset, text, cure="echo -e, or printf '%b'")
            return


NODE_LIST = lazy_regex(r"\$\{?(?:SLURM_(?:JOB_)?NODELIST|SLURM_STEP_NODELIST|LSB_HOSTS)\}?")
LIST_WHY = (
    "The option takes a file. There is none of this name: deepspeed goes on with this node alone, and mpirun stops."
)


def list_as_file(job: JobDescription) -> Iterator[Violation]:
    """Report the list of Slurm's nodes where the name of a host file is wanted."""
    for call in job.calls:
        for arg, following in call.pairs():
            name, equals, value = arg.text.partition("=")
            value = value if equals else following.text if following else ""
            if re.fullmatch(r"--?(?:hostfile|machinefile|hostsfile)", name) and NODE_LIST.fullmatch(value.strip("\"'")):
                cure = 'scontrol show hostnames "$SLURM_JOB_NODELIST" > hosts.$SLURM_JOB_ID, and its name here'
                yield Violation(arg.offset, f"{name} {value} is a list of nodes, no file", why=LIST_WHY, cure=cure)
                return


def host_lines(job: JobDescription) -> Iterator[Violation]:
    """Report a host file of deepspeed that the script writes in another form, or into which it writes ``\\n``."""
    for launch in job.launches:
        option = _hostfile(launch)
        name = option.plain_value if option else ""
        if not name or launch.option("no_ssh"):
            continue
        writers = _writers(job, name)
        form = re.compile(r"slots=")
        if writers and not form.search(job.text) and all(c.program in WRITES for c, _ in writers):
            text = f"{name} has no slots=<GPUs>, without which deepspeed does not read it"
            yield Violation(writers[0][0].offset, text)
            return
        hosts = [(c, o) for c, o in writers if c.in_loop and c.program in ("echo", "printf")]
        if hosts and hosts[0][1] == ">" and not hosts[0][0].in_function:
            text = f"each run of the loop truncates {name}: only the last host is left"
            yield Violation(hosts[0][0].offset, text, cure=f"done > {name}, or >> after : > {name}")
            return
        first = writers[0] if writers else None
        if first and first[1] == ">>" and re.fullmatch(r"[\w./~-]+", name) and not _emptied(job, name, first[0]):
            text = f"{name} is never emptied: the next run adds its hosts to those of this one"
            yield Violation(
                first[0].offset, text, why=GROWS_WHY, cure=f"rm -f {name} first, or a name with the job's id"
            )
            return


GROWS_WHY = "deepspeed refuses a host that stands in the file twice, and tries to reach hosts of earlier jobs."


def _emptied(job: JobDescription, name: str, before: ProgramCall) -> bool:
    for call in job.calls:
        words = [a.text for a in call.args]
        if call.program in ("rm", "truncate", "mktemp", "unlink", "mv") and any(
            w == name or w.endswith("*") or name.startswith(w.rstrip("/") + "/") for w in words
        ):
            return True
        if call.offset < before.offset and any(
            r.operator == ">" and r.target.strip("\"'") == name for r in call.redirects
        ):
            return True
    return re.search(r"(?m)^\s*:?\s*>\s*[\"']?" + re.escape(name), job.text) is not None or "/tmp/" in name


INCLUDE_WHY = "deepspeed stops: it wants host1:0,1@host2:0,1, with @ between the hosts."


def include_form(job: JobDescription) -> Iterator[Violation]:
    """Report ``--include`` and ``--exclude`` whose hosts are separated by commas or blanks."""
    for launch in job.launches:
        option = launch.option("include", "i", "exclude", "e") if launch.kind == "deepspeed" else None
        value = option.plain_value if option else ""
        parts = value.split("@")
        if option and any(p.count(":") > 1 for p in parts) and not re.search(r"[\[\]$]", value):
            name = option.written
            yield Violation(
                option.arg.offset,
                f"{name} {value}: the hosts are not separated by @",
                why=INCLUDE_WHY,
                cure=re.sub(r"[,; ]+(?=[A-Za-z])", "@", value),
            )


TWICE_WHY = "deepspeed itself starts the ranks of all hosts: started on each of them, it starts every rank as often as there are nodes."
TWICE_CURE = "deepspeed without srun, with a host file; or srun torchrun; or --no_ssh --node_rank=$SLURM_NODEID"


def on_every_node(job: JobDescription) -> Iterator[Violation]:
    """Report a deepspeed that starts the ranks of all nodes itself, and that srun starts on each of them."""
    for launch in job.launches:
        if launch.kind != "deepspeed" or launch.srun is None or launch.open_ended or launch.open_srun:
            continue
        if (
            launch.option("hostfile", "H") is None
            or launch.option("no_ssh", "node_rank")
            or launch.srun.in_loop
            or launch.srun.in_function
            or launch.srun.after == "&"
        ):
            continue
        nodes, own = job.srun_nodes(launch.srun), slurm_options(launch.srun)
        total = own.get("ntasks")
        if not nodes or nodes < 2 or own.keys() & {"nodelist", "relative"} or (total and total.value == "1"):
            continue
        if (job.tasks_per_node(launch.srun) or 1) > 1 or re.search(
            r"SLURM_(?:NODEID|PROCID)", job.line_of(launch.call.offset)
        ):
            continue
        yield Violation(
            launch.srun.offset, f"srun starts deepspeed on all {nodes} nodes", why=TWICE_WHY, cure=TWICE_CURE
        )
        return


# ------------------------------------------------------------------- the batch system's list of nodes

LISTED_WHY = "$PBS_NODEFILE has a line for each process that a node may have (ppn, or mpiprocs), so it names each node several times."
LISTED_CURE = "sort -u $PBS_NODEFILE"
NODE_LINES = lazy_regex(
    r"(?:cat\s+\"?\$\{?PBS_NODEFILE\}?\"?\s*\|\s*wc\s+-l|wc\s+-l\s*<?\s*\"?\$\{?PBS_NODEFILE\}?\"?)(?:\s*\|\s*(?:awk|cut)\b[^|)`]*)?\s*[)`]"
)
NODE_LOOP = lazy_regex(r"(?m)^[ \t]*for\s+\w+\s+in\s+(?:\$\(|`)\s*(?:cat\s+|<\s*)\"?\$\{?PBS_NODEFILE\}?\"?\s*[)`]")


def repeated_nodes(job: JobDescription) -> Iterator[Violation]:
    """Report a number of nodes that counts the lines of ``$PBS_NODEFILE``, and a loop that starts a launcher for each line."""
    each = slots_of_node(job)
    if job.pbs is None or not each or each < 2:
        return
    for launch in job.launches:
        option = launch.option("nnodes", "num_machines", "num_nodes")
        value = option.value or "" if option else ""
        if option and (NODE_LINES.search(value + ")")):
            text = f"{option.written} counts the lines of $PBS_NODEFILE, which names each node {each} times"
            start = launch.call.args.index(option.arg)
            word = option.arg if "=" in option.arg.text else launch.call.args[start + 1]
            yield Violation(word.source.where(len(word.source.text) - 1), text, why=LISTED_WHY, cure=LISTED_CURE)
    found = NODE_LOOP.search(job.text)
    if found and not job.in_comment(found.start()):
        end = job.text.find("\ndone", found.end())
        remote = [c for c in job.calls if c.program in ("ssh", "pbsdsh", "rsh") and found.end() < c.offset < end]
        started = {c.offset for la in job.launches for c in la.call.under}
        if remote and remote[0].offset in started:
            text = f"the loop starts a launcher for each line of $PBS_NODEFILE, which names each node {each} times"
            yield Violation(found.start(), text, why=LISTED_WHY, cure=LISTED_CURE)


# ------------------------------------------------------------------------------ files of addresses

STALE_WHY = (
    "A file that an earlier run left, because it was killed, or that another job writes, has the address of another host: the ranks wait "
    "there until the timeout."
)
STALE_CURE = "a name with the job's id, such as $SLURM_JOB_ID"
AWAITED = lazy_regex(r"(?m)^[ \t]*(?:while|until)\s+(?:!\s*)?(?:\[\[?|test)\s+(?:!\s+)?-[efs]\s+\"?([^\s\"\];]+)")
OF_ONE_JOB = lazy_regex(
    r"(?i)job_?id|jobid|\$\$|mktemp|\bdate\b|\$\(|uuid|random|\$\{?\d|SLURM|PBS_|run_?id|stamp|tmpdir"
)


STATE_FILE = lazy_regex(r"(?i)(?:scheduler|addr|host|head|rendezvous|rdzv|master|port|(?<![a-z])ip(?![a-z]))[^/]*\Z")


def _is_told(call: ProgramCall, name: str) -> bool:
    """Return whether a program is told a file by an option: ``--scheduler-file=F``, ``--scheduler-file F``."""
    return any(
        a.text.startswith("-") and (a.text.partition("=")[2] == name or (n is not None and n.text == name))
        for a, n in call.pairs()
    )


def stale_address(job: JobDescription) -> Iterator[Violation]:
    """Report a file with a fixed name by which the first rank tells the others its address."""
    for found in AWAITED.finditer(job.text):
        if job.in_comment(found.start()):
            continue
        name = re.fullmatch(r"\$\{?(\w+)\}?", found[1])
        items = job.by_name.get(name[1], []) if name else []
        value = items[0].value if len(items) == 1 else "" if name else found[1]
        if not value or OF_ONE_JOB.search(value) or "$" in value:
            continue
        writers = _writers(job, value)
        told = [
            c
            for c, _ in writers
            if c.branch and re.search(r"(?i)addr|host|ip\b|node", " ".join(a.text for a in c.args))
        ]
        if STATE_FILE.search(value):
            told += [c for c in job.calls if c.starter.after == "&" and c.offset < found.start() and _is_told(c, value)]
        if not told or any(
            c.program in ("rm", "unlink", "mv") and c.offset < told[0].offset and any(a.text == value for a in c.args)
            for c in job.calls
        ):
            continue
        place = items[0].offset if items else found.start(1)
        text = f"{value}, by which the ranks learn the address of the first, has the same name in every job"
        yield Violation(place, text, why=STALE_WHY, cure=STALE_CURE, severity="warning")
        return
