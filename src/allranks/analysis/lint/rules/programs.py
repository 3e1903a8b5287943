"""Rules for what programs are started with: builtins of the shell where a program is wanted, and options of container runtimes and mpirun."""

from __future__ import annotations

import re
from collections.abc import Iterator

from allranks.analysis.lint.command_options import CONTAINERS, IMAGE, PYTHON
from allranks.analysis.lint.job import JobDescription
from allranks.analysis.lint.placement import MPI
from allranks.analysis.lint.records import Argument, ProgramCall, Violation
from allranks.utils.text import lazy_regex

# ----------------------------------------------------------------------------- builtins of the shell

BUILTIN_WHY = (
    "It is a command of the shell, and no program is started for it: there is none of this name, or it changes nothing but a process "
    "that ends at once. What stands behind && or ; runs outside, in the batch script's shell."
)
BUILTIN_CURE = 'one shell for both: bash -c "cd /workspace && torchrun ..."'
BUILTINS = {"cd", "source", ".", "export", "alias", "ulimit", "umask", "module", "ml", "pushd", "shopt", "unset"}
STARTS_PROGRAM = {"srun", "timeout", "jsrun", "aprun", *MPI}
VALUED_WORD = lazy_regex(r"-[a-zA-Z]|--[\w-]+")


def builtins(job: JobDescription) -> Iterator[Violation]:
    """Report ``singularity exec image.sif cd /x && torchrun ...`` and ``srun module load cuda``."""
    for call in job.calls:
        if call.in_substitution:
            continue
        word: Argument | None = None
        starter = call.program
        if call.under and call.program in BUILTINS and call.under[-1].program in STARTS_PROGRAM:
            starter = call.under[-1].program
            yield Violation(call.offset, f"{starter} starts programs, and {call.program} is none")
            continue
        if call.program in CONTAINERS and not any(call in c.under for c in job.calls):
            word = _first_in_container(call)
        elif call.program in STARTS_PROGRAM - {"srun", "timeout"} and not any(call in c.under for c in job.calls):
            word = _bare_builtin(call)
        if word is not None:
            yield Violation(word.offset, f"{starter} starts programs, and {word.text} is none")


def _first_in_container(call: ProgramCall) -> Argument | None:
    """Return the builtin that is the first word behind the image."""
    index = next((i for i, a in enumerate(call.args) if IMAGE.search(a.text) and not a.text.startswith("-")), None)
    if index is not None and index + 1 < len(call.args):
        before = call.args[index - 1].text if index else ""
        if before in ("-B", "--bind", "--overlay", "-o"):
            return None
        following = call.args[index + 1]
        return following if following.text in BUILTINS and not following.quoted else None
    return _bare_builtin(call) if call.program in ("docker", "podman") else None


def _bare_builtin(call: ProgramCall) -> Argument | None:
    for before, arg in zip(call.args, call.args[1:], strict=False):
        if arg.text in ("cd", "source", "export") and not arg.quoted and not VALUED_WORD.match(before.text):
            return arg
    return None


# --------------------------------------------------------------------- options of container runtimes

DEVICES_WHY = (
    "docker splits the value at the commas: the second number becomes another setting, and docker stops with "
    "'cannot set both Count and DeviceIDs'."
)
BIND_WHY = "The option takes one word, with the folders separated by a comma: the second folder is taken for the image."
MEMORY_WHY = (
    "A number without a unit counts bytes: data loaders and NCCL have no shared memory, and stop with 'Bus error'."
)
FEW_BYTES = 1_000_000
EXEC_FLAGS = {"--nv", "--rocm", "-B", "--bind", "--cleanenv", "--containall", "--pwd", "--overlay"}
BEFORE_WHY = "It stops with 'unknown flag' and starts nothing."


def container_options(job: JobDescription) -> Iterator[Violation]:
    """Report values of docker and singularity that these take for something else."""
    for call in job.calls:
        if call.in_substitution or call.program not in CONTAINERS:
            continue
        first = call.args[0].text if call.args else ""
        if call.program in ("singularity", "apptainer") and first in EXEC_FLAGS:
            text = f"{call.program} {first}: an option of exec, run and shell, behind which it has to stand"
            yield Violation(call.args[0].offset, text, why=BEFORE_WHY, cure=f"{call.program} exec {first} ...")
            continue
        for index, (arg, following) in enumerate(call.pairs()):
            name, equals, value = arg.text.partition("=")
            value = value if equals else following.text if following else ""
            if call.program == "docker" and name == "--gpus" and re.fullmatch(r"device=\w+(?:,\w+)+", value):
                cure = f"--gpus '\"{value}\"'"
                yield Violation(arg.offset, f"--gpus {value}: docker wants quotes in the value", why=DEVICES_WHY, cure=cure)  # fmt: skip
            elif name == "--shm-size" and value.isdecimal() and int(value[:9]) < FEW_BYTES:
                text = f"--shm-size {value} is {value} byte{'s' * (value != '1')} of shared memory"
                yield Violation(arg.offset, text, why=MEMORY_WHY, cure=f"--shm-size={value}g")
            elif name in ("--bind", "-B") and not equals and call.program in ("singularity", "apptainer"):
                rest = [a.text for a in call.args[index + 2 : index + 4]]
                if len(rest) == 2 and re.fullmatch(r"/[\w./-]*[\w/]", rest[0]) and IMAGE.search(rest[1]):
                    if not IMAGE.search(rest[0]):
                        text = f"{name} takes one word: {rest[0]} is taken for the image"
                        yield Violation(arg.offset, text, why=BIND_WHY, cure=f"{name} {value},{rest[0]}")


# ---------------------------------------------------------------------------------- options of mpirun

DIALECT_WHY = "Open MPI's mpirun knows the one, that of MPICH and Intel MPI the other: whichever it is, it refuses an option and starts nothing."
DIALECT_CURE = "-x NAME=VALUE (Open MPI), or -genv NAME VALUE (MPICH, Intel MPI)"
OPEN_MPI = {"-x", "--mca", "-mca", "--oversubscribe", "-npernode", "--npernode", "--allow-run-as-root", "--report-bindings", "-report-bindings"}  # fmt: skip
HYDRA = {"-genv", "-genvall", "-genvlist", "-genvnone", "-envall", "-envlist", "-envnone", "-perhost", "-iface", "-bootstrap", "-prepend-rank"}  # fmt: skip
VALUE_WHY = "-x takes NAME or NAME=VALUE: the value becomes the program that mpirun starts."
PASSED_VALUE = lazy_regex(
    r"\d+|[A-Z]{2,}|[\^=]?(?:eth|ib|en|lo|mlx|hsn|bond|docker)\w*(?:[:,][\w:]+)*|true|false", re.ASCII
)


def mpi_options(job: JobDescription) -> Iterator[Violation]:
    """Report mpirun with options of two MPIs, and the value of -x in a word of its own."""
    for call in job.calls:
        if call.program not in MPI or call.in_substitution:
            continue
        options = {a.text: a for a in call.args if a.text.startswith("-")}
        ours = next((n for n in options if n in OPEN_MPI), None)
        theirs = next((n for n in options if n in HYDRA), None)
        if ours and theirs and not _has_program_before(call, options[ours], options[theirs]):
            text = f"{ours} is an option of Open MPI, and {theirs} one of MPICH"
            yield Violation(options[theirs].offset, text, why=DIALECT_WHY, cure=DIALECT_CURE)
            continue
        args = call.args
        for flag, name, value in zip(args, args[1:], args[2:], strict=False):
            if flag.text == "-x" and re.fullmatch(r"[A-Z][A-Z0-9_]+", name.text) and PASSED_VALUE.fullmatch(value.text):
                index = args.index(value)
                starts = index + 1 < len(args) or any(call in c.under for c in job.calls)
                if starts:
                    text = f"-x {name.text} {value.text}: mpirun starts {value.text} as the program"
                    yield Violation(flag.offset, text, why=VALUE_WHY, cure=f"-x {name.text}={value.text}")
                    break
        yield from _parameter_as_variable(call)


PARAMETER = lazy_regex(
    r"((?:coll|btl|pml|mtl|osc|oob|plm|rmaps|orte|opal|ompi|prte|hwloc|routed|topo)_[a-z0-9_]+)=(\S+)"
)
PARAMETER_WHY = "-x passes on variables of the environment. Open MPI reads its parameters from --mca and from OMPI_MCA_<name>: this one keeps its default."


def _parameter_as_variable(call: ProgramCall) -> Iterator[Violation]:
    """Report ``-x coll_hcoll_enable=0``."""
    for flag, following in call.pairs():
        found = PARAMETER.fullmatch(following.text) if flag.text == "-x" and following else None
        if found:
            text = f"-x {found[0]}: this is a parameter of Open MPI, and no variable of the environment"
            cure = f"--mca {found[1]} {found[2]}"
            yield Violation(flag.offset, text, why=PARAMETER_WHY, cure=cure, severity="note")
            return


def _has_program_before(call: ProgramCall, first: Argument, second: Argument) -> bool:
    """Return whether a program may stand in front of one of the options, to which it would belong."""
    last = max(call.args.index(first), call.args.index(second))
    words = [a.text for a in call.args[:last]]
    return any(PYTHON.match(w) or w.startswith(("./", "$")) or "/bin/" in w or w.endswith(".exe") for w in words)


# ------------------------------------------------------------------- GPUs that other launchers are told

OTHER_LAUNCHERS: tuple[tuple[re.Pattern[str], re.Pattern[str]], ...] = (
    (lazy_regex(r"composer(?=\s)"), lazy_regex(r"-n|--nproc")),
    (lazy_regex(r"ray\s+start\b"), lazy_regex(r"--num-gpus")),
    (lazy_regex(r"colossalai\s+run\b"), lazy_regex(r"--nproc_per_node")),
    (lazy_regex(r"tune\s+run\b"), lazy_regex(r"--nproc[-_]per[-_]node")),
    (lazy_regex(r"fairseq-(?:hydra-)?train\b"), lazy_regex(r"--distributed-world-size")),
    (lazy_regex(r"(?:fabric\s+run|lightning\s+run)\b"), lazy_regex(r"--devices")),
    (lazy_regex(r"python\S*\s(?:-\S+\s)*-m\s+verl\.\S+"), lazy_regex(r"\+*trainer\.n_gpus_per_node")),
)

MOST_GPUS = 64


def other_launchers(job: JobDescription) -> Iterator[Violation]:
    """Report launchers other than torch's, and verl, that are told more GPUs than a node of the job has."""
    gpus = job.gpus_per_node
    if not gpus or job.submits or job.has("CUDA_VISIBLE_DEVICES"):
        return
    for call in job.calls:
        words = f"{call.program} {' '.join(a.text for a in call.args[:4])}"
        option = next((pattern for program, pattern in OTHER_LAUNCHERS if program.match(words)), None)
        if option is None or call.in_substitution or (job.nodes != 1 and "world" in option.pattern):
            continue
        for arg, following in call.pairs():
            name, equals, value = arg.text.partition("=")
            if not option.fullmatch(name):
                continue
            count = job.number(value if equals else following.text if following else None)
            if count and gpus < count <= MOST_GPUS:
                written = arg.text if equals else f"{arg.text} {count}"
                text = f"{written}, but the job requests {gpus} GPU{'s' * (gpus > 1)} per node"
                yield Violation(arg.offset, text, cure=f"{name}{'=' if equals else ' '}{gpus}")
            break


def on_cpu(job: JobDescription) -> Iterator[Violation]:
    """Report ``accelerate launch --cpu`` in a job that requests GPUs."""
    for launch in job.launches:
        option = launch.option("cpu", "use_cpu")
        if launch.kind == "accelerate" and option and option.arg.text in ("--cpu", "--use_cpu") and job.gpus_per_node:
            yield Violation(option.arg.offset, f"{option.written}: the job's GPUs are idle", cure="remove it")


SLOT_DEVICE = lazy_regex(r"(?:CUDA_VISIBLE_DEVICES=|cuda:|--(?:gpu|device|gpu[-_]id)[= ])[\"']?\{%\}")


def slots_as_devices(job: JobDescription) -> Iterator[Violation]:
    """Report the slot of GNU parallel, which counts from 1, as the number of a GPU."""
    for call in job.calls:
        if call.program != "parallel" or call.in_substitution:
            continue
        start = job.text[call.offset : call.offset + 600].split("\n\n")[0]
        found = SLOT_DEVICE.search(start)
        told = re.search(r"(?:-j|--jobs)[= ]?(\d{1,2})\b", start)
        gpus = job.gpus_per_node
        if found and told and gpus and int(told[1]) >= gpus:
            text = f"{{%}} counts from 1 to {told[1]}, but the job's {gpus} GPU{'s' * (gpus > 1)} have the numbers 0 to {gpus - 1}"
            cure = "CUDA_VISIBLE_DEVICES=$(({%} - 1)) in single quotes"
            yield Violation(call.offset + found.start(), text, cure=cure)


# ------------------------------------------------------------------------ JSON in words and variables

JSON_WHY = (
    "The quotes inside end and begin the outer ones: the value has no quotes any more, and no reader of JSON takes it."
)
JSON_CURE = 'single quotes around it: \'{"key": ...}\'; or \\" inside'
JSON_IN_QUOTES = lazy_regex(r"(?:(?<=[\s=])|^)\"\{\s*\"[\w.-]+\"\s*:")
INDEX_WHY = "All tasks get the same index: each takes itself for the same worker, and waits for the others, or finds its port taken."


def json_in_quotes(job: JobDescription) -> Iterator[Violation]:
    """Report ``"{"key": 1}"``: double quotes inside of double quotes."""
    if job.kind != "script":
        return
    places = [(a.offset + len(a.name) + 1, a.offset) for a in job.assignments if not a.under and not a.in_substitution]
    for call in job.calls:
        if not call.in_substitution and not call.under:
            places += [(arg.offset + len(arg.text.partition("=")[0]) + 1 if "=" in arg.text else arg.offset, arg.offset) for arg in call.args]  # fmt: skip
    for start, offset in places:
        if JSON_IN_QUOTES.match(job.text, start) and job.text[start - 1 : start] != "\\":
            yield Violation(offset, "double quotes inside of double quotes: the JSON loses its quotes", why=JSON_WHY, cure=JSON_CURE)  # fmt: skip
            return


def index_of_tasks(job: JobDescription) -> Iterator[Violation]:
    """Report one index in TF_CONFIG for all tasks of srun."""
    for item in job.set_values("TF_CONFIG"):
        index = re.search(r"[\"']task[\"']\s*:\s*\{[^{}]*[\"']index[\"']\s*:\s*(\d+)\s*[,}]", item.value)
        steps = [c for c in job.calls if c.program == "srun" and c.offset > item.offset and not c.in_loop]
        several = any((job.tasks_per_node(c) or 1) * (job.srun_nodes(c) or 1) > 1 for c in steps)
        if index and item.exported and not item.under and several and len(list(job.set_values("TF_CONFIG"))) == 1:
            text = f"TF_CONFIG has index {index[1]} for all tasks of srun"
            yield Violation(item.offset, text, why=INDEX_WHY, cure="set it in the task's shell, from $SLURM_PROCID")
