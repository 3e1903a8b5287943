"""Read the resources that ``#PBS`` lines request, in the forms of PBS Pro (select) and Torque (nodes)."""

from __future__ import annotations

import re

import msgspec

from allranks.analysis.lint.shell_tokens import MappedText

LARGEST = 6  # digits of a count
SEVERAL_GPUS = 4
"""Chunks with so many GPUs do not share a node on common clusters."""


class PbsRequest(msgspec.Struct, frozen=True):
    """Resources of one chunk (or node), the number of chunks, and the lines that come after the first command.

    `nodes` is None if the chunks may share a node. `place` is the position of the request in the file.
    """

    chunks: int | None = None
    nodes: int | None = None
    cpus: int | None = None
    gpus: int | None = None
    tasks: int | None = None
    place: int = 0
    late: tuple[int, ...] = ()

    @property
    def requests_gpus(self) -> bool:
        return bool(self.gpus)


def read_pbs(source: MappedText, comments: set[int]) -> PbsRequest | None:
    """Return what the ``#PBS`` lines request; None without such lines. `comments` are the offsets where comments start."""
    resources: dict[str, str] = {}
    place, late, commands, offset, found = 0, [], False, 0, False
    for line in source.text.split("\n"):
        where = source.where(offset)
        if re.match(r"#PBS\s", line) and where in comments:
            found = True
            if commands:
                late.append(where)
            for text in re.findall(r"-l\s*(\S+)", line) if not commands else ():
                place = place if "select" in resources or "nodes" in resources else where
                resources.update(_resources(text))
        elif line.strip() and not line.lstrip().startswith("#"):
            commands = True
        offset += len(line) + 1
    if not found:
        return None
    return _request(resources, place, tuple(late))


def _resources(text: str) -> dict[str, str]:
    """Return the resources of ``walltime=1:00,select=2:ncpus=8``."""
    pairs = (part.partition("=") for part in re.split(r",(?=\w+=)", text))
    return {name: value for name, equals, value in pairs if equals}


def _request(resources: dict[str, str], place: int, late: tuple[int, ...]) -> PbsRequest:
    text = resources.get("select") or resources.get("nodes") or ""
    if "+" in text:  # chunks of several kinds
        return PbsRequest(place=place, late=late)
    first, *rest = text.split(":")
    chunks = _count(first) if text else 1
    own = {name: value for name, _, value in (part.partition("=") for part in rest)}
    cpus = _count(own.get("ncpus") or own.get("ppn") or resources.get("ncpus") or "")
    gpus = _count(own.get("ngpus") or own.get("gpus") or resources.get("ngpus") or "")
    spread = "nodes" in resources or "scatter" in resources.get("place", "") or (gpus or 0) >= SEVERAL_GPUS
    nodes = chunks if chunks == 1 or spread else None
    return PbsRequest(chunks, nodes, cpus, gpus, _count(own.get("mpiprocs", "")), place, late)


def _count(text: str) -> int | None:
    return int(text) if text.isdecimal() and len(text) <= LARGEST else None
