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
    ("asks-for-answer", BARE + "if [[ -t 0 ]]; then\n  read -p 'name? ' name\nfi\n" + TRAIN, 0, ""),
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
SMALL = "#!/bin/bash\n#SBATCH --nodes=1\n#SBATCH --gres=gpu:1\n#SBATCH --cpus-per-task=4\n#SBATCH --mem=8G\n"  # 5 lines
FILL = "rm -rf {0}\nmkdir {0}\ntar -xf data.tar -C {0}\n" + TRAIN
SENT = (
    "#!/bin/bash\n#SBATCH --signal=B:USR1@120\n{}again() {{\n  {}\n}}\ntrap again USR1\nsrun python train.py &\nwait\n"
)
CATCHES = "# The Python script catches SIGUSR1 and saves a checkpoint\n"
PARSED = '#!/bin/bash\nwhile [[ $# -gt 0 ]]; do\n  case $1 in\n    --data) DATA="$2"; shift 2 ;;\n  esac\ndone\n{}python x.py --data $DATA\n'
BRANCHES = "case $SET in\n  a) DATA=a.json ;;\n  b) {} ;;\n  {}\nesac\n"
HOME = '#!/bin/bash\n#PBS -l select=2:ngpus=4\n{}BASE=$PWD\nfor n in $(uniq $PBS_NODEFILE); do\n  ssh $n "cd $BASE; sh train.sh" &\ndone\n{}\n'
LATER = "sh $BASE/train.sh 0"
IN_FILE = TWO.replace("--nodes=2", "--nodes=2 --signal=B:USR1@90") + "source utils/requeue.sh\n"
STARTED = "torchrun --nnodes=2 --nproc_per_node=4 x.py\n"
STORED = TWO + 'export LAUNCH="torchrun --nnodes 2"\nCMD="$LAUNCH x.py"\n'

TOLD: list[tuple[str, str, int, str]] = [
    # processes that a list of all processes names
    ("kills-others", ONE + "nvidia-smi | grep 'python' | awk '{ print $5 }' | xargs -n1 kill -9\n", 7, "warning"),
    ("kills-others", ONE + "kill -9 $(nvidia-smi --query-compute-apps=pid --format=csv,noheader)\n", 7, "warning"),
    ("kills-others", ONE + "ps aux | grep train.py | awk '{print $2}' | xargs kill -9\n", 7, "warning"),
    ("kills-others", ONE + "L=$(nvidia-smi --query-compute-apps=pid --format=csv,noheader)\nkill $L\n", 8, "warning"),
    ("kills-others", ONE + "for i in $(lsof /dev/nvidia0 | sort -u); do\n  kill -9 $i\ndone\n", 8, "warning"),
    ("kills-others", ONE + "nvidia-smi --query-compute-apps=pid | while read p; do\n  kill $p\ndone\n", 8, "warning"),
    ("kills-others", ONE + "fuser -k /dev/nvidia*\n", 7, "warning"),
    ("kills-others", ONE + "kill $(pgrep -f train.py)\n", 7, "warning"),
    ("kills-others", ONE + "fuser -k 29500/tcp\nfuser -v /dev/nvidia*\nkill $(pgrep -P $$ python)\n", 0, ""),
    ("kills-others", ONE + "for i in $PIDS; do\n  kill $i\ndone\nnvidia-smi --query-gpu=pid\n", 0, ""),
    ("kills-others", ONE + "nvidia-smi\nkill -9 $SERVER_PID\n", 0, ""),
    ("kills-others", ONE + "ps aux | grep python | grep $PORT | awk '{print $2}' | xargs kill\n", 0, ""),
    ("kills-others", ONE + "ps aux | grep python | awk '{print $2}'\n", 0, ""),
    # signals
    ("signal-not-trapped", SENT.format(CATCHES, "scontrol requeue $SLURM_JOB_ID"), 7, "warning"),
    ("signal-not-trapped", SENT.format("", "scontrol requeue $SLURM_JOB_ID"), 0, ""),  # it may save at each epoch
    ("signal-not-trapped", SENT.format(CATCHES, "kill -USR1 $!; scontrol requeue $SLURM_JOB_ID"), 0, ""),
    ("signal-not-trapped", SENT.format(CATCHES, "scancel --signal=USR1 $SLURM_JOB_ID"), 0, ""),
    ("signal-not-trapped", IN_FILE + "srun " + STARTED, 8, "warning"),
    ("signal-not-trapped", IN_FILE + "srun " + STARTED.rstrip() + " &\nwait\n", 0, ""),
    ("signal-not-trapped", IN_FILE + "{\n  srun " + STARTED + "} &\nwait\n", 0, ""),
    ("signal-not-trapped", IN_FILE + "exec " + "srun " + STARTED, 0, ""),
    # commands that nothing runs
    ("nothing-to-do", STORED, 8, "warning"),
    ("nothing-to-do", STORED + "echo $CMD\n", 8, "warning"),
    ("nothing-to-do", STORED + 'R=$(eval "$CMD")\n', 0, ""),
    ("nothing-to-do", STORED + "R=$($CMD)\n", 0, ""),
    ("nothing-to-do", STORED + "$START_ALL\n", 0, ""),
    ("nothing-to-do", STORED + "$CMD\n", 0, ""),
    ("nothing-to-do", STORED + "eval $CMD\n", 0, ""),
    ("nothing-to-do", STORED + 'srun bash -c "$CMD"\n', 0, ""),
    ("nothing-to-do", STORED + "echo $CMD > a.sh\n", 0, ""),
    # launchers of one node
    ("idle-nodes", TWO + "composer train.py a.yaml\n", 7, "warning"),
    ("idle-nodes", TWO + "tune run lora_finetune_distributed --config a\n", 7, "warning"),
    ("idle-nodes", TWO + "srun composer train.py a.yaml\n", 0, ""),
    ("idle-nodes", TWO + "composer --node_rank 0 --world_size 8 train.py a.yaml\n", 0, ""),
    ("idle-nodes", ONE + "composer train.py a.yaml\n", 0, ""),
    ("idle-nodes", TWO + "python run_smartsim.py\n", 0, ""),
    # one process for several tasks
    ("idle-gpus", ONE.replace("=1\n#SBATCH --gpus-per-node=4", "=4\n#SBATCH --gpus-per-node=4") + TRAIN, 7, "warning"),
    ("idle-gpus", ONE.replace("=1\n#SBATCH --gpus-per-node=4", "=4\n#SBATCH --gpus-per-task=1") + TRAIN, 7, "note"),
    # folders
    ("output-folder", BARE + "#SBATCH --output=/data/%u/logs/%j.out\nmkdir -p /data/anna/logs\n", 4, "warning"),
    ("output-folder", BARE + "#SBATCH --output=/data/%u/logs/%j.out\nmkdir -p /data/$USER/logs\n", 4, "warning"),
    (
        "output-folder",
        BARE + "#SBATCH --output=/data/%u/logs/%j.out\nmkdir -p /data/anna/b/logs /data/anna/logs2\n",
        0,
        "",
    ),
    ("deletes-too-much", SMALL + FILL.format("/local_datasets/animals"), 6, "warning"),
    ("deletes-too-much", SMALL + FILL.format("/local_datasets/animals_$SLURM_JOB_ID"), 0, ""),
    ("deletes-too-much", SMALL + FILL.format("/project/animals"), 0, ""),
    ("deletes-too-much", SMALL.replace("--mem=8G", "--exclusive") + FILL.format("/local_datasets/animals"), 0, ""),
    ("script-folder", HOME.format("", LATER), 3, "warning"),
    ("script-folder", HOME.format("cd $PBS_O_WORKDIR\n", LATER), 0, ""),
    ("script-folder", HOME.format("cd /project/x\n", LATER), 0, ""),
    ("script-folder", HOME.format("#PBS -d .\n", LATER), 0, ""),
    # options whose value is lost
    ("arguments-dropped", PARSED.format(BRANCHES.format("DATA=b.json", "*) exit 1 ;;")), 4, "warning"),
    ("arguments-dropped", PARSED.format("DATA=c.json\n"), 4, "warning"),
    ("arguments-dropped", PARSED.format(BRANCHES.format("DATA=b.json", "")), 0, ""),  # any other SET keeps it
    ("arguments-dropped", PARSED.format(BRANCHES.format("echo b", "*) exit 1 ;;")), 0, ""),
    ("arguments-dropped", PARSED.format(BRANCHES.format("DATA=${DATA:-b.json}", "*) exit 1 ;;")), 0, ""),
    ("arguments-dropped", PARSED.format('if [ -z "$DATA" ]; then DATA=b; fi\nDATA=$DATA/c\n'), 0, ""),
    # keys of a user's own server
    ("secret-in-script", ONE + "vllm serve m --api-key sk1234\n", 0, ""),
    ("secret-in-script", ONE + "vllm serve m --api-key token-abc123\n", 0, ""),
    ("secret-in-script", ONE + "vllm serve m --api-key Gh7kPq92Lm4x\n", 7, "warning"),
]
PROGRESS_CASES = [*BEFORE, *RANKS, *FEWER, *TOLD]
