"""Rules for environment variables: names, values, network interfaces and transports."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise

from allranks.analysis.lint.job import JobDescription
from allranks.analysis.lint.placeholders import neutralise_placeholders
from allranks.analysis.lint.records import Assignment, Severity, Violation
from allranks.analysis.lint.rules.dataflow import used_elsewhere
from allranks.planning.env_vars import DEPRECATED_VARIABLES, UNREAD_VARIABLES, is_known_variable, nearest_variable
from allranks.utils.text import lazy_regex, nearest_name

UNKNOWN_WHY = "A variable that no library reads causes no error: the line simply has no effect."
DEPRECATED_WHY = "Deprecated names stop working after an update, without a warning."
PREFIXES = ("NCCL_", "TORCH_NCCL_", "TORCH_FR_", "GLOO_")


def _set_variables(job: JobDescription) -> Iterator[Assignment]:
    """Yield the variables that are set; `unset NAME` is never a mistake."""
    return (a for a in job.assignments if not a.removed)


def unknown(job: JobDescription) -> Iterator[Violation]:
    for item in _set_variables(job):
        mistake = UNREAD_VARIABLES.get(item.name)
        own = not item.name.startswith(PREFIXES) and (not item.exported or _is_used(job, item.name))
        if mistake and not (own and job.kind == "script"):
            yield Violation(item.offset, f"{item.name}: {mistake.why}", cure=mistake.instead)


def severity_of(job: JobDescription, item: Assignment, meant: str) -> Severity | None:
    """Return a note for a value that does nothing under the right name either: a search path of programs holds no modules."""
    same = re.search(rf"\b{item.name}=[\"']?\$\{{?PATH\}}?[\"']?\s*$", job.line_of(item.offset))
    return "note" if meant == "PYTHONPATH" and same else None


def misspelled(job: JobDescription) -> Iterator[Violation]:
    for item in _set_variables(job):
        name = item.name
        if not name.startswith(PREFIXES) and (item.exported or job.kind != "script") and not _is_used(job, name):
            near = _usual_name(name)
            if near:
                text = f"{name}: no library knows this variable; {near} was probably meant"
                yield Violation(item.offset, text, cure=near, severity=severity_of(job, item, near))
            continue
        if (
            not name.startswith(PREFIXES)
            or name in UNREAD_VARIABLES
            or name in DEPRECATED_VARIABLES
            or is_known_variable(name)
        ):
            continue
        near = nearest_variable(name) or _other_order(name)
        if near:
            yield Violation(
                item.offset, f"{name}: no library knows this variable; {near} was probably meant", cure=near
            )
        elif name.startswith("GLOO_"):  # NCCL plugins have their own variables, Gloo has no plugins
            cure = "remove it; GLOO_SOCKET_IFNAME selects Gloo's interface"
            yield Violation(item.offset, f"{name}: neither Gloo nor torch reads it", cure=cure, severity="note")
        elif name.startswith("NCCL_") and (item.exported or job.kind != "script") and not _is_used(job, name):
            cure = "remove it; NCCL_DEBUG=INFO lists the variables that NCCL takes"
            yield Violation(
                item.offset, f"{name}: neither NCCL nor a known plugin reads it", cure=cure, severity="note"
            )


def _other_order(name: str) -> str | None:
    """Return the switch whose words stand in another order: ``NCCL_DISABLE_IB``."""
    head, *words = name.split("_")
    if head != "NCCL" or "DISABLE" not in words:
        return None
    return next((known for known in SWITCHES if sorted(known.split("_")[1:]) == sorted(words)), None)


USUAL = (
    "OMP_NUM_THREADS", "MKL_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "CUDA_LAUNCH_BLOCKING", "CUDA_DEVICE_ORDER", "CUDA_DEVICE_MAX_CONNECTIONS",
    "PYTORCH_CUDA_ALLOC_CONF", "TORCH_DISTRIBUTED_DEBUG", "TORCH_CUDA_ARCH_LIST", "TORCH_EXTENSIONS_DIR", "TORCH_SHOW_CPP_STACKTRACES",
    "PYTHONUNBUFFERED", "PYTHONFAULTHANDLER", "TOKENIZERS_PARALLELISM", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE", "HF_DATASETS_CACHE",
    "HF_HUB_OFFLINE", "LD_LIBRARY_PATH", "LD_PRELOAD", "MASTER_ADDR", "MASTER_PORT", "SRUN_CPUS_PER_TASK", "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS", "NUMEXPR_MAX_THREADS",
    "VECLIB_MAXIMUM_THREADS", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "FI_PROVIDER", "TORCH_NCCL_BLOCKING_WAIT", "PYTHONPATH",
)  # fmt: skip
SHORTEST_TYPO, LONG_NAME = 10, 14
OTHER_COLLECTIVES = {
    "RCCL",
    "HCCL",
    "ECCL",
    "MCCL",
    "CNCL",
    "XCCL",
    "BKCL",
    "PCCL",
    "ACCL",
    "OCCL",
    "UCCL",
    "SCCL",
    "TCCL",
}
ONLY_NCCL = {
    "NCCL_SOCKET_IFNAME",
    "NCCL_IB_HCA",
    "NCCL_IB_DISABLE",
    "NCCL_P2P_DISABLE",
    "NCCL_P2P_LEVEL",
    "NCCL_IB_GID_INDEX",
    "NCCL_NET_GDR_LEVEL",
}


def _usual_name(name: str) -> str | None:
    """Return the usual variable of which this is a misspelling: one or two letters wrong, missing, too many or swapped."""
    head, _, rest = name.partition("_")
    meant = f"NCCL_{rest}"
    if head not in OTHER_COLLECTIVES and rest and edits(head, "NCCL", 1) == 1:
        if is_known_variable(meant) or meant in DEPRECATED_VARIABLES:
            return meant
    if meant in ONLY_NCCL and len(head) in (2, 3, 5) and edits(head, "NCCL", 2) <= 2 and head not in OTHER_COLLECTIVES:
        return meant
    if len(name) < SHORTEST_TYPO or name in USUAL:
        return None
    most = 2 if len(name) >= LONG_NAME else 1
    return next((known for known in USUAL if known[0] in name[:2] and edits(name, known, most) <= most), None)


def edits(a: str, b: str, most: int) -> int:
    """Return how many letters to replace, add, remove or swap make `b` of `a`; ``most + 1`` if it is more than that."""
    if abs(len(a) - len(b)) > most:
        return most + 1
    before, row = [0] * (len(b) + 1), list(range(len(b) + 1))
    for i, left in enumerate(a, start=1):
        last, before, row = before, row, [i] + [0] * len(b)
        for j, right in enumerate(b, start=1):
            row[j] = min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (left != right))
            if i > 1 and j > 1 and left == b[j - 2] and a[i - 2] == right:
                row[j] = min(row[j], last[j - 2] + 1)
    return min(row[-1], most + 1)


def _is_used(job: JobDescription, name: str) -> bool:
    """Return whether the script itself uses the variable, so that it has an effect whatever libraries read."""
    return name in job.used_names


def deprecated(job: JobDescription) -> Iterator[Violation]:
    for item in _set_variables(job):
        old = DEPRECATED_VARIABLES.get(item.name)
        if old and not _is_used(job, item.name):
            severity = "warning" if old.removed and not old.why.startswith("removed") else "note"
            yield Violation(item.offset, f"{item.name}: {old.why}", cure=old.instead, severity=severity)


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
    "WANDB_MODE": ({"ONLINE", "OFFLINE", "DISABLED", "SHARED", "DRYRUN", "RUN"}, "online, offline or disabled"),
    "TORCH_DISTRIBUTED_DEBUG": ({"OFF", "INFO", "DETAIL"}, "OFF, INFO or DETAIL"),
}
SWITCHES = ("NCCL_IB_DISABLE", "NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_NVLS_ENABLE", "NCCL_CUMEM_ENABLE")
NUMBERS = ("NCCL_IB_GID_INDEX", "NCCL_IB_TIMEOUT", "NCCL_IB_RETRY_CNT", "NCCL_IB_TC", "NCCL_IB_SL", "NCCL_MIN_NCHANNELS", "NCCL_MAX_NCHANNELS",
           "NCCL_NSOCKS_PERTHREAD", "NCCL_SOCKET_NTHREADS", "NCCL_BUFFSIZE", "NCCL_NTHREADS", "NCCL_CROSS_NIC")  # fmt: skip
DEFAULT_ZERO = ("NCCL_IB_DISABLE", "NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE")


def gloo_syntax(job: JobDescription) -> Iterator[Violation]:
    for item in job.set_values("GLOO_SOCKET_IFNAME"):
        sign = next((s for s in "^=" if item.value.startswith(s)), None)
        if sign:
            yield Violation(item.offset, f"GLOO_SOCKET_IFNAME={item.value}: Gloo does not support {sign!r}")


def invalid(job: JobDescription) -> Iterator[Violation]:
    for item in job.assignments:
        value = item.value
        if re.search(r"(?:PORT|ADDR)\Z", item.name) and re.search(r"\S[ \t]+\}?\Z", value) and not item.items:
            yield Violation(
                item.offset,
                f"{item.name}={value!r}: a blank at the end of the value",
                cure="remove the blank",
                severity="warning",
            )
        if item.removed or "$" in value:
            continue
        wrong = _unknown_words(item.name, value)
        if wrong:
            yield Violation(item.offset, f"{item.name}={value}: {wrong[0]} is unknown", cure=f"one of {wrong[1]}")
        allowed = ALLOWED.get(item.name)
        if allowed and value.upper() not in allowed[0]:
            # NCCL takes an unknown level for none: who wants none gets that, others miss messages. torch refuses to start.
            quiet = item.name == "NCCL_DEBUG" and re.fullmatch(r"(?i)0|off|no|false|quiet|silent|disabled?|", value)
            yield Violation(
                item.offset,
                f"{item.name}={value or '(empty)'}: invalid value",
                cure=f"one of {allowed[1]}",
                why="NCCL prints nothing then, not even its warnings and errors."
                if item.name == "NCCL_DEBUG"
                else None,
                severity="note" if quiet else "warning" if item.name == "NCCL_DEBUG" else None,
            )
        if item.name == "NCCL_DEBUG_FILE" and (unknown_code := re.search(r"%[^hp%]", value)):
            text = f"{item.name}={value}: NCCL replaces only %h (host) and %p (process), not {unknown_code[0]}"
            yield Violation(
                item.offset, text, cure="%h and %p in the name", why="All ranks write to one file.", severity="note"
            )
        if item.name in SWITCHES and not re.fullmatch(r"-?\d+|", value):
            yield Violation(item.offset, f"{item.name}={value}: expected a number, got {value!r}", cure="0 or 1")
        if item.name in NUMBERS and re.fullmatch(r"[\w.:-]*[A-Za-z_][\w.:-]*", value) and not value.startswith("0x"):
            why = "NCCL warns about the value, and uses its default."
            yield Violation(item.offset, f"{item.name}={value}: it is no number", why=why, cure=f"{item.name}=<n>")
        if (
            item.name == "OMP_NUM_THREADS"
            and re.fullmatch(r"[\w.,-]*", value)  # else a template's mark
            and not re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", value)
        ):
            yield Violation(
                item.offset, f"OMP_NUM_THREADS={value or '(empty)'}: expected a positive number", cure="1 or more"
            )
    yield from _socket_threads(job)


PROTOCOLS = {"LL", "LL128", "SIMPLE"}
ALGORITHMS = {"TREE", "RING", "COLLNET", "COLLNETDIRECT", "COLLNETCHAIN", "NVLS", "NVLSTREE", "PAT"}
# https://docs.pytorch.org/docs/stable/notes/cuda.html and CUDAAllocatorConfig.cpp
ALLOCATOR = {
    "max_split_size_mb", "expandable_segments", "garbage_collection_threshold", "roundup_power2_divisions", "backend", "large_segment_size_mb",
    "release_lock_on_cudamalloc", "release_lock_on_hipmalloc", "pinned_use_cuda_host_register", "pinned_use_hip_host_register",
    "pinned_num_register_threads", "pinned_use_background_threads", "pinned_reserve_segment_size_mb", "roundup_bypass_threshold_mb",
    "max_non_split_rounding_mb", "graph_capture_record_stream_reuse", "per_process_memory_fraction", "throw_on_cudamalloc_oom",
}  # fmt: skip


def _unknown_words(name: str, value: str) -> tuple[str, str] | None:
    """Return a misspelt word of a list of NCCL or torch, and the words that it may have."""
    if name in ("NCCL_PROTO", "NCCL_ALGO") and ":" not in value and ";" not in value:
        known = PROTOCOLS if name == "NCCL_PROTO" else ALGORITHMS
        words = [w.strip() for w in value.removeprefix("^").split(",")]
        wrong = next((w for w in words if w and w.upper() not in known), None)
        return (wrong, ", ".join(sorted(known))) if wrong else None
    if name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        keys = [pair.partition(":")[0].strip() for pair in re.sub(r"\[[^\]]*\]", "", value).split(",")]
        wrong = next((k for k in keys if k and k not in ALLOCATOR), None)
        near = nearest_name(wrong, sorted(ALLOCATOR), 0.8) if wrong else None
        segments = re.search(r"\bexpandable_segments:(?!(?:True|False)(?:,|\Z))([^,]*)", value)
        if segments and not near:
            return segments[1] or "the empty value", "True or False, with a capital letter"
        return (wrong, near) if wrong and near else None
    return None


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


def handling_off(job: JobDescription) -> Iterator[Violation]:
    for item in job.assignments:
        if item.name in ("NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_ASYNC_ERROR_HANDLING") and item.value == "0":
            alone = job.is_batch and job.nodes == 1 and job.gpus_per_node == 1 and not job.launches
            text = f"{item.name}=0 switches the watchdog's error handling off"
            yield Violation(item.offset, text, severity="note" if alone else None)


def debugging(job: JobDescription) -> Iterator[Violation]:
    for item in job.assignments:
        if item.name in ("CUDA_LAUNCH_BLOCKING", "HIP_LAUNCH_BLOCKING", "AMD_SERIALIZE_KERNEL") and item.value in (
            "1",
            "3",
        ):
            yield Violation(item.offset, f"{item.name}={item.value} makes every kernel wait for the one before")


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
DEBUGGING_WHY = (
    "The setting is for debugging: copies and communication no longer overlap with computation, and training is slower."
)
HANDLING_WHY = (
    "When a rank dies, the others wait in their collective without end; by default torch ends them after the timeout."
)
HANDLING_CURE = "remove it"
GID_WHY = "The index of the RoCE v2 address differs between nodes and changes when addresses change. NCCL 2.21 and later select it."
NAME = lazy_regex(r"[a-z]+[a-z0-9]*\d[a-z0-9.:_-]*\Z", re.IGNORECASE)


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
        text = f"{item.name}={value}: the interface {names[0]} may not exist {where}"
        yield Violation(item.offset, text)
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
        if what is None:
            continue
        text = f"{item.name}={item.value} disables {what} on every node, without a stated reason"
        wrong = _contradicts(job, what) and not (_has_comment(job, item.offset) or _other_network(job))
        yield Violation(item.offset, text, severity="warning" if wrong else "note")


def _contradicts(job: JobDescription, what: str) -> bool:
    """Return whether the file also shows that the nodes have what it disables; the site may have a reason otherwise."""
    if what == NETWORK:
        adapters = job.has("NCCL_IB_HCA", "NCCL_IB_GID_INDEX", "NCCL_IB_TIMEOUT", "NCCL_NET_GDR_LEVEL")
        return adapters and not (job.kind == "script" and job.nodes == 1)
    requested = " ".join(job.heads(name) or "" for name in ("gres", "gpus-per-node", "gpus", "constraint", "partition"))
    return job.has("NCCL_NVLS_ENABLE") or bool(NVLINK.search(requested))


CODE_COMMENT = lazy_regex(r"#SBATCH|#+\s*(?:source|export|srun|module|python|conda|torchrun|\w+=)")


def _has_comment(job: JobDescription, offset: int) -> bool:
    """Return whether a comment stands on the line or directly above: it is a stated reason."""
    line = job.lines.place(offset)[0]
    for comment in job.reading.comments:
        place, column = job.lines.place(comment.offset)
        if place == line or (place == line - 1 and not job.lines.line(place)[: column - 1].strip()):
            if len(comment.text.split()) > 2 and not CODE_COMMENT.match(comment.text):
                return True
    return False


def _other_network(job: JobDescription) -> bool:
    """Return whether the script uses another fast network than InfiniBand, through a plugin."""
    return any(a.name.startswith(("FI_", "NCCL_OFI_", "NCCL_FASTRAK_", "NCCL_GPUDIRECTTCPX")) for a in job.assignments)


NETWORK = "InfiniBand and RoCE"
NVLINK = lazy_regex(r"(?i)nvlink|sxm|[dh]gx|gh200|h200|b200|mi[23]\d\d")
OFF = {
    ("NCCL_P2P_DISABLE", "1"): "direct copies between GPUs",
    ("NCCL_P2P_LEVEL", "LOC"): "direct copies between GPUs",
    ("NCCL_P2P_LEVEL", "0"): "direct copies between GPUs",
    ("NCCL_IB_DISABLE", "1"): NETWORK,
    ("NCCL_NET", "SOCKET"): NETWORK,
    ("NCCL_SHM_DISABLE", "1"): "shared memory",
}


def _switched_off(item: Assignment) -> str | None:
    return None if item.removed else OFF.get((item.name, item.value.strip().upper()))


def gid(job: JobDescription) -> Iterator[Violation]:
    for item in job.set_values("NCCL_IB_GID_INDEX"):
        if item.value.isdecimal():
            yield Violation(item.offset, f"NCCL_IB_GID_INDEX={item.value}: the same index on every node")


# ------------------------------------------------------------------------------ nearly a usual name

# Names that people write, and the one that the libraries read.
OTHER_NAMES = {
    "MASTER_ADDRESS": "MASTER_ADDR", "MASTERADDR": "MASTER_ADDR", "MASTER_ADRESS": "MASTER_ADDR", "MASTERPORT": "MASTER_PORT",
    "WORLDSIZE": "WORLD_SIZE", "LOCALRANK": "LOCAL_RANK", "CUDA_VISIBLE_GPUS": "CUDA_VISIBLE_DEVICES", "CUDA_DEVICES_VISIBLE": "CUDA_VISIBLE_DEVICES",
    "VISIBLE_CUDA_DEVICES": "CUDA_VISIBLE_DEVICES", "OMP_THREADS": "OMP_NUM_THREADS", "OMP_NUMTHREADS": "OMP_NUM_THREADS",
    "NUM_OMP_THREADS": "OMP_NUM_THREADS", "MKL_THREADS": "MKL_NUM_THREADS", "PYTHON_PATH": "PYTHONPATH", "WANDB_API_MODE": "WANDB_MODE",
    "WANDB_APIKEY": "WANDB_API_KEY", "WANDB_DISABLE": "WANDB_DISABLED", "TRANSFORMER_OFFLINE": "TRANSFORMERS_OFFLINE",
    "HF_OFFLINE": "HF_HUB_OFFLINE", "LD_LIBARY_PATH": "LD_LIBRARY_PATH", "LD_LIBRARYPATH": "LD_LIBRARY_PATH",
}  # fmt: skip


def near_names(job: JobDescription) -> Iterator[Violation]:
    """Report variables whose name is nearly, or means the same as, one that libraries read."""
    said: set[str] = set()
    for item in job.assignments:
        name = item.name
        exported = item.exported or job.kind != "script" or name in job.reading.exported
        if item.removed or not exported or name in said:
            continue
        meant = OTHER_NAMES.get(name) or _near(name) or _of_container(name)
        if meant is None or job.has(meant) or used_elsewhere(job, name):
            continue
        said.add(name)
        if meant in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK") and not _meets_by_environment(job):
            continue
        text = f"{name}: no library knows this variable; {meant} was probably meant"
        yield Violation(item.offset, text, cure=meant, severity=severity_of(job, item, meant))


READ_BY_OTHERS = {
    "WORLD_SIZE", "LOCAL_RANK", "WANDB_MODE", "WANDB_DISABLED", "WANDB_API_KEY", "WANDB_PROJECT", "WANDB_DIR", "WANDB_ENTITY", "WANDB_NAME",
    "WANDB_SILENT", "WANDB_CACHE_DIR", "TRANSFORMERS_CACHE", "TF_CPP_MIN_LOG_LEVEL", "CUBLAS_WORKSPACE_CONFIG", "XDG_CACHE_HOME", "TORCH_HOME",
    "HF_HOME", "HF_HUB_CACHE", "HF_ENDPOINT", "TRITON_CACHE_DIR", "PYTHONHASHSEED", "CUDA_HOME", "HSA_OVERRIDE_GFX_VERSION",
    "XLA_PYTHON_CLIENT_PREALLOCATE", "XLA_PYTHON_CLIENT_MEM_FRACTION", "TF_FORCE_GPU_ALLOW_GROWTH", "MKL_SERVICE_FORCE_INTEL",
    "MKL_THREADING_LAYER", "HYDRA_FULL_ERROR", "PYTHONPATH", "TORCHELASTIC_ERROR_FILE", "NCCL_SOCKET_IFNAME",
}  # fmt: skip
SIMILAR_AND_READ = {
    "WANDB_NAMES", "HF_HUB_CACHE", "HF_HOME", "WORK_SIZE", "WORD_SIZE", "WORLDS_SIZE", "CUDA_HOMES", "CUDA_PATH", "TORCH_NAME", "WANDB_ID",
    "HF_NAME", "HF_CODE", "HF_MODE", "TORCH_HOST", "WANDB_CODE", "WANDB_NODE", "WANDB_GAME",
}  # fmt: skip
SHORTEST_NAME = 7


def _near(name: str) -> str | None:
    """Return the variable of which this is a misspelling of one letter."""
    if len(name) < SHORTEST_NAME or name in READ_BY_OTHERS or name in SIMILAR_AND_READ or not name.isupper():
        return None
    return next((known for known in sorted(READ_BY_OTHERS) if edits(name, known, 1) == 1 and known[0] == name[0]), None)


CONTAINER_PREFIXES = ("SINGULARITYENV", "APPTAINERENV", "SINGULARITY", "APPTAINER")


def _of_container(name: str) -> str | None:
    """Return the variable of singularity or apptainer whose prefix has one wrong letter: ``SINGULAIRTYENV_X``."""
    prefix, _, rest = name.partition("_")
    if not rest or prefix in CONTAINER_PREFIXES:
        return None
    return next((f"{known}_{rest}" for known in CONTAINER_PREFIXES if edits(prefix, known, 1) == 1), None)


def _meets_by_environment(job: JobDescription) -> bool:
    """Return whether the ranks take their address from the environment: Python under srun, or a rank is set here."""
    others = job.has("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK")
    return others or job.kind != "script" or any(la.kind == "python" for la in job.launches)


# ------------------------------------------------------------------------------------------ numbers

RENDEZVOUS_PORT = lazy_regex(r"(?:MASTER|MAIN_PROCESS|MAIN|RDZV|RENDEZVOUS|HEAD|DIST)_?PORT\Z", re.IGNORECASE)
COUNT_OPTIONS = ("nproc_per_node", "num_processes", "num_gpus", "nnodes", "num_machines", "num_nodes")
COUNT = lazy_regex(r"\d+(?::\d+)?|gpu|cpu|auto|xpu|npu|mps|hpu|mlu|musa|-1")
NUMBER_WHY = "The program, or torch, cannot convert it to a number, and stops."
DOUBLE_WHY = "$(...) runs a command. Arithmetic needs two parentheses on each side."


def not_a_number(job: JobDescription) -> Iterator[Violation]:
    """Report ports and counts that contain something else than a number."""
    for item in job.assignments:
        if not item.removed and not item.items and RENDEZVOUS_PORT.match(item.name):
            yield from _port_hits(job, item)
    open_parts = {neutralise_placeholders(text) for _, text in job.placeholders}
    for launch in job.launches:
        for name in COUNT_OPTIONS:
            option = launch.option(name)
            value = (option.value or "") if option else ""
            literal = value and value not in open_parts and not re.search(r"[$`<>{}\[\]*+]", value)
            if option and literal and not COUNT.fullmatch(value.strip("\"'")):
                yield Violation(
                    option.arg.offset, f"--{name}={value!r} is not a number", why=NUMBER_WHY, cure=f"--{name}=<n>"
                )
    for call in job.calls:
        if call.in_substitution and re.fullmatch(r"\d+", call.written) and call.args:
            if call.args[0].text in ("+", "-", "*", "/", "%"):
                text = f"$({call.written} {call.args[0].text} ...) runs {call.written} as a command"
                yield Violation(call.offset, text, why=DOUBLE_WHY, cure="$((...))")


LAST_PORT = 65535


def _port_hits(job: JobDescription, item: Assignment) -> Iterator[Violation]:
    value = item.value.strip()
    wrong = None
    if value.isdecimal():
        if len(value) < 9 and int(value) > LAST_PORT:
            wrong = f"the last port is {LAST_PORT}"
        elif int(value[:9]) == 0 and _takes_zero(job, item):
            wrong = "every rank would choose its own port"
        elif 0 < int(value[:9]) < 1024 and job.is_job:
            wrong = "only root may use ports below 1024"
    elif re.fullmatch(r"\$\(\(.*\)\)[$),;.\\]+", value) and (value[-1] != ")" or value.count(")") > value.count("(")):
        wrong = f"{value[-1]} after the expression becomes part of the value"
    elif re.fullmatch(r"\d[\w,.;]*", value) or re.fullmatch(r"\d+[-+*%](?:\d+|\$\{?\w+\}?)(?:[-+*%]\w+)*", value):
        wrong = (
            "it is text, and no number" if not re.search(r"[-+*%]", value) else "the shell calculates only in $((...))"
        )
    if wrong:
        yield Violation(item.offset, f"{item.name}={value}: {wrong}", why=NUMBER_WHY, cure=f"{item.name}=<port>")


def _takes_zero(job: JobDescription, item: Assignment) -> bool:
    return item.exported and any(la.kind == "python" for la in job.launches)


def port_zero(job: JobDescription) -> Iterator[Violation]:
    """Report port 0 for DeepSpeed, whose ranks then listen at different ports."""
    for launch in job.launches:
        option = launch.option("master_port", "main_process_port")
        deepspeed = launch.kind == "deepspeed" or (
            launch.kind == "accelerate" and launch.option("use_deepspeed", "deepspeed_config_file")
        )
        if option and deepspeed and option.plain_value == "0":
            why = "DeepSpeed passes it on as the port of the rendezvous: there each rank gets another free port, and they wait for each other."
            name = option.written
            yield Violation(
                option.arg.offset,
                f"{name} 0 is no port for DeepSpeed",
                why=why,
                cure=f"{name} <port>",
                severity="error",
            )
