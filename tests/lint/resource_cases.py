"""Cases about log folders, waits for launchers, and resources: the rule, the script, the line, the severity; line 0 for none."""

from __future__ import annotations

from tests.lint.cases import TWO

LOGS = "#!/bin/bash\n#SBATCH --output=logs/%j.out\n"
FOLDERS: list[tuple[str, str, int, str]] = [
    ("output-folder", LOGS + "mkdir -p logs/runs checkpoints\n", 2, "warning"),
    ("output-folder", LOGS + "# before sbatch: mkdir -p logs\nmkdir -p logs\n", 2, "note"),
    ("output-folder", LOGS + '[ -z "$SLURM_JOB_ID" ] && mkdir -p logs && sbatch "$0" && exit\n', 2, "note"),
    ("output-folder", LOGS.replace("logs", "/big/logs") + "mkdir -p /big/logs\n", 2, "note"),
    ("no-shebang", "# A comment.\n\n#!/bin/bash\n#SBATCH --nodes=1\nls\n", 3, "error"),
    ("no-shebang", "# A comment.\n#SBATCH --nodes=1\nls\n", 1, "error"),
]

RANK = "torchrun --nnodes=2 --nproc_per_node=4 --node_rank=$i --master_addr=$M --master_port=29501 x.py"
EACH = "for i in 0 1; do\n  {} &\ndone\n"
SRUN = EACH.format("srun -N1 -n1 -w ${hosts[i]} " + RANK)
WAIT = TWO + SRUN
LOCAL = "#!/bin/bash\n" + EACH.format("ssh ${hosts[i]} " + RANK) + "wait\n"
WAITS: list[tuple[str, str, int, str]] = [
    ("exit-code-lost", WAIT + "wait\necho done\n", 10, "warning"),
    ("exit-code-lost", TWO + EACH.format("ssh ${hosts[i]} " + f"'{RANK}'") + "wait\n", 10, "warning"),
    ("exit-code-lost", TWO + f'c="{RANK}"\n' + EACH.format("eval $c") + "wait\n", 11, "warning"),
    ("exit-code-lost", WAIT + "wait\npython average.py || exit 1\n", 0, ""),
    ("exit-code-lost", WAIT + 'for p in $(jobs -p); do wait "$p" || exit 1; done\n', 0, ""),
    ("exit-code-lost", WAIT.replace("x.py &", "x.py & pids+=($!)") + 'wait "${pids[@]}"\n', 0, ""),
    ("exit-code-lost", WAIT + "wait -n || exit 1\nwait\n", 0, ""),
    ("exit-code-lost", TWO + EACH.format("srun -N1 -n1 --exact python x.py --seed $i") + "wait\n", 10, "note"),
    ("exit-code-lost", LOCAL, 5, "note"),  # started at a terminal, perhaps
    ("exit-code-lost", LOCAL.replace("for i", "hosts=($(cat $PBS_NODEFILE))\nfor i"), 6, "warning"),
    ("exit-code-lost", TWO + "srun nvidia-smi -l 60 &\n" + f"srun {RANK}\nwait\n", 0, ""),
    ("endless-wait", TWO + "export MASTER_ADDR=$h\nsrun -n1 vllm serve m &\nwait\n", 9, "warning"),
    ("exit-code-lost", TWO + "export MASTER_ADDR=$h\nsrun -n1 vllm serve m &\nwait\n", 0, ""),
]
RESOURCE_CASES = [*FOLDERS, *WAITS]
