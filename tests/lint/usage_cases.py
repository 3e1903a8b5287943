"""Cases about what a job requests and what its programs use: the rule, the script, the line and the severity; line 0 for none."""

from __future__ import annotations

from tests.lint.step_cases import asking

RUN = "python train.py\n"
NODE = ("-N 1", "--ntasks=1", "--gres=gpu:8")  # 4 lines with the first one
ARRAY = asking("--array=0-3", "--gres=gpu:1")  # 3 lines
LIST = ARRAY + "L=(a b c)\n"
CASE = ARRAY + "case $SLURM_ARRAY_TASK_ID in\n0) x=a;;\n1) x=b;;\n{}esac\npython train.py --x $x\n"
SEND = "#!/bin/bash\n"
USR1 = asking("--signal=B:USR1@120", "--gres=gpu:1") + "trap 'touch stop' USR1\n"
GPU = asking("--gres=gpu:1")  # 2 lines

CPUS: list[tuple[str, str, int, str]] = [
    (
        "fewer-cpus-than-ranks",
        asking(*NODE, "--mem-per-cpu=16G") + "torchrun --nproc_per_node=8 train.py\n",
        3,
        "warning",
    ),
    (
        "fewer-cpus-than-ranks",
        asking("--ntasks-per-node=1", "--gpus-per-node=4", "--mem-per-cpu=8000") + RUN,
        2,
        "warning",
    ),
    (
        "fewer-cpus-than-ranks",
        asking(*NODE, "--mem=400G") + "torchrun --nproc_per_node=8 train.py\n",
        0,
        "",
    ),  # the site may give CPUs
    ("fewer-cpus-than-ranks", asking(*NODE, "--mem-per-cpu=16G", "--cpus-per-gpu=8") + RUN, 0, ""),
    ("fewer-cpus-than-ranks", asking(*NODE, "--mem-per-cpu=16G", "--exclusive") + RUN, 0, ""),
    ("fewer-cpus-than-ranks", asking("-N 1", "--ntasks-per-node=8", "--gres=gpu:8", "--mem-per-cpu=8G") + RUN, 0, ""),
    (
        "fewer-cpus-than-ranks",
        asking("-n 1", "-c 1", "--gres=gpu:1") + "python train.py --num_workers 16\n",
        5,
        "warning",
    ),
    (
        "fewer-cpus-than-ranks",
        asking("-n 1", "-c 4", "--gres=gpu:1") + "srun python train.py data.num_workers=32\n",
        5,
        "warning",
    ),
    (
        "fewer-cpus-than-ranks",
        asking("-N 1", "--ntasks-per-node 8", "--gres=gpu:8") + "python train.py --workers 40\n",
        5,
        "warning",
    ),
    ("fewer-cpus-than-ranks", asking("-n 1", "-c 8", "--gres=gpu:1") + "python train.py --num_workers 16\n", 0, ""),
    ("fewer-cpus-than-ranks", asking("-n 1", "-c 1", "--gres=gpu:1") + "python train.py --num_workers 4\n", 0, ""),
    (
        "threads-oversubscribed",
        asking("-N 1", "-n 16") + "export OMP_NUM_THREADS=16\nsrun ./solver in.dat\n",
        4,
        "warning",
    ),
    (
        "threads-oversubscribed",
        asking("-N 1", "-n 16", "-c 4") + "export OMP_NUM_THREADS=4\nsrun ./solver in.dat\n",
        0,
        "",
    ),
    ("threads-oversubscribed", asking("-N 1", "-n 16") + "export OMP_NUM_THREADS=1\nsrun ./solver in.dat\n", 0, ""),
    (
        "memory-unit",
        asking("-N 1", "--gres=gpu:8", "--mem=4G") + "torchrun --nproc_per_node=8 train.py\n",
        4,
        "warning",
    ),
    ("memory-unit", asking("-N 1", "--gres=gpu:8", "--mem=64G") + "torchrun --nproc_per_node=8 train.py\n", 0, ""),
    ("step-exceeds-job", asking("-N 1", "-n 1", "-c 4", "--gres=gpu:1") + "srun -c 16 " + RUN, 6, "error"),
    ("step-exceeds-job", asking("-N 1", "-n 1", "-c 4", "--gres=gpu:1") + "srun -c 4 " + RUN, 0, ""),
]
GPUS: list[tuple[str, str, int, str]] = [
    ("idle-gpus", GPU + "pip install torch --index-url https://download.pytorch.org/whl/cpu\n" + RUN, 3, "warning"),
    ("idle-gpus", GPU + "conda install -y pytorch cpuonly -c pytorch\n" + RUN, 3, "warning"),
    ("idle-gpus", GPU + "pip install torch --index-url https://download.pytorch.org/whl/cu118\n" + RUN, 0, ""),
    ("idle-gpus", asking("-c 4") + "pip install torch --index-url https://download.pytorch.org/whl/cpu\n" + RUN, 0, ""),
    ("idle-gpus", GPU + "python train.py --device cpu\n", 3, "warning"),
    ("idle-gpus", GPU + "python train.py --no-cuda\n", 3, "warning"),
    ("idle-gpus", GPU + "python prepare.py --device cpu\npython train.py\n", 0, ""),
    ("idle-gpus", GPU + "python train.py --no_cuda $OFF\n", 0, ""),
    ("idle-gpus", asking("-N 1", "--gres=gpu:8") + "vllm serve m --tensor-parallel-size 2\n", 4, "warning"),
    ("idle-gpus", asking("-N 1", "--gres=gpu:8") + "vllm serve m -tp 4 -pp 2\n", 0, ""),
    ("idle-gpus", asking("-N 1", "--gres=gpu:8") + "vllm serve m -tp 4 &\npython evaluate.py\n", 5, "note"),
    ("idle-gpus", asking("--gres=gpu:2") + "CUDA_VISIBLE_DEVICES=0 python a.py\nCUDA_VISIBLE_DEVICES=1 python b.py\n", 3, "warning"),
    ("idle-gpus", asking("--gres=gpu:2") + "for i in 0 1; do\nCUDA_VISIBLE_DEVICES=$i python a.py\ndone\nwait\n", 4, "warning"),
    ("idle-gpus", asking("--gres=gpu:2") + "for i in 0 1; do\nCUDA_VISIBLE_DEVICES=$i python a.py &\ndone\nwait\n", 0, ""),
    ("more-ranks-than-gpus", asking("-N 1", "--gres=gpu:2") + "python train.py --gpus 0,1,2,3\n", 4, "error"),
    ("more-ranks-than-gpus", asking("-N 1", "--gres=gpu:4") + "python train.py --gpus 0,1,2,3\n", 0, ""),
    ("more-ranks-than-gpus", asking("-N 1", "-n 1", "--gres=gpu:4") + "srun python train.py trainer.devices=8\n", 5, "error"),
    ("more-ranks-than-gpus", asking("-N 1", "-n 1", "--gres=gpu:4") + "srun python train.py trainer.devices=4\n", 0, ""),
    ("world-size", asking("-N 4", "--ntasks-per-node=4", "--gres=gpu:4") + "srun python train.py trainer.num_nodes=1\n", 5, "error"),
    ("world-size", asking("-N 4", "--ntasks-per-node=4", "--gres=gpu:4") + "srun python train.py trainer.num_nodes=4\n", 0, ""),
    ("tasks-contradict", asking("-N 1", "-n 36", "--gres=gpu:1") + "lmp -sf gpu -in x.lmp\n", 5, "warning"),
    ("tasks-contradict", asking("-N 1", "-n 36", "--gres=gpu:1") + "srun lmp -sf gpu -in x.lmp\n", 0, ""),
    ("tasks-contradict", asking("-N 1", "-n 1", "--gres=gpu:1") + "lmp -sf gpu -in x.lmp\n", 0, ""),
    ("idle-nodes", asking("-N 2", "--gres=gpu:4") + "gmx mdrun -deffnm md\n", 4, "warning"),
    ("idle-nodes", asking("-N 2", "--gres=gpu:4") + "vllm serve m -tp 4\n", 4, "warning"),
    ("idle-nodes", asking("-N 2", "--gres=gpu:4") + "srun ray start --block &\nvllm serve m -tp 8\n", 0, ""),
    ("nothing-to-do", GPU + "module load cuda\n#python train.py --lr 1\n", 4, "warning"),
    ("nothing-to-do", GPU + "# python is needed for this\nbash run.sh\n", 0, ""),
    ("nothing-to-do", GPU + "#python old.py\n" + RUN, 0, ""),
    ("signal-not-trapped", USR1 + RUN, 5, "warning"),
    ("signal-not-trapped", USR1 + "python train.py &\nwait\n", 0, ""),
]  # fmt: skip
ARRAYS: list[tuple[str, str, int, str]] = [
    ("index-out-of-range", LIST + "i=$SLURM_ARRAY_TASK_ID\npython train.py --x ${L[$i]}\n", 6, "error"),
    ("index-out-of-range", LIST + "python train.py --x ${L[SLURM_ARRAY_TASK_ID+1]}\n", 5, "error"),
    ("index-out-of-range", LIST + "M=(a b)\npython train.py ${M[$((SLURM_ARRAY_TASK_ID / 1))]} ${L[0]}\n", 6, "error"),
    ("index-out-of-range", LIST + "python train.py --x ${L[$((SLURM_ARRAY_TASK_ID % 3))]}\n", 0, ""),
    ("index-out-of-range", LIST + "i=$((SLURM_ARRAY_TASK_ID / 2))\npython train.py --x ${L[i]}\n", 0, ""),
    ("index-out-of-range", LIST + "i=$SLURM_ARRAY_TASK_ID\n[ $i -lt 3 ] || exit 1\npython train.py --x ${L[$i]}\n", 0, ""),
    ("index-out-of-range", CASE.format(""), 4, "error"),
    ("index-out-of-range", CASE.format("*) x=c;;\n"), 0, ""),
    ("index-out-of-range", CASE.format("2|3) x=c;;\n"), 0, ""),
    ("index-out-of-range", ARRAY + 'x=$(sed -n "${SLURM_ARRAY_TASK_ID}p" list.txt)\npython train.py $x\n', 4, "error"),
    ("index-out-of-range", ARRAY + "x=$(head -n $SLURM_ARRAY_TASK_ID list.txt | tail -n 1)\npython train.py $x\n", 4, "error"),
    ("index-out-of-range", ARRAY.replace("0-3", "1-3") + 'x=$(sed -n "${SLURM_ARRAY_TASK_ID}p" list.txt)\npython a.py $x\n', 0, ""),
    ("one-log-for-array", ARRAY + "python train.py --seed $SLURM_ARRAY_TASK_ID > out.log\n", 4, "warning"),
    ("one-log-for-array", ARRAY + "python train.py --seed $SLURM_ARRAY_TASK_ID | tee out.log\n", 4, "warning"),
    ("one-log-for-array", ARRAY + "python train.py --seed $SLURM_ARRAY_TASK_ID > out_$SLURM_ARRAY_TASK_ID.log\n", 0, ""),
    ("one-log-for-array", ARRAY + "cd run_$SLURM_ARRAY_TASK_ID\npython train.py > out.log\n", 0, ""),
]  # fmt: skip
SUBMITTED: list[tuple[str, str, int, str]] = [
    ("dependency", SEND + "sbatch --dependency=afterok:$(sbatch a.sh) b.sh\n", 2, "warning"),
    ("dependency", SEND + "sbatch --dependency=afterok:$(sbatch --parsable a.sh) b.sh\n", 0, ""),
    ("dependency", SEND + "A=$(sbatch --parsable a.sh)\nsbatch --dependency afterok: $A b.sh\n", 3, "warning"),
    ("dependency", SEND + "A=$(sbatch a.sh | awk '{print $3}')\nsbatch -d afterok:$A b.sh\n", 2, "warning"),
    ("dependency", SEND + "A=$(sbatch a.sh | awk '{print $4}')\nsbatch -d afterok:$A b.sh\n", 0, ""),
    ("option-of-program", SEND + "sbatch --gres=gpu:1 python train.py\n", 2, "warning"),
    ("option-of-program", SEND + "sbatch --gres=gpu:1 --wrap=python train.py\n", 2, "warning"),
    ("option-of-program", SEND + "sbatch --gres=gpu:1 --wrap='python train.py'\n", 0, ""),
    ("option-of-program", SEND + "sbatch --gres=gpu:1 python.sh train.py\n", 0, ""),
    ("broken-line", GPU + 'singularity exec --nv x.sif bash -c "cd x && python t.py $@ --a 1"\n', 3, "error"),
    ("broken-line", GPU + 'srun bash -c "\\\n  cd x && \\\n  python t.py ${@:2} --a 1"\n', 5, "error"),
    ("broken-line", GPU + 'singularity exec --nv x.sif bash -c "cd x && python t.py $* --a 1"\n', 0, ""),
    ("broken-line", GPU + "srun bash -c 'python t.py \"$@\"' x 1 2\n", 0, ""),
    ("exit-code-lost", GPU + "(\npython train.py\n) |& tee x.log\n", 5, "warning"),
    ("exit-code-lost", GPU + "set -o pipefail\n(\npython train.py\n) |& tee x.log\n", 0, ""),
    ("exit-zero", GPU + 'if python train.py; then\n  echo done\nelse\n  echo "Error: failed"\nfi\n', 6, "warning"),
    ("exit-zero", GPU + 'if python train.py; then\n  echo done\nelse\n  echo "Error: failed"\n  exit 1\nfi\n', 0, ""),
    ("option-twice", GPU + 'if [ "$T" ]; then\n  NAME="${NAME}_t"\nfi\nNAME="run_$LR"\npython train.py --n $NAME\n', 4, "warning"),
    ("option-twice", GPU + 'NAME="run_$LR"\nif [ "$T" ]; then\n  NAME="${NAME}_t"\nfi\npython train.py --n $NAME\n', 0, ""),
    ("option-twice", GPU + 'A="${A}_t"\npython train.py --n $A\nA="run"\npython train.py --n $A\n', 0, ""),
]  # fmt: skip
FOUR = asking("-N 1", "--gres=gpu:4")  # 3 lines
NAMED: list[tuple[str, str, int, str]] = [
    ("device-of-one-gpu", GPU.replace("gpu:1", "gpu:1 -N 1") + "python train.py --device cuda:1\n", 3, "error"),
    ("device-of-one-gpu", FOUR + "python train.py --gpu_id 4\n", 4, "error"),
    ("device-of-one-gpu", FOUR + "python train.py device=cuda:3\n", 0, ""),
    ("device-of-one-gpu", FOUR + "python train.py --gpu 4\n", 0, ""),  # their number
    ("device-of-one-gpu", asking("--exclusive", "--gres=gpu:1") + "python train.py --device cuda:1\n", 0, ""),
    ("more-ranks-than-gpus", FOUR + "python train.py --gpu_ids 0 1 2 3 4\n", 4, "error"),
    ("more-ranks-than-gpus", FOUR + "python train.py --gpu_ids 0 1 2 3\n", 0, ""),
    ("more-ranks-than-gpus", FOUR + "bash tools/dist_train.sh configs/x.py 8\n", 4, "error"),
    ("more-ranks-than-gpus", FOUR + "./tools/dist_test.sh configs/x.py x.pth 8\n", 4, "error"),
    ("more-ranks-than-gpus", FOUR + "bash tools/dist_train.sh configs/x.py 4\n", 0, ""),
    ("idle-gpus", FOUR + "./tools/dist_train.sh configs/x.py 2\n", 4, "warning"),
    ("idle-gpus", FOUR + "./tools/dist_train.sh configs/x.py 2 &\n./tools/dist_train.sh configs/y.py 2\nwait\n", 0, ""),
    ("one-log-for-array", ARRAY + 'sed -i "s/seed: .*/seed: $SLURM_ARRAY_TASK_ID/" c.yaml\npython t.py --config c.yaml\n', 4, "warning"),
    ("one-log-for-array", ARRAY + 'cat > c.yaml <<EOF\nseed: $SLURM_ARRAY_TASK_ID\nEOF\npython t.py --config c.yaml\n', 4, "warning"),
    ("one-log-for-array", ARRAY + 'I=$SLURM_ARRAY_TASK_ID\necho "seed: $I" > c_$I.yaml\npython t.py --config c_$I.yaml\n', 0, ""),
    ("one-log-for-array", ARRAY + 'echo "seed: 1" > c.yaml\npython t.py --config c.yaml $SLURM_ARRAY_TASK_ID\n', 0, ""),
]  # fmt: skip
USAGE_CASES = [*CPUS, *GPUS, *ARRAYS, *SUBMITTED, *NAMED]
