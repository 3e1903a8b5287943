"""Cases about what loops over the nodes and options tell launchers and programs; line 0 for none."""

from __future__ import annotations

from tests.lint.cases import ONE, TWO

B = "#!/bin/bash\n"
MANY = ONE.replace("--ntasks-per-node=1", "--ntasks-per-node=4")
LIST = TWO + "port=29511\ni=0\nfor n in $(scontrol show hostnames $SLURM_JOB_NODELIST); do\n"
START = "  srun -N1 -n1 -w $n torchrun --nnodes=2 --nproc_per_node=4 --node_rank=$i --master_addr=$first --master_port={} x.py &\n"
END = "  i=$((i + 1))\ndone\nwait\n"
COUNT = (
    TWO
    + "for i in {}; do\n  srun -N1 -n1 -w ${{H[$i]}} torchrun --nnodes=2 --node_rank=$i --master_addr=$A x.py &\ndone\nwait\n"
)
LAUNCH = "accelerate launch --num_machines 2 --num_processes 8 --machine_rank $i --main_process_ip {} x.py"
HEAD = (
    TWO.replace("--nodes=2", "--nodes=3")
    + "srun -N1 -n1 -w $h torchrun --nnodes=3 --node_rank=0 --master_addr=$h x.py &\n"
)

LOOPS: list[tuple[str, str, int, str]] = [
    ("port-per-node", LIST + "  port=$((29500 + i))\n" + START.format("$port") + END, 11, "error"),
    ("port-per-node", LIST + START.format("$((29500 + i))") + END, 10, "error"),
    ("port-per-node", LIST + "  port=$(shuf -i 10000-20000 -n 1)\n" + START.format("$port") + END, 11, "error"),
    ("port-per-node", LIST + START.format("$port") + END, 0, ""),
    ("port-per-node", LIST + "  port=29512\n" + START.format("$port") + END, 0, ""),
    ("port-per-node", LIST + START.format("$((29500 + SLURM_JOB_ID % 1000))") + END, 0, ""),
    ("port-per-node", B + "for i in 0 1; do\n  srun torchrun --nnodes=1 --master_port=$((29500 + i)) x.py &\ndone\nwait\n", 0, ""),
    ("master-address", LIST + START.replace("$first", "$n").format("$port") + END, 10, "warning"),
    ("master-address", B + "i=0\nfor h in a b; do\n  ssh $h " + LAUNCH.format("$h") + " &\n  ((i++))\ndone\nwait\n", 4, "warning"),
    ("master-address", B + "i=0\nfor h in a b; do\n  ssh $h " + LAUNCH.format("$first") + " &\n  ((i++))\ndone\nwait\n", 0, ""),
    ("node-count", (LIST + START.format("$port") + END).replace("i=0\n", "i=1\n"), 10, "error"),
    ("node-count", (LIST + "  ((i++))\n" + START.format("$port") + "done\nwait\n").replace("i=0\n", "i=-1\n"), 0, ""),
    ("node-count", LIST + START.format("$port") + END, 0, ""),
    ("node-count", COUNT.format("1 2"), 8, "error"),
    ("node-count", COUNT.format("0"), 8, "error"),
    ("node-count", COUNT.format("{0..3}"), 8, "error"),
    ("node-count", COUNT.format("$(seq 0 2)"), 8, "error"),
    ("node-count", COUNT.format("{0..1}"), 0, ""),
    ("node-count", COUNT.format("3 1 2"), 0, ""),
    ("node-count", COUNT.replace("=2 ", "=$N ").format("{0..1}"), 0, ""),
    ("node-count", HEAD + COUNT.format("1 2").removeprefix(TWO).replace("nnodes=2", "nnodes=3"), 0, ""),
]  # fmt: skip
PROGRAMS: list[tuple[str, str, int, str]] = [
    ("world-size", MANY + "python -u tools/train.py c.py --launcher=\"slurm\"\n", 7, "error"),
    ("world-size", MANY + "python tools/train.py c.py --launcher slurm\n", 7, "error"),
    ("world-size", ONE + "python tools/train.py c.py --launcher pytorch\n", 7, "error"),
    ("world-size", MANY + "srun python tools/train.py c.py --launcher=slurm\n", 0, ""),
    ("world-size", ONE + "python tools/train.py c.py --launcher slurm\npython x.py --launcher none\n", 0, ""),
    ("world-size", ONE + "torchrun --nproc_per_node=4 tools/train.py c.py --launcher pytorch\n", 0, ""),
    ("world-size", ONE + "export RANK=0 WORLD_SIZE=1\npython tools/train.py c.py --launcher pytorch\n", 0, ""),
    ("world-size", B + "python tools/train.py c.py --launcher pytorch\n", 0, ""),
    ("world-size", ONE + "srun python x.py --num_nodes 2 --devices 4\n", 7, "error"),
    ("world-size", ONE + "srun python x.py --num_nodes 2708\n", 0, ""),
    ("input-not-read", ONE + "srun python x.py 2>/dev/null && tee my.log\n", 7, "warning"),
    ("input-not-read", ONE + "srun python x.py | tee my.log\nsrun python y.py |& tee -a my.log && tee b.log < a.log\n", 0, ""),
    ("unknown-option", ONE + "singularity exec -s /bin/bash --nv i.sif python x.py\n", 7, "error"),
    ("unknown-option", ONE + "apptainer exec -nv i.sif python x.py\n", 7, "error"),
    ("unknown-option", ONE + "singularity exec --nv -B /a:/a i.sif bash -s < x.sh\nsingularity exec i.sif python x.py -v\n", 0, ""),
    ("octal-number", B + "port=$(($(date +%N) % 30000))\n", 2, "warning"),
    ("octal-number", B + "h=$((1 + $(date '+%H')))\n", 2, "warning"),
    ("octal-number", B + "h=$((1 + 10#$(date +%H)))\nt=$(($(date +%s) - start))\nm=$(($(date +%-M) + 1))\n", 0, ""),
    ("mistyped-command", ONE + "python -m torch.distributed --nproc_per_node=4 x.py\n", 7, "warning"),
    ("unset-variable", B + "export A=$KUBERNETES_POD_NAME\ntorchrun --nnodes=$WORLD_SIZE --node_rank=$RANK --master_addr=$MASTER_ADDR x.py\n", 0, ""),
    ("idle-gpus", TWO + "mpirun -n 1 --oversubscribe python tune.py\n", 0, ""),
]  # fmt: skip
NAMES: list[tuple[str, str, int, str]] = [
    ("unset-variable", ONE + "MODEL=a\npython x.py --model $MDOEL\n", 8, "warning"),
    ("unset-variable", ONE + "source ~/.env\nOUTDIR=out\ncp ${OUTDRI}/a b\n", 9, "warning"),
    ("unset-variable", ONE + "MPI_RANK=$PMI_RANK\necho $MPI_RANK\n", 0, ""),
    ("unset-variable", ONE + "TRAIL=a\nTRIAL=b\npython x.py $TRIAL $TRAIL\n", 0, ""),
    ("unset-variable", ONE + "TRAIL=${TRIAL:-1}\npython x.py $TRAIL\n", 0, ""),
    ("unset-variable", ONE + "A1_SIZE=1\npython x.py $A1_SIZE $1A_SIZE\n", 0, ""),
    ("launcher-option", ONE + "deepspeed --include localhost 0,1 x.py\n", 7, "error"),
    ("launcher-option", ONE + "deepspeed --include localhost:0,1 x.py 0,1\n", 0, ""),
]  # fmt: skip
GPU = "#!/bin/bash\n#SBATCH --gres=gpu:1\n"
MEETS = "srun torchrun --nnodes 2 --nproc_per_node 1 --rdzv_backend c10d --rdzv_endpoint ${}:29400 x.py\n"
ENDS: list[tuple[str, str, int, str]] = [
    ("mistyped-command", GPU + "./setup.sh\npython x.py\ndeactivate\n", 5, "warning"),
    ("mistyped-command", GPU + "source v/bin/activate\npython x.py\ndeactivate\n", 0, ""),
    ("mistyped-command", GPU + "deactivate() { :; }\npython x.py\ndeactivate\n", 0, ""),
    ("mistyped-command", "#!/bin/bash -l\n#SBATCH --gres=gpu:1\npython x.py\ndeactivate\n", 0, ""),
    ("no-shebang", "#/bin/bash\n#BSUB -J a\npython x.py\n", 1, "warning"),
    ("no-shebang", "# /usr/bin/env bash\npython x.py\n", 1, "warning"),
    ("no-shebang", "# /bin/bashrc is read\npython x.py\n", 0, ""),
    ("not-runnable", TWO + 'srun -l "slurm/x.sh $HOST"\n', 7, "error"),
    ("not-runnable", TWO + 'srun -l "$HOME/x.sh" $HOST\n', 0, ""),
    ("conda-not-set-up", GPU + "conda activate YOUR_ENV\npython x.py\n", 3, "warning"),
    ("master-address", TWO + "ips=$(hostname -I)\nall=($ips)\nhead_node_ip=${all[0]}\n" + MEETS.format("head_node_ip"), 0, ""),
    ("master-address", TWO + "head_node_ip=$(hostname -I)\n" + MEETS.format("head_node_ip"), 7, "warning"),
    ("value-split", B + 'M=("a", "b")\necho ${M[@]} | grep -w a\n', 0, ""),
    ("value-split", B + 'M=("a", "b")\nfor m in ${M[@]}; do python x.py $m; done\n', 2, "error"),
]  # fmt: skip
TOLD_CASES = [*LOOPS, *PROGRAMS, *NAMES, *ENDS]
