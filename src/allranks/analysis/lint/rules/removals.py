"""Rules for deletions that take more than meant: a blank in a path, files that the next program reads, and files of other jobs in /tmp and in caches."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise

from allranks.analysis.lint.job import JobDescription
from allranks.analysis.lint.records import Argument, ProgramCall, Violation
from allranks.utils.text import lazy_regex

CONTAINERS = {"docker", "podman", "singularity", "apptainer", "ssh"}


def is_recursive(call: ProgramCall) -> bool:
    return call.program == "rm" and any(re.match(r"-\w*[rR]|--recursive", a.text) for a in call.args)


def _removed(call: ProgramCall) -> list[Argument]:
    return [a for a in call.args if not a.text.startswith("-")]


# --------------------------------------------------------------------------------- blanks in paths

BLANK_WHY = (
    "rm -r does not ask: this word alone names a whole folder tree, and everything in it that is yours is removed."
)
WHOLE_TREE = lazy_regex(r"/\*?|(?:~|\$\{?HOME\}?)(?:/|/\*)?|/home/?\*?|\.\./?|\.\./\*")


def whole_trees(job: JobDescription) -> Iterator[Violation]:
    """Report ``rm -rf / tmp/data``, ``rm -rf $HOME /data`` and ``rm -rf data/ *``."""
    if job.kind != "script":
        return
    for call in job.calls:
        if not is_recursive(call) or call.in_substitution or any(c.program in CONTAINERS for c in call.under):
            continue
        words = _removed(call)
        tree = next((a for a in words if WHOLE_TREE.fullmatch(a.text) and not a.quoted), None)
        star = next((b for a, b in pairwise(words) if b.text == "*" and a.text.endswith("/")), None)
        if tree is not None:
            text = f"rm -r {tree.text} removes all of it" + (": there is a blank in the path" if len(words) > 1 else "")
            yield Violation(
                tree.offset, text, why=BLANK_WHY, cure="the whole path in one word, in quotes", severity="error"
            )
        elif star is not None:
            text = "rm -r with a * of its own removes everything in the current folder: there is a blank in the path"
            yield Violation(star.offset, text, why=BLANK_WHY, cure="the whole path in one word", severity="error")


# ---------------------------------------------------------------------------- removed, and then read

READ_WHY = "The program below is told to read what this line has removed: it stops, or starts from nothing."
READS = lazy_regex(
    r"--?(?:resume\w*|ckpt|check_?point|(?:resume|load|init|restore|pretrained|ckpt|checkpoint|weights|model|adapter)[_-]?(?:from|path|file|checkpoint|weights|ckpt|name_or_path)\w*|"
    r"load|restore|pretrained|weights|test_ckpt|model_name_or_path|input\w*|data[_-]?(?:dir|path|root|file)|dataset\w*|train[_-]file|config)"
)
MAKES = {"echo", "printf", "rm", "ls", "set", "cd"}


def removed_before_read(job: JobDescription) -> Iterator[Violation]:
    """Report a folder that the script removes, and that the next program is told to read."""
    if job.kind != "script":
        return
    own = [c for c in job.calls if not c.in_substitution]
    works = {w.offset for w in job.work}
    for number, call in enumerate(own):
        if call.program != "rm" or call.in_function or call.tested or call.under or call.branch or call.in_loop:
            continue
        for arg in _removed(call):
            folder = arg.text.removesuffix("/*").rstrip("/").removeprefix("./")
            if (
                not re.fullmatch(r"(?:[/~$]|\w)[\w./${}-]*", folder)
                or folder in ("", ".", "~")
                or folder.startswith("/tmp")
            ):
                continue
            reader = _reader(own[number + 1 :], works, folder)
            if reader is not None:
                line = job.lines.place(reader[0].offset)[0]
                text = f"{arg.text} is removed, and {reader[1]} in line {line} is to read it"
                yield Violation(call.offset, text, why=READ_WHY, cure="remove it behind the program, or not at all")
                return


def _reader(later: list[ProgramCall], works: set[int], folder: str) -> tuple[ProgramCall, str] | None:
    """Return the first command that names the folder, and its option, if this reads it and no work comes before."""
    for call in later:
        if call.in_function:
            return None
        words = [a.text for a in call.args]
        texts = [*words, *(r.target for r in call.redirects)]
        options = [
            re.sub(r"=.*", "", a) if "=" in a and a.startswith("-") else a
            for a, b in zip(words, [*words[1:], ""][: len(words)], strict=True)
            if a.startswith("-") and _inside(a.partition("=")[2] if "=" in a else b, folder)
        ]
        if any(folder in t for t in texts):
            outer = call.under[0] if call.under else call
            if outer.offset in works and options and all(READS.fullmatch(o) for o in options):
                mentions = sum(folder in t for t in texts)
                return (call, options[0]) if mentions == len(options) else None
            return None
        started = (call.under[0] if call.under else call).offset
        if started in works or call.program not in MAKES | {
            "module",
            "ml",
            "source",
            ".",
            "conda",
            "export",
            "mkdir",
            "date",
            "srun",
            "nvidia-smi",
        }:
            return None
    return None


def _inside(path: str, folder: str) -> bool:
    plain = path.removeprefix("./")
    return plain == folder or plain.startswith(folder + "/")


# ------------------------------------------------------------------------------- files of other jobs

OTHERS_WHY = "A run of yours that works on this node at the same time loses the files that it has open or needs."
OF_RUNS = lazy_regex(
    r"(?:torch|ray|pymp|nccl|triton|cuda|vllm|deepspeed|wandb|\.?X|tmp|ompi|openmpi|pmix|sglang|gloo|colossal|dask|jupyter|inductor|plasma|shm|sem|loky|joblib|hf|data)\w*"
)
OWN_PART = lazy_regex(r"\$|JOB|mktemp|PID")


def patterns_in_tmp(job: JobDescription) -> Iterator[Violation]:
    """Report ``rm -rf /tmp/torch-*`` and the lock of an X server with a fixed number."""
    if job.kind != "script" or job.whole_nodes:
        return
    for call in job.calls:
        if call.program != "rm" or call.in_substitution or any(c.program in CONTAINERS for c in call.under):
            continue
        for arg in _removed(call):
            found = re.fullmatch(r"/(?:tmp|var/tmp|dev/shm)/([\w.-]*)\*[\w.*/-]*", arg.text)
            lock = re.fullmatch(r"/tmp/(?:\.X\d+-lock|\.X11-unix/?\S*)", arg.text)
            if OWN_PART.search(arg.text) or arg.quoted:
                continue
            if (found and found[1] and OF_RUNS.match(found[1])) or lock:
                text = f"rm {arg.text} removes the files of other runs of yours on this node, too"
                cure = (
                    "xvfb-run -a, which takes a free number"
                    if lock
                    else "a folder for each run: export TMPDIR=$(mktemp -d)"
                )
                yield Violation(call.offset, text, why=OTHERS_WHY, cure=cure)
                return


CACHE_WHY = "The tasks of an array run side by side and share the home folder: each that starts removes what the others are reading."
HOME_CACHE = lazy_regex(
    r"(?:~|\$\{?HOME\}?|/home/[\w.-]+)/\.(?:cache|triton|nv|keras|torch|config|local|conda)(?:/[\w.*-]+)*/?"
)


def caches_of_tasks(job: JobDescription) -> Iterator[Violation]:
    """Report a cache in the home folder that each task of an array removes."""
    array = job.heads("array") or ""
    if not array or array.endswith("%1") or re.fullmatch(r"\d+", array) or job.submits:
        return
    for call in job.calls:
        if not is_recursive(call) or call.in_substitution or call.branch or call.tested:
            continue
        cache = next((a for a in _removed(call) if HOME_CACHE.fullmatch(a.text)), None)
        if cache is not None:
            yield Violation(call.offset, f"rm -r {cache.text}: the other tasks of the array use it", why=CACHE_WHY,
                            cure="a cache for each task: export TRITON_CACHE_DIR=/tmp/$SLURM_JOB_ID")  # fmt: skip
            return


OWN_JOB = lazy_regex(r"\$\{?(?:SLURM_JOB_?ID|SLURM_ARRAY_JOB_ID|PBS_JOBID|LSB_JOBID|JOB_ID|\$)\b|\$\$")
SIBLING_WHY = "The job gives its own folder its number, but the pattern also takes those of your other jobs, which still use them."


def pattern_of_siblings(job: JobDescription) -> Iterator[Violation]:
    """Report ``rm -r run-*`` in a job whose own folder is ``run-$SLURM_JOB_ID``."""
    if not job.is_job:
        return
    named = [a.value for a in job.assignments if not a.items] + [
        a.text for c in job.calls if c.program in ("mkdir", "cd", "pushd") for a in c.args
    ]
    own = [n.removeprefix("./") for n in named if OWN_JOB.search(n) and not re.search(r"\s", n)]
    for call in job.calls:
        if not is_recursive(call) or call.in_substitution or call.in_function:
            continue
        for arg in _removed(call):
            prefix, star, rest = arg.text.removeprefix("./").partition("*")
            if (
                not star
                or rest.strip("*/")
                or not re.search(r"[\w}][-_.]?\Z", prefix)
                or prefix.endswith("/")
                or arg.quoted
            ):
                continue
            mine = next(
                (n for n in own if n.startswith(prefix) and len(n) > len(prefix) and not OWN_JOB.search(prefix)), None
            )
            if mine is not None:
                text = f"rm -r {arg.text} removes the folders of your other jobs, too: this job's is {mine}"
                yield Violation(call.offset, text, why=SIBLING_WHY, cure=f'rm -r "{mine}"')
                return


QUEUED_WHY = "sbatch returns when the job is queued: when it runs, the file is gone."


def removed_after_submission(job: JobDescription) -> Iterator[Violation]:
    """Report a file that a submitted job is told to read, and that the submitting script removes at once."""
    own = sorted((c for c in job.calls if not c.under and not c.in_substitution), key=lambda c: c.offset)
    for number, call in enumerate(own):
        words = [a.text for a in call.args]
        if (
            call.program not in ("sbatch", "qsub")
            or call.tested
            or any(re.match(r"-W|--wait|-sync|-I\Z", w) for w in words)
        ):
            continue
        script = next((w for w in words if not w.startswith("-")), None)
        later = own[number + 1 :]
        told = words[words.index(script) + 1 :] if script else []
        if script:
            told += [
                a.text
                for c in own[:number]
                if c.program in ("echo", "printf") and any(r.target == script for r in c.redirects)
                for a in c.args
            ]
        for after in later:
            if (
                after.program in ("wait", "while", "until", "sleep", "squeue", "read", "sacct")
                or after.in_loop != call.in_loop
            ):
                break
            if after.program != "rm" or after.tested:
                continue
            names = [a for a in _removed(after) if a.text != script and len(a.text) > 3 and "*" not in a.text]
            lost = next(
                (
                    a
                    for a in names
                    if any(re.search(rf"(?:\A|[\s=:'\"]){re.escape(a.text)}(?:\Z|[\s'\"])", t) for t in told)
                ),
                None,
            )
            if lost is not None:
                line = job.lines.place(call.offset)[0]
                text = f"{lost.text} is removed before the job of line {line} can read it"
                yield Violation(after.offset, text, why=QUEUED_WHY, cure="let the job remove it, or sbatch --wait")
                return


CLONE_WHY = "git clone fails if the folder exists, and the script goes on: what it removes is your own checkout, with all that is not pushed."


def own_checkout(job: JobDescription) -> Iterator[Violation]:
    """Report a clone that the script removes again, in a script that is itself submitted from a folder of this name."""
    if job.kind != "script" or re.search(r"(?m)^[ \t]*set[ \t]+-\w*e|errexit", job.text):
        return
    for call in job.calls:
        words = [a.text for a in call.args if not a.text.startswith("-")]
        if (
            call.program != "git"
            or words[:1] != ["clone"]
            or len(words) < 2
            or call.after in ("||", "&&")
            or call.branch
        ):
            continue
        name = words[2] if len(words) > 2 else words[1].rstrip("/").rpartition("/")[2].removesuffix(".git")
        if not re.fullmatch(r"[\w.-]+", name):
            continue
        removal = next(
            (c for c in job.calls if is_recursive(c) and name in (a.text.rstrip("/") for a in _removed(c))), None
        )
        submitted = re.search(
            rf"\b(?:sbatch|qsub|bash)\b[^\n]*[ \t](?:\./)?{re.escape(name)}/[\w./-]+\.(?:sh|sbatch|slurm|pbs)", job.text
        )
        if removal is not None and removal.offset > call.offset and submitted:
            line = job.lines.place(submitted.start())[0]
            text = (
                f"rm -r {name} removes the checkout from which line {line} submits this script: there git clone fails"
            )
            yield Violation(removal.offset, text, why=CLONE_WHY, cure="git clone into a new folder: $(mktemp -d)")
            return
