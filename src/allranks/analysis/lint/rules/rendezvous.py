"""How ranks meet: ports, addresses, ids, node ranks, and the shell that expands them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

from allranks.analysis.lint.command_options import CONTAINERS, REMOTE_SHELLS, slurm_options
from allranks.analysis.lint.job import JobDescription, LauncherCall
from allranks.analysis.lint.records import Argument, ProgramCall, Severity, VariableUse, Violation
from allranks.analysis.lint.rules import ANY, MPI, also, error, note, warning
from allranks.utils.text import lazy_regex

PORT_CURE = (
    "derive it from the job ID, below the ephemeral range: MASTER_PORT=$((15000 + SLURM_JOB_ID % 15000)); on one node "
    "use torchrun --standalone"
)
ADDRESS_CURE = (
    "in the batch script, outside of containers: "
    'MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)'
)
ID_CURE = "--rdzv_id=$SLURM_JOB_ID (with requeue: $SLURM_JOB_ID.$SLURM_RESTART_COUNT)"
ENDPOINT = '--rdzv_endpoint="$MASTER_ADDR:$MASTER_PORT"'
PORT_NAME = lazy_regex(r"(?:MASTER|RDZV|HEAD|MAIN|RENDEZVOUS)\w*PORT\Z|PORT\Z", re.IGNORECASE)
DEFAULT_PORTS = ("29500", "29400")
DYNAMIC_BACKENDS = ("c10d", "etcd", "etcd-v2")  # they assign the ranks of nodes themselves
EPHEMERAL = (32768, 60999)
"""Ports that the kernel gives to outgoing connections; another job need not use such a one."""


def backend(launch: LauncherCall) -> str:
    return (launch.value("rdzv_backend") or "static").lower()


def is_torchrun(launch: LauncherCall) -> bool:
    return launch.kind in ("torchrun", "torch.distributed.launch")


@warning(
    "fixed-port",
    why="Two jobs on one node use the same port: one stops with 'Address already in use', or with c10d joins the store "
    "of the other.",
    cure=PORT_CURE,
    source="torch/distributed/elastic/rendezvous",
    bad="#SBATCH --nodes=1\n#SBATCH --gres=gpu:1\n#SBATCH --mem=32G\nexport MASTER_PORT=29500\nsrun python train.py",
    good="#SBATCH --nodes=1\n#SBATCH --gres=gpu:1\n#SBATCH --mem=32G\nexport MASTER_PORT=$((15000 + SLURM_JOB_ID % "
    "15000))\nsrun python train.py",
    files=ANY,
)
def port(job: JobDescription) -> Iterator[Violation]:
    if job.whole_nodes:
        return
    # Other jobs may use the port, tasks of one array do.
    shared = job.kind == "environment" or (job.shared_nodes and "array" in job.heading)
    severity: Severity = "warning" if shared else "note"
    seen: set[int] = set()
    for offset, number, text in (*_set_ports(job), *_ports_of_launchers(job)):
        line = job.lines.place(offset)[0]
        if line not in seen and not EPHEMERAL[0] <= number <= EPHEMERAL[1]:
            yield Violation(offset, text, severity=severity)
        seen.add(line)


def _set_ports(job: JobDescription) -> Iterator[tuple[int, int, str]]:
    ports = [a for a in job.all_values if PORT_NAME.match(a.name) and not a.items]
    if job.launches and all("standalone" in la.options for la in job.launches):
        return  # each finds a free one itself
    counts = Counter(a.value for a in ports)
    for item in ports:
        digits = re.fullmatch(r"(\d{2,5})|\$\{\w+:?[-=](\d{2,5})\}", item.value)
        copied = counts[item.value] > 1 and job.is_copy(item)
        if copied or not digits or not _is_rendezvous_port(job, item.name, item.value):
            continue
        if job.kind == "script" or digits[1] in DEFAULT_PORTS:
            said = f"is always {digits[1]}" if digits[1] else f"is {digits[2]} unless it is set outside"
            yield item.offset, int(digits[1] or digits[2]), f"{item.name} {said}"


def _is_rendezvous_port(job: JobDescription, name: str, value: str) -> bool:
    """Return whether the variable reaches a launcher: one called PORT may be that of another server."""
    if job.kind == "script" and not any(a.exported or a.under for a in job.set_values(name)):
        if name not in job.reading.exported and name not in job.used_names:
            return False
    return name.upper() != "PORT" or any(value in a.text for la in job.launches for a in la.call.args)


def _ports_of_launchers(job: JobDescription) -> Iterator[tuple[int, int, str]]:
    for launch in job.launches:
        for name, pattern in (
            ("master_port", r"(?<![\w$])\d+\Z"),
            ("main_process_port", r"(?<![\w$])\d+\Z"),
            ("rdzv_endpoint", r"(?<=:)\d+\Z"),
        ):
            option = launch.option(name)
            match = re.search(pattern, option.value or "") if option else None
            if option and match and match[0] != "0" and "standalone" not in launch.options:
                where = launch.place_of(option.arg, match[0])
                yield where, int(match[0][:6]), f"the port of --{name} is always {match[0]}"
        port_option = launch.option("standalone", "master_port", "main_process_port", "rdzv_endpoint", "config_file")
        static = is_torchrun(launch) and job.multi_node and backend(launch) == "static" and launch.srun
        if static and not port_option and not job.has("PET_MASTER_PORT"):
            yield launch.call.offset, 29500, "no --master_port: torchrun uses 29500 (it does not read MASTER_PORT)"


@error(
    "port-per-node",
    why="Every node gets a different value, so the nodes never find each other.",
    cure=PORT_CURE,
    source="LLaMA-Factory's launcher",
    bad="srun bash -c 'export MASTER_PORT=$((15000 + RANDOM % 10000)); python train.py'",
    good="export MASTER_PORT=$((15000 + RANDOM % 10000))\nsrun python train.py",
)
def port_per_node(job: JobDescription) -> Iterator[Violation]:
    if not job.multi_node:
        return
    drawn = re.compile(r"RANDOM|shuf|\.bind\(|SLURM_(?:NODEID|PROCID|LOCALID)|free.?port", re.IGNORECASE)
    for item in job.assignments:
        # What stands in front of srun, or comes from further up, is expanded once, by the batch shell.
        inside = [c.offset for c in item.under if c.program in ("srun", "pdsh", "clush", "ssh")]
        if inside and min(item.offset, item.source.where(0) if item.value else item.offset) < inside[0]:
            continue
        if PORT_NAME.match(item.name) and under_srun(item.under) and drawn.search(item.value):
            cure = "choose it once, in the batch script. " + PORT_CURE
            yield Violation(item.offset, f"{item.name} is chosen on every node separately", cure=cure)
    for use in job.uses:
        if use.name == "RANDOM" and use.program in ("torchrun", "python") and under_srun(use.under):
            yield Violation(use.offset, "$RANDOM differs on every node", cure=ID_CURE)


@note(
    "fixed-rendezvous-id",
    why="Jobs with the same id, address and port share one rendezvous: one of them is killed, or it uses nodes of the "
    "other.",
    cure=ID_CURE,
    source="torch/distributed/elastic/rendezvous",
    bad="srun torchrun --nnodes=2 --nproc_per_node=2 --rdzv_backend=c10d --rdzv_id=101 "
    "--rdzv_endpoint=$MASTER_ADDR:$MASTER_PORT train.py",
    good="srun torchrun --nnodes=2 --nproc_per_node=2 --rdzv_backend=c10d --rdzv_id=$SLURM_JOB_ID "
    "--rdzv_endpoint=$MASTER_ADDR:$MASTER_PORT train.py",
)
def identity(job: JobDescription) -> Iterator[Violation]:
    for launch in job.launches if not job.whole_nodes else ():
        if launch.kind != "torchrun" or backend(launch) != "c10d" or "standalone" in launch.options:
            continue
        option = launch.option("rdzv_id")
        if option and option.value and "$" not in option.value:
            yield Violation(option.arg.offset, f"the rendezvous id is always {option.value}")
        elif option is None and not job.has("PET_RDZV_ID") and (launch.value("rdzv_endpoint") or not job.multi_node):
            yield Violation(launch.call.offset, "no --rdzv_id: the default id is 'none' for every job")


ADDRESS_NAME = lazy_regex(
    r"(?:MASTER|RDZV|HEAD|MAIN|RENDEZVOUS|COORD)\w*(?:ADDR|IP|HOST|NODE|ENDPOINT|ADDRESS)\w*\Z|(?:MASTER|HEAD)\Z",
    re.IGNORECASE,
)
LOOPBACK = lazy_regex(r"localhost|127\.\d+\.\d+\.\d+|::1|0\.0\.0\.0")


@note(
    "node-rank-ignored",
    why="With c10d, node ranks come from the sorted host names, and --node_rank is ignored: rank 0 may be on any node.",
    cure="remove --node_rank; or, if ranks must follow Slurm's order, use --master_addr and --master_port instead of "
    "the --rdzv options",
    source="torch/distributed/run.py, pytorch#150660",
    bad="srun bash -c 'torchrun --nnodes=2 --node_rank=$SLURM_NODEID --rdzv_backend=c10d "
    "--rdzv_endpoint=$MASTER_ADDR:15000 train.py'",
    good="srun torchrun --nnodes=2 --nproc_per_node=2 --rdzv_backend=c10d --rdzv_id=$SLURM_JOB_ID "
    "--rdzv_endpoint=$MASTER_ADDR:15000 train.py",
)
def node_rank(job: JobDescription) -> Iterator[Violation]:
    for launch in job.launches:
        option = launch.option("node_rank", "machine_rank")
        if option and launch.kind in ("torchrun", "accelerate") and backend(launch) in ("c10d", "etcd", "etcd-v2"):
            yield Violation(option.arg.offset, f"--rdzv_backend={backend(launch)} ignores {option.written}")


@error(
    "node-rank-missing",
    why="Without --node_rank every node is node 0, and all wait for the others until the timeout.",
    cure="--node_rank=$SLURM_NODEID in single quotes inside the srun command, or --rdzv_backend=c10d with "
    "--rdzv_endpoint and --rdzv_id",
    source="torch/distributed/run.py",
    bad="srun torchrun --nnodes=2 --nproc_per_node=2 --master_addr=$MASTER_ADDR --master_port=$MASTER_PORT train.py",
    good="srun bash -c 'torchrun --nnodes=2 --node_rank=$SLURM_NODEID --master_addr=$MASTER_ADDR "
    "--master_port=$MASTER_PORT train.py'",
)
def rank_missing(job: JobDescription) -> Iterator[Violation]:
    for launch in job.launches if job.multi_node and not job.has("PET_NODE_RANK") else ():
        option, nodes = launch.option("node_rank", "machine_rank"), launch.value("nnodes", "num_machines", "num_nodes")
        if backend(launch) != "static":
            continue
        if option is not None and launch.srun and (option.value or "").isdecimal() and _on_all_nodes(job, launch):
            text = f"{option.written} is {option.value} on all {job.srun_nodes(launch.srun)} nodes"
            yield Violation(option.arg.offset, text)
        several = nodes is not None and nodes not in ("0", "1") and ":" not in nodes
        if launch.kind == "deepspeed":
            several = "no_ssh" in launch.options
        rank_source = option or launch.option("standalone", "config_file", "hostfile")
        if several and not rank_source and not launch.open_ended:
            name = "--machine_rank" if launch.kind == "accelerate" else "--node_rank"
            yield Violation(launch.call.offset, f"{launch.kind} on several nodes without {name}")


def _on_all_nodes(job: JobDescription, launch: LauncherCall) -> bool:
    """Return whether one srun starts the launcher on several nodes."""
    srun = launch.srun
    if srun is None or srun.in_loop or srun.in_function or launch.call.in_loop or srun.after == "&":
        return False
    options = slurm_options(srun)
    tasks = options.get("ntasks")
    one = bool(options.keys() & {"nodelist", "relative"}) or (tasks is not None and tasks.value == "1")
    return not one and (job.srun_nodes(srun) or 0) > 1


@error(
    "same-node-rank",
    why="Every node gets the same rank: they never form a group, or all believe that they are the first.",
    cure="srun bash -c '... --node_rank=$SLURM_NODEID ...' in single quotes",
    source="torch/distributed/run.py",
    bad="srun bash -c 'torchrun --nnodes=2 --node_rank=$SLURM_LOCALID --master_addr=$HEAD --master_port=15001 "
    "train.py'",
    good="srun bash -c 'torchrun --nnodes=2 --node_rank=$SLURM_NODEID --master_addr=$HEAD --master_port=15001 "
    "train.py'",
)
def same_rank_everywhere(job: JobDescription) -> Iterator[Violation]:
    for launch in job.launches if job.multi_node else ():
        option, srun = launch.option("node_rank", "machine_rank"), launch.srun
        if option is None or srun is None or (job.srun_nodes(srun) or 2) < 2 or srun.in_loop or launch.call.in_loop:
            continue
        if backend(launch) != "static" or srun.after == "&" or slurm_options(srun).keys() & {"nodelist", "relative"}:
            continue
        value = (option.value or "").strip("\"'")
        default = re.fullmatch(r"\$\{(?!SLURM_)([A-Za-z_]\w*):?-0\}", value)
        wrong = None
        if re.fullmatch(r"\$\{?SLURM_LOCALID(?::-0)?\}?", value):
            wrong = "$SLURM_LOCALID is the number of the task on its node: 0 on every node"
        elif default and not is_set(job, default[1]):
            wrong = f"nothing sets ${default[1]}, so it is 0 on every node"
        elif re.match(r"\$\(\s*hostname\b", value) and not any(c.program == "hostname" and c.srun for c in job.calls):
            wrong = f"{value} is expanded by the batch shell, on the first node"
        if wrong:
            yield Violation(option.arg.offset, f"{option.written}: {wrong}")


@warning(
    "master-address",
    why="The address must be that of the first node, and every other node must be able to reach it.",
    cure=ADDRESS_CURE,
    source="nebius-solutions-library#177",
    bad="export MASTER_ADDR=127.0.0.1\nsrun python train.py",
    good='export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)\nsrun python train.py',
)
def address(job: JobDescription) -> Iterator[Violation]:
    seen: set[int] = set()
    named = [a for a in job.all_values if ADDRESS_NAME.match(a.name)]
    for item in named:
        copied = job.is_copy(item) and any(a.value == item.value for a in named if a is not item)
        if not (item.in_substitution or item.items is not None or copied):
            for hit in _address_hits(job, item.name, item.value, item.offset, under_srun(item.under)):
                seen.add(job.lines.place(hit.offset)[0])
                yield hit
    for launch in job.launches:
        option = launch.option("master_addr", "main_process_ip", "rdzv_endpoint")
        if option is None or option.value is None:
            continue
        if launch.value("nnodes", "num_machines") == "1" and LOOPBACK.fullmatch(option.value):
            continue
        place = max((a.source.where(0) for a in launch.call.args if a is option.arg), default=option.arg.offset)
        literal = option.value.rpartition(":")[0] or option.value
        if (seen and not _is_literal_host(job, literal)) or any(a.value and a.value in literal for a in named):
            continue  # the variable is reported
        yield from _address_hits(job, option.written, literal, place, _in_task(job, launch, option.arg))
    yield from _no_address(job)


def _in_task(job: JobDescription, launch: LauncherCall, arg: Argument) -> bool:
    """Return whether a task's own shell expands the option's value, and not the batch shell before srun."""
    index = launch.call.args.index(arg)
    places = {p for a in launch.call.args[index : index + 2] for p in a.source.at}
    if any(u.offset in places and under_srun(u.under) for u in job.uses):
        return True
    inner = [c for c in job.calls if c.in_substitution and c.program == "hostname" and under_srun(c.under)]
    return any(c.offset + shift in places for c in inner for shift in (0, -1, -2))


def _no_address(job: JobDescription) -> Iterator[Violation]:
    """Report a rendezvous of several nodes without an address."""
    for launch in job.launches if job.multi_node else ():
        if not is_torchrun(launch) or launch.open_ended or launch.option("rdzv_endpoint", "standalone"):
            continue
        chosen = launch.option("rdzv_backend")
        if backend(launch) == "c10d" and not job.has("PET_RDZV_ENDPOINT"):
            ignored = " (--master_addr is for a static rendezvous)" if launch.option("master_addr") else ""
            text = f"no --rdzv_endpoint: with c10d every node waits at its own localhost{ignored}"
            yield Violation(chosen.arg.offset if chosen else launch.call.offset, text, cure=ENDPOINT, severity="error")
        alone = launch.value("nnodes") in (None, "1")
        has_address = alone or launch.option("master_addr") or job.has("PET_MASTER_ADDR")
        if backend(launch) == "static" and launch.srun and not has_address:
            default = "torchrun uses 127.0.0.1 (it does not read MASTER_ADDR)"
            text = f"no --master_addr: {default}, and every node waits for itself"
            cure = f'--master_addr="$MASTER_ADDR" --master_port="$MASTER_PORT"; or c10d with {ENDPOINT}'
            yield Violation(launch.call.offset, text, cure=cure, severity="error")


SUBMIT_HOST = lazy_regex(r"\$\{?(?:SLURM_SUBMIT_HOST|PBS_O_HOST|LSB_SUB_HOST)\}?")


def _address_hits(job: JobDescription, name: str, value: str, offset: int, under_srun: bool) -> Iterator[Violation]:
    if job.is_batch and SUBMIT_HOST.search(value):
        text = f"{name} is the host on which sbatch was called, not a node of the job: no rank listens there"
        yield Violation(offset, text, severity="error")
        return
    if match := re.search(r"hostname\s+(--ip-address|-i|--all-ip-addresses|-I)\b(?:([^)]*\|))?", value):
        listed = match[1] in ("-I", "--all-ip-addresses") and not match[2]
        one = "comes from hostname: with Debian's /etc/hosts it is 127.0.1.1"
        text = f"{name} {'is the list of all addresses of the node' if listed else one}"
        yield Violation(offset, text, severity="warning" if listed else "note")
    default = job.is_batch and job.multi_node and re.search(r"\{(?!SLURM_)\w+:?-(?:localhost|127\.0\.0\.1)\}", value)
    if default or re.search(r"\|\|\s*echo\s+[\"']?(?:localhost|127\.)", value):
        text = f"{name} falls back to localhost: every node would form its own group"
        yield Violation(offset, text, severity="error")
    elif job.multi_node and LOOPBACK.fullmatch(value):
        text = f"{name}={value} in a job of several nodes: every node waits for itself"
        yield Violation(offset, text, severity="error")
    elif job.multi_node:
        yield from _of_several_nodes(job, name, value, offset, under_srun)
    elif job.nodes == 1 and name.lstrip("-").upper() in STATIC_NAMES and _is_literal_host(job, value):
        yield Violation(offset, f"{name}={value}: the next job gets another node")


STATIC_NAMES = {"MASTER_ADDR", "MAIN_PROCESS_IP"}


def _is_literal_host(job: JobDescription, value: str) -> bool:
    """Return whether the value is the name or address of one host, on which the job need not run."""
    pinned = job.heads("nodelist")
    literal = re.fullmatch(r"(?!\$)[A-Za-z0-9][A-Za-z0-9.-]*", value) and not value.isdecimal()
    return bool(job.is_batch and literal and not LOOPBACK.fullmatch(value)) and not (pinned and "," not in pinned)


def _of_several_nodes(job: JobDescription, name: str, value: str, offset: int, under_srun: bool) -> Iterator[Violation]:
    own = re.fullmatch(r"\$\(hostname(?:\s+-[sfd])?\)|\$\{?(?:HOSTNAME|SLURMD_NODENAME)\}?", value.replace("`", ""))
    # A program that gets the list may expand it: only text tools are known not to.
    expanded = re.search(r"scontrol|nodeset|hostlist|python|\[|\$\(\s*[^\s()]*/", value) or SLICE.search(value)
    tested = re.search(r"\*[\"']?\\?\[[\"']?\*|==?\s*[\"']\[[\"']", job.text)
    if own and under_srun:
        yield Violation(offset, f"{name}={value} inside of srun: every node uses its own name", severity="error")
    elif re.search(r"SLURM_(?:JOB_)?NODELIST", value) and not (expanded or tested):
        yield Violation(offset, f"{name} is cut from the compressed list, which is node[01-04] and not node01,node02")
    elif _is_literal_host(job, value) and value not in re.split(r"[,\s]", job.heads("nodelist") or ""):
        yield Violation(offset, f"{name}={value}: the next job gets other nodes")


SLICE = lazy_regex(r"\$\{SLURM_(?:JOB_)?NODELIST:\s*\d{1,3}:\s*\d{1,3}\}")
OWN_TO_NODE = lazy_regex(
    r"\b(?:SLURM_NODEID|SLURM_PROCID|SLURM_LOCALID|SLURMD_NODENAME|HOSTNAME|NODE_RANK|RANK)\b|\bhostname\b"
)
DRAWN = lazy_regex(
    r"\$\{?(?:RANDOM|SRANDOM|BASHPID|EPOCHREALTIME)\b|\$\$|\buuidgen\b|\bshuf\b|\bdate\b|\bmktemp\b|/proc/sys/kernel/random"
)


@error(
    "rendezvous-id-per-node",
    why="Nodes meet if they have the same id. Each of these waits alone in its own rendezvous until the timeout.",
    cure="--rdzv_id=$SLURM_JOB_ID",
    source="torch/distributed/elastic/rendezvous",
    bad="srun bash -c 'torchrun --nnodes=2 --rdzv_backend=c10d --rdzv_id=$SLURM_PROCID "
    "--rdzv_endpoint=$MASTER_ADDR:15000 train.py'",
    good="srun bash -c 'torchrun --nnodes=2 --rdzv_backend=c10d --rdzv_id=$SLURM_JOB_ID "
    "--rdzv_endpoint=$MASTER_ADDR:15000 train.py'",
)
def id_per_node(job: JobDescription) -> Iterator[Violation]:
    if not job.multi_node and job.is_batch:
        return
    for launch in job.launches:
        option, nodes = launch.option("rdzv_id"), launch.value("nnodes")
        if option is None or option.value is None or backend(launch) == "static" or nodes in (None, "1", "1:1"):
            continue
        in_task = _in_task(job, launch, option.arg) or any(
            a.value and a.value in (option.value or "") and under_srun(a.under) for a in job.assignments
        )
        alone = not job.is_batch and launch.srun is None and job.multi_node  # the script that srun starts on each node
        own, drawn = OWN_TO_NODE.search(option.value), DRAWN.search(option.value)
        if (in_task and (own or drawn)) or (alone and own):
            yield Violation(option.arg.offset, f"--rdzv_id={option.value} is another one on every node")


@warning(
    "address-without-host",
    why="torchrun compares host names to decide whether it hosts the store: an address of another interface matches "
    "none, and all wait.",
    cure="use the host name of the first node; or --rdzv_conf=is_host=1 on it and is_host=0 elsewhere; or "
    "--master_addr with a static rendezvous",
    source="torch/distributed/elastic/rendezvous, pytorch#73656",
    bad="head=$(srun -N 1 ip -4 -o addr show dev ib0)\nsrun torchrun --nnodes=2 --rdzv_backend=c10d "
    "--rdzv_endpoint=$head:15000 train.py",
    good="head=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1)\nsrun torchrun --nnodes=2 "
    "--rdzv_backend=c10d --rdzv_endpoint=$head:15000 train.py",
)
def hostless(job: JobDescription) -> Iterator[Violation]:
    for launch in job.launches:
        option = launch.option("rdzv_endpoint")
        if option is None or backend(launch) != "c10d" or "is_host" in (launch.value("rdzv_conf") or ""):
            continue
        # A fixed address, and one that DNS returns, is mostly that of the host's name.
        looked_up = re.search(r"\$\(\s*(?:host|dig|nslookup)\s|\A(?!127\.)\d+\.\d+\.\d+\.\d+", option.value or "")
        own = re.search(r"\bip\s+(?:-\S+\s+)*(?:a|addr|address|route)\b|ifconfig", option.value or "")
        if looked_up or own:
            text = "the c10d endpoint is an IP address, which may match no node"
            yield Violation(option.arg.offset, text, severity="note" if looked_up else "warning")


@warning(
    "scontrol-in-container",
    why="scontrol is on the host, not in the image; the substitution is empty, and with a fall-back to localhost every "
    "node forms its own group.",
    cure=ADDRESS_CURE,
    source="mmcv#700, pith-train#91",
    bad="srun apptainer exec x.sif bash -c 'export MASTER_ADDR=$(scontrol show hostnames | head -n 1); python "
    "train.py'",
    good="export MASTER_ADDR=$(scontrol show hostnames | head -n 1)\nsrun apptainer exec x.sif python train.py",
)
def container(job: JobDescription) -> Iterator[Violation]:
    for call in job.calls:
        if call.program != "scontrol":
            continue
        inside = any(c.program in CONTAINERS for c in call.under) or any(
            "container-image" in slurm_options(c) for c in call.under if c.program == "srun"
        )
        if inside:
            yield Violation(call.offset, "scontrol is called inside a container")


# What only a task, or only a launcher, sets.
TASK_NAMES = {"SLURM_NODEID", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_GTIDS"}
LAUNCHER_NAMES = {
    "LOCAL_RANK", "RANK", "GROUP_RANK", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "PMI_RANK",
    "PMI_LOCAL_RANK", "PMIX_RANK", "MPI_LOCALRANKID",
}  # fmt: skip
HARMLESS = {"echo", "printf", "[", "[[", "test", "for", "date", "mkdir", "logger", "?", "cd", "touch", "tee", ":"}


def under_srun(under: tuple[ProgramCall, ...]) -> bool:
    return any(c.program == "srun" for c in under)


EMPTY_WHY = "The batch shell expands it before srun starts, where it is not set; every task gets an empty value."


@error(
    "expanded-too-early",
    why="The batch shell expands it before srun starts, where it is 0; every task on every node gets 0.",
    cure="let the task's own shell expand it: srun bash -c '... $SLURM_NODEID ...' in single quotes, or "
    "\\$SLURM_NODEID in double quotes",
    source="accelerate#2816",
    bad="srun torchrun --nnodes=2 --nproc_per_node=2 --node_rank=$SLURM_NODEID --master_addr=$MASTER_ADDR train.py",
    good="srun bash -c 'torchrun --nnodes=2 --nproc_per_node=2 --node_rank=$SLURM_NODEID --master_addr=$MASTER_ADDR "
    "train.py'",
)
def early(job: JobDescription) -> Iterator[Violation]:
    starts = any(c.program == "srun" and not c.in_substitution for c in job.calls)
    if not (starts or (job.is_batch and job.multi_node and job.launches)):
        return
    if not (job.multi_node or any(la.kind == "python" for la in job.launches)):
        return
    ignored = _ignored_ranks(job)
    dynamic = bool(job.launches) and all(backend(la) in DYNAMIC_BACKENDS for la in job.launches)
    for use in job.uses:
        if under_srun(use.under) or use.in_function or use.program in HARMLESS or use.offset in ignored:
            continue
        if any(c.program in REMOTE_SHELLS for c in use.under):
            continue
        if use.name in TASK_NAMES and (use.program != "=" or _matters(job, use)) and not of_one_task(job, use):
            text = f"${use.name} is expanded by the batch shell, where it is 0"
            # The name of a log, or a job whose number of nodes is on the command line of sbatch, or is one.
            several = any((job.tasks_per_node(la.srun) or 1) > 1 for la in job.launches if la.srun)
            assigned = dynamic and use.program in ("=", "export")
            unsure = use.in_redirect or assigned or (job.of_unknown_size and not several)
            yield Violation(use.offset, text, severity="note" if unsure else None)
        elif use.name in LAUNCHER_NAMES and use.program == "srun" and not is_set(job, use.name):
            text = f"${use.name} is expanded by the batch shell, where it is not set"
            yield Violation(use.offset, text, why=EMPTY_WHY)


def _ignored_ranks(job: JobDescription) -> set[int]:
    """Return where the node ranks stand that torchrun ignores, because c10d assigns them."""
    places: set[int] = set()
    for launch in job.launches:
        option = launch.option("node_rank", "machine_rank")
        dynamic = backend(launch) in DYNAMIC_BACKENDS
        meant_static = launch.option("master_addr") and not launch.option("rdzv_endpoint")
        if option and dynamic and not meant_static:
            index = launch.call.args.index(option.arg)
            for arg in launch.call.args[index : index + 2]:
                places.update(arg.source.at)
    return places


def _matters(job: JobDescription, use: VariableUse) -> bool:
    """Return whether the variable that is assigned here reaches a program: exported, or used later by one."""
    line = job.lines.place(use.offset)[0]
    before = (a for a in job.assignments if not a.under and a.offset < use.offset)
    item = next(iter([a for a in before if job.lines.place(a.offset)[0] == line][-1:]), None)
    if item is None:
        return True
    if item.exported or item.name in job.reading.exported:
        return not any(a.name == item.name and under_srun(a.under) for a in job.assignments)
    first = item.items[0].text if item.items else item.value
    unread = HARMLESS - {"?"} if STARTS.match(first.strip("\"'")) else HARMLESS  # the command is the variable
    later = (u for u in job.uses if u.name == item.name and u.offset > use.offset)
    return any(u.program not in unread and not u.in_redirect for u in later)


STARTS = lazy_regex(r"\s*(?:srun|torchrun|accelerate|deepspeed|python[\d.]*)\b")


def is_set(job: JobDescription, name: str) -> bool:
    return job.has(name) or name in job.reading.named or name in job.reading.exported


def of_one_task(job: JobDescription, use: VariableUse) -> bool:
    """Return whether the use is in the command of an srun of one task, whose number is 0."""
    steps = [c for c in job.calls if c.program == "srun" and c.offset <= use.offset and not c.in_substitution]
    if job.nodes != 1 or use.program != "srun" or not steps:
        return False
    return job.tasks_per_node(max(steps, key=lambda c: c.offset)) == 1


PRODUCT_WHY = (
    "The shell calculates only in $((...)): the program gets the text, and stops with 'invalid literal for int()'."
)
LITERAL_ARGUMENT = lazy_regex(
    r"\$\{?(SLURM_(?:NODEID|PROCID|LOCALID|NNODES|JOB_NUM_NODES|NTASKS|GPUS_ON_NODE|JOB_ID)|MASTER_ADDR|MASTER_PORT)\b"
)
COUNTS = ("nnodes", "nproc_per_node", "num_machines", "num_processes", "num_nodes", "num_gpus")
PRODUCT = lazy_regex(r"[\w${}#@\[\]]+[*+][\w${}#@\[\]]+")
OWN_SHELL = REMOTE_SHELLS | {"parallel", "xargs", "flux"}


@error(
    "never-expanded",
    why="srun starts the program without a shell, and single quotes or \\$ keep the batch shell from expanding it: the "
    "program gets the text.",
    cure="srun bash -c '... $SLURM_NODEID ...', whose shell expands it in every task",
    source="bash manual, quoting",
    bad="srun torchrun --nnodes=2 --nproc_per_node=2 --node_rank=\\$SLURM_NODEID --master_addr=$MASTER_ADDR "
    "--master_port=15000 train.py",
    good="srun bash -c 'torchrun --nnodes=2 --nproc_per_node=2 --node_rank=$SLURM_NODEID --master_addr=$MASTER_ADDR "
    "--master_port=15000 train.py'",
)
def literal(job: JobDescription) -> Iterator[Violation]:
    for launch in job.launches:
        if launch.srun is not None and not any(c.program in OWN_SHELL for c in launch.call.under):
            yield from _literal_options(launch)
        for name in COUNTS:
            option = launch.option(name)
            value = option.plain_value if option else ""
            if option and PRODUCT.fullmatch(value):
                cure = f"{option.written} $(({value}))"
                yield Violation(option.arg.offset, f"--{name} is the text {value}", why=PRODUCT_WHY, cure=cure)


def _literal_options(launch: LauncherCall) -> Iterator[Violation]:
    for arg in launch.call.args:
        match = LITERAL_ARGUMENT.search(arg.source.text)
        if match and re.fullmatch(r"(?:--?[\w-]+=)?(?:tcp://)?[\w.:${}]*", arg.source.text):
            same = re.match(r"--rdzv[-_]id=", arg.source.text)  # on every node, so that they still meet
            text = f"the program gets the text {match[0]}{'}' if '{' in match[0] else ''}: no shell expands it"
            yield Violation(arg.offset, text, severity="note" if same else None)
            if not same:
                return


NO_IP_WHY = "accelerate meets at None:None, or at the address of the user's own configuration, and stops or hangs."


@also("master-address")
def without_address(job: JobDescription) -> Iterator[Violation]:
    """Report accelerate on several machines without the address of the first one."""
    has_address = job.has("ACCELERATE_CONFIG_FILE", "MASTER_ADDR", "PET_RDZV_ENDPOINT", "PET_MASTER_ADDR")
    if has_address or any(c.program == "accelerate-other" for c in job.calls) or "default_config.yaml" in job.text:
        return
    known = ("main_process_ip", "config_file", "deepspeed_hostfile", "rdzv_backend", "rdzv_conf", "tpu")
    calls = (la for la in job.launches if la.kind == "accelerate" and not la.open_ended)
    for launch in (la for la in calls if not la.option(*known)):
        machines = launch.option("num_machines")
        count = job.number(machines.value) if machines else 1
        if machines and (count or 1) > 1:
            text = f"{machines.written} is {count}, and there is no --main_process_ip"
            cure = "--main_process_ip=$HEAD --main_process_port=<port>"
            yield Violation(machines.arg.offset, text, why=NO_IP_WHY, cure=cure)


NODE_LISTS = {"SLURM_JOB_NODELIST", "SLURM_NODELIST"}


@error(
    "compressed-node-list",
    why="Slurm's list is compressed, node[01-04]: only Slurm's own commands, pdsh and clush read it.",
    cure='for node in $(scontrol show hostnames "$SLURM_JOB_NODELIST"); do',
    source="tested with Slurm 22.05",
    bad="for node in $SLURM_JOB_NODELIST; do\n  ssh $node nvidia-smi\ndone",
    good='for node in $(scontrol show hostnames "$SLURM_JOB_NODELIST"); do\n  ssh $node nvidia-smi\ndone',
)
def compressed(job: JobDescription) -> Iterator[Violation]:
    if not job.is_batch or not job.multi_node:
        return
    for use in job.uses:
        if use.program == "for" and use.name in NODE_LISTS and not use.operator:
            yield Violation(use.offset, f"the loop runs once, over the compressed list ${use.name}")
    for call in (c for c in job.calls if c.program in MPI | {"horovodrun"}):
        for arg, following in call.pairs():
            name, equals, value = arg.text.partition("=")
            value = value if equals else following.text if following else ""
            if name in ("-H", "-host", "--host", "--hosts", "-hosts") and value.strip("${}\"'") in NODE_LISTS:
                cure = '-H "$(scontrol show hostnames "$SLURM_JOB_NODELIST" | paste -sd,)"'
                yield Violation(arg.offset, f"{call.program} gets the compressed list {value} as its hosts", cure=cure)
