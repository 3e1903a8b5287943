"""Render a box's configuration files as text. Pure."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import jinja2

from allranks.lab.cluster.plan import BoxPaths, BoxPlan
from allranks.nodes.slurm.srun import CLOCK_VARIABLE

BRIDGE = "bridge0"
ACCOUNT = "lab"
"""The account that ``--accounting`` creates, with root and the calling user in it."""
CRED_EXPIRE_S = 5
"""Lifetime of a job credential. A requeued job waits for its expiry, so the default of 120 s would make tests slow."""
DATABASE_PORT = 3306


def slurm_conf(plan: BoxPlan, folder: BoxPaths) -> str:
    """Return slurm.conf; a line of the user replaces the default line with the same key."""
    settings = _settings(plan, folder)
    ours = {key.lower(): key for key in settings}
    for line in plan.conf:
        settings.pop(ours.get(line.partition("=")[0].strip().lower(), ""), None)
    lines = [f"{key}={value}" for key, value in settings.items()]
    lines += [
        f"NodeName={node.name} NodeAddr={node.address} CPUs={node.cpus} RealMemory={node.memory_mb}"
        + (f" Gres=gpu:{node.gpus}" if node.gpus else "")
        + " State=UNKNOWN"
        for node in plan.nodes
    ]
    share = min(node.memory_mb // node.cpus for node in plan.nodes)
    lines += [
        f"PartitionName={name} Nodes=ALL Default={'YES' if place == 0 else 'NO'} MaxTime=INFINITE State=UP "
        f"DefMemPerCPU={max(1, share)}"
        for place, name in enumerate(plan.partitions)
    ]
    return "\n".join([*lines, *plan.conf]) + "\n"


def _settings(plan: BoxPlan, folder: BoxPaths) -> dict[str, str]:
    settings = {
        "ClusterName": plan.name,
        "SlurmctldHost": f"{plan.login}({plan.login_address})",
        "SlurmUser": plan.user,
        "SlurmdUser": plan.user,
        "AuthType": "auth/munge",
        "AuthInfo": f"socket={folder.munge_socket},cred_expire={CRED_EXPIRE_S}",
        "StateSaveLocation": str(folder.controller),
        "SlurmdSpoolDir": f"{folder.spool}/%n",
        "SlurmctldPidFile": str(folder.path / "slurmctld.pid"),
        "SlurmdPidFile": str(folder.path / "nodes" / "%n" / "slurmd.pid"),
        "SlurmctldLogFile": str(folder.log / "slurmctld.log"),
        "SlurmdLogFile": str(folder.log / "slurmd.%n.log"),
        "ProctrackType": "proctrack/linuxproc",
        "TaskPlugin": "task/none",
        "TaskProlog": str(folder.task_prolog),
        "MpiDefault": "none",
        "MailProg": "/bin/true",
        "SelectType": "select/cons_tres",
        "SelectTypeParameters": "CR_CPU_Memory",
        "SlurmdParameters": "config_overrides",
        "ReturnToService": "2",
        "SlurmdTimeout": "20",
        "KillWait": "5",
        "SchedulerParameters": "batch_sched_delay=0,sched_interval=2,bf_interval=2",
    }
    if any(node.gpus for node in plan.nodes):
        settings["GresTypes"] = "gpu"
    if plan.accounting:
        settings |= {
            "AccountingStorageType": "accounting_storage/slurmdbd",
            "AccountingStorageHost": plan.login,
            "AccountingStoragePass": str(folder.munge_socket),
            "AccountingStorageEnforce": "associations,limits,qos",
            "JobAcctGatherType": "jobacct_gather/linux",
            "JobAcctGatherFrequency": "5",
        }
        if "GresTypes" in settings:
            settings["AccountingStorageTRES"] = "gres/gpu"
    return settings


def gres_conf(plan: BoxPlan, folder: BoxPaths) -> str:
    """Return gres.conf: each GPU is a link to a harmless device, which suffices for Slurm to number and allocate it."""
    lines = [
        f"NodeName={node.name} Name=gpu File={gpu_file(folder, number)}"
        for node in plan.nodes
        for number in range(node.gpus)
    ]
    return "\n".join(lines) + "\n"


def gpu_file(folder: BoxPaths, number: int) -> Path:
    """Return the file that represents a GPU: Slurm needs a device, numbered by the digits at the end of its name."""
    return folder.etc / f"gpu{number}"


def cgroup_conf(plan: BoxPlan) -> str:
    """Return cgroup.conf: the box tracks processes without cgroups, and must not touch those of the machine."""
    return "CgroupPlugin=disabled\n" if plan.slurm_version >= (24, 5) else "CgroupPlugin=cgroup/v1\n"


def slurmdbd_conf(plan: BoxPlan, folder: BoxPaths, password: str) -> str:
    """Return slurmdbd.conf, for ``--accounting``."""
    settings = {
        "AuthType": "auth/munge",
        "AuthInfo": f"socket={folder.munge_socket}",
        "DbdHost": plan.login,
        "DbdAddr": plan.login_address,
        "SlurmUser": plan.user,
        "LogFile": str(folder.log / "slurmdbd.log"),
        "PidFile": str(folder.path / "slurmdbd.pid"),
        "StorageType": "accounting_storage/mysql",
        "StorageHost": "127.0.0.1",
        "StoragePort": str(DATABASE_PORT),
        "StorageUser": "slurm",
        "StoragePass": password,
        "StorageLoc": "slurm",
    }
    return "\n".join(f"{key}={value}" for key, value in settings.items()) + "\n"


def hosts(plan: BoxPlan, me: str, *, self_loopback: bool = False) -> str:
    """Return /etc/hosts of one node; ``self_loopback`` maps its own name to 127.0.1.1, as Debian's installer does."""
    everyone = [(plan.login_address, plan.login), *((node.address, node.name) for node in plan.nodes)]
    lines = ["127.0.0.1 localhost", "::1 localhost ip6-localhost"]
    lines += [f"{'127.0.1.1' if self_loopback and name == me else address} {name}" for address, name in everyone]
    return "\n".join(lines) + "\n"


def nsswitch_conf(original: str) -> str:
    """Return this machine's nsswitch.conf, but with host names from /etc/hosts alone."""
    kept = [line for line in original.splitlines() if not re.match(r"\s*hosts\s*:", line)]
    return "\n".join([*kept, "hosts: files"]) + "\n"


def bridge_batch(plan: BoxPlan) -> str:
    """Return the ``ip -batch`` commands for the login node."""
    prefix = plan.network.partition("/")[2]
    return (
        "link set lo up\n"
        f"link add {BRIDGE} address 02:00:0a:4d:00:01 type bridge\n"
        f"addr add {plan.login_address}/{prefix} brd + dev {BRIDGE}\n"
        f"link set {BRIDGE} up\n"
    )


def cable_batch(plan: BoxPlan, pids: dict[str, int]) -> str:
    """Return the ``ip -batch`` commands for the login node that connect each node in ``pids``."""
    lines = []
    for node in plan.nodes:
        if node.name in pids:
            lines.append(f"link add {node.port} type veth peer name {node.interface} netns {pids[node.name]}")
            lines.append(f"link set {node.port} master {BRIDGE} up")
    return "\n".join(lines) + "\n"


def node_batch(plan: BoxPlan, name: str) -> str:
    """Return the ``ip -batch`` commands for a node. Without a default route, addresses outside the box fail at once."""
    node = next(node for node in plan.nodes if node.name == name)
    prefix = plan.network.partition("/")[2]
    return (
        f"link set lo up\naddr add {node.address}/{prefix} brd + dev {node.interface}\nlink set {node.interface} up\n"
    )


def enter_script(plan: BoxPlan, folder: BoxPaths, name: str) -> str:
    """Return the first program of a node or of the login node."""
    node = plan.node(name)
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("allranks.lab.cluster"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # noqa: S701 - shell scripts, quoted by the filter q
    )
    environment.filters["q"] = lambda value: shlex.quote(str(value))
    template = environment.get_template("login.sh.j2" if node is None else "node.sh.j2")
    return template.render(
        plan=plan, folder=folder, me=name, hidden=node.hidden if node else (), clock_variable=CLOCK_VARIABLE
    )
