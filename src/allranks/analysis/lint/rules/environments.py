"""Rules for the software environment of a job: conda, modules, containers, and programs that ask questions."""

from __future__ import annotations

import re
from collections.abc import Iterator

from allranks.analysis.lint.command_options import PYTHON, SHELLS
from allranks.analysis.lint.job import JobDescription
from allranks.analysis.lint.records import ProgramCall, Violation
from allranks.analysis.lint.shell_tokens import UNRESOLVED_OPEN

CONDA_WHY = "conda activate needs a function that conda's start-up code defines; a batch script does not run that code, and goes on with another Python."
CONDA_CURE = 'eval "$(conda shell.bash hook)" before it, or source <conda>/etc/profile.d/conda.sh, or #!/bin/bash -l'
INIT_WHY = "conda init only changes ~/.bashrc, which a batch script does not read: conda activate fails in this shell."
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
WITHOUT_CONDA = re.compile(
    r"(?:^|/)(?:cuda|gcc|gnu|nccl|openmpi|mpich|impi|cudnn|cmake|git|singularity|apptainer|rocm|intel|nvhpc|nvidia|java|ninja|ffmpeg|slurm|openblas|"
    r"hdf5|tensorrt|gdal|llvm|boost|eth_proxy|httpproxy|purge)\b",
    re.IGNORECASE,
)
OWN_PYTHON = re.compile(
    r"(?:^|/)(?:python|anaconda|miniconda|miniforge|mambaforge|pytorch|tensorflow|keras|jax|scipy|scikit|horovod)|-python-",
    re.IGNORECASE,
)
FRAMEWORK = re.compile(r"(?:^|/)(?:pytorch|tensorflow|keras|jax|horovod)", re.IGNORECASE)
PACKAGES_ONLY = re.compile(
    r"scipy-stack|scipy-bundle", re.IGNORECASE
)  # add folders to PYTHONPATH, or belong to the Python that is loaded


def conda(job: JobDescription) -> Iterator[Violation]:
    """Report ``conda activate`` in a shell where nothing has defined it."""
    if not job.is_batch or re.match(r"#!\s*\S+(?:\s+\S+)*\s+-(?:\S*[li]|-login)", job.lines.line(1)):
        return
    calls = [c for c in job.calls if not c.in_function]
    for index, call in enumerate(calls):
        words = [a.text for a in call.args]
        if call.program not in ("conda", "mamba", "micromamba") or words[:1] != ["activate"] or call.under:
            continue
        later = [c for c in calls[index:] if c.program in ("source", ".") and any("activate" in a.text for a in c.args)]
        if later or any(defines_conda(c) for c in calls[:index]) or job.set_values_named("PATH", "/envs/"):
            return
        initialised = any(c.program == "conda" and [a.text for a in c.args[:1]] == ["init"] for c in calls[:index])
        text = f"{call.program} activate in a shell that conda has not set up"
        yield Violation(call.offset, text, why=INIT_WHY if initialised else None)
        return


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
    return call.program in ("source", ".", "eval", "conda-activate")


def module_after(job: JobDescription) -> Iterator[Violation]:
    """Report a module with a Python of its own that is loaded after an environment was activated."""
    active: ProgramCall | None = None
    loaded: tuple[ProgramCall, str] | None = None
    before: set[str] = set()
    for call in job.calls:
        if call.in_function or call.in_substitution:
            continue
        words = [a.text for a in call.args if not (call.program in ("module", "ml") and a.text.startswith("-"))]
        if not call.under and _activates(call.program, words):
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
        elif active is not None and loaded is not None and _uses_python(call):
            line = job.lines.place(active.offset)[0]
            text = f"module {loaded[1]} is loaded after the environment was activated in line {line}"
            # A virtual environment was often made with this very module.
            replaces = active.program in ("conda", "mamba", "micromamba") and FRAMEWORK.search(loaded[1])
            yield Violation(loaded[0].offset, text, severity=None if replaces else "note")
            return


def _activates(program: str, words: list[str]) -> bool:
    if program in ("conda", "mamba", "micromamba"):
        return words[:1] == ["activate"] and words[1:2] != ["base"] and len(words) > 1
    sources = program in ("source", ".") and bool(words)
    return sources and (words[0].endswith("/bin/activate") or (words[0] == "activate" and len(words) > 1))


def _uses_python(call: ProgramCall) -> bool:
    if any(c.program in CONTAINERS for c in call.under) or "/" in call.written:
        return False
    return bool(PYTHON.match(call.program)) or call.program in ("torchrun", "accelerate", "deepspeed")


# ------------------------------------------------------------------------------------- containers

CONTAINERS = {"singularity", "apptainer", "docker", "podman"}
IMAGE = re.compile(r"\.(?:sif|simg|img|sqsh)\Z|^(?:docker|library|oras|shub)://|^instance://")
OF_USER = re.compile(r"(?i)home|user|scratch|work|project|group|data|proj|lab|\$|/om/|/gpfs|/lustre|/mnt|/nfs|/tmp")
GPU_OPTION = re.compile(r"--(?:nv|nvccli|rocm|gpus|device|runtime|hooks-dir|nvidia)\b|-(?:e|-env)\Z")
OF_RUNTIME = re.compile(
    r"--(?:nv|rocm|nvccli|bind|overlay|env|env-file|pwd|no-home|cleanenv|contain|containall|home|writable-tmpfs|fakeroot)(?:=.*)?|-B"
)
AMD = re.compile(r"(?i)rocm|lumi\b|mi[123]\d\d|\bhip|miopen|gfx9|amd|singularity-ai|[_-]g\b")


def without_gpu(job: JobDescription) -> Iterator[Violation]:
    """Report a container without GPUs in a job that requests GPUs, and options of the runtime behind the image."""
    for call in job.work_calls:
        words = [a.text for a in call.args]
        if words[:2] in (["-m", "pip"], ["-m", "venv"]) or _with_gpu(call) or call.in_substitution:
            continue
        for outer in call.under:
            if outer.program not in CONTAINERS:
                continue
            behind = _behind_image(outer)
            if behind:
                text = f"{behind} stands behind the image: it runs as a command in the container"
                yield Violation(outer.offset, text, why=ORDER_WHY, cure=ORDER_CURE, severity="error")
                return
            if job.requests_gpus and _hides_gpus(job, outer):
                text = f"{outer.program} without an option for GPUs, in a job that requests them"
                # Where a site provides the image, its configuration often adds --nv.
                yield Violation(outer.offset, text, severity="note" if _is_of_site(outer) else None)
                return


def _is_of_site(call: ProgramCall) -> bool:
    """Return whether the image lies outside of the folders of users."""
    image = next((a.text for a in call.args if IMAGE.search(a.text) or a.text.endswith(".img")), "")
    return image.startswith("/") and not OF_USER.search(image)


def _with_gpu(call: ProgramCall) -> bool:
    """Return whether --nv stands behind another option with a program, ``singularity exec -s /bin/bash --nv``."""
    return any(a.text in ("--nv", "--rocm") for c in call.under if c.program not in CONTAINERS for a in c.args)


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
    if any(GPU_OPTION.match(w) for w in words) or any(a.is_open for a in call.args[:-1]):
        return False
    if call.program in ("singularity", "apptainer"):
        if words[:1] not in (["exec"], ["run"]) or any(w.startswith("instance://") for w in words):
            return False
        if job.has(
            "SINGULARITY_NV",
            "APPTAINER_NV",
            "SINGULARITY_ROCM",
            "APPTAINER_ROCM",
            "SINGULARITY_NVCCLI",
            "APPTAINER_NVCCLI",
        ):
            return False
        return not AMD.search(job.text)
    return words[:1] == ["run"] and not AMD.search(job.text)


# --------------------------------------------------------------------------------------- questions

CONDA_ASKS = {"create", "install", "update", "upgrade", "remove", "uninstall"}


def asks(job: JobDescription) -> Iterator[Violation]:
    """Report programs that wait for an answer at the terminal."""
    if not job.runs_unattended:
        return
    always = job.has("CONDA_ALWAYS_YES", "MAMBA_ALWAYS_YES") or "always_yes" in job.text
    said: set[str | None] = set()  # once of each kind
    for call in job.calls:
        if (
            call.in_substitution
            or call.before in ("|", "|&")
            or any(r.operator.startswith("<") for r in call.redirects)
        ):
            continue
        what = _question(call, always)
        if what:
            if what[1] not in said:
                yield Violation(call.offset, what[0], cure=what[1])
            said.add(what[1])


def _question(call: ProgramCall, always: bool) -> tuple[str, str | None] | None:
    words = [a.text for a in call.args]
    open_ended = any(a.source.text.startswith(UNRESOLVED_OPEN) for a in call.args)
    said_yes = (
        any(re.fullmatch(r"-\w*[yf]\w*|--yes|--assume-yes|--force|--quiet|--dry-run|--help", w) for w in words)
        or open_ended
    )
    if call.program in ("conda", "mamba") and not said_yes and not always:
        asked = words[:1] and (words[0] in CONDA_ASKS)
        if asked and not {"--json", "-d", "--clone"} & set(words):
            return f"{call.program} {words[0]} without -y asks for confirmation", None
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
