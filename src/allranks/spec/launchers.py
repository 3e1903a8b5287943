"""Registry of the launchers, and what the rest of the package needs to know of each. Imports no launcher class."""

from __future__ import annotations

import msgspec

from allranks.utils.plugins import PluginRegistry


class LauncherInfo(msgspec.Struct, frozen=True):
    """Where a launcher is implemented, and what it means for a spec."""

    target: str
    """The class, as ``module:class``."""
    summary: str
    """Where the ranks run, for the comment in a new spec."""
    machine: str
    """The value of ``--machine`` of ``allranks init``."""
    runs_here: bool = False
    """The ranks run on this machine only: its GPUs, memory, packages and paths are those of the ranks."""
    uses_slurm: bool = False
    """Slurm starts the job: ``cluster.slurm`` is used, bundles can be staged, and srun can enter a pyxis image."""
    uses_hosts: bool = False
    """The nodes are those of ``cluster.hosts``."""


DEFAULT_LAUNCHER = "local"


BUILT_IN: dict[str, LauncherInfo] = {
    "local": LauncherInfo("allranks.launch.launchers:LocalLauncher", "this machine", "laptop", runs_here=True),
    "slurm": LauncherInfo(
        "allranks.launch.slurm.launcher:SlurmLauncher",
        "a batch job; allranks submits and follows it",
        "slurm",
        uses_slurm=True,
    ),
    "hosts": LauncherInfo(
        "allranks.launch.hosts:HostsLauncher",
        "by hand: allranks prints a command for each node",
        "hosts",
        uses_hosts=True,
    ),
}
"""The launchers of this package."""

LAUNCHERS = PluginRegistry(BUILT_IN, group="allranks.launchers", kind=LauncherInfo)
"""The values of ``cluster.launcher``: all launchers, also those of installed packages."""


def launcher_info(name: str) -> LauncherInfo:
    """Return the registry entry of a launcher.

    Raises:
        SpecError: unknown launcher; the message names the nearest one.
        EnvironmentNotAble: the package of the launcher cannot be loaded.
    """
    return LAUNCHERS.require(name, "cluster.launcher")


def launchers_with(**properties: bool) -> list[str]:
    """Return the names of the launchers that have some properties, such as ``runs_here=False``."""
    return [
        name
        for name, info in LAUNCHERS.items()
        if all(getattr(info, key) == value for key, value in properties.items())
    ]
