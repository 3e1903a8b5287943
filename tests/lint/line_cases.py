"""Cases about lines that are joined, cut or quoted, lost results and arguments, and tokens: the rule, the script, the line, the severity; line 0 for none."""

from __future__ import annotations

from tests.lint.cases import ONE, TWO

BARE = "#!/bin/bash\n#SBATCH --nodes=1\n#SBATCH --gpus-per-node=1\n"  # 3 lines
TRAIN = "python train.py\n"
SUBMIT = "#!/bin/bash\nsbatch <<{}\n#!/bin/bash\n#SBATCH -N 1\n{}\npython x.py --out $OUT\nEOF\n"
HEX = "0123456789abcdef" * 2 + "7f3a91c4"
HOOK = "https://hooks.slack.com/services/T0A1B2C3D/B4E5F6G7H/" + "q9W8e7R6t5Y4u3I2o1P0aSdF"
ARRAY = "#!/bin/bash\n#SBATCH --array=0-9\n#SBATCH --gres=gpu:1\n"

LINES: list[tuple[str, str, int, str]] = [
    ("broken-line", BARE + "python train.py \\\n  --a 1\\\n--b 2\n", 5, "error"),
    ("broken-line", ONE + "torchrun --standalone --nproc_per_node=4 train.py\\\n--a 1\n", 7, "error"),
    ("broken-line", BARE + "python train.py \\\n  --a 1\\\n  --b 2\n", 0, ""),
    ("broken-line", BARE + "python train.py --text 'a\\\nb'\n", 0, ""),
    ("broken-line", BARE + "python train.py \\\n  model=gpt \\\n  lr=1e-3\n  data=pile \\\n  seed=1\n", 6, "error"),
    ("broken-line", BARE + "python train.py \\\n  model=gpt \\\n  lr=1e-3\nseed=1\n", 0, ""),
    ("broken-line", BARE + "if true; then\n  python a.py \\\n  lr=1e-3\n  seed=1\n  python b.py --seed $seed\nfi\n", 0, ""),
    ("broken-line", BARE + 'ARGS="\n  --a 1\n  # --b 2\n  --c 3"\npython train.py $ARGS\n', 6, "error"),
    ("broken-line", BARE + 'ARGS="\n  --a 1\n  --color #fff\n  --c 3"\npython train.py $ARGS\n', 0, ""),
    ("broken-line", BARE + "ARGS=(\n  --a 1\n  # --b 2\n  --c 3)\npython train.py ${ARGS[@]}\n", 0, ""),
    ("fixed-name-in-tmp", BARE + "export NODELIST=nodelist.$\nhostname > $NODELIST\n", 4, "warning"),
    ("fixed-name-in-tmp", BARE + "python train.py > log_$.txt\n", 4, "warning"),
    ("fixed-name-in-tmp", BARE + "mkdir -p runs/a$\n", 4, "warning"),
    ("fixed-name-in-tmp", BARE + "LOG=log_$$.txt\nOTHER=log_$SLURM_JOB_ID.txt\nEND_PATTERN='a.$'\nX=$(ls | grep 'a$')\n", 0, ""),
]  # fmt: skip
FOLDERS: list[tuple[str, str, int, str]] = [
    ("output-folder", BARE + "#SBATCH --output=/slurm_%j.out\n" + TRAIN, 4, "warning"),
    ("output-folder", BARE + "#SBATCH --output=/dev/null\n" + TRAIN, 0, ""),
    ("script-folder", BARE + "cd ${0%/*}\n" + TRAIN, 4, "warning"),
    ("script-folder", BARE + 'source "${BASH_SOURCE%/*}/a.sh"\n' + TRAIN, 4, "warning"),
    ("script-folder", "#!/bin/bash\ncd ${0%/*}\n" + TRAIN, 0, ""),
    ("container-shell-ended", BARE + "bash venv/bin/activate\n" + TRAIN, 4, "warning"),
    ("container-shell-ended", BARE + "./venv/bin/activate\n" + TRAIN, 4, "warning"),
    ("container-shell-ended", BARE + "pipenv shell\n" + TRAIN, 4, "warning"),
    ("container-shell-ended", BARE + "source venv/bin/activate\n. ~/.bashrc\npipenv run python train.py\n", 0, ""),
    ("no-shebang", BARE.replace("#!/", "#!") + TRAIN, 1, "error"),
    ("no-shebang", BARE.replace("#!/", "#! /") + TRAIN, 0, ""),
]
RESULTS: list[tuple[str, str, int, str]] = [
    ("exit-code-lost", ONE + "srun -c32 bash -c 'python train.py | tee log'\n", 7, "warning"),
    ("exit-code-lost", ONE + "srun -c32 bash -c 'set -o pipefail; python train.py | tee log'\n", 0, ""),
    ("exit-code-lost", BARE + "python train.py || echo failed\n", 4, "warning"),
    ("exit-code-lost", BARE + "python train.py || { echo failed; exit 1; }\n", 0, ""),
    ("background-not-awaited", BARE + "bash a.sh &\nbash b.sh &\n", 5, "error"),
    ("background-not-awaited", BARE + "(python train.py) &\n", 4, "error"),
    ("background-not-awaited", BARE + "tmux new-session -d -s a 'python train.py'\n", 4, "error"),
    ("background-not-awaited", BARE + "bash a.sh &\nbash b.sh &\nwait\n", 0, ""),
    ("background-not-awaited", BARE + "bash a.sh &\nbash b.sh\n", 0, ""),
    ("background-not-awaited", BARE + "(python train.py) &\nwait $!\n", 0, ""),
    ("background-not-awaited", BARE + "tmux new-session -d -s a 'python train.py'\nsleep 3600\n", 0, ""),
    ("option-twice", BARE + "python train.py --lr 1e-3 --batch-size 8 --lr 1e-4\n", 4, "warning"),
    ("option-twice", BARE + "python train.py --lr 1e-3 --layer 8 --layer 4\n", 0, ""),
    ("option-twice", BARE + "python train.py --lr 1e-3 --lr 1e-3\n", 0, ""),
]
EARLY: list[tuple[str, str, int, str]] = [
    ("expanded-too-early", SUBMIT.format("EOF", "OUT=/x"), 6, "error"),
    ("expanded-too-early", SUBMIT.format("EOF", "OUT=/x").replace("$OUT", "/x/$SLURM_JOB_ID"), 6, "error"),
    ("expanded-too-early", SUBMIT.format("'EOF'", "OUT=/x"), 0, ""),
    ("expanded-too-early", SUBMIT.format("EOF", "OUT=/x").replace("$OUT", "\\$OUT"), 0, ""),
    ("expanded-too-early", SUBMIT.format("EOF", "ls").replace("sbatch <<", "OUT=/x\nsbatch <<"), 0, ""),
    ("variable-not-expanded", BARE + "export HF_HOME='$SCRATCH/hf'\n" + TRAIN, 4, "error"),
    ("variable-not-expanded", BARE + "export HF_HOME=\"$SCRATCH/hf\"\nexport PS1='$USER'\n" + TRAIN, 0, ""),
    ("unset-variable", TWO + "torchrun --nproc_per_node=$SLURM_NUM_GPUS train.py\n", 7, "warning"),
    ("unset-variable", ARRAY + "python train.py --seed $SLURM_ARRAY_TASK\n", 4, "warning"),
    ("unset-variable", TWO + "torchrun --nproc_per_node=${SLURM_NUM_GPUS:-4} train.py\n", 0, ""),
]  # fmt: skip
TOKENS: list[tuple[str, str, int, str]] = [
    ("secret-in-script", BARE + f"curl -d hi {HOOK}\n", 4, "warning"),
    ("secret-in-script", BARE + "curl -d hi https://hooks.slack.com/services/TXXXXXXXX/BXXXXXXXX/XXXXXXXXXXXXXXXXXXXX\n", 0, ""),
    ("secret-in-script", BARE + f"export KAGGLE_KEY={HEX[8:]}\n", 4, "warning"),
    ("secret-in-script", BARE + f"srun --export=ALL,WANDB_API_KEY={HEX} python x.py\n", 4, "warning"),
    ("secret-in-script", BARE + "srun --export=ALL,WANDB_API_KEY=$KEY,OMP_NUM_THREADS=4 python x.py\n", 0, ""),
    ("array-not-used", ARRAY + "python train.py --seed 1 --out runs\n", 2, "warning"),
    ("array-not-used", ARRAY + "python train.py --seed $SLURM_ARRAY_TASK_ID --out runs\n", 0, ""),
    ("array-not-used", ARRAY.replace("0-9", "0-9%1") + "python train.py --seed 1 --out runs\n", 0, ""),
    ("array-not-used", ARRAY + "python train.py --data x\n", 0, ""),  # it may read the number itself
    ("array-not-used", ARRAY + "bash run.sh --out runs\n", 0, ""),
]  # fmt: skip
LINE_CASES = [*LINES, *FOLDERS, *RESULTS, *EARLY, *TOKENS]

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
