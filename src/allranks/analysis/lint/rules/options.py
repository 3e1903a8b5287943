"""Rules for options and subcommands that a launcher or another program does not have."""

from __future__ import annotations

import re
from collections.abc import Iterator

from allranks.analysis.lint.command_options import ALIASES, LONG, PYTHON
from allranks.analysis.lint.job import JobDescription, LauncherCall
from allranks.analysis.lint.records import Argument, ProgramCall, Violation
from allranks.analysis.lint.rules.variables import edits
from allranks.analysis.lint.shell_tokens import UNRESOLVED_CLOSE, UNRESOLVED_OPEN
from allranks.utils.text import lazy_regex, nearest_name

# ---------------------------------------------------------------------------------------- launchers

OPTION_WHY = "The launcher stops with 'unrecognized arguments', or the program gets the option and the launcher uses its default."
OPTION_CURE = "the launcher's own options stand before the program"
TORCHRUN_HAS = {"num_gpus": "nproc_per_node", "num_processes": "nproc_per_node", "num_machines": "nnodes", "machine_rank": "node_rank",
                "main_process_ip": "master_addr", "main_process_port": "master_port", "num_nodes": "nnodes"}  # fmt: skip
NO_OPTION = {
    "torchrun": TORCHRUN_HAS,
    "torch.distributed.launch": TORCHRUN_HAS,
    "accelerate": {"num_gpus": "num_processes", "nproc_per_node": "num_processes", "nnodes": "num_machines", "node_rank": "machine_rank",
                   "master_addr": "main_process_ip", "master_port": "main_process_port", "num_nodes": "num_machines"},
    "deepspeed": {"nproc_per_node": "num_gpus", "nnodes": "num_nodes", "num_processes": "num_gpus", "num_machines": "num_nodes"},
}  # fmt: skip


def launcher_option(job: JobDescription) -> Iterator[Violation]:
    """Report options that the launcher does not have, options behind the program, and ``torchrun python train.py``."""
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
        if program is None:
            continue
        flags = launch.options.keys() & {"no_python", "m", "module"}
        if flags - {"no_python"} and (wrong_module := _no_module(program.text)):
            yield Violation(program.offset, wrong_module, why=MODULE_WHY, cure=_module_of(program.text))
            continue
        if PYTHON.fullmatch(program.text) and not flags and not program.text.startswith("/"):
            text = f"{launch.kind} starts Python itself: here it looks for a script called {program.text}"
            yield Violation(program.offset, text, cure=f"{launch.kind} ... train.py")
            continue
        found = re.match(r"[\"']?(?:\$\(|`)", job.text[program.offset : program.offset + 3])  # $(which ...)
        wrong_program = None if flags or found else _no_script(program.text)
        if wrong_program:
            yield Violation(
                program.offset, f"{launch.kind} starts {program.text} with Python: {wrong_program}", cure=NO_SCRIPT_CURE
            )
            continue
        yield from _behind(launch, program)
    for call in job.calls:
        rest = job.text[call.offset : call.offset + 80]
        program = re.match(r"\S*accelerate[ \t]+(?:-{1,2}\w\S*[ \t]+)*[^\s-]\S*\.py\b", rest)
        options = re.match(r"\S*accelerate[ \t]+--\w", rest) and any(a.text.endswith(".py") for a in call.args)
        if call.program == "accelerate-other" and (program or options):
            yield Violation(
                call.offset, "accelerate without launch starts no program", cure="accelerate launch train.py"
            )
        as_script = re.match(r"python[\d.]*[ \t]+(?:-u[ \t]+)?(torchrun|deepspeed|accelerate)[ \t]", rest)
        if as_script and PYTHON.match(call.written):
            text = f"{call.written} looks for a file called {as_script[1]} in the current folder"
            yield Violation(call.offset, text, cure=f"{as_script[1]} ..., without {call.written}")


COUNTS = {
    "nproc_per_node", "nnodes", "node_rank", "master_port", "num_gpus", "num_nodes", "num_processes", "num_machines", "machine_rank",
    "main_process_port",
}  # fmt: skip
PRECISIONS = {"no", "fp16", "bf16", "fp8"}
NO_PRECISION = lazy_regex(
    r"(?i)b?float16|(?:fp|float)32|tf32|true|false|yes|none|full|half|bfp16|amp|16|32|[bf]p?f?16|fp8"
)
NO_NUMBER = lazy_regex(r"\$\{?HOSTNAME\b.*|\$\(hostname\b.*\)|`hostname\b.*`")


ADDRESSES = {"master_addr", "rdzv_endpoint", "rdzv_id", "main_process_ip", "config_file", "hostfile"}


def malformed(job: JobDescription) -> Iterator[Violation]:
    """Report launcher options with one dash, without their value, with a host's name as a rank, and addresses that are URLs."""
    for launch in job.launches:
        for name, option in launch.options.items():
            word, value = option.arg.text, option.value or ""
            if word.startswith("-") and not word.startswith("--") and name in OF_LAUNCHER | COUNTS:
                yield Violation(
                    option.arg.offset, f"{launch.kind} has no option {word.partition('=')[0]}", cure=f"--{name}"
                )
            elif (
                name in COUNTS | ADDRESSES
                and word.endswith("=")
                and not option.arg.source.text.endswith(UNRESOLVED_CLOSE + "=")
            ):
                if (
                    option.arg.source.text.endswith("=")
                    and job.text[option.arg.source.where(len(word) - 1) + 1 :][:1].isspace()
                ):
                    text = f"{word} has no value: {launch.kind} takes the next word for the program"
                    value_of = "<address>" if name in ADDRESSES else "<n>"
                    yield Violation(option.arg.offset, text, cure=f"{word}{value_of}, without a blank")
            elif name in ("node_rank", "machine_rank") and NO_NUMBER.fullmatch(value.strip("\"'")):
                yield Violation(
                    option.arg.offset, f"{word.partition('=')[0]} {value}: a name is no number", cure=f"--{name}=<n>"
                )
            elif name in ("node_rank", "machine_rank") and value.isdecimal():
                nodes = launch.value("nnodes", "num_machines") or ""
                if nodes.isdecimal() and int(nodes[:6]) <= int(value[:6]):
                    text = (
                        f"{word.partition('=')[0]} {value} with {nodes} node{'s' * (nodes != '1')}: ranks count from 0"
                    )
                    yield Violation(option.arg.offset, text, cure=f"0 to {int(nodes[:6]) - 1}" if nodes != "1" else "0")
            elif name == "mixed_precision" and launch.kind == "accelerate" and value.strip("\"'") not in PRECISIONS:
                if not NO_PRECISION.fullmatch(value.strip("\"'")):
                    continue
                text = f"{word.partition('=')[0]} {value}: accelerate takes no, fp16, bf16 or fp8"
                yield Violation(
                    option.arg.offset, text, cure="bf16" if "b" in value else "fp16" if "16" in value else "no"
                )
            elif name == "rdzv_endpoint" and re.match(r"[a-z]+\d*://", value.strip("\"'")):
                yield Violation(
                    option.arg.offset, f"{word.partition('=')[0]} {value} is a URL", why=URL_WHY, cure="<host>:<port>"
                )


NO_ADDRESS_WHY = (
    "ray start joins the cluster at this address; without one it stops with an error, and the node takes no part."
)


def worker_without_address(job: JobDescription) -> Iterator[Violation]:
    """Report ``ray start --address=`` with nothing behind it."""
    for call in job.calls:
        if call.program != "ray" or not call.args or call.args[0].text != "start":
            continue
        for arg, following in call.pairs():
            empty = arg.source.text == "--address="
            none = arg.source.text == "--address" and (following is None or not following.source.text)
            if (empty and not arg.quoted and _ends_word(job, arg)) or none:
                yield Violation(
                    arg.offset,
                    "--address of ray start has no value",
                    why=NO_ADDRESS_WHY,
                    cure="--address=<host>:<port>",
                )


def _ends_word(job: JobDescription, arg: Argument) -> bool:
    """Return whether the word of the file ends where its text ends, so that no empty variable follows."""
    return job.text[arg.source.where(len(arg.source.text) - 1) + 1 :][:1] in ("", "\n", " ", "\t")


URL_WHY = "torchrun wants <host>:<port>, and stops with 'the hostname of the rendezvous endpoint is invalid'."


EXCLUSIVE_WHY = "They exclude each other: the program checks this first, and stops with an error."
MODES = ("cpu", "multi_gpu", "tpu", "use_deepspeed", "use_fsdp", "use_megatron_lm", "use_xpu")
TRUE = lazy_regex(r"(?i)true|1|yes|")


def exclusive(job: JobDescription) -> Iterator[Violation]:
    """Report options of accelerate, or of the trainer behind a launcher, that exclude each other."""
    for launch in job.launches:
        modes = [launch.options[m] for m in MODES if m in launch.options and m != "multi_gpu"]
        if launch.kind == "accelerate" and len(modes) > 1 and not launch.open_ended:
            text = f"{modes[0].written} and {modes[1].written}: accelerate takes only one of them"
            yield Violation(modes[1].arg.offset, text, why=EXCLUSIVE_WHY, cure=f"remove {modes[0].written}")
    for call in job.work_calls:
        halves = [a for a in call.args if a.text.partition("=")[0] in ("--fp16", "--bf16")]
        on = [a for a in halves if _is_on(call, a)]
        names = {a.text.partition("=")[0] for a in on}
        if len(names) > 1 and not call.in_substitution:
            text = "--fp16 and --bf16: the trainer takes only one of them"
            yield Violation(on[-1].offset, text, why=EXCLUSIVE_WHY, cure="remove one")


def _is_on(call: ProgramCall, arg: Argument) -> bool:
    _, equals, value = arg.text.partition("=")
    index = call.args.index(arg)
    following = call.args[index + 1].text if index + 1 < len(call.args) else ""
    return bool(TRUE.fullmatch(value if equals else "" if following.startswith("-") else following))


NO_SCRIPT_CURE = "the Python program itself; -m for a module; --no_python for another program"
COMMANDS = {
    "torchrun",
    "accelerate",
    "deepspeed",
    "llamafactory-cli",
    "axolotl",
    "bash",
    "sh",
    "srun",
    "mpirun",
    "tune",
    "nemo",
    "composer",
    "swift",
}


def _no_script(word: str) -> str | None:
    """Return why a launcher's program is no file that Python can run."""
    if word in COMMANDS:
        return "it is a command, and no file of this name is in the current folder"
    if re.fullmatch(r"[\w./~-]+\.sh", word):
        return "it is a shell script"
    if re.fullmatch(r"\d+(?:,\d+)+", word):
        return "the value of the option in front of it ends at the blank"
    if re.fullmatch(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+", word) and not re.search(
        r"\.(?:py[cwz]?|ipynb|pex|exe)\Z", word
    ):
        return "it is a module, which needs -m"
    return None


MODULE_WHY = (
    "-m takes the name of a module, with dots. Of a file's name Python imports the first part, where __name__ is not '__main__', and ends with "
    "'No module named ...'."
)


def _no_module(word: str) -> str | None:
    """Return the finding for a file where -m wants a module."""
    if re.fullmatch(r"[\w./-]*\w\.py", word):
        return f"-m {word}: a file is no module"
    return f"-m {word}: a module's name has no /" if re.fullmatch(r"[\w.-]+(?:/[\w.-]+)+", word) else None


def _module_of(word: str) -> str:
    return "-m " + word.removeprefix("./").removesuffix(".py").replace("/", ".") + ", or the file without -m"


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


OF_LAUNCHER = {
    "nproc_per_node", "nnodes", "rdzv_backend", "rdzv_endpoint", "rdzv_id", "num_processes", "num_machines", "machine_rank", "main_process_ip",
    "main_process_port",
}  # fmt: skip


def _behind(launch: LauncherCall, program: Argument) -> Iterator[Violation]:
    if not program.text.endswith(".py") or launch.open_ended:
        return
    index = launch.call.args.index(program)
    for arg, following in list(launch.call.pairs())[index + 1 :]:
        name, equals, value = arg.text.lstrip("-").partition("=")
        name, value = name.replace("-", "_"), value if equals else following.text if following else ""
        chosen = name in ("include", "exclude") and re.match(r"(?:localhost|\w*node\w*):\d", value)
        if launch.kind == "deepspeed" and arg.text.startswith("--") and (chosen or name == "hostfile"):
            if name not in launch.options:
                text = f"{arg.text.partition('=')[0]} stands behind {program.text}: the program gets it, and deepspeed uses all GPUs of this node"
                yield Violation(arg.offset, text)
                return
        if (
            arg.text.startswith("--")
            and name in OF_LAUNCHER
            and name not in launch.options
            and not launch.option("config_file", "standalone")
        ):
            own = {
                "accelerate": {"num_processes", "num_machines", "machine_rank", "main_process_ip", "main_process_port"}
            }
            if name in own.get(launch.kind, OF_LAUNCHER - own["accelerate"]) and launch.kind != "deepspeed":
                text = f"{arg.text.partition('=')[0]} stands behind {program.text}: the program gets it, and {launch.kind} uses its default"
                yield Violation(arg.offset, text)
                return


OF_TORCHRUN = {
    "duplicate_stderr_filters", "duplicate_stdout_filters", "event_log_handler", "help", "local_addr", "local_ranks_filter", "log_dir", "logs_specs",
    "master_addr", "master_port", "max_restarts", "module", "monitor_interval", "nnodes", "no_python", "node_rank", "nproc_per_node", "numa_binding",
    "rdzv_backend", "rdzv_conf", "rdzv_endpoint", "rdzv_id", "redirects", "role", "run_path", "shutdown_timeout", "signals_to_handle", "standalone",
    "start_method", "tee", "virtual_local_rank", "h", "m", "r", "t",
}  # fmt: skip
OF_DEEPSPEED = {
    "autotuning", "bind_core_list", "bind_cores_to_rank", "elastic_training", "enable_each_rank_log", "exclude", "force_multi", "help", "hostfile",
    "include", "launcher", "launcher_args", "log_level", "master_addr", "master_port", "max_elastic_nodes", "min_elastic_nodes", "module", "no_local_rank",
    "no_python", "no_ssh", "no_ssh_check", "node_rank", "num_accelerators", "num_gpus", "num_nodes", "quiet", "save_pid", "ssh_port", "venv_script",
    "h", "i", "e", "q", "H",
}  # fmt: skip
KNOWN = {"torchrun": OF_TORCHRUN, "deepspeed": OF_DEEPSPEED}


def unknown_launcher_option(job: JobDescription) -> Iterator[Violation]:
    """Report options in front of the program that torchrun and deepspeed do not have."""
    for launch in job.launches:
        known = KNOWN.get(launch.kind)
        if launch.kind == "torch.distributed.launch":
            known = OF_TORCHRUN | {"use_env"}
        if launch.kind == "accelerate" and not launch.open_ended and _names_python_program(launch.call):
            yield from _near_accelerate(launch)
        if (
            known is None
            or launch.open_ended
            or launch.call.written.startswith("$")
            or not _names_python_program(launch.call)
        ):
            continue
        for name, option in launch.options.items():
            if not option.arg.text.startswith("--") or "$" in name or any(k.startswith(name) for k in known):
                continue
            near = nearest_name(name, sorted(known), 0.8)
            text = f"{launch.kind} has no option {option.written}"
            yield Violation(
                option.arg.offset, text, cure=f"--{near}" if near else "options of the program stand behind it"
            )
            break


def _names_python_program(call: ProgramCall) -> bool:
    return any(a.text.endswith(".py") or a.text == "-m" for a in call.args)


OF_ACCELERATE = (
    "num_processes", "num_machines", "machine_rank", "main_process_ip", "main_process_port", "mixed_precision", "config_file", "multi_gpu", "gpu_ids",
    "use_deepspeed", "deepspeed_config_file", "use_fsdp", "rdzv_backend", "same_network", "dynamo_backend", "num_cpu_threads_per_process",
)  # fmt: skip
"""The usual ones: other options of accelerate come and go."""


def _near_accelerate(launch: LauncherCall) -> Iterator[Violation]:
    for name, option in launch.options.items():
        if not option.arg.text.startswith("--") or "$" in name or name in OF_ACCELERATE:
            continue  # accelerate takes no abbreviations
        near = nearest_name(name, OF_ACCELERATE, 0.88)
        if near and not name.startswith(("fsdp_", "deepspeed_", "megatron_", "fp8_", "dynamo_", "offload_")):
            text = f"accelerate launch has no option {option.written}"
            yield Violation(option.arg.offset, text, cure=f"--{near}")
            return


# ----------------------------------------------------------------------------------- other programs

UNKNOWN_OPTION_WHY = (
    "The program stops with an error about the option and does nothing; without set -e the script goes on."
)
OF_DOCKER = {"-nv", "--gpu", "--gpus", "--gpus=all", "-it", "-v", "--volume", "--rm", "--cuda"}
NO_SUCH_OPTION: dict[tuple[str, str], tuple[set[str], str]] = {
    ("pip", "install"): (
        {"-y", "--yes", "--force", "-n", "-p", "--channel", "--name", "--gpu", "--all"},
        "pip install asks nothing",
    ),
    ("pip", "uninstall"): ({"--user", "-U", "--upgrade", "--force", "--all", "-f"}, "-y"),
    ("pip", "freeze"): ({"-y", "--yes"}, "pip freeze asks nothing"),
    ("conda", "activate"): ({"-n", "--name", "-y", "--yes", "-p", "--prefix"}, "conda activate NAME"),
    ("conda", "deactivate"): ({"-n", "--name", "-y", "--yes"}, "conda deactivate"),
    ("conda", "install"): ({"--user", "--upgrade", "-U", "-r", "--requirement"}, "conda install -y"),
    ("conda", "create"): ({"--user", "-r", "--requirement"}, "conda create -y -n NAME"),
    ("singularity", "exec"): (
        OF_DOCKER | {"-s", "--shell"},
        "--nv for GPUs, -B for folders; -s is for singularity shell only",
    ),
    ("singularity", "run"): (
        OF_DOCKER | {"-s", "--shell"},
        "--nv for GPUs, -B for folders; -s is for singularity shell only",
    ),
}
DEACTIVATE_WHY = "conda stops with 'deactivate does not accept arguments'; as the last command this makes the job a failed one, whatever its work did."
SYNONYMS = {"pip3": "pip", "mamba": "conda", "apptainer": "singularity"}


def unknown_option(job: JobDescription) -> Iterator[Violation]:
    """Report options that pip, conda, singularity and srun do not have."""
    for call in job.calls:
        words = [a.text for a in call.args]
        program, rest = call.program, words
        if PYTHON.match(program) and words[:2] in (["-m", "pip"], ["-m", "pip3"]):
            program, rest = "pip", words[2:]
        program = SYNONYMS.get(program, program)
        if program == "srun":
            yield from _of_srun(call)
        if program in ("srun", "mpirun", "mpiexec", "orterun") and any(call in c.under for c in job.calls):
            yield from _of_torchrun(call)
        if program == "conda" and rest[:1] == ["deactivate"] and re.fullmatch(r"[\w.-]*\w", " ".join(rest[1:])):
            last = call is job.calls[-1]
            yield Violation(call.offset, f"conda deactivate takes no name: {rest[1]} is refused", why=DEACTIVATE_WHY, cure="conda deactivate",
                            severity="warning" if last and not call.branch else "note")  # fmt: skip
        known = NO_SUCH_OPTION.get((program, rest[0])) if rest else None
        for index, arg in enumerate(call.args if known else ()):
            if program == "singularity" and index > 1 and _stands_behind_image(words[index - 1], arg.text):
                break
            if known and arg.text in known[0] and not arg.quoted:
                yield Violation(arg.offset, f"{program} {rest[0]} has no option {arg.text}", cure=known[1])
                break


def _stands_behind_image(before: str, word: str) -> bool:
    """Return whether a word is no value of an option in front of it, so that the container's own command follows."""
    return not word.startswith("-") and not before.startswith("-")


PER = ("cpus-per-task", "gpus-per-task", "gpus-per-node", "ntasks-per-node", "ntasks-per-gpu", "cpus-per-gpu")


def _of_srun(call: ProgramCall) -> Iterator[Violation]:
    """Report options of srun that are misspelt, or have underscores, which only launchers accept."""
    for arg in call.args:
        name = arg.text.removeprefix("--").partition("=")[0]
        if arg.text == "--" or not arg.text.startswith("--") or UNRESOLVED_OPEN in arg.source.text[:3]:
            continue
        if "_" in name and name.replace("_", "-") in LONG:
            yield Violation(arg.offset, f"srun has no option --{name}", cure=f"--{name.replace('_', '-')}")
            return
        near = [o for o in PER if edits(name, o, 1) == 1] if "-per-" in name and name not in (*LONG, *ALIASES) else []
        if near and not any(o.startswith(name) for o in LONG):
            yield Violation(arg.offset, f"srun has no option --{name}", cure=f"--{near[0]}")
            return


ONLY_TORCHRUN = {
    "nproc_per_node",
    "nnodes",
    "node_rank",
    "master_addr",
    "master_port",
    "rdzv_id",
    "rdzv_backend",
    "rdzv_endpoint",
    "num_processes",
}


def _of_torchrun(call: ProgramCall) -> Iterator[Violation]:
    """Report options of torchrun in front of the program that srun or mpirun starts."""
    if call.args and call.args[0].is_open:
        return  # it may be the program, such as an image: srun $1 --standalone
    for arg in call.args:
        name = arg.text.lstrip("-").partition("=")[0].replace("-", "_")
        if arg.text.startswith("--") and name in ONLY_TORCHRUN:
            cure = f"{call.program} ... torchrun --{name}=<n> ..."
            yield Violation(arg.offset, f"{call.program} has no option --{name}, which is one of torchrun", cure=cure)
            return


# -------------------------------------------------------------------------------------- subcommands

LAUNCH_MODULES = (
    "torch.distributed.launch",
    "torch.distributed.run",
    "accelerate.commands.launch",
    "deepspeed.launcher.runner",
)
MODULE_WORDS = {
    "load", "unload", "list", "avail", "av", "purge", "swap", "switch", "use", "unuse", "show", "display", "spider", "save", "restore", "reset",
    "add", "rm", "del", "whatis", "help", "keyword", "refresh", "update", "is-loaded", "is-avail", "try-load", "overview", "initadd", "clear", "try-add",
    "path", "paths", "append-path", "prepend-path", "savelist", "saveshow", "sh-to-mod", "load-any", "mod-to-sh", "test", "info-loaded", "search",
    "config", "aliases", "source", "key", "apropos", "getdefault", "gd", "sl", "ls", "r", "s", "switchto", "edit", "spider-all", "autoinit",
}  # fmt: skip
CONDA_WORDS = ("activate", "deactivate", "install", "create", "config")


def misspelt_subcommands(job: JobDescription) -> Iterator[Violation]:
    """Report ``module laod``, ``module cuda/11``, ``conda actviate``, ``python -m torchrun`` and launchers called by their module."""
    for call in job.calls:
        words = [a.text for a in call.args]
        if call.in_substitution or call.in_function:
            continue
        first = words[0] if words else ""
        if call.written == "module" and first and not first.startswith(("-", "$")) and first not in MODULE_WORDS:
            near = re.fullmatch(r"[a-z]{3,7}", first) and any(
                0 < edits(first, w, 2) <= (2 if w == "load" else 1) for w in ("load", "purge", "unload", "switch")
            )
            if near or (re.search(r"/\d", first) and not call.args[0].quoted):
                yield Violation(
                    call.offset,
                    f"module has no command {first}: nothing is loaded",
                    cure=f"module load {first if not near else '...'}",
                )
        elif call.written == "load" and first == "module":
            yield Violation(call.offset, "load is no command: nothing is loaded", cure="module load ...")
        elif call.written in ("conda", "mamba") and re.fullmatch(r"[a-z]{5,12}", first) and first not in CONDA_WORDS:
            meant = next((w for w in CONDA_WORDS if 0 < edits(first, w, 2) <= 2 and abs(len(first) - len(w)) < 2), None)
            if meant and first not in ("info", "inactivate"):
                yield Violation(call.offset, f"{call.written} has no command {first}", cure=f"{call.written} {meant}")
        elif re.fullmatch(r"torch\.distributed\.(?:launch|run)", call.written):
            yield Violation(
                call.offset, f"{call.written} is a module of Python, no command", cure=f"python -m {call.written}"
            )
        elif PYTHON.match(call.program) and first in LAUNCH_MODULES:
            text = f"{call.written} looks for a file called {first}: a module needs -m"
            yield Violation(call.offset, text, cure=f"{call.written} -m {first}")
        elif PYTHON.match(call.program) and "-m" in words[:3]:
            module = words[words.index("-m") + 1] if words.index("-m") + 1 < len(words) else ""
            place = words.index("-m")
            if all(re.fullmatch(r"-[a-zA-Z]+", w) for w in words[:place]) and (no_module := _no_module(module)):
                yield Violation(call.args[place].offset, no_module, why=MODULE_WHY, cure=_module_of(module))
                continue
            near = next((m for m in LAUNCH_MODULES if 0 < edits(module, m, 2) <= 2), None)
            if module in ("torch.distributed", "torch.distributed.elastic"):
                text = f"{module} is a package that Python cannot run with -m"
                yield Violation(call.offset, text, cure="python -m torch.distributed.run")
            elif module == "torchrun" or near:
                yield Violation(
                    call.offset, f"Python has no module {module}", cure=f"python -m {near or 'torch.distributed.run'}"
                )
            elif module == "accelerate" and "launch" in words:
                yield Violation(
                    call.offset,
                    "accelerate is a package that Python cannot run with -m",
                    cure="python -m accelerate.commands.launch",
                )
