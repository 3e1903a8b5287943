"""Cases about what launchers and programs are told: sizes, devices, host files, ranks set by hand; line 0 for none."""

from __future__ import annotations

from tests.lint.cases import ONE, TWO

B = "#!/bin/bash\n"
EIGHT = TWO.replace("--ntasks-per-node=1", "--ntasks-per-node=4")
MEGATRON = (
    "torchrun --nproc_per_node=8 pretrain_gpt.py --tensor-model-parallel-size {} --pipeline-model-parallel-size {} {}\n"
)
RUN = "torchrun --nproc_per_node=4 "


def sizes(tensor: int, pipeline: int, more: str = "") -> str:
    """A Megatron run on eight GPUs."""
    return B + MEGATRON.format(tensor, pipeline, more)


def hosts(*lines: str, option: str = "--hostfile hosts.txt") -> str:
    """A script that writes a host file and starts deepspeed."""
    return B + "".join(f"{line}\n" for line in lines) + f"deepspeed {option} train.py\n"


SIZES: list[tuple[str, str, int, str]] = [
    ("parallel-sizes", sizes(8, 16), 2, "error"),
    ("parallel-sizes", sizes(3, 1), 2, "error"),
    ("parallel-sizes", sizes(8, 1), 0, ""),
    ("parallel-sizes", sizes(2, 2), 0, ""),
    (
        "parallel-sizes",
        B
        + "TP=8\nPP=2\nA=(\n  --tensor-model-parallel-size $TP\n  --pipeline-model-parallel-size $PP\n)\ntorchrun --nproc_per_node 8 x.py ${A[@]}\n",
        5,
        "error",
    ),
    (
        "parallel-sizes",
        B
        + "TP=8\nPP=2\ntorchrun --nproc_per_node 8 --nnodes $N x.py --tensor-model-parallel-size $TP --pipeline-model-parallel-size $PP\n",
        0,
        "",
    ),
    ("parallel-sizes", EIGHT + "srun python x.py --tensor-model-parallel-size 16\n", 7, "error"),
    ("parallel-sizes", EIGHT + "srun python x.py --tensor-model-parallel-size 8\n", 0, ""),
    (
        "parallel-sizes",
        EIGHT + "srun python train.py model.tensor_model_parallel_size=4 model.pipeline_model_parallel_size=4\n",
        7,
        "error",
    ),
    (
        "parallel-sizes",
        B
        + "torchrun --nproc_per_node=8 -m torchtitan.train --parallelism.tensor_parallel_degree=4 --parallelism.pipeline_parallel_degree 4\n",
        2,
        "error",
    ),
    (
        "parallel-sizes",
        B
        + "torchrun --nproc_per_node=8 -m torchtitan.train --parallelism.tensor_parallel_degree=4 --parallelism.pipeline_parallel_degree 2\n",
        0,
        "",
    ),
    ("parallel-sizes", sizes(2, 1, "--micro-batch-size 4 --global-batch-size 100"), 2, "error"),
    ("parallel-sizes", sizes(2, 1, "--micro-batch-size 4 --global-batch-size 96"), 0, ""),
    ("parallel-sizes", sizes(2, 1, "--micro-batch-size 4 --global-batch-size 100 --rampup-batch-size 4 4 9"), 0, ""),
    ("parallel-sizes", sizes(8, 1, "--num-attention-heads 12 --hidden-size 768"), 2, "error"),
    ("parallel-sizes", sizes(4, 1, "--num-attention-heads 12 --hidden-size 768"), 0, ""),
    ("parallel-sizes", sizes(1, 8, "--num-layers 20"), 2, "error"),
    ("parallel-sizes", sizes(1, 8, "--num-layers 20 --deepspeed"), 0, ""),
    ("parallel-sizes", sizes(1, 8, "--num-layers 20 --decoder-first-pipeline-num-layers 6"), 0, ""),
    ("parallel-sizes", sizes(1, 1, "--num-attention-heads 12 --hidden-size 1000"), 2, "error"),
    ("parallel-sizes", sizes(1, 1, "--num-attention-heads 12 --hidden-size 1000 --kv-channels 64"), 0, ""),
    ("parallel-sizes", sizes(1, 1, "--seq-length 4096 --max-position-embeddings 2048"), 2, "error"),
    ("parallel-sizes", sizes(1, 1, "--seq-length 2048 --max-position-embeddings 2048"), 0, ""),
    ("more-ranks-than-gpus", ONE + "vllm serve m --tensor-parallel-size 8\n", 7, "error"),
    ("more-ranks-than-gpus", ONE + "python -m vllm.entrypoints.openai.api_server --model m -tp 2 -pp 4\n", 7, "error"),
    ("more-ranks-than-gpus", B + "CUDA_VISIBLE_DEVICES=0,1 vllm serve m --tensor-parallel-size=4\n", 2, "error"),
    ("more-ranks-than-gpus", ONE + "python -m sglang.launch_server --tp 8\n", 7, "error"),
    ("more-ranks-than-gpus", ONE + "vllm serve m --tensor-parallel-size 4\n", 0, ""),
    ("more-ranks-than-gpus", ONE + "ray start --head\nvllm serve m --tensor-parallel-size 8\n", 0, ""),
    ("more-ranks-than-gpus", TWO + "vllm serve m --tensor-parallel-size 8\n", 0, ""),
    ("more-ranks-than-gpus", B + "accelerate launch --gpu_ids 0,1 --num_processes 4 x.py\n", 2, "error"),
    ("more-ranks-than-gpus", B + "accelerate launch --gpu_ids 0,1 --num_processes 2 x.py\n", 0, ""),
    ("more-ranks-than-gpus", B + "accelerate launch --gpu_ids all --num_processes 4 x.py\n", 0, ""),
]
DEVICES: list[tuple[str, str, int, str]] = [
    ("same-gpu", B + RUN + "train.py --batch 64 --device 0\n", 2, "warning"),
    ("same-gpu", B + RUN + "train.py --device 0,1\n", 2, "warning"),
    ("same-gpu", B + "accelerate launch --num_processes 4 train.py --device cuda:0\n", 2, "warning"),
    ("same-gpu", B + RUN + "train.py --device 0,1,2,3\n", 0, ""),
    ("same-gpu", B + RUN + "train.py --device cuda\n", 0, ""),
    ("same-gpu", B + "torchrun --nproc_per_node=1 train.py --device 0\n", 0, ""),
    ("same-gpu", B + "python -m torch.distributed.launch --nproc_per_node 4 train.py --local_rank 0\n", 2, "warning"),
    ("same-gpu", B + "deepspeed --num_gpus 4 train.py --local_rank=0\n", 2, "warning"),
    (
        "same-gpu",
        B + "python -m torch.distributed.launch --nproc_per_node 4 --use_env train.py --local_rank 0\n",
        0,
        "",
    ),
    ("same-gpu", B + "deepspeed --num_gpus 4 train.py --output_dir x --local_rank=0\n", 0, ""),
    ("visible-devices", B + 'export CUDA_VISIBLE_DEVICES="0 1 2 3"\n' + RUN + "x.py\n", 2, "warning"),
    ("visible-devices", B + "export CUDA_VISIBLE_DEVICES=[0,1]\n" + RUN + "x.py\n", 2, "warning"),
    ("visible-devices", B + "CUDA_VISIBLE_DEVICES=0-3 " + RUN + "x.py\n", 2, "warning"),
    ("visible-devices", B + 'export CUDA_VISIBLE_DEVICES="0, 1"\npython x.py\n', 0, ""),
    (
        "visible-devices",
        B + 'export CUDA_VISIBLE_DEVICES="0 1"\nfor g in $CUDA_VISIBLE_DEVICES; do python x.py $g; done\n',
        0,
        "",
    ),
    ("visible-devices", ONE + 'export CUDA_VISIBLE_DEVICES=""\npython train.py\n', 7, "warning"),
    ("visible-devices", ONE + "export CUDA_VISIBLE_DEVICES=-1\npython train.py\n", 7, "warning"),
    ("visible-devices", ONE + "CUDA_VISIBLE_DEVICES= python prepare.py\npython train.py\n", 0, ""),
    ("visible-devices", B + "export CUDA_VISIBLE_DEVICES=-1\npython train.py\n", 0, ""),
    (
        "tasks-contradict",
        ONE.replace("node=1", "node=4") + "python x.py trainer.devices=4 trainer.strategy=ddp\n",
        7,
        "warning",
    ),
    ("tasks-contradict", ONE + "python x.py trainer.devices=4 trainer.strategy=ddp\n", 0, ""),
    ("tasks-contradict", ONE.replace("node=1", "node=4") + "srun python x.py trainer.devices=4\n", 0, ""),
    ("tasks-contradict", ONE.replace("node=1", "node=4") + "python x.py --devices 4\n", 0, ""),
]
HOSTS: list[tuple[str, str, int, str]] = [
    ("host-file", hosts("scontrol show hostnames > hosts.txt"), 2, "error"),
    ("host-file", hosts('echo "a:8" > hosts.txt', 'echo "b:8" >> hosts.txt'), 2, "error"),
    ("host-file", hosts('echo "a slot=8" > hosts.txt'), 2, "error"),
    ("host-file", hosts('echo "a slots=8" > hosts.txt'), 0, ""),
    ("host-file", hosts('scontrol show hostnames | sed "s/$/ slots=8/" > hosts.txt'), 0, ""),
    ("host-file", hosts("python make_hosts.py > hosts.txt"), 0, ""),
    ("host-file", hosts(), 0, ""),
    (
        "host-file",
        hosts("scontrol show hostnames > hosts.txt", option="--hostfile hosts.txt --no_ssh --node_rank 0"),
        0,
        "",
    ),
    ("host-file", hosts('for h in a b; do echo "$h slots=8" > hosts.txt; done'), 2, "error"),
    ("host-file", hosts('for h in a b; do echo "$h slots=8"; done > hosts.txt'), 0, ""),
    ("host-file", hosts('for h in a b; do echo "$h slots=8" >> hosts.txt; done'), 2, "error"),
    ("host-file", hosts("rm -f hosts.txt", 'for h in a b; do echo "$h slots=8" >> hosts.txt; done'), 0, ""),
    ("host-file", hosts("> hosts.txt", 'for h in a b; do echo "$h slots=8" >> hosts.txt; done'), 0, ""),
    ("host-file", hosts('echo "a slots=8\\nb slots=8" > hosts.txt'), 2, "error"),
    ("host-file", hosts('echo -e "a slots=8\\nb slots=8" > hosts.txt'), 0, ""),
    ("host-file", hosts("for h in a b; do", '  list+="$h slots=8\\n"', "done", "echo $list > hosts.txt"), 5, "error"),
    ("host-file", hosts("for h in a b; do", '  list+="$h slots=8\\n"', "done", "echo -e $list > hosts.txt"), 0, ""),
    ("host-file", hosts(option="--include=a:0,1,b:0,1"), 2, "error"),
    ("host-file", hosts(option="--hostfile=h --include=a:0,1@b:0,1"), 0, ""),
    ("several-torchruns", TWO + "srun deepspeed --hostfile hosts.txt train.py\n", 7, "error"),
    ("several-torchruns", TWO + "deepspeed --hostfile hosts.txt train.py\n", 0, ""),
    ("several-torchruns", TWO + "srun -N1 -n1 deepspeed --hostfile hosts.txt train.py\n", 0, ""),
    (
        "several-torchruns",
        TWO + "srun bash -c 'deepspeed --hostfile h --no_ssh --node_rank=$SLURM_NODEID --master_addr=a train.py'\n",
        0,
        "",
    ),
    ("several-torchruns", B + "mpirun -np 4 torchrun --nproc_per_node=4 x.py\n", 2, "error"),
    ("several-torchruns", B + "mpirun -np 2 -H a,b torchrun --nproc_per_node=4 x.py\n", 0, ""),
    ("several-torchruns", B + "mpirun -np 1 torchrun --nproc_per_node=4 x.py\n", 0, ""),
    ("several-torchruns", EIGHT + "srun horovodrun -np 4 python x.py\n", 7, "error"),
    ("several-torchruns", EIGHT + "srun -n1 -N1 horovodrun -np 4 python x.py\n", 0, ""),
]
RANKS: list[tuple[str, str, int, str]] = [
    ("same-node-rank", EIGHT + "srun bash -c 'RANK=$SLURM_NODEID LOCAL_RANK=$SLURM_LOCALID python x.py'\n", 7, "error"),
    ("same-node-rank", EIGHT + "srun bash -c 'export RANK=$SLURM_LOCALID; python x.py'\n", 7, "error"),
    ("same-node-rank", EIGHT + "srun bash -c 'export LOCAL_RANK=$SLURM_PROCID; python x.py'\n", 7, "error"),
    (
        "same-node-rank",
        EIGHT + "srun bash -c 'export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID; python x.py'\n",
        0,
        "",
    ),
    ("same-node-rank", TWO + "srun bash -c 'export RANK=$SLURM_NODEID; python x.py'\n", 0, ""),
    (
        "same-node-rank",
        ONE.replace("node=1", "node=4") + "srun bash -c 'export LOCAL_RANK=$SLURM_PROCID; python x.py'\n",
        0,
        "",
    ),
    ("same-node-rank", EIGHT + "export RANK=0\nsrun python x.py\n", 7, "error"),
    ("same-node-rank", ONE + "export RANK=0\nsrun python x.py\n", 0, ""),
]
OPTIONS: list[tuple[str, str, int, str]] = [
    ("launcher-option", B + "torchrun -nproc_per_node=4 x.py\n", 2, "error"),
    ("launcher-option", B + "torchrun -m x --a\n", 0, ""),
    ("launcher-option", B + "torchrun --nproc_per_node= 4 x.py\n", 2, "error"),
    ("launcher-option", B + "torchrun --nproc_per_node=$N x.py\n", 0, ""),
    (
        "launcher-option",
        B + "torchrun --nnodes=2 --node_rank=$HOSTNAME --master_addr=a --nproc_per_node=4 x.py\n",
        2,
        "error",
    ),
    ("launcher-option", B + "torchrun --nnodes=2 --node_rank=2 --master_addr=a --nproc_per_node=4 x.py\n", 2, "error"),
    ("launcher-option", B + "torchrun --nnodes=2 --node_rank=1 --master_addr=a --nproc_per_node=4 x.py\n", 0, ""),
    (
        "launcher-option",
        B + "torchrun --nnodes=2 --rdzv_backend=c10d --rdzv_endpoint=tcp://a:10000 --rdzv_id=1 x.py\n",
        2,
        "error",
    ),
    ("launcher-option", B + "accelerate launch --mixed_precision bfloat16 x.py\n", 2, "error"),
    ("launcher-option", B + "accelerate launch --mixed_precision BF16 x.py\n", 2, "error"),
    ("launcher-option", B + "accelerate launch --mixed_precision fp16 x.py\n", 0, ""),
    ("launcher-option", B + "accelerate launch --num_process 4 x.py\n", 2, "error"),
    ("launcher-option", B + "accelerate --num_processes 4 x.py\n", 2, "error"),
    ("launcher-option", B + "accelerate config --config_file x\n", 0, ""),
    ("launcher-option", B + "python torchrun --nproc_per_node 4 x.py\n", 2, "error"),
    ("launcher-option", B + "python $(which torchrun) --nproc_per_node 4 x.py\n", 0, ""),
    ("launcher-option", B + RUN + "run.sh\n", 2, "error"),
    ("launcher-option", B + RUN + "--no_python run.sh\n", 0, ""),
    ("launcher-option", B + RUN + "llamafactory-cli train x.yaml\n", 2, "error"),
    ("launcher-option", B + RUN + "$(which llamafactory-cli) train x.yaml\n", 0, ""),
    ("launcher-option", B + "accelerate launch axolotl.cli.train x.yaml\n", 2, "error"),
    ("launcher-option", B + "accelerate launch -m axolotl.cli.train x.yaml\n", 0, ""),
    ("mistyped-command", B + "python -m accelerate launch x.py\n", 2, "warning"),
    ("mistyped-command", B + "python -m accelerate.commands.launch x.py\n", 0, ""),
    ("invalid-value", TWO + "export MASTER_PORT=$((10000 + SLURM_JOB_ID))\n", 7, "error"),
    ("invalid-value", TWO + "export MASTER_PORT=$(expr 10000 + $SLURM_JOB_ID)\n", 7, "error"),
    ("invalid-value", TWO + "export MASTER_PORT=$((10000 + SLURM_JOB_ID % 20000))\n", 0, ""),
    ("invalid-value", TWO + "export WANDB_MODE=ofline\n", 7, "error"),
    ("invalid-value", TWO + "export WANDB_MODE=offline\n", 0, ""),
    ("misspelled-variable", TWO + "export NCCL_DISABLE_IB=1\n", 7, "warning"),
    ("misspelled-variable", TWO + "export NCCL_DISABLE_FOO=1\n", 7, "note"),
]
STATIC = "--nnodes=2 --nproc_per_node=4 --master_addr=$HEAD --master_port=$PORT"
LOOP = "for h in $HOSTS; do\n  srun -N1 -n1 -w $h torchrun " + STATIC + " --node_rank={} x.py &\n{}done\nwait\n"
FACTORY = "llamafactory-cli train x.yaml"
JSRUN = "#!/bin/bash\n#BSUB -nnodes 2\njsrun -n 12 -a 1 {} python {}\n"
STARTS: list[tuple[str, str, int, str]] = [
    ("same-node-rank", TWO + LOOP.format("0", ""), 8, "error"),
    ("same-node-rank", TWO + "i=0\n" + LOOP.format("$i", ""), 9, "error"),
    ("same-node-rank", TWO + "i=0\n" + LOOP.format("$i", "  ((i++))\n"), 0, ""),
    ("same-node-rank", TWO + "i=0\n" + LOOP.format("$i", "  let i=i+1\n"), 0, ""),
    ("same-node-rank", TWO + "i=0\n" + LOOP.format("$i", "  i=$((i + 1))\n"), 0, ""),
    ("several-torchruns", EIGHT + f"srun {FACTORY}\n", 7, "error"),
    ("several-torchruns", TWO + f"srun {FACTORY}\n", 0, ""),
    ("several-torchruns", EIGHT + "srun llamafactory-cli export x.yaml\n", 0, ""),
    ("one-node-only", TWO + f"FORCE_TORCHRUN=1 NNODES=2 NODE_RANK=0 {FACTORY}\n", 7, "error"),
    ("one-node-only", ONE + f"FORCE_TORCHRUN=1 NNODES=1 {FACTORY}\n", 0, ""),
    ("one-node-only", TWO + f"export NNODES=2\nsrun bash -c 'NODE_RANK=$SLURM_NODEID {FACTORY}'\n", 0, ""),
    ("node-rank-missing", TWO + f"export FORCE_TORCHRUN=1 NNODES=2\nsrun {FACTORY}\n", 8, "error"),
    ("node-rank-missing", TWO + f"export NNODES=2\nsrun bash -c 'NODE_RANK=$SLURM_NODEID {FACTORY}'\n", 0, ""),
    ("node-rank-missing", TWO + f"export NNODES=2\nsrun bash -c 'export NODE_RANK=$SLURM_NODEID; {FACTORY}'\n", 0, ""),
    ("node-rank-missing", B + f"NNODES=2 NODE_RANK=2 MASTER_ADDR=a {FACTORY}\n", 2, "error"),
    ("node-rank-missing", B + f"NNODES=2 NODE_RANK=1 MASTER_ADDR=a {FACTORY}\n", 0, ""),
    ("more-ranks-than-gpus", ONE + "torchrun --nproc_per_node=$SLURM_CPUS_PER_TASK x.py\n", 7, "error"),
    ("more-ranks-than-gpus", ONE + "torchrun --nproc_per_node=$(nproc) x.py\n", 7, "error"),
    (
        "more-ranks-than-gpus",
        ONE.replace("task=32", "task=4") + "torchrun --nproc_per_node=$SLURM_CPUS_PER_TASK x.py\n",
        0,
        "",
    ),
    ("more-ranks-than-gpus", JSRUN.format("-c 7", "train_ddp.py"), 3, "error"),
    ("more-ranks-than-gpus", JSRUN.format("-c 7 -g 1", "train_ddp.py"), 0, ""),
    ("more-ranks-than-gpus", JSRUN.format("-c7 -g1", "train_ddp.py"), 0, ""),
    ("more-ranks-than-gpus", JSRUN.format("-c 7", "prepare.py"), 0, ""),
    ("idle-nodes", TWO + "dask-ssh --hostfile hosts &\npython client.py\n", 0, ""),
    ("idle-nodes", TWO + "python client.py\n", 7, "warning"),
    (
        "master-address",
        TWO + "export MASTER_ADDR=$(scontrol show nodes $SLURM_JOB_NODELIST | head -n 1)\n",
        7,
        "warning",
    ),
    (
        "master-address",
        TWO + "export MASTER_ADDR=$(scontrol show node $N | grep -o 'NodeAddr=\\S*' | cut -d= -f2)\n",
        0,
        "",
    ),
    ("broken-line", B + "torchrun \\\r\n  --nproc_per_node=4 \\\r\n  x.py\r\n", 0, ""),
    ("dos-line-breaks", B + "torchrun \\\r\n  --nproc_per_node=4 \\\r\n  x.py\r\n", 2, "error"),
    ("mistyped-command", TWO + "load module cuda\n", 7, "warning"),
    ("same-gpu", B + "torchrun --nproc_per_node=$N train.py --data a.yaml --weights w.pt --device 0\n", 2, "warning"),
    ("same-gpu", B + "torchrun --nproc_per_node=$N train.py --device 0\n", 0, ""),
]
ARRAY_JOB = "#!/bin/bash\n#SBATCH -N 1\n#SBATCH --gres=gpu:1\n"
NODES = "nodes=(a b)\nfor ((i = 0; i < 2; i++)); do\n"
REMOTE = "  ssh ${nodes[i]} bash << %s &\n  torchrun --nnodes=2 --node_rank=$i --master_addr=${nodes[0]} x.py\nEND\ndone\nwait\n"
C10D = "torchrun --nproc_per_node={{ n }} --node_rank=$SLURM_NODEID --rdzv_endpoint $A:$P --rdzv_backend "
EXPANDED: list[tuple[str, str, int, str]] = [
    ("not-exported", B + NODES + REMOTE % "END", 0, ""),
    ("not-exported", B + NODES + REMOTE % "'END'", 5, "error"),
    ("expanded-too-early", TWO + f'L="{C10D}c10d"\nsrun $L x.py\n', 0, ""),
    ("expanded-too-early", TWO + f'L="{C10D}static"\nsrun $L x.py\n', 7, "error"),
    (
        "expanded-too-early",
        TWO + 'srun bash -c "' + RUN + '--node_rank $SLURM_PROCID --rdzv_backend=c10d --rdzv_endpoint="$A:$P" x.py"\n',
        0,
        "",
    ),
    ("never-expanded", TWO + "srun " + RUN + "--rdzv_id=\\$SLURM_JOB_ID x.py\n", 7, "note"),
    ("variable-not-expanded", TWO + "srun " + RUN + "--rdzv_id=\\$SLURM_JOB_ID x.py\n", 0, ""),
    ("variable-not-expanded", ONE + RUN + "--rdzv_id='$SLURM_JOB_ID' x.py\n", 7, "note"),
    (
        "never-expanded",
        TWO + "srun " + RUN + "--rdzv_id=\\$SLURM_JOB_ID --node_rank=\\$SLURM_NODEID x.py\n",
        7,
        "error",
    ),
]
ON_ALL = "for h in a b; do\n  srun -N1 -n1 -w $h torchrun --nnodes=2 x.py &\ndone\n"
RESULTS: list[tuple[str, str, int, str]] = [
    ("exit-code-lost", TWO + ON_ALL + "wait\necho done\n", 10, "warning"),
    ("exit-code-lost", TWO + ON_ALL.replace("&", "& p+=($!)") + "wait\n", 0, ""),
    ("exit-code-lost", TWO + ON_ALL + "wait\npython check.py\n", 0, ""),
    ("exit-code-lost", TWO + "srun torchrun x.py\necho ==\necho at $(date)\necho code: $?\n", 10, "warning"),
    ("exit-code-lost", TWO + "srun torchrun x.py\necho code: $?\nexit 1\n", 0, ""),
    ("exit-code-lost", TWO + "srun torchrun x.py\nrc=$?\necho code\nexit $rc\n", 0, ""),
    ("exit-code-lost", TWO + "srun torchrun x.py \\\n  --a b \\\n  | tee log\necho end\n", 9, "warning"),
    ("exit-code-lost", B + "python x.py | tee log\necho end\n", 2, "note"),
]
OPEN = "#!/bin/bash\n#SBATCH -N 2\n#SBATCH -c 2\n#SBATCH --gres=gpu:4\n"
IDLE = "D=$(nvidia-smi --query-gpu=index,memory.used --format=csv | sort -n | head -n 1)\n"
OWN = "#!/bin/bash\n#SBATCH -N 1\n#SBATCH --gres=gpu:2\n#SBATCH --ntasks-per-node=%d\npython fit.py --config lightning.yaml\n"
FIRST_WORDS: list[tuple[str, str, int, str]] = [
    ("mistyped-command", TWO + "srun -n2 OMP_NUM_THREADS=4 python x.py\n", 7, "error"),
    ("mistyped-command", TWO + "nohup A=1 python x.py &\nwait\n", 7, "error"),
    ("mistyped-command", TWO + "mpirun -np 4 A=1 python x.py\n", 7, "error"),
    ("mistyped-command", TWO + "mpirun -np 4 -x A=1 python x.py\nA=1 srun python x.py a=1\n", 0, ""),
    (
        "mistyped-command",
        TWO + "srun env A=1 python x.py\nsrun --export ALL,A=1 python x.py\ntime A=1 python x.py\n",
        0,
        "",
    ),
    ("broken-line", ONE + 'srun bash -c "python x.py \\\n  --a 1 \\\n\n  --b 2\n"\n', 8, "error"),
    ("broken-line", ONE + 'srun bash -c "python x.py \\\n  --a 1 \\\n  --b 2\n"\n', 0, ""),
    ("unset-variable", "N=${HOSTS[$3]}\ntorchrun --nproc_per_node=4 x.py $N\n", 1, "warning"),
    ("unset-variable", "H() { echo ${HOSTS[$1]}; }\n", 0, ""),
    ("unset-variable", "read -ra HOSTS < hosts\nN=${HOSTS[$3]}\necho ${BASH_REMATCH[1]}\npython x.py $N\n", 0, ""),
    ("unset-variable", ARRAY_JOB + "A[${#A[@]}]=1\npython x.py ${A[$I]}\n", 0, ""),
    ("broken-line", 'bash -c "python x.py \\\r\n  --a 1 \\\r\n  --b 2"\r\n', 0, ""),
    ("exit-code-lost", ONE + 'E="srun python x.py"\necho start\n$E; rc=$?\nexit $rc\n', 0, ""),
    (
        "expanded-too-early",
        'echo "#!/bin/bash\n#SBATCH -n 1\necho "$SLURM_JOB_NAME"\npython x.py" > j\nsbatch j\n',
        3,
        "note",
    ),
    ("expanded-too-early", 'echo "#!/bin/bash\n#SBATCH -n 1\npython x.py $SLURM_JOB_NAME" > j\nsbatch j\n', 3, "error"),
    ("too-few-slots", OPEN + "mpirun -n 6 python x.py\n", 5, "warning"),
    ("too-few-slots", OPEN + "#SBATCH -n 8\nmpirun -n 6 python x.py\n", 0, ""),
    ("too-few-slots", OPEN + "mpirun -n 6 --oversubscribe python x.py\n", 0, ""),
    ("too-few-slots", OPEN + "module load intel/2023\nmpirun -n 6 python x.py\n", 0, ""),
    ("too-few-slots", OPEN.replace("-c 2", "--exclusive") + "mpirun -n 6 python x.py\n", 0, ""),
    ("visible-devices", ARRAY_JOB + IDLE + "export CUDA_VISIBLE_DEVICES=$D\npython x.py\n", 5, "warning"),
    ("visible-devices", ARRAY_JOB + IDLE + "export CUDA_VISIBLE_DEVICES=$SLURM_LOCALID\npython x.py\n", 0, ""),
    ("visible-devices", B + IDLE + "export CUDA_VISIBLE_DEVICES=$D\npython x.py\n", 0, ""),
    ("tasks-contradict", OWN % 16, 4, "warning"),
    ("tasks-contradict", OWN % 1, 0, ""),
    ("idle-nodes", "#!/bin/sh\n#$ -l f_node=2\n#$ -l h_rt=1:00:00\npython3 train.py\n", 4, "warning"),
    ("idle-nodes", "#!/bin/sh\n#$ -l f_node=1\n#$ -l h_rt=1:00:00\npython3 train.py\n", 0, ""),
    ("idle-nodes", "#!/bin/sh\n#$ -l rt_F=2\nmpirun -n 2 python3 train.py\n", 0, ""),
]
LAUNCH_CASES = [*FIRST_WORDS, *RESULTS, *EXPANDED, *SIZES, *DEVICES, *HOSTS, *RANKS, *OPTIONS, *STARTS]
