"""Cases about commands above the work, equal ranks and idle GPUs: the rule, the script, the line, the severity; line 0 for none."""

from __future__ import annotations

from tests.lint.cases import ONE, TWO

BARE = "#!/bin/bash\n#SBATCH --nodes=1\n#SBATCH --gpus-per-node=1\n"  # 3 lines
TRAIN = "python train.py\n"
INNER = (
    "srun -c32 bash -c 'torchrun --nnodes=2 --nproc_per_node=4 --node_rank={} --master_addr=$A --master_port=1 x.py'\n"
)
OUTER = "srun -c32 torchrun --nnodes=2 --nproc_per_node=4 --node_rank={} --master_addr=$A --master_port=1 x.py\n"
NODES = "srun -c32 torchrun --nnodes={} --nproc_per_node=4 --rdzv_backend=c10d --rdzv_id=$SLURM_JOB_ID --rdzv_endpoint={}:1 x.py\n"
PER_GPU = ONE.replace("--ntasks-per-node=1", "--ntasks-per-gpu=1")

BEFORE: list[tuple[str, str, int, str]] = [
    ("blocks-script", BARE + "nvidia-smi -l 5\n" + TRAIN, 4, "warning"),
    ("blocks-script", BARE + "watch nvidia-smi\n" + TRAIN, 4, "warning"),
    ("blocks-script", BARE + "tensorboard --logdir runs\n" + TRAIN, 4, "warning"),
    ("blocks-script", BARE + "tail -f log.txt\n" + TRAIN, 4, "warning"),
    (
        "blocks-script",
        BARE + "nvidia-smi -l 5 &\ntop -b -n 1\nvim --version\nnvidia-smi\ntail -n 3 log.txt\n" + TRAIN,
        0,
        "",
    ),
    ("blocks-script", BARE + "python train.py &\ntail -f log.txt\n", 0, ""),
    ("blocks-script", BARE + TRAIN + "tail -f log.txt\n", 0, ""),
    ("exits-early", BARE + "ls\nexit\n" + TRAIN, 5, "error"),
    ("exits-early", BARE + "exec bash\n" + TRAIN, 4, "error"),
    ("exits-early", BARE + TRAIN + "exit\npython other.py\n", 0, ""),
    (
        "exits-early",
        BARE + "ls || exit 1\n[ -d x ] || { echo no; exit 1; }\nif [ -f x ]; then\n  exit 0\nfi\n" + TRAIN,
        0,
        "",
    ),
    (
        "exits-early",
        BARE + "usage() {\n  exit 1\n}\ncase $1 in\n  -h) exit 0 ;;\nesac\ncd x && exit 1\n(exit 1)\n" + TRAIN,
        0,
        "",
    ),
    ("asks-for-answer", BARE + "accelerate config\n" + TRAIN, 4, "warning"),
    ("asks-for-answer", BARE + "read -p 'name? ' name\n" + TRAIN, 4, "warning"),
    ("asks-for-answer", BARE + "accelerate config default\nread -r a < x\n" + TRAIN, 0, ""),
    ("container-shell-ended", BARE + "scl enable devtoolset-7 bash\n" + TRAIN, 4, "warning"),
    ("container-shell-ended", BARE + "scl enable devtoolset-7 'make all'\n" + TRAIN, 0, ""),
]
RANKS: list[tuple[str, str, int, str]] = [
    ("same-node-rank", TWO + INNER.format("$SLURM_LOCALID"), 7, "error"),
    ("same-node-rank", TWO + OUTER.format("${NODE_RANK:-0}"), 7, "error"),
    ("same-node-rank", TWO + OUTER.format("$(hostname | tail -c 2)"), 7, "error"),
    ("same-node-rank", TWO + INNER.format("$SLURM_NODEID"), 0, ""),
    ("same-node-rank", TWO + INNER.format("${SLURM_NODEID:-0}"), 0, ""),
    ("same-node-rank", TWO + INNER.format("$(hostname | tail -c 2)"), 0, ""),
    ("same-node-rank", ONE + OUTER.format("${NODE_RANK:-0}").replace("--nnodes=2", "--nnodes=1"), 0, ""),
    ("node-count", TWO + NODES.format(1, "$MASTER_ADDR"), 7, "error"),
    ("node-count", TWO + NODES.format(2, "$MASTER_ADDR"), 0, ""),
    ("node-count", TWO + NODES.format(1, "localhost"), 0, ""),
    ("several-torchruns", PER_GPU + "srun torchrun --nproc_per_node=4 x.py\n", 7, "error"),
    ("several-torchruns", PER_GPU + "srun --ntasks=1 torchrun --nproc_per_node=4 x.py\n", 0, ""),
]
FEWER: list[tuple[str, str, int, str]] = [
    ("idle-gpus", ONE + "python x.py trainer.devices=1\n", 7, "warning"),
    ("idle-gpus", ONE + "python x.py --ngpu 2\n", 7, "warning"),
    ("idle-gpus", ONE + "python \\\n  x.py \\\n  --ngpus=1\n", 7, "warning"),  # once, by the rule's first part
    ("idle-gpus", ONE + "srun --gres=gpu:1 python x.py\n", 7, "warning"),
    (
        "idle-gpus",
        ONE + "CUDA_VISIBLE_DEVICES=0 python a.py &\nCUDA_VISIBLE_DEVICES=1 python b.py &\nwait\n",
        7,
        "warning",
    ),
    ("idle-gpus", ONE + "".join(f"CUDA_VISIBLE_DEVICES={i} python a.py &\n" for i in range(4)) + "wait\n", 0, ""),
]
PROGRESS_CASES = [*BEFORE, *RANKS, *FEWER]
