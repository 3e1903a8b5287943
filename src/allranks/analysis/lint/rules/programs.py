"""Rules for options that usual programs do not have, servers that never end, and shells that read a script in another way."""

from __future__ import annotations

import re
from collections.abc import Iterator

from allranks.analysis.lint.command_options import LONG, PYTHON, SHELLS
from allranks.analysis.lint.job import JobDescription, LauncherCall
from allranks.analysis.lint.records import ProgramCall, Violation
from allranks.analysis.lint.rules.environments import CONDA_WHY, INIT_WHY, defines_conda
from allranks.analysis.lint.shell_tokens import UNRESOLVED_OPEN
from allranks.utils.text import nearest_name

OPTION_WHY = "The program stops with an error about the option and does nothing; without set -e the script goes on."
NO_OPTION: dict[tuple[str, str], tuple[set[str], str]] = {
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
}
SYNONYMS = {"pip3": "pip", "mamba": "conda"}
OF_TORCHRUN = {
    "duplicate_stderr_filters", "duplicate_stdout_filters", "event_log_handler", "help", "local_addr", "local_ranks_filter", "log_dir", "logs_specs",
    "master_addr", "master_port", "max_restarts", "module", "monitor_interval", "nnodes", "no_python", "node_rank", "nproc_per_node", "numa_binding",
    "rdzv_backend", "rdzv_conf", "rdzv_endpoint", "rdzv_id", "redirects", "role", "run_path", "shutdown_timeout", "signals_to_handle", "standalone",
    "start_method", "tee", "virtual_local_rank", "use_env", "h", "m", "r", "t",
}  # fmt: skip
OF_DEEPSPEED = {
    "autotuning", "bind_core_list", "bind_cores_to_rank", "elastic_training", "enable_each_rank_log", "exclude", "force_multi", "help", "hostfile",
    "include", "launcher", "launcher_args", "log_level", "master_addr", "master_port", "max_elastic_nodes", "min_elastic_nodes", "module", "no_local_rank",
    "no_python", "no_ssh", "no_ssh_check", "node_rank", "num_accelerators", "num_gpus", "num_nodes", "quiet", "save_pid", "ssh_port", "venv_script",
    "h", "i", "e", "q", "H",
}  # fmt: skip
OF_ACCELERATE = (
    "num_processes", "num_machines", "machine_rank", "main_process_ip", "main_process_port", "mixed_precision", "config_file", "multi_gpu", "gpu_ids",
    "use_deepspeed", "deepspeed_config_file", "use_fsdp", "rdzv_backend", "same_network", "dynamo_backend", "num_cpu_threads_per_process",
)  # fmt: skip
"""The usual ones: other options of accelerate come and go."""
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
KNOWN = {"torchrun": OF_TORCHRUN, "deepspeed": OF_DEEPSPEED}


def unknown_option(job: JobDescription) -> Iterator[Violation]:
    """Report options that pip, conda and srun do not have."""
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
        known = NO_OPTION.get((program, rest[0])) if rest else None
        for arg in call.args if known else ():
            if known and arg.text in known[0] and not arg.quoted:
                yield Violation(arg.offset, f"{program} {rest[0]} has no option {arg.text}", cure=known[1])
                break


def _of_srun(call: ProgramCall) -> Iterator[Violation]:
    """Report options of srun with underscores, which only launchers accept."""
    for arg in call.args:
        name = arg.text.removeprefix("--").partition("=")[0]
        if arg.text == "--" or not arg.text.startswith("--") or UNRESOLVED_OPEN in arg.source.text[:3]:
            continue
        if "_" in name and name.replace("_", "-") in LONG:
            yield Violation(arg.offset, f"srun has no option --{name}", cure=f"--{name.replace('_', '-')}")
            return


def _of_torchrun(call: ProgramCall) -> Iterator[Violation]:
    """Report options of torchrun in front of the program that srun or mpirun starts."""
    for arg in call.args:
        name = arg.text.lstrip("-").partition("=")[0].replace("-", "_")
        if arg.text.startswith("--") and name in ONLY_TORCHRUN:
            cure = f"{call.program} ... torchrun --{name}=<n> ..."
            yield Violation(arg.offset, f"{call.program} has no option --{name}, which is one of torchrun", cure=cure)
            return


def unknown_launcher_option(job: JobDescription) -> Iterator[Violation]:
    """Report options in front of the program that torchrun and deepspeed do not have."""
    for launch in job.launches:
        known = KNOWN.get(launch.kind)
        if launch.kind == "torch.distributed.launch":
            known = OF_TORCHRUN
        if launch.kind == "accelerate" and not launch.open_ended and _names_program(launch.call):
            yield from _near_accelerate(launch)
        if known is None or launch.open_ended or launch.call.written.startswith("$") or not _names_program(launch.call):
            continue
        for name, option in launch.options.items():
            if not option.arg.text.startswith("--") or "$" in name or any(k.startswith(name) for k in known):
                continue
            near = nearest_name(name, sorted(known), 0.8)
            text = f"{launch.kind} has no option {option.arg.text.partition('=')[0]}"
            yield Violation(
                option.arg.offset, text, cure=f"--{near}" if near else "options of the program stand behind it"
            )
            break


def _near_accelerate(launch: LauncherCall) -> Iterator[Violation]:
    for name, option in launch.options.items():
        if not option.arg.text.startswith("--") or "$" in name or any(k.startswith(name) for k in OF_ACCELERATE):
            continue
        near = nearest_name(name, OF_ACCELERATE, 0.88)
        if near and not name.startswith(("fsdp_", "deepspeed_", "megatron_", "fp8_", "dynamo_", "offload_")):
            text = f"accelerate launch has no option {option.arg.text.partition('=')[0]}"
            yield Violation(option.arg.offset, text, cure=f"--{near}")
            return


def _names_program(call: ProgramCall) -> bool:
    return any(a.text.endswith(".py") or a.text == "-m" for a in call.args)


# -------------------------------------------------------------------------------------------- conda

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
    if (
        job.is_batch
        or not job.runs_unattended
        or re.match(r"#!\s*\S+(?:\s+\S+)*\s+-(?:\S*[li]|-login)", job.lines.line(1))
    ):
        return
    plain = re.match(r"#!\S*(?:/|env\s+)(?:ba)?sh\s*$", job.lines.line(1))
    if plain is None or re.search(r"(?m)^#BSUB\s+-L\s", job.text):
        return
    # PBS starts the user's login shell, whose start-up files often set up conda.
    login = re.search(r"(?m)^#PBS\s", job.text) is not None
    calls = [c for c in job.calls if not c.in_function]
    for index, call in enumerate(calls):
        words = [a.text for a in call.args]
        if call.program not in ("conda", "mamba", "micromamba") or words[:1] != ["activate"] or call.under:
            continue
        later = [c for c in calls[index:] if c.program in ("source", ".") and any("activate" in a.text for a in c.args)]
        if later or any(defines_conda(c) for c in calls[:index]) or job.set_values_named("PATH", "/envs/"):
            return
        if job.sources_files or "conda.sh" in re.sub(r"(?m)^\s*#.*$", "", job.text):
            return
        initialised = any(c.program == "conda" and [a.text for a in c.args[:1]] == ["init"] for c in calls[:index])
        text = f"{call.program} activate in a shell that conda has not set up"
        yield Violation(
            call.offset, text, why=INIT_WHY if initialised else CONDA_WHY, severity="note" if login else None
        )
        return


# ------------------------------------------------------------------------------------- other shells

ZSH_WHY = "zsh refuses a command with a pattern that matches no file ('no matches found'), and does not run it."
ZSH_SPLIT_WHY = "zsh does not split the value of a variable at blanks: the program gets all options as one argument."
ZSH_EQUALS_WHY = "zsh takes ==, as a word, for =NAME, the path of a command: '= not found'."
SH_WHY = "On Debian and Ubuntu /bin/sh is dash, which does not know it and gives no error."
ZSH = re.compile(r"#!.*\bzsh\b")
SH = re.compile(r"#!\s*(?:/usr)?/bin/(?:env\s+)?(?:sh|dash)(?:\s|$)")
PATTERN = re.compile(r"\w\[[\w,-]+\]|\w\?(?:\w|\Z)")
IN_SH: tuple[tuple[re.Pattern[str], str, str], ...] = (
    (re.compile(r"(?m)(?:^|[ \t])(?<![<>&])&>{1,2}[ \t]*[\w./$\"]"), "&> runs the command in the background, and empties the file", "> file 2>&1"),
    (re.compile(r"(?m)^[ \t]*for[ \t]+\w+[ \t]+in[ \t]+\{\d+\.\.\d+\}"), "{a..b} is a text: the loop runs once", "$(seq a b)"),
)  # fmt: skip


def other_shell(job: JobDescription) -> Iterator[Violation]:
    """Report what zsh and sh read in another way than bash does."""
    first = job.lines.line(1)
    if ZSH.match(first):
        yield from _zsh(job)
    elif SH.match(first) and not job.is_job and not job.runs_unattended and not job.placeholders:
        for use in job.uses:
            if use.name == "RANDOM" and not job.has("RANDOM") and not use.under:
                yield Violation(
                    use.offset, "$RANDOM is empty in sh: the value is always the same", why=SH_WHY, cure="#!/bin/bash"
                )
                break
        for pattern, what, cure in IN_SH:
            found = pattern.search(job.text)
            if found and not job.in_comment(found.end() - 1) and not job.in_quotes(found.end() - 1):
                yield Violation(found.end() - 1, f"{what} in sh", why=SH_WHY, cure=f"#!/bin/bash, or {cure}")


def _zsh(job: JobDescription) -> Iterator[Violation]:
    lenient = re.search(
        r"(?i)no_?nomatch|null_?glob|csh_?null|\bemulate\b|no_?glob|shwordsplit|sh_word_split", job.text
    )
    if lenient or (job.in_comment(0) and not ZSH.match(job.lines.line(1))):
        return
    said: set[str] = set()
    for call in job.calls:
        if call.in_substitution or (call.under and any(c.program in ("bash", "sh") for c in call.under)):
            continue
        if (
            call.program in ("[", "test")
            and any(a.text == "==" and not a.quoted for a in call.args)
            and "==" not in said
        ):
            said.add("==")
            yield Violation(
                call.offset,
                "[ ... == ... ] is an error in zsh",
                why=ZSH_EQUALS_WHY,
                cure="= in [ ], or [[ ... == ... ]]",
            )
        for arg in (
            call.args if call.program not in ("[", "[[", "test", "ls", "rm", "unset", "noglob", "declare") else ()
        ):
            place = arg.source.where(0)
            plain = arg.text == arg.source.text and job.text[place : place + len(arg.text)] == arg.text
            if plain and not arg.quoted and PATTERN.search(arg.text) and "[" not in said:
                said.add("[")
                text = f"{arg.text[:60]} is a pattern for names of files in zsh"
                yield Violation(place, text, why=ZSH_WHY, cure=f"'{arg.text[:60]}' in quotes")
    for use in job.uses:
        items = job.by_name.get(use.name, [])
        options = [
            a for a in items if re.match(r"\s*--?[A-Za-z][\w-]*[= ]\S+\s+--?[A-Za-z]", a.value) and a.items is None
        ]
        if use.quoted or use.operator or use.index or not options or len(options) < len(items) or use.under:
            continue
        if use.program not in ("echo", "printf", "=", "?", "eval", "export") and job.text[
            use.offset - 1 : use.offset
        ] not in ("=", "~"):
            yield Violation(
                use.offset,
                f"${use.name} is one argument in zsh",
                why=ZSH_SPLIT_WHY,
                cure=f"${{={use.name}}}, or an array",
            )
            return
