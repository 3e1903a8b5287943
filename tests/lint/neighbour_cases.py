"""Cases about calculated counts, pipes, patterns and joined paths: the rule, the script, the line and the severity; line 0 for none."""

from __future__ import annotations

from tests.lint.cases import ONE, TWO

SSH_LOOP = 'for n in $NODES; do\n  ssh "$n" "torchrun --nnodes=2 --nproc_per_node=4 --node_rank=$i x.py" \\\n    2>&1 | sed s/a/b/{}\ndone\n'
CALCULATED: list[tuple[str, str, int, str]] = [
    ("octal-number", TWO + "P=$((10000 + ${SLURM_JOB_ID:(-4)}))\n", 7, "warning"),
    ("octal-number", TWO + "P=$((20000 + (${SLURM_JOB_ID:-0} % 40000)))\nQ=$((${SLURM_JOB_ID:-1234} + 1))\n", 0, ""),
    ("nodes-in-sequence", TWO + SSH_LOOP.format(""), 8, "error"),
    ("nodes-in-sequence", TWO + SSH_LOOP.format(" &") + "wait\n", 0, ""),
    ("unset-variable", ONE + "ARGS=1\npython x.py ${ARGS_}\n", 8, "warning"),
    ("unset-variable", ONE + "ARGS=1\npython x.py ${!ARGS_*} ${!SLURM_@} ${!ARGS_@}\n", 0, ""),
    ("idle-gpus", ONE + "G=4\nR=$((G / 2))\ntorchrun --standalone --nproc_per_node=$R x.py\n", 9, "warning"),
    ("idle-gpus", ONE + "G=4\nR=$(($G - 1))\ntorchrun --standalone --nproc_per_node=$R x.py\n", 0, ""),
]  # fmt: skip
NEIGHBOUR_CASES = [*CALCULATED]
