"""Rules for the sizes that a program is told, which the ranks and GPUs must fit: model parallelism, batches, and devices of ranks."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise
from math import prod

from allranks.analysis.lint.command_options import PYTHON
from allranks.analysis.lint.job import JobDescription, LauncherCall
from allranks.analysis.lint.placement import started_by
from allranks.analysis.lint.records import Argument, ProgramCall, Violation
from allranks.analysis.lint.rules.dataflow import exported_before
from allranks.utils.text import lazy_regex

SIZES_WHY = "The program checks these numbers when it starts, and stops."
SIZES_CURE = "ranks = tensor x pipeline x context x data parallel size"
# Megatron-LM and what is built on it, NeMo, torchtitan
SIZE = lazy_regex(
    r"(?:--|\+{0,2}(?:\w+\.)*model\.|--(?:parallelism|training|experimental)\.)"
    r"(tensor|pipeline|context)[-_](?:model[-_])?parallel[-_](?:size|degree)"
)
NAMES = ("tensor", "pipeline", "context")
Told = tuple[int, Argument]


def option_values(call: ProgramCall) -> Iterator[tuple[str, str, Argument]]:
    """Yield name, value and place of the options ``--name value``, ``--name=value`` and ``name=value``."""
    for arg, following in call.pairs():
        name, equals, value = arg.text.partition("=")
        if equals:
            yield name, value, arg
        elif name.startswith("-") and following is not None:
            yield name, following.text, arg


def _numbers(job: JobDescription, call: ProgramCall) -> dict[str, Told | None]:
    """Return the options of a program that have a number; None for one whose number is unknown. The last of a name counts."""
    found: dict[str, Told | None] = {}
    for name, value, arg in option_values(call):
        number = job.number(value)
        found[name.replace("_", "-") if name.startswith("--") else name] = (number, arg) if number is not None else None
    return found


def _place(arg: Argument) -> int:
    """Return where the option itself stands: in an array further up, perhaps."""
    return arg.source.where(0)


def _parallel_sizes(job: JobDescription, call: ProgramCall) -> dict[str, Told | None]:
    found: dict[str, Told | None] = {}
    for name, value, arg in option_values(call):
        size = SIZE.fullmatch(name)
        if size:
            number = job.number(value)
            found[size[1]] = (number, arg) if number else None
    return found


def ranks_of(job: JobDescription, launch: LauncherCall) -> int | None:
    """Return the ranks that a launch starts in all; None if the file does not show it."""
    if launch.open_ended or launch.open_srun:
        return None
    if launch.kind == "python":
        started = started_by(job, launch)
        return started.total if started else None
    if launch.kind == "accelerate":
        return None if launch.option("config_file") else job.number(launch.value("num_processes"))
    if launch.kind == "deepspeed":
        each, nodes = launch.value("num_gpus"), launch.value("num_nodes")
        if nodes is None and launch.option("hostfile", "H", "include", "i", "exclude", "e"):
            return None
    else:
        each, nodes = launch.value("nproc_per_node"), launch.value("nnodes")
    ranks, machines = job.number(each), job.number(nodes) if nodes is not None else 1
    return ranks * machines if ranks and machines else None


def parallel_sizes(job: JobDescription) -> Iterator[Violation]:
    """Compare tensor, pipeline and context parallel sizes, and Megatron's batch and model sizes, with the ranks."""
    for launch in job.launches:
        sizes = {} if is_server(launch.call) else _parallel_sizes(job, launch.call)
        if not sizes or None in sizes.values():
            continue
        told = {name: found for name in NAMES if (found := sizes.get(name)) is not None}
        model, ranks = prod(number for number, _ in told.values()), ranks_of(job, launch)
        place = _place(next(iter(told.values()))[1])
        if ranks and model > 1 and ranks % model:
            shown = " x ".join(f"{name} {number}" for name, (number, _) in told.items())
            equals = f" = {model} ranks" if len(told) > 1 else ""
            yield Violation(place, f"{shown}{equals} {'do' if equals else 'does'} not divide the {ranks} ranks")
            continue
        numbers = _numbers(job, launch.call)
        yield from _batches(numbers, ranks // model if ranks else None)
        even = {name: number for name, (number, _) in told.items()}
        if "--deepspeed" in {a.text for a in launch.call.args} or launch.kind == "deepspeed":
            even.pop("pipeline", None)  # DeepSpeed's pipeline has stages of different lengths
        yield from _layers(numbers, even)


def _batches(numbers: dict[str, Told | None], replicas: int | None) -> Iterator[Violation]:
    """Compare Megatron's global batch with the micro batches of all replicas."""
    whole, micro = numbers.get("--global-batch-size"), numbers.get("--micro-batch-size")
    if not replicas or not whole or not micro or not micro[0] or "--rampup-batch-size" in numbers:
        return
    if whole[0] % (micro[0] * replicas):
        text = (
            f"--global-batch-size {whole[0]} is no multiple of --micro-batch-size {micro[0]} x {replicas} replicas"
            if replicas > 1
            else f"--global-batch-size {whole[0]} is no multiple of --micro-batch-size {micro[0]}"
        )
        yield Violation(_place(whole[1]), text, cure="a multiple of micro batch size x data parallel size")


DIVIDED = (
    ("--num-attention-heads", "tensor", "--tensor-model-parallel-size", "the heads are shared out to the tensor parallel ranks"),
    ("--num-layers", "pipeline", "--pipeline-model-parallel-size", "the layers are shared out to the pipeline's stages"),
)  # fmt: skip
UNEVEN = lazy_regex(
    r"--(?:decoder-first|decoder-last|pipeline-model-parallel-layout|account-for|num-layers-(?:in|per))"
)


def _layers(numbers: dict[str, Told | None], sizes: dict[str, int]) -> Iterator[Violation]:
    """Report heads, layers and lengths of Megatron's model that do not fit the sizes."""
    for name, size, option, cure in DIVIDED:
        found, parts = numbers.get(name), sizes.get(size, 1)
        if not found or found[0] % parts == 0 or any(UNEVEN.match(n) for n in numbers):
            continue
        yield Violation(_place(found[1]), f"{name} {found[0]} is no multiple of {option} {parts}", cure=cure)
    experts, parts = numbers.get("--num-experts"), numbers.get("--expert-model-parallel-size")
    if experts and parts and parts[0] and experts[0] % parts[0]:
        text = f"--num-experts {experts[0]} is no multiple of --expert-model-parallel-size {parts[0]}"
        yield Violation(_place(experts[1]), text, cure="the experts are shared out to the expert parallel ranks")
    groups, tensor = numbers.get("--num-query-groups"), sizes.get("tensor", 1)
    if groups and groups[0] and groups[0] % tensor and tensor % groups[0]:
        text = f"--num-query-groups {groups[0]} is no multiple of --tensor-model-parallel-size {tensor}"
        yield Violation(_place(groups[1]), text, cure="the groups are shared out to the tensor parallel ranks")
    hidden, heads = numbers.get("--hidden-size"), numbers.get("--num-attention-heads")
    if hidden and heads and heads[0] and hidden[0] % heads[0] and "--kv-channels" not in numbers:
        yield Violation(
            _place(hidden[1]),
            f"--hidden-size {hidden[0]} is no multiple of --num-attention-heads {heads[0]}",
            cure="a multiple",
        )
    length, most = numbers.get("--seq-length"), numbers.get("--max-position-embeddings")
    if length and most and length[0] > most[0]:
        text = f"--seq-length {length[0]} is more than --max-position-embeddings {most[0]}"
        yield Violation(_place(length[1]), text, cure="at least the sequence length")


# ------------------------------------------------------------------------------ GPUs of servers

SERVED_WHY = "The server needs a GPU for each part of the model, and stops with an error, or waits for GPUs that the job does not have."
SERVER_SIZES = {
    "--tensor-parallel-size", "-tp", "--pipeline-parallel-size", "-pp", "--data-parallel-size", "-dp", "--tp", "--tp-size", "--dp-size", "--pp-size",
}  # fmt: skip
SERVER_MODULES = lazy_regex(r"(?:vllm|sglang)\.(?:entrypoints\.\S+|launch_server)")


SEVERAL = lazy_regex(r"(?i)arg|opt|extra|flag|param|[@*]")
"""A part of the names of variables that hold several options."""


def is_server(call: ProgramCall) -> bool:
    words = [a.text for a in call.args]
    if call.program in ("vllm", "trl"):
        return words[:1] in (["serve"], ["vllm-serve"])
    return PYTHON.match(call.program) is not None and any(
        w == "-m" and SERVER_MODULES.fullmatch(n) for w, n in pairwise(words)
    )


ENGINE_SIZE = lazy_regex(r"--tensor[-_]parallel[-_]size|(?:\+{0,2}(?:\w+\.)+)tensor_(?:model_)?parallel_size")
ENGINE_ARGUMENTS = lazy_regex(r"(?:\A|[,{\s])(?:tensor|pipeline|data)_parallel_size=(\d{1,4})(?=,|\Z|[}\s])")


def _parts_of_engine(job: JobDescription, call: ProgramCall) -> Iterator[tuple[int, Argument]]:
    """Yield the parallel sizes of vLLM inside a program: an option of its own, or lm_eval's arguments of the model."""
    words = [a.text for a in call.args]
    if PYTHON.match(call.program) or call.program.endswith(".py"):
        for name, value, arg in option_values(call):
            if ENGINE_SIZE.fullmatch(name) and (size := job.number(value)):
                yield size, arg
    evaluates = call.program in ("lm_eval", "lm-eval", "lighteval") or bool({"lm_eval", "lighteval"} & set(words))
    if evaluates and any("vllm" in w for w in words):
        for arg in call.args:
            sizes = list(ENGINE_ARGUMENTS.finditer(arg.source.text))
            if sizes:
                place = arg.source.where(sizes[0].start(1))
                yield prod(int(size[1]) for size in sizes), Argument(arg.source, place, arg.quoted)


def gpus_seen(job: JobDescription, call: ProgramCall) -> tuple[int, str] | None:
    """Return the GPUs that a program on one node sees, and what says so."""
    own = [a for a in call.prefix if a.name == "CUDA_VISIBLE_DEVICES"]
    own = own or exported_before(job, "CUDA_VISIBLE_DEVICES", call)
    if own:
        listed = own[-1].value if re.fullmatch(r"\d{1,2}(?:,\d{1,2})*", own[-1].value) else ""
        return (len(listed.split(",")), f"CUDA_VISIBLE_DEVICES={listed} leaves") if listed else None
    if job.nodes != 1 or not job.gpus_per_node or call.srun is not None or call.in_function:
        return None
    return job.gpus_per_node, "the job requests"


def parts_of_servers(job: JobDescription) -> Iterator[Violation]:
    """Report a server of vLLM or SGLang whose parallel sizes need more GPUs than it sees."""
    if any(c.program == "ray" for c in job.calls):
        return
    for call in job.calls:
        if call.in_substitution:
            continue
        if is_server(call):
            if any(
                a.is_open and (before is None or not before.text.startswith("--") or SEVERAL.search(a.text))
                for before, a in zip([None, *call.args], call.args, strict=False)
            ):
                continue
            found = [
                (n, arg)
                for name, value, arg in option_values(call)
                if name in SERVER_SIZES and (n := job.number(value))
            ]
        else:
            found = [*_parts_of_engine(job, call)]
        names = {name for name, _, _ in option_values(call)}
        seen = gpus_seen(job, call)
        if (
            not found
            or seen is None
            or names & {"--nnodes", "--distributed-executor-backend", "--data-parallel-size-local"}
        ):
            continue
        needed = prod(n for n, _ in found)
        if needed > seen[0]:
            sizes = " ".join(f"{arg.text.partition('=')[0]} {n}" for n, arg in found)
            if "," in found[0][1].text:
                sizes = f"the parallel size {needed} in the arguments of the model"
            text = f"{sizes} needs {needed} GPUs, but {seen[1]} {seen[0]}"
            yield Violation(found[0][1].offset, text, why=SERVED_WHY, cure="as many parts as GPUs")


# ------------------------------------------------------------------------ world sizes of programs

OWN_COUNTS = {
    "nodes": lazy_regex(r"--(?:n?nodes|num[-_]nodes)"),
    "gpus": lazy_regex(r"--(?:gpus|n[-_]?gpus|num[-_]gpus|(?:n|num[-_])?gpus[-_]per[-_]node)"),
    "world": lazy_regex(r"--world[-_]size"),
}
PRODUCT_WHY = "The program takes its ranks from nodes x GPUs: with a larger world size it waits for ranks that never start, with a smaller one it refuses some."


def world_of_options(job: JobDescription) -> Iterator[Violation]:
    """Compare ``--world_size`` of a program with its own options for nodes and GPUs, also in a script that echo writes."""
    for call in job.calls:
        written = call.program == "echo" and any(r.operator in (">", ">>") for r in call.redirects)
        if not (PYTHON.match(call.program) or written) or call.in_substitution:
            continue
        words = [(m[0], arg.source.where(m.start())) for arg in call.args for m in re.finditer(r"\S+", arg.source.text)]
        if not any(".py" in word for word, _ in words):
            continue
        told: dict[str, tuple[int, int]] = {}
        for (word, place), (following, place_of_value) in pairwise([*words, ("", 0)]):
            name, equals, value = word.partition("=")
            count = job.number(value if equals else following)
            for kind, pattern in OWN_COUNTS.items():
                if pattern.fullmatch(name) and count:
                    told[kind] = (count, place if equals else place_of_value)
        if told.keys() == OWN_COUNTS.keys():
            nodes, gpus, world = told["nodes"][0], told["gpus"][0], told["world"][0]
            if world not in (nodes * gpus, nodes, gpus):
                text = f"a world size of {world}, but {nodes} nodes with {gpus} GPUs have {nodes * gpus} ranks"
                yield Violation(told["world"][1], text, why=PRODUCT_WHY, cure="nodes x GPUs per node")


# ---------------------------------------------------------------------------- devices of ranks

ONE_DEVICE_WHY = "All ranks of a node get the same option and meet on one GPU: NCCL stops with 'Duplicate GPU detected', or the program finds too few devices."
OWN_RANK_WHY = "The launcher gives each rank its own --local_rank in front of the program's options, and this one replaces it: all ranks take the same GPU."
TRAINER = lazy_regex(r"--(?:per_device_train_batch_size|output_dir)\b")


def device_of_all(job: JobDescription) -> Iterator[Violation]:
    """Report one device, or one local rank, for all ranks of a launcher."""
    for launch in job.launches:
        if launch.kind == "python" or launch.open_ended:
            continue
        value_of = launch.local_ranks
        ranks = job.number(value_of)
        yolo = {"--data", "--weights"} <= {a.text.partition("=")[0] for a in launch.call.args}
        if ranks is None and value_of and "$" in value_of and yolo:
            ranks = 0  # unknown, but it is meant to be more than one
        if ranks is None or ranks == 1 or launch.value("num_machines") not in (None, "1"):
            continue
        for name, value, arg in option_values(launch.call):
            listed = re.fullmatch(r"(?:cuda:)?(\d{1,2}(?:,\d{1,2})*)", value)
            if name == "--device" and listed and len(set(listed[1].split(","))) < (ranks or 2):
                text = f"--device {value} for all {ranks or value_of} ranks"
                shown = ",".join(str(n) for n in range(min(ranks or 2, 16)))
                cure = f"--device {shown}, or without it, as the program takes it"
                yield Violation(arg.offset, text, why=ONE_DEVICE_WHY, cure=cure)
                break
            passes = launch.kind == "deepspeed" or (
                launch.kind == "torch.distributed.launch" and "use_env" not in launch.options
            )
            trainer = any(TRAINER.match(a.text) for a in launch.call.args)
            kept = launch.option("no_local_rank") is not None
            if re.fullmatch(r"--local[-_]rank", name) and value.isdecimal() and passes and not (trainer or kept):
                text = f"--local_rank {value} replaces that of each rank"
                yield Violation(arg.offset, text, why=OWN_RANK_WHY, cure="remove it")
                break


# ------------------------------------------------------------------- lists that hide the GPUs

FIRST_ONLY_WHY = (
    "The list has commas, no ranges and no brackets. CUDA reads it up to the first character that it does not know: the program sees only "
    "the first GPU, or none."
)
HIDDEN_WHY = "CUDA sees no GPU at all: torch runs on the CPU, or stops with 'No CUDA GPUs are available', and the job's GPUs are idle."


def unreadable_list(job: JobDescription) -> Iterator[Violation]:
    """Report CUDA_VISIBLE_DEVICES with blanks or a range, and an empty one in a job that requests GPUs."""
    listed = [a for a in job.assignments if a.name == "CUDA_VISIBLE_DEVICES" and not a.in_substitution]
    prefixes = [a for c in job.calls for a in c.prefix if a.name == "CUDA_VISIBLE_DEVICES"]
    for item in [*(a for a in listed if a.exported and not a.removed), *prefixes]:
        value = item.value.strip("\"' ")
        if "CUDA_VISIBLE_DEVICES" not in job.used_names and (
            re.fullmatch(r"\d{1,2}(?:\s+\d{1,2})+|[\[({]\s*\d{1,2}(?:\s*,\s*\d{1,2})*\s*[\])}]", value)
            or re.fullmatch(r"\d-\d{1,2}", value)
        ):
            cure = "CUDA_VISIBLE_DEVICES=0,1,2,3"
            yield Violation(
                item.offset, f"CUDA_VISIBLE_DEVICES={value} is no list with commas", why=FIRST_ONLY_WHY, cure=cure
            )
            return
    if len(listed) != 1 or prefixes or not job.gpus_per_node or not job.work_calls:
        return
    only = listed[0]
    if only.exported and not only.removed and not only.under and not only.in_function and only.value in ("", "-1"):
        first = min(c.offset for c in job.work_calls)
        if only.offset < first and not only.source.text.strip("\"'-1"):
            text = f"CUDA_VISIBLE_DEVICES={only.value} hides the job's {job.gpus_per_node} GPUs"
            yield Violation(only.offset, text, why=HIDDEN_WHY, cure="remove it", severity="warning")


# ------------------------------------------------------------------------------------ Lightning

ALONE_WHY = (
    "Lightning finds Slurm's tasks in the environment and takes each for a rank: the only process waits for the others until the timeout, "
    "or Lightning refuses the number of devices."
)
LIGHTNING = lazy_regex(r"(?:--|\+{0,2})(?:pl_)?trainer\.(?:devices|num_nodes|strategy|accelerator|gpus)")


def lightning_alone(job: JobDescription) -> Iterator[Violation]:
    """Report one process of Lightning in the batch script of a job that has several tasks."""
    each, total = job.number(job.heads("ntasks-per-node")), job.number(job.heads("ntasks"))
    count = total or (each * (job.nodes or 1) if each else 0)
    gpus = job.gpus_per_node
    if not job.is_batch or not count or count < 2 or not gpus or (each or count) != gpus:
        return
    if job.has("SLURM_NTASKS", "SLURM_JOB_NAME") or re.search(r"unset\s+SLURM_", job.text) or job.submits:
        return
    for call in job.work_calls:
        if call.under or call.in_function or call.in_substitution or not PYTHON.match(call.program):
            continue
        told = [(name, value, arg) for name, value, arg in option_values(call) if LIGHTNING.fullmatch(name)]
        devices = [arg for name, value, arg in told if name.endswith(("devices", "gpus")) and job.number(value) == gpus]
        if devices:
            text = f"{call.written} runs without srun in a job of {count} tasks"
            yield Violation(call.offset, text, why=ALONE_WHY, cure=f"srun {call.written} ...")
            return


QUERY = lazy_regex(r"nvidia-smi\b[^|;\n)`]*--query-(?:compute-apps|gpu=[\w.,]*(?:memory\.(?:used|free)|utilization))")
QUERIED_WHY = "Slurm has already chosen the GPUs of the job: where it does not hide the others, these may be idle GPUs of another job."


def queried_devices(job: JobDescription) -> Iterator[Violation]:
    """Report a list of GPUs that the script makes itself from those of the node that are idle."""
    if not job.is_job or not job.requests_gpus or job.whole_nodes or not QUERY.search(job.text):
        return
    for item in job.set_values("CUDA_VISIBLE_DEVICES"):
        first = QUERY.search(job.text)
        derived = re.search(r"\$", item.raw or item.value) and "SLURM" not in item.value
        if first and derived and item.offset > first.start() and not job.in_comment(first.start()):
            text = "CUDA_VISIBLE_DEVICES is set to idle GPUs of the node, not to those of the job"
            yield Violation(item.offset, text, why=QUERIED_WHY, cure="remove it: Slurm sets CUDA_VISIBLE_DEVICES")
            return


LINES_WHY = "The query prints a line for each GPU: the value is '4 4 4 4', several words where one number was meant."
PICKED = lazy_regex(r"-i\Z|-i=|-i\d|--id\b")


def queried_count(job: JobDescription) -> Iterator[Violation]:
    """Report the count of ``nvidia-smi --query-gpu=count`` that is used as one number."""
    gpus = job.gpus_per_node
    for call in job.calls:
        asked = [a.text for a in call.args if a.text.startswith("--query-gpu")]
        if call.program != "nvidia-smi" or not call.in_substitution or asked != ["--query-gpu=count"]:
            continue
        if call.is_piped or any(PICKED.match(a.text) for a in call.args) or not gpus or gpus < 2:
            continue
        if call.under and job.heading.keys() & {"gpus-per-task", "gpu-bind"}:
            continue
        holder = re.search(r"(?<![\w-])(\w+)=\"?(\(?)\$\([ \t]*\Z", job.text[max(0, call.offset - 80) : call.offset])
        if holder and (holder[2] or not _is_number(job, holder[1])):
            continue
        text = f"--query-gpu=count prints {gpus} lines on a node with {gpus} GPUs, not one number"
        yield Violation(call.offset, text, why=LINES_WHY, cure="nvidia-smi --list-gpus | wc -l")


def _is_number(job: JobDescription, name: str) -> bool:
    """Return whether the variable is used as it is, and not only shown or cut to its first line."""
    uses = [u for u in job.uses if u.name == name]
    cut = re.search(rf"\$\{{?{name}\}}?\"?[ \t]*\||<<<[ \t]*\"?\$\{{?{name}\b", job.text)
    shown = all(u.program in ("echo", "printf") for u in uses)
    return not (shown or cut or any(u.operator or u.index or u.program == "for" for u in uses))


def lightning_tasks(job: JobDescription) -> Iterator[Violation]:
    """Report one process of Lightning in a job whose tasks per node are not its GPUs, but CPUs."""
    each, gpus = job.number(job.heads("ntasks-per-node")), job.gpus_per_node
    if not job.is_batch or not each or not gpus or each <= gpus or job.submits or len(job.work) != 1:
        return
    if job.has("SLURM_NTASKS", "SLURM_JOB_NAME", "SLURM_NTASKS_PER_NODE") or re.search(r"unset\s+SLURM_", job.text):
        return
    call = job.work[0]
    lightning = any(re.search(r"(?i)lightning", a.text) or LIGHTNING.match(a.text) for a in call.args)
    if PYTHON.match(call.program) and not call.under and not call.in_function and lightning:
        text = f"{each} tasks per node, but one process of Lightning and {gpus} GPU{'s' * (gpus > 1)}"
        yield Violation(
            job.heading["ntasks-per-node"].offset,
            text,
            why=ALONE_WHY,
            cure=f"--ntasks-per-node={gpus} and srun, or --cpus-per-task={each}",
        )
