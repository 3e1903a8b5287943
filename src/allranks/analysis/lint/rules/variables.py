"""Environment variables: names and values that libraries read, variables of Slurm, secrets."""

from __future__ import annotations

import re
from collections.abc import Iterator

from allranks.analysis.lint.files import PLACEHOLDER
from allranks.analysis.lint.job import JobDescription
from allranks.analysis.lint.records import Violation
from allranks.analysis.lint.rules import ANY, also, error, note, warning
from allranks.planning.env_vars import DEPRECATED_VARIABLES, UNREAD_VARIABLES, is_known_variable, nearest_variable
from allranks.utils.redaction import holds_secret, whole_tokens
from allranks.utils.text import lazy_regex

PREFIXES = ("NCCL_", "TORCH_NCCL_", "TORCH_FR_", "GLOO_")


@error(
    "unknown-variable",
    why="A variable that no library reads causes no error: the line simply has no effect.",
    source="the libraries' own sources and binaries",
    bad="export NCCL_TIMEOUT=1800",
    good='# in the program:\n# torch.distributed.init_process_group("nccl", timeout=datetime.timedelta(minutes=30))',
    files=ANY,
)
def unknown(job: JobDescription) -> Iterator[Violation]:
    for item in job.all_values:
        mistake = UNREAD_VARIABLES.get(item.name)
        own = not item.name.startswith(PREFIXES) and (not item.exported or item.name in job.used_names)
        if mistake and not (own and job.kind == "script"):
            yield Violation(item.offset, f"{item.name}: {mistake.why}", cure=mistake.instead)


@warning(
    "misspelled-variable",
    why="A variable that no library reads causes no error: the line simply has no effect.",
    source="the strings in libnccl 2.21 and 2.32",
    bad="export NCCL_SOCKET_IFNAMES=ib0",
    good="export NCCL_SOCKET_IFNAME=ib0",
    files=ANY,
)
def misspelled(job: JobDescription) -> Iterator[Violation]:
    for item in job.all_values:
        name, effective = item.name, item.exported or job.kind != "script"
        if not name.startswith(PREFIXES):
            near = _usual_name(name) if effective and name not in job.used_names else None
        elif name in UNREAD_VARIABLES or name in DEPRECATED_VARIABLES or is_known_variable(name):
            continue
        else:
            near = nearest_variable(name) or _other_order(name)
        if near:
            text = f"{name}: no library knows this variable; {near} was probably meant"
            yield Violation(item.offset, text, cure=near)
        elif name.startswith("GLOO_"):  # NCCL plugins have their own variables, Gloo has no plugins
            cure = "remove it; GLOO_SOCKET_IFNAME selects Gloo's interface"
            yield Violation(item.offset, f"{name}: neither Gloo nor torch reads it", cure=cure, severity="note")
        elif name.startswith("NCCL_") and effective and name not in job.used_names:
            cure = "remove it; NCCL_DEBUG=INFO lists the variables that NCCL takes"
            text = f"{name}: neither NCCL nor a known plugin reads it"
            yield Violation(item.offset, text, cure=cure, severity="note")


def _other_order(name: str) -> str | None:
    """Return the switch whose words stand in another order: ``NCCL_DISABLE_IB``."""
    head, *words = name.split("_")
    if head != "NCCL" or "DISABLE" not in words:
        return None
    return next((known for known in SWITCHES if sorted(known.split("_")[1:]) == sorted(words)), None)


USUAL = (
    "OMP_NUM_THREADS", "MKL_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "CUDA_LAUNCH_BLOCKING", "CUDA_DEVICE_ORDER",
    "CUDA_DEVICE_MAX_CONNECTIONS", "PYTORCH_CUDA_ALLOC_CONF", "TORCH_DISTRIBUTED_DEBUG", "TORCH_CUDA_ARCH_LIST",
    "TORCH_EXTENSIONS_DIR", "TORCH_SHOW_CPP_STACKTRACES", "PYTHONUNBUFFERED", "PYTHONFAULTHANDLER",
    "TOKENIZERS_PARALLELISM", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE", "HF_DATASETS_CACHE", "HF_HUB_OFFLINE",
    "LD_LIBRARY_PATH", "LD_PRELOAD", "MASTER_ADDR", "MASTER_PORT", "SRUN_CPUS_PER_TASK", "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS",
    "NUMEXPR_MAX_THREADS", "VECLIB_MAXIMUM_THREADS", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "FI_PROVIDER",
    "TORCH_NCCL_BLOCKING_WAIT", "PYTHONPATH",
)  # fmt: skip
SHORTEST_TYPO, LONG_NAME = 10, 14
OTHER_COLLECTIVES = {f"{letter}CCL" for letter in "RHEMXPAOUST"} | {"CNCL", "BKCL"}
OTHER_NAMES = {"MASTER_ADDRESS": "MASTER_ADDR", "OMP_THREADS": "OMP_NUM_THREADS"}


def _usual_name(name: str) -> str | None:
    """Return the usual variable that this misspells: one or two letters wrong, missing, too many or swapped."""
    head, _, rest = name.partition("_")
    meant = f"NCCL_{rest}"
    if head not in OTHER_COLLECTIVES and rest and edits(head, "NCCL", 1) == 1:
        if is_known_variable(meant) or meant in DEPRECATED_VARIABLES:
            return meant
    if len(name) < SHORTEST_TYPO or name in USUAL:
        return OTHER_NAMES.get(name)
    most = 2 if len(name) >= LONG_NAME else 1
    near = (known for known in USUAL if known[0] in name[:2] and edits(name, known, most) <= most)
    return OTHER_NAMES.get(name) or next(near, None)


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


@note(
    "deprecated-variable",
    why="Deprecated names stop working after an update, without a warning.",
    source="release notes of the library",
    bad="export NCCL_TREE_THRESHOLD=0",
    good="export NCCL_ALGO=Ring",
    files=ANY,
)
def deprecated(job: JobDescription) -> Iterator[Violation]:
    for item in job.all_values:
        old = DEPRECATED_VARIABLES.get(item.name)
        if old and item.name not in job.used_names:
            severity = "warning" if old.why.startswith(("renamed in", "not a ")) else "note"
            yield Violation(item.offset, f"{item.name}: {old.why}", cure=old.instead, severity=severity)


SWITCHES = ("NCCL_IB_DISABLE", "NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_NVLS_ENABLE", "NCCL_CUMEM_ENABLE")


@error(
    "gloo-interface-syntax",
    why="Gloo only accepts exact interface names; ^ and = are NCCL's syntax, and Gloo stops with 'Unable to find "
    "address'.",
    cure="GLOO_SOCKET_IFNAME=<the interface's exact name, determined on the node>; NCCL and Gloo need separate values",
    source="tested with torch 2.13",
    bad="export GLOO_SOCKET_IFNAME=^lo,docker0",
    good="export GLOO_SOCKET_IFNAME=eno1",
    files=ANY,
)
def gloo_syntax(job: JobDescription) -> Iterator[Violation]:
    for item in job.set_values("GLOO_SOCKET_IFNAME"):
        sign = next((s for s in "^=" if item.value.startswith(s)), None)
        if sign:
            yield Violation(item.offset, f"GLOO_SOCKET_IFNAME={item.value}: Gloo does not support {sign!r}")


@error(
    "invalid-value",
    why="The library ignores the value or refuses to start.",
    source="NCCL user guide, environment variables",
    bad="export NCCL_P2P_LEVEL=NVLINK",
    good="export NCCL_P2P_LEVEL=NVL",
    files=ANY,
)
def invalid(job: JobDescription) -> Iterator[Violation]:
    for item in job.all_values:
        name, value = item.name, item.value
        if re.search(r"(?:PORT|ADDR)\Z", name) and re.search(r"\S[ \t]+\}?\Z", value) and not item.items:
            text = f"{name}={value!r}: a blank at the end of the value"
            yield Violation(item.offset, text, cure="remove the blank", severity="warning")
        allowed = ALLOWED.get(name)
        if "$" in value or allowed is None:
            continue
        form, cure = allowed
        if re.fullmatch(form, value, re.IGNORECASE):
            continue
        text, severity, why = f"{name}={value or '(empty)'}: invalid value", None, None
        if name == "NCCL_DEBUG":  # NCCL takes an unknown level for none: who wants none gets that, others miss messages
            severity = "note" if re.fullmatch(r"(?i)0|off|no|false|quiet|silent|disabled?|", value) else "warning"
            why = "NCCL prints nothing then, not even its warnings and errors."
        elif name == "NCCL_DEBUG_FILE":
            text = f"{name}={value}: NCCL replaces only %h (host) and %p (process)"
            severity, why = "note", "All ranks write to one file."
        yield Violation(item.offset, text, cure=cure, why=why, severity=severity)
    yield from _socket_threads(job)


LEVELS = r"(?:LOC|NVL|PIX|PXB|PXN|PHB|P2C|C2C|SYS|[0-5])"
PROTOCOL, ALGORITHM = "(?:LL|LL128|SIMPLE)", "(?:TREE|RING|COLLNET(?:DIRECT|CHAIN)?|NVLS(?:TREE)?|PAT)"
NUMBERS = (
    "NCCL_IB_GID_INDEX", "NCCL_IB_TIMEOUT", "NCCL_IB_RETRY_CNT", "NCCL_IB_TC", "NCCL_IB_SL", "NCCL_MIN_NCHANNELS",
    "NCCL_MAX_NCHANNELS", "NCCL_NSOCKS_PERTHREAD", "NCCL_SOCKET_NTHREADS", "NCCL_BUFFSIZE", "NCCL_NTHREADS",
    "NCCL_CROSS_NIC",
)  # fmt: skip
ALLOWED: dict[str, tuple[str, str]] = {
    "NCCL_P2P_LEVEL": (LEVELS, "one of LOC, NVL, PIX, PXB, PHB or SYS"),
    "NCCL_NET_GDR_LEVEL": (LEVELS, "one of LOC, PIX, PXB, PHB or SYS"),
    "NCCL_DEBUG": ("NONE|VERSION|WARN|INFO|ABORT|TRACE|ATTN", "one of VERSION, WARN, INFO or TRACE"),
    "NCCL_DEBUG_FILE": (r"(?:[^%]|%[hp%])*", "%h and %p in the name"),
    "NCCL_PROTO": (rf".*[:;].*|\^?{PROTOCOL}?(?:,\s*{PROTOCOL})*", "one of LL, LL128, SIMPLE"),
    "NCCL_ALGO": (rf".*[:;].*|\^?{ALGORITHM}?(?:,\s*{ALGORITHM})*", "one of Tree, Ring, CollNet, NVLS, NVLSTree, PAT"),
    "TORCH_DISTRIBUTED_DEBUG": ("OFF|INFO|DETAIL", "one of OFF, INFO or DETAIL"),
    "OMP_NUM_THREADS": (r"[1-9]\d*(?:,[1-9]\d*)*|.*[^\w.,-].*", "1 or more"),  # else a template's mark
    **dict.fromkeys(SWITCHES, (r"-?\d+|", "0 or 1")),
    **dict.fromkeys(NUMBERS, (r"[\d.:-]*|0x.*|.*[^\w.:-].*", "a number")),
}
"""The form of values, by the sources of NCCL and torch, and what to write."""


def _socket_threads(job: JobDescription) -> Iterator[Violation]:
    settings = {a.name: a for a in job.all_values if a.name in ("NCCL_SOCKET_NTHREADS", "NCCL_NSOCKS_PERTHREAD")}
    counts = {name: int(a.value) for name, a in settings.items() if a.value.isdecimal() and len(a.value) < 6}
    threads, sockets = counts.get("NCCL_SOCKET_NTHREADS", 1), counts.get("NCCL_NSOCKS_PERTHREAD", 1)
    if threads > 16:
        text = f"NCCL_SOCKET_NTHREADS={threads}: NCCL's maximum is 16"
        yield Violation(settings["NCCL_SOCKET_NTHREADS"].offset, text, cure="16 or less")
    elif threads * sockets > 64:
        place = settings.get("NCCL_NSOCKS_PERTHREAD") or settings["NCCL_SOCKET_NTHREADS"]
        text = f"NCCL_SOCKET_NTHREADS x NCCL_NSOCKS_PERTHREAD = {threads * sockets}: NCCL's maximum is 64 sockets"
        yield Violation(place.offset, text, cure="a product of 64 or less")


@warning(
    "error-handling-off",
    why="When a rank dies, the others wait in their collective without end; by default torch ends them after the "
    "timeout.",
    cure="remove it",
    source="ProcessGroupNCCL.hpp",
    bad="export TORCH_NCCL_ASYNC_ERROR_HANDLING=0",
    good="# no line: torch ends the ranks after the timeout",
    files=ANY,
)
def handling_off(job: JobDescription) -> Iterator[Violation]:
    for item in job.assignments:
        if item.name in ("NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_ASYNC_ERROR_HANDLING") and item.value == "0":
            alone = job.is_batch and job.nodes == 1 and job.gpus_per_node == 1 and not job.launches
            text = f"{item.name}=0 switches the watchdog's error handling off"
            yield Violation(item.offset, text, severity="note" if alone else None)


@note(
    "debug-setting",
    why="The setting is for debugging: copies and communication no longer overlap with computation, and training is "
    "slower.",
    cure="remove it",
    source="CUDA C++ programming guide, environment variables",
    bad="export CUDA_LAUNCH_BLOCKING=1",
    good="# no line; for one debugging run: CUDA_LAUNCH_BLOCKING=1 sbatch job.sbatch",
    files=ANY,
)
def debugging(job: JobDescription) -> Iterator[Violation]:
    for item in job.assignments:
        serial = item.value in ("1", "3")
        if serial and item.name in ("CUDA_LAUNCH_BLOCKING", "HIP_LAUNCH_BLOCKING", "AMD_SERIALIZE_KERNEL"):
            yield Violation(item.offset, f"{item.name}={item.value} makes every kernel wait for the one before")


@note(
    "no-effect",
    why="The value is the default, so the line changes nothing.",
    cure="remove the line",
    source="NCCL's defaults: both are 0",
    bad="export NCCL_SHM_DISABLE=0",
    good="# no line: 0 is the default",
    files=ANY,
)
def no_effect(job: JobDescription) -> Iterator[Violation]:
    for item in job.all_values:
        other = any(a.value != "0" for a in job.set_values(item.name))  # which 0 then resets
        if item.name in ("NCCL_IB_DISABLE", "NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE") and item.value == "0" and not other:
            text = f"{item.name}=0 is NCCL's default: it has no effect unless an earlier setting is 1"
            yield Violation(item.offset, text)


NAME = lazy_regex(r"[a-z]+[a-z0-9]*\d[a-z0-9.:_-]*\Z", re.IGNORECASE)


def _names(value: str) -> list[str]:
    return [v.lstrip("=") for v in value.split(",") if v]


@note(
    "hard-coded-interface",
    why="Interface names differ between nodes. NCCL does not report a missing interface; it uses another one or hangs. "
    "Gloo stops with an error.",
    cure="leave NCCL_SOCKET_IFNAME unset, or exclude interfaces (^lo,docker), or determine the name on each node (ip "
    "-o route get)",
    source="nccl#286, nccl#1837",
    bad="export NCCL_SOCKET_IFNAME=eth0",
    good="export NCCL_SOCKET_IFNAME=^lo,docker",
    files=ANY,
)
def interface(job: JobDescription) -> Iterator[Violation]:
    for item in job.all_values:
        names = _names(item.value)
        if item.name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME") and len(names) == 1:
            if NAME.match(names[0]) and not item.value.startswith("^") and "$" not in item.value:
                where = "on every node" if job.multi_node else "here"
                text = f"{item.name}={item.value}: the interface {names[0]} may not exist {where}"
                yield Violation(item.offset, text)


@error(
    "loopback-across-nodes",
    why="lo only connects processes of one node; ranks on other nodes wait until the timeout.",
    cure="leave NCCL_SOCKET_IFNAME unset, or exclude interfaces (^lo,docker), or determine the name on each node (ip "
    "-o route get)",
    source="NCCL user guide, environment variables",
    bad="export GLOO_SOCKET_IFNAME=lo",
    good="# no line: each rank uses the interface of its host's name",
)
def loopback(job: JobDescription) -> Iterator[Violation]:
    if not job.multi_node:
        return
    for item in job.assignments:
        if item.name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME") and _names(item.value) == ["lo"]:
            yield Violation(item.offset, f"{item.name}={item.value} in a job of several nodes")


@note(
    "transport-disabled",
    why="A working transport is disabled on every node: without InfiniBand collectives are 10 to 20 times slower, "
    "without P2P about 8.",
    cure="remove it; if doctor --collectives shows that it fails, keep it with # allranks: ignore[transport-disabled] "
    "<reason>",
    source="nccl#667, nccl#1838",
    bad="export NCCL_IB_HCA=mlx5\nexport NCCL_IB_DISABLE=1",
    good="export NCCL_IB_HCA=mlx5\n# the firmware of these adapters hangs, replaced in May\nexport NCCL_IB_DISABLE=1",
    files=ANY,
)
def disabled(job: JobDescription) -> Iterator[Violation]:
    for item in job.all_values:
        what = OFF.get((item.name, item.value.strip().upper()))
        if what is not None:
            text = f"{item.name}={item.value} disables {what} on every node, without a stated reason"
            wrong = _contradicts(job, what) and not _has_comment(job, item.offset)
            yield Violation(item.offset, text, severity="warning" if wrong else "note")


def _contradicts(job: JobDescription, what: str) -> bool:
    """Return whether the file also shows that the nodes have what it disables; the site may have a reason otherwise."""
    plugins = ("FI_", "NCCL_OFI_", "NCCL_FASTRAK_", "NCCL_GPUDIRECTTCPX")  # other fast networks
    if what == NETWORK:
        adapters = job.has("NCCL_IB_HCA", "NCCL_IB_GID_INDEX", "NCCL_IB_TIMEOUT", "NCCL_NET_GDR_LEVEL")
        alone = job.kind == "script" and job.nodes == 1
        return adapters and not alone and not any(a.name.startswith(plugins) for a in job.assignments)
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


NETWORK, PEERS = "InfiniBand and RoCE", "direct copies between GPUs"
NVLINK = lazy_regex(r"(?i)nvlink|sxm|[dh]gx|gh200|h200|b200|mi[23]\d\d")
OFF = {
    ("NCCL_P2P_DISABLE", "1"): PEERS, ("NCCL_P2P_LEVEL", "LOC"): PEERS, ("NCCL_P2P_LEVEL", "0"): PEERS,
    ("NCCL_IB_DISABLE", "1"): NETWORK, ("NCCL_NET", "SOCKET"): NETWORK, ("NCCL_SHM_DISABLE", "1"): "shared memory",
}  # fmt: skip


@note(
    "fixed-gid-index",
    why="The index of the RoCE v2 address differs between nodes and changes when addresses change. NCCL 2.21 and later "
    "select it.",
    cure="remove it, or determine it on each node",
    source="NCCL 2.21 notes",
    bad="export NCCL_IB_GID_INDEX=3",
    good="# no line: NCCL 2.21 and later choose it",
    files=ANY,
)
def gid(job: JobDescription) -> Iterator[Violation]:
    for item in job.set_values("NCCL_IB_GID_INDEX"):
        if item.value.isdecimal():
            yield Violation(item.offset, f"NCCL_IB_GID_INDEX={item.value}: the same index on every node")


RENDEZVOUS_PORT = lazy_regex(r"(?:MASTER|MAIN_PROCESS|MAIN|RDZV|RENDEZVOUS|HEAD|DIST)_?PORT\Z", re.IGNORECASE)
NUMBER_WHY = "The program, or torch, cannot convert it to a number, and stops."


@also("invalid-value")
def not_a_number(job: JobDescription) -> Iterator[Violation]:
    """Report ports and counts that contain something else than a number."""
    for item in job.all_values:
        value = item.value.strip()
        if item.items or not RENDEZVOUS_PORT.match(item.name):
            continue
        if re.fullmatch(r"\d{5,8}", value) and int(value) > 65535:
            text = f"{item.name}={value}: the last port is 65535"
            yield Violation(item.offset, text, why=NUMBER_WHY, cure=f"{item.name}=<port>")
        elif re.fullmatch(r"\d+[-+*%](?:\d+|\$\{?\w+\}?)(?:[-+*%]\w+)*", value):
            text = f"{item.name}={value}: the shell calculates only in $((...))"
            yield Violation(item.offset, text, why=NUMBER_WHY, cure=f"{item.name}=<port>")


@warning(
    "unset-variable",
    why="Slurm sets this variable only if the job requests the option; otherwise it is empty.",
    cure="set the variable before, or give a default: ${NAME:-value}",
    source="Slurm's sbatch and srun manuals; bash manual, expansion",
    bad="#SBATCH --nodes=1\n#SBATCH --gres=gpu:4\ntorchrun --nproc_per_node=$SLURM_GPUS_PER_NODE train.py",
    good="#SBATCH --nodes=1\n#SBATCH --gpus-per-node=4\ntorchrun --nproc_per_node=$SLURM_GPUS_PER_NODE train.py",
)
def empty_slurm_options(job: JobDescription) -> Iterator[Violation]:
    if not job.requests_all or job.submits:
        return
    tested = {u.name for u in job.uses if u.operator.startswith(GUARDS) or u.program in ("[", "[[", "test")}
    for use in job.uses:
        options = NEEDED_OPTIONS.get(use.name, ())
        if not options or use.name in tested or use.program in ("echo", "printf") or job.has(use.name):
            continue
        if use.in_loop and job.nodes == 1 and re.search(r"worker|SLURM_JOB_NUM_NODES|SLURM_NNODES", job.text):
            continue  # in a loop over the other nodes
        if job.heading.keys() & set(options) or ("gpu" in options[0] and not job.requests_gpus):
            continue
        if use.under and use.name in ("SLURM_NTASKS", "SLURM_NPROCS"):
            continue  # srun sets them for its tasks
        if any(f"--{o}" in a.text for c in use.under for a in c.args for o in options):
            continue
        text = f"${use.name} is empty: the job does not request --{options[0]}"
        cure = f"#SBATCH --{options[0]}=<n>, or ${{{use.name}:-<n>}}"
        # The tasks of an array are often named on the command line of sbatch.
        disabled = any(re.match(rf"#+\s*SBATCH\b.*--{o}\b", c.text) for c in job.reading.comments for o in options)
        yield Violation(use.offset, text, cure=cure, severity="note" if options[0] == "array" or disabled else None)
        tested.add(use.name)


# https://slurm.schedmd.com/sbatch.html, output environment variables that are "only set if the option is specified"
OF_TASKS = ("ntasks", "ntasks-per-node", "ntasks-per-gpu", "ntasks-per-core", "ntasks-per-socket")
BY_OPTION = (
    "cpus-per-task", "ntasks-per-node", "gpus-per-node", "gpus-per-task", "cpus-per-gpu", "gpus", "mem-per-cpu",
)  # fmt: skip
NEEDED_OPTIONS = {
    **{f"SLURM_{name.upper().replace('-', '_')}": (name,) for name in BY_OPTION},
    **dict.fromkeys(("SLURM_NTASKS", "SLURM_NPROCS"), OF_TASKS),
    **dict.fromkeys(("SLURM_ARRAY_TASK_ID", "SLURM_ARRAY_JOB_ID"), ("array",)),
}


@note(
    "slurm-tmpdir",
    why="Slurm does not set SLURM_TMPDIR; only the prologs of some clusters do. Elsewhere it is empty, and "
    "$SLURM_TMPDIR/x is /x.",
    cure="${SLURM_TMPDIR:-/tmp/$USER.$SLURM_JOB_ID}, created with mkdir -p on every node",
    source="tested with Slurm 22.05",
    bad="cp data.tar $SLURM_TMPDIR/",
    good='cp data.tar "${SLURM_TMPDIR:-/tmp/$USER.$SLURM_JOB_ID}/"',
)
def tmpdir(job: JobDescription) -> Iterator[Violation]:
    if job.has("SLURM_TMPDIR"):
        return
    for use in job.uses:
        if (
            use.name == "SLURM_TMPDIR"
            and not use.operator.startswith((":-", "-", ":+", "+", ":?", "?"))
            and use.program not in ("[", "[[", "test")
        ):
            guarded = any(u.program in ("[", "[[", "test") or u.operator for u in job.uses if u.name == "SLURM_TMPDIR")
            if not guarded:
                yield Violation(use.offset, "$SLURM_TMPDIR is empty on a cluster that does not set it", severity="note")
            return


@warning(
    "secret-in-script",
    why="Everybody who can read the file, its history or the job's command line has the token.",
    cure="revoke it; read the token from a file that only you can read: export HF_TOKEN=$(cat ~/.hf_token), or "
    "huggingface-cli login",
    source="huggingface_hub's documentation, security",
    bad="export WANDB_API_KEY=0123456789abcdef0123456789abcdef01234567",
    good="export WANDB_API_KEY=$(cat ~/.wandb_key)",
)
def secret(job: JobDescription) -> Iterator[Violation]:
    seen: set[int] = set()
    for offset, where in _tokens(job):
        line = job.lines.place(offset)[0]
        if line not in seen:
            seen.add(line)
            yield Violation(offset, f"{where} a token in clear text")


def _tokens(job: JobDescription) -> Iterator[tuple[int, str]]:
    for item in job.all_values:
        value = item.value
        if "$" not in value and len(value) >= 8 and not _is_no_secret(value) and holds_secret(item.name, value):
            yield item.offset, f"{item.name} contains"
    for arg in (arg for call in job.calls for arg in call.args):
        for part in arg.text.split(","):  # --export=ALL,WANDB_API_KEY=...
            name, _, value = part.rpartition("=")
            name = name.rpartition("=")[2].lstrip("-")
            if name.isidentifier() and "$" not in value and not _is_no_secret(value) and holds_secret(name, value):
                yield arg.offset, f"{name} contains"
    for token in whole_tokens(job.text) if job.kind == "script" else ():  # in here-documents and comments, too
        if not _is_no_secret(token[0]) and not re.search(r"(?i)abcdef|1234567", token[0]):
            yield token.start(), "the line contains"


def _is_no_secret(value: str) -> bool:
    """Return whether a value to redact is a placeholder, a path, or a word that an open server takes for a key."""
    name, equals, rest = value.partition("=")
    text = rest if equals and rest.strip("=") and re.fullmatch(r"-{0,2}[\w.-]+", name) else value
    return bool(
        PLACEHOLDER.search(text)
        or re.fullmatch(r"[A-Z0-9]+(?:_[A-Z0-9]+)+", text)  # the name of a variable
        or re.search(r"(?i)your|xxx|\*\*\*|token|secret|example|changeme|dummy|empty|\.\.\.|<|/", text)
        or len(set(text[-24:].lower())) < 8
        or re.fullmatch(r"[A-Za-z]{1,12}(?: [A-Za-z]{1,12}){1,6}", text)
    )


GUARDS = (":", "-", "+", "?", "=")
