"""Launchers, what reaches the ranks, signals, containers, environments, exit codes."""

from __future__ import annotations

import re
from collections.abc import Iterator

from allranks.analysis.lint.command_options import (
    CONTAINERS,
    IMAGE,
    PYTHON,
    SHELLS,
    may_have_more_options,
    slurm_options,
)
from allranks.analysis.lint.job import JobDescription, LauncherCall
from allranks.analysis.lint.records import Argument, Edit, ProgramCall, Violation
from allranks.analysis.lint.rules import error, note, warning
from allranks.analysis.lint.shell_tokens import UNRESOLVED_OPEN
from allranks.utils.text import lazy_regex


@error(
    "background-not-awaited",
    why="The job ends when the batch script ends, and Slurm then kills all its processes.",
    cure="wait, as the last line",
    source="Slurm's sbatch and srun manuals",
    bad="srun python train.py &",
    good="srun python train.py &\nwait",
)
def background(job: JobDescription) -> Iterator[Violation]:
    work = _background_work(job)
    for outer in reversed(work):
        if not job.runs_unattended and not job.launches:
            continue  # in a terminal they go on when the script has ended
        if not job.is_batch and (not outer.in_loop or re.search(r"\b(?:nohup|setsid|tmux|screen|disown)\b", job.text)):
            continue
        if outer.after != "&" or outer.in_function or outer.in_substitution:
            continue
        later = [c for c in job.calls if c.offset > outer.offset and not c.under]
        waits = any(c.program in ("wait", "tail", "exec", "source", ".", "sleep") for c in later)
        if not (waits or _is_watched(job, outer)) and not any(w.offset > outer.offset and w.after != "&" for w in work):
            yield Violation(outer.offset, f"{outer.program} runs in the background, and the script ends without wait")
            return


def _is_watched(job: JobDescription, outer: ProgramCall) -> bool:
    """Return whether the script does not end, or keeps the process id and asks later for the process."""
    if FOREVER.search(job.code, outer.offset):
        return True
    after = job.text[outer.offset :]
    kept = re.match(r"(?:[^\n\\]|\\.|\\\n)*&[ \t]*[\n;]\s*(\w+)=\$!", after)
    return kept is not None and re.search(rf"\b(?:kill|ps|pgrep|wait)\b[^\n]*\$\{{?{kept[1]}\b", after) is not None


FOREVER = lazy_regex(
    r"(?m)^while[ \t]+(?:true|:|\[\[?[ \t]+(?:1|true)[ \t]+\]\]?|\(\([ \t]*1[ \t]*\)\)|sleep[ \t]+\S+)[ \t]*(?:;[ \t]*do\b|\n[ \t]*do\b)"
)


def _background_work(job: JobDescription) -> list[ProgramCall]:
    """Return the commands that do the job's work; calls of functions that contain it replace what they contain."""
    outside = [w for w in job.work if not w.in_function]
    if len(outside) == len(job.work) or any(c.program == "wait" and c.in_function for c in job.calls):
        return outside
    functions = set(re.findall(r"(?m)^\s*(?:function\s+)?([A-Za-z_][\w-]*)\s*\(\)", job.text))
    calls = [c for c in job.calls if not c.in_function and not c.in_substitution and c.program in functions]
    return sorted({c.offset: c for c in [*outside, *calls]}.values(), key=lambda c: c.offset)


TORCHRUN_HAS = {
    "num_gpus": "nproc_per_node", "num_processes": "nproc_per_node", "num_machines": "nnodes", "num_nodes": "nnodes",
    "machine_rank": "node_rank", "main_process_ip": "master_addr", "main_process_port": "master_port",
}  # fmt: skip
NO_OPTION = {
    "torchrun": TORCHRUN_HAS,
    "torch.distributed.launch": TORCHRUN_HAS,
    "accelerate": {
        "num_gpus": "num_processes", "nproc_per_node": "num_processes", "nnodes": "num_machines",
        "node_rank": "machine_rank", "master_addr": "main_process_ip", "master_port": "main_process_port",
        "num_nodes": "num_machines",
    },
    "deepspeed": {
        "nproc_per_node": "num_gpus", "num_processes": "num_gpus", "nnodes": "num_nodes", "num_machines": "num_nodes",
    },
}  # fmt: skip


@error(
    "launcher-option",
    why="The launcher stops with 'unrecognized arguments', or the program gets the option and the launcher uses its "
    "default.",
    cure="the launcher's own options stand before the program",
    source="torch/distributed/run.py; accelerate and deepspeed launch",
    bad="accelerate launch --nproc_per_node=2 train.py",
    good="accelerate launch --num_processes=2 train.py",
)
def launcher_option(job: JobDescription) -> Iterator[Violation]:
    for launch in job.launches:
        known = NO_OPTION.get(launch.kind)
        if known is None or launch.call.written.startswith("$"):
            continue
        wrong = next((n for n in launch.options if n in known), None)
        if wrong:
            option = launch.options[wrong]
            text = f"{launch.kind} has no option {option.written}"
            yield Violation(option.arg.offset, text, cure=f"--{known[wrong]}")
            continue
        program = _program(launch)
        if program is None or launch.options.keys() & {"no_python", "m", "module"}:
            continue
        if PYTHON.fullmatch(program.text) and not program.text.startswith("/"):
            text = f"{launch.kind} starts Python itself: here it looks for a script called {program.text}"
            yield Violation(program.offset, text, cure=f"{launch.kind} ... train.py")
        elif re.fullmatch(r"[\w./~-]+\.sh", program.text):
            text = f"{launch.kind} starts {program.text} with Python: it is a shell script"
            yield Violation(program.offset, text, cure="the Python program itself; or --no_python")
        else:
            yield from _behind(launch, program)


def _program(launch: LauncherCall) -> Argument | None:
    """Return the launcher's first word that is neither an option nor its value."""
    values = {id(o.arg) for o in launch.options.values()} | {id(o.arg) for _, o in launch.repeated}
    args, i = launch.call.args, 0
    while i < len(args):
        if id(args[i]) in values:
            name = args[i].text.lstrip("-").partition("=")[0].replace("-", "_")
            option = launch.options.get(name)
            i += 2 if option and option.value is not None and "=" not in args[i].text else 1
            continue
        return None if args[i].text.startswith("-") or UNRESOLVED_OPEN in args[i].source.text else args[i]
    return None


def _behind(launch: LauncherCall, program: Argument) -> Iterator[Violation]:
    """Report options of the launcher that stand behind the program."""
    if not program.text.endswith(".py") or launch.open_ended or launch.option("config_file", "standalone"):
        return
    for arg in launch.call.args[launch.call.args.index(program) + 1 :]:
        option = arg.text.partition("=")[0]
        name = option.lstrip("-").replace("-", "_")
        own = name in OWN_ONLY.get(launch.kind, OWN_ONLY["torchrun"])
        if arg.text.startswith("--") and own and name not in launch.options:
            text = f"{option} stands behind {program.text}: the program gets it, and {launch.kind} uses its default"
            yield Violation(arg.offset, text)
            return


OWN_ONLY = {
    "torchrun": ("nproc_per_node", "nnodes", "rdzv_backend", "rdzv_endpoint", "rdzv_id"), "deepspeed": ("hostfile",),
    "accelerate": ("num_processes", "num_machines", "machine_rank", "main_process_ip", "main_process_port"),
}  # fmt: skip
"""Options that a program hardly has itself."""
STARTERS = lazy_regex(r"\b(?:torchrun|torch\.distributed|deepspeed|accelerate launch|python[0-9.]* \S+\.py)\b")


@note(
    "needs-ssh",
    why="It starts the ranks of other nodes through SSH. Many clusters forbid SSH between compute nodes; the job then "
    "waits or asks for a key.",
    cure="srun --ntasks-per-node=1 torchrun ...; or deepspeed --no_ssh --node_rank=$SLURM_NODEID in a task's shell",
    source="DeepSpeed#1603, #2958",
    bad="deepspeed --hostfile=hosts --num_gpus=2 train.py",
    good="srun bash -c 'deepspeed --no_ssh --node_rank=$SLURM_NODEID --num_nodes=2 --num_gpus=2 "
    "--master_addr=$MASTER_ADDR train.py'",
)
def ssh(job: JobDescription) -> Iterator[Violation]:
    for launch in job.launches:
        option = launch.option("hostfile", "H", "deepspeed_hostfile")
        by = (launch.value("launcher", "deepspeed_multinode_launcher") or "pdsh").lower()
        multi = option is not None or (launch.kind == "deepspeed" and launch.value("num_nodes") not in (None, "0", "1"))
        if multi and by in ("pdsh", "ssh") and "no_ssh" not in launch.options:
            text = f"{launch.kind} with a host file starts the other nodes through pdsh and SSH"
            yield Violation(option.arg.offset if option else launch.call.offset, text)
    for call in job.calls:
        words = " ".join(a.text for a in call.args)
        started = any(call in la.call.under for la in job.launches)
        if call.program in ("ssh", "pdsh", "clush", "pssh") and (started or STARTERS.search(words)):
            yield Violation(call.offset, f"{call.program} starts the ranks of other nodes")


@note(
    "old-launcher",
    why="torch.distributed.launch is deprecated; it passes --local-rank, which programs that know only --local_rank "
    "refuse.",
    cure="use torchrun, which has the same options",
    source="torch/distributed/run.py",
    bad="python -m torch.distributed.launch --nproc_per_node=2 train.py",
    good="torchrun --nproc_per_node=2 train.py",
)
def old(job: JobDescription) -> Iterator[Violation]:
    for launch in job.launches:
        if launch.kind == "torch.distributed.launch":
            yield Violation(launch.call.offset, "torch.distributed.launch is deprecated")


def _exports(job: JobDescription) -> Iterator[tuple[int, str, ProgramCall | None]]:
    """Yield every ``--export`` value, with the srun that has it."""
    if "export" in job.heading:
        yield job.heading["export"].offset, job.heading["export"].value or "", None
    for call in job.calls:
        if call.program in ("srun", "sbatch", "salloc"):
            option = slurm_options(call).get("export")
            if option:
                yield option.arg.offset, option.value or "", call


ALWAYS_LISTS = ("NCCL_SOCKET_IFNAME", "NCCL_IB_HCA", "CUDA_VISIBLE_DEVICES", "NCCL_DEBUG_SUBSYS", "NCCL_ALGO")
INNER_COMMAND = lazy_regex(r"\$\((?:[^()]|\([^()]*\))*\)|`[^`]*`|\$\{[^}]*\}")


@error(
    "export-comma",
    why="Slurm treats every comma as the end of a value: --export=ALL,X=^lo,docker0 gives X=^lo. Quotes do not help; "
    "they become part of the value.",
    cure="export the variable in the script before srun; --export=ALL is the default and passes it on",
    source="tested with Slurm 22.05",
    bad="srun --export=ALL,NCCL_SOCKET_IFNAME=^lo,docker0 python train.py",
    good="export NCCL_SOCKET_IFNAME=^lo,docker0\nsrun python train.py",
)
def comma(job: JobDescription) -> Iterator[Violation]:
    for offset, written, _ in _exports(job):
        name, value = None, INNER_COMMAND.sub("$_", written)  # a comma in a command is none of the value
        for item in value.split(","):
            if "=" in item:
                name = item.partition("=")[0]
            elif name and item and (name in ALWAYS_LISTS or not re.fullmatch(r"[A-Z_][A-Z0-9_]*", item)):
                yield Violation(offset, f"--export: {name} is cut off at the comma before {item!r}")
                break
        else:
            if re.search(r"=[\"'].*[\"']", value):
                yield Violation(offset, "--export: the quotes become part of the value", severity="warning")


@warning(
    "export-drops-environment",
    why="The step only gets the named variables (and SLURM_*): PATH, modules, NCCL and cache settings of the script do "
    "not reach the ranks.",
    cure="omit --export, or write --export=ALL; set variables with export lines before srun",
    source="tested with Slurm 22.05",
    bad="srun --export=NCCL_DEBUG=INFO torchrun train.py",
    good="export NCCL_DEBUG=INFO\nsrun torchrun train.py",
)
def drops(job: JobDescription) -> Iterator[Violation]:
    repaired = job.has("SLURM_EXPORT_ENV") or any(a.name == "SLURM_EXPORT_ENV" for a in job.assignments)
    steps = [c for c in job.calls if c.program == "srun" and not c.in_substitution]
    own = [slurm_options(c).get("export") for c in steps]
    all_say_all = bool(own) and all(o and (o.value or "").upper().startswith("ALL") for o in own)
    for offset, value, call in _exports(job):
        if call is not None and call.program == "srun" and not any(la.srun == call for la in job.launches):
            continue
        if call is None and (repaired or all_say_all or not steps):
            continue  # without steps the batch shell has all that the script sets
        if value and not any(i.upper() == "ALL" for i in value.split(",")):
            text = f"--export={value} without ALL: the rest of the environment does not reach the ranks"
            yield Violation(offset, text, severity="note" if call is not None and call.program == "sbatch" else None)


@note(
    "login-shell",
    why="A login shell reads the profile again, which resets PATH and modules to their state after login.",
    cure="use bash -c instead of bash -lc",
    source="bash manual",
    bad="module load cuda\nsrun bash -lc 'torchrun train.py'",
    good="module load cuda\nsrun bash -c 'torchrun train.py'",
)
def login(job: JobDescription) -> Iterator[Violation]:
    prepared = [c for c in job.calls if not c.under and _prepares(c)]
    for call in job.calls:
        flags = [a.text for a in call.args[:2]]
        if call.program not in SHELLS or not call.srun or not any(re.match(r"-[a-z]*l|--login", f) for f in flags):
            continue
        if not any(la.call.offset >= call.offset and call in la.call.under for la in job.launches):
            continue
        again = any(call in c.under and _prepares(c) for c in job.calls)
        before = [c for c in prepared if c.offset < call.offset]
        if before and not again:
            after = f"after '{before[-1].written}' prepared the environment"
            yield Violation(call.offset, f"{call.program} {flags[0]} reads the profile again, {after}")


def _prepares(call: ProgramCall) -> bool:
    first = call.args[0].text if call.args else ""
    sourced = call.program in ("source", ".") and first.endswith("activate")
    return _activates_conda(call) or sourced or (call.program in ("module", "ml") and bool(first))


SIGNALS = {"10": "USR1", "12": "USR2", "2": "INT", "15": "TERM", "1": "HUP", "18": "CONT"}


def _signal(job: JobDescription) -> tuple[bool, str, int] | None:
    """Return whether it goes to the batch shell alone, the signal's name, and its position."""
    option = job.heading.get("signal")
    if option is None or not option.value:
        return None
    target, colon, rest = option.value.partition(":")
    name = (rest if colon else target).partition("@")[0].upper().removeprefix("SIG")
    return (bool(colon) and "B" in target.upper(), SIGNALS.get(name, name), option.offset)


def _traps(job: JobDescription, name: str) -> list[ProgramCall]:
    traps = ((c, [a.text.upper().removeprefix("SIG") for a in c.args[1:]]) for c in job.calls if c.program == "trap")
    return [c for c, names in traps if any(SIGNALS.get(n, n) == name for n in names)]


@warning(
    "signal-kills-torchrun",
    why="Without B: Slurm sends the signal to every process of every step. It ends torchrun (exit code 138), and its "
    "workers keep running.",
    cure="in the task's shell: trap '' USR1; exec torchrun ...; or #SBATCH --signal=B:USR1@<seconds> with a trap in "
    "the batch script",
    source="tested with Slurm 22.05",
    bad="#SBATCH --signal=USR1@120\nsrun torchrun train.py",
    good="#SBATCH --signal=USR1@120\nsrun bash -c \"trap '' USR1; exec torchrun train.py\"",
)
def signal(job: JobDescription) -> Iterator[Violation]:
    request = _signal(job)
    if request is None or request[0] or request[1] not in ("USR1", "USR2", "CONT", "ALRM"):
        return
    for launch in job.launches:
        if launch.kind != "torchrun" or request[1] in (launch.value("signals_to_handle") or ""):
            continue
        protected = any(t.under == launch.call.under and t.args and not t.args[0].text for t in _traps(job, request[1]))
        if not protected:
            yield Violation(request[2], f"--signal={request[1]} also goes to torchrun and ends it")
            return


@warning(
    "signal-not-trapped",
    why="The signal goes to the batch shell and ends it unless it has a trap; bash runs a trap only when no foreground "
    "program is running.",
    cure="trap '<command>' USR1; srun ... & wait",
    source="bash manual, signals; tested with Slurm 22.05",
    bad="#SBATCH --signal=B:USR1@120\nsrun torchrun train.py",
    good="#SBATCH --signal=B:USR1@120\ntrap 'touch stop' USR1\nsrun torchrun train.py &\nwait",
)
def untrapped(job: JobDescription) -> Iterator[Violation]:
    request = _signal(job)
    if request is None or not request[0]:
        return
    traps = [t for t in _traps(job, request[1]) if not t.under]
    outer = job.launches[-1].call.starter if job.launches else job.work[-1] if job.work else None
    replaced = any(re.match(r"\s*exec\s+\S+\s", job.line_of(c.offset)) for c in job.work)
    if not traps and not replaced and not job.sources_files:
        text = f"--signal=B:{request[1]} without a trap for {request[1]} in the script: it ends the batch shell"
        yield Violation(request[2], text)
    elif traps and outer and traps[-1].args[0].text and "exec" not in job.line_of(outer.offset).split():
        if outer.after != "&" and not outer.in_function:
            yield Violation(outer.offset, f"the trap for {request[1]} runs only after this command has ended")


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
LOGIN_SHELL = lazy_regex(r"#!\s*\S+(?:\s+\S+)*\s+-(?:\S*[li]|-login)")


@warning(
    "conda-not-set-up",
    why="conda activate needs a function that conda's start-up code defines. A batch script does not run it, and goes "
    "on with the caller's Python.",
    cure='eval "$(conda shell.bash hook)" before it, or source <conda>/etc/profile.d/conda.sh, or #!/bin/bash -l',
    source="conda documentation, activate",
    bad="conda activate train\nsrun torchrun train.py",
    good='eval "$(conda shell.bash hook)"\nconda activate train\nsrun torchrun train.py',
)
def conda(job: JobDescription) -> Iterator[Violation]:
    plain_shell = job.is_batch and not LOGIN_SHELL.match(job.lines.line(1))
    calls = [c for c in job.calls if not c.in_function and plain_shell]
    for index, call in enumerate(calls):
        if not _activates_conda(call) or call.under:
            continue
        later = any(c.program in ("source", ".") and any("activate" in a.text for a in c.args) for c in calls[index:])
        if not (later or any(defines_conda(c) for c in calls[:index]) or job.set_values_named("PATH", "/envs/")):
            # A site's own command may set it up, uenv miniconda3-py39, and so may the text around a template.
            names = (a.text for c in calls[:index] if c.program not in PLAIN for a in c.args[:2])
            own = any(OWN_PYTHON.search(name) for name in names) or "{%" in job.text
            text = f"{call.program} activate in a shell that conda has not set up"
            yield Violation(call.offset, text, severity="note" if own else None, whatever_is_filled_in=True)
        return


PLAIN = {"conda", "mamba", "micromamba", "echo", "printf", "export", "cd", "module", "ml"}


def _activates_conda(call: ProgramCall) -> bool:
    return call.program in ("conda", "mamba", "micromamba") and [a.text for a in call.args[:1]] == ["activate"]


def defines_conda(call: ProgramCall) -> bool:
    """Return whether the command may define conda's function in this shell."""
    words = [a.text for a in call.args if not a.text.startswith("-")]
    if call.program in ("module", "ml"):
        loads = call.program == "ml" or words[:1] in (["load"], ["add"], ["try-load"], ["restore"])
        names = words[call.program == "module" :]
        unknown = not names or any(not WITHOUT_CONDA.search(w) or OWN_PYTHON.search(w) or "python" in w for w in names)
        return loads and unknown and words[:1] not in (["purge"], ["list"], ["reset"], ["unload"])
    if call.program in ("source", ".") and words:  # files that define the command module, and no more
        return not re.search(
            r"/(?:profile\.d|init)/(?:z?\d*_?lmod|modules?)(?:\.(?:ba)?sh)?\Z|/init/(?:ba)?sh\Z", words[0]
        )
    return call.program in ("source", ".", "eval", "conda-activate")


@warning(
    "module-after-activation",
    why="The module puts its own Python in front of PATH: the programs run without the packages of the activated "
    "environment.",
    cure="load all modules first, then activate the environment",
    source="Lmod user guide, PATH",
    bad="source ~/conda/etc/profile.d/conda.sh\nconda activate mine\nmodule load pytorch/2.4\nsrun python train.py",
    good="source ~/conda/etc/profile.d/conda.sh\nmodule load pytorch/2.4\nconda activate mine\nsrun python train.py",
)
def module_after(job: JobDescription) -> Iterator[Violation]:
    active: ProgramCall | None = None
    loaded: tuple[ProgramCall, str] | None = None
    before: set[str] = set()
    for call in (c for c in job.calls if not c.in_function and not c.in_substitution):
        words = [a.text for a in call.args if not a.text.startswith("-")]
        sourced = call.program in ("source", ".") and bool(words) and words[0].endswith("/bin/activate")
        if not call.under and (sourced or (_activates_conda(call) and words[1:] not in ([], ["base"]))):
            active, loaded = call, None
        elif not call.under and (call.program == "deactivate" or words[:1] == ["deactivate"]):
            active = loaded = None
        elif call.program in ("module", "ml") and active is None:
            before.update(words)
        elif call.program in ("module", "ml") and active is not None and not call.under:
            names = words[1:] if words[:1] in (["load"], ["add"]) else words if call.program == "ml" else []
            new = (n for n in names if n not in before and "scipy-" not in n.lower())
            own = next((n for n in new if OWN_PYTHON.search(n)), None)
            loaded = (call, own) if own and not call.instead_of(active) else loaded
        elif active is not None and loaded is not None and _uses_python(call):
            line = job.lines.place(active.offset)[0]
            text = f"module {loaded[1]} is loaded after the environment was activated in line {line}"
            # A virtual environment was often made with this very module.
            framework = re.search(r"(?i)(?:^|/)(?:pytorch|tensorflow|keras|jax|horovod)", loaded[1])
            likely = framework and not sourced and _activates_conda(active)
            yield Violation(loaded[0].offset, text, severity=None if likely else "note")
            return


def _uses_python(call: ProgramCall) -> bool:
    inside = any(c.program in CONTAINERS for c in call.under) or "/" in call.written
    return not inside and bool(PYTHON.match(call.program) or call.program in ("torchrun", "accelerate", "deepspeed"))


CONTAINERS_WITH_GPU_OPTION = {"singularity", "apptainer", "docker", "podman"}
OF_USER = lazy_regex(r"(?i)home|user|scratch|work|project|group|data|proj|lab|\$|/om/|/gpfs|/lustre|/mnt|/nfs|/tmp")
GPU_OPTION = lazy_regex(r"--(?:nv|nvccli|rocm|gpus|device|runtime|hooks-dir|nvidia)\b|-(?:e|-env)\Z")
GPU_FLAG = lazy_regex(r"--(?:nv|nvccli|rocm|gpus)(?:=.*)?")
AMD = lazy_regex(r"(?i)rocm|lumi\b|mi[123]\d\d|\bhip|miopen|gfx9|amd|singularity-ai|[_-]g\b")


@warning(
    "container-without-gpu",
    why="Without it the container has no driver libraries and no devices: the training stops, or runs on the CPU.",
    cure="singularity exec --nv (NVIDIA) or --rocm (AMD); docker run --gpus all",
    source="apptainer guide",
    bad="srun singularity exec image.sif python train.py",
    good="srun singularity exec --nv image.sif python train.py",
)
def without_gpu(job: JobDescription) -> Iterator[Violation]:
    if not job.requests_gpus or job.gpus_per_node == 0:
        return
    for call in job.work_calls:
        words = [a.text for a in call.args]
        if words[:2] in (["-m", "pip"], ["-m", "venv"]) or call.in_substitution:
            continue
        for outer in call.under:
            if outer.program not in CONTAINERS_WITH_GPU_OPTION or not _hides_gpus(job, outer):
                continue
            related = (c for c in job.calls if c.program == outer.program or c in call.under)
            if any(GPU_FLAG.fullmatch(a.text) for c in related for a in c.args):
                # it stands elsewhere in the command; or another step gets the GPUs, and this one works without
                continue
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


@note(
    "buffered-output",
    why="Python buffers some kB of output if it does not write to a terminal; when a rank is killed, its last lines "
    "are lost.",
    cure="export PYTHONUNBUFFERED=1",
    source="Python manual, -u",
    bad="#SBATCH --ntasks-per-node=2\nsrun python train.py",
    good="#SBATCH --ntasks-per-node=2\nsrun python -u train.py",
)
def buffered(job: JobDescription) -> Iterator[Violation]:
    if job.has("PYTHONUNBUFFERED") or job.sources_files or not job.is_batch:
        return
    for call in (c for c in job.calls if PYTHON.match(c.program) and not c.module):
        words = [a.text for a in call.args]
        script = next((i for i, w in enumerate(words) if w.endswith(".py")), None)
        ranks = any(la.call is call for la in job.launches) or not (call.under or job.launches)
        if ranks and script is not None and not any(re.match(r"-[a-zA-Z]*u", w) for w in words[:script]):
            text = (
                "Python's output is buffered: no PYTHONUNBUFFERED and no -u (torchrun passes -u itself, srun does not)"
            )
            yield Violation(call.offset, text)
            return


def shell_flags(job: JobDescription) -> tuple[bool, bool]:
    """Return whether set -e, and whether pipefail, is active in the batch shell."""
    calls = [[a.text for a in c.args] for c in job.calls if c.program == "set" and not c.under]
    errexit = re.match(r"#!\S*sh\s+-\w*e", job.lines.line(1)) is not None
    errexit = errexit or any("errexit" in words or any(re.match(r"-\w*e", w) for w in words) for words in calls)
    return errexit, any("pipefail" in words for words in calls)


@warning(
    "exit-code-lost",
    why="The job's state is the exit code of its last command. A failed training is reported as COMPLETED, and "
    "dependent jobs start.",
    cure="set -eo pipefail at the top of the script",
    source="bash manual, pipelines",
    bad="set -e\ntorchrun --standalone train.py | tee train.log",
    good="set -eo pipefail\ntorchrun --standalone train.py | tee train.log",
)
def exit_code(job: JobDescription) -> Iterator[Violation]:
    errexit, pipefail = shell_flags(job)
    if pipefail or "PIPESTATUS" in job.code:
        return
    for outer in job.work:
        last = _end_of_pipe(job, outer) if outer.is_piped and not outer.in_substitution else None
        if last is None or last.program != "tee" or outer.before == "||" or (outer.in_function and not job.is_batch):
            continue
        launch = next((la for la in job.launches if la.call.starter is outer), None)
        what = launch.kind if launch and launch.kind != "python" else outer.program
        offset, lost = outer.offset, errexit or job.is_batch
        if outer.tested:
            text = f"{what} is piped: the condition is the exit code of tee, which is 0, and not that of {what}"
        elif _status_is_used(job, last):
            text = f"{what} is piped: $? below is the exit code of tee, not that of {what}"
        elif is_looked_at(job, outer) or not (lost or last.after in ("||", "&&") or outer.program == "srun"):
            continue
        else:
            text = f"{what} is piped, so its exit code is lost: a pipe returns that of its last command"
            offset = last.offset
        yield Violation(offset, text, fix=_add_pipefail(job, errexit))
        return


def _end_of_pipe(job: JobDescription, outer: ProgramCall) -> ProgramCall | None:
    """Return the last command of the pipe that begins with this command."""
    later = iter(job.calls[job.calls.index(outer) + 1 :])
    own = (c for c in later if not c.under and not c.in_substitution)
    return next((c for c in own if c.before in ("|", "|&") and not c.is_piped), None)


def _status_is_used(job: JobDescription, last: ProgramCall) -> bool:
    """Return whether the next command uses the ``$?`` of a pipe that ends with `last`."""
    own = [c for c in job.calls if c.offset > last.offset and not c.under and not c.in_substitution]
    following = own[0] if own else None
    end = following.offset if following else len(job.text)
    kept = any(last.offset < a.offset < end and a.value == "$?" and not a.under for a in job.assignments)
    used = following is not None and any("$?" in a.text for a in following.args)
    apart = following is not None and (following.in_function != last.in_function or following.written == "trap")
    return (kept or used) and not apart and last.after in ("\n", ";")


def _add_pipefail(job: JobDescription, errexit: bool) -> tuple[Edit, ...]:
    """Return the edit that adds ``set -o pipefail`` above the first command; none if it could end the script early."""
    if errexit or not re.match(r"#!\S*(?:/|env\s+)(?:ba|k|z)sh\b", job.lines.line(1)):
        return ()
    first = min((c.offset for c in [*job.calls, *job.assignments]), default=None)
    if first is None:
        return ()
    start = first - job.lines.place(first)[1] + 1
    if job.text[start - 2 : start - 1] == "\\" or job.lines.place(first)[0] == 1:
        return ()
    newline = "\r\n" if "\r\n" in job.text else "\n"
    return (Edit(start, start, f"set -o pipefail{newline}"),)


def is_looked_at(job: JobDescription, outer: ProgramCall) -> bool:
    """Return whether the exit code is checked after the call."""
    rest = job.code[outer.offset :]
    trapped = re.search(r"trap\s.*\b(?:ERR|EXIT)\b", job.code)
    return bool(trapped or re.search(r"\$\?|PIPESTATUS|\btrap\b.*\bE(?:RR|XIT)\b", rest))
