"""Cases about values that are taken and not used, results that are lost, and lines that are not read: rule, script, line, severity; line 0 for none."""

from __future__ import annotations

from tests.lint.cases import ONE, TWO

SH = "#!/bin/bash\n"
PBS = SH + "#PBS -l select=1:ngpus=1\n{}\npython x.py\n"
LSF = SH + "#BSUB -n 1\n{}\npython x.py\n"
MANY = SH + "#SBATCH --gpus=2\n{}\npython x.py\n"
NODE = "torchrun --nnodes=4 --nproc_per_node=8 --node_rank=0 --master_addr=$A --master_port=12000 x.py\n"
ALL = "{}\ntorchrun --standalone --nproc_per_node=4 x.py --data a\n"
TEE = "srun python x.py 2>&1 | tee a.log\n"
BLOCK = "if [ -f a ]; then\n  cp a b\nfi\n# Was the training successful?\nif [ $? -eq 0 ]; then\n  echo {}\nfi\n"
SINGULARITY = "srun singularity exec --nv \\\n  -B /a \\\n  # more folders\n{}\n"
STEPS = SH + "#SBATCH --nodes=4\n#SBATCH --gpus-per-node=4\n#SBATCH --time=1:00:00\nsrun -n 16 simulate input\n{}\n"
SERVER = "srun -N1 {} &\nsrun -N1 python x.py &\nwait\n"
MPI = (
    SH
    + "#SBATCH --output={}_%j.out\n#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=40\n#SBATCH --gres=gpu:4\nmpirun {}python x.py\n"
)
HOSTS = TWO + "scontrol show hostnames > /tmp/hosts\n{} --num_nodes 2 --num_gpus 4 x.py\n"

LINES: list[tuple[str, str, int, str]] = [
    ("directive-not-read", MANY.format("#SBATCh --nodes=1"), 3, "warning"),
    ("directive-not-read", MANY.format("#SBatch --gres=gpu:2"), 3, "warning"),
    ("directive-not-read", MANY.format("#SbAtCh -p gpu"), 3, "warning"),
    ("directive-not-read", PBS.format("#Pbs -l walltime=10:00:00"), 3, "warning"),
    ("directive-not-read", PBS.format("#pbs -q gpu"), 3, "warning"),
    ("directive-not-read", LSF.format("#BSub -W 10:00"), 3, "warning"),
    ("directive-not-read", MANY.format("#SBATCh --job-name=a").replace("gpus=2", "nodes=1"), 3, "note"),
    ("directive-not-read", MANY.format("##SBATCH --nodes=1\n#SBATCH --nodes=1\n# Sbatch reads these lines"), 0, ""),
    ("directive-not-read", PBS.format("##PBS -q gpu\n#PBS -q gpu\n# Pbs - see the manual"), 0, ""),
    ("directive-not-read", LSF.format("#bsub -q gpu < next.sh"), 0, ""),
    ("directive-not-read", SH + "#Pbs -q gpu\npython x.py\n", 0, ""),
    ("directive-not-read", MANY.format("#SBATCH --main-user=[YOUR_EMAIL]"), 3, "error"),
    ("directive-not-read", MANY.format("#SBATCH --mail-user=[YOUR_EMAIL]\n#SBATCH --<OPTION>=1"), 0, ""),
    ("directive-not-read", MANY.format("#SBATCH --nodes=1# Use one node"), 0, ""),
    ("directive-refused", MANY.format("#SBATCH --nodes=1# Use one node"), 3, "error"),
    ("directive-refused", MANY.format("#SBATCH --cpus-per-task=4#cores"), 3, "error"),
    ("directive-refused", MANY.format("#SBATCH --time=10:00:00# limit"), 3, "error"),
    ("directive-refused", MANY.format("#SBATCH --nodes=1 # Use one node\n#SBATCH --job-name=1# one"), 0, ""),
    ("broken-line", ONE + SINGULARITY.format('  "$IMAGE" bash -lc "ls"'), 9, "error"),
    ("broken-line", ONE + SINGULARITY.format("  $IMAGE python x.py"), 9, "error"),
    ("broken-line", ONE + SINGULARITY.format("  torch.sif python x.py"), 9, "error"),
    ("broken-line", ONE + "srun singularity exec a.sif python x.py \\\n  --lr 1 \\\n  # --n 2\n$NEXT one\n", 0, ""),
    ("broken-line", ONE + 'if [ $A ]; then\n  python x.py \\\n  # --n 2\n  "$NEXT" one\nfi\n', 0, ""),
    ("broken-line", ONE + 'if [ $A ]; then\n  python x.py \\\n    --lr 1 \\\n  # --n 2\n  "$NEXT" one\nfi\n', 0, ""),
    ("broken-line", ONE + 'python x.py \\\n    --lr 1 \\\n    # --n 2\n  "$NEXT" one\n', 0, ""),
    ("node-local-file", SH + "deepspeed --num_nodes 2 --hostfile=/tmp/hosts /tmp/x.py\n", 2, "error"),
    ("node-local-file", HOSTS.format("srun deepspeed --hostfile=/tmp/hosts"), 8, "error"),
    ("node-local-file", HOSTS.format("deepspeed --hostfile=/tmp/hosts").replace(TWO, SH), 0, ""),
    ("node-local-file", HOSTS.format("deepspeed --hostfile /tmp/hosts").replace(TWO, SH), 0, ""),
    ("node-local-file", HOSTS.format("deepspeed -H /tmp/hosts").replace(TWO, SH), 0, ""),
    ("node-local-file", HOSTS.format("deepspeed").replace(TWO, SH).replace("x.py", "x.py --data /tmp/a.json"), 3, "error"),
    ("idle-nodes", STEPS.format("python train.py --lr 1"), 6, "warning"),
    ("idle-nodes", STEPS.format("python src/pretrain_model.py"), 6, "warning"),
    ("idle-nodes", STEPS.format("srun python train.py"), 0, ""),
    ("idle-nodes", STEPS.format("python collect.py"), 0, ""),
    ("idle-nodes", STEPS.format("python train.py --backend ray"), 0, ""),
    ("idle-nodes", STEPS.format("module load dask\npython train.py"), 0, ""),
    ("idle-nodes", STEPS.format("python train.py").replace("input", "input &"), 0, ""),
    ("more-ranks-than-gpus", MPI.format("horovod", ""), 6, "error"),
    ("more-ranks-than-gpus", MPI.format("horovod", "-np 80 "), 6, "error"),
    ("more-ranks-than-gpus", MPI.format("ddp", "-n 80 -ppn 40 "), 6, "error"),
    ("more-ranks-than-gpus", MPI.format("horovod", "-np 8 "), 0, ""),
    ("more-ranks-than-gpus", MPI.format("horovod", "--hostfile a "), 0, ""),
    ("more-ranks-than-gpus", MPI.format("solver", ""), 0, ""),
]  # fmt: skip
RESULTS: list[tuple[str, str, int, str]] = [
    ("exit-code-lost", ONE + TEE + "if [ $? -eq 0 ]; then\n  echo done\nfi\n", 7, "warning"),
    ("exit-code-lost", ONE + TEE + "rc=$?\necho $rc\n", 7, "warning"),
    ("exit-code-lost", ONE + TEE + 'echo "exit code $?"\n', 7, "warning"),
    ("exit-code-lost", ONE + TEE + "exit $?\n", 7, "warning"),
    ("exit-code-lost", ONE + "set -o pipefail\n" + TEE + "if [ $? -eq 0 ]; then\n  echo done\nfi\n", 0, ""),
    ("exit-code-lost", ONE + TEE + "if [ ${PIPESTATUS[0]} -eq 0 ]; then\n  echo $?\nfi\n", 0, ""),
    ("exit-code-lost", ONE + TEE + 'echo "$? ${PIPESTATUS[0]}"\n', 0, ""),
    ("exit-code-lost", ONE + TEE + "ls a\nif [ $? -eq 0 ]; then\n  echo done\nfi\n", 0, ""),
    ("exit-zero", ONE + "srun python x.py\n" + BLOCK.format("done"), 12, "warning"),
    ("exit-zero", ONE + "srun python x.py\n" + BLOCK.replace("# Was the training successful?\n", "").format("the job is done"), 11, "warning"),
    ("exit-zero", ONE + "srun python x.py\n" + BLOCK.replace("# Was the training successful?\n", "").format("copied"), 0, ""),
    ("exit-zero", ONE + "srun python x.py\n" + BLOCK.replace("cp a b", "./evaluate a").format("done"), 0, ""),
    ("exit-zero", ONE + "srun python x.py || exit 1\n" + BLOCK.format("done"), 0, ""),
    ("exit-zero", ONE + "srun python x.py\nif [ $? -ne 0 ]; then exit 1; fi\npython report.py\n" + BLOCK.format("done"), 0, ""),
    ("exit-zero", ONE + BLOCK.replace("cp a b", "srun python x.py").format("done"), 0, ""),
    ("exit-zero", ONE + "set -e\nsrun python x.py\n" + BLOCK.format("done"), 0, ""),
    ("endless-wait", ONE + SERVER.format("trl vllm-serve --model a"), 9, "warning"),
    ("endless-wait", ONE + SERVER.format("swift rollout --model a"), 9, "warning"),
    ("endless-wait", ONE + SERVER.format("trl sft --model a"), 0, ""),
    ("endless-wait", ONE + SERVER.format("trl vllm-serve --model a").replace("wait", "wait $!; kill %1"), 0, ""),
]  # fmt: skip
VALUES: list[tuple[str, str, int, str]] = [
    ("unset-variable", ONE + "run_name=$(date)\nexport RUN_NAME=$RUN_NAME\npython x.py\n", 8, "warning"),
    ("unset-variable", ONE + 'run_name=a\nexport RUN_NAME="${RUN_NAME}"\npython x.py\n', 8, "warning"),
    ("unset-variable", ONE + "run_name=a\nRUN_NAME=$RUN_NAME\npython x.py --name $run_name\n", 0, ""),
    ("unset-variable", ONE + "run_name=a\nexport RUN_NAME=$run_name\npython x.py\n", 0, ""),
    ("unset-variable", ONE + "run_name=a\nexport RUN_NAME=${RUN_NAME:-b}\npython x.py\n", 0, ""),
    ("same-node-rank", SH + "NODE_RANK=${RANK}\nA=$1\n" + NODE, 4, "error"),
    ("same-node-rank", SH + "node_rank=$2\nA=$1\n" + NODE.replace("=0", " 0"), 4, "error"),
    ("same-node-rank", SH + "NODE_RANK=${RANK}\nA=$1\n" + NODE.replace("=0", "=$NODE_RANK"), 0, ""),
    ("same-node-rank", SH + "NODE_RANK=0\nA=$1\n" + NODE, 0, ""),
    ("same-node-rank", SH + "NODE_RANK=${RANK}\nA=$1\n" + NODE.replace("nnodes=4", "nnodes=1"), 0, ""),
    ("same-node-rank", SH + "A=$1\n" + NODE, 0, ""),
    ("arguments-dropped", SH + ALL.format("MORE=${@:2}"), 2, "warning"),
    ("arguments-dropped", SH + ALL.format('MORE=("$@")'), 2, "warning"),
    ("arguments-dropped", SH + ALL.format('MORE="$*"'), 2, "warning"),
    ("arguments-dropped", SH + ALL.format("MORE=${@:2}") .replace("--data a", "$MORE"), 0, ""),
    ("arguments-dropped", SH + ALL.format("MORE=${@:2}").replace("--data a", '"$@"'), 0, ""),
    ("arguments-dropped", SH + ALL.format("export MORE=$@"), 0, ""),
    ("arguments-dropped", SH + ALL.format("MORE=$1"), 0, ""),
    ("arguments-dropped", SH + "MORE=$@\nsource run.sh\n" + ALL.format("A=1"), 0, ""),
]  # fmt: skip
TAKEN_CASES = [*LINES, *RESULTS, *VALUES]
