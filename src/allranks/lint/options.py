"""Options of the programs that start ranks, normalised to long names without dashes."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from allranks.lint.records import Arg, Call
from allranks.lint.source import CLOSE, OPEN

SHORT = {
    "N": "nodes", "n": "ntasks", "c": "cpus-per-task", "p": "partition", "G": "gpus", "t": "time", "J": "job-name",
    "o": "output", "e": "error", "A": "account", "w": "nodelist", "x": "exclude", "D": "chdir", "C": "constraint",
    "q": "qos", "K": "kill-on-bad-exit", "l": "label", "u": "unbuffered", "W": "wait", "L": "licenses", "a": "array",
    "d": "dependency", "m": "distribution", "i": "input", "F": "nodefile", "B": "extra-node-info", "b": "begin",
    "M": "clusters", "r": "relative", "T": "threads", "v": "verbose", "Q": "quiet", "O": "overcommit",
    "s": "oversubscribe", "k": "no-kill", "E": "preserve-env", "X": "disable-status", "Z": "no-allocate",
    "I": "immediate", "H": "hold", "V": "version", "S": "core-spec", "h": "help", "Y": "reboot",
}  # fmt: skip
# Options of srun and sbatch that take no value, or only one glued on with "=".
FLAGS = {
    "exclusive", "overcommit", "oversubscribe", "label", "unbuffered", "verbose", "quiet", "pty", "immediate",
    "preserve-env", "multi-prog", "disable-status", "exact", "overlap", "contiguous", "no-kill", "kill-on-bad-exit",
    "help", "version", "usage", "spread-job", "use-min-nodes", "no-allocate", "interactive", "whole", "join",
    "resv-ports", "propagate", "quit-on-interrupt", "container-mount-home", "no-container-mount-home",
    "container-remap-root", "no-container-remap-root", "container-entrypoint", "no-container-entrypoint",
    "container-writable", "container-readonly", "send-libs", "compress", "nice", "no-requeue", "requeue", "hold",
    "parsable", "test-only", "ignore-pbs", "reboot", "get-user-env", "no-bell", "no-shell", "debugger-test",
    "external", "wait-for-children", "container-save-none",
}  # fmt: skip
VALUED = {
    "account", "gres", "gpus-per-node", "gpus-per-task", "gpus-per-socket", "cpus-per-gpu", "mem", "mem-per-cpu", "mem-per-gpu", "mail-type",
    "mail-user", "ntasks-per-node", "ntasks-per-gpu", "ntasks-per-socket", "ntasks-per-core", "signal", "open-mode", "export", "comment",
    "reservation", "switches", "tmp", "wckey", "threads-per-core", "cores-per-socket", "sockets-per-node", "hint", "gpu-bind", "gpu-freq",
    "mincpus", "profile", "prefer", "time-min", "export-file", "container", "network", "power", "priority", "bb", "bbf", "acctg-freq", "nice",
    "cpu-freq", "delay-boot", "deadline", "kill-on-invalid-dep", "thread-spec", "tres-per-task", "tres-bind", "gres-flags", "segment", "stepmgr",
    "cluster-constraint", "batch", "uid", "gid", "wait-all-nodes", "mem-bind", "wrap", "propagate", "container-image", "container-mounts",
    "container-name", "container-workdir", "container-env", "container-id", "mcs-label", "no-requeue", "oom-kill-step", "resv-ports", "consolidate-segments",
}  # fmt: skip
LONG = VALUED | FLAGS | set(SHORT.values())
ALIASES = {"tasks-per-node": "ntasks-per-node", "tasks": "ntasks"}
TORCHRUN_FLAGS = {
    "standalone", "m", "module", "no_python", "run_path", "use_env", "virtual_local_rank", "h", "help", "multi_gpu", "cpu",
    "use_deepspeed", "use_fsdp", "use_megatron_lm", "same_network", "debug", "quiet", "q", "mpi", "tpu", "use_xpu",
    "no_local_rank", "no_ssh", "force_multi", "save_pid", "bind_cores_to_rank", "use_mps_device", "downcast_bf16",
    "no_ssh_check", "use_parallelism_config", "venv_script", "tee_all",
}  # fmt: skip


class Option(msgspec.Struct, frozen=True):
    value: str | None
    arg: Arg


def slurm_option(word: str) -> tuple[str, str | None, bool]:
    """Name, value if glued on, and whether the next word is its value."""
    if word.startswith("--"):
        name, equals, value = word[2:].partition("=")
        name = _whole(name)
        return name, (value if equals else None), not equals and name not in FLAGS
    name = SHORT.get(word[1:2], word[1:2])
    rest = word[2:]
    if name in FLAGS:
        if rest and rest[0].isalpha():  # -lu: several flags in one word; the first decides
            return name, None, False
        return name, rest or None, False
    return name, (rest.removeprefix("=") or None), not rest


def _whole(name: str) -> str:
    """getopt takes any beginning that only one option has: ``--out``."""
    if name in LONG or name in ALIASES:
        return ALIASES.get(name, name)
    found = [known for known in LONG if len(name) > 2 and known.startswith(name)]
    return found[0] if len(found) == 1 else name


def srun_end(args: Sequence[Arg]) -> int:
    """Index of the first word that is the command and no option of srun."""
    i = 0
    while i < len(args):
        word = args[i].text
        if word == "--":
            return i + 1
        if not word.startswith("-") or word == "-":
            if word == ":":  # a heterogeneous step goes on with options
                i += 1
                continue
            if _unknown_options(args[i]) and i + 1 < len(args):
                i += 1
                continue
            return i
        i += 2 if slurm_option(word)[2] else 1
    return len(args)


def _unknown_options(arg: Arg) -> bool:
    """``$SRUN_ARGS`` or ``"$@"``: options whose value is not known here."""
    text = arg.source.text
    several = text in (f"{OPEN}@{CLOSE}", f"{OPEN}*{CLOSE}") or text.endswith(f"[@]{CLOSE}")
    return text.startswith(OPEN) and (several or not arg.quoted)


def slurm_options(call: Call) -> dict[str, Option]:
    """Options of an srun (or salloc, sbatch) call."""
    found: dict[str, Option] = {}
    args = call.args
    i = 0
    while i < len(args):
        word = args[i].text
        if word.startswith("-") and len(word) > 1 and word != "--":
            name, value, follows = slurm_option(word)
            if follows and i + 1 < len(args):
                value = args[i + 1].text
                found[name] = Option(value, args[i])
                i += 2
                continue
            found[name] = Option(value, args[i])
        i += 1
    return found


def launcher_options(call: Call) -> dict[str, Option]:
    """Options of torchrun, accelerate launch or deepspeed up to the script; names with underscores."""
    found: dict[str, Option] = {}
    args = call.args
    i = 0
    while i < len(args):
        word = args[i].text
        if not word.startswith("-"):
            if _unknown_options(args[i]) and i + 1 < len(args):
                i += 1  # $EXTRA_ARGS
                continue
            break
        name, equals, value = word.lstrip("-").partition("=")
        name = name.replace("-", "_")
        if not equals and name not in TORCHRUN_FLAGS and i + 1 < len(args):
            found[name] = Option(args[i + 1].text, args[i])
            i += 2
            continue
        found[name] = Option(value if equals else None, args[i])
        i += 1
    return found
