"""Rules for environment variables: names, values, network interfaces and transports."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise

from allranks.analysis.lint.job import JobDescription
from allranks.analysis.lint.records import Assignment, Violation
from allranks.planning.env_vars import DEPRECATED_VARIABLES, UNREAD_VARIABLES, is_known_variable, nearest_variable

UNKNOWN_WHY = "A variable that no library reads causes no error: the line simply has no effect."
DEPRECATED_WHY = "Deprecated names stop working after an update, without a warning."

PREFIXES = ("NCCL_", "TORCH_NCCL_", "TORCH_FR_", "GLOO_")


def _set_variables(job: JobDescription) -> Iterator[Assignment]:
    """Yield the variables that are set; `unset NAME` is never a mistake."""
    return (a for a in job.assignments if not a.removed)


def unknown(job: JobDescription) -> Iterator[Violation]:
    for item in _set_variables(job):
        mistake = UNREAD_VARIABLES.get(item.name)
        if mistake and not (item.name == "DIST_BACKEND" and not item.exported):
            yield Violation(item.offset, f"{item.name}: {mistake.why}", cure=mistake.instead)


def misspelled(job: JobDescription) -> Iterator[Violation]:
    for item in _set_variables(job):
        name = item.name
        if (
            not name.startswith(PREFIXES)
            or name in UNREAD_VARIABLES
            or name in DEPRECATED_VARIABLES
            or is_known_variable(name)
        ):
            continue
        near = nearest_variable(name)
        if near:
            yield Violation(
                item.offset, f"{name}: no library knows this variable; {near} was probably meant", cure=near
            )
        elif name.startswith("GLOO_"):  # NCCL plugins have their own variables, Gloo has no plugins
            cure = "remove it; GLOO_SOCKET_IFNAME selects Gloo's interface"
            yield Violation(item.offset, f"{name}: neither Gloo nor torch reads it", cure=cure)


def deprecated(job: JobDescription) -> Iterator[Violation]:
    for item in _set_variables(job):
        old = DEPRECATED_VARIABLES.get(item.name)
        if old:
            yield Violation(item.offset, f"{item.name}: {old.why}", cure=old.instead)


GLOO_WHY = (
    "Gloo only accepts exact interface names; ^ and = are NCCL's syntax, and Gloo stops with 'Unable to find address'."
)
GLOO_CURE = (
    "GLOO_SOCKET_IFNAME=<the interface's exact name, determined on the node>; NCCL and Gloo need separate values"
)
NO_EFFECT_WHY = "The value is the default, so the line changes nothing."
LEVELS = {"LOC", "NVL", "PIX", "PXB", "PXN", "PHB", "P2C", "C2C", "SYS", *"012345"}
ALLOWED: dict[str, tuple[set[str], str]] = {
    "NCCL_P2P_LEVEL": (LEVELS, "LOC, NVL, PIX, PXB, PHB or SYS"),
    "NCCL_NET_GDR_LEVEL": (LEVELS, "LOC, PIX, PXB, PHB or SYS"),
    "NCCL_DEBUG": ({"NONE", "VERSION", "WARN", "INFO", "ABORT", "TRACE", "ATTN"}, "VERSION, WARN, INFO or TRACE"),
    "TORCH_DISTRIBUTED_DEBUG": ({"OFF", "INFO", "DETAIL"}, "OFF, INFO or DETAIL"),
}
SWITCHES = ("NCCL_IB_DISABLE", "NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_NVLS_ENABLE", "NCCL_CUMEM_ENABLE")
DEFAULT_ZERO = ("NCCL_IB_DISABLE", "NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE")


def gloo_syntax(job: JobDescription) -> Iterator[Violation]:
    for item in job.set_values("GLOO_SOCKET_IFNAME"):
        sign = next((s for s in "^=" if s in item.value), None)
        if sign:
            yield Violation(item.offset, f"GLOO_SOCKET_IFNAME={item.value}: Gloo does not support {sign!r}")


def invalid(job: JobDescription) -> Iterator[Violation]:
    for item in job.assignments:
        value = item.value
        if item.removed or "$" in value:
            continue
        allowed = ALLOWED.get(item.name)
        if allowed and value.upper() not in allowed[0]:
            yield Violation(
                item.offset, f"{item.name}={value or '(empty)'}: invalid value", cure=f"one of {allowed[1]}"
            )
        if item.name in SWITCHES and not re.fullmatch(r"-?\d+|", value):
            yield Violation(item.offset, f"{item.name}={value}: expected a number, got {value!r}", cure="0 or 1")
        if item.name == "OMP_NUM_THREADS" and not re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", value):
            yield Violation(
                item.offset, f"OMP_NUM_THREADS={value or '(empty)'}: expected a positive number", cure="1 or more"
            )
    yield from _socket_threads(job)


def _socket_threads(job: JobDescription) -> Iterator[Violation]:
    found = {a.name: a for a in job.assignments if a.name in ("NCCL_SOCKET_NTHREADS", "NCCL_NSOCKS_PERTHREAD")}
    counts = {name: int(a.value) for name, a in found.items() if a.value.isdecimal() and len(a.value) < 6}
    threads, sockets = counts.get("NCCL_SOCKET_NTHREADS", 1), counts.get("NCCL_NSOCKS_PERTHREAD", 1)
    if threads > 16:
        yield Violation(
            found["NCCL_SOCKET_NTHREADS"].offset,
            f"NCCL_SOCKET_NTHREADS={threads}: NCCL's maximum is 16",
            cure="16 or less",
        )
    elif threads * sockets > 64:
        place = found.get("NCCL_NSOCKS_PERTHREAD") or found["NCCL_SOCKET_NTHREADS"]
        text = f"NCCL_SOCKET_NTHREADS x NCCL_NSOCKS_PERTHREAD = {threads * sockets}: NCCL's maximum is 64 sockets"
        yield Violation(place.offset, text, cure="a product of 64 or less")


def no_effect(job: JobDescription) -> Iterator[Violation]:
    for item in job.assignments:
        if item.name in DEFAULT_ZERO and not item.removed and item.value == "0" and not _overrides(job, item.name):
            yield Violation(
                item.offset,
                f"{item.name}=0 is NCCL's default: it has no effect unless an earlier setting is 1",
            )


def _overrides(job: JobDescription, name: str) -> bool:
    """Return whether the file also sets another value, which 0 then resets."""
    return any(a.value != "0" for a in job.set_values(name))


INTERFACE_WHY = (
    "Interface names differ between nodes. NCCL does not report a missing interface; it uses another one or hangs. "
    "Gloo stops with an error."
)
INTERFACE_CURE = (
    "leave NCCL_SOCKET_IFNAME unset, or exclude unsuitable interfaces (NCCL_SOCKET_IFNAME=^lo,docker), or determine the name on each "
    "node: the interface that has the route to the head node (ip -o route get <address>)"
)
LOOPBACK_WHY = "lo only connects processes of one node; ranks on other nodes wait until the timeout."
DISABLED_WHY = (
    "A working transport is disabled on every node, and collectives become many times slower: without InfiniBand 10 to "
    "20 times, without P2P over NVLink about 8 times. An entry SYS in the topology matrix does not mean that P2P fails."
)
DISABLED_CURE = (
    "remove it; if a copy test between the pairs (allranks doctor --collectives) or NCCL's log shows that the transport "
    "fails, keep it and document it: # allranks: allow transport-disabled <reason>"
)
GID_WHY = "The index of the RoCE v2 address differs between nodes and changes when addresses change. NCCL 2.21 and later select it."
NAME = re.compile(r"[a-z]+[a-z0-9]*\d[a-z0-9.:_-]*\Z", re.IGNORECASE)


def _names(value: str) -> list[str]:
    return [v.lstrip("=") for v in value.split(",") if v]


def interface(job: JobDescription) -> Iterator[Violation]:
    for item in job.assignments:
        if item.name not in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME") or item.removed:
            continue
        value = item.value
        names = _names(value)
        if value.startswith("^") or "$" in value or len(names) != 1 or not NAME.match(names[0]):
            continue
        where = "on every node" if job.multi_node else "here"
        yield Violation(item.offset, f"{item.name}={value}: the interface {names[0]} may not exist {where}")
    for call in job.calls:
        words = [a.text for a in call.args]
        if call.program in ("ip", "ifconfig", "ethtool"):
            named = words[words.index("dev") + 1 : words.index("dev") + 2] if "dev" in words else words[:1]
            if call.program == "ip" and "dev" not in words:
                named = [w for before, w in pairwise(words) if before == "show"]
            if named and NAME.match(named[0]) and "$" not in named[0]:
                text = f"the address is taken from {named[0]}, which may not exist on every node"
                yield Violation(
                    call.offset,
                    text,
                    cure='take the host name: MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
                )


def loopback(job: JobDescription) -> Iterator[Violation]:
    if not job.multi_node:
        return
    for item in job.assignments:
        if item.name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME") and _names(item.value) == ["lo"]:
            yield Violation(item.offset, f"{item.name}={item.value} in a job of several nodes")


def disabled(job: JobDescription) -> Iterator[Violation]:
    for item in job.assignments:
        what = _switched_off(item)
        if what:
            yield Violation(
                item.offset, f"{item.name}={item.value} disables {what} on every node, without a stated reason"
            )


OFF = {
    ("NCCL_P2P_DISABLE", "1"): "direct copies between GPUs",
    ("NCCL_P2P_LEVEL", "LOC"): "direct copies between GPUs",
    ("NCCL_P2P_LEVEL", "0"): "direct copies between GPUs",
    ("NCCL_IB_DISABLE", "1"): "InfiniBand and RoCE",
    ("NCCL_NET", "SOCKET"): "InfiniBand and RoCE",
    ("NCCL_SHM_DISABLE", "1"): "shared memory",
}


def _switched_off(item: Assignment) -> str | None:
    return None if item.removed else OFF.get((item.name, item.value.strip().upper()))


def gid(job: JobDescription) -> Iterator[Violation]:
    for item in job.set_values("NCCL_IB_GID_INDEX"):
        if item.value.isdecimal():
            yield Violation(item.offset, f"NCCL_IB_GID_INDEX={item.value}: the same index on every node")
