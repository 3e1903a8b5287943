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
    (
        "unset-variable",
        SLURM + "N=$(echo $SLURM_STEP_GPUS | tr , '\\n' | wc -l)\npython x.py --gpus $N\n",
        3,
        "warning",
    ),
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


def head(*options: str) -> str:
    """A script with these options."""
    return SH + "".join(f"#SBATCH {option}\n" for option in options) + "srun python x.py\n"


def call(command: str) -> str:
    """A script with this command."""
    return SH + command + "\n"


REFUSED, OPTION = "directive-refused", "unknown-option"
OPTION_LINES = "--dependency=afterok:$A:$B,afterany:12 -p gpu -n1 --array=1-10%2 --gres=tmp:10G --mem=16GB"
VALUE_CASES: list[tuple[str, str, int, str]] = [
    *((REFUSED, head("--time=10", option), 3, "error") for option in (
        "--nodes=0", "--ntasks 0", "--nodes=4-2", "--array={1..10}", "--array=10-1", "--array=0-10:0", "--array=1;5", "-a 1.5", "--nodes:2",
        "--N 2", "--p gpu", "--gres=4:gpu", "--gres=a100:4", "--gres=gpu,4", "--mem=G16", "--mem-per-node=4G", "--num-gpus=4", "--email=a@b.c",
        "--outfile=x.log", "--dependency=after_ok:123", "--dependency=afterok:train", "--dependency=singelton", "--dependency=afterok",
        "--requeue=1", "--hint=nomultithreading", "--distribution=block:cyc", "--kill-on-invalid-dep=true", "--gres-flags=enforce-bind",
    )),
    (REFUSED, head("--time=10", "--workdir=/data"), 3, "warning"),
    *((REFUSED, head("--time=10", option), 0, "") for option in (
        "--array=1-10%2", "--array=[1-3,7]", "--array=0-9:3", "--array=1-N", '--array="1-4"', "--nodes=2-4", "--gres=gpu:a100:4", "--gres=gpu:4,tmp:10",
        "--dependency=singleton", "--dependency=afterok:12:13?afterany:14", "--dependency=afterok:JOBID", "--hint=nomultithread", "--requeue",
        "--distribution=block:cyclic,pack", "--mem=16GB", "--time=1-0", "--gres-flags=enforce-binding", "-N 2", "--mem-per-cpu=4G", "--kill-on-invalid-dep=yes",
    )),
    (REFUSED, SH + "for i in 1 2; do\nsbatch <<EOF\n#!/bin/bash\n#SBATCH --array=5-$i\nsrun x\nEOF\ndone\n", 0, ""),
    *((OPTION, call(command), 2, "error") for command in (
        "srun -np 8 python x.py", "srun --np 8 python x.py", "srun -pty bash", "srun -pmix python x.py", "srun -N=2 -n=8 python x.py",
        "srun -ntasks=8 python x.py", "srun -gres=gpu:4 python x.py", "srun --ntask=8 python x.py", "srun --gpu=1 python x.py",
        "srun --gres=gpus:4 python x.py", "srun --gres=4 python x.py", "srun --time=24h python x.py", "srun --mem=64GiB python x.py",
        "srun -n python x.py", "srun --ntasks 8 --cpus-per-task ./run.sh", "srun --kill-on-bad-exit=yes python x.py", "srun --oversubcribe python x.py",
        "srun --distribution=blocks python x.py", "srun -c 8 --hint nomultithreading python x.py", "salloc --gpu 4 -t 10",
        "sbatch --gres=a100:4 job.sh", "sbatch -N=2 job.sh", "sbatch --time=24h job.sh", "sbatch --array {1..10} job.sh", "sbatch --queue=gpu job.sh",
        "sbatch --dependency=after_ok:$ID job.sh", "sbatch --dependency afterok $ID job.sh", "sbatch --dependency=afterok:train job.sh",
    )),
    *((OPTION, call(command), 0, "") for command in (
        "srun -lN1 -n1 --overlap --container-image=/x.sqsh --container-mounts=/a:/b python x.py", "srun -p gpu -t 30 --pty bash",
        "srun -n 8 -N 2 --cpu-bind=cores --mpi=pmix -c 4 -lu -K1 -W 60 python x.py", "srun -m block:cyclic --wait=60 --signal=B:USR1@90 python x.py",
        "srun --ntasks $N ./prog -np 8 --num-gpus 4", "srun $ARGS -n 4 python x.py --np 3", "srun --gpu-bind=none --gpus 4 --mem-bind=local x",
        "srun -K -N2 --cpu-freq=high python x.py", f"sbatch {OPTION_LINES} job.sh", "sbatch -d singleton --parsable --wrap='python x.py'",
        "sbatch --array=$(seq -s, 1 9) --nodes=$N -n $N job.sh", "sbatch -a 0-9 --export=ALL,A=1 --time 10 job.sh --queue x", "salloc -N 1 -C gpu -q x",
    )),
    ("tasks-contradict", head("--nodes=2", "--tasks=4"), 3, "warning"),
    ("tasks-contradict", head("--nodes=1", "--tasks=4"), 0, ""),
    ("tasks-contradict", head("--nodes=2", "--tasks-per-node=4"), 0, ""),
]  # fmt: skip


COUNT = SLURM + "N=$({})\ntorchrun --standalone --nproc_per_node=$N x.py\n"
ONE_GPU = SH + "#SBATCH --nodes=1\n#SBATCH --gres=gpu:1\n"
FREE = "nvidia-smi --query-gpu=memory.free --format=csv,noheader | sort -n | tail -n1"
STEP = (
    SH + "#SBATCH --nodes=1\n#SBATCH --ntasks={}\n#SBATCH --cpus-per-task=4\n#SBATCH --mem=10G\nsrun {} python x.py\n"
)
PBS = SH + "#PBS {}\ncd $PBS_O_WORKDIR\npython x.py\n"
EARLY = TWO + "{}\n{}"
MPI_ARRAY = SH + "#SBATCH --array=1-9\n{}mpirun -n 4 lmp {}-in in.melt\n"
SERVED = ONE.replace("gpus-per-node=4", "gres=gpu:2") + "{}\n"
GROUP = SH + "#SBATCH --array=0-3\npython x.py --num-replicas=4 --dist-master=$M "
SPLIT, EXCEEDS = "value-split", "step-exceeds-job"

COUNTED_CASES: list[tuple[str, str, int, str]] = [
    (SPLIT, COUNT.format("echo $CUDA_VISIBLE_DEVICES | wc -w"), 3, "error"),
    (SPLIT, COUNT.format("wc -w <<< \"$SLURM_JOB_GPUS\""), 3, "error"),
    (SPLIT, COUNT.format("echo $CUDA_VISIBLE_DEVICES | tr -cd ',' | wc -c"), 3, "error"),
    (SPLIT, COUNT.format("echo $CUDA_VISIBLE_DEVICES | grep -o , | wc -l"), 3, "error"),
    (SPLIT, COUNT.format("nvidia-smi --query-gpu=name --format=csv | wc -l"), 3, "error"),
    (SPLIT, SLURM + "N=${#CUDA_VISIBLE_DEVICES}\npython x.py --gpus $N\n", 3, "error"),
    (SPLIT, COUNT.format("echo $CUDA_VISIBLE_DEVICES | tr ',' ' ' | wc -w"), 0, ""),
    (SPLIT, COUNT.format("nvidia-smi --query-gpu=name --format=csv,noheader | wc -l"), 0, ""),
    (SPLIT, COUNT.format("nvidia-smi --query-gpu=name --format=csv | tail -n +2 | wc -l"), 0, ""),
    (SPLIT, SLURM + "N=$(( (${#CUDA_VISIBLE_DEVICES} + 1) / 2 ))\npython x.py --gpus $N\n", 0, ""),
    (SPLIT, SLURM + "N=$(echo $CUDA_VISIBLE_DEVICES | tr -cd , | wc -c)\nM=$((N + 1))\npython x.py --gpus $M\n", 0, ""),
    ("visible-devices", ONE_GPU + f"export CUDA_VISIBLE_DEVICES=$({FREE})\npython x.py\n", 4, "note"),
    ("visible-devices", ONE_GPU.replace("gpu:1", "gpu:4") + f"export CUDA_VISIBLE_DEVICES=$({FREE})\npython x.py\n", 0, ""),
    ("visible-devices", SH + f"export CUDA_VISIBLE_DEVICES=$({FREE})\npython x.py\n", 0, ""),
    ("visible-devices", SLURM + "CUDA_VISIBLE_DEVICES=2,3 numactl --cpunodebind=0 python x.py\n", 3, "warning"),
    ("visible-devices", SLURM + "ssh host env CUDA_VISIBLE_DEVICES=2,3 python x.py\n", 0, ""),
    ("tasks-contradict", STEP.format(1, "--ntasks-per-node=4"), 6, "warning"),
    ("tasks-contradict", STEP.format(4, "--ntasks-per-node=4"), 0, ""),
    (EXCEEDS, STEP.format(4, "-n 4 -c 8"), 6, "error"),
    (EXCEEDS, STEP.format(4, "-c 8"), 6, "error"),
    (EXCEEDS, STEP.format(4, "-n 2 -c 8"), 0, ""),
    (EXCEEDS, STEP.format(4, "-n 1 -c 16"), 0, ""),
    (REFUSED, PBS.format("-l select=1 ncpus=8 ngpus=2"), 2, "error"),
    (REFUSED, PBS.format("-l nodes=1:ppn=4:gpus=4 walltime=1:00:00"), 2, "error"),
    (REFUSED, PBS.format("-l walltime 10:00:00"), 2, "error"),
    (REFUSED, PBS.format("-l select=1:ncpus=8 -l walltime=10:00:00"), 0, ""),
    (REFUSED, PBS.format("-l walltime=10:00:00 # ncpus=8"), 0, ""),
    ("array-not-used", MPI_ARRAY.format("", ""), 2, "warning"),
    ("array-not-used", MPI_ARRAY.format("cd run_$SLURM_ARRAY_TASK_ID\n", ""), 0, ""),
    ("array-not-used", MPI_ARRAY.format("", "-log none "), 0, ""),
    ("expanded-too-early", EARLY.format('C="srun torchrun --nnodes=2 --node_rank=$SLURM_NODEID x.py"', "$C\n"), 7, "error"),
    ("expanded-too-early", EARLY.format("C=(srun torchrun --nnodes=2 --node_rank=$SLURM_NODEID x.py)", '"${C[@]}"\n'), 7, "error"),
    ("expanded-too-early", EARLY.format('C="log_$SLURM_NODEID"', "echo $C\n"), 0, ""),
    ("more-ranks-than-gpus", SERVED.format("apptainer exec --nv v.sif vllm serve m --tensor-parallel-size 4"), 7, "error"),
    ("more-ranks-than-gpus", SERVED.format("for s in 1 2; do vllm serve m --tensor-parallel-size 4 --seed $s; done"), 7, "error"),
    ("more-ranks-than-gpus", SERVED.format("conda run -n vllm python x.py --tensor-parallel-size 1"), 0, ""),
    ("idle-gpus", SLURM + 2 * "CUDA_VISIBLE_DEVICES=1 python x.py\n", 3, "warning"),
    ("idle-gpus", SLURM + "CUDA_VISIBLE_DEVICES=1 python x.py &\nCUDA_VISIBLE_DEVICES=0 python x.py &\nwait\n", 0, ""),
    ("ranks-in-separate-jobs", GROUP + "--distributed-rank=$SLURM_ARRAY_TASK_ID\n", 2, "warning"),
    ("pattern-not-expanded", SH + "#BSUB -J a\n#BSUB -o %J.out\npython x.py\nmv %J.out logs\n", 5, "warning"),
    ("pattern-not-expanded", SLURM + "python x.py > out_%j.log\n", 3, "warning"),
    ("pattern-not-expanded", SLURM + "srun -o out_%j.log python x.py\n", 0, ""),
]  # fmt: skip


WRITTEN = "#!/bin/bash\n#SBATCH --nodes=1\n#SBATCH --gres=gpu:2\ntorchrun --standalone --nproc_per_node=4 x.py\n"
PASSED_CASES: list[tuple[str, str, int, str]] = [
    ("more-ranks-than-gpus", SH + f"cat <<'EOF' | sbatch\n{WRITTEN}EOF\n", 6, "error"),
    ("more-ranks-than-gpus", SH + f"JOB='{WRITTEN}'\necho \"$JOB\" | sbatch\n", 5, "error"),
    ("more-ranks-than-gpus", SH + f"JOB='{WRITTEN}'\nsbatch <<< \"$JOB\"\n", 5, "error"),
    ("more-ranks-than-gpus", SH + f"JOB='{WRITTEN}'\necho \"$JOB\" | sbatch --gres=gpu:4\n", 0, ""),
    ("more-ranks-than-gpus", SH + f"JOB='{WRITTEN}'\necho \"$JOB\" | cat\n", 0, ""),
    ("more-ranks-than-gpus", SH + f"JOB='{WRITTEN}'\necho \"$JOB\" | cat\nls | sbatch\n", 0, ""),
    ("idle-gpus", ONE + "torchrun --standalone --nproc_per_node=2 x.py &\necho $!\nwait $!\n", 7, "warning"),
    ("idle-gpus", ONE + "torchrun --standalone --nproc_per_node=2 x.py &\n./evaluate\nwait\n", 0, ""),
]
