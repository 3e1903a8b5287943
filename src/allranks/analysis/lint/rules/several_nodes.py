"""Rules for launches on several nodes: the nodes of a step, launchers without a list of hosts, and containers with a network of their own."""

from __future__ import annotations

import re
from collections.abc import Iterator

from allranks.analysis.lint.command_options import Option, slurm_option, slurm_options
from allranks.analysis.lint.job import NODE_NAMES, JobDescription, LauncherCall
from allranks.analysis.lint.records import Assignment, ProgramCall, Violation
from allranks.utils.text import lazy_regex

# -------------------------------------------------------------------------------- the nodes of a step

STEP_WHY = (
    "A step has as many nodes and tasks as the job, unless -N and -n say otherwise: -w only names nodes that it has to contain, "
    "and -N leaves the number of tasks as it is."
)
STEP_CURE = "srun -N 1 -n 1 -w <host> ..."
TASK_NAMES = {"SLURM_NTASKS", "SLURM_NPROCS", "SLURM_NTASKS_PER_NODE"}
OTHER_JOB = {"jobid", "het-group", "pack-group", "relative", "nodefile", "ntasks-per-gpu"}
ONE_HOST = lazy_regex(
    r"\$\{?[1-9]\}?|[A-Za-z][\w.-]*|\$\{\w+\[[^@*\]]+\]\}|\$\(hostname[^|)]*\)|\$\{?(?:HOSTNAME|SLURMD_NODENAME)\}?|"
    r"\$\(.*\|\s*(?:head\s+-n?\s*1|sed\s+-n\s+[\"']?\d+p[\"']?)\s*\)|`.*\|\s*head\s+-n?\s*1\s*`"
)


def step_nodes(job: JobDescription) -> Iterator[Violation]:
    """Report srun with one of several nodes, but the tasks of all: ``srun -w node2 program``, ``srun -N 1 program``."""
    nodes = job.nodes
    if not job.is_batch or not nodes or nodes < 2 or re.search(r"(?m)^#SBATCH\s+(?:hetjob|packjob)", job.text):
        return
    if any(a.name in NODE_NAMES | TASK_NAMES for a in job.assignments):
        return
    for call in job.calls:
        options = slurm_options(call) if call.program == "srun" else {}
        if not options or "ntasks" in options or options.keys() & OTHER_JOB or _has_unknown_options(call):
            continue
        if any(c.program in ("ssh", "pdsh", "clush", "env", "srun") for c in call.under):
            continue
        asked, named = options.get("nodes"), options.get("nodelist")
        if asked is not None:
            yield from _tasks_of_all(job, asked, nodes)
        elif named is not None and _is_one_host(job, named):
            text = (
                f"{named.written} names one node, but without -N 1 -n 1 the step runs on all {nodes} nodes of the job"
            )
            yield Violation(call.offset, text)


def _has_unknown_options(call: ProgramCall) -> bool:
    """Return whether a word that is no option's value may hold options: ``srun $ARGS``, not ``srun -w $node``."""
    value = False
    for arg in call.args:
        if arg.is_open and not value:
            return True
        value = arg.text.startswith("-") and slurm_option(arg.text)[2]
    return False


def _tasks_of_all(job: JobDescription, asked: Option, nodes: int) -> Iterator[Violation]:
    count, total = job.number(asked.value), job.number("$SLURM_NTASKS")
    if count and total and count < nodes and total > count:
        each = -(-total // count)
        text = f"srun on {count} of {nodes} nodes, but with all {total} tasks of the job: {each} on a node, or it is refused"
        cure = f"-n {max(1, total * count // nodes)} too"
        yield Violation(asked.arg.offset, text, cure=cure)


WRITTEN = lazy_regex(r"(?:-w|--nodelist)(?:[=\s]|\\\n)*[\"']?([^\s\"']+|\$\([^)]*\))")


def _is_one_host(job: JobDescription, named: Option) -> bool:
    """Return whether the word is one host's name: an element of an array, a loop's variable, or a name."""
    found = WRITTEN.match(job.text, named.arg.offset)
    if found is None:
        return False
    name = re.fullmatch(r"\$\{?(\w+)\}?", found[1])
    if name is None or name[1] in ("HOSTNAME", "SLURMD_NODENAME"):
        return ONE_HOST.fullmatch(found[1]) is not None
    given = [_as_written(job, a) for a in job.by_name.get(name[1], ())]
    looped = re.search(rf"\bfor\s+{name[1]}\s+in\s|\bread\s+(?:-r\s+)?{name[1]}\b", job.code)
    return bool(given or looped) and all(ONE_HOST.fullmatch(v) for v in given)


def _as_written(job: JobDescription, item: Assignment) -> str:
    found = re.compile(rf"(?m){item.name}=[\"']?([^\n;]*?)[\"']?[ \t]*(?:;|#.*|$)").match(job.text, item.offset)
    return found[1] if found else ""


DRIVER_WHY = (
    "Every task is a driver of its own: all of them submit the same work to the one cluster, and write the same files."
)


def ray_drivers(job: JobDescription) -> Iterator[Violation]:
    """Report a driver of Ray that srun starts once per node, behind the steps of the head and the workers."""
    nodes = job.nodes or 1
    if not job.is_batch or nodes < 2 or not re.search(r"\bray\b|start[-_]worker", job.code):
        return
    steps = [c for c in job.calls if c.program == "srun" and not c.in_substitution and not c.in_function]
    single = [c for c in steps if c.after == "&" and slurm_options(c).keys() & {"nodelist", "relative"}]
    for call in steps:
        options = slurm_options(call)
        if not single or call.offset < max(c.offset for c in single) or call.after == "&" or call.in_loop:
            continue
        if options.keys() & {"nodes", "ntasks", "nodelist", "relative", *OTHER_JOB} or _has_unknown_options(call):
            continue
        inner = [c for c in job.calls if call in c.under]
        if any(c.program in ("ray", "bash", "sh", "rm", "mkdir", "hostname", "cp", "sleep", "echo") for c in inner):
            continue
        tasks = job.number("$SLURM_NTASKS") or nodes
        if tasks > 1 and inner:
            text = f"srun starts the driver {tasks} times, once per task of the job"
            yield Violation(
                call.offset, text, why=DRIVER_WHY, cure="start it without srun; or srun -N 1 -n 1 --overlap"
            )
            return


# ------------------------------------------------------------------------- launchers without hosts

NO_HOSTS_WHY = "deepspeed learns of other nodes from a host file only, and stops: 'Num nodes is >1 but no extra nodes available via hostfile'."
NO_HOST_WHY = "deepspeed stops: 'Hostname ... not found in hostfile'."
NO_HOSTS_CURE = "--hostfile=<file>; or start a launcher on every node: srun --ntasks-per-node=1 torchrun ..."


OTHER_HOST = lazy_regex(r"(?!localhost\b|127\.)[A-Za-z][\w.-]*(?::[\d,]+)?(?:@[A-Za-z][\w.-]*(?::[\d,]+)?)*")


def without_hosts(job: JobDescription) -> Iterator[Violation]:
    """Report ``deepspeed --num_nodes 2`` and ``--include node1:0,1`` without a host file."""
    for launch in job.launches:
        count, chosen = launch.option("num_nodes"), launch.option("include", "i")
        if launch.kind != "deepspeed" or not (count or chosen) or launch.open_ended:
            continue
        if launch.options.keys() & {"hostfile", "H", "no_ssh", "launcher", "help"} or "/job/hostfile" in job.text:
            continue
        if chosen and OTHER_HOST.fullmatch(chosen.plain_value):
            text = f"{chosen.written} {chosen.plain_value}: without --hostfile deepspeed knows localhost only"
            yield Violation(chosen.arg.offset, text, why=NO_HOST_WHY, cure="--hostfile=<file>")
        nodes = job.number(count.value) if count else None
        if count and nodes and nodes > 1 and "DLTS_HOSTFILE" not in job.text:
            text = f"{count.written} is {nodes}, and there is no --hostfile"
            yield Violation(count.arg.offset, text, why=NO_HOSTS_WHY, cure=NO_HOSTS_CURE)


BACKENDS = {"c10d", "static", "etcd", "etcd-v2"}
BACKEND_WHY = (
    "torchrun knows c10d, static, etcd and etcd-v2, and stops with 'The rendezvous backend ... is not registered'."
)
PORT_WHY = "The address ends at the blank: torchrun takes the port for the program that it has to start."
CUT_ADDRESS = lazy_regex(
    r"--(?:rdzv[-_]endpoint|master[-_]addr|main[-_]process[-_]ip)(?:=|[ \t]+)(?:[\"']?[\w.${}\[\]-]+[\"']?:?)[ \t]+"
    r"([\"']?\$\{?\w*(?:PORT|port)\w*\}?[\"']?|\d{4,5})(?=[ \t\\\n])"
)


def rendezvous_words(job: JobDescription) -> Iterator[Violation]:
    """Report backends that torchrun does not have, and a port that a blank cuts off from its address."""
    for launch in job.launches:
        if launch.kind not in ("torchrun", "torch.distributed.launch", "accelerate"):
            continue
        backend = launch.option("rdzv_backend")
        if backend and re.fullmatch(r"[A-Za-z][\w-]*", backend.plain_value) and backend.plain_value not in BACKENDS:
            text = f"{backend.written} {backend.plain_value}: there is no such rendezvous"
            yield Violation(backend.arg.offset, text, why=BACKEND_WHY, cure=f"{backend.written}=c10d")
        address = launch.option("rdzv_endpoint", "master_addr", "main_process_ip")
        cut = CUT_ADDRESS.match(job.text, address.arg.offset) if address else None
        if cut and address and not job.text[: cut.start()].endswith('"'):
            text = f"{address.written} ends at the blank: {cut[1]} is taken for the program"
            cures = {"rdzv": f"<host>:{cut[1]}", "main": f"--main_process_port={cut[1]}"}
            cure = next((c for name, c in cures.items() if name in address.written), f"--master_port={cut[1]}")
            yield Violation(address.arg.offset, text, why=PORT_WHY, cure=cure)


COUNTED = lazy_regex(
    r"\bfor[ \t]*\(\([ \t]*(\w+)[ \t]*=[ \t]*(\d+)[ \t]*;[ \t]*\1[ \t]*<=[ \t]*([^;\n]+?)[ \t]*;|"
    r"\bfor[ \t]+(\w+)[ \t]+in[ \t]+(?:(?:\$\(|`)[ \t]*seq[ \t]+(\d+)[ \t]+([^)`\n]+?)[ \t]*[)`]|\{(\d+)\.\.(\d+)\}|(?:\d+[ \t]+)+(\d+)[ \t]*[;\n])"
)
RANK_WHY = "Ranks of nodes count from 0 to one less than their number: the launcher refuses the last one, and the others wait for the missing node."


def ranks_of_loop(job: JobDescription) -> Iterator[Violation]:
    """Report a loop whose last value, used as the rank of a node, is the number of nodes."""
    for launch in job.launches:
        option, nodes = launch.option("node_rank", "machine_rank"), launch.option("nnodes", "num_machines")
        if option is None or nodes is None or not launch.call.starter.in_loop:
            continue
        name = re.match(
            r"--\w+(?:=|[ \t]+)[\"'\\]*\$\{?(\w+)\}?(?![\w-])", job.text[option.arg.offset : option.arg.offset + 80]
        )
        loops = [
            m for m in COUNTED.finditer(job.code, 0, launch.call.starter.offset) if name and name[1] in (m[1], m[4])
        ]
        if not loops:
            continue
        last = next(loops[-1][n] for n in (3, 6, 8, 9) if loops[-1][n])
        count = job.number(nodes.value)
        bare = [re.sub(r"[${}\"' ]", "", t) for t in (last, nodes.value or "")]
        same = bare[0] == bare[1] or {*bare} <= NODE_NAMES or (count is not None and job.number(last) == count)
        if same and count != 0:
            text = f"{option.written} is {last} in the last run of the loop, as many as there are nodes"
            yield Violation(option.arg.offset, text, why=RANK_WHY, cure="a loop from 0 to one less")


RANKS_WHY = "Every host gets the same command, and with it the same rank: the nodes wait for the ranks that nobody has."
UNSET_WHY = "The variable is empty: the launcher takes the next option for the rank, and stops."
TO_MANY = {"pdsh", "clush", "pssh", "parallel-ssh"}


def rank_of_hosts(job: JobDescription) -> Iterator[Violation]:
    """Report one rank in a command for many hosts, and a rank from a variable that nothing sets."""
    for launch in job.launches:
        option, nodes = launch.option("node_rank", "machine_rank"), launch.option("nnodes", "num_machines")
        if option is None or nodes is None:
            continue
        sender = next((c for c in launch.call.under if c.program in TO_MANY), None)
        many = sender and re.search(r"[,\[^]|(?:^| )-[ag]\b|-h ", " ".join(a.text for a in sender.args[:4]))
        if sender and many and (option.value or "").isdecimal() and (job.number(nodes.value) or 2) > 1:
            text = f"{option.written} is {option.value} on all hosts of {sender.program}"
            yield Violation(
                option.arg.offset, text, why=RANKS_WHY, cure="a loop over the hosts with ssh and a rank for each"
            )
        name = re.match(
            r"--\w+(?:=|[ \t]+)[\"']?\$\{?([a-z]\w*)\}?(?![\w-])", job.text[option.arg.offset : option.arg.offset + 80]
        )
        if name and not job.sources_files and not job.has(name[1]) and not _may_be_set(job, name[1]):
            text = f"{option.written} ${name[1]}: nothing sets {name[1]}"
            yield Violation(option.arg.offset, text, why=UNSET_WHY, cure="a number that a loop counts")


def _may_be_set(job: JobDescription, name: str) -> bool:
    """Return whether another command than an assignment may set the variable."""
    setters = r"for|read|select|getopts|local|declare|typeset|let|mapfile|readarray|export|printf[ \t]+-v"
    return (
        re.search(rf"\b(?:{setters})\b[^\n]*\b{name}\b|\(\([^\n]*\b{name}\b|\b{name}=|\b{name}:?=", job.text)
        is not None
    )


SEQUENCE_WHY = "ssh returns when the command on the other host has ended, and that command waits for the nodes that the loop starts later."
RANK_GIVEN = lazy_regex(r"\b(?:NODE_RANK|MACHINE_RANK|RANK|GROUP_RANK)=[\"']?\$|--(?:node|machine)[-_]rank[= ][\"']?\$")


def scripts_in_sequence(job: JobDescription) -> Iterator[Violation]:
    """Report a loop of ssh in the foreground that gives each host its rank."""
    started = {c.offset for launch in job.launches for c in launch.call.under}
    for call in job.calls:
        if (
            call.program != "ssh"
            or not call.in_loop
            or call.in_function
            or call.in_substitution
            or call.offset in started
        ):
            continue
        words = [a.text for a in call.args]
        remote = words[-1] if len(words) > 1 else ""
        host = any("$" in w for w in words[:-1] if not w.startswith("-"))
        flags = any(re.fullmatch(r"-[a-zA-Z]*f[a-zA-Z]*", w) for w in words)
        runs = re.search(r"(?:bash|sh|python\S*|\./\S+|torchrun)\s+\S", remote)
        if (
            host
            and runs
            and not flags
            and RANK_GIVEN.search(job.line_of(call.offset))
            and not remote.rstrip().endswith("&")
        ):
            if not job.runs_in_background(call):
                text = "the loop starts one host after another: ssh returns when its command has ended"
                yield Violation(call.offset, text, why=SEQUENCE_WHY, cure="ssh ... & in the loop, and wait behind it")
                return


SETTING = lazy_regex(r"(?m)^[ \t]*(machine_rank|num_machines|num_processes):[ \t]*[\"']?(\d{1,5})[\"']?[ \t]*(?:#.*)?$")


def _written_settings(job: JobDescription, launch: LauncherCall) -> dict[str, int]:
    """Return the numbers of a configuration of accelerate that the script itself writes."""
    option = launch.option("config_file")
    name = option.plain_value.removeprefix("./") if option else ""
    files = {target.removeprefix("./"): source for target, source in job.reading.files.items()}
    if launch.kind != "accelerate" or launch.open_ended or not name or name not in files:
        return {}
    told = {n: int(v) for n, v in SETTING.findall(files[name].text)}
    return {n: v for n, v in told.items() if launch.option(n) is None}


def rank_of_config(job: JobDescription) -> Iterator[Violation]:
    """Report a configuration of accelerate that the script writes, with one rank for all nodes."""
    for launch in job.launches:
        told, option = _written_settings(job, launch), launch.option("config_file")
        srun = launch.srun
        if option is None or srun is None or srun.in_loop or "machine_rank" not in told:
            continue
        nodes = job.srun_nodes(srun) or 1
        if nodes > 1 and told.get("num_machines", 1) > 1 and not slurm_options(srun).keys() & {"nodelist", "relative"}:
            text = f"{option.plain_value} has machine_rank {told['machine_rank']} for all {nodes} nodes"
            cure = "srun bash -c 'accelerate launch --machine_rank=$SLURM_NODEID ...'"
            yield Violation(option.arg.offset, text, why=RANKS_WHY, cure=cure)


def ranks_of_config(job: JobDescription) -> Iterator[Violation]:
    """Compare the ranks of a configuration of accelerate that the script writes with the job's GPUs."""
    gpus = job.gpus_per_node
    for launch in job.launches:
        told, option = _written_settings(job, launch), launch.option("config_file")
        total = told.get("num_processes")
        machines = told.get("num_machines") or job.number(launch.value("num_machines")) or 1
        if option is None or not gpus or not total or launch.call.starter.after == "&":
            continue
        if total > gpus * machines:
            text = f"{option.plain_value} has num_processes {total}, but the job requests {gpus} GPUs per node"
            yield Violation(option.arg.offset, text, cure=f"num_processes: {gpus * machines}")


# ------------------------------------------------------------------------- networks of containers

NETWORK_WHY = (
    "The container gets an address of its own, which no other node knows: nothing listens at the master's address, and all other nodes "
    "wait for it."
)
ADDRESSES = lazy_regex(r"--?(?:net|network|publish|expose)(?:=.*)?|-p|-[a-zA-Z]*P")


def own_network(job: JobDescription) -> Iterator[Violation]:
    """Report ``docker run`` without the host's network around a launcher for several nodes."""
    for launch in job.launches:
        container = next((c for c in reversed(launch.call.under) if c.program in ("docker", "podman")), None)
        if container is None or not _for_several_nodes(job, launch):
            continue
        words = [a.text for a in container.args]
        unknown = any("@" in a.text or a.is_open for a in container.args[1:] if not a.text.startswith("-"))
        if words[:1] != ["run"] or any(ADDRESSES.fullmatch(w) for w in words) or (unknown and _image_is_last(words)):
            continue
        text = f"{container.program} run without --network=host around {launch.kind} for several nodes"
        yield Violation(container.offset, text, why=NETWORK_WHY, cure="--network=host --ipc=host")
        return


def _image_is_last(words: list[str]) -> bool:
    """Return whether a variable may hold options: it does not stand where the image is."""
    opened = [i for i, w in enumerate(words) if w.startswith("$")]
    return any(i + 1 < len(words) and words[i + 1].startswith("-") for i in opened)


def _for_several_nodes(job: JobDescription, launch: LauncherCall) -> bool:
    option = launch.option("nnodes", "num_machines")
    if launch.kind == "python" or option is None:
        return False
    count = job.number(option.value)
    if count is not None:
        return count > 1
    return launch.option("node_rank", "machine_rank", "rdzv_endpoint") is not None
