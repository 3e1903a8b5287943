"""Files that ranks share: paths of one node, caches, files that all tasks write."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise

from allranks.analysis.lint.job import JobDescription
from allranks.analysis.lint.records import Argument, ProgramCall, Severity, Violation
from allranks.analysis.lint.rules import ANY, error, note, warning
from allranks.utils.text import lazy_regex

LOCAL = lazy_regex(
    r"(?:file://)?(/tmp|/var/tmp|/dev/shm|/local(?:_?scratch|disk)?|/run/user)(?:/|\Z)|\$\{?(?:TMPDIR|SLURM_TMPDIR|TMP)\b"
)
FIXED_NAME = lazy_regex(r"/(?:var/)?tmp/[^$*?{]+\Z")
PLACE = lazy_regex(r"(?:DIR|HOME|CACHE|FILE|FOLDER|PATH|ROOT)\Z")
CACHES = ("HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "TRANSFORMERS_CACHE", "HF_DATASETS_CACHE")
FOLDERS = (
    r"(?:check_?points?|ckpts?|models?|weights|data|data_?sets?|outputs?|out|saves|saved|results?|runs|logs|exp|experiments?|"
    r"pretrained\w*|scratch|src|examples?)/"
)
HUB = lazy_regex(rf"--(?:model|dataset|tokenizer|pretrained)\w*(?:[= ])(?!{FOLDERS})[A-Za-z0-9][\w.-]*/[\w.-]+\Z")
READS = {"cp", "rsync", "tar", "mkdir", "sbcast", "git", "wget", "curl", "unzip", "install", "dd", "ln", "touch"}


def _path(arg: Argument) -> str:
    """Return the path in ``--x=/tmp/y`` or ``/tmp/y``."""
    text = arg.text
    return text.partition("=")[2] if text.startswith("-") and "=" in text else text


def _on_every_node(job: JobDescription, path: str, launch: ProgramCall) -> bool:
    """Return whether a command before launch writes there on every node: by srun, sbcast or the task's own shell."""
    folder, end = "/".join(path.split("/")[:3]), max(launch.offset, launch.starter.offset)
    for call in (c for c in job.calls if c.offset < end and (c.srun is not None or c.program == "sbcast")):
        named = any(folder in a.text for a in call.args) or any(folder in r.target for r in call.redirects)
        if named and call is not launch and (call.program in READS or call.redirects):
            return True
    return False


@error(
    "node-local-file",
    why="/tmp is local to each node. Other nodes do not see files written there: 'can't open file', or checkpoints of "
    "one node only.",
    cure="use a folder that all nodes see ($HOME, a scratch file system), or copy it to every node first: sbcast, or "
    "srun --ntasks-per-node=1 cp",
    source="tested with Slurm 22.05",
    bad="srun torchrun --nnodes=2 --nproc_per_node=2 train.py --output_dir=/tmp/$USER/out",
    good="srun torchrun --nnodes=2 --nproc_per_node=2 train.py --output_dir=$HOME/out",
)
def local(job: JobDescription) -> Iterator[Violation]:
    for launch in job.launches if job.multi_node else ():
        if launch.srun is None and job.is_batch:
            continue
        args = launch.call.args
        for before, arg in zip(("", *(a.text for a in args)), args, strict=False):
            path = _path(arg)
            if LOCAL.match(path) and not _on_every_node(job, path, launch.call) and not _meant_local(before, arg.text):
                yield Violation(_where(arg), f"{path} is on one node only, or is a different file on each node")


def _meant_local(before: str, text: str) -> bool:
    """Return whether the path may be local to a node, such as logs and caches."""
    option = text if "=" in text else before if "=" not in before else ""  # --x=1 already has its value
    return bool(re.search(r"log|cache|tmp|scratch|triton|rdzv|hostfile", option.partition("=")[0].lower().strip("-")))


def _where(arg: Argument) -> int:
    match = LOCAL.search(arg.source.text)
    return arg.source.where(match.start()) if match and len(arg.source.text) else arg.offset


@warning(
    "fixed-name-in-tmp",
    why="A file of another user with this name cannot be overwritten, and two of your jobs on one node overwrite each "
    "other's file.",
    cure="use a folder per job: d=$(mktemp -d)",
    source="the sticky bit of /tmp",
    bad="#SBATCH --nodes=1\n#SBATCH --gres=gpu:1\n#SBATCH --mem=32G\nrm -rf /tmp/cache",
    good="cache=$(mktemp -d)\ntrap 'rm -rf \"$cache\"' EXIT",
)
def fixed(job: JobDescription) -> Iterator[Violation]:
    if job.whole_nodes:
        return
    seen: set[str] = set()
    severity: Severity = "warning" if job.shared_nodes else "note"
    for call in job.calls:
        removed = call.program == "rm" and any(re.match(r"-\w*[rR]|--recursive", a.text) for a in call.args)
        targets = [(r.target, call.offset) for r in call.redirects if r.operator in (">", ">>", ">|", "&>")]
        if removed:
            targets += [(a.text, call.offset) for a in call.args]
        elif call.program == "tee" or any(la.call is call for la in job.launches):
            targets += [(_path(a), _where(a)) for a in call.args]
        for path, offset in targets:
            if removed and re.fullmatch(r"/(?:dev/shm|tmp|var/tmp)/?\*?", path):
                text = f"rm -r {path} removes the files of all your jobs and tasks on the node"
                yield Violation(offset, text, severity=None if job.is_batch else "note")
            elif FIXED_NAME.match(path) and path.rstrip("/") not in seen:
                seen.add(path.rstrip("/"))
                yield Violation(offset, f"{path} has the same name for every user and every job", severity=severity)
    for item in job.all_values:
        own = re.search(r"[-_/](?=[a-z\d]*\d)[a-z\d]{32}(?:/|\Z)", item.value)  # the hash of a build
        if item.exported and PLACE.search(item.name) and not own and re.match(r"/(?:var/)?tmp/[^$*?%]+\Z", item.value):
            text = f"{item.name}={item.value} has the same name for every user and every job"
            yield Violation(item.offset, text, severity=severity)


@warning(
    "cache-not-shared",
    why="Each node downloads and prepares all data itself, or finds nothing if nodes have no internet access.",
    cure="export HF_HOME=<a folder that all nodes see>; let one rank prepare data before the others load it",
    source="huggingface_hub's defaults",
    bad="export HF_HOME=/tmp/hf",
    good="export HF_HOME=/shared/hf",
    files=ANY,
)
def unshared(job: JobDescription) -> Iterator[Violation]:
    if not job.multi_node:
        return
    for item in job.assignments:
        if item.name in CACHES and not item.removed and LOCAL.match(item.value):
            yield Violation(item.offset, f"{item.name}={item.value} is a folder local to each node")


@note(
    "cache-missing",
    why="The default is ~/.cache/huggingface: home quotas are small, and without a shared home each node downloads the "
    "model.",
    cure="export HF_HOME=<a folder that all nodes see>; let one rank prepare data before the others load it",
    source="huggingface_hub's defaults",
    bad="srun torchrun --nnodes=2 --nproc_per_node=2 train.py --model_name_or_path mistralai/Mistral-7B-v0.1",
    good="export HF_HOME=/shared/hf\nsrun torchrun --nnodes=2 --nproc_per_node=2 train.py --model_name_or_path "
    "mistralai/Mistral-7B-v0.1",
)
def missing(job: JobDescription) -> Iterator[Violation]:
    if not job.multi_node or not job.launches or job.sources_files or job.has(*CACHES, "XDG_CACHE_HOME"):
        return
    for launch in job.launches:
        words = [a.text for a in launch.call.args]
        pairs = [*words, *(f"{a} {b}" for a, b in pairwise(words))]
        named = next((p for p in pairs if HUB.match(p)), None)
        if named or any(a.name.startswith(("HF_", "TRANSFORMERS_")) for a in job.assignments):
            what = named or "Hugging Face settings"
            yield Violation(launch.call.offset, f"no HF_HOME for a job of several nodes ({what})")
            return


@warning(
    "sbcast",
    why="sbcast copies one file: it overwrites nothing without --force, does not copy folders, and the target folder "
    "must exist.",
    cure="use one tar file, sbcast --force, and srun --ntasks-per-node=1 tar -xf",
    source="tested with Slurm 22.05",
    bad="sbcast data.tar /tmp/data.tar",
    good="sbcast --force data.tar /tmp/data.tar",
)
def sbcast(job: JobDescription) -> Iterator[Violation]:
    for call in (c for c in job.calls if c.program == "sbcast"):
        words = [a.text for a in call.args]
        if call.in_loop:
            yield Violation(call.offset, "sbcast in a loop: every call starts a new broadcast", severity="note")
        forced = any(w == "--force" or re.match(r"-[a-zA-Z]*f", w) for w in words)
        if not forced and not re.search(r"JOB_?ID|TMPDIR", " ".join(words)):
            yield Violation(call.offset, "sbcast without --force fails if the file already exists")
        files = [w for w in words if not w.startswith("-")]
        if len(files) >= 2 and files[-2].endswith("/"):
            yield Violation(call.offset, f"sbcast of a folder, {files[-2]}", severity="error")


CHOOSES_TASK = lazy_regex(r"SLURM_(?:PROCID|LOCALID)|LOCAL_RANK|OMPI_COMM_WORLD|\bflock\b|\bRANK\b")


@warning(
    "prepared-by-all-tasks",
    why="srun starts the command once per task: all change the same files at once, and some fail or read a file that "
    "is half written.",
    cure="run it once before srun, or on each node: srun --ntasks-per-node=1 --ntasks=$SLURM_NNODES",
    source="Slurm's sbatch and srun manuals",
    bad="#SBATCH --nodes=1\n#SBATCH --ntasks-per-node=4\nsrun pip install -r requirements.txt\nsrun python train.py",
    good="#SBATCH --nodes=1\n#SBATCH --ntasks-per-node=4\npip install -r requirements.txt\nsrun python train.py",
)
def prepared_by_all(job: JobDescription) -> Iterator[Violation]:
    for call in job.calls if job.is_batch else ():
        step, words = call.srun, " ".join([call.program, *(a.text for a in call.args)])
        match = PREPARES.match(words)
        if step is None or match is None or call.branch or call.tested or step.in_function or step.has_open_options:
            continue
        tasks = job.tasks_per_node(step)
        later = [c.offset for c in job.calls if c.program == "srun" and c.offset > step.offset]
        own = CHOOSES_TASK.search(job.text[step.offset : min(later, default=step.offset + 4000)])
        if tasks and tasks > 1 and not own and not re.search(r"\$\{?\w*(?:PROCID|LOCALID|RANK)|mktemp|\$\$", words):
            yield Violation(call.offset, f"{match[0]} runs in each of the {tasks} tasks of a node at the same time")
            return


PREPARES = lazy_regex(
    r"pip3? install\b|(?:conda|mamba) (?:install|create)\b|python[\d.]* -m pip install\b|tar (?=-?\w*x|--extract)|unzip\b"
)
