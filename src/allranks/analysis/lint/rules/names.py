"""Rules for names: variables that nothing reads, values that no program gets, commands that do not exist."""

from __future__ import annotations

import re
from collections.abc import Iterator

from allranks.analysis.lint.job import JobDescription
from allranks.analysis.lint.records import Assignment, Violation
from allranks.analysis.lint.rules.dataflow import GUARDS
from allranks.analysis.lint.rules.variables import edits

PRINTING = {"echo", "printf", "logger"}


def used_elsewhere(job: JobDescription, name: str) -> bool:
    """Return whether something else than an echo, or the variable's own assignment, uses its value."""
    own = {job.lines.place(a.offset)[0] for a in job.by_name.get(name, ())}
    return any(
        u.name == name
        and u.program not in PRINTING
        and not (u.program in ("=", "export", "declare") and job.lines.place(u.offset)[0] in own)
        for u in job.uses
    )


# --------------------------------------------------------------------------- nearly a usual name

# Names that people write, and the one that the libraries read.
OTHER_NAMES = {
    "MASTER_ADDRESS": "MASTER_ADDR", "MASTERADDR": "MASTER_ADDR", "MASTER_ADRESS": "MASTER_ADDR", "MASTERPORT": "MASTER_PORT",
    "WORLDSIZE": "WORLD_SIZE", "LOCALRANK": "LOCAL_RANK", "CUDA_VISIBLE_GPUS": "CUDA_VISIBLE_DEVICES", "CUDA_DEVICES_VISIBLE": "CUDA_VISIBLE_DEVICES",
    "VISIBLE_CUDA_DEVICES": "CUDA_VISIBLE_DEVICES", "OMP_THREADS": "OMP_NUM_THREADS", "OMP_NUMTHREADS": "OMP_NUM_THREADS",
    "NUM_OMP_THREADS": "OMP_NUM_THREADS", "MKL_THREADS": "MKL_NUM_THREADS", "PYTHON_PATH": "PYTHONPATH", "WANDB_API_MODE": "WANDB_MODE",
    "WANDB_APIKEY": "WANDB_API_KEY", "WANDB_DISABLE": "WANDB_DISABLED", "TRANSFORMER_OFFLINE": "TRANSFORMERS_OFFLINE",
    "HF_OFFLINE": "HF_HUB_OFFLINE", "LD_LIBARY_PATH": "LD_LIBRARY_PATH", "LD_LIBRARYPATH": "LD_LIBRARY_PATH",
}  # fmt: skip
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


def near_names(job: JobDescription) -> Iterator[Violation]:
    """Report variables whose name is nearly, or means the same as, one that libraries read."""
    said: set[str] = set()
    for item in job.assignments:
        name = item.name
        exported = item.exported or job.kind != "script" or name in job.reading.exported
        if item.removed or not exported or name in said:
            continue
        meant = OTHER_NAMES.get(name) or _near(name)
        if meant is None or job.has(meant) or used_elsewhere(job, name):
            continue
        said.add(name)
        if meant in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK") and not _meets_by_environment(job):
            continue
        yield Violation(item.offset, f"{name}: no library knows this variable; {meant} was probably meant", cure=meant)


def _near(name: str) -> str | None:
    """Return the variable of which this is a misspelling of one letter."""
    if len(name) < SHORTEST_NAME or name in READ_BY_OTHERS or name in SIMILAR_AND_READ or not name.isupper():
        return None
    return next((known for known in sorted(READ_BY_OTHERS) if edits(name, known, 1) == 1 and known[0] == name[0]), None)


def _meets_by_environment(job: JobDescription) -> bool:
    """Return whether the ranks take their address from the environment: Python under srun, or a rank is set here."""
    others = job.has("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK")
    return others or job.kind != "script" or any(la.kind == "python" for la in job.launches)


# ------------------------------------------------------------------------- set, and not exported

MORE_READ = re.compile(
    r"(?:WANDB_(?:MODE|DISABLED|PROJECT|DIR|NAME|ENTITY|SILENT|CACHE_DIR|RUN_GROUP|API_KEY)|HF_(?:HOME|HUB_CACHE|HUB_OFFLINE|ENDPOINT|TOKEN|"
    r"DATASETS_OFFLINE|DATASETS_CACHE|EVALUATE_OFFLINE)|TRANSFORMERS_(?:CACHE|OFFLINE)|TORCH_(?:HOME|EXTENSIONS_DIR|CUDA_ARCH_LIST)|"
    r"CUDA_DEVICE_ORDER|TRITON_CACHE_DIR|CUBLAS_WORKSPACE_CONFIG|PYTHONHASHSEED|PYTHONUNBUFFERED|TF_CPP_MIN_LOG_LEVEL|XLA_FLAGS|MPLBACKEND|"
    r"XLA_PYTHON_CLIENT_\w+|TF_FORCE_GPU_ALLOW_GROWTH|TORCHELASTIC_ERROR_FILE|NUMEXPR_(?:NUM|MAX)_THREADS|OPENBLAS_NUM_THREADS|OMP_NUM_THREADS|"
    r"MKL_NUM_THREADS|TOKENIZERS_PARALLELISM|NCCL_\w+|GLOO_SOCKET_IFNAME|CUDA_LAUNCH_BLOCKING|PYTORCH_CUDA_ALLOC_CONF|HYDRA_FULL_ERROR|"
    r"MASTER_ADDR|MASTER_PORT|WORLD_SIZE)\Z"
)
NO_PROGRAM_WHY = "A program only has the exported variables: the line has no effect."


def without_export(job: JobDescription) -> Iterator[Violation]:
    """Report settings for a program that the script sets, and perhaps prints, without exporting them."""
    started = [c.offset for c in job.calls if c.program in ("srun", "mpirun", "mpiexec") and not c.in_substitution]
    if (
        job.kind != "script"
        or not (job.work or started)
        or re.search(r"\bset\s+-(?:\w*a\w*|o\s+allexport)\b", job.text)
    ):
        return
    last = max([*started, *(w.offset for w in job.work)])
    several = len({"MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK"} & job.by_name.keys()) > 1
    env_init = any(la.kind == "python" for la in job.launches) or (bool(started) and not job.launches and several)
    said: set[str] = set()
    for item in job.set_values_at_top():
        name = item.name
        if name in said or not MORE_READ.match(name) or item.offset > last or not item.value:
            continue
        said.add(name)
        if name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") and not env_init:
            continue
        others = any(a.exported or a.under for a in job.by_name[name]) or name in job.reading.exported
        if others or used_elsewhere(job, name) or name in job.reading.named or f"${{{name}" in item.value:
            continue
        if name == "OMP_NUM_THREADS" and job.unknown_settings:
            continue  # modules and site profiles export it
        text = f"{name} is set but not exported: no program gets it"
        yield Violation(item.offset, text, why=NO_PROGRAM_WHY, cure=f"export {name}")


# --------------------------------------------------------------- used before it is set, or never

SILENT = {"echo", "printf", "[", "[[", "test", ":", "logger", "date"}
COMMENTED = re.compile(r"#+\s*(?:export\s+|declare\s+)?([A-Za-z_]\w*)=(?!=)(\S.*|\S?)")
MAY_BE_EMPTY = re.compile(
    r"(?i)\w*(?:options?|opts?|args?|flags?|extras?|debug|dry_?run|profil\w*|prefix|suffix|resume\w*)"
)
COMMENTED_LOOP = re.compile(r"#+\s*for\s+([A-Za-z_]\w*)\s+in\s")
USUAL_OUTSIDE = re.compile(
    r"(?:SCRATCH|WORK|HOME|DATA|PROJECT|STORE|TMP|LOCAL|CONDA|CUDA|PYTHON|LD_|HF_|WANDB|SLURM|PBS|NCCL|MASTER|OMP|EBROOT|MODULE)\w*"
)


def _guarded(job: JobDescription) -> set[str]:
    tested = {u.name for u in job.uses if u.program in ("[", "[[", "test", "case") or u.operator.startswith(GUARDS)}
    return tested | job.reading.named


def set_too_late(job: JobDescription) -> Iterator[Violation]:
    """Report a value that a command or another value takes before the script sets it, even if a file is sourced before."""
    if job.kind != "script" or not job.is_job:
        return
    guarded, said = _guarded(job), set[str]()
    for use in job.uses:
        name = use.name
        own = job.by_name.get(name, [])
        if not own or use.under or use.in_function or use.in_loop or use.program in SILENT or name in guarded | said:
            continue
        first = own[0]
        inside = any(a.under or a.in_function or a.in_substitution for a in own) or name in (job.heads("export") or "")
        if inside or use.offset >= first.offset or name.startswith("SLURM_") or USUAL_OUTSIDE.fullmatch(name):
            continue
        line, later = job.lines.place(use.offset)[0], job.lines.place(first.offset)[0]
        again = re.search(rf"\$\{{?{name}\b", job.line_of(first.offset))
        if line >= later or again or _sourced_name(job, name) or job.lines.line(later)[:1].isspace():
            continue
        said.add(name)
        yield Violation(use.offset, f"${name} is used before it is set, in line {later}")


def _sourced_name(job: JobDescription, name: str) -> bool:
    """Return whether the script exports it: then it may be that of the caller before, and another one after."""
    return any(a.exported for a in job.by_name.get(name, ())) and job.unknown_settings


def set_in_comment(job: JobDescription) -> Iterator[Violation]:
    """Report a variable that only a commented line sets."""
    if job.kind != "script" or not job.is_job or job.sources_files or job.submits or "export" in job.heading:
        return
    commented: dict[str, int] = {}
    for comment in job.reading.comments:
        line = job.lines.place(comment.offset)[0]
        found = COMMENTED.match(comment.text) or COMMENTED_LOOP.match(comment.text)
        if found and not re.search(r"\b(?:sbatch|qsub|bash|sh|export it|e\.g\.|usage)\b", comment.text):
            commented.setdefault(found[1], line)
    guarded, said = _guarded(job), set[str]()
    for use in job.uses if commented else ():
        name = use.name
        if name not in commented or name in guarded | said or use.in_function or use.program in ("echo", "printf"):
            continue
        if (
            job.has(name)
            or name in job.reading.exported
            or USUAL_OUTSIDE.fullmatch(name)
            or MAY_BE_EMPTY.fullmatch(name)
        ):
            continue
        if re.search(rf"(?m)^[^#\n]*\b{name}=", job.text) or re.search(rf"(?i)#.*--export\S*{name}", job.text):
            continue
        said.add(name)
        text = f"${name} is never set: line {commented[name]}, which sets it, is a comment"
        yield Violation(use.offset, text, cure="take out the # of that line, or the use")


# --------------------------------------------------------------------------- unset NAME=value

LIBRARY_NAME = re.compile(
    r"(?:NCCL|CUDA|TORCH|OMP|MKL|MASTER|SLURM|WANDB|HF|PYTHON|LD|GLOO|TF|TRANSFORMERS|ROCR|HIP)_?[A-Z_]*"
)
UNSET_WHY = "unset takes names: anything else is 'not a valid identifier', and the variable keeps its value."


def unset_value(job: JobDescription) -> Iterator[Violation]:
    """Report ``unset NAME=value`` and ``unset $NAME``."""
    for item in job.assignments:
        if item.removed and (found := re.match(r"([A-Za-z_]\w*)=", item.name)):
            text = f"unset {item.name[:60]}: nothing is unset"
            yield Violation(item.offset, text, why=UNSET_WHY, cure=f"unset {found[1]}")
    for found in re.finditer(r"(?m)^[ \t]*unset[ \t]+(?:-v[ \t]+)?(\$\{?(\w+)\}?)(?=[ \t]*(?:$|#|;))", job.text):
        if LIBRARY_NAME.fullmatch(found[2]) and not job.in_comment(found.start(1)) and not _is_set_plain(job, found[2]):
            text = f"unset {found[1]} unsets the variable that the value of {found[2]} names"
            yield Violation(found.start(1), text, why=UNSET_WHY, cure=f"unset {found[2]}")


def _is_set_plain(job: JobDescription, name: str) -> bool:
    return any(re.fullmatch(r"[A-Za-z_]\w*", a.value) for a in job.by_name.get(name, ()))


# ------------------------------------------------------------------------- misspelt commands

FREQUENT = (
    "exit", "export", "module", "source", "srun", "python", "python3", "echo", "conda", "mamba", "mkdir", "unset", "sleep", "wait", "torchrun",
    "accelerate", "deepspeed", "sbatch", "scontrol", "hostname", "nvidia-smi", "ulimit", "touch", "tail", "return", "break", "continue", "mpirun",
    "singularity", "apptainer", "bash", "chmod", "printf", "squeue", "scancel", "rsync", "unzip", "activate",
)  # fmt: skip
# Programs that exist, or functions that sourced files define, and that are nearly one of the above.
EXISTING = {
    "exec", "expr", "exif", "expand", "node", "mode", "modules", "sources", "jsrun", "lrun", "aprun", "prun", "run", "python2", "pythonw", "ipython",
    "bpython", "condor", "reset", "watch", "salloc", "sbcast", "sattach", "hostid", "limit", "mail", "fail", "bail", "dash", "hash", "mpiexec",
    "mpicc", "print", "sprintf", "queue", "cancel", "sync", "gunzip", "exist", "lmod", "deactivate", "reactivate", "sinfo", "sacct", "trail",
    "exports", "await", "hostnamectl", "rails", "batch", "sbatchd", "breaks", "text", "test", "next", "init", "edit", "quit", "main",
}  # fmt: skip
GLUED = re.compile(
    r"(?:exit|sleep|wait|echo|cd|export)\d+|cd\.\.|(?:pip3?|conda)install|moduleload|condaactivate|sourceactivate"
)
LONGEST_EXIT = 10
LONG_COMMAND = 8


def misspelt_commands(job: JobDescription) -> Iterator[Violation]:
    """Report commands that are one letter, or for long names two, from a usual one, and that nothing defines."""
    if not (job.is_job or job.text.startswith("#!")):
        return
    defined = set(re.findall(r"(?m)^\s*(?:function\s+)?([\w-]+)\s*\(\)|^\s*function\s+([\w-]+)", job.text))
    names = {name for pair in defined for name in pair} | set(re.findall(r"\balias\s+([\w-]+)=", job.text))
    known: dict[str, str | None] = {}
    for call in job.calls:
        word = call.written
        if word in names or call.in_substitution or not re.fullmatch(r"[A-Za-z][\w.-]{2,14}", word):
            continue
        if any(c.program not in ("srun", "time", "env") for c in call.under):
            continue
        if word not in known:
            known[word] = _command_meant(word)
        meant = known[word]
        if meant and word in job.text[call.offset : call.offset + len(word)]:
            yield Violation(call.offset, f"{word}: there is no such command; {meant} was probably meant", cure=meant)


def _command_meant(word: str) -> str | None:
    if word in FREQUENT or word in EXISTING:
        return None
    if GLUED.fullmatch(word):
        return re.sub(r"(\d+|\.\.|install|load|activate)\Z", r" \1", word)
    if (
        word.lower() in FREQUENT
        and word != word.lower()
        and (not word.isupper() or word in ("EXPORT", "SOURCE", "ECHO", "MODULE", "SRUN"))
    ):
        return word.lower()
    if not re.fullmatch(r"[a-z][a-z_-]+", word):
        return None
    if (
        word.startswith("exit")
        and "exit" != word <= "exit" + "z" * LONGEST_EXIT
        and "_" not in word
        and "-" not in word
    ):
        return "exit"
    near = [u for u in FREQUENT if len(word) > 3 and edits(word, u, 1) == 1 and not word.endswith(u)]
    near += [u for u in FREQUENT if len(u) >= LONG_COMMAND and edits(word, u, 2) == 2 and word[0] == u[0]]
    return near[0] if near else None


# ------------------------------------------------------------------------- words beside a number

RENDEZVOUS_PORT = re.compile(r"(?:MASTER|MAIN_PROCESS|MAIN|RDZV|RENDEZVOUS|HEAD|DIST)_?PORT\Z", re.IGNORECASE)
LAST_PORT = 65535
COUNT_OPTIONS = ("nproc_per_node", "num_processes", "num_gpus", "nnodes", "num_machines", "num_nodes")
COUNT = re.compile(r"\d+(?::\d+)?|gpu|cpu|auto|xpu|npu|mps|hpu|mlu|musa|-1")
NUMBER_WHY = "The program, or torch, cannot convert it to a number, and stops."
DOUBLE_WHY = "$(...) runs a command. Arithmetic needs two parentheses on each side."


def not_a_number(job: JobDescription) -> Iterator[Violation]:
    """Report ports and counts that contain something else than a number."""
    for item in job.assignments:
        if not item.removed and not item.items and RENDEZVOUS_PORT.match(item.name):
            yield from _port_hits(job, item)
    for launch in job.launches:
        for name in COUNT_OPTIONS:
            option = launch.option(name)
            value = (option.value or "") if option else ""
            literal = value and not re.search(r"[$`<>{}\[\]*+]", value)
            if option and literal and not COUNT.fullmatch(value.strip("\"'")):
                yield Violation(
                    option.arg.offset, f"--{name}={value!r} is not a number", why=NUMBER_WHY, cure=f"--{name}=<n>"
                )
    for call in job.calls:
        if call.in_substitution and re.fullmatch(r"\d+", call.written) and call.args:
            if call.args[0].text in ("+", "-", "*", "/", "%"):
                text = f"$({call.written} {call.args[0].text} ...) runs {call.written} as a command"
                yield Violation(call.offset, text, why=DOUBLE_WHY, cure="$((...))")


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
        if option and deepspeed and (option.value or "").strip("\"'") == "0":
            why = "DeepSpeed passes it on as the port of the rendezvous: there each rank gets another free port, and they wait for each other."
            name = option.arg.text.partition("=")[0]
            yield Violation(
                option.arg.offset,
                f"{name} 0 is no port for DeepSpeed",
                why=why,
                cure=f"{name} <port>",
                severity="error",
            )
