"""All rules, one line each: id, severity, check, and the texts that every finding of it shares."""

from __future__ import annotations

from allranks.lint.records import Rule
from allranks.lint.rules import directives, launchers, names, network, rendezvous, shell, storage, tasks, values

ANY = ("script", "environment", "spec")
SLURM = "Slurm's sbatch and srun manuals"
TORCHRUN = "torch/distributed/run.py"
ELASTIC = "torch/distributed/elastic/rendezvous"
NCCL_DOCS = "NCCL user guide, environment variables"
BOX = "seen on a real Slurm 22.05"

RULES: tuple[Rule, ...] = (
    # Environment variables
    Rule("unknown-variable", "error", names.unknown, names.UNKNOWN_WHY, "", "the libraries' own sources and binaries", ANY),
    Rule("misspelled-variable", "warning", names.misspelled, names.UNKNOWN_WHY, "", "the strings in libnccl 2.21 and 2.32", ANY),
    Rule("deprecated-variable", "warning", names.deprecated, names.DEPRECATED_WHY, "", "release notes of the library", ANY),
    Rule("gloo-interface-syntax", "error", values.gloo_syntax, values.GLOO_WHY, values.GLOO_CURE, "torch 2.13, seen", ANY),
    Rule("invalid-value", "error", values.invalid, "The library ignores the value or refuses to start.", "", NCCL_DOCS, ANY),
    Rule("no-effect", "note", values.no_effect, values.NO_EFFECT_WHY, "remove the line", "NCCL's defaults: both are 0", ANY),
    Rule("hard-coded-interface", "warning", network.interface, network.INTERFACE_WHY, network.INTERFACE_CURE, "nccl#286, nccl#1837", ANY),
    Rule("loopback-across-nodes", "error", network.loopback, network.LOOPBACK_WHY, network.INTERFACE_CURE, NCCL_DOCS),
    Rule("transport-disabled", "warning", network.disabled, network.DISABLED_WHY, network.DISABLED_CURE, "nccl#667, nccl#1838", ANY),
    Rule("fixed-gid-index", "warning", network.gid, network.GID_WHY, "remove it, or choose it on each node", "NCCL 2.21 notes", ANY),
    # Rendezvous
    Rule("fixed-port", "warning", rendezvous.port, rendezvous.PORT_WHY, rendezvous.PORT_CURE, ELASTIC, ANY),
    Rule("ephemeral-port", "warning", rendezvous.ephemeral, rendezvous.EPHEMERAL_WHY, rendezvous.PORT_CURE, "enroot#243"),
    Rule("port-per-node", "error", rendezvous.port_per_node, rendezvous.PER_NODE_WHY, rendezvous.PORT_CURE, "LLaMA-Factory's launcher"),
    Rule("fixed-rendezvous-id", "warning", rendezvous.identity, rendezvous.ID_WHY, rendezvous.ID_CURE, ELASTIC),
    Rule("node-rank-ignored", "warning", rendezvous.node_rank, rendezvous.RANK_WHY, rendezvous.RANK_CURE, TORCHRUN + ", pytorch#150660"),
    Rule("node-rank-missing", "error", rendezvous.rank_missing, rendezvous.MISSING_WHY, rendezvous.MISSING_CURE, TORCHRUN),
    Rule("expanded-too-early", "error", rendezvous.early, rendezvous.EARLY_WHY, rendezvous.EARLY_CURE, "accelerate#2816"),
    Rule("master-address", "warning", rendezvous.address, rendezvous.ADDRESS_WHY, rendezvous.ADDRESS_CURE, "nebius-solutions-library#177"),
    Rule("address-without-host", "warning", rendezvous.hostless, rendezvous.HOSTLESS_WHY, rendezvous.HOSTLESS_CURE, ELASTIC + ", pytorch#73656"),
    Rule("scontrol-in-container", "warning", rendezvous.container, rendezvous.CONTAINER_WHY, rendezvous.ADDRESS_CURE, "mmcv#700, pith-train#91"),
    # Tasks and resources
    Rule("several-torchruns", "error", tasks.several, tasks.SEVERAL_WHY, tasks.SEVERAL_CURE, BOX),
    Rule("one-node-only", "error", tasks.one_node, tasks.ONE_NODE_WHY, tasks.ONE_NODE_CURE, SLURM),
    Rule("node-count", "error", tasks.count, tasks.COUNT_WHY, tasks.COUNT_CURE, TORCHRUN),
    Rule("fewer-tasks-than-nodes", "error", tasks.fewer, tasks.FEWER_WHY, tasks.FEWER_CURE, SLURM),
    Rule("processes-of-one-node", "warning", tasks.processes, tasks.PROCESSES_WHY, tasks.PROCESSES_CURE, "accelerate/utils/launch.py"),
    Rule("cpus-not-inherited", "warning", tasks.inherited, tasks.INHERITED_WHY, tasks.INHERITED_CURE, "release notes of Slurm 22.05, Lightning#18650"),
    Rule("cpus-missing", "warning", tasks.missing, tasks.MISSING_WHY, tasks.MISSING_CURE, SLURM),
    Rule("threads-missing", "note", tasks.threads, tasks.THREADS_WHY, tasks.THREADS_CURE, TORCHRUN),
    Rule("gpus-for-the-job", "warning", tasks.gpus_total, tasks.GPUS_WHY, "--gpus-per-node=<n>", SLURM),
    Rule("gpu-per-task", "warning", tasks.gpu_per_task, tasks.PER_TASK_WHY, tasks.PER_TASK_CURE, SLURM),
    Rule("more-ranks-than-gpus", "error", tasks.too_many, tasks.TOO_MANY_WHY, "make both the same number", TORCHRUN),
    Rule("one-failed-rest-waits", "note", tasks.kill, tasks.KILL_WHY, tasks.KILL_CURE, BOX),
    # How the job is launched and told
    Rule("needs-ssh", "error", launchers.ssh, launchers.SSH_WHY, launchers.SSH_CURE, "DeepSpeed#1603, #2958"),
    Rule("old-launcher", "warning", launchers.old, launchers.OLD_WHY, "torchrun takes the same options", TORCHRUN),
    Rule("export-comma", "error", launchers.comma, launchers.COMMA_WHY, launchers.COMMA_CURE, BOX),
    Rule("export-drops-environment", "warning", launchers.drops, launchers.DROPS_WHY, launchers.DROPS_CURE, BOX),
    Rule("login-shell", "note", launchers.login, launchers.LOGIN_WHY, "bash -c instead of bash -lc", "bash manual"),
    Rule("kills-others", "warning", launchers.pkill, launchers.PKILL_WHY, launchers.PKILL_CURE, "prime-rl's template"),
    Rule("signal-kills-torchrun", "warning", launchers.signal, launchers.SIGNAL_WHY, launchers.SIGNAL_CURE, BOX),
    Rule("signal-not-trapped", "warning", launchers.untrapped, launchers.TRAP_WHY, launchers.TRAP_CURE, "bash manual, signals; " + BOX),
    Rule("requeue-truncates-log", "warning", launchers.requeue, launchers.REQUEUE_WHY, "#SBATCH --open-mode=append", BOX),
    # Batch script
    Rule("variable-in-directive", "error", directives.variable, directives.VARIABLE_WHY, directives.VARIABLE_CURE, BOX),
    Rule("directive-too-late", "error", directives.late, directives.LATE_WHY, directives.LATE_CURE, BOX),
    Rule("directive-not-read", "warning", directives.unread, directives.UNREAD_WHY, "write it as #SBATCH at the line's beginning", BOX),
    Rule("output-folder", "warning", directives.output, directives.OUTPUT_WHY, directives.OUTPUT_CURE, BOX),
    Rule("no-shebang", "error", directives.shebang, directives.SHEBANG_WHY, "begin the file with #!/bin/bash", BOX),
    Rule("dos-line-breaks", "error", shell.line_breaks, shell.CRLF_WHY, "dos2unix FILE, or sed -i 's/\\r$//' FILE", BOX, ANY),
    Rule("exit-code-lost", "warning", shell.exit_code, shell.EXIT_WHY, shell.EXIT_CURE, "bash manual, pipelines"),
    Rule("not-exported", "error", shell.not_exported, shell.EXPORT_WHY, "export it before srun", "bash manual, environment"),
    Rule("script-folder", "warning", shell.script_folder, shell.FOLDER_WHY, shell.FOLDER_CURE, SLURM),
    Rule("set-e", "warning", shell.set_e, shell.SET_E_WHY, shell.SET_E_CURE, "bash manual, set"),
    Rule("buffered-output", "note", shell.buffered, shell.BUFFERED_WHY, "export PYTHONUNBUFFERED=1", "Python manual, -u"),
    # Files
    Rule("node-local-file", "error", storage.local, storage.LOCAL_WHY, storage.LOCAL_CURE, BOX),
    Rule("fixed-name-in-tmp", "warning", storage.fixed, storage.FIXED_WHY, 'a folder of the job: d=$(mktemp -d)', "the sticky bit of /tmp"),
    Rule("slurm-tmpdir", "warning", storage.tmpdir, storage.TMPDIR_WHY, storage.TMPDIR_CURE, BOX),
    Rule("cache-not-shared", "warning", storage.unshared, storage.UNSHARED_WHY, storage.CACHE_CURE, "huggingface_hub's defaults", ANY),
    Rule("cache-missing", "note", storage.missing, storage.CACHE_WHY, storage.CACHE_CURE, "huggingface_hub's defaults"),
    Rule("sbcast", "warning", storage.sbcast, storage.SBCAST_WHY, storage.SBCAST_CURE, BOX),
)  # fmt: skip
