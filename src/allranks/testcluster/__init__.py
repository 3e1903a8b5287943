"""A real Slurm cluster on one machine: each node in network, host-name, mount and PID namespaces of its own.

For the launcher: `find_box` gives the box that is up, if any; `Box.command_prefix` is what to put before ``sbatch``,
``srun``, ``squeue`` or ``scontrol`` so that they talk to it from outside. For tests: `up`, `down`, and
`allranks.testcluster.faults`. Importing this is light; nothing is started by it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from allranks.testcluster.box import Box, find_box, need_box
from allranks.testcluster.records import BoxOptions, Hidden

if TYPE_CHECKING:
    from allranks.testcluster.lifecycle import down, up

__all__ = ["Box", "BoxOptions", "Hidden", "down", "find_box", "need_box", "up"]


def __getattr__(name: str) -> Any:
    if name in ("down", "up"):
        from allranks.testcluster import lifecycle

        return getattr(lifecycle, name)
    raise AttributeError(f"module 'allranks.testcluster' has no attribute {name!r}")
