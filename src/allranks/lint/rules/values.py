"""Values of environment variables."""

from __future__ import annotations

import re
from collections.abc import Iterator

from allranks.lint.job import Job
from allranks.lint.records import Hit

GLOO_WHY = (
    "Gloo takes exact interface names only; ^ and = are NCCL's syntax, and Gloo stops with 'Unable to find address'."
)
GLOO_CURE = (
    "GLOO_SOCKET_IFNAME=<the interface's exact name, found on the node>; one value cannot serve NCCL and Gloo both"
)
NO_EFFECT_WHY = "The value is the default, so the line changes nothing and suggests that something was decided."
LEVELS = {"LOC", "NVL", "PIX", "PXB", "PXN", "PHB", "P2C", "C2C", "SYS", *"012345"}
ALLOWED: dict[str, tuple[set[str], str]] = {
    "NCCL_P2P_LEVEL": (LEVELS, "LOC, NVL, PIX, PXB, PHB or SYS"),
    "NCCL_NET_GDR_LEVEL": (LEVELS, "LOC, PIX, PXB, PHB or SYS"),
    "NCCL_DEBUG": ({"NONE", "VERSION", "WARN", "INFO", "ABORT", "TRACE", "ATTN"}, "VERSION, WARN, INFO or TRACE"),
    "TORCH_DISTRIBUTED_DEBUG": ({"OFF", "INFO", "DETAIL"}, "OFF, INFO or DETAIL"),
}
SWITCHES = ("NCCL_IB_DISABLE", "NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_NVLS_ENABLE", "NCCL_CUMEM_ENABLE")
DEFAULT_ZERO = ("NCCL_IB_DISABLE", "NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE")


def gloo_syntax(job: Job) -> Iterator[Hit]:
    for item in job.set_values("GLOO_SOCKET_IFNAME"):
        sign = next((s for s in "^=" if s in item.value), None)
        if sign:
            yield Hit(item.offset, f"GLOO_SOCKET_IFNAME={item.value}: Gloo does not know {sign!r}")


def invalid(job: Job) -> Iterator[Hit]:
    for item in job.assignments:
        value = item.value
        if item.removed or "$" in value:
            continue
        allowed = ALLOWED.get(item.name)
        if allowed and value.upper() not in allowed[0]:
            yield Hit(item.offset, f"{item.name}={value or '(empty)'}: no such value", cure=f"one of {allowed[1]}")
        if item.name in SWITCHES and not re.fullmatch(r"-?\d+|", value):
            yield Hit(item.offset, f"{item.name}={value}: this switch is a number, {value!r} is none", cure="0 or 1")
        if item.name == "OMP_NUM_THREADS" and not re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", value):
            yield Hit(
                item.offset, f"OMP_NUM_THREADS={value or '(empty)'}: this must be a positive number", cure="1 or more"
            )
    yield from _socket_threads(job)


def _socket_threads(job: Job) -> Iterator[Hit]:
    found = {a.name: a for a in job.assignments if a.name in ("NCCL_SOCKET_NTHREADS", "NCCL_NSOCKS_PERTHREAD")}
    counts = {name: int(a.value) for name, a in found.items() if a.value.isdecimal() and len(a.value) < 6}
    threads, sockets = counts.get("NCCL_SOCKET_NTHREADS", 1), counts.get("NCCL_NSOCKS_PERTHREAD", 1)
    if threads > 16:
        yield Hit(
            found["NCCL_SOCKET_NTHREADS"].offset,
            f"NCCL_SOCKET_NTHREADS={threads}: NCCL takes 16 at most",
            cure="16 or less",
        )
    elif threads * sockets > 64:
        place = found.get("NCCL_NSOCKS_PERTHREAD") or found["NCCL_SOCKET_NTHREADS"]
        text = f"NCCL_SOCKET_NTHREADS x NCCL_NSOCKS_PERTHREAD = {threads * sockets}: NCCL takes 64 sockets at most"
        yield Hit(place.offset, text, cure="a product of 64 or less")


def no_effect(job: Job) -> Iterator[Hit]:
    for item in job.assignments:
        if item.name in DEFAULT_ZERO and not item.removed and item.value == "0" and not _overrides(job, item.name):
            yield Hit(
                item.offset,
                f"{item.name}=0 is NCCL's default: it turns nothing on, and changes nothing unless an earlier setting is 1",
            )


def _overrides(job: Job, name: str) -> bool:
    """Where the file sets another value too, 0 takes that back."""
    return any(a.value != "0" for a in job.set_values(name))
