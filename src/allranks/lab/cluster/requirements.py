"""Check whether this machine can run a box, before anything is created."""

from __future__ import annotations

import ipaddress
import json
import os
import pwd
import re
import shutil
import sys
from pathlib import Path

from allranks.errors import EnvironmentNotAble
from allranks.lab.cluster.plan import Machine
from allranks.lab.cluster.processes import SYSTEM_PATH, check_output, find_program, last_lines, run_command
from allranks.utils.filesystem import PACKAGE_FOLDER

INSTALL = "On Debian or Ubuntu run scripts/install-slurm.sh, or: apt-get install --no-install-recommends"
PACKAGES = {
    "munged": "munge", "slurmctld": "slurm-wlm", "slurmd": "slurm-wlm", "srun": "slurm-wlm", "sbatch": "slurm-wlm",
    "scontrol": "slurm-wlm", "ip": "iproute2", "tc": "iproute2", "nsenter": "util-linux", "unshare": "util-linux",
    "setsid": "util-linux", "setpriv": "util-linux", "hostname": "hostname",
}  # fmt: skip
ACCOUNTING_PACKAGES = {"slurmdbd": "slurmdbd", "mariadbd": "mariadb-server", "mariadb-install-db": "mariadb-server"}


def missing_programs(accounting: bool = False) -> dict[str, str]:
    """Return the programs that a box needs and this machine lacks, each with its Debian package."""
    wanted = {**PACKAGES, **(ACCOUNTING_PACKAGES if accounting else {})}
    path = f"{os.environ.get('PATH', '')}:{SYSTEM_PATH}"
    return {name: package for name, package in wanted.items() if shutil.which(name, path=path) is None}


def check_requirements(accounting: bool = False) -> None:
    """Raise `EnvironmentNotAble` with what is missing and how to fix it, if anything is missing."""
    missing = missing_programs(accounting)
    if missing:
        packages = " ".join(sorted(set(missing.values())))
        raise EnvironmentNotAble(f"This machine lacks {', '.join(missing)}. {INSTALL} {packages}.")
    _check_rights()


def _check_rights() -> None:
    rootless = os.geteuid() != 0
    user = ["--user", "--map-root-user"] if rootless else []
    spaces = ["--net", "--mount", "--uts", "--ipc", "--pid", "--fork"]
    done = run_command([find_program("unshare"), *user, *spaces, "mount", "-t", "tmpfs", "none", "/mnt"])
    if done.returncode == 0:
        return
    reason = last_lines(done.stderr)
    if rootless:
        raise EnvironmentNotAble(
            f"A box needs root here: ordinary users cannot create namespaces on this machine ({reason}). "
            "Run the command as root, or enable unprivileged user namespaces."
        )
    raise EnvironmentNotAble(
        f"Root cannot create namespaces or mounts here ({reason}). "
        "In a container, start it with --privileged (or the capabilities SYS_ADMIN and NET_ADMIN)."
    )


def slurm_version() -> tuple[int, int]:
    """Return year and month of the installed Slurm."""
    text = check_output([find_program("slurmctld"), "-V"])
    version = re.search(r"(\d+)\.(\d+)", text)
    if version is None:
        raise EnvironmentNotAble(f"'slurmctld -V' did not print a version: {last_lines(text)}")
    return int(version[1]), int(version[2])


def this_machine() -> Machine:
    """Return the facts that the plan needs."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    uid = os.geteuid()
    try:
        user = pwd.getpwuid(uid).pw_name
    except KeyError:
        raise EnvironmentNotAble(f"User {uid} has no name in /etc/passwd, but Slurm needs one.") from None
    return Machine(user, uid, os.getegid(), os.cpu_count() or 1, memory >> 20, _python_folders())


def _python_folders() -> tuple[str, ...]:
    """Return the folders inside /tmp that a node needs to start this Python and import this package; none inside
    another.

    A package that runs from a clone comes with the whole clone: its examples name files beside them.
    """
    source = PACKAGE_FOLDER.parent
    needed = {Path(sys.prefix).resolve(), Path(sys.base_prefix).resolve(), source}
    if source.name == "src":
        needed.add(source.parent)
    inside = [p for p in needed if Path("/tmp") in p.parents]  # noqa: S108 - the nodes' own /tmp is meant
    return tuple(sorted(str(p) for p in inside if not any(p != q and p.is_relative_to(q) for q in inside)))


def used_networks() -> list[ipaddress.IPv4Network]:
    """Return every IPv4 range that this machine has an address in or a route to."""
    addresses = json.loads(check_output([find_program("ip"), "-json", "-4", "address", "show"]) or "[]")
    routes = json.loads(check_output([find_program("ip"), "-json", "-4", "route", "show", "table", "all"]) or "[]")
    texts = [f"{info['local']}/{info['prefixlen']}" for link in addresses for info in link.get("addr_info", [])]
    texts += [route["dst"] for route in routes if route.get("dst", "default") != "default"]
    return [ipaddress.IPv4Network(text, strict=False) for text in texts]


def nsswitch() -> str:
    """Return this machine's nsswitch.conf, or an empty text."""
    path = Path("/etc/nsswitch.conf")
    return path.read_text() if path.exists() else ""
