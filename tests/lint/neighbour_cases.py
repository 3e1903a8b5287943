"""Cases about calculated counts, pipes, patterns and joined paths: the rule, the script, the line and the severity; line 0 for none."""

from __future__ import annotations

from tests.lint.cases import HEAD, ONE, TWO

SSH_LOOP = 'for n in $NODES; do\n  ssh "$n" "torchrun --nnodes=2 --nproc_per_node=4 --node_rank=$i x.py" \\\n    2>&1 | sed s/a/b/{}\ndone\n'
CALCULATED: list[tuple[str, str, int, str]] = [
    ("octal-number", TWO + "P=$((10000 + ${SLURM_JOB_ID:(-4)}))\n", 7, "warning"),
    ("octal-number", TWO + "P=$((20000 + (${SLURM_JOB_ID:-0} % 40000)))\nQ=$((${SLURM_JOB_ID:-1234} + 1))\n", 0, ""),
    ("nodes-in-sequence", TWO + SSH_LOOP.format(""), 8, "error"),
    ("nodes-in-sequence", TWO + SSH_LOOP.format(" &") + "wait\n", 0, ""),
    ("nodes-in-sequence", TWO + SSH_LOOP.format(" | while read l; do echo $l; done"), 8, "error"),
    ("nodes-in-sequence", TWO + SSH_LOOP.format(" | while read l; do echo $l; done &") + "wait\n", 0, ""),
    ("nodes-in-sequence", TWO + SSH_LOOP.format(" | { tee a; cat; } &") + "wait\n", 0, ""),
    ("nodes-in-sequence", TWO + SSH_LOOP.format("; ls | cat &"), 8, "error"),
    ("unset-variable", ONE + "ARGS=1\npython x.py ${ARGS_}\n", 8, "warning"),
    ("unset-variable", ONE + "ARGS=1\npython x.py ${!ARGS_*} ${!SLURM_@} ${!ARGS_@}\n", 0, ""),
    ("idle-gpus", ONE + "G=4\nR=$((G / 2))\ntorchrun --standalone --nproc_per_node=$R x.py\n", 9, "warning"),
    ("idle-gpus", ONE + "G=4\nR=$(($G - 1))\ntorchrun --standalone --nproc_per_node=$R x.py\n", 0, ""),
]  # fmt: skip
LOGS = ONE.replace("#SBATCH --nodes", "#SBATCH -o logs/a.out\n#SBATCH --nodes")
STATIC = "srun -K1 -c32 torchrun --nnodes=2 --nproc_per_node=4 --rdzv_backend=c10d --rdzv_id=$SLURM_JOB_ID --rdzv_endpoint={}:$P x.py\n"
ADDRESSES: list[tuple[str, str, int, str]] = [
    ("master-address", TWO + "MASTER_ADDR=gpu01\n" + STATIC.format("gpu01"), 7, "warning"),
    ("master-address", TWO + "MASTER_ADDR=$A\n" + STATIC.format("worker-0.a.b"), 8, "warning"),
    ("master-address", TWO + HEAD + STATIC.format("$HEAD"), 0, ""),
]  # fmt: skip
JOINED: list[tuple[str, str, int, str]] = [
    ("joined-path", ONE + "WORK_DIR=/a/b\nqsub -v A=1 ${WORK_DIR}run.sh\n", 8, "warning"),
    ("joined-path", ONE + "python ${SLURM_SUBMIT_DIR}train.py\n", 7, "warning"),
    ("joined-path", ONE + "python $(pwd)src/train.py\n", 7, "warning"),
    ("joined-path", ONE + 'ROOT="$HOME/a"\npython x.py --config "${ROOT}configs/a.yaml"\n', 8, "warning"),
    ("joined-path", ONE + "DIR=/a/b/\nPREFIX=/a/b\nRUN_DIR=/a/b_\npython ${DIR}x.py ${PREFIX}x.py ${RUN_DIR}x.py\n", 0, ""),
    ("joined-path", ONE + "DIR=/a/b\nOUT_DIR=$1\n# ${DIR}x.py\npython ${DIR}/x.py ${DIR}_x.py ${DIR}.py ${OUT_DIR}x.py\n", 0, ""),
    ("joined-path", ONE + "DIR=/a/b\nif [ $A ]; then DIR=$B; fi\npython ${DIR}x.py\n", 0, ""),
    ("folder-not-copied", ONE + "cp $SLURM_TMPDIR /a/b\n", 7, "warning"),
    ("output-folder", LOGS + 'R="${SLURM_SUBMIT_DIR:-$(pwd)}"\nmkdir -p "$R/logs"\n', 2, "warning"),
    ("output-folder", LOGS + 'mkdir -p "$SCRATCH/logs"\n', 2, "note"),
]  # fmt: skip
HOST = "HOST=$(hostname)\n"
PATTERNS: list[tuple[str, str, int, str]] = [
    ("constant-condition", ONE + HOST + 'if [ "$HOST" == "login*" ]; then ls; fi\n', 8, "warning"),
    ("constant-condition", ONE + "if [ $HOSTNAME = login* ]; then ls; fi\n", 7, "warning"),
    ("constant-condition", ONE + "if [[ $HOSTNAME != 'login*' ]]; then ls; fi\n", 7, "warning"),
    ("constant-condition", ONE + 'if [[ $HOSTNAME == login* || $HOSTNAME == "gpu"* || $A == "*" ]]; then ls; fi\n', 0, ""),
    ("constant-condition", ONE + 'for f in a/*.pt; do\n  [ "$f" = "a/*.pt" ] && continue\n  ls $f\ndone\n', 0, ""),
    ("constant-condition", ONE + 'F=$(echo *.log)\nif [ "$F" = "*.log" ]; then ls; fi\n', 0, ""),
    ("unset-variable", ONE + "python x.py\n# status=$?\nif [ $status -ne 0 ]; then\n  exit 1\nfi\n", 9, "warning"),
    ("unset-variable", ONE + '# RESTART=1\nif [ "${RESTART:-0}" -eq 1 ]; then ls; fi\n# MODE=a\nif [ "$MODE" = a ]; then ls; fi\n', 0, ""),
    ("unset-variable", ONE + '# COUNT=1\nif [ -n "$COUNT" ] && [ $COUNT -eq 1 ]; then ls; fi\n# STEP=1\nif [[ $STEP -eq 1 ]]; then ls; fi\n', 0, ""),
    ("unset-variable", ONE + "# COUNT=1\n: ${COUNT:=2}\nif [ $COUNT -eq 1 ]; then ls; fi\n", 0, ""),
    ("container-shell-ended", ONE + "apptainer exec --nv a.sif bash\npython x.py\n", 7, "warning"),
    ("container-shell-ended", ONE + "apptainer exec --nv a.sif bash x.sh\npython x.py\napptainer exec a.sif bash <<EOF\nls\nEOF\n", 0, ""),
    ("container-shell-ended", ONE + "docker run -dit --name a img bash\npython x.py\n", 0, ""),
]  # fmt: skip
QUERY = "$(nvidia-smi --query-gpu=count --format=csv,noheader{})"
LM_EVAL = "lm_eval --model vllm --model_args pretrained=a,tensor_parallel_size=$N --tasks ${T}\n"
COUNTED: list[tuple[str, str, int, str]] = [
    ("value-split", ONE + f"N={QUERY.format('')}\ntorchrun --standalone --nproc_per_node=$N x.py\n", 7, "error"),
    ("value-split", ONE + f"torchrun --standalone --nproc_per_node={QUERY.format('')} x.py\n", 7, "error"),
    ("value-split", ONE + f"N={QUERY.format(' -i 0')}\nM={QUERY.format(' | head -n 1')}\npython x.py $N $M\n", 0, ""),
    ("value-split", ONE + f"N=({QUERY.format('')})\nM={QUERY.format('')}\necho $M\npython x.py ${{N[0]}} ${{#N[@]}}\n", 0, ""),
    ("value-split", ONE.replace("node=4", "node=1") + f"N={QUERY.format('')}\npython x.py $N\n", 0, ""),
    ("more-ranks-than-gpus", ONE + "N=$SLURM_GPUS_PER_NODE\nN=8\n" + LM_EVAL, 8, "error"),
    ("more-ranks-than-gpus", ONE + "python x.py --tensor-parallel-size 8\n", 7, "error"),
    ("more-ranks-than-gpus", ONE + "python -m a.main actor.rollout.tensor_model_parallel_size=8\n", 7, "error"),
    ("more-ranks-than-gpus", ONE + "N=4\n" + LM_EVAL + "python x.py --tensor-parallel-size 4\n", 0, ""),
    ("more-ranks-than-gpus", TWO + "python x.py --tensor-parallel-size 8\nN=8\n" + LM_EVAL, 0, ""),
    ("visible-devices", ONE.replace("node=4", "node=1") + "export CUDA_VISIBLE_DEVICES=0,1,2,3\npython x.py\n", 7, "warning"),
    ("visible-devices", ONE.replace("node=4", "node=1\n#SBATCH --exclusive") + "export CUDA_VISIBLE_DEVICES=0,1\npython x.py\n", 8, "warning"),
    ("visible-devices", ONE + "export CUDA_VISIBLE_DEVICES=0,1,2,3\npython x.py\n", 0, ""),
    ("world-size", ONE + "srun python x.py --nodes 3 --gpus 3 --world_size 8\n", 7, "error"),
    ("world-size", "#!/bin/bash\nW=8\necho '#!/bin/bash' > a.sh\necho \"python x.py --nodes 3 --gpus=3 --world_size $W\" >> a.sh\nsbatch a.sh\n", 2, "error"),
    ("world-size", ONE + "python x.py --nodes 2 --gpus 4 --world_size 8\npython x.py --nodes 2 --gpus 8 --world_size 8\n", 0, ""),
    ("world-size", ONE + "python x.py --nodes 2 --gpus 4 --world_size 2\npython x.py --gpus 4 --world_size 2\n", 0, ""),
]  # fmt: skip
RUN = "run() {\n  torchrun --standalone --nproc_per_node=4 x.py --seed $1\n}\n"
SERVE = "server() {\n  vllm serve m --port 8000\n}\n"
RANK = "export MASTER_ADDR=n1\nrun() {\n  srun torchrun --nnodes=2 --nproc_per_node=4 --node_rank=$SLURM_PROCID --master_addr=$MASTER_ADDR x.py\n}\n"
SIDE_BY_SIDE = "CUDA_VISIBLE_DEVICES=0,1 torchrun --nproc_per_node=2 x.py &\nCUDA_VISIBLE_DEVICES=2,3 torchrun --nproc_per_node=2 y.py &\nwait\n"
IN_FUNCTIONS: list[tuple[str, str, int, str]] = [
    ("one-node-only", TWO + RUN + "mkdir -p out\nrun 1\nrun 2\n", 8, "error"),
    ("one-node-only", TWO + RUN + "X=1\nfor s in 1 2; do\n  run $s\ndone\n", 8, "error"),
    ("one-node-only", TWO + RUN + "if [ -f a ]; then\n  run 1\nfi\n", 8, "error"),
    ("one-node-only", TWO + RUN + "srun --ntasks=2 ls\n", 0, ""),  # the function is not called
    ("one-node-only", TWO + RUN + "srun bash -c 'run 1'\n", 0, ""),
    ("one-node-only", TWO + RUN + "ssh n2 run 1\nrun 2\n", 0, ""),
    ("expanded-too-early", TWO + RANK + "mkdir -p out\nrun\n", 9, "error"),
    ("blocks-script", ONE + SERVE + "server\npython x.py\n", 8, "warning"),
    ("background-not-awaited", ONE + RUN.replace("$1", "$1 &") + "run 1\nrun 2\n", 8, "error"),
    ("background-not-awaited", ONE + RUN.replace("$1", "$1 &") + "run 1\nrun 2\nwait\n", 0, ""),
    ("srun-without-command", ONE + "check() {\n  srun -n 2 ./check.sh\n  ls\n}\ncheck\n", 0, ""),
    ("blocks-script", ONE + "singularity exec --nv a.sif vllm serve m\npython x.py\n", 7, "warning"),
    ("blocks-script", ONE + "conda run -n v vllm serve m\npython x.py\n", 7, "warning"),
    ("blocks-script", ONE + "uv run trl vllm-serve --model m\npython x.py\n", 7, "warning"),
    ("blocks-script", ONE + "singularity exec --nv a.sif python train.py\nconda run -n v python y.py\npython x.py\n", 0, ""),
    ("blocks-script", ONE + "singularity exec --nv a.sif vllm serve m &\npython x.py\n", 0, ""),
    ("secret-in-script", ONE + 'export WANDB_API_KEY="${WANDB_API_KEY:-0123456789abcdef0123456789abcdef89abcdef}"\n', 7, "warning"),
    ("secret-in-script", ONE + 'export WANDB_API_KEY="${WANDB_API_KEY:-}"\nexport HF_TOKEN=${HF_TOKEN:-$(cat ~/.token)}\n', 0, ""),
    ("unknown-option", ONE + "srun --cpu-per-task=4 python x.py\n", 7, "error"),
    ("unknown-option", ONE + "srun --gpus-per-tasks=1 ./a.out\n", 7, "error"),
    ("unknown-option", ONE + "srun --cpus-per-t=4 --tasks-per-node=1 --cpu-bind=none python x.py --cpu-per-task 4\n", 0, ""),
    ("fixed-port", ONE + "export MASTER_PORT=$1\n" + SIDE_BY_SIDE, 9, "error"),
    ("fixed-port", ONE + "export PET_MASTER_PORT=29500\n" + SIDE_BY_SIDE, 0, ""),
    ("output-folder", ONE + "python x.py > no_such_logs/x.log 2>&1\n", 7, "note"),
    ("output-folder", ONE + "D=no_such_logs\npython x.py | tee -a $D/x_$1.log\n", 8, "note"),
    ("output-folder", ONE + "D=no_such_logs\nmkdir -p $D\npython x.py | tee -a $D/x_$1.log\n", 0, ""),
    ("output-folder", ONE + "cd $HOME/x\npython x.py > no_such_logs/x.log\n", 0, ""),
    ("output-folder", ONE + "python x.py --out no_such_logs/a\npython x.py > no_such_logs/x.log\n", 0, ""),
    ("output-folder", ONE + "python x.py > /data/no_such_logs/x.log\npython x.py > ../logs/x.log\n", 0, ""),
]  # fmt: skip
NEIGHBOUR_CASES = [*IN_FUNCTIONS, *CALCULATED, *ADDRESSES, *JOINED, *PATTERNS, *COUNTED]
