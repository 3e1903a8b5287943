"""Rules for variables that have no value where they are used: never set, set too late, or set under another name."""

from __future__ import annotations

import re
from collections.abc import Iterator

import msgspec

from allranks.analysis.lint.command_options import SHELLS
from allranks.analysis.lint.job import JobDescription
from allranks.analysis.lint.records import VariableUse, Violation
from allranks.analysis.lint.rules.dataflow import (
    GUARDS,
    HARMLESS,
    INHERITED,
    LAUNCHER_NAMES,
    READ_BY_PROGRAMS,
    is_only_shown,
    is_read,
    is_set,
)
from allranks.analysis.lint.rules.variables import edits
from allranks.utils.text import lazy_regex, nearest_name

UNSET_WHY = "An empty value is used: the option gets no value or takes the next word, or the program uses its default."
UNSET_CURE = "set the variable before, or give a default: ${NAME:-value}"


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


def _plain_uses(job: JobDescription) -> Iterator[VariableUse]:
    tested = {u.name for u in job.uses if u.program in ("[", "[[", "test") or u.operator.startswith(GUARDS)}
    return (u for u in job.uses if u.name not in tested and not u.operator.startswith(GUARDS))


OPTION_WHY = "Slurm sets this variable only if the job requests the option; otherwise it is empty."


def _slurm_options(job: JobDescription) -> Iterator[tuple[str, Violation]]:
    if not job.requests_all or any(c.program == "sbatch" for c in job.calls):
        return
    guarded = {u.name for u in job.uses if u.operator.startswith(GUARDS) and not _ends_job(job, u)}
    guarded |= {u.name for u in job.uses if u.program in ("[", "[[", "test") and not _ends_job(job, u)}
    for use in job.uses:
        options = NEEDED_OPTIONS.get(use.name)
        if not options or use.program in ("echo", "printf") or use.name in guarded or use.operator.startswith(GUARDS):
            continue
        if use.in_loop and job.nodes == 1 and re.search(r"worker|SLURM_JOB_NUM_NODES|SLURM_NNODES", job.text):
            continue  # in a loop over the other nodes
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
            and not is_set(job, use.name)
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
        shorter = use.name.rstrip("_")
        if not shorter or is_set(job, use.name):
            continue  # $_ is the last word of the command before
        known = shorter.startswith("SLURM_") or is_set(job, shorter) or shorter in INHERITED
        if shorter != use.name and known:
            text = f"${use.name} is never set; ${{{shorter}}} followed by _ was probably meant"
            yield use.name, Violation(use.offset, text, cure=f"${{{shorter}}}_")
        elif (start := _start_of_name(job, use.name)) is not None:
            text = f"${use.name} is never set; ${{{start}}} followed by {use.name[len(start) :]} was probably meant"
            cure = f"${{{start}}}{use.name[len(start) :]}"
            yield use.name, Violation(use.offset, text, cure=cure, whatever_is_filled_in=True)
        elif (start := _taken_in(job, use)) is not None:
            rest = use.name[len(start) :]
            text = f"${use.name} is never set; ${{{start}}} followed by {rest} was probably meant"
            yield use.name, Violation(use.offset, text, cure=f"${{{start}}}{rest}")
        elif use.name in LOWER_CASE:
            text = f"${use.name} is never set; ${use.name.upper()} was probably meant"
            yield use.name, Violation(use.offset, text, cure=f"${use.name.upper()}")


def _taken_in(job: JobDescription, use: VariableUse) -> str | None:
    """Return the variable of the script that takes in the text behind it within a longer word: ``runs/$model_base``."""
    name, around = use.name, job.text[max(0, use.offset - 2) : use.offset + len(use.name) + 1]
    if use.under or not re.search(rf"[\w/.}}]\${name}(?!\w)|\${name}[$/._{{-]", around) or job.sources_files:
        return None
    starts = [name[: m.start()] for m in re.finditer(r"_(?=[a-z0-9])", name)] if name not in job.reading.named else []
    above = {a.name for a in job.assignments if a.offset < use.offset} | job.reading.named
    return next((s for s in reversed(starts) if s in above), None)


def _start_of_name(job: JobDescription, name: str) -> str | None:
    """Return the variable of Slurm that takes in a lower-case word behind it: ``$SLURM_JOB_ID_seed``."""
    found = re.fullmatch(r"(SLURM_[A-Z_]*[A-Z])_(?:[a-z]\w*|\d+)", name)
    return found[1] if found and found[1] in SLURM_NAMES and not job.has(name) else None


def _no_dollar(job: JobDescription) -> Iterator[tuple[str, Violation]]:
    """Report the name of a variable where its value was meant: ``base=PWD``, ``for seed in seeds``."""
    for offset, name in job.reading.word_loops:
        text = f"the loop runs once, with the word {name}: the array's items were meant"
        yield name, Violation(offset, text, why="The shell expands only names with a $.", cure=f'"${{{name}[@]}}"')
    for item in job.set_values_at_top():
        command = item.value in ("pwd", "whoami", "nproc") and job.text.startswith(
            f"{item.name}={item.value}", item.offset
        )
        if command and item.name in job.used_names and item.items is None:
            text = f"{item.name} is the text {item.value}, and not what the command prints"
            why = "The shell runs a command for its output only in $( ) or backticks."
            yield item.name, Violation(item.offset, text, why=why, cure=f"{item.name}=$({item.value})")
            continue
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
        near = _slurm_name(use.name) if not is_set(job, use.name) else None
        if near:
            text = f"${use.name} is never set: Slurm has no such variable; {near} was probably meant"
            yield use.name, Violation(use.offset, text, cure=f"${near}")
    for use in first.values() if len(known) * len(first) < MAX_COMPARED else ():
        if (
            len(use.name) < SHORTEST_NAME
            or is_set(job, use.name)
            or use.name in INHERITED
            or use.name.startswith(("SLURM_", "SBATCH_"))
        ):
            continue
        near = nearest_name(use.name, known, 0.9)
        if near and re.search(rf"(?<![\w$-]){use.name}=(?!=)", job.code):
            continue  # a text that a function evaluates sets it
        if near and job.unknown_settings and any(re.search(rf"\$\{{?{use.name}\b", a.value) for a in job.by_name[near]):
            continue  # near=$use takes over what a file that is sourced sets
        if near and re.search(r"_(?:ARGS|OPTS|FLAGS|OPTIONS)\Z", use.name) and f"${near}" in job.line_of(use.offset):
            continue  # both stand in one command: they are two groups of options
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
OWN_NAMES = {"SLURMTMPDIR", "SLURM_TMP_DIR", "SLURMD_NODENAME"}
"""Names that sites, or Slurm's daemon, set."""


def _slurm_name(name: str) -> str | None:
    """Return the variable of Slurm of which this is a misspelling."""
    if name in SLURM_NAMES or name in OWN_NAMES:
        return None
    if not name.startswith(("SLURM_", "SLUM_", "SLRUM_", "SLRM_")):  # LSLURM_JOB_ID, SLURMJOB_ID
        near = nearest_name(name, sorted(SLURM_NAMES), 0.9) if "LURM" in name else None
        return near if near and edits(name, near, 1) == 1 else None
    moved = next((known for known in sorted(SLURM_NAMES) if sorted(known.split("_")) == sorted(name.split("_"))), None)
    if moved:
        return moved  # SLURM_TASK_ARRAY_ID
    near = nearest_name(name, sorted(SLURM_NAMES), 0.9)
    return near if near and edits(name, near, MAX_EDITS) <= MAX_EDITS else None


def _similar_by_design(a: str, b: str) -> bool:
    """Return whether the names differ by a word, such as TRAIN_DIR and TRAINS_DIR do not."""
    return sorted(a.split("_")) == sorted(b.split("_")) or abs(a.count("_") - b.count("_")) > 1


SHORTEST_NEAR = 4
COUNTING = lazy_regex(r"(?:num|n|nr|max|min|total|first|last|next|old|new|start|end)", re.IGNORECASE)
OUTSIDE_NAMES = lazy_regex(r"(?:SLURMD?|SBATCH|PBS|LSB|COBALT|PALS|OMPI|PMIX?|CUDA|HF|SCRATCH|WORK|EBROOT\w*)_")


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
        if not (is_set(job, name) or name in INHERITED | LAUNCHER_NAMES or OUTSIDE_NAMES.match(name) or use.in_function)
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
    if _of_cloud(job):
        return
    for use in _plain_uses(job):
        known = is_set(job, use.name) or use.name in (job.heads("export") or "") or use.program in HARMLESS
        # enroot's hook for PyTorch sets them in the containers of srun
        known = known or any(
            a.text.startswith("--container-") for c in use.under if c.program == "srun" for a in c.args
        )
        if use.name.upper() in ADDRESS_NAMES and not known and is_read(job, use, READ_BY_PROGRAMS):
            cure = 'MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)'
            text, severity = f"${use.name} is never set in this script", "note" if job.unknown_settings else None
            yield use.name, Violation(use.offset, text, why=NO_ADDRESS_WHY, cure=cure, severity=severity)


RENDEZVOUS_OPTIONS = (
    "master_addr", "master_port", "rdzv_endpoint", "rdzv_id", "nnodes", "nproc_per_node", "node_rank", "main_process_ip", "main_process_port",
    "num_machines", "machine_rank", "num_processes",
)  # fmt: skip


def _rendezvous(job: JobDescription) -> Iterator[tuple[str, Violation]]:
    """Report a launcher's option whose variable nothing sets."""
    if not job.is_batch or job.sources_files or job.heading.get("export") or _of_cloud(job):
        return
    for launch in job.launches:
        for option_name in RENDEZVOUS_OPTIONS:
            option = launch.option(option_name)
            for name in re.findall(r"\$\{?([A-Za-z_]\w*)\}?(?![\w:])", option.value or "") if option else []:
                own = name in RANK_NAMES and not any(c.program in ("mpirun", "mpiexec") for c in launch.call.under)
                known = name.startswith(("SLURM_", "SBATCH_", "PALS_", "PBS_")) or name in INHERITED | LAUNCHER_NAMES
                # In a loop over the nodes an unset rank is the same one for all of them, whoever sets it.
                own = own or (not known and option_name.endswith("_rank") and launch.call.in_loop)
                if (job.unknown_settings and not own) or (known and not own):
                    continue
                if option and not is_set(job, name) and not launch.call.in_function and not _tested(job, name):
                    text = f"${name} of --{option_name} is never set in this script"
                    place = launch.place_of(option.arg, name)
                    why = (
                        "Slurm sets no variable of this name, and a launcher only those of the ranks that it starts."
                        if own
                        else None
                    )
                    yield name, Violation(place, text, why=why, severity="warning" if own else "note")


def _of_cloud(job: JobDescription) -> bool:
    """Return whether the script uses variables of a cloud's training service, which sets the ranks and the address, too."""
    return not job.is_batch and any(re.match(r"(?:KUBERNETES|ARNOLD|MLP|VC|DLC)_\w", name) for name in job.used_names)


def _tested(job: JobDescription, name: str) -> bool:
    return any(u.name == name and (u.operator or u.program in ("[", "[[", "test")) for u in job.uses)


# -------------------------------------------------------- names of other systems, and of other case

NO_SLURM_NAME = {
    "SLURM_NUM_GPUS": "SLURM_GPUS_ON_NODE", "SLURM_NGPUS": "SLURM_GPUS_ON_NODE", "SLURM_GPU_COUNT": "SLURM_GPUS_ON_NODE",
    "SLURM_ARRAYID": "SLURM_ARRAY_TASK_ID", "SLURM_ARRAY_TASK": "SLURM_ARRAY_TASK_ID", "SLURM_ARRAY_ID": "SLURM_ARRAY_TASK_ID",
    "SLURM_ARRAY_INDEX": "SLURM_ARRAY_TASK_ID", "SLURM_RANK": "SLURM_PROCID", "SLURM_GLOBAL_RANK": "SLURM_PROCID", "SLURM_RANK_ID": "SLURM_PROCID",
    "SLURM_WORLD_SIZE": "SLURM_NTASKS", "SLURM_NUM_NODES": "SLURM_JOB_NUM_NODES", "SLURM_NODES": "SLURM_JOB_NUM_NODES",
    "SLURM_NUM_TASKS": "SLURM_NTASKS", "SLURM_LOCAL_RANK": "SLURM_LOCALID", "SLURM_LOCAL_ID": "SLURM_LOCALID", "SLURM_NODE_RANK": "SLURM_NODEID",
    "SLURM_JOB_DIR": "SLURM_SUBMIT_DIR", "SLURM_WORKDIR": "SLURM_SUBMIT_DIR", "SLURM_HOSTNAME": "SLURMD_NODENAME", "SLURM_CPUS": "SLURM_CPUS_PER_TASK",
    "SLURM_NUM_CPUS": "SLURM_CPUS_ON_NODE", "SLURM_GPUS_PER_JOB": "SLURM_GPUS", "SLURM_ID": "SLURM_JOB_ID",
}  # fmt: skip


def no_slurm_name(job: JobDescription) -> Iterator[Violation]:
    """Report variables that look like those of Slurm, and that Slurm does not set."""
    tested = {u.name for u in job.uses if u.program in ("[", "[[", "test") or u.operator.startswith(GUARDS)}
    said: set[str] = set()
    for use in job.uses:
        meant = NO_SLURM_NAME.get(use.name)
        if (
            meant is None
            or use.name in said | tested | SLURM_NAMES
            or job.has(use.name)
            or use.name in job.reading.named
        ):
            continue
        if use.program in ("echo", "printf") or use.name in job.reading.exported:
            continue
        said.add(use.name)
        text = f"${use.name} is never set: Slurm has no such variable; {meant} was probably meant"
        yield Violation(use.offset, text, cure=f"${meant}")


OTHER_SYSTEM = lazy_regex(
    r"PBS_(?:NODEFILE|O_WORKDIR|JOBID|JOBNAME|ARRAY_INDEX|ARRAYID|NP)|LSB_(?:HOSTS|JOBID|DJOB_HOSTFILE|JOBINDEX)|COBALT_\w+|SGE_TASK_ID|"
    r"PE_HOSTFILE"
)
OF_SEVERAL_SYSTEMS = lazy_regex(
    r"(?m)^#(?:PBS|BSUB|COBALT)\s|^[^#\n]*(?:==?|[!=]~|\bin\b)[ \t]*[\"']?(?i:pbs|torque|lsf|slurm|sge|cobalt)\b"
    r"|^[ \t]*[\"']?(?i:pbs|torque|lsf|sge|cobalt)[\"']?\)"
)
"""Lines for another batch system, or a test of which one the script runs under."""
OTHER_CASE_WHY = "Names of variables are case-sensitive: the other one is empty."


def other_names(job: JobDescription) -> Iterator[Violation]:
    """Report variables of another batch system, and names that differ from the one that is set in their case only."""
    if job.kind != "script":
        return
    guarded = {
        u.name for u in job.uses if u.operator.startswith((":", "-", "+", "?", "=")) or u.program in ("[", "[[", "test")
    }
    said: set[str] = set()
    by_case = {
        a.name.lower(): a.name
        for a in job.set_values_at_top()
        if a.value and a.name not in job.used_names and not a.exported
    }
    for use in job.uses:
        name = use.name
        known = job.has(name) or name in job.reading.named | job.reading.exported | said
        foreign = not known and _is_foreign(job, name)
        known = known or (name in guarded and not (foreign and not _asks_whether_set(job, name)))
        if known or use.program in ("echo", "printf") or use.in_function:
            continue
        if job.is_batch and OTHER_SYSTEM.fullmatch(name) and not OF_SEVERAL_SYSTEMS.search(job.text):
            said.add(name)
            yield Violation(
                use.offset,
                f"${name} is never set: it is a variable of another batch system, and this is a job of Slurm",
            )
        elif foreign:
            said.add(name)
            yield Violation(
                use.offset,
                f"${name} is never set: it is a variable of Slurm, and this is a job of another batch system",
            )
        elif (
            not job.placeholders
            and (other := by_case.get(name.lower()))
            and other != name
            and not use.under
            and name not in INHERITED
        ):
            if any(a.name == other and a.offset < use.offset for a in job.assignments):
                said.add(name)
                text = f"${name} is never set; {other}, which nothing uses, was probably meant"
                yield Violation(use.offset, text, why=OTHER_CASE_WHY, cure=f"${other}")


def _is_foreign(job: JobDescription, name: str) -> bool:
    """Return whether a job of PBS or LSF that knows nothing of Slurm uses one of Slurm's variables."""
    other = job.pbs or job.hosts or re.search(r"(?m)^#\$ +-[a-zA-Z]", job.text)
    if name not in SLURM_NAMES or not other or job.is_batch or job.sources_files:
        return False
    return "#SBATCH" not in job.text and not re.search(r"\b(?:srun|sbatch|scontrol)\b", job.code)


def _asks_whether_set(job: JobDescription, name: str) -> bool:
    """Return whether the script has a default for the variable, or compares it or asks whether it is empty."""
    value = rf"\"?\$\{{?{name}\b"
    asked = rf"\$\{{{name}:?[-=+?]|-[nzv]\s+(?:{value}|{name}\b)|{value}\}}?\"?\s+(?:[!=<>]=?|-\w\w\b)|==?\s*{value}|\[\[?\s+{value}\}}?\"?\s+\]"
    return re.search(asked, job.code) is not None


OWN_VALUE = r"=(\"?)\$(?:{name}\b|\{{{name}\}})\1[ \t]*(?:[;#].*)?$"
CASE_WHY = (
    "Names of variables are case-sensitive: NAME=$NAME passes on what the environment has, which is nothing here."
)


def other_case(job: JobDescription) -> Iterator[Violation]:
    """Report ``export NAME=$NAME`` below ``name=...``, which nothing uses."""
    if job.kind != "script":
        return
    for item in job.set_values_at_top():
        name = item.name
        if item.in_function or len(job.by_name[name]) > 1 or name in job.reading.named:
            continue
        if not re.compile(OWN_VALUE.format(name=name), re.MULTILINE).match(job.text, item.offset + len(name)):
            continue
        others = [a for a in job.set_values_at_top() if a.name != name and a.name.lower() == name.lower()]
        if not others or any(a.offset > item.offset or not a.value for a in others):
            continue
        other = others[-1]
        if other.name not in job.used_names and not other.exported and other.name not in job.reading.exported:
            line = job.lines.place(other.offset)[0]
            text = f"{name}=${name} sets nothing; {other.name}, which line {line} sets and nothing uses, was probably meant"
            yield Violation(item.offset, text, why=CASE_WHY, cure=f"{name}=${other.name}")


# -------------------------------------------------------------------- set too late, or in a comment

SILENT = {"echo", "printf", "[", "[[", "test", ":", "logger", "date"}
USUAL_OUTSIDE = lazy_regex(
    r"(?:IFS\Z|SCRATCH|WORK|HOME|DATA|PROJECT|STORE|TMP|LOCAL|CONDA|CUDA|PYTHON|LD_|HF_|WANDB|SLURM|PBS|NCCL|MASTER|OMP|EBROOT|MODULE)\w*"
)


def set_too_late(job: JobDescription) -> Iterator[Violation]:
    """Report a value that a command or another value takes before the script sets it, even if a file is sourced before."""
    if job.kind != "script" or not job.is_job:
        return
    guarded, said = guarded_names(job), set[str]()
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


def guarded_names(job: JobDescription) -> set[str]:
    tested = {u.name for u in job.uses if u.program in ("[", "[[", "test", "case") or u.operator.startswith(GUARDS)}
    return tested | job.reading.named


def _sourced_name(job: JobDescription, name: str) -> bool:
    """Return whether the script exports it: then it may be that of the caller before, and another one after."""
    return any(a.exported for a in job.by_name.get(name, ())) and job.unknown_settings


def set_by_module(job: JobDescription, name: str) -> bool:
    """Return whether the script loads a module after which the variable is called: nvshmem for NVSHMEM_HOME."""
    modules = {a.text.partition("/")[0].lower() for c in job.calls if c.program in ("module", "ml") for a in c.args}
    return any(len(m) > 2 and name.lower().startswith(f"{m.replace('-', '_')}_") for m in modules)
