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
    "step-exceeds-job": (
        "`srun: error: Unable to create step for job: More processors requested than permitted`, or `Invalid generic resource (gres) specification`.",
        "srun --nodes=4 --ntasks=4 python train.py",
        "srun --nodes=2 --ntasks=2 python train.py",
    ),
    "job-inside-job": (
        "`salloc: Pending job allocation` in the log of a job that does nothing; or the same job is submitted several times.",
        "srun sbatch train.sbatch",
        "sbatch train.sbatch",
    ),
    "time-unit": (
        "The job is `TIMEOUT` after less than an hour, although two days were meant.",
        "#SBATCH --time=48:00\npython train.py",
        "#SBATCH --time=48:00:00\npython train.py",
    ),
    "launchers-disagree": (
        "Rank 0 waits at one port, the other node tries another one; both stop at the timeout of the rendezvous.",
        "srun -N1 -n1 -r0 torchrun --nnodes=2 --node_rank=0 --master_addr=$HEAD --master_port=15001 train.py &\n"
        "srun -N1 -n1 -r1 torchrun --nnodes=2 --node_rank=1 --master_addr=$HEAD --master_port=15002 train.py &\nwait",
        "srun -N1 -n1 -r0 torchrun --nnodes=2 --node_rank=0 --master_addr=$HEAD --master_port=15001 train.py &\n"
        "srun -N1 -n1 -r1 torchrun --nnodes=2 --node_rank=1 --master_addr=$HEAD --master_port=15001 train.py &\nwait",
    ),
    "array-not-used": (
        "Ten tasks give ten times the same result, and their checkpoints overwrite each other.",
        "#SBATCH --array=0-9\npython train.py --seed 1 --out runs/a",
        "#SBATCH --array=0-9\npython train.py --seed $SLURM_ARRAY_TASK_ID --out runs/a$SLURM_ARRAY_TASK_ID",
    ),
    "blocks-script": (
        "The log shows `nvidia-smi`'s table again and again, and the training has not started when the time limit is reached.",
        "nvidia-smi -l 5\npython train.py",
        "nvidia-smi -l 5 > gpu.log &\nmonitor=$!\npython train.py\nrc=$?\nkill $monitor\nexit $rc",
    ),
    "exits-early": (
        "The job is COMPLETED after some seconds, and nothing was trained.",
        "module load cuda\nexit\npython train.py",
        "module load cuda\npython train.py",
    ),
    "same-node-rank": (
        "Both nodes start as rank 0; one of them stops with `Address already in use`, or each waits for a rank 1 that never comes.",
        "srun bash -c 'torchrun --nnodes=2 --node_rank=$SLURM_LOCALID --master_addr=$HEAD --master_port=15001 train.py'",
        "srun bash -c 'torchrun --nnodes=2 --node_rank=$SLURM_NODEID --master_addr=$HEAD --master_port=15001 train.py'",
    ),
    "arguments-dropped": (
        "`bash train.sh 4 --lr 0.1` trains with the default learning rate, and nothing says so.",
        "MORE=${@:2}\ntorchrun --standalone --nproc_per_node=$1 train.py --data data",
        "MORE=${@:2}\ntorchrun --standalone --nproc_per_node=$1 train.py --data data $MORE",
    ),
    "launcher-option": (
        "`accelerate launch: error: unrecognized arguments`, or `can't open file 'python'`; or the launcher starts one rank instead of four.",
        "accelerate launch --nproc_per_node=2 train.py",
        "accelerate launch --num_processes=2 train.py",
    ),
}
