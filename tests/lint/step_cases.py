"""Cases about steps, units and parts of a job: the rule, the script, the line and the severity; line 0 for none."""

from __future__ import annotations

from tests.lint.cases import ONE, TWO

FOUR = ONE.replace("--ntasks-per-node=1", "--ntasks=1").replace("--cpus-per-task=32\n", "--cpus-per-task=1\n")
SINGLE = FOUR.replace("--gpus-per-node=4", "--gpus-per-node=1")
EACH = TWO.replace("--ntasks-per-node=1", "--ntasks-per-node=4")
RUN = "python train.py\n"
PAIR = (
    "srun -N1 -n1 -r0 torchrun --nnodes=2 --node_rank=0 --master_addr=$A --master_port={} x.py &\n"
    "srun -N1 -n1 -r1 torchrun --nnodes=2 --node_rank={} --master_addr=$A --master_port={} x.py &\nwait\n"
)


def asking(*options: str) -> str:
    """A script of Python with these options below the first line."""
    return "#!/bin/bash\n" + "".join(f"#SBATCH {option}\n" for option in options)


STEPS: list[tuple[str, str, int, str]] = [
    ("step-exceeds-job", SINGLE + "srun -n 4 --gres=gpu:4 " + RUN, 7, "error"),
    ("step-exceeds-job", SINGLE + "N=4\nsrun \\\n  --gpus-per-node $N " + RUN, 9, "error"),
    ("step-exceeds-job", SINGLE + "srun --gpus=2 -n 1 " + RUN, 7, "error"),
    ("step-exceeds-job", TWO + "srun -N 4 " + RUN, 7, "error"),
    ("step-exceeds-job", FOUR + "srun --ntasks=4 " + RUN, 7, "error"),
    ("step-exceeds-job", asking("-N 1", "--mem=16G") + "srun --mem=64G " + RUN, 4, "error"),
    ("step-exceeds-job", TWO + "srun -N 2 --gpus-per-node=4 " + RUN, 0, ""),
    ("step-exceeds-job", TWO + "srun -N 1 --gpus-per-node=2 " + RUN, 0, ""),
    ("step-exceeds-job", ONE + "srun -n 4 -c 8 " + RUN, 0, ""),  # in place of one task of 32 CPUs
    (
        "step-exceeds-job",
        FOUR.replace("\n#SBATCH --nodes", "\n#SBATCH --exclusive\n#SBATCH --nodes") + "srun -n 4 " + RUN,
        0,
        "",
    ),
    ("step-exceeds-job", "#!/bin/bash\nsrun -N 4 --gres=gpu:4 " + RUN, 0, ""),
    ("step-exceeds-job", asking("-N 1", "--mem=16G") + "srun --mem=0 " + RUN, 0, ""),
    ("job-inside-job", ONE + "srun sbatch train.sbatch\n", 7, "warning"),
    ("job-inside-job", ONE + "salloc --gres=gpu:4\n" + RUN, 7, "warning"),
    ("job-inside-job", ONE + "sbatch train.sbatch\n" + RUN, 0, ""),
    ("job-inside-job", "#!/bin/bash\nsalloc -N 2 bash run.sh\n", 0, ""),
]
UNITS: list[tuple[str, str, int, str]] = [
    ("time-unit", asking("-N 1", "--time=48:00") + RUN, 3, "warning"),
    ("time-unit", asking("-N 1", "-t 24:00") + RUN, 3, "warning"),
    ("time-unit", asking("--time=24", "-N 1") + RUN, 2, "warning"),
    ("time-unit", asking("--time=10:00  # 10 hours") + RUN, 2, "warning"),
    ("time-unit", asking("--time=00:30") + RUN, 2, "warning"),
    ("time-unit", asking("--time=48:00:00") + RUN, 0, ""),
    ("time-unit", asking("--time=20:00") + RUN, 0, ""),
    ("time-unit", asking("--time=1-00") + RUN, 0, ""),
    ("time-unit", asking("--time=90") + RUN, 0, ""),
    ("time-unit", asking("--time=20:00  # format D-HH:MM:SS, hours first") + RUN, 0, ""),
    ("memory-unit", asking("-N 1", "--mem=64M") + RUN, 3, "warning"),
    ("memory-unit", asking("--mem-per-cpu=100mb", "-N 1") + RUN, 2, "warning"),
    ("memory-unit", asking("--mem=64000M", "-N 1") + RUN, 0, ""),
    ("memory-unit", asking("--mem-per-cpu=500M", "-c 8") + RUN, 0, ""),
]
PARTS: list[tuple[str, str, int, str]] = [
    ("idle-gpus", TWO + "horovodrun -np 1 -H $HOSTS python x.py\n", 7, "warning"),
    ("idle-gpus", ONE + "horovodrun -np 2 python x.py\n", 7, "warning"),
    ("idle-gpus", TWO + "mpirun -np 1 python x.py\n", 7, "warning"),
    ("idle-gpus", ONE + "horovodrun -np 4 python x.py\n", 0, ""),
    ("idle-gpus", TWO + "mpirun -np $N python x.py\n", 0, ""),
    (
        "idle-gpus",
        ONE
        + "accelerate launch --config_file acc_1GPU.yaml a.py\naccelerate launch --config_file acc_1GPU.yaml b.py\n",
        7,
        "warning",
    ),
    ("idle-gpus", ONE + "accelerate launch --config_file single_gpu.yaml a.py &\nwait\n", 0, ""),
    ("idle-gpus", ONE + "accelerate launch --config_file acc_11GPU.yaml a.py\n", 0, ""),
    ("idle-gpus", ONE + "CUDA_VISIBLE_DEVICES=0 python a.py\nCUDA_VISIBLE_DEVICES=0 python b.py\n", 7, "warning"),
    (
        "idle-gpus",
        ONE.replace("=4", "=2") + "CUDA_VISIBLE_DEVICES=0 python a.py &\nCUDA_VISIBLE_DEVICES=1 python b.py &\nwait\n",
        0,
        "",
    ),
    ("more-ranks-than-gpus", ONE + "horovodrun -np 8 python x.py\n", 7, "error"),
    ("more-ranks-than-gpus", ONE + "horovodrun -np 4 python x.py\n", 0, ""),
    (
        "more-ranks-than-gpus",
        asking("-J distributed", "-N 1", "--ntasks-per-node=8", "--gres=gpu:4") + "srun " + RUN,
        6,
        "error",
    ),
    (
        "more-ranks-than-gpus",
        asking("-J preprocess", "-N 1", "--ntasks-per-node=8", "--gres=gpu:4") + "srun " + RUN,
        0,
        "",
    ),
    (
        "more-ranks-than-gpus",  # at srun, and not at the interpreter's variable
        asking("-N 1", "--ntasks-per-node=8", "--gres=gpu:4")
        + "export MASTER_PORT=6000\nPY=/x/bin/python\nsrun $PY x.py\n",
        7,
        "error",
    ),
    ("several-torchruns", EACH + "srun -c8 python -m deepspeed.launcher.launch x.py\n", 7, "error"),
    ("several-torchruns", EACH + "srun -c8 colossalai run --nproc_per_node 4 x.py\n", 7, "error"),
    ("several-torchruns", TWO + "srun -c8 python -m deepspeed.launcher.launch x.py\n", 0, ""),
    ("visible-devices", "#!/bin/bash\nexport CUDA_VISIBLE_DEVICES=0,1,1\n" + RUN, 2, "warning"),
    ("visible-devices", "#!/bin/bash\nexport CUDA_VISIBLE_DEVICES=0,1,11\n" + RUN, 0, ""),
    ("launchers-disagree", TWO + PAIR.format(15001, 1, 15002), 8, "error"),
    ("launchers-disagree", TWO + PAIR.format(15001, 0, 15001), 8, "error"),
    ("launchers-disagree", TWO + PAIR.format(15001, 1, 15001), 0, ""),
    ("launchers-disagree", TWO + PAIR.format(15001, 1, "$PORT"), 0, ""),
    ("launchers-disagree", TWO + PAIR.format(15001, 0, 15002).replace("--nnodes=2", "--nnodes=1"), 0, ""),
]
STEP_CASES = [*STEPS, *UNITS, *PARTS]
