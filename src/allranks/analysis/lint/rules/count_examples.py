"""Symptoms and examples, as texts, for `examples`: counts of nodes, tasks and GPUs."""

from __future__ import annotations

COUNTED: dict[str, tuple[str, str, str]] = {
    "device-of-one-gpu": (
        "`CUDA error: invalid device ordinal` on all tasks of a node but the first.",
        "#SBATCH --ntasks-per-node=4\n#SBATCH --gpus-per-task=1\nsrun bash -c 'python train.py --gpu $SLURM_LOCALID'",
        "#SBATCH --ntasks-per-node=4\n#SBATCH --gpus-per-node=4\nsrun bash -c 'python train.py --gpu $SLURM_LOCALID'",
    ),
    "tasks-contradict": (
        "One rank trains, or the program waits for ranks that nobody starts; or `sbatch: error: Requested node configuration is not available`.",
        "#SBATCH --nodes=2\n#SBATCH --ntasks=2\n#SBATCH --ntasks-per-node=4\nsrun python train.py",
        "#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=4\nsrun python train.py",
    ),
    "named-nodes": (
        "`sbatch: error: invalid number of nodes (-N 8-2)`; or a job that waits for one host while others are free.",
        "#SBATCH --nodes=2\n#SBATCH --nodelist=gpu[01-08]\nsrun python train.py",
        "#SBATCH --nodes=2\n#SBATCH --exclude=gpu[09-12]\nsrun python train.py",
    ),
    "same-gpu": (
        "`nvidia-smi` shows both programs on GPU 0, and the others at 0 %.",
        "#SBATCH --nodes=1\n#SBATCH --gres=gpu:2\npython train.py --seed 1 &\npython train.py --seed 2 &\nwait",
        "#SBATCH --nodes=1\n#SBATCH --gres=gpu:2\nCUDA_VISIBLE_DEVICES=0 python train.py --seed 1 &\nCUDA_VISIBLE_DEVICES=1 python train.py --seed 2 &\nwait",
    ),
    "steps-wait": (
        "`srun: Job 123 step creation temporarily disabled, retrying (Requested nodes are busy)`; the programs run one after another.",
        "#SBATCH --nodes=1\n#SBATCH --ntasks=2\n#SBATCH --gres=gpu:2\nsrun -n1 python a.py &\nsrun -n1 python b.py &\nwait",
        "#SBATCH --nodes=1\n#SBATCH --ntasks=2\n#SBATCH --gres=gpu:2\nsrun -n1 --exact --gpus=1 python a.py &\nsrun -n1 --exact --gpus=1 python b.py &\nwait",
    ),
    "too-few-slots": (
        "`There are not enough slots available in the system`, or `Requested more processes than there are available slots`.",
        "mpirun -np 8 -H node1:4,node2:2 python train.py",
        "mpirun -np 8 -H node1:4,node2:4 python train.py",
    ),
    "ray-step-ends": (
        "`ray status` shows the head alone; the workers' logs end after a second.",
        "srun --nodes=1 --ntasks=1 -w $worker ray start --address=$head:6379\npython train.py",
        "srun --nodes=1 --ntasks=1 -w $worker ray start --address=$head:6379 --block &\npython train.py",
    ),
}
