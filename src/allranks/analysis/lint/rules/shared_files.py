"""Rules for files that several tasks write at once, for archives, and for results that stay on a node."""

from __future__ import annotations

import re
from collections.abc import Iterator

from allranks.analysis.lint.command_options import SHELLS, srun_end
from allranks.analysis.lint.job import JobDescription
from allranks.analysis.lint.records import Argument, ProgramCall, Violation
from allranks.analysis.lint.rules.requests import array_range
from allranks.analysis.lint.rules.storage import LOCAL
from allranks.utils.text import lazy_regex

FIXED = lazy_regex(r"[\w.~/+-]*[A-Za-z0-9][\w.~/+-]*")
ON_NODE = lazy_regex(r"/(?:tmp|var/tmp|dev|local\w*|scratch/local|run)/")
NUMBER_OF_TASK = lazy_regex(r"SLURM_ARRAY_TASK_ID|PBS_ARRAY_?I(?:NDEX|D)|LSB_JOBINDEX|SGE_TASK_ID")


def _tasks_at_once(job: JobDescription) -> bool:
    """Return whether the script is a job array of Slurm whose tasks share their working folder."""
    found = job.heading.get("array")
    span = array_range(found.value) if found else None
    if found is None or span is None or span[0] == span[1] or re.search(r"%1\Z", found.value or ""):
        return False
    moved = [c for c in job.calls if c.program in ("cd", "pushd") and any("$" in a.text for a in c.args)]
    names = _dependent_names(job)
    return not any(n in a.text for c in moved for a in c.args for n in names) and not any(
        re.search(r"(?i)job|mktemp|\$\$|tmp", a.text) for c in moved for a in c.args
    )


def _dependent_names(job: JobDescription) -> set[str]:
    """Return the variables whose value depends on the number of the task, as far as the script shows."""
    names = {u.name for u in job.uses if NUMBER_OF_TASK.fullmatch(u.name)}
    for _ in range(3):
        names |= {a.name for a in job.assignments if any(re.search(rf"\b{n}\b", a.value) for n in names)}
    return names


def _runs_always(call: ProgramCall) -> bool:
    outer = call.starter
    return not (outer.branch or outer.in_function or outer.in_substitution or outer.tested or outer.in_loop)


REMOVED_WHY = "The tasks of an array run at the same time: one that starts later removes the files of those that run."


def removed_by_array(job: JobDescription) -> Iterator[Violation]:
    """Report a folder of fixed name that each task of an array removes before its program writes to it."""
    if not _tasks_at_once(job):
        return
    for call in job.calls:
        if call.program != "rm" or call.under or not _runs_always(call):
            continue
        if not any(re.match(r"-\w*[rR]|--recursive", a.text) for a in call.args):
            continue
        for arg in call.args:
            folder = arg.text.removesuffix("/*").removesuffix("*").rstrip("/")
            if not FIXED.fullmatch(folder) or ON_NODE.match(folder + "/") or folder.startswith("-"):
                continue
            later = [a.text for c in job.work_calls if c.offset > call.offset for a in c.args]
            if any(w == folder or f"{folder}/" in w or w.endswith(f"={folder}") for w in later):
                text = f"each task of the array removes {folder}, to which the others write"
                yield Violation(call.offset, text, why=REMOVED_WHY, cure=f"{folder}/$SLURM_ARRAY_TASK_ID")
                return


# ---------------------------------------------------------------------- preparation by all tasks

PREPARED_WHY = (
    "srun starts the command once per task. All tasks change the same files at the same moment: some fail, or read a file that another one is "
    "just writing."
)
PREPARED_CURE = "run it once before srun, or on each node: srun --ntasks-per-node=1 --ntasks=$SLURM_NNODES"
CHOOSES_TASK = lazy_regex(r"SLURM_(?:PROCID|LOCALID)|LOCAL_RANK|OMPI_COMM_WORLD|\bflock\b|\bRANK\b")


def prepared_by_all(job: JobDescription) -> Iterator[Violation]:
    """Report an installation or an unpacking that each task of a step does at the same time."""
    if not job.is_batch:
        return
    for call in job.calls:
        step = call.srun
        what = _prepares(call)
        if step is None or what is None or call.branch or call.tested or step.in_function:
            continue
        tasks = job.tasks_per_node(step)
        if not tasks or tasks < 2 or step.has_open_options or CHOOSES_TASK.search(_step_text(job, step)):
            continue
        folder = " ".join(a.text for a in call.args)
        if re.search(r"\$\{?\w*(?:PROCID|LOCALID|RANK)|mktemp|\$\$", folder):
            continue
        yield Violation(call.offset, f"{what} runs in each of the {tasks} tasks of a node at the same time")
        return


CREATED_WHY = "The tasks of an array start at the same time: each changes this environment, and removes or changes what another one is just installing."


def created_by_array(job: JobDescription) -> Iterator[Violation]:
    """Report an environment of conda that every task of an array creates under one name, or installs packages into."""
    if not _tasks_at_once(job):
        return
    for call in job.calls:
        words = [a.text for a in call.args]
        made = words[:1] == ["create"] or words[:2] in (["env", "create"], ["env", "update"])
        made = made or (
            words[:1] in (["install"], ["update"]) and not {"--dry-run", "-d", "--download-only"} & {*words}
        )
        if call.program not in ("conda", "mamba", "micromamba") or not made or call.under or not _runs_always(call):
            continue
        if call.after in ("||", "&&") or call.before in ("||", "&&") or any("$" in w for w in words):
            continue
        if words[0] in ("install", "update") and not any(w in ("-n", "--name", "-p", "--prefix") for w in words):
            active = _environment_of(job, call)
            if active is not None and "$" in active:
                continue  # perhaps one for each task
        text = f"each task of the array runs {call.program} {' '.join(words[:4])}"
        yield Violation(call.offset, text, why=CREATED_WHY, cure="prepare the environment once, before sbatch")
        return


def _environment_of(job: JobDescription, call: ProgramCall) -> str | None:
    """Return the environment that is active where a command stands, as it is written."""
    before = [c for c in job.calls if c.offset < call.offset and not c.under and not c.in_substitution]
    named = [
        c.args[-1].text
        for c in before
        if (c.program in ("conda", "mamba", "micromamba") and [a.text for a in c.args[:1]] == ["activate"])
        or (c.program in ("source", ".") and any("activate" in a.text for a in c.args))
    ]
    return named[-1] if named else None


def _step_text(job: JobDescription, step: ProgramCall) -> str:
    later = [c.offset for c in job.calls if c.program == "srun" and c.offset > step.offset]
    return job.text[step.offset : min(later, default=step.offset + 4000)]


def _prepares(call: ProgramCall) -> str | None:
    words = [a.text for a in call.args]
    if call.program in ("pip", "pip3") and words[:1] == ["install"]:
        return "pip install"
    if call.program in ("conda", "mamba") and words[:1] in (["install"], ["create"]):
        return f"{call.program} {words[0]}"
    if call.program.startswith("python") and words[:3] == ["-m", "pip", "install"]:
        return "pip install"
    if call.program == "tar" and words and re.match(r"-?\w*x|--extract", words[0]):
        return "tar"
    if call.program == "unzip":
        return "unzip"
    return None


# ------------------------------------------------------------------------------------------ archives

MEMBER_WHY = "Words behind the archive name members of it, not the folder to unpack in: 'Not found in archive', and nothing is unpacked."
NAME_OF_F_WHY = (
    "The letter f takes what stands behind it as the archive's name: 'z: Cannot open: No such file or directory'."
)


def archives(job: JobDescription) -> Iterator[Violation]:
    """Report tar with a folder behind the archive, or with letters behind f."""
    for call in job.calls:
        words = [a.text for a in call.args]
        if call.program != "tar" or not words:
            continue
        late = re.match(r"-[xctvpzjJ]*f([zjJxvpc]{1,3})\Z", words[0])
        if late and len(words) > 1 and re.search(r"\.(?:tar|tgz|tbz|gz|bz2|xz)", words[1]):
            yield Violation(
                call.offset, f"{words[0]}: f takes {late[1]} as the archive", why=NAME_OF_F_WHY, cure="-xzf: f last"
            )
            continue
        if not re.match(r"-?[vpkmozjJ]*x\w*f\Z", words[0]) or any(w.startswith(("-C", "--")) for w in words):
            continue
        behind = words[2:]
        folder = behind and re.match(
            r"(?:/|\$\{?(?:\w*TMP\w*|\w*SCRATCH\w*|\w*DIR|HOME|PWD)\}?(?:/|\Z)|\.\.?/\Z|\.\Z)", behind[0]
        )
        if len(behind) == 1 and folder and re.search(r"\.(?:tar|tgz|tbz|gz|bz2|xz|zst)", words[1]):
            text = f"tar looks for {behind[0]} in the archive: it unpacks into a folder only with -C"
            yield Violation(call.offset, text, why=MEMBER_WHY, cure=f"tar {words[0]} {words[1]} -C {behind[0]}")


# ------------------------------------------------------------------------------- results on the node

LEFT_WHY = "The folder is on the node's own disk and is removed with the job: what the program wrote there is lost."
LEFT_CURE = "cp -r it to a folder that stays, below the program"
OUTPUT = lazy_regex(
    r"--?(?:(?:output|out|save|ckpt|checkpoint|results?|model)[-_]?(?:dir|path|folder|root)|output|save|save[-_]?(?:to|model)|default[-_]root[-_]dir)"
)
OF_JOB = lazy_regex(
    r"\$\{?(?:SLURM_TMPDIR|TMPDIR|LOCAL_?SCRATCH|LSCRATCH)\}?|\$\(mktemp -d[^)]*\)|/(?:tmp|var/tmp|dev/shm)/"
)
KEEPS = lazy_regex(
    r"\b(?:cp|rsync|mv|scp|tar|zip|rclone|aws|gsutil|azcopy|gcloud|cpio|upload\w*|git|dcp|pigz|sbcast|hf|huggingface-cli)\b"
)


def left_on_node(job: JobDescription) -> Iterator[Violation]:
    """Report results in a folder of the node that nothing copies before the folder is removed."""
    if not job.is_job or job.sources_files or job.submits:
        return
    for call in job.work_calls:
        if call.in_function or re.search(r"(?i)wandb|sweep|mlflow|neptune|comet", " ".join(a.text for a in call.args)):
            continue
        for arg, following in call.pairs():
            name, equals, value = arg.text.partition("=")
            if not OUTPUT.fullmatch(name):
                continue
            shown = value if equals else following.text if following else ""
            if OF_JOB.match(shown) and _is_lost(job, call, arg, following, shown):
                yield Violation(arg.offset, f"nothing copies {shown[:60]} from the node's disk")
                return
            inside = _entered(job, call) if re.match(r"(?:\./)?\w", shown) else None
            if inside and "TMPDIR" in inside[:16] and not _may_keep(job, call):
                yield Violation(
                    arg.offset, f"nothing copies {shown[:40]} from {inside[:40]}, the folder of the program"
                )
                return


def _is_lost(job: JobDescription, call: ProgramCall, arg: Argument, following: Argument | None, shown: str) -> bool:
    line = job.line_of(arg.offset)
    written = re.search(r"\$\{?([A-Za-z_]\w*)", line[max(0, line.find(arg.text.partition("=")[0])) :])
    names = {written[1]} if written else set[str]()
    names |= {a.name for a in job.assignments if any(re.search(rf"\$\{{?{n}\b", a.value) for n in names)}
    names |= {n for a in job.assignments if a.name in names for n in re.findall(r"\$\{?([A-Za-z_]\w*)", a.value)}
    parts = [rf"\$\{{?{n}\b" for n in names] + [re.escape("/".join(shown.split("/")[:3]))]
    mentions = re.compile("|".join(parts))
    for text in job.text.splitlines():
        if KEEPS.search(text) and not text.lstrip().startswith("#"):
            sources = re.split(r"\s+", text.split("#")[0].strip())[:-1]
            if any(mentions.search(word) for word in sources) or re.search(r"\btrap\b|\bfind\b", text):
                return False
    if any(
        c.offset > call.offset
        and c.program not in ("rm", "ls", "echo", "du")
        and any(mentions.search(a.text) or a.text.startswith(shown) for a in c.args)
        for c in job.calls
    ):
        return False
    entered = any(c.program in ("cd", "pushd") and any(mentions.search(a.text) for a in c.args) for c in job.calls)
    if entered and _may_keep(job, call):
        return False
    removed = any(
        c.program == "rm" and c.offset > call.offset and any(mentions.search(a.text) for a in c.args) for c in job.calls
    )
    trapped = re.search(r"(?m)^\s*trap\s+.*\brm\s+-r\w*\s+", job.text)
    return removed or bool(trapped) or "TMPDIR" in shown[:16]


AT_THE_END = {
    "echo", "printf", "date", "ls", "du", "rm", "exit", "deactivate", "conda", "seff", "sacct", "true", "wait", "sleep", "hostname", "nvidia-smi",
}  # fmt: skip


def _may_keep(job: JobDescription, call: ProgramCall) -> bool:
    """Return whether a command below a program may copy what it wrote, or a trap does."""
    later = (c for c in job.calls if c.offset > call.offset and c.starter.offset != call.starter.offset)
    return any(c.program not in AT_THE_END for c in later) or any(c.program == "trap" for c in job.calls)


def _entered(job: JobDescription, call: ProgramCall) -> str | None:
    """Return the folder of the node into which the script has changed before a program."""
    found: str | None = None
    for other in job.calls:
        if other.offset >= call.offset:
            break
        if other.program in ("cd", "pushd", "popd") and not (other.under or other.in_substitution or other.in_function):
            folder = other.args[0].text if other.args else ""
            stays = re.match(r"(?:\./)?\w", folder) is not None
            found = found if stays else folder if OF_JOB.match(folder) else None
    return found


AWAY_WHY = "The folder was made on the first node only: on the others srun cannot enter it and starts the tasks in /tmp, where there is no such program."
AWAY_CURE = "make the folder and copy the files on every node: srun --ntasks-per-node=1 --ntasks=$SLURM_NNODES"


def folder_of_first_node(job: JobDescription) -> Iterator[Violation]:
    """Report ``cd $TMPDIR`` in front of a step of several nodes."""
    if not job.is_batch or (job.nodes or 1) < 2:
        return
    entered: ProgramCall | None = None
    for call in job.calls:
        if (
            call.program in ("cd", "pushd")
            and call.args
            and not (call.under or call.in_substitution or call.in_function)
        ):
            local = LOCAL.match(call.args[0].text)
            entered = call if local else entered if call.args[0].text[:1] not in "/$~" else None
    step = next((c for c in job.work_calls if entered is not None and c.srun and c.offset > entered.offset), None)
    if entered is None or step is None or step.srun is None or (job.srun_nodes(step.srun) or 1) < 2:
        return
    program = next((a.text for a in step.args if a.text.endswith(".py")), "")
    moved = any(a.text.startswith(("--chdir", "-D")) for a in step.srun.args)
    spread = any(
        c.srun and c.offset < step.offset and c.program in ("cp", "tar", "rsync", "mkdir", *SHELLS) for c in job.calls
    )
    if program and not program.startswith(("/", "$", "~")) and not (moved or spread or "sbcast" in job.text):
        text = f"{entered.args[0].text} is a folder of the first node only"
        yield Violation(entered.offset, text, why=AWAY_WHY, cure=AWAY_CURE)


TWICE_WHY = "The shell is in that folder already, and looks for another one of this name in it: the second cd fails, and the script goes on where it is."


def entered_twice(job: JobDescription) -> Iterator[Violation]:
    """Report a relative folder that is entered twice, with no way back between."""
    inside: list[str] = []
    for call in job.calls:
        if call.in_substitution or call.under or call.in_function:
            continue
        if call.program in ("pushd", "popd", "source", ".", "eval"):
            inside = []
        if call.program != "cd":
            continue
        folder = call.args[0].text.rstrip("/").removeprefix("./") if call.args else ""
        if (
            call.branch
            or call.in_loop
            or call.subshell
            or call.before in ("||", "&&", "|")
            or call.after in ("||", "|")
        ) or not re.fullmatch(r"[A-Za-z][\w.-]*(?:/[A-Za-z][\w.-]*)*", folder):
            inside = []
        elif folder in inside:
            yield Violation(
                call.offset,
                f"cd {folder} a second time, with no cd .. between",
                why=TWICE_WHY,
                cure="remove it, or cd -",
            )
            return
        else:
            inside.append(folder)


SUBMITTED_WHY = "The folder is made on the host that submits. The job runs on another one, whose /tmp does not have it, and where its files stay."
SUBMITTED_CURE = "a folder that all hosts see ($HOME, a scratch file system); or mkdir -p in the job"
WRITES_SCRIPTS = {"echo", "printf"}


def made_where_submitted(job: JobDescription) -> Iterator[Violation]:
    """Report a folder in /tmp that a script makes, and that a job which it submits uses."""
    if job.is_job or not job.submits:
        return
    texts = [t.text for t in (*job.reading.files.values(), *job.reading.submitted)]
    texts += [
        " ".join(a.text for a in c.args)
        for c in job.calls
        if c.program in WRITES_SCRIPTS and c.redirects and not c.under
    ]
    for call in job.calls:
        if call.program == "sbatch":
            script = srun_end(call.args)
            texts.append(" ".join(a.text for a in (*call.args[:script], *call.args[script + 1 :])))
    for call in job.calls:
        if call.program != "mkdir" or call.under or call.in_substitution:
            continue
        for arg in call.args:
            folder = arg.text.rstrip("/")
            if not re.match(r"/(?:tmp|var/tmp|dev/shm)/[^/]", folder):
                continue
            users = [t for t in texts if re.search(rf"(?<![\w/]){re.escape(folder)}(?![\w-])", t)]
            if users and not any("mkdir" in t and folder in t for t in texts):
                text = f"mkdir {folder[:60]} runs where the job is submitted, and the job uses the folder on its node"
                yield Violation(call.offset, text, why=SUBMITTED_WHY, cure=SUBMITTED_CURE)
                return
