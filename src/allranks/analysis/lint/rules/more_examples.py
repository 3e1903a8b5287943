"""More symptoms and examples, as texts, for `examples`: loops, arrays, deletions and steps."""

from __future__ import annotations

MORE: dict[str, tuple[str, str, str]] = {
    "loop-values": (
        "The loop runs once, or all its runs give the same result; the program gets `1,` or `{0..$N}` as its value.",
        "seeds=(1 2 3)\nfor seed in $seeds; do\n  python train.py --seed $seed\ndone",
        'seeds=(1 2 3)\nfor seed in "${seeds[@]}"; do\n  python train.py --seed $seed\ndone',
    ),
    "index-out-of-range": (
        "The last task of the array stops with `expected one argument`, or trains with another option's name as its value.",
        "#SBATCH --array=1-3\nrates=(1e-3 1e-4 1e-5)\npython train.py --lr ${rates[$SLURM_ARRAY_TASK_ID]}",
        "#SBATCH --array=0-2\nrates=(1e-3 1e-4 1e-5)\npython train.py --lr ${rates[$SLURM_ARRAY_TASK_ID]}",
    ),
    "deletes-too-much": (
        "The scratch folder was missing, and the files of the folder where sbatch was called are gone.",
        "cd /scratch/run\nrm -rf *",
        "cd /scratch/run || exit 1\nrm -rf *",
    ),
}
