"""Where the ladder stands: this machine, a Slurm, or the cluster in a box."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from allranks.facts import MachineFacts
from allranks.smoke.records import Asked, PlaceName, Scale, SmokeTest


def asked_of(test: SmokeTest, place: PlaceName, scale: Scale, machine: MachineFacts, *, gpu: bool) -> Asked | str:
    """How large the test's world is there; or why it cannot be run there. Pure."""
    if place == "local":
        if test.least_nodes > 1 and not (gpu and test.one_gpu_node):
            return f"needs {test.least_nodes} nodes: run it with --on slurm, or with --on cluster on this machine alone"
        ranks = min(test.ranks, len(machine.gpus)) if gpu else test.cpu_ranks
        return Asked(machine=machine, place=place, scale=scale, nodes=1, ranks=ranks, gpu=gpu)
    on_gpu = gpu and test.name != "08_cpu_lab"
    ranks = test.ranks if on_gpu else test.cpu_ranks
    return Asked(machine=machine, place=place, scale=scale, nodes=test.nodes, ranks=ranks, gpu=on_gpu)


def world_scaled(test: SmokeTest, asked: Asked) -> list[str]:
    """A sentence if there are fewer ranks than the notes had."""
    wanted = test.nodes * test.ranks
    if asked.world == wanted:
        return []
    why = "no GPU here" if not asked.gpu else f"{len(asked.machine.gpus)} GPUs here"
    return [
        f"{asked.world} rank{'s' * (asked.world > 1)} on {asked.nodes} node{'s' * (asked.nodes > 1)} instead of {wanted} on {test.nodes}; {why}"
    ]


@contextmanager
def standing(place: PlaceName, nodes: int, say: Callable[[str], None]) -> Iterator[None]:
    """For the box: uses the one that is up if it has nodes enough, else brings one up and takes it down at the end.

    Raises:
        EnvironmentNotAble, RequestError: there can be no box here.
    """
    if place != "cluster":
        yield
        return
    from allranks.testcluster import BoxOptions, down, find_box, up
    from allranks.testcluster.box import NAME_VARIABLE

    box = find_box()
    if box is not None and len(box.node_names) >= nodes:
        say(f"the cluster in a box {box.name!r} is up and is used")
        yield
        return
    if box is not None:
        say(f"the box {box.name!r} that is up has {len(box.node_names)} nodes, too few: it is left alone")
    say(f"bringing up a cluster in a box with {nodes} nodes")
    box = up(BoxOptions(name=f"smoke-{os.getpid()}", nodes=nodes))
    before = os.environ.get(NAME_VARIABLE)
    os.environ[NAME_VARIABLE] = box.name
    try:
        yield
    finally:
        os.environ.pop(NAME_VARIABLE, None)
        if before is not None:
            os.environ[NAME_VARIABLE] = before
        down(box.name)
