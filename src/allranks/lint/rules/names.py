"""Names of environment variables."""

from __future__ import annotations

from collections.abc import Iterator

from allranks.envnames import DEPRECATED, MISTAKES, is_known, nearest
from allranks.lint.job import Job
from allranks.lint.records import Assignment, Hit

UNKNOWN_WHY = "A variable that nobody reads raises no error: the run behaves as if the line were not there."
DEPRECATED_WHY = "Old names stop working with an update, without a word."

PREFIXES = ("NCCL_", "TORCH_NCCL_", "TORCH_FR_", "GLOO_")


def _set(job: Job) -> Iterator[Assignment]:
    """`unset NAME` is no mistake, whatever the name."""
    return (a for a in job.assignments if not a.removed)


def unknown(job: Job) -> Iterator[Hit]:
    for item in _set(job):
        mistake = MISTAKES.get(item.name)
        if mistake and not (item.name == "DIST_BACKEND" and not item.exported):
            yield Hit(item.offset, f"{item.name}: {mistake.why}", cure=mistake.instead)


def misspelled(job: Job) -> Iterator[Hit]:
    for item in _set(job):
        name = item.name
        if not name.startswith(PREFIXES) or name in MISTAKES or name in DEPRECATED or is_known(name):
            continue
        near = nearest(name)
        if near:
            yield Hit(item.offset, f"{name}: no library knows this variable; {near} was probably meant", cure=near)
        elif name.startswith("GLOO_"):  # NCCL has plugins with names of their own, Gloo has none
            cure = "remove it; GLOO_SOCKET_IFNAME is what chooses Gloo's interface"
            yield Hit(item.offset, f"{name}: neither Gloo nor torch reads it", cure=cure)


def deprecated(job: Job) -> Iterator[Hit]:
    for item in _set(job):
        old = DEPRECATED.get(item.name)
        if old:
            yield Hit(item.offset, f"{item.name}: {old.why}", cure=old.instead)
