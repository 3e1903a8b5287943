"""Parsers of structured messages: each decides by the values of fields, where a pattern could only find words.

A parser is a `StructuredMessage`: a pattern that finds the message and its fields, and a function that interprets them.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from msgspec import Struct

from allranks.analysis.diagnose.patterns import CERTAIN, LIKELY, POSSIBLE, WEAK, Pattern


class Reading(Struct, frozen=True):
    """What a message means: a class (or a harmless message if ``kind`` is benign), with a sentence that says it."""

    owner: str
    weight: float
    sentence: str = ""
    rank: int | None = None
    kind: str = "class"
    interrupt: bool = False  # by a user


Fields = dict[str, str]  # of the groups that matched, without their numbers


class StructuredMessage(Struct, frozen=True):
    """A message with fields."""

    id: str
    read: Callable[[Fields], Reading | None]
    pattern: Pattern


# Xid codes of NVIDIA's catalogue: what they are, and the class with its weight.
_HARDWARE, _PROGRAM = "gpu_hardware_fault", "gpu_application_fault"
_XID_NAMES = {
    8: "GPU stopped processing", 13: "graphics engine exception", 31: "GPU memory page fault",
    32: "invalid push buffer", 38: "driver firmware error", 43: "GPU stopped processing", 45: "preemptive clean-up",
    46: "GPU stopped processing", 48: "double-bit ECC error", 54: "auxiliary power is not connected",
    61: "internal micro-controller breakpoint", 62: "internal micro-controller halt",
    63: "row remapping or page retirement", 64: "row remapping failed", 68: "NVDEC exception",
    69: "graphics engine class error", 74: "NVLink error", 79: "GPU has fallen off the bus",
    92: "high rate of single-bit ECC errors", 94: "contained memory error", 95: "uncontained memory error",
    109: "context switch timeout", 110: "security fault", 119: "GSP RPC timeout", 120: "GSP error",
    121: "C2C link error", 122: "SPI read failure", 140: "unrecovered ECC error", 143: "GPU initialisation error",
    154: "recovery action changed",
}  # fmt: skip
_HARDWARE_XIDS = frozenset(
    [46, 48, 54, *range(56, 59), *range(60, 63), *range(64, 68), *range(71, 75), *range(76, 85), *range(86, 90), 92, 93,
     *range(95, 99), 110, 119, *range(120, 126), 136, *range(140, 152), *range(155, 159), *range(160, 173)]
)  # fmt: skip
_UNSURE_XIDS = frozenset([63, 94, 109])
_PROGRAM_XIDS = {13: LIKELY, 31: LIKELY, 68: LIKELY, 69: LIKELY, 137: POSSIBLE, 8: POSSIBLE, 32: POSSIBLE, 43: POSSIBLE}
_CLEAN_UP_XID, _RECOVERY_XID = 45, 154


def _xid(fields: Fields) -> Reading | None:
    code, text = int(fields["code"]), fields.get("text", "")
    if code == _CLEAN_UP_XID and (earlier := re.search(r"previous Xid (\d{1,3})", text, re.IGNORECASE)):
        code = int(earlier[1])
    where = f" on the GPU at {fields['device']}" if fields.get("device") else ""
    message = f"The driver reports Xid {code} ({_XID_NAMES.get(code, 'see the catalogue of Xid errors')}){where}."
    if code == _CLEAN_UP_XID:
        return Reading("xid_cleanup", WEAK, message, kind="benign")
    if code == _RECOVERY_XID:
        needed = re.search(r"(reset|reboot|drain)\w*", text, re.IGNORECASE)
        return Reading(_HARDWARE, LIKELY, message) if needed else None
    if code in _PROGRAM_XIDS:
        return Reading(_PROGRAM, _PROGRAM_XIDS[code], message)
    weight = CERTAIN if code in _HARDWARE_XIDS else POSSIBLE if code in _UNSURE_XIDS else 0.0
    return Reading(_HARDWARE, weight, message) if weight else None


def _sxid(fields: Fields) -> Reading:
    severity = re.sub("[- ]", "", fields.get("severity", "").lower())
    message = f"An NVSwitch reports SXid {fields['code']}" + (f" at {fields['device']}" if fields.get("device") else "")
    if severity == "nonfatal":
        return Reading("sxid_nonfatal", WEAK, f"{message}.", kind="benign")
    weight = CERTAIN if severity == "fatal" else LIKELY
    return Reading(_HARDWARE, weight, f"{message}, which is {severity or 'not marked as non-fatal'}.")


# What amdgpu, HIP and HSA report, in lower case: the class and its weight.
_AMD = (
    ("memory access fault by gpu", _PROGRAM, LIKELY),
    ("page not present", _PROGRAM, LIKELY),
    ("vm_l2_protection_fault", _PROGRAM, LIKELY),
    ("memory_aperture_violation", _PROGRAM, LIKELY),
    ("hipErrorIllegalAddress".lower(), _PROGRAM, CERTAIN),
    ("uncorrectable", _HARDWARE, CERTAIN),
    ("fatal error during gpu init", _HARDWARE, CERTAIN),
    ("device lost", _HARDWARE, CERTAIN),
    ("gpu reset", _HARDWARE, LIKELY),
    ("gpu hang", _HARDWARE, LIKELY),
    ("hw exception", _HARDWARE, LIKELY),
    ("timeout", _HARDWARE, LIKELY),
    ("hsa_status_error_exception", _HARDWARE, POSSIBLE),
)


def _amd(fields: Fields) -> Reading | None:
    message = f"The AMD GPU driver reports: {fields['text'].strip()[:160]}."
    classes = ((owner, weight) for words, owner, weight in _AMD if words in fields["text"].lower())
    return next((Reading(owner, weight, message) for owner, weight in classes), None)


# Error codes of Ascend's CANN, as its manual lists them.
_ASCEND = {
    "EI0002": ("collective_hang", LIKELY - 0.1, "a wait for another rank's notification timed out"),
    "EI0003": ("collective_mismatch", LIKELY, "an argument of a collective is not valid"),
    "EI0004": ("rendezvous_unreachable", POSSIBLE, "the rank table is not valid"),
    "EI0005": ("collective_mismatch", CERTAIN, "the arguments of a collective differ between ranks"),
    "EI0006": ("peer_died_first", LIKELY, "another rank did not connect or did not send its data in time"),
    "EI0007": ("cuda_oom", POSSIBLE, "a resource of the device could not be allocated"),
    "EI0008": ("nccl_library_mismatch", LIKELY, "the ranks have different versions of HCCL"),
    "EI0009": ("rdma_unreachable", POSSIBLE, "an operation of the network adapter failed"),
    "EI0011": ("memlock_limit", POSSIBLE, "memory could not be registered"),
    "EI0013": ("rdma_unreachable", CERTAIN, "an RDMA operation completed with an error"),
    "EI0014": ("collective_mismatch", LIKELY, "the ranks differ in a parameter"),
    "EL0004": ("cuda_oom", CERTAIN, "device memory is exhausted"),
    "EL0005": ("gpu_hardware_fault", POSSIBLE, "a resource of the device is busy"),
    "EJ0001": ("port_in_use", LIKELY, "HCCP could not be started: another process uses the device's network"),
    "107020": ("collective_hang", POSSIBLE, "a task on the device timed out"),
    "507010": ("gpu_hardware_fault", LIKELY, "the device is lost"),
    "507011": ("gpu_application_fault", POSSIBLE, "a model on the device failed"),
    "507014": ("gpu_application_fault", POSSIBLE, "an operation on the device timed out"),
    "507015": ("gpu_application_fault", LIKELY, "an AI core exception"),
    "507018": ("gpu_application_fault", POSSIBLE, "an AI CPU exception"),
    "507035": ("gpu_application_fault", LIKELY, "a vector core exception"),
    "507053": ("gpu_hardware_fault", CERTAIN, "an uncorrectable memory error"),
    "507054": ("gpu_hardware_fault", CERTAIN, "an uncorrectable memory error"),
    "507899": ("no_gpu", POSSIBLE, "the driver reports an internal error"),
    "207018": ("cuda_oom", CERTAIN, "device memory is exhausted"),
}


def _ascend(fields: Fields) -> Reading | None:
    owner, weight, said = _ASCEND.get(fields["code"], ("", 0.0, ""))
    return Reading(owner, weight, f"The Ascend device reports {fields['code']}: {said}.") if owner else None


def _missing_ranks(fields: Fields) -> Reading:
    """Read who is missing, in a report of a barrier or of NCCL's RAS."""
    ranks = [int(r) for r in re.findall(r"\d+", fields.get("ranks", ""))]
    named = f"rank {', '.join(map(str, ranks[:8]))}" if ranks else "ranks"
    size = f" of {fields['size']}" if "size" in fields else ""
    message = f"The report names {named}{size} as missing from the collective in which the others wait."
    return Reading("collective_mismatch", CERTAIN if ranks else LIKELY, message, ranks[0] if ranks else None)


def _store_barrier(fields: Fields) -> Reading | None:
    size, there = int(fields["size"]), int(fields["there"])
    message = (
        f"Only {there} of {size} processes joined the process group before the timeout; the others never started, "
        "failed before, or cannot reach it."
    )
    return Reading("rendezvous_unreachable", LIKELY, message) if there < size else None


_STATES = {
    "TIMEOUT": ("slurm_time_limit", LIKELY),
    "DEADLINE": ("slurm_time_limit", POSSIBLE),
    "PREEMPTED": ("slurm_preempted", LIKELY),
    "OUT_OF_MEMORY": ("host_oom", CERTAIN),
    "OUT_OF_ME": ("host_oom", CERTAIN),
    "NODE_FAIL": ("node_unhealthy", CERTAIN),
    "BOOT_FAIL": ("node_unhealthy", LIKELY),
}
_SIGNALS = {
    "2": ("slurm_cancelled", POSSIBLE),
    "9": ("host_oom", POSSIBLE),
    "11": ("rank_died", LIKELY),
    "6": ("rank_died", LIKELY),
    "7": ("sigbus_memory", LIKELY),
}


def _accounting(fields: Fields) -> Reading | None:
    """Read a state of sacct, with the exit code and the signal behind it."""
    state, signal = fields["state"].rstrip("+"), fields["signal"]
    if state in _STATES:
        return Reading(*_STATES[state], f"Slurm's accounting has the state {state}.")
    if state == "FAILED" and signal in _SIGNALS:
        return Reading(*_SIGNALS[signal], f"Slurm's accounting has the state FAILED by signal {signal}.")
    return None


def _exit_code(fields: Fields) -> Reading | None:
    """Read an exit code that shows a signal: negative as Python reports it, or above 128 as shells do."""
    code = int(fields["code"])
    signal = str(-code if code < 0 else code - 128)
    if signal in ("4", "8"):
        return Reading("rank_died", LIKELY)
    return Reading(_SIGNALS[signal][0], LIKELY, interrupt=signal == "2") if signal in _SIGNALS else None


def _mpi_end(fields: Fields) -> Reading | None:
    """Read the rank and the signal of an MPI launcher's report."""
    rank = int(fields["rank"]) if "rank" in fields else None
    ended_by = _SIGNALS.get(fields["signal"])
    return Reading(ended_by[0], LIKELY, rank=rank) if ended_by else None


_MESSAGES = (
    StructuredMessage(
        "xid",
        _xid,
        Pattern(
            r"(?<![A-Za-z])Xid\b(?: error| code| event| number| errors?)*\s*(?:\((?P<device>[^)]*)\))?\s*[:=#]?\s*(?P<code>\d{1,3})\b(?!\s*(?:GPU"
            r"|node|times|errors?\b))(?P<text>.*)"
        ),
    ),
    StructuredMessage(
        "sxid",
        _sxid,
        Pattern(
            r"SXid\b\s*(?:\((?P<device>[^)]*)\))?\s*:?\s*(?P<code>\d{5})\b(?:,?\s*(?P<severity>Non-?\s?fatal|Fatal))?"
        ),
    ),
    StructuredMessage(
        "amd_fault",
        _amd,
        Pattern(
            r"(?P<text>Memory access fault by GPU node.*|HW Exception by GPU.*|HSA_STATUS_ERROR_(?:EXCEPTION|MEMORY_APERTURE_VIOLATION"
            r"|MEMORY_FAULT).*|amdgpu\b.*(?:GPU reset (?:begin|\(|failed)|ring \S+ timeout|uncorrectable|Fatal error during GPU init"
            r"|device lost|VM_L2_PROTECTION_FAULT|poison).*)",
            unless=r"reset succeeded|ras (?:is )?(?:enabled|supported)",
        ),
    ),
    StructuredMessage(
        "ascend_fault",
        _ascend,
        Pattern(
            r"\b(?P<code>E[IJL]\d{4})\b(?=[:\]\s(]|$)|\b(?:error|err|code|ErrCode|ret|retCode|result)\b[^A-Za-z\d]{1,6}(?:is )?(?P<code2>507\d{3}"
            r"|207018|107020)\b",
            "error|retcode|errcode|result =|ret =|code is|times out|timed out|timeout|reason|failed|wait execution|"
            "argument|memory|socket|inconsistent",
        ),
    ),
    StructuredMessage(
        "missing_ranks",
        _missing_ranks,
        Pattern(
            r"Ranks? (?P<ranks>[\d, ]+) failed to pass monitoredBarrier|(?:lagging|dead|mismatched).{0,30}ranks? that caused the desync"
            r".{0,12}?(?P<ranks2>\[[\d, ]+\])?"
            r"|(?:missing|dead|unresponsive) ranks?\W{1,3}(?P<ranks3>\d[\d, ]*) (?:out )?of (?P<size>\d+)"
        ),
    ),
    StructuredMessage(
        "store_barrier",
        _store_barrier,
        Pattern(
            r"store based barrier.{0,200}world_size\s*=\s*(?P<size>\d+), (?:worker_count|num_workers_joined)\s*=\s*(?P<there>\d+)"
        ),
    ),
    StructuredMessage(
        "accounting",
        _accounting,
        Pattern(
            r"(?:^|\s|\|)(?P<state>(?-i:FAILED|TIMEOUT|DEADLINE|PREEMPTED|OUT_OF_MEMORY|OUT_OF_ME\+|NODE_FAIL|BOOT_FAIL))\s*["
            r"|\s]\s*(?:\d+-)?(?P<code>-?\d+):(?P<signal>\d+)(?![\d:])"
        ),
    ),
    StructuredMessage(
        "exit_code",
        _exit_code,
        Pattern(
            r"(?:exit|return)(?:ed)?(?: with)?(?: \w+)?[ _]?(?:code|status)\W{1,6}(?P<code>-\d{1,2}|1[2-4]\d)\b(?!:)"
            r"|\bEXIT CODE: (?P<code2>1[2-4]\d)\b"
        ),
    ),
    StructuredMessage(
        "mpi_end",
        _mpi_end,
        Pattern(
            r"process rank (?P<rank>\d+) with PID \d+ on node (?P<host>[\w.-]+) exited on signal (?P<signal>\d+)"
            r"|EXIT STRING: .{0,40}\(signal (?P<signal2>\d+)\)|KILLED BY SIGNAL: (?P<signal3>\d+)"
        ),
    ),
)
STRUCTURED: dict[str, StructuredMessage] = {message.id: message for message in _MESSAGES}
