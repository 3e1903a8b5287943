"""Rules for files: shared and node-local paths, names in /tmp, deletions, caches, sbcast."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise

from allranks.analysis.lint.command_options import LAUNCHERS, PYTHON
from allranks.analysis.lint.job import JobDescription
from allranks.analysis.lint.records import Argument, ProgramCall, Severity, Violation
from allranks.analysis.lint.rules.tasks import sources_settings
from allranks.utils.text import lazy_regex

LOCAL_WHY = "/tmp is local to each node. Other nodes do not see files written there: 'can't open file', or checkpoints of one node only."
LOCAL_CURE = "use a folder that all nodes see ($HOME, a scratch file system), or copy it to every node first: sbcast, or srun --ntasks-per-node=1 cp"
FIXED_WHY = "A file of another user with this name cannot be overwritten (Permission denied), and two of your jobs on one node overwrite each other's file."
TMPDIR_WHY = "Slurm does not set SLURM_TMPDIR; only the prologs of some clusters do. Elsewhere it is empty, and $SLURM_TMPDIR/x is /x."
TMPDIR_CURE = "${SLURM_TMPDIR:-/tmp/$USER.$SLURM_JOB_ID}, created with mkdir -p on every node"
UNSHARED_WHY = "Each node downloads and prepares all data itself, or finds nothing if nodes have no internet access."
CACHE_WHY = "The default is ~/.cache/huggingface: home quotas are small, and without a shared home each node downloads the model."
CACHE_CURE = "export HF_HOME=<a folder that all nodes see>; let one rank prepare data before the others load it"
SBCAST_WHY = "sbcast copies one file: it overwrites nothing without --force, does not copy folders, and the target folder must exist."
SBCAST_CURE = "use one tar file, sbcast --force, and srun --ntasks-per-node=1 tar -xf"
LOCAL = lazy_regex(
    r"(?:file://)?(/tmp|/var/tmp|/dev/shm|/local(?:_?scratch|disk)?|/run/user)(?:/|\Z)|\$\{?(?:TMPDIR|SLURM_TMPDIR|TMP)\b"
)
FIXED_NAME = lazy_regex(r"/(?:var/)?tmp/[^$*?{]+\Z")
REMOVE_WHY = "Another job of yours on this node, or one that starts later, loses the files that it uses."
COPY_WHY = "cp omits a folder ('-r not specified; omitting directory') and goes on: results that should be saved are lost with the node's disk."
COPIES_FOLDERS = lazy_regex(r"-\w*[rRa]\w*\Z|--(?:recursive|archive)\Z")
FOLDER_NAME = lazy_regex(r"\$\{?(?:\w*_?(?:TMPDIR|DIR|FOLDER)|HOME|PWD|SCRATCH|TMP|LOCAL_SCRATCH)\}?/?", re.IGNORECASE)
PLACE = lazy_regex(r"(?:DIR|HOME|CACHE|FILE|FOLDER|PATH|ROOT)\Z")
CACHES = ("HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "TRANSFORMERS_CACHE", "HF_DATASETS_CACHE")
FOLDERS = (
    r"(?:check_?points?|ckpts?|models?|weights|data|data_?sets?|outputs?|out|saves|saved|results?|runs|logs|exp|experiments?|"
    r"pretrained\w*|scratch|src|examples?)/"
)
HUB = lazy_regex(rf"--(?:model|dataset|tokenizer|pretrained)\w*(?:[= ])(?!{FOLDERS})[A-Za-z0-9][\w.-]*/[\w.-]+\Z")
READS = {"cp", "rsync", "tar", "mkdir", "sbcast", "git", "wget", "curl", "unzip", "install", "dd", "ln", "touch"}


def _paths(arg: Argument) -> str:
    """Return the path in ``--x=/tmp/y`` or ``/tmp/y``."""
    text = arg.text
    return text.partition("=")[2] if text.startswith("-") and "=" in text else text


STAGES = lazy_regex(r"(?i)(?:stag(?:e|ing)|copy|prepare|unpack|extract|download|transfer)\w*\.(?:sh|bash|py)\b")


def _on_every_node(job: JobDescription, path: str, launch: ProgramCall) -> bool:
    """Return whether a command writes there on every node: under srun, by sbcast, or in the task's own shell."""
    folder = "/".join(path.split("/")[:3])
    for call in job.calls:
        # A program in a variable stands where its value does.
        if call.offset >= max(launch.offset, launch.starter.offset):
            continue
        spread = call.srun is not None or call.program == "sbcast"
        named = any(folder in a.text for a in call.args) or any(folder in r.target for r in call.redirects)
        if (
            spread
            and named
            and call is not launch
            and (
                call.program in READS
                or call.redirects
                or call.program in ("cat", "tee", "echo")
                or STAGES.search(" ".join([call.written, *(a.text for a in call.args[:1])]))
            )
        ):
            return True
    return False


def local(job: JobDescription) -> Iterator[Violation]:
    if not job.multi_node:
        return
    for launch in job.launches:
        if launch.srun is None and job.is_batch:
            continue
        args = launch.call.args
        for before, arg in zip(("", *(a.text for a in args)), args, strict=False):
            path = _paths(arg)
            if (
                launch.kind == "deepspeed"
                and launch.srun is None
                and (before in ("--hostfile", "-H") or arg.text.startswith("--hostfile="))
            ):
                continue  # the launcher reads its list of hosts itself, where it is started
            if LOCAL.match(path) and not _on_every_node(job, path, launch.call) and not _meant_local(before, arg.text):
                text = f"{path} is on one node only, or is a different file on each node"
                yield Violation(_where(arg), text, severity="note" if _may_be_installed(job, path) else None)


def _may_be_installed(job: JobDescription, path: str) -> bool:
    """Return whether the path is on a disk that no job empties, and the script writes nothing there: each node may have a copy."""
    folder = "/".join(path.split("/")[:3])
    written = any(folder in a.text for c in job.calls if c.program in READS for a in c.args)
    return path.startswith("/local") and not written


def _meant_local(before: str, text: str) -> bool:
    """Return whether the path may be local to a node, such as logs and caches."""
    option = text if "=" in text else before if "=" not in before else ""  # --x=1 already has its value
    return bool(re.search(r"log|cache|tmp|scratch|triton|rdzv", option.partition("=")[0].lower().strip("-")))


def _where(arg: Argument) -> int:
    found = LOCAL.search(arg.source.text)
    return arg.source.where(found.start()) if found and len(arg.source.text) else arg.offset


def fixed(job: JobDescription) -> Iterator[Violation]:
    seen: set[str] = set()
    if job.whole_nodes:
        return
    severity: Severity = "warning" if job.shared_nodes else "note"
    for call in job.calls:
        removes = call.program == "rm" and any(re.match(r"-\w*[rR]|--recursive", a.text) for a in call.args)
        for arg in call.args if removes else ():
            if re.fullmatch(r"/(?:dev/shm|tmp|var/tmp)/?\*?", arg.text):
                text = f"rm -r {arg.text} removes the files of all your jobs and tasks on the node"
                yield Violation(call.offset, text, why=REMOVE_WHY, severity=None if job.is_job else "note")
            elif FIXED_NAME.match(arg.text):
                text = f"rm -r {arg.text}: the folder has the same name in every job, so it removes files of other jobs"
                one_file = re.search(r"[^/]\.[A-Za-z]\w{1,4}\Z", arg.text) is not None
                yield Violation(call.offset, text, why=REMOVE_WHY, severity="note" if one_file else severity)
                seen.add(arg.text.rstrip("/"))
        targets = [(r.target, call.offset) for r in call.redirects if r.operator in (">", ">>", ">|", "&>")]
        launched = any(la.call is call for la in job.launches)
        targets += [(_paths(a), _where(a)) for a in call.args] if launched or call.program == "tee" else []
        for path, offset in targets:
            if FIXED_NAME.match(path) and path.rstrip("/") not in seen:
                seen.add(path)
                yield Violation(offset, f"{path} has the same name for every user and every job", severity=severity)
    for item in job.assignments:
        own = re.search(r"[-_/](?=[a-z\d]*\d)[a-z\d]{32}(?:/|\Z)", item.value)  # the hash of a build
        if item.exported and PLACE.search(item.name) and not own and re.match(r"/(?:var/)?tmp/[^$*?%]+\Z", item.value):
            text = f"{item.name}={item.value} has the same name for every user and every job"
            yield Violation(item.offset, text, severity=severity)


POSITIONAL = lazy_regex(r"\$\{?\d")


def not_copied(job: JobDescription) -> Iterator[Violation]:
    """Report ``cp`` and ``scp`` of a folder without ``-r``."""
    made = {
        _bare(a.text)
        for c in job.calls
        if c.program == "mkdir"
        for a in c.args
        if a.text and not a.text.startswith("-") and not POSITIONAL.match(a.text)  # another $1 in each function
    }
    for call in job.calls:
        words = [a.text for a in call.args]
        if call.program not in ("cp", "scp") or any(COPIES_FOLDERS.match(w) for w in words):
            continue
        for arg in [a for a in call.args if not a.text.startswith("-")][:-1]:
            named = FOLDER_NAME.fullmatch(arg.text)
            if arg.text.endswith("/") or named or _bare(arg.text) in made:
                yield Violation(call.offset, f"{call.program} of the folder {arg.text} without -r copies nothing")
                break


def _bare(path: str) -> str:
    return path.rstrip("/").removeprefix("./")


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


def unshared(job: JobDescription) -> Iterator[Violation]:
    if not job.multi_node:
        return
    for item in job.assignments:
        if item.name in CACHES and not item.removed and LOCAL.match(item.value):
            yield Violation(item.offset, f"{item.name}={item.value} is a folder local to each node")


def missing(job: JobDescription) -> Iterator[Violation]:
    if not job.multi_node or not job.launches or sources_settings(job) or job.has(*CACHES, "XDG_CACHE_HOME"):
        return
    for launch in job.launches:
        words = [a.text for a in launch.call.args]
        pairs = [*words, *(f"{a} {b}" for a, b in pairwise(words))]
        named = next((p for p in pairs if HUB.match(p)), None)
        if named or any(a.name.startswith(("HF_", "TRANSFORMERS_")) for a in job.assignments):
            what = named or "Hugging Face settings"
            yield Violation(launch.call.offset, f"no HF_HOME for a job of several nodes ({what})")
            return


def sbcast(job: JobDescription) -> Iterator[Violation]:
    for call in job.calls:
        if call.program != "sbcast":
            continue
        words = [a.text for a in call.args]
        if call.in_loop:
            yield Violation(call.offset, "sbcast in a loop: every call starts a new broadcast", severity="note")
        own = re.search(r"JOB_?ID|TMPDIR", " ".join(words))
        if not own and not any(
            w in ("-f", "--force") or re.match(r"-[a-zA-Z]*f", w)
            for w in words
            if not w.startswith("--") or w == "--force"
        ):
            yield Violation(call.offset, "sbcast without --force fails if the file already exists")
        files = [w for w in words if not w.startswith("-")]
        if len(files) >= 2 and files[-2].endswith("/"):
            yield Violation(call.offset, f"sbcast of a folder, {files[-2]}", severity="error")
        folder = files[-1].rsplit("/", 1)[0] if len(files) >= 2 and "/" in files[-1] else ""
        if folder.count("/") >= 2 and LOCAL.match(folder) and not any(
            c.program == "mkdir" and c.srun and c.offset < call.offset for c in job.calls
        ):  # fmt: skip
            yield Violation(
                call.offset,
                f"the folder {folder} may be missing on the nodes",
                cure=f"srun --ntasks-per-node=1 mkdir -p {folder}, before it",
            )


PATTERN_WHY = (
    "Only sbatch and srun replace %j, %u and %x, in the names of their own files. The shell takes them as they are: the path does not exist, "
    "or is one for all jobs."
)
PATTERN_CURE = "use the variables: $SLURM_JOB_ID for %j, $USER for %u, $SLURM_JOB_NAME for %x"
PATTERN = lazy_regex(r"(?:^|[/_.=-])(%(?:[ujxAJ](?![A-Za-z0-9{])|(?:USER|HOME|SCRATCH|WORK)\b%?))")
OWN_PATTERNS = {
    "srun", "sbatch", "salloc", "date", "printf", "stat", "find", "ps", "git", "nsys", "ncu", "awk", "sed", "perl", "grep", "wandb", "curl", "export",
    "trap", "[", "[[", "test", "jsrun", "scontrol", "squeue", "sacct", "sinfo", "echo", "logger", "mpirun", "mpiexec", "docker",
}  # fmt: skip


OF_OUTPUT = lazy_regex(
    r"--?(?:\w+[-_.])*(?:out(?:put)?|save|ckpts?|checkpoints?|results?)(?:[-_]?(?:dir|path|folder|root|file))?"
)


def unexpanded(job: JobDescription) -> Iterator[Violation]:
    """Report the patterns of sbatch's, or bsub's, file names in a path of the shell."""
    if not job.is_batch and not re.search(r"(?m)^#BSUB\s", job.text):
        return
    for call in job.calls:
        if call.in_substitution:
            continue
        written = [(r.target, call.offset) for r in call.redirects if r.operator.startswith((">", "&>"))]
        read = [] if call.program in OWN_PATTERNS else [(a.text, a.offset) for a in call.args]
        outputs = {v.offset for a, v in call.pairs() if v is not None and OF_OUTPUT.fullmatch(a.text)}
        for text, offset in [*written, *read]:
            of_file = "/" in text or (text, offset) in written or call.program in FILE_PROGRAMS
            found = PATTERN.search(text) if of_file and not re.search(r"\s", text) else None
            if found is None or "submitit" in job.text:
                continue
            by_shell = (text, offset) in written or not (PYTHON.match(call.program) or call.program in LAUNCHERS)
            by_shell = by_shell or offset in outputs or OF_OUTPUT.fullmatch(text.partition("=")[0]) is not None
            said = (
                f"is not replaced: it is a pattern of {'sbatch' if job.is_batch else 'bsub'}"
                if len(found[1]) == 2
                else "is no variable of the shell"
            )
            yield Violation(offset, f"{found[1]} in {text} {said}", severity="warning" if by_shell else "note")


TILDE_OPTION = lazy_regex(r"--?[A-Za-z][\w.-]*=~(?:/|\Z)")


def tilde_of_option(job: JobDescription) -> Iterator[Violation]:
    """Report ``--data=~/x``: the word begins with the option, so that the program gets ``~``."""
    for call in job.calls:
        if (
            not (PYTHON.match(call.program) or call.program in LAUNCHERS)
            or call.in_function
            or "zsh" in job.lines.line(1)
        ):
            continue
        arg = next((a for a in call.args if not a.quoted and TILDE_OPTION.match(a.text)), None)
        if arg is not None and not job.in_comment(arg.offset) and not any(a.text == "pip" for a in call.args[:2]):
            option = arg.text.partition("=")[0]
            text = f"~ in {arg.text[:60]} is not expanded: it does not begin the word"
            yield Violation(arg.offset, text, cure=f"{option}=$HOME/...", severity="warning")


# ------------------------------------------------------------------------------ names with a lone $

LONE_WHY = "A $ that no name follows is an ordinary character: the name is the same in every job, and the jobs overwrite each other's file."
LONE_CURE = "$$, the shell's process id; or $SLURM_JOB_ID"
LONE = lazy_regex(r"[\w.)-]\$(?:\.\w{1,10}|/.*|_.*|-.*)?\Z")
PATTERN_NAME = lazy_regex(r"(?i).*(?:regex|pattern|expr|match|filter|grep|sed|re|prompt|ps1|exclude|include)\w*")
FILE_PROGRAMS = {"mkdir", "touch", "cd", "cp", "mv", "tee", "mktemp", "ln"}


def lone_dollar(job: JobDescription) -> Iterator[Violation]:
    """Report names of files that end in, or contain, a ``$`` without a name."""
    if job.kind != "script":
        return
    said: set[int] = set()
    places: list[tuple[int, str]] = [
        (a.offset, a.value)
        for a in job.assignments
        if not (a.removed or a.items or PATTERN_NAME.fullmatch(a.name) or a.name.endswith("PORT") or a.in_substitution)
    ]
    for call in job.calls:
        if not call.in_substitution:
            places += [(call.offset, r.target) for r in call.redirects if r.operator.startswith((">", "&>"))]
            places += [(a.offset, a.text) for a in call.args if call.program in FILE_PROGRAMS]
    for offset, value in places:
        line = job.lines.place(offset)[0]
        written = job.lines.line(line)
        if (
            line in said
            or not LONE.search(value)
            or re.search(r"(?:\$\(|`)[^)`]*\b(?:sed|grep|awk|perl)\b", value)
            or re.search(r"[\s^*|\\()\[\]]", re.sub(r"\$\([^)]*\)|\$\{[^}]*\}", "", value))
        ):
            continue
        if re.search(r"[\w.)-]\$(?![\w({$@#?!*\"'-])", written) and not re.search(r"'[^'\n]*\$[^'\n]*'", written):
            said.add(line)
            yield Violation(offset, f"the $ in {value} is an ordinary character", why=LONE_WHY, cure=LONE_CURE)


# ---------------------------------------------------------------------------------------- deletions

REMOVES_WHY = (
    "rm -r does not ask, and what it removes here depends on a command or a variable that may fail or be empty."
)
EVERYTHING = lazy_regex(r"(?:\./)?\*|\.|\./|\*/|\./\*")


def deletions(job: JobDescription) -> Iterator[Violation]:
    """Report ``rm -r *`` behind a ``cd`` that may fail, and ``rm -r $NAME/*`` of a variable that nothing sets."""
    if job.kind != "script":
        return
    strict = re.search(r"(?m)^\s*set\s+-\w*e|^#!.*\s-\w*e|set\s+-o\s+errexit", job.text)
    nounset = re.search(r"(?m)^\s*set\s+-\w*u|set\s+-o\s+nounset", job.text)
    entered: ProgramCall | None = None
    for call in job.calls:
        if call.in_substitution:
            continue
        if call.program in ("cd", "pushd"):
            entered = call if call.args and call.after not in ("||", "&&") and call.args[0].text != "-" else None
        elif call.program == "rm" and any(re.match(r"-\w*[rR]|--recursive", a.text) for a in call.args):
            words = [a for a in call.args if not a.text.startswith("-")]
            everything = next((a for a in words if EVERYTHING.fullmatch(a.text)), None)
            if everything and entered and not strict and call.before != "&&":
                folder = entered.args[0].text
                text = f"rm -r {everything.text}: if 'cd {folder}' fails, it removes the files of the folder before"
                yield Violation(call.offset, text, why=REMOVES_WHY, cure=f"cd {folder} || exit 1")
                return
            for arg in words if not (nounset or job.unknown_settings or job.submits) else ():
                found = re.fullmatch(r"\$\{?([A-Za-z_]\w*)\}?/(?:\*|)", arg.text)
                if found and not _may_be_set(job, found[1]) and not call.under:
                    left = "/*" if arg.text.endswith("*") else "/"
                    text = f"rm -r {arg.text}: nothing in this script sets ${found[1]}; if it is empty, this is {left}"
                    yield Violation(arg.offset, text, why=REMOVES_WHY, cure=f"${{{found[1]}:?}}/...")
                    return


SHARED_WHY = "The tasks of the array run side by side, and all have this folder: the first one that comes here removes what the others still read and write."
OF_JOB = lazy_regex(r"(?i)JOB|TASK|ARRAY|mktemp|\$\$|TMPDIR|RANDOM|date|\$\d|\$\{\d|\*/|uuid|PID|cache|__py")


def of_other_tasks(job: JobDescription) -> Iterator[Violation]:
    """Report a task of an array that removes a folder which the other tasks use, too."""
    named = "array" in job.heading or {"SLURM_ARRAY_TASK_ID", "PBS_ARRAY_INDEX", "PBS_ARRAYID"} & job.used_names
    if not named or (job.heads("array") or "").endswith("%1") or re.fullmatch(r"\d+", job.heads("array") or ""):
        return
    for call in job.calls:
        if call.program != "rm" or call.in_substitution or call.in_function or call.branch or call.under:
            continue
        if not any(re.match(r"-\w*[rR]|--recursive", a.text) for a in call.args) or call.tested:
            continue
        for arg in call.args:
            folder = arg.text.removesuffix("/*").rstrip("/")
            if not re.fullmatch(
                r"/?(?:[\w.-]+|\$\{?(?:USER|HOME|SCRATCH|WORK)\}?)(?:/(?:[\w.-]+|\$\{?USER\}?))+", folder
            ):
                continue
            if not folder.startswith(("/", "$")) or OF_JOB.search(folder) or OF_JOB.search(job.line_of(call.offset)):
                continue
            users = [c for c in job.calls if c.program not in ("rm", "echo") and not c.in_substitution
                     and any(folder in a.text for a in c.args) and not c.branch]  # fmt: skip
            if any(c.offset < call.offset for c in users):
                text = f"rm -r {arg.text}: the other tasks of the array use this folder, too"
                yield Violation(call.offset, text, why=SHARED_WHY, cure="a folder for each: .../$SLURM_JOB_ID")
                return


NODE_LOCAL = lazy_regex(
    r"/(?:tmp|var/tmp|dev/shm|local(?:[-_]?\w+)?|l?scratch[-_]?local|lscratch|ssd\w*|nvme\d?|raid\d?|mnt/(?:ssd|nvme|local|raid)\w*)(?:/(?:[\w.-]+|\$\{?USER\}?))+"
)
SAME_NODE_WHY = "Another job of yours on the same node has the same folder: it loses its data while it reads them."


def of_other_jobs(job: JobDescription) -> Iterator[Violation]:
    """Report a job on a part of a node that removes a node-local folder of a fixed name, and fills it again."""
    if not job.is_batch or not job.shared_nodes or job.submits or "singleton" in (job.heads("dependency") or ""):
        return
    for call in job.calls:
        if call.program != "rm" or call.in_substitution or call.in_function or call.branch or call.under or call.tested:
            continue
        if not any(re.match(r"-\w*[rR]|--recursive", a.text) for a in call.args):
            continue
        for arg in call.args:
            folder = arg.text.removesuffix("/*").rstrip("/")
            if not NODE_LOCAL.fullmatch(folder) or OF_JOB.search(folder) or OF_JOB.search(job.line_of(call.offset)):
                continue
            users = [c for c in job.calls if c.program in ("tar", "cp", "rsync", "unzip", "unsquashfs", "git", "gsutil", "aws", "mkdir")
                     and any(a.text.rstrip("/").startswith(folder) for a in c.args)]  # fmt: skip
            if users and not any(re.search(rf"{re.escape(folder)}\S*\.lock|flock", job.code) for _ in users):
                text = f"rm -r {arg.text}: another job of yours on this node has the same folder"
                yield Violation(call.offset, text, why=SAME_NODE_WHY, cure="a folder for each: .../$SLURM_JOB_ID")
                return


def _may_be_set(job: JobDescription, name: str) -> bool:
    known = job.has(name) or name in job.reading.named or name in job.reading.exported
    outside = re.fullmatch(
        r"(?:HOME|TMPDIR|TMP|SCRATCH\w*|WORK\w*|PWD|SLURM_\w+|PBS_\w+|LOCAL_?SCRATCH|PFSDIR|JOBDIR|JOB_?TMP\w*|LSCRATCH|XDG_\w+)",
        name,
    )
    tested = any(u.name == name and (u.operator or u.program in ("[", "[[", "test")) for u in job.uses)
    return bool(known or outside or tested)


# ------------------------------------------------------------------------- folders without a slash

SLASH_WHY = (
    "The folder's name has no / at its end: the file is looked for beside the folder, under a name that joins both."
)
SLASH_CURE = "${DIR}/name"
JOINED_PATH = lazy_regex(
    r"(?:\$\{([A-Za-z_]\w*)\}|\$\((pwd)\))([A-Za-z][\w.-]*(?:/[\w.-]+)*\.(?:sh|py|sbatch|slurm|pbs|yaml|yml|json|toml|sif))(?![\w.-])"
)
FOLDERS_OF_JOB = {"SLURM_SUBMIT_DIR", "PBS_O_WORKDIR", "LS_SUBCWD", "PWD", "HOME"}
FOLDER_VARIABLE = lazy_regex(
    r"(?i)\w*(?:dir|directory|folder|root|home|workdir|(?:work|base|repo|code|script|project)_?path)"
)
FOLDER_VALUE = lazy_regex(
    r"(?:/|~/|\$\{?(?:HOME|PWD|SLURM_SUBMIT_DIR|PBS_O_WORKDIR|SCRATCH|WORK)\}?/?|\$\(pwd\)/?)[\w./-]*"
)


def joined_path(job: JobDescription) -> Iterator[Violation]:
    """Report a folder and a file that no slash parts, ``${WORK_DIR}train.py``."""
    if job.kind != "script":
        return
    said: set[str] = set()
    for found in JOINED_PATH.finditer(job.text):
        name, file = found[1] or found[2], found[3]
        if name in said or job.in_comment(found.start()) or job.text[max(0, found.start() - 1)] == "\\":
            continue
        values = [a.value for a in job.by_name.get(name, ())]
        if name not in FOLDERS_OF_JOB | {"pwd"}:
            folder = all(FOLDER_VALUE.fullmatch(v) and v[-1] not in "/._-" for v in values)
            if not values or not folder or name in job.reading.named or not FOLDER_VARIABLE.fullmatch(name):
                continue
        elif values:
            continue
        said.add(name)
        shown = f"$({name})" if found[2] else f"${{{name}}}"
        text = f"no / between {shown} and {file}: the folder's name does not end in one"
        yield Violation(found.start(), text, cure=f"{shown}/{file}")


# ------------------------------------------------------------------------------- paths of Windows

WINDOWS_WHY = "The shell removes unquoted backslashes, the nodes have no drives, and scp takes what stands before a colon for a host."
WINDOWS_CURE = "the path on the cluster; run scp on your own computer to fetch files"
WINDOWS_PATH = lazy_regex(r"(?:^|[=\"'])[A-Za-z]:\\[A-Za-z_.]")
FILE_COMMANDS = {"cd", "cp", "mv", "scp", "rsync", "mkdir", "ls", "cat", "source", ".", "rm", "tar", "unzip", "wget"}


def windows_path(job: JobDescription) -> Iterator[Violation]:
    """Report paths such as ``C:\\Users`` in a script of bash."""
    if job.kind != "script" or ":\\" not in job.text:
        return
    for call in job.calls:
        if not (call.program in FILE_COMMANDS or PYTHON.match(call.program)):
            continue
        for arg in call.args:
            word = re.match(r"\S*", job.text[arg.offset : arg.offset + 200])
            if word and WINDOWS_PATH.search(word[0]) and (job.runs_unattended or word[0][0] not in "\"'"):
                text = f"{word[0][:60]} is a path of Windows"
                yield Violation(arg.offset, text, why=WINDOWS_WHY, cure=WINDOWS_CURE)
