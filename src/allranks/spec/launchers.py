"""Registry of the launchers, and what the rest of the package needs to know of each. No class of a launcher is imported."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal


@dataclass(frozen=True)
class LauncherInfo:
    """Where a launcher is implemented, and what it means for a spec."""

    target: str
    """The class, as ``module:class`` in `allranks.launch`."""
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


LAUNCHERS: dict[str, LauncherInfo] = {
    "local": LauncherInfo("local:LocalLauncher", "this machine", "laptop", runs_here=True),
    "slurm": LauncherInfo(
        "slurm.launcher:SlurmLauncher", "a batch job; allranks submits and follows it", "slurm", uses_slurm=True
    ),
    "hosts": LauncherInfo(
        "hosts:HostsLauncher", "by hand: allranks prints a command for each node", "hosts", uses_hosts=True
    ),
}
"""The values of ``cluster.launcher``."""


if TYPE_CHECKING:
    LauncherName = str
else:  # msgspec checks the value and writes the schema
    LauncherName = Literal[tuple(LAUNCHERS)]


def launchers_with(**properties: bool) -> list[str]:
    """Return the names of the launchers that have some properties, such as ``runs_here=False``."""
    return [
        name
        for name, info in LAUNCHERS.items()
        if all(getattr(info, key) == value for key, value in properties.items())
    ]
