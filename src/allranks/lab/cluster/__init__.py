"""Run a real Slurm cluster on one machine: each node has its own network, host-name, mount and PID namespaces.

`find_box` returns the running box, if any; `Box.command_prefix` is the prefix with which ``sbatch``, ``srun``,
``squeue`` or ``scontrol`` run inside it. For tests: `up`, `down`, and `allranks.lab.cluster.faults`. Importing this
package starts nothing. The launcher does not import it: it finds a box by the file that
`allranks.nodes.slurm.endpoints` reads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from allranks.lab.cluster.box import Box, find_box, need_box
from allranks.lab.cluster.plan import BoxOptions, HiddenFolder

if TYPE_CHECKING:
    from allranks.lab.cluster.lifecycle import down, up

__all__ = ["Box", "BoxOptions", "HiddenFolder", "down", "find_box", "need_box", "up"]


def __getattr__(name: str) -> Any:
    if name in ("down", "up"):
        from allranks.lab.cluster import lifecycle

        return getattr(lifecycle, name)
    raise AttributeError(f"module 'allranks.lab.cluster' has no attribute {name!r}")
