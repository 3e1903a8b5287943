"""Rules for the flow of variables: where a value is set, which shell expands it, and which program gets it."""

from __future__ import annotations

import re
from collections.abc import Iterator

import msgspec

from allranks.analysis.lint.command_options import REMOTE_SHELLS, SHELLS
from allranks.analysis.lint.job import JobDescription, LauncherCall
from allranks.analysis.lint.records import Argument, ProgramCall, VariableUse, Violation
from allranks.analysis.lint.rules.uses import is_only_shown, is_read, of_one_task
from allranks.analysis.lint.rules.variables import edits
from allranks.utils.text import nearest_name

EARLY_WHY = "The batch shell expands it before srun starts, where it is 0; every task on every node gets 0."
EARLY_CURE = "let the task's own shell expand it: srun bash -c '... $SLURM_NODEID ...' in single quotes, or \\$SLURM_NODEID in double quotes"
EMPTY_WHY = "The batch shell expands it before srun starts, where it is not set; every task gets an empty value."
EXPORT_WHY = (
    "A program, and a shell started by srun or bash -c, only has the exported variables; others are empty there."
)
UNSET_WHY = "An empty value is used: the option gets no value or takes the next word, or the program uses its default."
UNSET_CURE = "set the variable before, or give a default: ${NAME:-value}"
OPTION_WHY = "Slurm sets this variable only if the job requests the option; otherwise it is empty."
OCTAL_WHY = "Bash takes a number that begins with 0 as octal: for a job id that ends in 0089 the script stops with 'value too great for base'."

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
# https://slurm.schedmd.com/sbatch.html, output environment variables that are "only set if the option is specified"
NEEDED_OPTIONS = {
    "SLURM_CPUS_PER_TASK": ("cpus-per-task",),
    "SLURM_NTASKS": ("ntasks", "ntasks-per-node", "ntasks-per-gpu", "ntasks-per-core", "ntasks-per-socket"),
    "SLURM_NPROCS": ("ntasks", "ntasks-per-node", "ntasks-per-gpu", "ntasks-per-core", "ntasks-per-socket"),
    "SLURM_NTASKS_PER_NODE": ("ntasks-per-node",),
    "SLURM_GPUS_PER_NODE": ("gpus-per-node",),
    "SLURM_GPUS_PER_TASK": ("gpus-per-task",),
    "SLURM_CPUS_PER_GPU": ("cpus-per-gpu",),
    "SLURM_GPUS": ("gpus",),
    "SLURM_ARRAY_TASK_ID": ("array",),
    "SLURM_ARRAY_JOB_ID": ("array",),
    "SLURM_MEM_PER_CPU": ("mem-per-cpu",),
}
# Only programs read these, so a value that is not exported has no effect.
READ_BY_PROGRAMS = re.compile(
    r"(?:NCCL|GLOO|TORCH|TORCH_NCCL|FI|UCX|RCCL)_\w+\Z|(?:MASTER_ADDR|MASTER_PORT|WORLD_SIZE|OMP_NUM_THREADS|MKL_NUM_THREADS|"
    r"CUDA_VISIBLE_DEVICES|CUDA_LAUNCH_BLOCKING|HF_HOME|HF_HUB_OFFLINE|HF_DATASETS_CACHE|TRANSFORMERS_OFFLINE|WANDB_MODE|TOKENIZERS_PARALLELISM|"
    r"PYTHONUNBUFFERED|PYTHONFAULTHANDLER|CUDA_DEVICE_MAX_CONNECTIONS|PYTORCH_CUDA_ALLOC_CONF)\Z"
)
ONLY_MESSAGES = {
    "NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", "NCCL_DEBUG_FILE", "TORCH_DISTRIBUTED_DEBUG", "TORCH_CPP_LOG_LEVEL", "TORCH_SHOW_CPP_STACKTRACES",
    "PYTHONFAULTHANDLER", "PYTHONUNBUFFERED", "CUDA_LAUNCH_BLOCKING", "FI_LOG_LEVEL", "UCX_LOG_LEVEL",
}  # fmt: skip
EXPORTED_BEFORE = {"CUDA_VISIBLE_DEVICES"}  # by Slurm, PBS and LSF, in a job with GPUs
RENDEZVOUS_OPTIONS = (
    "master_addr", "master_port", "rdzv_endpoint", "rdzv_id", "nnodes", "nproc_per_node", "node_rank", "main_process_ip", "main_process_port",
    "num_machines", "machine_rank", "num_processes",
)  # fmt: skip
GUARDS = (":", "-", "+", "?", "=")


def under_srun(under: tuple[ProgramCall, ...]) -> bool:
    return any(c.program == "srun" for c in under)


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
        if any(c.program in REMOTE_SHELLS for c in use.under):
            continue  # `_over_ssh` reports these
        if _set_again(job, use):
            continue
        if use.name in TASK_NAMES and (use.program != "=" or _matters(job, use)) and not of_one_task(job, use):
            text = f"${use.name} is expanded by the batch shell, where it is 0"
            # The name of a log, or a job whose number of nodes is on the command line of sbatch, or is one.
            unsure = use.in_redirect or job.of_unknown_size
            yield Violation(use.offset, text, severity="note" if unsure else None)
        elif use.name in LAUNCHER_NAMES and use.program == "srun" and not _is_set(job, use.name):
            text = f"${use.name} is expanded by the batch shell, where it is not set"
            yield Violation(use.offset, text, why=EMPTY_WHY)


MPI_NAMES = {
    "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_SIZE", "PMI_RANK", "PMI_LOCAL_RANK", "PMI_SIZE", "PMIX_RANK",
    "MPI_LOCALRANKID", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_LOCAL_RANK", "PALS_RANKID", "PALS_LOCAL_RANKID",
}  # fmt: skip
MPI_STARTERS = {"mpirun", "mpiexec", "mpiexec.hydra", "orterun", "jsrun", "aprun"}
PBS_NAMES = {"PBS_NODENUM", "PBS_VNODENUM", "PBS_TASKNUM"}


def _early_mpi(job: JobDescription) -> Iterator[Violation]:
    """Report variables of the processes of mpirun, jsrun and pbsdsh in their own arguments."""
    for use in job.uses:
        if use.under or use.operator or use.in_function or _is_set(job, use.name):
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
    return any(
        u.name in names and u.program not in HARMLESS and u.offset > use.offset and not u.in_redirect for u in job.uses
    )


def _is_set(job: JobDescription, name: str) -> bool:
    return job.has(name) or name in job.reading.named or name in job.reading.exported


# ------------------------------------------------------------------------------------------ exports


def _exports_all(job: JobDescription) -> bool:
    return bool(re.search(r"\bset\s+-(?:\w*a\w*|o\s+allexport)\b", job.text))


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


def _read_by_programs(job: JobDescription, said: set[str]) -> Iterator[Violation]:
    used = {u.name for u in job.uses}
    env_init = any(la.kind == "python" for la in job.launches)
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


def _lost(job: JobDescription, use: VariableUse) -> bool:
    name = use.name
    own = job.by_name.get(name, [])
    outer = [a for a in own if not a.under and not a.in_substitution and a.offset < use.offset]
    if not outer or len(outer) < len(own) or name in INHERITED or name in job.reading.exported:
        return False
    given = any(f"{name}=" in a.text for call in use.under if call.program not in SHELLS for a in call.args)
    kept = any(a.exported or re.search(rf"\$\{{?{name}\b", a.value) for a in outer)
    return not (given or name in job.reading.named or kept)


# ------------------------------------------------------------------------------------- never set


def unset(job: JobDescription) -> Iterator[Violation]:
    """Report variables that are used and that nothing sets: before, in another shell, or at all."""
    if job.kind != "script":
        return
    said: set[str] = set()
    parts = (
        _slurm_options,
        _ranks,
        _other_shell,
        _set_later,
        _glued,
        _misspelled,
        _near_unused,
        _address,
        _rendezvous,
        _no_dollar,
    )
    for found in (part(job) for part in parts):
        for name, hit in found:
            if name not in said:
                said.add(name)
                yield msgspec.structs.replace(hit, severity="note") if is_only_shown(job, name) else hit


def _plain_uses(job: JobDescription) -> Iterator[VariableUse]:
    tested = {u.name for u in job.uses if u.program in ("[", "[[", "test") or u.operator.startswith(GUARDS)}
    return (u for u in job.uses if u.name not in tested and not u.operator.startswith(GUARDS))


def _slurm_options(job: JobDescription) -> Iterator[tuple[str, Violation]]:
    if not job.requests_all or any(c.program == "sbatch" for c in job.calls):
        return
    guarded = {u.name for u in job.uses if u.operator.startswith(GUARDS) and not _ends_job(job, u)}
    guarded |= {u.name for u in job.uses if u.program in ("[", "[[", "test") and not _ends_job(job, u)}
    for use in job.uses:
        options = NEEDED_OPTIONS.get(use.name)
        if not options or use.program in ("echo", "printf") or use.name in guarded or use.operator.startswith(GUARDS):
            continue
        if job.has(use.name) or job.heading.keys() & set(options) or ("gpu" in options[0] and not job.requests_gpus):
            continue
        if use.under and use.name in ("SLURM_NTASKS", "SLURM_NPROCS"):
            continue  # srun sets them for its tasks
        given = any(f"--{o}" in a.text for c in use.under for a in c.args for o in options)
        if not given:
            text = f"${use.name} is empty: the job does not request --{options[0]}"
            cure = f"#SBATCH --{options[0]}=<n>, or ${{{use.name}:-<n>}}"
            # The tasks of an array are often named on the command line of sbatch.
            disabled = any(re.match(rf"#+\s*SBATCH\b.*--{o}\b", c.text) for c in job.reading.comments for o in options)
            severity = "note" if options[0] == "array" or disabled else None
            yield use.name, Violation(use.offset, text, why=OPTION_WHY, cure=cure, severity=severity)


def _ends_job(job: JobDescription, use: VariableUse) -> bool:
    """Return whether the test for an empty variable ends the job, which then happens always."""
    block = re.match(r"[^\n]*\n(?:(?!\s*(?:fi|else|elif)\b)[^\n]*\n){0,6}", job.text[use.offset :])
    line = job.line_of(use.offset)
    return bool(re.search(rf"-z\s+\"?\$\{{?{use.name}\b", line) and block and re.search(r"\bexit\b", block[0]))


def _ranks(job: JobDescription) -> Iterator[tuple[str, Violation]]:
    """Report ranks that the batch shell itself uses: only mpirun, srun or a launcher sets them, for their processes."""
    if not job.is_batch or any(c.program in ("mpirun", "mpiexec", "sbatch") for c in job.calls):
        return
    for use in job.uses:
        if (
            use.name in LAUNCHER_NAMES
            and not use.under
            and not use.in_function
            and not use.operator
            and not _is_set(job, use.name)
        ):
            if use.program in ("[", "[["):
                yield (
                    use.name,
                    Violation(
                        use.offset,
                        f"${use.name} is not set in the batch shell",
                        why="Only the processes that mpirun, srun or a launcher starts have a rank.",
                    ),
                )


def _other_shell(job: JobDescription) -> Iterator[tuple[str, Violation]]:
    """Report values that are set in an inner shell only, and used outside of it."""
    for use in _plain_uses(job):
        own = job.by_name.get(use.name, [])
        if (
            not own
            or use.under
            or use.in_function
            or use.name in INHERITED | job.reading.named
            or use.program in ("echo", "printf")
        ):
            continue
        if any(re.search(rf"\$\{{?{use.name}\b", a.value) for a in own):
            continue  # NAME=$NAME passes a value on that the script has from outside
        if all(a.under and any(c.program in SHELLS for c in a.under) for a in own) and not job.unknown_settings:
            text = f"${use.name} is expanded by the batch shell, and set only in the inner shell"
            yield (
                use.name,
                Violation(
                    use.offset, text, cure=f"\\${use.name} in double quotes, or single quotes around the inner script"
                ),
            )


def _set_later(job: JobDescription) -> Iterator[tuple[str, Violation]]:
    for use in _plain_uses(job):
        own = job.by_name.get(use.name, [])
        if not own or use.under or use.in_function or use.in_loop or use.name in INHERITED | job.reading.named:
            continue
        first = own[0]
        if (
            use.offset < first.offset
            and not any(a.under or a.in_function or a.in_substitution for a in own)
            and not job.unknown_settings
        ):
            same_line = job.lines.place(first.offset)[0] == job.lines.place(use.offset)[0]
            inherited = re.search(rf"\$\{{?{use.name}\b", first.value)
            if not same_line and not inherited and use.program not in HARMLESS and not use.name.startswith("SLURM_"):
                text = f"${use.name} is used before it is set, in line {job.lines.place(first.offset)[0]}"
                yield use.name, Violation(use.offset, text)


SHORTEST_NAME = 5
MAX_COMPARED = 50_000  # pairs of names, each costs some microseconds
LOWER_CASE = {"pwd", "home", "user", "hostname", "shell", "tmpdir"}


def _glued(job: JobDescription) -> Iterator[tuple[str, Violation]]:
    """Report names that take in the text after them, ``$SLURM_NODEID_x``, and names in the wrong case, ``${pwd}``."""
    for use in _plain_uses(job):
        if _is_set(job, use.name):
            continue
        shorter = use.name.rstrip("_")
        known = shorter.startswith("SLURM_") or _is_set(job, shorter) or shorter in INHERITED
        if shorter != use.name and known:
            text = f"${use.name} is never set; ${{{shorter}}} followed by _ was probably meant"
            yield use.name, Violation(use.offset, text, cure=f"${{{shorter}}}_")
        elif use.name in LOWER_CASE:
            text = f"${use.name} is never set; ${use.name.upper()} was probably meant"
            yield use.name, Violation(use.offset, text, cure=f"${use.name.upper()}")


def _no_dollar(job: JobDescription) -> Iterator[tuple[str, Violation]]:
    """Report the name of a variable where its value was meant: ``base=PWD``, ``for seed in seeds``."""
    for offset, name in job.reading.word_loops:
        text = f"the loop runs once, with the word {name}: the array's items were meant"
        yield name, Violation(offset, text, why="The shell expands only names with a $.", cure=f'"${{{name}[@]}}"')
    for item in job.set_values_at_top():
        if item.value not in {"PWD", "HOME", "HOSTNAME"} | SLURM_NAMES or item.items is not None:
            continue
        if item.name in job.used_names and f"${{!{item.name}" not in job.text:
            text = f"{item.name} is the text {item.value}: the $ is missing"
            yield (
                item.name,
                Violation(
                    item.offset, text, why="The shell expands only names with a $.", cure=f"{item.name}=${item.value}"
                ),
            )


def _misspelled(job: JobDescription) -> Iterator[tuple[str, Violation]]:
    known = sorted(name for name in job.by_name if len(name) >= SHORTEST_NAME)
    first = {use.name: use for use in reversed(list(_plain_uses(job)))}
    for use in first.values():
        near = _slurm_name(use.name) if not _is_set(job, use.name) else None
        if near:
            text = f"${use.name} is never set: Slurm has no such variable; {near} was probably meant"
            yield use.name, Violation(use.offset, text, cure=f"${near}")
    for use in first.values() if len(known) * len(first) < MAX_COMPARED else ():
        if (
            len(use.name) < SHORTEST_NAME
            or _is_set(job, use.name)
            or use.name in INHERITED
            or use.name.startswith(("SLURM_", "SBATCH_"))
        ):
            continue
        near = nearest_name(use.name, known, 0.9)
        if near and re.sub(r"\d", "", near) != re.sub(r"\d", "", use.name) and not _similar_by_design(near, use.name):
            text = f"${use.name} is never set; {near} was probably meant"
            yield use.name, Violation(use.offset, text, cure=f"${near}")


# https://slurm.schedmd.com/sbatch.html and srun.html, output environment variables
_OUTPUT_NAMES = (
    "ACCOUNT ARRAY_JOB_ID ARRAY_TASK_COUNT ARRAY_TASK_ID ARRAY_TASK_MAX ARRAY_TASK_MIN ARRAY_TASK_STEP CLUSTER_NAME CPUS_ON_NODE CPUS_PER_GPU "
    "CPUS_PER_TASK CPU_BIND DISTRIBUTION EXPORT_ENV GPUS GPUS_ON_NODE GPUS_PER_NODE GPUS_PER_TASK GPU_BIND GTIDS HINT JOBID JOB_ACCOUNT "
    "JOB_CONSTRAINTS JOB_CPUS_PER_NODE JOB_DEPENDENCY JOB_END_TIME JOB_GID JOB_GPUS JOB_ID JOB_NAME JOB_NODELIST JOB_NUM_NODES JOB_PARTITION "
    "JOB_QOS JOB_RESERVATION JOB_START_TIME JOB_UID JOB_USER LAUNCH_NODE_IPADDR LOCALID MEM_PER_CPU MEM_PER_GPU MEM_PER_NODE MPI_TYPE NETWORK "
    "NNODES NODEID NODELIST NPROCS NTASKS NTASKS_PER_CORE NTASKS_PER_GPU NTASKS_PER_NODE NTASKS_PER_SOCKET OVERCOMMIT PARTITION PRIO_PROCESS "
    "PROCID QOS RESTART_COUNT SCRATCH STEPID STEP_GPUS STEP_ID STEP_NODELIST STEP_NUM_NODES STEP_NUM_TASKS STEP_TASKS_PER_NODE SUBMIT_DIR "
    "SUBMIT_HOST TASKS_PER_NODE TASK_PID THREADS_PER_CORE TIMELIMIT TMPDIR TOPOLOGY_ADDR TOPOLOGY_ADDR_PATTERN "
)
SLURM_NAMES = {f"SLURM_{name}" for name in _OUTPUT_NAMES.split()}
MAX_EDITS = 2


def _slurm_name(name: str) -> str | None:
    """Return the variable of Slurm of which this is a misspelling."""
    if not name.startswith(("SLURM_", "SLUM_", "SLRUM_", "SLRM_")) or name in SLURM_NAMES:
        return None
    moved = next((known for known in sorted(SLURM_NAMES) if sorted(known.split("_")) == sorted(name.split("_"))), None)
    if moved:
        return moved  # SLURM_TASK_ARRAY_ID
    near = nearest_name(name, sorted(SLURM_NAMES), 0.9)
    return near if near and edits(name, near, MAX_EDITS) <= MAX_EDITS else None


def _similar_by_design(a: str, b: str) -> bool:
    """Return whether the names differ by a word, such as TRAIN_DIR and TRAINS_DIR do not."""
    return sorted(a.split("_")) == sorted(b.split("_")) or abs(a.count("_") - b.count("_")) > 1


SHORTEST_NEAR = 4
COUNTING = re.compile(r"(?:num|n|nr|max|min|total|first|last|next|old|new|start|end)", re.IGNORECASE)
OUTSIDE_NAMES = re.compile(r"(?:SLURMD?|SBATCH|PBS|LSB|COBALT|PALS|OMPI|PMIX?|CUDA|HF|SCRATCH|WORK|EBROOT\w*)_")


def _near_unused(job: JobDescription) -> Iterator[tuple[str, Violation]]:
    """Report a name that nothing sets beside one that is set and never used, whatever a sourced file may set."""
    unused = {
        a.name: a
        for a in job.set_values_at_top()
        if a.name not in job.used_names and a.name not in INHERITED and not a.name.startswith("_") and a.value
    }
    missing = {u.name: u for u in reversed(list(_plain_uses(job))) if u.program not in ("echo", "printf")}
    missing = {
        name: use
        for name, use in missing.items()
        if not (
            _is_set(job, name) or name in INHERITED | LAUNCHER_NAMES or OUTSIDE_NAMES.match(name) or use.in_function
        )
    }
    if not unused or len(unused) * len(missing) > MAX_COMPARED:
        return
    for name, use in missing.items():
        near = [
            o for o, item in unused.items() if _is_near(name, o) and item.offset < use.offset and name not in item.value
        ]
        if not near and _is_missing_program(job, name):
            near = [other for other in unused if re.fullmatch(r"\S+\.py", unused[other].value)]
        elsewhere = rf"(?<![\w$-]){name}\s*(?:[-+*/%]?=(?!=)|\+\+|--)"  # set in a way that the reader does not know
        if len(near) == 1 and not re.search(elsewhere, job.text):
            line = job.lines.place(unused[near[0]].offset)[0]
            text = f"${name} is never set; {near[0]}, which line {line} sets and nothing uses, was probably meant"
            yield name, Violation(use.offset, text, cure=f"${near[0]}")


def _is_near(name: str, other: str) -> bool:
    """Return whether the names differ by one letter, or one is the end of the other: ARGS and SCRIPT_ARGS."""
    shorter, longer = sorted((name, other), key=len)
    if len(shorter) < SHORTEST_NEAR or re.sub(r"\d", "", name) == re.sub(r"\d", "", other):
        return False
    prefix = longer.removesuffix(f"_{shorter}")
    other_meaning = COUNTING.fullmatch(prefix) and not shorter.lower().endswith("s")  # NUM_NODE is no name of a NODE
    return (prefix != longer and not other_meaning and not prefix.endswith("ENV")) or edits(name, other, 1) == 1


def _is_missing_program(job: JobDescription, name: str) -> bool:
    """Return whether a launcher's program is this variable, and no word of the command is a program."""
    for launch in job.launches:
        rest = [a.text for a in launch.call.args]
        own = f"${name}" in rest or f"${{{name}}}" in rest
        if own and launch.kind != "python" and not any(re.search(r"\.py\Z|\A-m\Z|\A--module\Z", word) for word in rest):
            return True
    return False


ADDRESS_NAMES = {"MASTER_ADDR", "MASTER_IP", "MASTER_NODE", "HEAD_NODE", "HEAD_NODE_IP", "MASTER_ADDRESS"}
NO_ADDRESS_WHY = "The address is that of a node of this job, so the environment of sbatch cannot contain it: the program gets an empty one."
RANK_NAMES = {"RANK", "NODE_RANK", "MACHINE_RANK", "WORLD_SIZE"}


def _address(job: JobDescription) -> Iterator[tuple[str, Violation]]:
    """Report the address of the first node where nothing sets it."""
    if not job.is_batch or job.sources_files or job.submits or not job.work or job.heading.get("export-file"):
        return
    for use in _plain_uses(job):
        known = _is_set(job, use.name) or use.name in (job.heads("export") or "") or use.program in HARMLESS
        if use.name.upper() in ADDRESS_NAMES and not known and is_read(job, use, READ_BY_PROGRAMS):
            cure = 'MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)'
            text, severity = f"${use.name} is never set in this script", "note" if job.unknown_settings else None
            yield use.name, Violation(use.offset, text, why=NO_ADDRESS_WHY, cure=cure, severity=severity)


def _rendezvous(job: JobDescription) -> Iterator[tuple[str, Violation]]:
    """Report a launcher's option whose variable nothing sets."""
    if not job.is_batch or job.sources_files or job.heading.get("export"):
        return
    for launch in job.launches:
        for option_name in RENDEZVOUS_OPTIONS:
            option = launch.option(option_name)
            for name in re.findall(r"\$\{?([A-Za-z_]\w*)\}?(?![\w:])", option.value or "") if option else []:
                own = name in RANK_NAMES and not any(c.program in ("mpirun", "mpiexec") for c in launch.call.under)
                known = name.startswith(("SLURM_", "SBATCH_", "PALS_", "PBS_")) or name in INHERITED | LAUNCHER_NAMES
                if (job.unknown_settings and not own) or (known and not own):
                    continue
                if option and not _is_set(job, name) and not launch.call.in_function and not _tested(job, name):
                    text = f"${name} of --{option_name} is never set in this script"
                    place = _place(option.arg, launch, name)
                    why = (
                        "Slurm sets no variable of this name, and a launcher only those of the ranks that it starts."
                        if own
                        else None
                    )
                    yield name, Violation(place, text, why=why, severity="warning" if own else "note")


def _tested(job: JobDescription, name: str) -> bool:
    return any(u.name == name and (u.operator or u.program in ("[", "[[", "test")) for u in job.uses)


def _place(arg: Argument, launch: LauncherCall, name: str) -> int:
    args = launch.call.args
    start = args.index(arg)
    for candidate in args[start : start + 2]:
        index = candidate.source.text.find(name)
        if index >= 0:
            return candidate.source.where(index)
    return arg.offset


def octal(job: JobDescription) -> Iterator[Violation]:
    """Report the last digits of a job id in arithmetic, which may begin with 0."""
    for found in re.finditer(r"\$\(\(([^\n]*)", job.text):
        inside = found[1]
        cut = re.search(
            r"\$\{SLURM_(?:ARRAY_)?JOB_?ID:\s*-\d+\}|\$\([^)]*SLURM_JOB_?ID[^)]*\|\s*(?:tail\s+-c|cut\s+-c)[^)]*\)",
            inside,
        )
        if cut and "10#" not in inside[: cut.start()] and not job.in_comment(found.start()):
            yield Violation(
                found.start(),
                "the last digits of the job id may begin with 0, and are then read as octal",
                cure="$((10000 + 10#${SLURM_JOB_ID: -4}))",
            )
