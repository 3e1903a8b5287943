"""Cases about arguments and values that get lost: the rule, the script, the line and the severity; line 0 for none."""

from __future__ import annotations

from tests.lint.cases import ONE, TWO

BARE = "#!/bin/bash\n#SBATCH --nodes=1\n#SBATCH --gpus-per-node=1\n"  # 3 lines
TRAIN = "python train.py\n"
MEET = "--rdzv_backend=c10d --rdzv_endpoint=$A:$P "
CUT: list[tuple[str, str, int, str]] = [
    (
        "broken-line",
        TWO + "srun -c32 bash -c 'torchrun \\\n  --nproc_per_node=4\n  --nnodes=2 \\\n  x.py'\n",
        8,
        "error",
    ),
    ("broken-line", TWO + "mpiexec -n 8 --ppn 4\n  python x.py --a 1\n", 7, "error"),
    ("broken-line", ONE + "srun -u shifter -V $DATA:/data\n    bash -c 'python x.py'\n", 7, "error"),
    ("broken-line", ONE + "srun -c32 bash -c\n  'python x.py'\n", 7, "error"),
    (
        "broken-line",
        BARE + "singularity exec --nv \\\n    --overlay /x/a.ext3:ro\n    /x/b.sif python x.py\n",
        5,
        "error",
    ),
    ("broken-line", BARE + 'python x.py "$A" \\\n    "$B"\n    "$C" "$D"\n', 5, "error"),
    ("broken-line", BARE + "python x.py \\\n    a.yml\n    b.yml \\\n    c.yml\n", 5, "error"),
    ("broken-line", ONE + "torchrun --nproc_per_node=4 --rdzv_id $RANDOM\n  ./x.py --a 1\n", 7, "error"),
    ("broken-line", ONE + "torchrun --standalone --nproc_per_node=4 x.py\n    dataset=a \\\n    seed=1\n", 7, "error"),
    ("broken-line", BARE + "python x.py \\\n    --a 1\n    echo done\n", 0, ""),
    ("broken-line", BARE + "if true; then\n    python x.py \\\n    --a 1\n    python y.py\nfi\n", 0, ""),
    ("broken-line", BARE + "if true; then\n  mpirun --version\n  python y.py\nfi\n", 0, ""),
    ("broken-line", BARE + "srun -c32 singularity exec --nv a.sif \\\n  python x.py\npython y.py\n", 0, ""),
    ("broken-line", BARE + 'python x.py \\\n  --a 1 \\\n  "$@"\n"$HOME/bin/a" b\n', 0, ""),
    (
        "broken-line",
        BARE + "for i in 1 2; do\n  python x.py --i $i\n    seed=$i\n  python y.py --seed $seed\ndone\n",
        0,
        "",
    ),
]
BLANKS: list[tuple[str, str, int, str]] = [
    ("value-split", BARE + "export HDF5_USE_FILE_LOCKING= FALSE\n" + TRAIN, 4, "error"),
    ("value-split", BARE + 'export DATA_DIR= "/x/y"\npython train.py --data $DATA_DIR\n', 4, "error"),
    ("value-split", BARE + "export NODES= $(scontrol show hostnames)\n" + TRAIN, 4, "error"),
    ("value-split", BARE + 'NAME= "base"\nNAME="$NAME-x"\npython train.py --name $NAME\n', 4, "error"),
    ("value-split", BARE + "head= $(hostname)\nexport head\necho $head\n", 4, "error"),
    ("value-split", BARE + 'export DATA_DIR ="/x/y"\npython train.py --data $DATA_DIR\n', 4, "error"),
    ("value-split", BARE + "export NODES =$(scontrol show hostnames)\n" + TRAIN, 4, "error"),
    ("value-split", BARE + 'OUT ="/x/y"\npython train.py --out $OUT\n', 4, "error"),
    ("value-split", BARE + "export A= B=1\nexport C= # none\nexport D=\n" + TRAIN, 0, ""),
    (
        "value-split",
        BARE + "CUDA_VISIBLE_DEVICES= python train.py\nIFS= read -r line < x\nLD_PRELOAD= ./run.sh\n",
        0,
        "",
    ),
    ("value-split", BARE + 'if [ "$A" = "1" ]; then ls; fi\ntest A = "$A" && ls\nexpr 1 = "$A"\n', 0, ""),
]
DOLLARS: list[tuple[str, str, int, str]] = [
    ("never-expanded", TWO + "srun -c32 torchrun --nnodes=2 --nproc_per_node=4 " + MEET + "--rdzv_id=SLURM_JOB_ID x.py\n", 7, "error"),
    ("never-expanded", TWO + "srun -c32 torchrun --nnodes=2 --nproc_per_node=4 " + MEET + "--rdzv_id RANDOM x.py\n", 7, "error"),
    ("never-expanded", TWO + "P=6000\nsrun -c32 accelerate launch --num_machines 2 --main_process_port=P x.py\n", 8, "error"),
    ("never-expanded", TWO + "srun -c32 torchrun --nnodes=2 --nproc_per_node=4 " + MEET + "--rdzv_id=$SLURM_JOB_ID x.py\n", 0, ""),
    ("never-expanded", TWO + "srun -c32 torchrun --nnodes=2 --nproc_per_node=4 " + MEET + "--rdzv_id=train x.py\n", 0, ""),
    ("never-expanded", TWO + "run=run\nsrun -c32 torchrun --nnodes=2 --nproc_per_node=4 " + MEET + "--rdzv_id=$run x.py\n", 0, ""),
]  # fmt: skip
# The reader: a program in a folder that is a variable, and python with the path of a launcher.
READ: list[tuple[str, str, int, str]] = [
    ("several-torchruns", TWO.replace("node=1", "node=4") + "srun -c8 $ENV/bin/torchrun --nnodes=2 --nproc_per_node=4 x.py\n", 7, "error"),
    ("several-torchruns", TWO.replace("node=1", "node=4") + "srun -c8 python $(which torchrun) --nproc_per_node=4 x.py\n", 7, "error"),
    ("more-ranks-than-gpus", ONE + "torchrun --standalone --nproc_per_node=4 $DIR/x.py --nproc_per_node=8\n", 0, ""),
    ("background-not-awaited", "#!/bin/bash\n#PBS -l select=1:ngpus=4\ntorchrun --nproc_per_node=4 x.py &\n", 3, "error"),
    ("background-not-awaited", "#!/bin/bash\n#PBS -l select=1:ngpus=4\ntorchrun --nproc_per_node=4 x.py &\nwait\n", 0, ""),
    ("not-exported", TWO + "MASTER_ADDR=a\nexport MASTER_PORT=6000\nsrun -c32 ./run.sh\n", 7, "error"),
    ("not-exported", TWO + "MASTER_ADDR=a\nsrun -c32 ./run.sh $MASTER_ADDR\n", 0, ""),
]  # fmt: skip
ARGUMENT_CASES = [*CUT, *BLANKS, *DOLLARS, *READ]
