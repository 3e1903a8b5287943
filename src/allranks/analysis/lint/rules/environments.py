"""Rules for the environment of a program: conda, modules, containers, questions at a terminal, and SSH sessions."""

from __future__ import annotations

import re
from collections.abc import Iterator

import msgspec

from allranks.analysis.lint.command_options import (
    CONTAINERS,
    IMAGE,
    PYTHON,
    SHELLS,
    may_have_more_options,
    slurm_option,
    slurm_options,
)
from allranks.analysis.lint.job import JobDescription
from allranks.analysis.lint.records import Argument, ProgramCall, Severity, Violation
from allranks.analysis.lint.rules.containers import DOCKER, DOCKER_FLAG
from allranks.analysis.lint.shell_tokens import UNRESOLVED_CLOSE, UNRESOLVED_OPEN
from allranks.utils.text import lazy_regex

CONDA_WHY = "conda activate needs a function that conda's start-up code defines. A batch script does not run it, and goes on with the caller's Python."
CONDA_CURE = 'eval "$(conda shell.bash hook)" before it, or source <conda>/etc/profile.d/conda.sh, or #!/bin/bash -l'
INIT_WHY = "conda init only changes ~/.bashrc, which a batch script does not read: conda activate fails in this shell, and the caller's Python is used."
MODULE_WHY = "The module puts its own Python in front of PATH: the programs run without the packages of the activated environment."
MODULE_CURE = "load all modules first, then activate the environment"
CONTAINER_WHY = (
    "Without it the container has no driver libraries and no devices: the training stops, or runs on the CPU."
)
CONTAINER_CURE = "singularity exec --nv (NVIDIA) or --rocm (AMD); docker run --gpus all"
ORDER_WHY = "Options after the image are the command that runs in the container; there is no such program."
ORDER_CURE = "put the options before the image: singularity exec --nv image.sif python train.py"
ANSWER_WHY = "A batch job has no input: the question gets no answer, and the program stops without doing its work."
ANSWER_CURE = "add -y"
# Modules that bring conda, and those of which it is not known.
WITHOUT_CONDA = lazy_regex(
    r"(?:^|/)(?:cuda|gcc|gnu|nccl|openmpi|mpich|impi|cudnn|cmake|git|singularity|apptainer|rocm|intel|nvhpc|nvidia|java|ninja|ffmpeg|slurm|openblas|"
    r"hdf5|tensorrt|gdal|llvm|boost|eth_proxy|httpproxy|purge|cudatoolkit|cray-(?!python)\w+|craype\S*|PrgEnv-\w+|ucx|fftw|mkl|libfabric)\b|^rhel\d+/default-\w+",
    re.IGNORECASE,
)
OWN_PYTHON = lazy_regex(
    r"(?:^|/)(?:python|anaconda|miniconda|miniforge|mambaforge|pytorch|tensorflow|keras|jax|scipy|scikit|horovod)|-python-",
    re.IGNORECASE,
)
PYTHON_MODULE = lazy_regex(r"(?:\S*/)?(?:python|Python|anaconda|miniconda)[\d.]*(?:/\S*)?\Z")
FRAMEWORK = lazy_regex(r"(?:^|/)(?:pytorch|tensorflow|keras|jax|horovod)", re.IGNORECASE)
PACKAGES_ONLY = lazy_regex(
    r"scipy-stack|scipy-bundle", re.IGNORECASE
)  # add folders to PYTHONPATH, or belong to the Python that is loaded


LOGIN_SHELL = lazy_regex(r"#!\s*\S+(?:\s+\S+)*\s+-(?:\S*[li]|-login)")


def conda(job: JobDescription) -> Iterator[Violation]:
    """Report ``conda activate`` in a shell where nothing has defined it."""
    if job.is_batch and not LOGIN_SHELL.match(job.lines.line(1)):
        found = _undefined_activation(job)
        if found is not None:
            yield found


def _undefined_activation(job: JobDescription) -> Violation | None:
    """Return the first ``conda activate`` of a shell in which nothing defines conda's function."""
    calls = [c for c in job.calls if not c.in_function]
    for index, call in enumerate(calls):
        words = [a.text for a in call.args]
        if call.program not in ("conda", "mamba", "micromamba") or words[:1] != ["activate"] or call.under:
            continue
        later = [c for c in calls[index:] if c.program in ("source", ".") and any("activate" in a.text for a in c.args)]
        if later or any(defines_conda(c) for c in calls[:index]) or job.set_values_named("PATH", "/envs/"):
            return None
        initialised = any(c.program == "conda" and [a.text for a in c.args[:1]] == ["init"] for c in calls[:index])
        text = f"{call.program} activate in a shell that conda has not set up"
        # A site's own command may set it up, and so may the text around a template.
        unknown = any(_names_conda(c) for c in calls[:index]) or "{%" in job.text
        why = INIT_WHY if initialised else CONDA_WHY
        severity = "note" if unknown else None
        return Violation(call.offset, text, why=why, severity=severity, whatever_is_filled_in=True)
    return None


def _names_conda(call: ProgramCall) -> bool:
    """Return whether an unknown command is about conda: ``uenv miniconda3-py39``."""
    known = call.program in ("conda", "mamba", "micromamba", "echo", "printf", "export", "cd", "module", "ml")
    return not known and any(OWN_PYTHON.search(a.text) for a in call.args[:2])


def defines_conda(call: ProgramCall) -> bool:
    """Return whether the command may define conda's function in this shell."""
    if call.program in ("module", "ml"):
        words = [a.text for a in call.args if not a.text.startswith("-")]
        if call.program == "module":
            if words[:1] not in (["load"], ["add"], ["try-load"], ["restore"]):
                return False
            words = words[1:]
        if words[:1] in (["purge"], ["list"], ["reset"], ["unload"]):
            return False
        return not words or any(not WITHOUT_CONDA.search(w) or OWN_PYTHON.search(w) or "python" in w for w in words)
    if call.program in ("source", ".") and call.args and DEFINES_MODULES.search(call.args[0].text):
        return False
    return call.program in ("source", ".", "eval", "conda-activate")


DEFINES_MODULES = lazy_regex(r"/(?:profile\.d|init)/(?:z?\d*_?lmod|modules?)(?:\.(?:ba)?sh)?\Z|/init/(?:ba)?sh\Z")
"""Files that define the command module, and no more."""


def module_after(job: JobDescription) -> Iterator[Violation]:
    """Report a module with a Python of its own that is loaded after an environment was activated."""
    active: ProgramCall | None = None
    loaded: tuple[ProgramCall, str] | None = None
    before: set[str] = set()
    purged = False  # nothing is loaded from the session that submitted the job
    for call in job.calls:
        if call.in_function or call.in_substitution:
            continue
        purged = purged or (call.program in ("module", "ml") and any(a.text == "purge" for a in call.args))
        words = [a.text for a in call.args if not (call.program in ("module", "ml") and a.text.startswith("-"))]
        if not call.under and activates(call.program, words):
            active, loaded = call, None
        elif not call.under and (call.program == "deactivate" or words[:1] == ["deactivate"]):
            active = loaded = None
        elif active is not None and not call.under and call.program in ("module", "ml"):
            names = words[1:] if words[:1] in (["load"], ["add"]) else words if call.program == "ml" else []
            own = next(
                (n for n in names if OWN_PYTHON.search(n) and not PACKAGES_ONLY.search(n) and n not in before), None
            )
            if own and not call.instead_of(active):
                loaded = (call, own)
        elif active is None and call.program in ("module", "ml"):
            before.update(words)
        elif active is not None and loaded is not None and uses_python(call):
            line = job.lines.place(active.offset)[0]
            text = f"module {loaded[1]} is loaded after the environment was activated in line {line}"
            # A virtual environment was often made with this very module.
            replaces = active.program in ("conda", "mamba", "micromamba") and FRAMEWORK.search(loaded[1])
            same_way = active.branch == loaded[0].branch[: len(active.branch)]
            replaces = replaces or (
                purged and same_way and PYTHON.match(call.program) and PYTHON_MODULE.match(loaded[1])
            )
            yield Violation(loaded[0].offset, text, severity=None if replaces else "note")
            return


def activates(program: str, words: list[str]) -> bool:
    if program in ("conda", "mamba", "micromamba"):
        return words[:1] == ["activate"] and words[1:2] != ["base"] and len(words) > 1
    sources = program in ("source", ".") and bool(words)
    return sources and (words[0].endswith("/bin/activate") or (words[0] == "activate" and len(words) > 1))


def uses_python(call: ProgramCall) -> bool:
    if any(c.program in CONTAINERS for c in call.under) or "/" in call.written:
        return False
    return bool(PYTHON.match(call.program)) or call.program in ("torchrun", "accelerate", "deepspeed")


# ------------------------------------------------------------------------------------- containers

CONTAINERS_WITH_GPU_OPTION = {"singularity", "apptainer", "docker", "podman"}
OF_USER = lazy_regex(r"(?i)home|user|scratch|work|project|group|data|proj|lab|\$|/om/|/gpfs|/lustre|/mnt|/nfs|/tmp")
GPU_OPTION = lazy_regex(r"--(?:nv|nvccli|rocm|gpus|device|runtime|hooks-dir|nvidia)\b|-(?:e|-env)\Z")
GPU_FLAG = lazy_regex(r"--(?:nv|nvccli|rocm|gpus)(?:=.*)?")
OF_RUNTIME = lazy_regex(
    r"--(?:nv|rocm|nvccli|bind|overlay|env|env-file|pwd|no-home|cleanenv|contain|containall|home|writable-tmpfs|fakeroot)(?:=.*)?|-B"
)
AMD = lazy_regex(r"(?i)rocm|lumi\b|mi[123]\d\d|\bhip|miopen|gfx9|amd|singularity-ai|[_-]g\b")


def without_gpu(job: JobDescription) -> Iterator[Violation]:
    """Report a container without GPUs in a job that requests GPUs, and options of the runtime behind the image."""
    for call in job.work_calls:
        words = [a.text for a in call.args]
        if words[:2] in (["-m", "pip"], ["-m", "venv"]) or _with_gpu(call) or call.in_substitution:
            continue
        for outer in call.under:
            if outer.program not in CONTAINERS_WITH_GPU_OPTION:
                continue
            behind = _behind_image(outer)
            if behind:
                text = f"{behind} stands behind the image: it runs as a command in the container"
                yield Violation(outer.offset, text, why=ORDER_WHY, cure=ORDER_CURE, severity="error")
                return
            if any(GPU_FLAG.fullmatch(a.text) for c in job.calls if c.program == outer.program for a in c.args):
                continue  # another step gets the GPUs: this one works without
            if job.requests_gpus and job.gpus_per_node != 0 and _hides_gpus(job, outer):
                text = f"{outer.program} without an option for GPUs, in a job that requests them"
                # Where a site provides the image, its configuration often adds --nv.
                prepares = any(PREPARES.search(w) for w in words)
                yield Violation(outer.offset, text, severity="note" if _is_of_site(outer) or prepares else None)
                return


PREPARES = lazy_regex(
    r"(?:^|[/_-])(?:pre-?process|tokeni[sz]e|download|prepare|merge)\w*\.py\Z|(?:^|[/_])merge_\w+\.py\Z"
)


def _is_of_site(call: ProgramCall) -> bool:
    """Return whether the image lies outside of the folders of users."""
    image = next((a.text for a in call.args if IMAGE.search(a.text) or a.text.endswith(".img")), "")
    return image.startswith("/") and not OF_USER.search(image)


def _with_gpu(call: ProgramCall) -> bool:
    """Return whether --nv stands behind another option with a program, ``singularity exec -s /bin/bash --nv``."""
    return any(
        a.text in ("--nv", "--rocm") for c in call.under if c.program not in CONTAINERS_WITH_GPU_OPTION for a in c.args
    )


def _behind_image(call: ProgramCall) -> str | None:
    if call.program not in ("singularity", "apptainer"):
        return None
    words = [a.text for a in call.args]
    index = next((i for i, w in enumerate(words) if IMAGE.search(w) and not w.startswith("-")), None)
    if index is None or (index and words[index - 1] in ("--overlay", "-o", "-B", "--bind")):
        return None
    return next((w for w in words[index + 1 : index + 2] if OF_RUNTIME.fullmatch(w)), None)


def _hides_gpus(job: JobDescription, call: ProgramCall) -> bool:
    words = [a.text for a in call.args]
    if any(GPU_OPTION.match(w) for w in words) or may_have_more_options(call):
        return False
    if call.program in ("singularity", "apptainer"):
        if words[:1] not in (["exec"], ["run"]) or any(w.startswith("instance://") for w in words):
            return False
        if job.has(*(f"{name}_{kind}" for name in ("SINGULARITY", "APPTAINER") for kind in ("NV", "ROCM", "NVCCLI"))):
            return False
        return not AMD.search(job.text)
    return words[:1] == ["run"] and not AMD.search(job.text)


# --------------------------------------------------------------------------------------- questions


# conda and mamba are not among them: at the end of their input they take the default answer, which is yes.
def asks(job: JobDescription) -> Iterator[Violation]:
    """Report programs that wait for an answer at the terminal."""
    if not job.runs_unattended:
        return
    said: set[str | None] = set()  # once of each kind
    for call in job.calls:
        if (
            call.in_substitution
            or call.before in ("|", "|&")
            or any(r.operator.startswith("<") for r in call.redirects)
        ):
            continue
        what = _question(call)
        if what:
            if what[1] not in said:
                yield Violation(call.offset, what[0], cure=what[1])
            said.add(what[1])


def _question(call: ProgramCall) -> tuple[str, str | None] | None:
    words = [a.text for a in call.args]
    open_ended = any(a.source.text.startswith(UNRESOLVED_OPEN) for a in call.args)
    said_yes = (
        any(re.fullmatch(r"-\w*[yf]\w*|--yes|--assume-yes|--force|--quiet|--dry-run|--help", w) for w in words)
        or open_ended
    )
    if call.program in ("pip", "pip3") and words[:1] == ["uninstall"] and not said_yes:
        return "pip uninstall without -y asks for confirmation", None
    if call.program in ("apt", "apt-get", "dnf", "yum") and "install" in words and not said_yes:
        return f"{call.program} install without -y asks for confirmation", None
    if (
        call.program in SHELLS
        and not words
        and call.srun is not None
        and any(a.text == "--pty" for a in call.srun.args)
    ):
        return (
            "srun --pty starts a shell for a terminal, which a batch job does not have",
            "run the commands with srun bash -c '...', or use salloc",
        )
    return None


TERMINAL_TEST = lazy_regex(r"(?<![\w-])-t[ \t]+0\b")
"""A test whether there is a terminal: what follows is not meant for a batch job."""


def asks_more(job: JobDescription) -> Iterator[Violation]:
    """Report a question of accelerate, or of the script itself, in a batch job."""
    if not job.is_job:
        return
    for call in job.calls:
        words = [a.text for a in call.args]
        if (
            call.in_substitution
            or call.before in ("|", "|&")
            or call.in_function
            or any(r.operator.startswith("<") for r in call.redirects)
        ):
            continue
        if call.program == "accelerate-other" and "config" in job.line_of(call.offset).split() and not words:
            yield Violation(
                call.offset,
                "accelerate config asks its questions at the terminal",
                cure="accelerate config default, or --config_file",
            )
        elif (
            call.program == "read"
            and any(re.fullmatch(r"-\w*p\w*", w) for w in words)
            and not call.tested
            and not call.under
            and not TERMINAL_TEST.search(job.code, 0, call.offset)
        ):
            yield Violation(
                call.offset, "read -p waits for an answer, and gets an empty one", cure="an argument of the script"
            )


# ---------------------------------------------------------------------------------- conda elsewhere

INNER_WHY = "conda activate needs a function that conda's start-up code defines, and functions do not reach the shell of bash -c."
INNER_CURE = "activate it before srun, which passes the environment on; or bash -lc, or source <conda>/etc/profile.d/conda.sh in the same shell"


def conda_in_shell(job: JobDescription) -> Iterator[Violation]:
    """Report ``srun bash -c 'conda activate ...'``, whose shell has no function of that name."""
    if not job.is_job or "export -f" in job.text or "BASH_ENV" in job.text:
        return
    for number, call in enumerate(job.calls):
        if call.program not in ("conda", "mamba", "micromamba") or [a.text for a in call.args[:1]] != ["activate"]:
            continue
        shells = [c for c in call.under if c.program in SHELLS]
        if len(shells) != 1 or any(c.program not in {"srun", "mpirun", "mpiexec", *SHELLS} for c in call.under):
            continue
        flags = [a.text for a in shells[0].args]
        direct = "-c" in flags and not any(re.match(r"-\w*[li]|--login|--rcfile", f) for f in flags[:2])
        before = [c for c in job.calls[:number] if c.under == call.under]
        later = [
            c for c in job.calls[number:] if c.under == call.under and any("activate" in a.text for a in c.args[:1])
        ]
        if direct and not any(defines_conda(c) for c in before) and len(later) < 2:
            text = f"{call.program} activate in a shell of {call.under[0].written}, which conda has not set up"
            yield Violation(call.offset, text, why=INNER_WHY, cure=INNER_CURE)
            return


def conda_elsewhere(job: JobDescription) -> Iterator[Violation]:
    """Report ``conda activate`` in a script of PBS, LSF or Cobalt where nothing has defined it: `environments.conda` has those of Slurm."""
    first = job.lines.line(1)
    if job.is_batch or not job.runs_unattended or LOGIN_SHELL.match(first):
        return
    if not re.match(r"#!\S*(?:/|env\s+)(?:ba)?sh\s*$", first) or re.search(r"(?m)^#BSUB\s+-L\s", job.text):
        return
    if job.sources_files or "conda.sh" in re.sub(r"(?m)^\s*#.*$", "", job.text):
        return
    found = _undefined_activation(job)
    if found is not None:
        # PBS starts the user's login shell, whose start-up files often set up conda.
        login = re.search(r"(?m)^#PBS\s", job.text) is not None
        yield msgspec.structs.replace(found, severity="note" if login else found.severity)


ENDS_WHY = "The script runs in a shell of its own, and what it sets ends with it: the programs below run in the old environment."
ENVIRONMENT_SHELLS = {("poetry", "shell"), ("pipenv", "shell"), ("pixi", "shell"), ("hatch", "shell")}


def activated_elsewhere(job: JobDescription) -> Iterator[Violation]:
    """Report an environment that another shell activates, and a shell that waits for a terminal."""
    if not job.runs_unattended and not job.work:
        return
    for call in job.calls:
        if call.in_substitution or call.under or not any(w.offset > call.offset for w in job.work):
            continue
        words = [a.text for a in call.args]
        script = words[0] if call.program in SHELLS and words else call.written
        runs = call.program in SHELLS or "/" in call.written
        if runs and re.search(
            r"(?:\A|/)bin/activate\Z|(?:\A|/)\.(?:bashrc|bash_profile|profile)\Z|/etc/profile\.d/\S+\.sh\Z", script
        ):
            if len(words) <= (1 if call.program in SHELLS else 0):
                yield Violation(
                    call.offset, f"{script} runs in a shell of its own", why=ENDS_WHY, cure=f"source {script}"
                )
        elif call.program == "newgrp" or (
            call.program == "scl" and words[:1] == ["enable"] and words[-1] in ("bash", "sh", "-")
        ):
            text = f"{call.program} starts a shell: the lines below run after it has ended, outside of it"
            cure = (
                f"scl enable {' '.join(words[1:-1])} 'bash run.sh', or source scl_source enable ..."
                if words
                else "remove it"
            )
            yield Violation(
                call.offset, text, why=ENDS_WHY, cure=cure if call.program == "scl" else "sg <group> -c ..."
            )
        elif (call.program, words[0] if words else "") in ENVIRONMENT_SHELLS and job.runs_unattended:
            own = f"{call.program} {words[0] if words else ''}".strip()
            yield Violation(call.offset, f"{own} starts a shell: the lines below run after it has ended, outside of it", why=ENDS_WHY,
                            cure=f"{call.program} run python ..." if words else "remove it")  # fmt: skip


# --------------------------------------------------------------------------- terminals and sessions

TERMINAL_WHY = "A batch job has no terminal: docker refuses with 'the input device is not a TTY', and the job ends."
TERMINAL_CURE = "remove -t (and -i, which only keeps standard input open)"
SESSION_WHY = (
    "Without a command ssh opens a login shell, which ends at once because a batch job has no input. "
    "The commands below it run on the first node."
)
SESSION_CURE = 'ssh "$node" "mkdir ...; cp ..."; or srun --ntasks-per-node=1 mkdir ...'
ENDED_WHY = "The container's shell ends with its script, and with it what the script has set. Later commands run on the host, with its Python."
ENDED_CURE = 'put the launch into the same script: bash -c "source env.sh; torchrun ..."'
NO_COMMAND_WHY = "srun starts no task and fails; what was meant to be its command runs once, in the batch script."
NO_COMMAND_CURE = "a backslash at the end of the line, so that the next one is its command"
LONG_FLAGS = {"detach": "d", "interactive": "i", "tty": "t"}
SSH_VALUED = set("bcDEeFIiJLlmOopQRSWw")
NO_SESSION = set("NfOVGQWT")  # of ssh: tunnels, the background, control commands, queries
HOST_NAME = lazy_regex(r"host|node|server|machine|worker|client|(?:^|_)ip|addr", re.IGNORECASE)
# What a shell script can do that only changes its own shell.
SETTING_UP = {"source", ".", "conda", "mamba", "micromamba", "module", "ml", "cd", "echo", "ulimit", "set", "true", ":"}


ASKS_FOR_TERMINAL = lazy_regex(r"(?:\[|\btest)[ \t]+!?[ \t]*-t[ \t]+[012]\b")


def terminal(job: JobDescription) -> Iterator[Violation]:
    """Report ``docker run -it`` in a batch job."""
    if not job.runs_unattended:
        return
    for call in job.calls:
        if any(c.program in ("script", "unbuffer") or _has_terminal(c) for c in call.under):
            continue
        name, flags, arg = _docker_flags(call)
        if arg is None or "t" not in flags or "d" in flags or (call.branch and ASKS_FOR_TERMINAL.search(job.text)):
            continue
        refused = name in ("docker", "nvidia-docker") and "i" in flags
        severity: Severity = "error" if refused else "note"
        yield Violation(arg.offset, f"{name} {arg.text} asks for a terminal", severity=severity)


def _has_terminal(call: ProgramCall) -> bool:
    return call.program == "srun" and any(a.text == "--pty" for a in call.args)


def _docker_flags(call: ProgramCall) -> tuple[str, set[str], Argument | None]:
    """Return the program, the letters of the flags of ``docker run``, and the argument that asks for a terminal."""
    args = list(call.args)
    name = call.program
    if name not in DOCKER:  # `sudo docker run ... image torchrun` is one call of sudo
        index = next((i for i, a in enumerate(args) if a.text in DOCKER), None)
        if index is None or name not in ("sudo", "srun", "nice", "time"):
            return name, set(), None
        name, args = args[index].text, args[index + 1 :]
    if not args or args[0].text not in ("run", "exec", "container"):
        return name, set(), None
    letters: set[str] = set()
    asking: Argument | None = None
    i = 2 if args[0].text == "container" else 1
    while i < len(args) and args[i].text.startswith("-"):
        word = args[i].text
        own: set[str] = set()
        if DOCKER_FLAG.fullmatch(word):
            name_of_flag = word[2:].partition("=")[0]
            own = {LONG_FLAGS.get(name_of_flag, "")} if word.startswith("--") else set(word[1:])
            i += 1
        else:
            i += 1 if "=" in word or (not word.startswith("--") and len(word) > 2) else 2
        if "t" in own:
            asking = asking or args[i - 1]  # a flag is one word
        letters |= own
    return name, letters, asking


def ssh_session(job: JobDescription) -> Iterator[Violation]:
    """Report ``ssh HOST`` without a command, if commands follow."""
    if not job.runs_unattended:
        return
    for index, call in enumerate(job.calls):
        if call.program != "ssh" or call.in_substitution or call.before in ("|", "|&"):
            continue
        started = any(call in c.under for c in job.calls[index + 1 :])
        if started or any(r.operator.startswith("<") for r in call.redirects) or not _is_bare(job, call):
            continue
        follows = next((c for c in job.calls[index + 1 :] if not c.in_substitution and not c.under), None)
        if follows:
            line = job.lines.place(follows.offset)[0]
            text = f"ssh without a command: '{follows.written}' in line {line} does not run on the other host"
            yield Violation(call.offset, text)


def _is_bare(job: JobDescription, call: ProgramCall) -> bool:
    """Return whether the arguments are options and a host, and no command."""
    hosts: list[Argument] = []
    i = 0
    while i < len(call.args):
        word = call.args[i].text
        if word.startswith("-") and not hosts:
            if set(word[1:2]) & NO_SESSION or "RemoteCommand" in word:
                return False
            i += 2 if len(word) == 2 and word[1] in SSH_VALUED else 1
            continue
        hosts.append(call.args[i])
        i += 1
    if len(hosts) != 1:
        return False
    unknown = re.fullmatch(f"{UNRESOLVED_OPEN}(\\w+)(?:\\[.*\\])?{UNRESOLVED_CLOSE}", hosts[0].source.text)
    if unknown and not hosts[0].quoted:  # $REMOTE may hold a command, too
        return bool(HOST_NAME.search(unknown[1])) or unknown[1] in job.reading.named
    return not re.search(r"\s", hosts[0].text)


def container_ended(job: JobDescription) -> Iterator[Violation]:
    """Report a container whose shell only prepares an environment, with the work after it on the host."""
    for call in job.calls:
        if not _prepares_only(job, call):
            continue
        work = [c for c in job.work_calls if c.offset > call.offset and not c.in_function and not c.in_substitution]
        if not work or any(_in_container(c) for c in job.work_calls) or work[0].written.startswith("/"):
            continue
        outer = call.under[0] if call.under else call
        prepared = any(
            outer.offset < c.offset < work[0].offset and not c.under and c.program in SETTING_UP - {"cd", "echo"}
            for c in job.calls
        )
        own_shell = call.program not in SHELLS or not call.args  # what follows was meant to run in it
        line = job.lines.place(work[0].offset)[0]
        text = f"the container's shell ends here, and {work[0].written} in line {line} runs on the host"
        yield Violation(outer.offset, text, severity="note" if prepared and not own_shell else "warning")
        return


def _in_container(call: ProgramCall) -> bool:
    images = any(
        a.text.startswith(("--container-image", "--image", "--environment")) for c in call.under for a in c.args
    )
    return images or any(c.program in CONTAINERS for c in call.under)


def _prepares_only(job: JobDescription, call: ProgramCall) -> bool:
    if call.in_function or any(r.operator.startswith("<") for r in call.redirects) or call.before in ("|", "|&"):
        return False
    if call.program in ("singularity", "apptainer"):
        words = [a.text for a in call.args if not a.text.startswith("-")]
        return words[:1] == ["shell"] and job.runs_unattended
    if call.program not in SHELLS or not any(c.program in CONTAINERS for c in call.under):
        return False
    inner = [c for c in job.calls if call in c.under]
    alone = not call.args and job.runs_unattended and call.starter.after != "&"
    detached = any(re.match(r"-[it]*d|--detach\Z", a.text) for c in call.under for a in c.args)
    return bool(inner or alone) and not detached and all(c.program in SETTING_UP for c in inner)


ASKING = {"version", "help", "usage"}


def no_command(job: JobDescription) -> Iterator[Violation]:
    """Report an srun that has options only."""
    for index, call in enumerate(job.calls):
        if call.program != "srun" or call.in_substitution or not job.is_batch or "multi-prog" in slurm_options(call):
            continue
        if _is_shell_only(job, call):
            yield Violation(call.offset, "srun starts a shell without a script or a terminal, which ends at once")
            continue
        if any(call in c.under for c in job.calls[index + 1 :]) or call.redirects or call.before in ("|", "|&"):
            continue
        if not call.args or _has_other_words(call) or slurm_options(call).keys() & ASKING:
            continue
        follows = next((c for c in job.calls[index + 1 :] if not c.in_substitution and c.offset > call.offset), None)
        line = job.lines.place(call.args[-1].offset)[0]
        told = f": {follows.written} in the next line runs without it" if follows and _next(job, line, follows) else ""
        yield Violation(call.offset, f"srun has no command{told}")


def _is_shell_only(job: JobDescription, call: ProgramCall) -> bool:
    """Return whether srun's command is a shell without arguments and input, above work of the job."""
    inner = [c for c in job.calls if c.under and c.under[-1].offset == call.offset]
    alone = len(inner) == 1 and inner[0].program in SHELLS and not inner[0].args and not inner[0].redirects
    piped = call.before in ("|", "|&") or call.redirects or any(a.text == "--pty" for a in call.args)
    return alone and not piped and any(w.offset > inner[0].offset for w in job.work)


def _next(job: JobDescription, line: int, call: ProgramCall) -> bool:
    return job.lines.place(call.offset)[0] == line + 1


def _has_other_words(call: ProgramCall) -> bool:
    """Return whether an argument is no option nor its value, or unknown: ``srun $ARGS`` may have a command."""
    i = 0
    while i < len(call.args):
        word = call.args[i].source.text
        if not word.startswith("-"):
            return True
        i += 2 if slurm_option(call.args[i].text)[2] else 1
    return i != len(call.args)
