"""Rules for the flow of variables: which shell expands them, and which program gets their values."""

from __future__ import annotations

import re
from collections.abc import Iterator

from allranks.analysis.lint.command_options import REMOTE_SHELLS, SHELLS
from allranks.analysis.lint.job import JobDescription
from allranks.analysis.lint.placement import MPI
from allranks.analysis.lint.records import Assignment, ProgramCall, VariableUse, Violation
from allranks.analysis.lint.shell_tokens import UNRESOLVED_OPEN
from allranks.utils.text import lazy_regex

# What only a task, or only a launcher, sets.
TASK_NAMES = {"SLURM_NODEID", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_GTIDS"}
LAUNCHER_NAMES = {
    "LOCAL_RANK", "RANK", "GROUP_RANK", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "PMI_RANK", "PMI_LOCAL_RANK", "PMIX_RANK",
    "MPI_LOCALRANKID",
}  # fmt: skip
SET_BY_LAUNCHERS = {
    "RANK",
    "LOCAL_RANK",
    "GROUP_RANK",
    "WORLD_SIZE",
    "NODE_RANK",
}  # for their ranks, or not read by them
HARMLESS = {"echo", "printf", "[", "[[", "test", "for", "date", "mkdir", "logger", "?", "cd", "touch", "tee", ":"}
INHERITED = {
    "PATH", "HOME", "USER", "SHELL", "PWD", "LANG", "TERM", "TMPDIR", "LD_LIBRARY_PATH", "PYTHONPATH", "HOSTNAME", "LOGNAME", "OLDPWD",
    "RANDOM", "SECONDS", "LINENO", "BASH_SOURCE", "FUNCNAME", "IFS", "PPID", "UID", "EUID", "HOSTTYPE", "SCRATCH", "WORK", "PROJECT",
    "CONDA_PREFIX", "VIRTUAL_ENV", "OPTARG", "OPTIND", "REPLY", "PIPESTATUS", "BASHPID", "BASH_VERSION", "OSTYPE", "EPOCHSECONDS", "CPATH",
    "LIBRARY_PATH", "NCPUS", "MANPATH", "CUDA_HOME", "HF_HOME", "HF_TOKEN", "WANDB_API_KEY", "GROUP", "SHLVL", "MODULEPATH", "XDG_RUNTIME_DIR",
}  # fmt: skip
GUARDS = (":", "-", "+", "?", "=")

# ------------------------------------------------------------------------------- expanded too early


def under_srun(under: tuple[ProgramCall, ...]) -> bool:
    return any(c.program == "srun" for c in under)


EARLY_WHY = "The batch shell expands it before srun starts, where it is 0; every task on every node gets 0."
EARLY_CURE = "let the task's own shell expand it: srun bash -c '... $SLURM_NODEID ...' in single quotes, or \\$SLURM_NODEID in double quotes"
EMPTY_WHY = "The batch shell expands it before srun starts, where it is not set; every task gets an empty value."


def early(job: JobDescription) -> Iterator[Violation]:
    """Report variables of a task that the batch shell expands."""
    yield from _early_mpi(job)
    starts = any(c.program == "srun" and not c.in_substitution for c in job.calls)
    if not (starts or (job.is_batch and job.multi_node and job.launches)):
        return
    if not (job.multi_node or any(la.kind == "python" for la in job.launches)):
        return
    ignored = _ignored_ranks(job)
    for use in job.uses:
        if under_srun(use.under) or use.in_function or use.program in HARMLESS or use.offset in ignored:
            continue
        if _is_rank_for_c10d(job, use):
            continue
        if any(c.program in REMOTE_SHELLS for c in use.under):
            continue  # `_over_ssh` reports these
        if _set_again(job, use) or _written_before(job, use):
            continue
        if use.name in TASK_NAMES and (use.program != "=" or _matters(job, use)) and not of_one_task(job, use):
            text = f"${use.name} is expanded by the batch shell, where it is 0"
            # The name of a log, or a job whose number of nodes is on the command line of sbatch, or is one.
            several = any((job.tasks_per_node(la.srun) or 1) > 1 for la in job.launches if la.srun)
            unsure = use.in_redirect or (job.of_unknown_size and not several) or _is_rank_of_lightning(job, use)
            yield Violation(use.offset, text, severity="note" if unsure else None)
        elif use.name in LAUNCHER_NAMES and use.program == "srun" and not is_set(job, use.name):
            text = f"${use.name} is expanded by the batch shell, where it is not set"
            yield Violation(use.offset, text, why=EMPTY_WHY)


OWN_RANK = lazy_regex(r"[ \t]*(?:export[ \t]+)?(?:LOCAL_|GLOBAL_)?RANK=")
LIGHTNING = lazy_regex(r"(?i)lightning|\bfit[ \t]+(?:--config|-c)\b")


def _is_rank_of_lightning(job: JobDescription, use: VariableUse) -> bool:
    """Return whether Lightning starts the ranks, which takes them from Slurm's variables and not from RANK."""
    return OWN_RANK.match(job.line_of(use.offset)) is not None and LIGHTNING.search(job.code) is not None


def _written_before(job: JobDescription, use: VariableUse) -> bool:
    """Return whether the word is the name of a file that the batch shell writes under the same name: ``> run_$SLURM_PROCID.sh``."""
    line, column = job.lines.place(use.offset)
    text = job.lines.line(line)
    word = text[: column - 1].rpartition(" ")[2] + text[column - 1 :].partition(" ")[0]
    return len(word) > len(use.name) + 3 and re.search(rf">[ \t]*{re.escape(word)}", job.text[: use.offset]) is not None


MPI_NAMES = {
    "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_SIZE", "PMI_RANK", "PMI_LOCAL_RANK", "PMI_SIZE", "PMIX_RANK",
    "MPI_LOCALRANKID", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_LOCAL_RANK", "PALS_RANKID", "PALS_LOCAL_RANKID",
}  # fmt: skip
MPI_STARTERS = MPI | {"jsrun", "aprun"}
PBS_NAMES = {"PBS_NODENUM", "PBS_VNODENUM", "PBS_TASKNUM"}


def _early_mpi(job: JobDescription) -> Iterator[Violation]:
    """Report variables of the processes of mpirun, jsrun and pbsdsh in their own arguments."""
    for use in job.uses:
        if use.under or use.operator or use.in_function or is_set(job, use.name):
            continue
        if use.name in MPI_NAMES and use.program in MPI_STARTERS:
            text = f"${use.name} is expanded before {use.program} starts, where it is not set"
            why = "Only the processes that it starts have this variable; all of them get an empty value."
            yield Violation(
                use.offset, text, why=why, cure=f"{use.program} ... bash -c '... ${use.name} ...' in single quotes"
            )
        elif use.name in PBS_NAMES and use.program == "pbsdsh":
            text = f"${use.name} is expanded before pbsdsh starts, where it is the one of the first node"
            cure = f"pbsdsh -- bash -c '... ${use.name} ...' in single quotes"
            yield Violation(use.offset, text, why="Every node gets the same value.", cure=cure)


def _ignored_ranks(job: JobDescription) -> set[int]:
    """Return where the node ranks stand that torchrun ignores, because c10d assigns them."""
    found: set[int] = set()
    for launch in job.launches:
        option = launch.option("node_rank", "machine_rank")
        dynamic = (launch.value("rdzv_backend") or "").lower() in ("c10d", "etcd", "etcd-v2")
        meant_static = launch.option("master_addr") and not launch.option("rdzv_endpoint")
        if option and dynamic and not meant_static:
            index = launch.call.args.index(option.arg)
            for arg in launch.call.args[index : index + 2]:
                found.update(arg.source.at)
    return found


RANK_BEFORE = lazy_regex(r"--(?:node|machine)[-_]rank(?:=|[ \t]+)[\"']?\$\{?\Z")
MEETS_BY_C10D = (lazy_regex(r"--rdzv[-_]backend[= \t]+[\"']?(?:c10d|etcd)\b"), lazy_regex(r"--rdzv[-_]endpoint\b"))


def _is_rank_for_c10d(job: JobDescription, use: VariableUse) -> bool:
    """Return whether it is the node rank in a text that has c10d too: a launcher in a variable, or in a template."""
    text = job.text
    if use.program != "=" or not RANK_BEFORE.search(text[max(0, use.offset - 40) : use.offset]):
        return False
    start, end = text.rfind("\n", 0, use.offset), text.find("\n", use.offset)
    while start > 0 and text[start - 1] == "\\":
        start = text.rfind("\n", 0, start)
    while end > 0 and text[end - 1] == "\\":
        end = text.find("\n", end + 1)
    line = text[start + 1 : end if end >= 0 else len(text)]
    return all(pattern.search(line) for pattern in MEETS_BY_C10D)


def _set_again(job: JobDescription, use: VariableUse) -> bool:
    """Return whether the value goes to a variable that the job's launchers set for their ranks, and nothing else uses."""
    if not job.launches or any(la.kind == "python" for la in job.launches):
        return False
    before = [a for a in job.assignments if a.offset < use.offset and a.offset + MOST_BETWEEN > use.offset]
    named = max(before, key=lambda a: a.offset, default=None)
    if named is None or named.name not in SET_BY_LAUNCHERS - job.used_names:
        return False
    between = job.text[named.offset + len(named.name) : use.offset]
    return re.fullmatch(r"=[\"'(]*\$?\{?[\"']*", between) is not None


MOST_BETWEEN = 40  # characters


def _matters(job: JobDescription, use: VariableUse) -> bool:
    """Return whether the variable that is assigned here reaches a program: exported, or used later by one."""
    line = job.lines.place(use.offset)[0]
    here = [
        a for a in job.assignments if not a.under and job.lines.place(a.offset)[0] == line and a.offset < use.offset
    ]
    if not here:
        return True
    names = {here[-1].name}
    if here[-1].exported or names & job.reading.exported:
        return not any(a.name in names and under_srun(a.under) for a in job.assignments)
    first = here[-1].items[0].text if here[-1].items else here[-1].value
    unread = HARMLESS - {"?"} if STARTS.match(first.strip("\"'")) else HARMLESS  # the command is the variable
    return any(
        u.name in names and u.program not in unread and u.offset > use.offset and not u.in_redirect for u in job.uses
    )


STARTS = lazy_regex(r"\s*(?:srun|torchrun|accelerate|deepspeed|python[\d.]*)\b")


def is_set(job: JobDescription, name: str) -> bool:
    return job.has(name) or name in job.reading.named or name in job.reading.exported


JOB_NAMES = lazy_regex(
    r"SLURM_(?:JOB_?ID|JOB_NAME|ARRAY_TASK_ID|ARRAY_JOB_ID|PROCID|NODEID|LOCALID|NTASKS|NNODES|JOB_NUM_NODES|JOB_NODELIST|NODELIST|"
    r"CPUS_PER_TASK|GPUS_ON_NODE|SUBMIT_DIR|TMPDIR)"
)
TOO_EARLY_WHY = "The end of the here-document is not quoted, so the shell that submits expands the variable, where it is not set: the job gets an empty value."


def submitted_too_early(job: JobDescription) -> Iterator[Violation]:
    """Report variables of the job that are expanded when its script is written, before it is submitted."""
    if job.kind != "script" or job.is_job:
        return
    bodies = [b for b in job.reading.submitted if len(b.at)]
    bodies += [b for b in job.reading.files.values() if len(b.at) and "#SBATCH" in b.text]
    said: set[str] = set()
    bodies += [
        a.source
        for c in job.calls
        for a in c.args
        if c.program == "echo" and c.redirects and len(a.source.at) and re.search(r"(?m)^#SBATCH\s", a.source.text)
    ]
    for body in bodies:
        spans = (body.where(0), body.where(len(body.text) - 1))
        for use in job.uses:
            if (
                not spans[0] <= use.offset <= spans[1]
                or use.under
                or use.name in said
                or use.program not in ("sbatch", "cat", "tee", "echo")
            ):
                continue
            if JOB_NAMES.fullmatch(use.name) and not job.has(use.name):
                said.add(use.name)
                text = f"${use.name} is expanded when the job is submitted, where it is not set"
                shown = re.match(r"[ \t]*(?:echo|printf)\b", job.line_of(use.offset))
                shown = shown and job.lines.start(job.lines.place(use.offset)[0]) > spans[0]
                cure = f"\\${use.name}, or <<'EOF' with quotes"
                yield Violation(use.offset, text, why=TOO_EARLY_WHY, cure=cure, severity="note" if shown else None)
            elif use.name not in job.by_name and _set_inside(job, use.name, body.text):
                said.add(use.name)
                text = f"${use.name} is expanded when the job is submitted, but set only in the job's script"
                yield Violation(use.offset, text, why=TOO_EARLY_WHY, cure=f"\\${use.name}, or <<'EOF' with quotes")


def _set_inside(job: JobDescription, name: str, text: str) -> bool:
    known = (
        name in job.reading.named
        or name in job.reading.exported
        or name in ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "HOME")
    )
    # `export A="$A"`, which the text has as the value that is unknown here, hands the value of the submitting shell on.
    assigned = rf"(?m)^[ \t]*(?:export[ \t]+)?{name}=(?!.*(?:\$\{{?|{UNRESOLVED_OPEN}){name}\b)"
    return not known and re.search(assigned, text) is not None


# ------------------------------------------------------------------------------------------ exports

# Only programs read these, so a value that is not exported has no effect.
READ_BY_PROGRAMS = lazy_regex(
    r"(?:NCCL|GLOO|TORCH|TORCH_NCCL|FI|UCX|RCCL)_\w+\Z|(?:MASTER_ADDR|MASTER_PORT|WORLD_SIZE|OMP_NUM_THREADS|MKL_NUM_THREADS|"
    r"CUDA_VISIBLE_DEVICES|CUDA_LAUNCH_BLOCKING|HF_HOME|HF_HUB_OFFLINE|HF_DATASETS_CACHE|TRANSFORMERS_OFFLINE|WANDB_MODE|TOKENIZERS_PARALLELISM|"
    r"PYTHONUNBUFFERED|PYTHONFAULTHANDLER|CUDA_DEVICE_MAX_CONNECTIONS|PYTORCH_CUDA_ALLOC_CONF)\Z"
)
MORE_READ = lazy_regex(
    r"(?:WANDB_(?:MODE|DISABLED|PROJECT|DIR|NAME|ENTITY|SILENT|CACHE_DIR|RUN_GROUP|API_KEY)|HF_(?:HOME|HUB_CACHE|HUB_OFFLINE|ENDPOINT|TOKEN|"
    r"DATASETS_OFFLINE|DATASETS_CACHE|EVALUATE_OFFLINE)|TRANSFORMERS_(?:CACHE|OFFLINE)|TORCH_(?:HOME|EXTENSIONS_DIR|CUDA_ARCH_LIST)|"
    r"CUDA_DEVICE_ORDER|TRITON_CACHE_DIR|CUBLAS_WORKSPACE_CONFIG|PYTHONHASHSEED|PYTHONUNBUFFERED|TF_CPP_MIN_LOG_LEVEL|XLA_FLAGS|MPLBACKEND|"
    r"XLA_PYTHON_CLIENT_\w+|TF_FORCE_GPU_ALLOW_GROWTH|TORCHELASTIC_ERROR_FILE|NUMEXPR_(?:NUM|MAX)_THREADS|OPENBLAS_NUM_THREADS|OMP_NUM_THREADS|"
    r"MKL_NUM_THREADS|TOKENIZERS_PARALLELISM|NCCL_\w+|GLOO_SOCKET_IFNAME|CUDA_LAUNCH_BLOCKING|PYTORCH_CUDA_ALLOC_CONF|HYDRA_FULL_ERROR|"
    r"MASTER_ADDR|MASTER_PORT|WORLD_SIZE|(?:SINGULARITY|APPTAINER)_(?:BIND|BINDPATH|NV|CACHEDIR|TMPDIR|LOCALCACHEDIR)|(?:SINGULARITY|APPTAINER)ENV_\w+|"
    r"WANDB_(?:TAGS|NOTES|RESUME|RUN_ID|JOB_TYPE|DATA_DIR|CONFIG_DIR|START_METHOD|WATCH|LOG_MODEL|_?SERVICE_WAIT|_[A-Z]\w+|BASE_URL|ARTIFACT_DIR|HTTP_TIMEOUT|"
    r"INIT_TIMEOUT|CONSOLE|IGNORE_GLOBS|SWEEP_ID|USERNAME|DISABLE_\w+)|HUGGING_FACE_HUB_TOKEN|TORCHDYNAMO_\w+|DIFFUSERS_(?:OFFLINE|CACHE)|"
    r"TRANSFORMERS_(?:VERBOSITY|NO_ADVISORY_WARNINGS)|ACCELERATE_(?:USE_\w+|MIXED_PRECISION|LOG_LEVEL)|CUDA_DEVICE_MAX_CONNECTIONS|PYTHON(?:NOUSERSITE|IOENCODING)|"
    r"MKL_(?:SERVICE_FORCE_INTEL|THREADING_LAYER|DYNAMIC)|BITSANDBYTES_NOWELCOME|ITEX_\w+|SRUN_CPUS_PER_TASK|"
    r"HF_(?:XET_CACHE|HUB_\w+|ASSETS_CACHE|DEBUG)|PYTORCH_ALLOC_CONF|PYTORCH_HIP_ALLOC_CONF|PYTORCH_KERNEL_CACHE_PATH|TORCH_(?:NCCL_\w+|DISTRIBUTED_\w+|LOGS|CPP_LOG_LEVEL|SHOW_CPP_STACKTRACES|USE_CUDA_DSA)|TORCHINDUCTOR_\w+|"
    r"VLLM_(?:USE_\w+|ATTENTION_BACKEND|WORKER_MULTIPROC_METHOD|LOGGING_LEVEL|SKIP_P2P_CHECK|ALLOW_LONG_MAX_MODEL_LEN|ENABLE_V1_MULTIPROCESSING|HOST_IP)|RAY_(?:ADDRESS|TMPDIR|DEDUP_LOGS)|DS_BUILD_\w+|NVTE_\w+|OMP_(?:PROC_BIND|PLACES|SCHEDULE)|KMP_\w+|MIOPEN_\w+|HSA_\w+|FI_[A-Z]\w+|"
    r"UCX_\w+|GLOO_\w+|RCCL_\w+|TF_(?:XLA_FLAGS|GPU_ALLOCATOR|ENABLE_ONEDNN_OPTS)|XLA_\w+|JAX_\w+|KERAS_BACKEND|PYTHON(?:WARNINGS|DONTWRITEBYTECODE|FAULTHANDLER)|"
    r"NUMBA_\w+|KERAS_HOME|NLTK_DATA|COMET_(?:API_KEY|PROJECT_NAME|WORKSPACE|MODE)|MLFLOW_(?:TRACKING_\w+|EXPERIMENT_NAME|RUN_ID)|NEPTUNE_(?:API_TOKEN|PROJECT|MODE)|ROCR_VISIBLE_DEVICES|HIP_VISIBLE_DEVICES)\Z"
)


def _exports_all(job: JobDescription) -> bool:
    return bool(re.search(r"\bset\s+-(?:\w*a\w*|o\s+allexport)\b", job.text))


EXPORT_WHY = (
    "A program, and a shell started by srun or bash -c, only has the exported variables; others are empty there."
)


def not_exported(job: JobDescription) -> Iterator[Violation]:
    """Report variables that a program or an inner shell needs, and that the script sets without exporting them."""
    if _exports_all(job):
        return
    said: set[str] = set()
    yield from _over_ssh(job, said)
    for use in [] if job.unknown_settings else job.uses:
        shells = [c for c in use.under if c.program in SHELLS]
        if not shells or use.name in said or use.operator or not _lost(job, use):
            continue
        said.add(use.name)
        yield Violation(
            use.offset,
            f"${use.name} is set in the script but not exported: it is empty in this shell",
            cure=f"export {use.name}",
        )
    if job.launches:
        yield from _read_by_programs(job, said)


def _over_ssh(job: JobDescription, said: set[str]) -> Iterator[Violation]:
    """Report variables of the script, and of Slurm, that the shell of another host expands."""
    for use in job.uses:
        if not any(c.program in REMOTE_SHELLS for c in use.under) or use.operator or use.name in said | INHERITED:
            continue
        own = job.by_name.get(use.name, [])
        if any(any(c.program in REMOTE_SHELLS for c in a.under) for a in own) or use.name in job.reading.named:
            continue
        if own or use.name.startswith("SLURM_"):
            said.add(use.name)
            text = f"${use.name} is expanded by the shell on the other host, where it is not set"
            why = "ssh passes no variables on, and its session is no task of Slurm."
            cure = f"double quotes around the command, so that the script expands ${use.name}; or srun instead of ssh"
            yield Violation(use.offset, text, why=why, cure=cure)


ONLY_MESSAGES = {
    "NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", "NCCL_DEBUG_FILE", "TORCH_DISTRIBUTED_DEBUG", "TORCH_CPP_LOG_LEVEL", "TORCH_SHOW_CPP_STACKTRACES",
    "PYTHONFAULTHANDLER", "PYTHONUNBUFFERED", "CUDA_LAUNCH_BLOCKING", "FI_LOG_LEVEL", "UCX_LOG_LEVEL",
}  # fmt: skip
EXPORTED_BEFORE = {"CUDA_VISIBLE_DEVICES"}  # by Slurm, PBS and LSF, in a job with GPUs


def _read_by_programs(job: JobDescription, said: set[str]) -> Iterator[Violation]:
    used = {u.name for u in job.uses}
    env_init = any(la.kind == "python" for la in job.launches) and not _is_one_task(job)
    for item in job.set_values_at_top():
        name = item.name
        if name in said or name in used or name in job.reading.exported or not READ_BY_PROGRAMS.match(name):
            continue
        if name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") and not env_init:
            continue  # other launchers set them for their ranks
        if name in EXPORTED_BEFORE and (job.is_batch or re.search(r"(?m)^#(?:PBS|BSUB)\b", job.text)):
            continue  # the shell keeps the export attribute of what it inherits
        if (
            any(a.exported or a.under for a in job.assignments if a.name == name)
            or item.offset > job.launches[-1].call.offset
        ):
            continue
        said.add(name)
        severity = "note" if name in ONLY_MESSAGES else None
        text = f"{name} is set but not exported: no program gets it"
        yield Violation(item.offset, text, cure=f"export {name}", severity=severity)


def _is_one_task(job: JobDescription) -> bool:
    return job.nodes == 1 and job.number(job.heads("ntasks-per-node") or job.heads("ntasks")) == 1


def _lost(job: JobDescription, use: VariableUse) -> bool:
    name = use.name
    own = job.by_name.get(name, [])
    outer = [a for a in own if not a.under and not a.in_substitution and a.offset < use.offset]
    if not outer or len(outer) < len(own) or name in INHERITED or name in job.reading.exported:
        return False
    given = any(f"{name}=" in a.text for call in use.under if call.program not in SHELLS for a in call.args)
    kept = any(a.exported or re.search(rf"\$\{{?{name}\b", a.value) for a in outer)
    return not (given or name in job.reading.named or kept)


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
    by_environment = bool(started) and not job.launches and several
    env_init = (any(la.kind == "python" for la in job.launches) or by_environment) and not _is_one_task(job)
    said: set[str] = set()
    for item in job.set_values_at_top():
        name = item.name
        if name in said or not MORE_READ.match(name) or item.offset > last or not item.value:
            continue
        if name.startswith("ACCELERATE_USE_") and item.value.lower() in ("0", "false"):
            continue  # accelerate launch exports it to the script
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


# ---------------------------------------------------- variables that other hosts and containers get


def exported_before(job: JobDescription, name: str, call: ProgramCall) -> list[Assignment]:
    """Return what the script exports above a command, without what stands in front of other commands."""
    fronts = {a.offset for c in job.calls for a in c.prefix}
    found = [a for a in job.set_values(name) if a.exported and a.offset < call.offset and a.offset not in fronts]
    return [a for a in found if not a.in_function and not a.in_substitution]


PASSED_WHY = "Open MPI passes only its own variables, and those named with -x, to processes that it starts by SSH: there the variable is empty."


def not_passed(job: JobDescription) -> Iterator[Violation]:
    """Report the address of a group that Open MPI does not pass to other hosts, though it passes other variables."""
    for launch in job.launches:
        starter = next((c for c in launch.call.under if c.program in MPI), None)
        if launch.kind != "python" or starter is None or launch.srun is not None or launch.call.in_function:
            continue
        passed = {
            following.text.partition("=")[0] for arg, following in starter.pairs() if arg.text == "-x" and following
        }
        if not passed or not _several_hosts(job, starter):
            continue
        for name in ("MASTER_ADDR", "MASTER_PORT"):
            exported = [
                a for a in job.set_values_at_top() if a.name == name and a.offset < starter.offset and a.exported
            ]
            if (
                exported
                and name not in passed
                and not any(name in a.text or ("$" in a.text and "@" in a.text) for a in starter.args)
            ):
                yield Violation(
                    exported[-1].offset,
                    f"{name} is exported, but mpirun passes only what -x names: {', '.join(sorted(passed))}",
                    why=PASSED_WHY,
                    cure=f"mpirun -x {name} ...",
                    severity="warning",
                )
                break


def _several_hosts(job: JobDescription, starter: ProgramCall) -> bool:
    for arg, following in starter.pairs():
        name, equals, value = arg.text.partition("=")
        listed = value if equals else following.text if following else ""
        if name in ("-H", "--host", "-host") and listed.count(",") > 0:
            return True
        if name in ("-hostfile", "--hostfile", "-machinefile", "--machinefile") and (
            not job.is_job or (job.nodes or 1) > 1
        ):
            return True
    return False


ENVIRONMENT_WHY = "The container starts with an environment of its own: the variable is not set there."
NEEDED = lazy_regex(
    r"MASTER_ADDR|MASTER_PORT|WORLD_SIZE|RANK|NODE_RANK|CUDA_VISIBLE_DEVICES|(?:NCCL|GLOO|UCX)_\w+|WANDB_API_KEY|HF_TOKEN"
)
ENGINES = {"docker", "podman", "nvidia-docker"}
IMAGES = {"singularity", "apptainer"}


def into_container(job: JobDescription) -> Iterator[Violation]:
    """Report variables that are exported for a program in a container, which does not get them."""
    for call in job.calls:
        words = [a.text for a in call.args]
        if call.in_substitution or call.in_function or not words or any("$" in w and "@" in w for w in words):
            continue
        engine = (
            call.program in ENGINES and "run" in words[:2] and words[0] != "compose"
        )  # whose file may set variables
        clean = call.program in IMAGES and words[0] in ("exec", "run") and _cleans(words[1:])
        if not (engine or clean) or any(w.startswith(("--env-file", "--env-host", "-E")) for w in words):
            continue
        fronts = {a.offset for c in job.calls for a in c.prefix}
        above = [a for a in job.set_values_at_top() if a.exported and a.offset < call.offset and a.offset not in fronts]
        own = [*call.prefix, *(a for a in above if not a.in_function)]
        for item in own:
            text = " ".join(words)
            if (
                not NEEDED.fullmatch(item.name)
                or re.search(rf"\b{item.name}\b", text)
                or item.removed
                or not item.value
            ):
                continue
            if item.name == "CUDA_VISIBLE_DEVICES" and re.search(r"device=|NVIDIA_VISIBLE", text):
                continue
            # It may be given to the program as an argument, or be passed on under another name.
            used = any(u.name == item.name and u.offset > item.offset for u in job.uses)
            inside = job.has(f"SINGULARITYENV_{item.name}", f"APPTAINERENV_{item.name}")
            if used or inside:
                continue
            how = (
                f"{call.program} run passes no variables"
                if engine
                else f"{call.program} with a clean environment passes none"
            )
            yield Violation(
                item.offset,
                f"{item.name} is set, but {how}",
                why=ENVIRONMENT_WHY,
                cure=f"{'-e' if engine else '--env'} {item.name}{'' if engine else '=$' + item.name}",
                severity="warning",
            )
            break


def _cleans(words: list[str]) -> bool:
    """Return whether an option in front of the image starts with a clean environment."""
    for word in words:
        if not word.startswith("-"):
            if word.endswith((".sif", ".simg", ".img", ".sqsh")):
                return False
            continue
        if word in ("--cleanenv", "--containall", "-e", "-C") or re.fullmatch(r"-[a-zA-Z]*[eC][a-zA-Z]*", word):
            return True
    return False


# ------------------------------------------------------------------------------ how a value is used

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


def of_one_task(job: JobDescription, use: VariableUse) -> bool:
    """Return whether the use is in the command of an srun of one task, whose number is 0."""
    steps = [c for c in job.calls if c.program == "srun" and c.offset <= use.offset and not c.in_substitution]
    if job.nodes != 1 or use.program != "srun" or not steps:
        return False
    return job.tasks_per_node(max(steps, key=lambda c: c.offset)) == 1


def is_only_shown(job: JobDescription, name: str) -> bool:
    """Return whether the variable is only printed, or passed to scontrol, which then takes the job's own list."""
    uses = [u for u in job.uses if u.name == name]
    for use in uses:
        before = [c for c in job.calls if c.offset <= use.offset and c.program == use.program.rpartition("/")[2]]
        call = max(before, key=lambda c: c.offset, default=None)
        if call is None or use.under or use.in_redirect:
            return False
        printed = call.program in ("echo", "printf") and not (
            call.in_substitution or call.is_piped or any(r.operator != ">&" for r in call.redirects)
        )
        lists = call.program == "scontrol" and "NODELIS" in name and any("hostname" in a.text for a in call.args)
        if not printed and not lists:
            return False
    return bool(uses)


def is_read(job: JobDescription, use: VariableUse, by_programs: re.Pattern[str]) -> bool:
    """Return whether the value goes to a command, or to a variable that something in the script uses."""
    if use.program not in ("=", "export", "declare"):
        return True
    before = [a for a in job.assignments if a.offset < use.offset and not a.under]
    target = max(before, key=lambda a: a.offset, default=None)
    return target is None or target.name in job.used_names or bool(by_programs.match(target.name))


# -------------------------------------------------------------------------- arguments of the script

DROPPED_WHY = "What the caller passes to the script is dropped without a message: the program runs with its defaults."
DROPPED_CURE = 'pass $NAME on at the end of the command, or "$@"'
ALL_ARGUMENTS = lazy_regex(
    r"=\(?[ \t]*(\"?)\$(?:[@*]|\{[@*](?::[ \t]*[1-9]\d?)?\})\1[ \t]*\)?[ \t]*(?:[;#].*)?$", re.MULTILINE
)


def arguments_dropped(job: JobDescription) -> Iterator[Violation]:
    """Report a variable with the arguments of the script that no command uses, in a script that starts ranks."""
    if job.kind != "script" or job.sources_files:
        return
    for item in job.set_values_at_top():
        if item.in_function or item.exported or item.name in job.used_names or len(job.by_name[item.name]) > 1:
            continue
        written = ALL_ARGUMENTS.match(job.text, item.offset + len(item.name))
        if written is None or not any(la.call.offset > item.offset for la in job.launches):
            continue
        if item.name not in job.reading.exported and not _used_in_text(job, item, written.end()):
            yield Violation(item.offset, f"{item.name} has the arguments of the script, and no command uses it")
            return


PASSES_ON = lazy_regex(r"\$[@*]|\$\{[@*]|\$\{!|\beval\b|\benvsubst\b")


def _used_in_text(job: JobDescription, item: Assignment, end: int) -> bool:
    """Return whether the text outside of comments has the name again, or passes the arguments on in another way."""
    rest = job.text[: item.offset] + job.text[end:]
    code = "\n".join(line for line in rest.split("\n") if not line.lstrip().startswith("#"))
    return PASSES_ON.search(code) is not None or re.search(rf"\b{item.name}\b", code) is not None
