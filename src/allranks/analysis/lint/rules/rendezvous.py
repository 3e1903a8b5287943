"""Rules for the rendezvous: address and node rank."""

from __future__ import annotations

import re
from collections.abc import Iterator

from allranks.analysis.lint.command_options import CONTAINERS, slurm_options
from allranks.analysis.lint.job import JobDescription, LauncherCall
from allranks.analysis.lint.placement import started_by
from allranks.analysis.lint.records import Argument, Assignment, Violation
from allranks.analysis.lint.rules.dataflow import is_only_shown, under_srun
from allranks.analysis.lint.rules.ports import backend, is_torchrun
from allranks.analysis.lint.rules.tasks import SPREADING
from allranks.analysis.lint.shell_tokens import UNRESOLVED_CLOSE, UNRESOLVED_OPEN, MappedText
from allranks.utils.text import lazy_regex

ADDRESS_NAME = lazy_regex(
    r"(?:MASTER|RDZV|HEAD|MAIN|RENDEZVOUS|COORD)\w*(?:ADDR|IP|HOST|NODE|ENDPOINT|ADDRESS)\w*\Z|(?:MASTER|HEAD)\Z",
    re.IGNORECASE,
)
LOOPBACK = lazy_regex(r"localhost|127\.\d+\.\d+\.\d+|::1|0\.0\.0\.0")

# ---------------------------------------------------------------------------------------- node rank

RANK_WHY = (
    "With c10d, node ranks come from the sorted host names, and --node_rank is ignored; rank 0 and MASTER_ADDR may be on any node, "
    "and gpu10 sorts before gpu2."
)
RANK_CURE = "remove --node_rank; or, if ranks must follow Slurm's order, use --master_addr and --master_port instead of the --rdzv options"


def node_rank(job: JobDescription) -> Iterator[Violation]:
    for launch in job.launches:
        option = launch.option("node_rank", "machine_rank")
        if option and launch.kind in ("torchrun", "accelerate") and backend(launch) in ("c10d", "etcd", "etcd-v2"):
            yield Violation(option.arg.offset, f"--rdzv_backend={backend(launch)} ignores {option.written}")


MISSING_WHY = "Without --node_rank every node is node 0, and all wait for the others until the timeout."
MISSING_CURE = "--node_rank=$SLURM_NODEID in single quotes inside the srun command, or --rdzv_backend=c10d with --rdzv_endpoint and --rdzv_id"


def rank_missing(job: JobDescription) -> Iterator[Violation]:
    if not job.multi_node:
        return
    for launch in job.launches:
        yield from same_rank(job, launch)
        nodes = launch.value("nnodes", "num_machines", "num_nodes")
        if launch.option("node_rank", "machine_rank", "standalone", "config_file", "hostfile") or job.has(
            "PET_NODE_RANK"
        ):
            continue
        several = nodes is not None and nodes not in ("0", "1") and ":" not in nodes
        if launch.kind == "deepspeed":
            several = "no_ssh" in launch.options
        if several and backend(launch) == "static" and not launch.open_ended:
            name = "--machine_rank" if launch.kind == "accelerate" else "--node_rank"
            yield Violation(launch.call.offset, f"{launch.kind} on several nodes without {name}")


def same_rank(job: JobDescription, launch: LauncherCall) -> Iterator[Violation]:
    """Report a node rank that is one number for all nodes on which srun starts the launcher."""
    option, srun = launch.option("node_rank", "machine_rank"), launch.srun
    if option is None or srun is None or backend(launch) != "static" or not (option.value or "").isdecimal():
        return
    if srun.in_loop or srun.in_function or srun.after == "&" or slurm_options(srun).keys() & {"nodelist", "relative"}:
        return
    nodes, tasks = job.srun_nodes(srun), slurm_options(srun).get("ntasks")
    if nodes and nodes > 1 and not (tasks and tasks.value == "1"):
        name = option.written
        yield Violation(option.arg.offset, f"{name} is {option.value} on all {nodes} nodes")


SAME_RANK_WHY = "Every node gets the same rank: they never form a group, or all believe that they are the first."
SAME_RANK_CURE = "srun bash -c '... --node_rank=$SLURM_NODEID ...' in single quotes"


def same_rank_everywhere(job: JobDescription) -> Iterator[Violation]:
    """Report a node rank that is 0, or another constant, on every node."""
    if not job.multi_node:
        return
    for launch in job.launches:
        option = launch.option("node_rank", "machine_rank")
        nodes = job.srun_nodes(launch.srun) if launch.srun else None
        if (
            option is None
            or not option.value
            or launch.srun is None
            or (nodes or 2) < 2
            or launch.srun.in_loop
            or launch.call.in_loop
        ):
            continue
        if (
            backend(launch) != "static"
            or launch.srun.after == "&"
            or slurm_options(launch.srun).keys() & {"nodelist", "relative"}
        ):
            continue
        value = option.value.strip("\"'")
        default = re.fullmatch(r"\$\{([A-Za-z_]\w*):?-0\}", value)
        wrong = None
        if re.fullmatch(r"\$\{?SLURM_LOCALID(?::-0)?\}?", value):
            wrong = "$SLURM_LOCALID is the number of the task on its node: 0 on every node"
        elif (
            default
            and not default[1].startswith("SLURM_")
            and not job.has(default[1])
            and default[1] not in job.reading.named
        ):
            wrong = f"nothing sets ${default[1]}, so it is 0 on every node"
        elif value in ("$(echo $SLURM_NODEID)", "$(echo $SLURM_PROCID)") and not any(
            "SLURM_" in u.name and u.under for u in job.uses
        ):
            wrong = f"{value} is expanded by the batch shell, where it is 0"
        elif re.match(r"\$\(\s*hostname\b", value) and not any(c.program == "hostname" and c.srun for c in job.calls):
            wrong = f"{value} is expanded by the batch shell, on the first node"
        if wrong:
            yield Violation(
                option.arg.offset,
                f"{option.written}: {wrong}",
                why=SAME_RANK_WHY,
                cure=SAME_RANK_CURE,
            )


RANK_NAME = lazy_regex(r"(?i)(?:node|machine)_?rank")
FROM_OUTSIDE = lazy_regex(r"\$(?:\{?\d\b|\{?[A-Za-z_])")
RANK_DROPPED_WHY = "Every node runs this script with the same rank: the launchers take each other's place, or wait for the other ranks until the timeout."


def rank_not_used(job: JobDescription) -> Iterator[Violation]:
    """Report a constant rank of the node in a script that takes the rank from outside and does not use it."""
    if job.kind != "script" or job.submits:
        return
    taken = [
        a
        for a in job.set_values_at_top()
        if RANK_NAME.fullmatch(a.name) and FROM_OUTSIDE.match(a.value) and a.name not in job.used_names
    ]
    if not taken or any(a.exported for a in taken):
        return
    for launch in job.launches:
        option, nodes = launch.option("node_rank", "machine_rank"), launch.option("nnodes", "num_machines")
        if option is None or nodes is None or not (option.value or "").isdecimal() or backend(launch) != "static":
            continue
        if (
            launch.call.in_loop
            or launch.call.branch
            or (job.number(nodes.value) or 2) < 2
            or taken[0].offset > launch.call.offset
        ):
            continue
        line = job.lines.place(taken[0].offset)[0]
        text = f"{option.arg.text}: the same on every node; {taken[0].name} of line {line} is not used"
        yield Violation(option.arg.offset, text, why=RANK_DROPPED_WHY, cure=f"--node_rank=${taken[0].name}")
        return


# ------------------------------------------------------------------------------------------ address

TCP_LOCAL = lazy_regex(r"tcp://(?:localhost|127\.0\.0\.\d{1,3}|0\.0\.0\.0)(?::.*)?\Z")


def local_url(job: JobDescription) -> Iterator[Violation]:
    """Report ``tcp://localhost`` as the meeting point of ranks on several nodes."""
    for launch in job.launches:
        if launch.kind != "python" or launch.call.in_loop or launch.call.in_function:
            continue
        started = started_by(job, launch)
        nodes = job.srun_nodes(launch.srun) if launch.srun else job.nodes
        if not started or not nodes or nodes < 2 or launch.open_srun or (started.total or nodes) < nodes:
            continue
        if launch.srun and slurm_options(launch.srun).keys() & {"nodelist", "relative"}:
            continue
        for arg in launch.call.args:
            value = arg.text.rpartition("=")[2]
            if TCP_LOCAL.fullmatch(value):
                yield Violation(
                    arg.offset, f"{value} in a job of {nodes} nodes: every node waits for itself", severity="error"
                )
                break


ADDRESS_WHY = "The address must be that of the first node, and every other node must be able to reach it."
ADDRESS_CURE = 'in the batch script, outside of containers: MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)'
HOSTLESS_WHY = (
    "torchrun compares host names to decide whether it hosts the c10d store. The IP address of a second interface matches "
    "no host name, so no node listens, and all nodes wait until the timeout."
)
HOSTLESS_CURE = "use the host name of the first node; or --rdzv_conf=is_host=1 on it and is_host=0 elsewhere; or --master_addr with a static rendezvous"
ID_PER_NODE_WHY = (
    "Nodes meet if they have the same id. Each of these waits alone in its own rendezvous until the timeout."
)
ID_PER_NODE_CURE = "--rdzv_id=$SLURM_JOB_ID"
CONTAINER_WHY = "scontrol is on the host, not in the image; the substitution is empty, and with a fall-back to localhost every node forms its own group."


def address(job: JobDescription) -> Iterator[Violation]:
    seen: set[int] = set()
    for item in job.assignments:
        if item.removed or item.in_substitution or not ADDRESS_NAME.match(item.name):
            continue
        if item.name.islower() and not item.exported and is_only_shown(job, item.name):
            continue
        if ALL_ADDRESSES.search(item.value) and _is_list(job, item):
            continue
        if job.is_copy(item) and any(
            ADDRESS_NAME.match(a.name) and a.value == item.value for a in job.assignments if a is not item
        ):
            continue
        wrong = list(_malformed_hits(item.name, item.source, item.offset)) if item.name == "MASTER_ADDR" else []
        for hit in wrong or _address_hits(job, item.name, item.value, item.offset, under_srun(item.under)):
            seen.add(job.lines.place(hit.offset)[0])
            yield hit
    for launch in job.launches:
        option = launch.option("master_addr", "main_process_ip", "rdzv_endpoint")
        if option is None or option.value is None:
            continue
        wrong = [] if seen or "rdzv_endpoint" in launch.options else list(_malformed_option(launch, option.arg))
        yield from wrong
        if wrong:
            continue
        if launch.value("nnodes", "num_machines") == "1" and LOOPBACK.fullmatch(option.value):
            continue
        place = max((a.source.where(0) for a in launch.call.args if a is option.arg), default=option.arg.offset)
        literal = option.value.rpartition(":")[0] or option.value
        for hit in _address_hits(job, option.written, literal, place, _in_task(job, launch, option.arg)):
            if (not seen or _is_literal_host(job, literal)) and not any(
                ADDRESS_NAME.match(a.name) and a.value and a.value in literal for a in job.assignments
            ):
                yield hit
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
    """Report a static rendezvous without an address."""
    for launch in job.launches:
        lonely = job.multi_node and is_torchrun(launch) and backend(launch) == "c10d" and not launch.open_ended
        if lonely and not launch.option("rdzv_endpoint", "standalone") and not job.has("PET_RDZV_ENDPOINT"):
            ignored = " (--master_addr is for a static rendezvous)" if launch.option("master_addr") else ""
            chosen = launch.option("rdzv_backend")
            yield Violation(
                chosen.arg.offset if chosen else launch.call.offset,
                f"no --rdzv_endpoint: with c10d every node waits at its own localhost{ignored}",
                cure='--rdzv_endpoint="$MASTER_ADDR:$MASTER_PORT"',
                severity="error",
            )
        yield from _own_address(job, launch)
        several = job.multi_node and is_torchrun(launch) and backend(launch) == "static" and launch.srun is not None
        told = launch.option("master_addr", "rdzv_endpoint", "standalone") or job.has("PET_MASTER_ADDR")
        nodes = launch.value("nnodes")
        if several and not told and not launch.open_ended and nodes not in (None, "1"):
            yield Violation(
                launch.call.offset,
                "no --master_addr: torchrun uses 127.0.0.1 (it does not read MASTER_ADDR), and every node waits for itself",
                cure='--master_addr="$MASTER_ADDR" --master_port="$MASTER_PORT"; or c10d with --rdzv_endpoint="$MASTER_ADDR:$MASTER_PORT"',
                severity="error",
            )


def _own_address(job: JobDescription, launch: LauncherCall) -> Iterator[Violation]:
    """Report a launcher for several nodes without an address that another starter than srun, or a loop, runs on each node."""
    nodes, rank = launch.option("nnodes"), launch.option("node_rank")
    if launch.srun or not is_torchrun(launch) or backend(launch) != "static" or launch.open_ended or nodes is None:
        return
    spread = any(c.program in SPREADING for c in launch.call.under)
    if nodes.value in (None, "1", "1:1") or not (rank or spread) or launch.option("master_addr", "rdzv_endpoint"):
        return
    # --standalone beside a node rank comes from the branch for one node: the reader takes both branches of an if.
    if job.has("PET_MASTER_ADDR") or ("standalone" in launch.options and rank is None):
        return
    yield Violation(
        nodes.arg.offset,
        f"{launch.kind} for several nodes without --master_addr: every node waits for the others at its own 127.0.0.1",
        cure="--master_addr=<first node> --master_port=<port>, the same on every node",
        severity="error",
    )


UNKNOWN_PART = lazy_regex(f"{UNRESOLVED_OPEN}[^{UNRESOLVED_OPEN}{UNRESOLVED_CLOSE}]*{UNRESOLVED_CLOSE}")
IPV6 = lazy_regex(r"\[?[0-9a-fA-F]{0,4}(?::[0-9a-fA-F]{0,4}){2,7}(?:%\w+)?\]?")


def _malformed(value: str) -> str | None:
    """Return what makes a value no address; `value` has ``?`` for each part that is unknown."""
    if re.match(r"[a-z]+://", value):
        return "a URL"
    if IPV6.fullmatch(value):
        return None
    if re.search(r"[^\s,?][\s,]+[^\s,?]", value):
        return "a list"
    if re.search(r"[^:]:\d+\Z", value):
        return "an address with a port"
    if re.search(r"[^:]:[^:]", value):
        return "two values with a colon between them"
    numbers = re.fullmatch(r"(\d{1,9})(?:\.(\d{1,9})){3}", value)
    return "no IP address: its numbers go up to 255" if numbers and max(map(int, value.split("."))) > 255 else None


def _malformed_hits(name: str, source: MappedText, offset: int) -> Iterator[Violation]:
    text = source.text.strip()
    while (shorter := UNKNOWN_PART.sub("?", text)) != text:
        text = shorter
    text = text.strip("\"'")
    what = _malformed(text)
    if what and UNRESOLVED_OPEN not in text:
        why = "No resolver accepts it: all ranks fail at the rendezvous, or wait for it until the timeout."
        cure = "the name or the IP address of the first node alone; the port has its own variable"
        yield Violation(offset, f"{name} is {what}", why=why, cure=cure, severity="error")


def _malformed_option(launch: LauncherCall, arg: Argument) -> Iterator[Violation]:
    name, equals, _ = arg.text.partition("=")
    if equals:
        start = arg.source.text.find("=") + 1
        source = arg.source.part(start, len(arg.source.text))
    else:
        source = launch.call.args[launch.call.args.index(arg) + 1].source
    return _malformed_hits(name, source, arg.offset)


SUBMIT_HOST = lazy_regex(r"\$\{?(?:SLURM_SUBMIT_HOST|PBS_O_HOST|LSB_SUB_HOST)\}?")
TWO_SLICES = lazy_regex(r"(?:\$\{SLURM_(?:JOB_)?NODELIST:\s*\d{1,3}:\s*\d{1,3}\}){2}")
BRACKET_TEST = lazy_regex(r"\*[\"']?\\?\[[\"']?\*|==?\s*[\"']\[[\"']")  # [[ $list == *"["* ]]
LAST_NODE = lazy_regex(r"\bscontrol\s+show\s+hostnames?\b[^|]*\|\s*tail\s+(?:-n\s*)?-?1\b")
FIRST_OF_ALL = lazy_regex(r"\$\(\s*srun\b([^|()]*?)\bhostname\b[^|()]*\|[^()]*\)")
ONE_TASK = lazy_regex(r"(?:-n|--ntasks|-N|--nodes)[ =]?1\b|\s(?:-w|-r|--nodelist|--relative)\b")


def _wrong_host(job: JobDescription, name: str, value: str, offset: int) -> Iterator[Violation]:
    """Report addresses of a host that is not the one of rank 0: the login node, the last node, a name cut for another form of list."""
    if job.is_job and SUBMIT_HOST.search(value):
        yield Violation(
            offset,
            f"{name} is the host on which sbatch was called, not a node of the job",
            why="No rank runs on the login node, so nobody listens at this address: all ranks wait until the timeout.",
            severity="error",
        )
    elif job.is_batch and job.nodes == 1 and TWO_SLICES.search(value) and not _tests_list(job) and _meets(job, name):
        yield Violation(
            offset,
            f"{name} leaves out the character where a list of several nodes has its bracket; the name of one node has none",
            why="SLURM_NODELIST is node[01-04] for several nodes and node01 for one: of the single name a digit is lost.",
            severity="error" if LONG_NAMES.search(_place_of_job(job)) else "note",  # a short name is not cut
        )
    elif (
        job.multi_node
        and (found := FIRST_OF_ALL.fullmatch(value))
        and not ONE_TASK.search(found[1])
        and "sort" not in value
    ):
        yield Violation(
            offset,
            f"{name} is the name that srun prints first, and the tasks print in any order: rank 0 may be on another node",
        )
    elif job.multi_node and LAST_NODE.search(value) and any(backend(la) == "static" for la in job.launches):
        yield Violation(
            offset,
            f"{name} is the last node, but rank 0, which has to listen there, is on the first",
            severity="error",
        )


LONG_NAMES = lazy_regex(r"\blearn(?:fair|lab|accel)|\bdevlab\b|\bvolta\d")
"""Requests of the cluster for whose names, learnfair and four digits, this cut was written."""


def _place_of_job(job: JobDescription) -> str:
    return " ".join(job.heads(name) or "" for name in ("partition", "constraint", "nodelist"))


def _meets(job: JobDescription, name: str) -> bool:
    """Return whether the script uses the address, or starts several tasks, which do."""
    several = any((started := started_by(job, la)) and (started.per_node or 2) > 1 for la in job.launches)
    return several or name in job.used_names or any(la.kind != "python" for la in job.launches)


def _tests_list(job: JobDescription) -> bool:
    """Return whether the script looks at the form of the list of nodes before it uses it."""
    return any(
        u.name in ("SLURM_NODELIST", "SLURM_JOB_NODELIST") and u.program in ("[", "[[", "test", "case", "?")
        for u in job.uses
    ) or bool(re.search(r"\bcase\s+\"?\$\{?SLURM_(?:JOB_)?NODELIST", job.text))


ALL_ADDRESSES = lazy_regex(r"hostname\s+(?:-I|--all-ip-addresses)\b(?![^)]*\|)")


def _is_list(job: JobDescription, item: Assignment) -> bool:
    """Return whether the name is an array, whose ``$NAME`` is its first element, one element, or a text that becomes an array."""
    if item.items is not None or re.match(r"[\w ]+=[\"']?\$\{\w+\[\d+\]\}", job.text[item.offset : item.offset + 200]):
        return True
    uses = len(re.findall(rf"\$\{{?{item.name}\b", job.code))
    return 0 < uses == len(re.findall(rf"=\(\s*\$\{{?{item.name}\}}?\s*\)", job.code))


def _address_hits(job: JobDescription, name: str, value: str, offset: int, under_srun: bool) -> Iterator[Violation]:
    wrong = list(_wrong_host(job, name, value, offset))
    if wrong:
        yield from wrong
        return
    if re.search(r"hostname\s+(?:--ip-address|-i|--all-ip-addresses|-I)\b", value):
        listed = ALL_ADDRESSES.search(value)
        said = (
            "is the list of all addresses of the node"
            if listed
            else "comes from hostname: with Debian's /etc/hosts it is 127.0.1.1"
        )
        yield Violation(offset, f"{name} {said}", severity="warning" if listed else "note")
    elif re.search(r"\bgetent\s+a?hosts(?:v4)?\s", value):
        text = f"{name} is the address from getent: on the node itself, Debian's /etc/hosts returns 127.0.1.1"
        yield Violation(offset, text, severity="note")
    if re.search(r"\|\|\s*echo\s+[\"']?(?:localhost|127\.)", value) or (
        job.is_batch and job.multi_node and re.search(r"\{(?!SLURM_)\w+:?-(?:localhost|127\.0\.0\.1)\}", value)
    ):
        yield Violation(
            offset, f"{name} falls back to localhost: every node would form its own group", severity="error"
        )
    elif (job.multi_node or _spreads_chunks(job)) and LOOPBACK.fullmatch(value):
        yield Violation(
            offset, f"{name}={value} in a job of several nodes: every node waits for itself", severity="error"
        )
    elif job.multi_node:
        yield from _of_several_nodes(job, name, value, offset, under_srun)
    elif job.nodes == 1 and name.lstrip("-").upper() in STATIC_NAMES and _is_literal_host(job, value):
        yield Violation(offset, f"{name}={value}: the next job gets another node")


def _spreads_chunks(job: JobDescription) -> bool:
    """Return whether a job of PBS requests several chunks, and starts so many ranks on each node: the chunks are nodes."""
    several = job.pbs is not None and job.nodes is None and (job.pbs.chunks or 0) > 1
    return several and re.search(r"\b(?:mpiexec|mpirun)\b[^\n]*\s--?(?:ppn|npernode)\b", job.code) is not None


STATIC_NAMES = {"MASTER_ADDR", "MAIN_PROCESS_IP"}


def _is_literal_host(job: JobDescription, value: str) -> bool:
    """Return whether the value is the name or address of one host, on which the job need not run."""
    pinned = job.heads("nodelist")
    literal = re.fullmatch(r"(?!\$)[A-Za-z0-9][A-Za-z0-9.-]*", value) and not value.isdecimal()
    return bool(job.is_batch and literal and not LOOPBACK.fullmatch(value)) and not (pinned and "," not in pinned)


COMPOSED = lazy_regex(r"\d{1,3}\.\d{1,3}\.\d{1,3}\.\$\(.*\d.*|\d{1,3}\.\d{1,3}\.\d{1,3}\.\$\{\w+[#%:/].*")


def _of_several_nodes(job: JobDescription, name: str, value: str, offset: int, under_srun: bool) -> Iterator[Violation]:
    if COMPOSED.fullmatch(value):
        text = f"{name} is composed from the digits of the host's name: a leading zero makes another address of them"
        yield Violation(
            offset, text, why="Numbers of an address with a leading zero are read as octal, 010 as 8, or refused, 008."
        )
    own = re.fullmatch(r"\$\(hostname(?:\s+-[sfd])?\)|\$\{?(?:HOSTNAME|SLURMD_NODENAME)\}?", value.replace("`", ""))
    if own and under_srun:
        yield Violation(offset, f"{name}={value} inside of srun: every node uses its own name", severity="error")
    elif own and not job.is_job:
        yield Violation(offset, f"{name}={value}: under salloc this script runs on the login node, whose name it gets")
    elif (
        re.search(r"SLURM_(?:JOB_)?NODELIST", value)
        and not re.search(r"scontrol|nodeset|hostlist|python|\[", value)
        and not TWO_SLICES.search(value)
        and not BRACKET_TEST.search(job.text)
    ):
        yield Violation(offset, f"{name} is cut from the compressed list, which is node[01-04] and not node01,node02")
    elif "SLURM_LAUNCH_NODE_IPADDR" in value and not job.is_batch:
        yield Violation(offset, f"{name}={value}: under salloc that is the login node")
    elif _is_literal_host(job, value) and value not in re.split(r"[,\s]", job.heads("nodelist") or ""):
        yield Violation(offset, f"{name}={value}: the next job gets other nodes")


OWN_TO_NODE = lazy_regex(
    r"\b(?:SLURM_NODEID|SLURM_PROCID|SLURM_LOCALID|SLURMD_NODENAME|HOSTNAME|NODE_RANK|RANK)\b|\bhostname\b"
)
DRAWN = lazy_regex(
    r"\$\{?(?:RANDOM|SRANDOM|BASHPID|EPOCHREALTIME)\b|\$\$|\buuidgen\b|\bshuf\b|\bdate\b|\bmktemp\b|/proc/sys/kernel/random"
)


def id_per_node(job: JobDescription) -> Iterator[Violation]:
    """Report a rendezvous id that a shell on each node makes, so that every node has its own."""
    if not job.multi_node and job.is_job:
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


def hostless(job: JobDescription) -> Iterator[Violation]:
    for launch in job.launches:
        option = launch.option("rdzv_endpoint")
        if (
            option is None
            or not option.value
            or backend(launch) != "c10d"
            or "is_host" in (launch.value("rdzv_conf") or "")
        ):
            continue
        if re.search(
            r"\bip\s+(?:-\S+\s+)*(?:a|addr|address|route)\b|ifconfig|\A\d+\.\d+\.\d+\.\d+|\$\(\s*(?:host|dig|nslookup)\s",
            option.value,
        ):
            if not option.value.startswith("127."):
                # A fixed address, and one that DNS returns, is mostly that of the host's name.
                looked_up = re.search(r"\$\(\s*(?:host|dig|nslookup)\s|\A\d+\.\d+\.\d+\.\d+", option.value)
                yield Violation(
                    option.arg.offset,
                    "the c10d endpoint is an IP address, which may match no node",
                    severity="note" if looked_up else "warning",
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
