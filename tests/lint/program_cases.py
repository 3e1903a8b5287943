"""Cases about what programs are started with: builtins, ports in loops, options of containers and MPI; line 0 for none."""

from __future__ import annotations

from tests.lint.cases import ONE, TWO

B = "#!/bin/bash\n"
FOUR = "#!/bin/bash\n#SBATCH --nodes=1\n#SBATCH --ntasks=1\n#SBATCH --gpus-per-node=4\n#SBATCH --output=%j.out\n"  # 5 lines
TASKS = TWO.replace("--ntasks-per-node=1", "--ntasks-per-node=4")
ARRAY = "#!/bin/bash\n#SBATCH --array=1-9\n#SBATCH --output=%A_%a.out\n"  # 3 lines
USES = "cp -r data /scratch/$USER/work\npython train.py --task $SLURM_ARRAY_TASK_ID\n"

BUILTINS: list[tuple[str, str, int, str]] = [
    (
        "builtin-as-program",
        FOUR + "singularity exec --nv a.sif cd /w && torchrun --nproc_per_node 4 x.py\n",
        6,
        "error",
    ),
    ("builtin-as-program", FOUR + "apptainer exec a.sif source env.sh\nsrun python x.py\n", 6, "error"),
    ("builtin-as-program", FOUR + "srun module load cuda\npython x.py\n", 6, "error"),
    ("builtin-as-program", FOUR + "docker run --rm image cd /w && python x.py\n", 6, "error"),
    ("builtin-as-program", FOUR + "singularity exec --nv a.sif bash -c 'cd /w && python x.py'\ncd /w\n", 0, ""),
    ("builtin-as-program", FOUR + "srun bash -c 'module load cuda; python x.py'\nsource env.sh\n", 0, ""),
    ("builtin-as-program", FOUR + "docker run -w cd image python x.py source\n", 0, ""),
]
MODULES: list[tuple[str, str, int, str]] = [
    ("launcher-option", FOUR + "torchrun --nproc_per_node=4 -m train.py\n", 6, "error"),
    ("launcher-option", FOUR + "torchrun --nproc_per_node=4 -m src/train\n", 6, "error"),
    ("launcher-option", FOUR + "torchrun --nproc_per_node=4 --use_env x.py\n", 6, "error"),
    ("launcher-option", FOUR + "torchrun --nproc_per_node=4 -m src.train\n", 0, ""),
    ("launcher-option", FOUR + "python -m torch.distributed.launch --nproc_per_node=4 --use_env x.py\n", 0, ""),
    ("mistyped-command", FOUR + "python -u -m src/train.py\n", 6, "warning"),
    ("mistyped-command", FOUR + "python torch.distributed.launch --nproc_per_node=4 x.py\n", 6, "warning"),
    ("mistyped-command", FOUR + "python -m src.train\npython x.py -m a/b.py\n", 0, ""),
    ("launcher-option", FOUR + "accelerate launch --use_deepspeed --use_fsdp --num_processes 4 x.py\n", 6, "error"),
    ("launcher-option", FOUR + "accelerate launch --multi_gpu --use_fsdp --num_processes 4 x.py\n", 0, ""),
    ("launcher-option", FOUR + "torchrun --nproc_per_node=4 x.py --fp16 --bf16 True\n", 6, "error"),
    ("launcher-option", FOUR + "torchrun --nproc_per_node=4 x.py --fp16 False --bf16 True\n", 0, ""),
    ("launcher-option", FOUR + "deepspeed x.py --include localhost:0,1\n", 6, "error"),
    ("launcher-option", FOUR + "deepspeed x.py --include a,b --deepspeed c.json\n", 0, ""),
    ("stray-line", FOUR + 'python x.py\n"run.sh" 42L, 1580C     33,1    Top\n', 7, "error"),
    ("unknown-option", FOUR + "python x.py\nconda deactivate env\n", 7, "warning"),
    ("unknown-option", FOUR + "python x.py\nconda deactivate\n", 0, ""),
]
OPTIONS: list[tuple[str, str, int, str]] = [
    ("launcher-option", FOUR + "docker run --gpus device=0,1 image python x.py\n", 6, "error"),
    ("launcher-option", FOUR + "docker run --gpus '\"device=0,1\"' --shm-size=8g image python x.py\n", 0, ""),
    ("launcher-option", FOUR + "docker run --gpus all --shm-size 8 image python x.py\n", 6, "error"),
    ("launcher-option", FOUR + "apptainer exec --nv --bind /a /b image.sif python x.py\n", 6, "error"),
    ("launcher-option", FOUR + "apptainer exec --nv --bind /a,/b image.sif python x.py\n", 0, ""),
    ("launcher-option", TASKS + "mpirun -np 8 -genv A 1 -x B=1 python x.py\n", 7, "error"),
    ("launcher-option", TASKS + "mpirun -np 8 -x NCCL_DEBUG INFO python x.py\n", 7, "error"),
    ("launcher-option", TASKS + "mpirun -np 8 -x NCCL_DEBUG -x PATH python x.py -genv\n", 0, ""),
    ("launcher-option", TASKS + "mpirun -np 8 -genv NCCL_DEBUG INFO -ppn 4 python x.py\n", 0, ""),
    ("host-file", TWO + "deepspeed --hostfile=$SLURM_JOB_NODELIST x.py\n", 7, "error"),
    ("host-file", TWO + "mpirun -np 2 --hostfile $PBS_NODEFILE python x.py\n", 0, ""),
    ("idle-nodes", TASKS + "mpirun -np 4 -npernode 4 python x.py\n", 7, "warning"),
    ("idle-nodes", TASKS + "mpiexec -n 8 -ppn 4 python x.py\n", 0, ""),
    ("too-few-slots", FOUR + "pip install intel-tensorflow\nmpirun -np 16 python x.py\n", 7, "warning"),
    ("too-few-slots", FOUR + "module load intel/2020\nmpirun -np 16 python x.py\n", 0, ""),
    ("several-torchruns", TASKS + "srun singularity exec --nv a.sif mpirun -np 4 python x.py\n", 7, "error"),
    ("option-twice", B + "#SBATCH --account=a\n#SBATCH -A b\npython x.py\n", 2, "warning"),
    ("option-twice", B + "#SBATCH --account=a\n#SBATCH -A a\npython x.py\n", 0, ""),
]
WHOLE = FOUR.replace("#SBATCH --output=%j.out", "#SBATCH --exclusive")
LOOP = "for i in 0 1 2 3; do\n"
PORTS: list[tuple[str, str, int, str]] = [
    ("fixed-port", WHOLE + LOOP + "  torchrun --nproc_per_node=1 --master_port=29501 x.py $i &\ndone\nwait\n", 7, "error"),
    ("fixed-port", WHOLE + LOOP + "  deepspeed --include localhost:$i x.py &\ndone\nwait\n", 7, "error"),
    ("fixed-port", WHOLE + LOOP + "  torchrun --nproc_per_node=1 --master_port=$((29501 + i)) x.py $i &\ndone\nwait\n", 0, ""),
    ("fixed-port", WHOLE + LOOP + "  torchrun --nproc_per_node=1 --master_port=29501 x.py $i &\n  wait\ndone\n", 0, ""),
    ("fixed-port", WHOLE + LOOP + "  torchrun --standalone --nproc_per_node=1 x.py $i &\ndone\nwait\n", 0, ""),
    ("fixed-port", WHOLE + "for i in one; do\n  torchrun --nproc_per_node=1 --master_port=29501 x.py $i &\ndone\nwait\n", 0, ""),
    ("nodes-in-sequence", TWO + "for i in 0 1; do\n  srun -N1 -n1 torchrun --nnodes=2 --nproc_per_node=2 --node_rank=$i x.py\ndone\n", 8, "error"),
    ("nodes-in-sequence", TWO + "for i in 0 1; do\n  srun -N1 -n1 torchrun --nnodes=2 --nproc_per_node=2 --node_rank=$i x.py &\ndone\nwait\n", 0, ""),
]  # fmt: skip
COUNTS: list[tuple[str, str, int, str]] = [
    ("more-ranks-than-gpus", FOUR + "composer -n 8 x.py\n", 6, "error"),
    ("more-ranks-than-gpus", FOUR + "tune run --nproc_per_node 8 full_finetune_distributed --config a\n", 6, "error"),
    ("more-ranks-than-gpus", FOUR + "fairseq-train data --distributed-world-size 8\n", 6, "error"),
    ("more-ranks-than-gpus", FOUR + "python3 -m verl.trainer.main_ppo trainer.n_gpus_per_node=8\n", 6, "error"),
    ("more-ranks-than-gpus", FOUR + "composer -n 4 x.py -n 8\nfairseq-train data --distributed-world-size 4\n", 0, ""),
    ("idle-gpus", FOUR + "accelerate launch --cpu --num_processes 4 x.py\n", 6, "warning"),
    ("visible-devices", FOUR + "parallel -j 4 CUDA_VISIBLE_DEVICES={%} python x.py {} ::: 1 2 3 4 5\n", 6, "warning"),
    ("visible-devices", FOUR + "parallel -j 3 CUDA_VISIBLE_DEVICES={%} python x.py {} ::: 1 2 3 4 5\n", 0, ""),
    ("parallel-sizes", B + "torchrun --nproc_per_node=8 x.py --tensor-model-parallel-size 2 --num-experts 6 --expert-model-parallel-size 4\n", 2, "error"),
    ("parallel-sizes", B + "torchrun --nproc_per_node=8 x.py --tensor-model-parallel-size 2 --num-query-groups 3\n", 2, "error"),
    ("parallel-sizes", B + "torchrun --nproc_per_node=8 x.py --tensor-model-parallel-size 8 --num-query-groups 4\n", 0, ""),
    ("parallel-sizes", B + "torchrun --nproc_per_node=8 x.py --tensor-model-parallel-size 2 --num-experts 8 --expert-model-parallel-size 4\n", 0, ""),
]  # fmt: skip
JSON = '{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 0}}'
VALUES: list[tuple[str, str, int, str]] = [
    ("literal-quotes", TWO + 'export TF_CONFIG="{"cluster": {"worker": ["a:1"]}}"\nsrun python x.py\n', 7, "warning"),
    ("literal-quotes", FOUR + 'python x.py --args "{"lr": 1}"\n', 6, "warning"),
    ("literal-quotes", FOUR + "python x.py --args '{\"lr\": 1}' --more \"{\\\"lr\\\": 1}\"\n", 0, ""),
    ("same-node-rank", TWO + f"export TF_CONFIG='{JSON}'\nsrun python x.py\n", 7, "error"),
    ("same-node-rank", ONE + f"export TF_CONFIG='{JSON}'\npython x.py\n", 0, ""),
    ("endless-wait", FOUR + "Xvfb :99 &\npython x.py &\nwait\n", 8, "warning"),
    ("endless-wait", FOUR + "timeout 10 Xvfb :99 &\npython x.py &\nwait\n", 0, ""),
    ("blocks-script", FOUR + "nvidia-smi -l 5 > gpu.log\npython x.py\n", 6, "warning"),
    ("deletes-too-much", ARRAY + USES + "rm -rf /scratch/$USER/work/*\n", 6, "warning"),
    ("deletes-too-much", ARRAY + USES + "rm -rf /scratch/$USER/other\n", 0, ""),
    ("deletes-too-much", ARRAY + USES.replace("/work", "/$SLURM_JOB_ID") + "rm -rf /scratch/$USER/$SLURM_JOB_ID\n", 0, ""),
    ("unterminated", B + "#PBS -N %(name)s\npython x.py --fold=%(fold)d-%(level)d.txt\n", 0, ""),
]  # fmt: skip
PROGRAM_CASES = [*BUILTINS, *MODULES, *OPTIONS, *PORTS, *COUNTS, *VALUES]
