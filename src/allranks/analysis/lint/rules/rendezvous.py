"""Rules for the rendezvous: address, port, id and node rank."""

from __future__ import annotations

import re
from collections.abc import Iterator

from allranks.analysis.lint.command_options import slurm_options
from allranks.analysis.lint.job import JobDescription, LauncherCall
from allranks.analysis.lint.records import Argument, ProgramCall, Violation

PORT_WHY = (
    "Two jobs on one node use the same port. With c10d the second job does not fail: it joins the store of the first one, and fails when "
    "that job ends; with a static rendezvous it stops with 'Address already in use'."
)
PORT_CURE = "derive it from the job ID, below the ephemeral range: MASTER_PORT=$((15000 + SLURM_JOB_ID % 15000)); on one node use torchrun --standalone"
EPHEMERAL_WHY = "The kernel assigns ports of its ephemeral range (32768 to 60999) to outgoing connections, so such a port is often in use."
PER_NODE_WHY = "Every node gets a different value, so the nodes never find each other."
ID_WHY = "Jobs with the same id and address share one rendezvous: one of them is killed, or it uses nodes of the other."
ID_CURE = "--rdzv_id=$SLURM_JOB_ID (with requeue: $SLURM_JOB_ID.$SLURM_RESTART_COUNT)"
RANK_WHY = (
    "With c10d, node ranks come from the sorted host names, and --node_rank is ignored; rank 0 and MASTER_ADDR may be on any node, "
    "and gpu10 sorts before gpu2."
)
RANK_CURE = "remove --node_rank; or, if ranks must follow Slurm's order, use --master_addr and --master_port instead of the --rdzv options"
MISSING_WHY = "Without --node_rank every node is node 0, and all wait for the others until the timeout."
MISSING_CURE = "--node_rank=$SLURM_NODEID in single quotes inside the srun command, or --rdzv_backend=c10d with --rdzv_endpoint and --rdzv_id"
EARLY_WHY = "The batch shell expands it before srun starts, where it is 0; every task on every node gets 0."
EARLY_CURE = "let the task's own shell expand it: srun bash -c '... $SLURM_NODEID ...' in single quotes, or \\$SLURM_NODEID in double quotes"
ADDRESS_WHY = "The address must be that of the first node, and every other node must be able to reach it."
ADDRESS_CURE = 'in the batch script, outside of containers: MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)'
HOSTLESS_WHY = (
    "torchrun compares host names to decide whether it hosts the c10d store. The IP address of a second interface matches "
    "no host name, so no node listens, and all nodes wait until the timeout."
)
HOSTLESS_CURE = "use the host name of the first node; or --rdzv_conf=is_host=1 on it and is_host=0 elsewhere; or --master_addr with a static rendezvous"
CONTAINER_WHY = "scontrol is on the host, not in the image; the substitution is empty, and with a fall-back to localhost every node forms its own group."
PORT_NAME = re.compile(r"(?:MASTER|RDZV|HEAD|MAIN|RENDEZVOUS)\w*PORT\Z|PORT\Z", re.IGNORECASE)
ADDRESS_NAME = re.compile(
    r"(?:MASTER|RDZV|HEAD|MAIN|RENDEZVOUS|COORD)\w*(?:ADDR|IP|HOST|NODE|ENDPOINT|ADDRESS)\w*\Z|(?:MASTER|HEAD)\Z",
    re.IGNORECASE,
)
TASK_NAMES = {"SLURM_NODEID", "SLURM_PROCID", "SLURM_LOCALID"}
HARMLESS = {"echo", "printf", "[", "[[", "test", "for", "date", "mkdir", "logger", "?", "cd", "touch", "tee"}
CONTAINERS = {"apptainer", "singularity", "docker", "podman", "podman-hpc", "enroot", "shifter", "ch-run"}
DEFAULT_PORTS = ("29500", "29400")


def backend(launch: LauncherCall) -> str:
    return (launch.value("rdzv_backend") or "static").lower()


def _is_torchrun(launch: LauncherCall) -> bool:
    return launch.kind in ("torchrun", "torch.distributed.launch")


def port(job: JobDescription) -> Iterator[Violation]:
    seen: set[int] = set()
    for item in [] if _standalone(job) else job.assignments:
        if item.removed or not PORT_NAME.match(item.name) or item.items:
            continue
        if item.name.upper() == "PORT" and not any(
            str(item.value) in a.text for la in job.launches for a in la.call.args
        ):
            continue
        digits = re.fullmatch(r"(\d{2,5})|\$\{\w+:?[-=](\d{2,5})\}", item.value)
        if digits and (job.kind == "script" or digits[1] in DEFAULT_PORTS):
            seen.add(job.lines.place(item.offset)[0])
            said = f"is always {digits[1]}" if digits[1] else f"is {digits[2]} unless it is set outside"
            yield Violation(item.offset, f"{item.name} {said}")
    for launch in job.launches:
        for hit in _launch_port(job, launch):
            line = job.lines.place(hit.offset)[0]
            if line not in seen:
                seen.add(line)
                yield hit


def _launch_port(job: JobDescription, launch: LauncherCall) -> Iterator[Violation]:
    for name, pattern in (
        ("master_port", r"\d+\Z"),
        ("main_process_port", r"\d+\Z"),
        ("rdzv_endpoint", r"(?<=:)\d+\Z"),
    ):
        option = launch.option(name)
        found = re.search(pattern, option.value or "") if option else None
        if option and found and found[0] != "0" and "standalone" not in launch.options:
            yield Violation(_place(option.arg, launch, found[0]), f"the port of --{name} is always {found[0]}")
    if _is_torchrun(launch) and job.multi_node and backend(launch) == "static" and launch.srun:
        if not launch.option("master_port", "rdzv_endpoint") and not job.has("PET_MASTER_PORT"):
            yield Violation(launch.call.offset, "no --master_port: torchrun uses 29500 (it does not read MASTER_PORT)")


def _place(arg: Argument, launch: LauncherCall, digits: str) -> int:
    """Return the position of the digits, perhaps in a variable's value further up."""
    args = launch.call.args
    start = args.index(arg)
    for candidate in args[start : start + 2]:
        index = candidate.source.text.rfind(digits)
        if index >= 0:
            return candidate.source.where(index)
    return arg.offset


def _standalone(job: JobDescription) -> bool:
    """Return whether no launcher uses a port of the script: ``--standalone`` finds a free one itself."""
    return bool(job.launches) and all("standalone" in la.options for la in job.launches)


def ephemeral(job: JobDescription) -> Iterator[Violation]:
    for item in [] if _standalone(job) else job.assignments:
        if item.removed or not PORT_NAME.match(item.name):
            continue
        span = _port_range(item.value)
        if span is None:
            continue
        if span[1] >= 32768 and span[0] <= 60999:
            yield Violation(item.offset, f"{item.name} is chosen from {span[0]} to {span[1]}, in the ephemeral range")
        elif span[0] < 1024:
            yield Violation(
                item.offset,
                f"{item.name} may be below 1024, which only root may use",
                why="Binding fails with 'Permission denied'.",
            )


def _port_range(value: str) -> tuple[int, int] | None:
    if found := re.search(r"shuf\s.*?-i\s*(\d{1,5})-(\d{1,5})", value):
        return int(found[1]), int(found[2])
    if found := re.search(r"\(\(\s*(\d{1,5})\s*\+\s*\(?[^%]*%\s*(\d{1,5})\s*\)?\s*\)\)", value):
        return int(found[1]), int(found[1]) + int(found[2]) - 1
    if found := re.search(r"\(\(\s*\(?[^%]*%\s*(\d{1,5})\s*\)?\s*\+\s*(\d{1,5})\s*\)\)", value):
        return int(found[2]), int(found[1]) + int(found[2]) - 1
    if found := re.search(r"\(\(\s*(?:(\d{1,5})\s*\+\s*\$?RANDOM|\$?RANDOM\s*\+\s*(\d{1,5}))\s*\)\)", value):
        base = int(found[1] or found[2])
        return base, base + 32767
    return (0, 32767) if value == "$RANDOM" else None


def port_per_node(job: JobDescription) -> Iterator[Violation]:
    if not job.multi_node:
        return
    drawn = re.compile(r"RANDOM|shuf|\.bind\(|SLURM_(?:NODEID|PROCID|LOCALID)|free.?port", re.IGNORECASE)
    for item in job.assignments:
        if PORT_NAME.match(item.name) and _under_srun(item.under) and drawn.search(item.value):
            yield Violation(
                item.offset,
                f"{item.name} is chosen on every node separately",
                cure="choose it once, in the batch script. " + PORT_CURE,
            )
    for use in job.uses:
        if use.name == "RANDOM" and use.program in ("torchrun", "python") and _under_srun(use.under):
            yield Violation(use.offset, "$RANDOM differs on every node", cure=ID_CURE)


def _under_srun(under: tuple[ProgramCall, ...]) -> bool:
    return any(c.program == "srun" for c in under)


def identity(job: JobDescription) -> Iterator[Violation]:
    for launch in job.launches:
        if launch.kind != "torchrun" or backend(launch) != "c10d" or "standalone" in launch.options:
            continue
        option = launch.option("rdzv_id")
        if option is None:
            if not job.has("PET_RDZV_ID"):
                yield Violation(launch.call.offset, "no --rdzv_id: the default id is 'none' for every job")
        elif option.value and "$" not in option.value:
            yield Violation(option.arg.offset, f"the rendezvous id is always {option.value}")


def node_rank(job: JobDescription) -> Iterator[Violation]:
    for launch in job.launches:
        option = launch.option("node_rank", "machine_rank")
        if option and launch.kind in ("torchrun", "accelerate") and backend(launch) in ("c10d", "etcd", "etcd-v2"):
            yield Violation(
                option.arg.offset, f"--rdzv_backend={backend(launch)} ignores {option.arg.text.split('=')[0]}"
            )


def rank_missing(job: JobDescription) -> Iterator[Violation]:
    if not job.multi_node:
        return
    for launch in job.launches:
        nodes = launch.value("nnodes", "num_machines", "num_nodes")
        if launch.option("node_rank", "machine_rank", "standalone", "config_file", "hostfile") or job.has(
            "PET_NODE_RANK"
        ):
            continue
        several = nodes is not None and nodes not in ("0", "1") and ":" not in nodes
        if launch.kind == "deepspeed":
            several = "no_ssh" in launch.options
        if several and backend(launch) == "static":
            name = "--machine_rank" if launch.kind == "accelerate" else "--node_rank"
            yield Violation(launch.call.offset, f"{launch.kind} on several nodes without {name}")


def early(job: JobDescription) -> Iterator[Violation]:
    starts = any(c.program == "srun" and not c.in_substitution for c in job.calls)
    if not starts or not (job.multi_node or any(la.kind == "python" for la in job.launches)):
        return
    for use in job.uses:
        if (
            use.name in TASK_NAMES
            and not _under_srun(use.under)
            and not use.in_function
            and use.program not in HARMLESS
        ):
            yield Violation(use.offset, f"${use.name} is expanded by the batch shell, where it is 0")


def address(job: JobDescription) -> Iterator[Violation]:
    seen: set[int] = set()
    for item in job.assignments:
        if item.removed or item.in_substitution or not ADDRESS_NAME.match(item.name):
            continue
        for hit in _address_hits(job, item.name, item.value, item.offset, _under_srun(item.under)):
            seen.add(job.lines.place(hit.offset)[0])
            yield hit
    for launch in job.launches:
        option = launch.option("master_addr", "main_process_ip", "rdzv_endpoint")
        if option is None or option.value is None:
            continue
        place = max((a.source.where(0) for a in launch.call.args if a is option.arg), default=option.arg.offset)
        literal = option.value.rpartition(":")[0] or option.value
        for hit in _address_hits(job, option.arg.text.split("=")[0], literal, place, launch.srun is not None):
            if not seen and not any(
                ADDRESS_NAME.match(a.name) and a.value and a.value in literal for a in job.assignments
            ):
                yield hit
    yield from _no_address(job)


def _no_address(job: JobDescription) -> Iterator[Violation]:
    """Report a static rendezvous without an address."""
    for launch in job.launches:
        several = job.multi_node and _is_torchrun(launch) and backend(launch) == "static" and launch.srun is not None
        told = launch.option("master_addr", "rdzv_endpoint", "standalone") or job.has("PET_MASTER_ADDR")
        nodes = launch.value("nnodes")
        if several and not told and not launch.open_ended and nodes not in (None, "1"):
            yield Violation(
                launch.call.offset,
                "no --master_addr: torchrun uses 127.0.0.1 (it does not read MASTER_ADDR), and every node waits for itself",
                cure='--master_addr="$MASTER_ADDR" --master_port="$MASTER_PORT"; or c10d with --rdzv_endpoint="$MASTER_ADDR:$MASTER_PORT"',
                severity="error",
            )


def _address_hits(job: JobDescription, name: str, value: str, offset: int, under_srun: bool) -> Iterator[Violation]:
    if re.search(r"hostname\s+(?:--ip-address|-i|--all-ip-addresses|-I)\b", value):
        text = f"{name} comes from hostname: with Debian's /etc/hosts it is 127.0.1.1, with -I the first address of any network"
        yield Violation(offset, text)
    elif re.search(r"\bgetent\s+a?hosts(?:v4)?\s", value):
        yield Violation(
            offset, f"{name} is the address from getent: on the node itself, Debian's /etc/hosts returns 127.0.1.1"
        )
    if re.search(r"\|\|\s*echo\s+[\"']?(?:localhost|127\.)", value) or (
        job.multi_node and re.search(r"\{(?!SLURM_)\w+:?-(?:localhost|127\.0\.0\.1)\}", value)
    ):
        yield Violation(
            offset, f"{name} falls back to localhost: every node would form its own group", severity="error"
        )
    elif job.multi_node and re.fullmatch(r"localhost|127\.\d+\.\d+\.\d+|::1", value):
        yield Violation(
            offset, f"{name}={value} in a job of several nodes: every node waits for itself", severity="error"
        )
    elif job.multi_node:
        yield from _of_several_nodes(job, name, value, offset, under_srun)


def _of_several_nodes(job: JobDescription, name: str, value: str, offset: int, under_srun: bool) -> Iterator[Violation]:
    own = re.fullmatch(r"\$\(hostname(?:\s+-[sfd])?\)|\$\{?(?:HOSTNAME|SLURMD_NODENAME)\}?", value.replace("`", ""))
    if own and under_srun:
        yield Violation(offset, f"{name}={value} inside of srun: every node uses its own name", severity="error")
    elif own and not job.is_batch:
        yield Violation(offset, f"{name}={value}: under salloc this script runs on the login node, whose name it gets")
    elif re.search(r"SLURM_(?:JOB_)?NODELIST", value) and not re.search(r"scontrol|nodeset|hostlist|python|\[", value):
        yield Violation(offset, f"{name} is cut from the compressed list, which is node[01-04] and not node01,node02")
    elif "SLURM_LAUNCH_NODE_IPADDR" in value and not job.is_batch:
        yield Violation(offset, f"{name}={value}: under salloc that is the login node")
    elif job.is_batch and re.fullmatch(r"(?!\$)[A-Za-z0-9][A-Za-z0-9.-]*", value) and not value.isdecimal():
        yield Violation(offset, f"{name}={value}: the next job gets other nodes")


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
            r"\bip\s+(?:-\S+\s+)*(?:a|addr|address|route)\b|ifconfig|hostname\s+-I|\A\d+\.\d+\.\d+\.\d+|\$\(\s*(?:host|dig|nslookup)\s",
            option.value,
        ):
            if not option.value.startswith("127."):
                yield Violation(
                    option.arg.offset,
                    "the c10d endpoint is an IP address, which may match no node",
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
