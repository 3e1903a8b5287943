"""Cases about counts that scripts derive, and lines that look like directives: rule, script, line, severity; line 0 for none."""

from __future__ import annotations

from tests.lint.cases import ONE, TWO

SH = "#!/bin/bash\n"
TOTAL = "deepspeed --hostfile hosts --num_nodes $N --num_gpus {} train.py\n"
SLURM = SH + "#SBATCH --gres=gpu:2\n"
BOUND = "srun {}--cpu-bind={} singularity exec $IMAGE {}\n"
MASKS = "mask_cpu:0xfe,0xfe00,0xfe0000,0xfe000000"
RANKS = "torchrun --nproc_per_node=4 x.py"
BLANK = SH + "# SBATCH --time=10:00:00\n# SBATCH --gres=gpu:2{}\n\npython x.py\n"
ARRAY = SH + "#SBATCH --array=0-9\nRATES=({})\npython x.py ${{RATES[{}]}}\n"

DERIVED_CASES: list[tuple[str, str, int, str]] = [
    ("more-ranks-than-gpus", SH + "N=$1\nG=$2\n" + TOTAL.format("$((G * NUM_NODES))"), 4, "error"),
    ("more-ranks-than-gpus", SH + "NUM_NODES=$1\nexport ALL=$((NUM_NODES*$G))\n" + TOTAL.format("$ALL"), 4, "error"),
    ("more-ranks-than-gpus", SH + "torchrun --nnodes=$NNODES --nproc_per_node=$((NNODES * 8)) x.py\n", 2, "error"),
    ("more-ranks-than-gpus", SH + "torchrun --nnodes=1 --nproc_per_node=$((NNODES * 8)) x.py\n", 0, ""),
    ("more-ranks-than-gpus", SH + "NNODES=1\ntorchrun --nproc_per_node=$((NNODES * G)) x.py\n", 0, ""),
    ("more-ranks-than-gpus", SH + "N=$1\nG=$2\n" + TOTAL.format("$((G * PER_GPU))"), 0, ""),
    ("unset-variable", SLURM + "N=$(echo $SLURM_STEP_GPUS | tr , '\\n' | wc -l)\npython x.py --gpus $N\n", 3, "warning"),
    ("unset-variable", SLURM + "python x.py --tasks $SLURM_STEP_NUM_TASKS\n", 3, "warning"),
    ("unset-variable", SLURM + "python x.py --gpus ${SLURM_STEP_GPUS:-$SLURM_JOB_GPUS}\n", 0, ""),
    ("unset-variable", SLURM + "srun bash -c 'python x.py --gpus $SLURM_STEP_GPUS'\n", 0, ""),
    ("unset-variable", SH + "python x.py --gpus $SLURM_STEP_GPUS\n", 0, ""),
    ("fewer-cpus-than-ranks", TWO + BOUND.format("", MASKS, RANKS), 7, "warning"),
    ("fewer-cpus-than-ranks", TWO + BOUND.format("--jobid $SLURM_JOB_ID ", MASKS, "./run.sh"), 7, "warning"),
    ("fewer-cpus-than-ranks", TWO + "M=0xff,0xff00\n" + BOUND.format("-n8 -N2 ", "mask_cpu:$M", "./run"), 8, "warning"),
    ("fewer-cpus-than-ranks", TWO + BOUND.format("-n8 -N2 ", MASKS, "./run"), 0, ""),
    ("fewer-cpus-than-ranks", TWO + BOUND.format("$TASKS ", MASKS, "./run"), 0, ""),
    ("fewer-cpus-than-ranks", TWO + BOUND.format("", "mask_cpu:0xff", RANKS), 0, ""),
    ("fewer-cpus-than-ranks", TWO + BOUND.format("", "cores", RANKS), 0, ""),
    ("directive-not-read", BLANK.format(""), 2, "warning"),
    ("directive-not-read", BLANK.format("").replace("# SBATCH", "#\tSBATCH"), 2, "warning"),
    ("directive-not-read", BLANK.format("\n#PBS -l walltime=1:00:00"), 0, ""),
    ("directive-not-read", BLANK.format("\n##SBATCH --nodes=1"), 0, ""),
    ("directive-not-read", SH + "# SBATCH --job-name=a\n# SBATCH --comment=b\npython x.py\n", 0, ""),
    ("directive-not-read", SH + "python x.py\n# SBATCH --gres=gpu:2\n# SBATCH --time=10\n", 0, ""),
    ("index-out-of-range", ARRAY.format("0.1", "SLURM_ARRAY_TASK_ID % 2"), 4, "error"),
    ("index-out-of-range", ARRAY.format("0.1 0.2", "SLURM_ARRAY_TASK_ID % 2"), 0, ""),
    ("index-out-of-range", ARRAY.format("0.1", "SLURM_ARRAY_TASK_ID % 1"), 0, ""),
    ("more-ranks-than-gpus", ONE + "torchrun --nproc_per_node=$((SLURM_NNODES * G)) x.py\n", 0, ""),
]
