"""Cases about names, numbers, loops and conditions: the rule, the script, the line and the severity; line 0 for none."""

from __future__ import annotations

from tests.lint.cases import ONE, TWO

BARE = "#!/bin/bash\n#SBATCH --nodes=1\n#SBATCH --gpus-per-node=1\n"  # 3 lines
TRAIN = "python train.py\n"
FOUR = TWO.replace("--ntasks-per-node=1", "--ntasks-per-node=4").replace("per-task=32", "per-task=8")
ADDRESS = 'export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)\n'
PORT = "export MASTER_PORT=$((15000 + SLURM_JOB_ID % 15000))\n"
TASKS = "srun -K1 -c8 python train.py\n"
ARRAY = "#!/bin/bash\n#SBATCH --array={}\n#SBATCH --gres=gpu:1\nrates=(1 2 3)\n"
RATE = "python train.py --lr ${{rates[{}]}}\n"

SPELLINGS: list[tuple[str, str, int, str]] = [
    ("misspelled-variable", FOUR + ADDRESS.replace("ADDR=", "ADDRESS=") + PORT + TASKS, 7, "warning"),
    ("misspelled-variable", FOUR + ADDRESS.replace("ADDR=", "ADDRESS=") + "echo $MASTER_ADDRESS\n" + PORT + TASKS, 7, "warning"),
    ("misspelled-variable", FOUR + ADDRESS + PORT + "export WORLDSIZE=8\n" + TASKS, 9, "warning"),
    ("misspelled-variable", BARE + "export WANDB_MOD=offline\n" + TRAIN, 4, "warning"),
    ("misspelled-variable", BARE + "export LD_LIBARY_PATH=/x:$LD_LIBARY_PATH\n" + TRAIN, 4, "warning"),
    ("misspelled-variable", BARE + "export OMP_THREADS=4\n" + TRAIN, 4, "warning"),
    ("misspelled-variable", FOUR + ADDRESS.replace("ADDR=", "ADDRESS=") + "srun -c8 python x.py --addr $MASTER_ADDRESS\n", 0, ""),
    ("misspelled-variable", FOUR + ADDRESS + "export MASTER_ADDRESS=$MASTER_ADDR\n" + TASKS, 0, ""),
    ("misspelled-variable", BARE + "export OMP_THREADS=4\nexport OMP_NUM_THREADS=$OMP_THREADS\n" + TRAIN, 0, ""),
    ("misspelled-variable", BARE + "export WANDB_MODE=offline WANDB_NAME=a HF_HOME=/x TORCH_HOME=/x\n" + TRAIN, 0, ""),
    ("not-exported", BARE + "WANDB_MODE=offline\n" + TRAIN, 4, "error"),
    ("not-exported", BARE + "HF_HOME=/x\necho $HF_HOME\n" + TRAIN, 4, "error"),
    ("not-exported", ONE + "TRITON_CACHE_DIR=/x\ntorchrun --standalone --nproc_per_node=4 x.py\n", 7, "error"),
    ("not-exported", BARE + "HF_HOME=/x\nexport HF_HOME\n" + TRAIN, 0, ""),
    ("not-exported", BARE + "WANDB_MODE=offline python train.py\n", 0, ""),
    ("not-exported", BARE + "WANDB_NAME=a\npython train.py --name $WANDB_NAME\n", 0, ""),
    ("not-exported", BARE + "set -a\nHF_HOME=/x\n" + TRAIN, 0, ""),
    ("not-exported", BARE + TRAIN + "WANDB_MODE=offline\n", 0, ""),
    ("test-syntax", BARE + "unset NCCL_DEBUG=INFO\n" + TRAIN, 4, "error"),
    ("test-syntax", BARE + "unset $CUDA_VISIBLE_DEVICES\n" + TRAIN, 4, "error"),
    ("test-syntax", BARE + "unset NCCL_DEBUG HF_HOME\nNAMES='A B'\nunset $NAMES\n" + TRAIN, 0, ""),
]  # fmt: skip
COMMAND_WORDS = [
    "exitmoud",
    "eixt 1",
    "exprot A=1",
    "sourse a",
    "pyton a.py",
    "srrun ls",
    "codna activate x",
    "wiat",
    "mkdri a",
    "ehco a",
    "exit1",
]
RIGHT_WORDS = [
    "exec ls",
    "expr 1",
    "modules",
    "ipython a.py",
    "cmpirun a",
    "jsrun ls",
    "expand a",
    "sinfo",
    "watch ls",
    "ml purge",
    "sources",
]
WORDS: list[tuple[str, str, int, str]] = [
    *(
        ("mistyped-command", BARE + f"if [ -f a ]; then\n  {word}\nfi\n" + TRAIN, 5, "warning")
        for word in COMMAND_WORDS
    ),
    *(("mistyped-command", BARE + word + "\n" + TRAIN, 0, "") for word in RIGHT_WORDS),
    ("mistyped-command", BARE + "ehco() {\n  echo $1\n}\nehco a\n" + TRAIN, 0, ""),
]
NUMBERS: list[tuple[str, str, int, str]] = [
    ("invalid-value", FOUR + ADDRESS + PORT.replace("))", "))$") + TASKS, 8, "error"),
    ("invalid-value", FOUR + ADDRESS + "export MASTER_PORT=12345,\n" + TASKS, 8, "error"),
    ("invalid-value", FOUR + ADDRESS + "export MASTER_PORT=12O45\n" + TASKS, 8, "error"),
    ("invalid-value", FOUR + ADDRESS + "export MASTER_PORT=123456\n" + TASKS, 8, "error"),
    ("invalid-value", FOUR + ADDRESS + "export MASTER_PORT=15000+$SLURM_JOB_ID\n" + TASKS, 8, "error"),
    ("invalid-value", FOUR + ADDRESS + "export MASTER_PORT=0\n" + TASKS, 8, "error"),
    ("invalid-value", FOUR + ADDRESS + "export MASTER_PORT=$(15000 + $SLURM_JOB_ID)\n" + TASKS, 8, "error"),
    ("invalid-value", ONE + "torchrun --standalone --nproc_per_node=4, x.py\n", 7, "error"),
    ("invalid-value", ONE + "deepspeed --num_gpus 4 --master_port 0 x.py\n", 7, "error"),
    ("invalid-value", ONE + "accelerate launch --use_deepspeed --num_processes 4 --main_process_port=0 x.py\n", 7, "error"),
    ("invalid-value", FOUR + ADDRESS + PORT.replace("SLURM_JOB_ID", "($SLURM_JOB_ID / 2)") + TASKS, 0, ""),
    ("invalid-value", FOUR + ADDRESS + "export MASTER_PORT=1$(echo -n $SLURM_JOB_ID | tail -c 4)\n" + TASKS, 0, ""),
    ("invalid-value", FOUR + ADDRESS + "export MASTER_PORT=12345  # any\n" + TASKS, 0, ""),
    ("invalid-value", ONE + "accelerate launch --multi_gpu --num_processes 4 --main_process_port 0 x.py\n", 0, ""),
    ("invalid-value", ONE + "torchrun --nnodes=1:4 --nproc_per_node=gpu x.py\n", 0, ""),
]  # fmt: skip
FLOW: list[tuple[str, str, int, str]] = [
    ("unset-variable", BARE + "source /x/setup.sh\nLOG=$RUN/log\nRUN=/x/y\npython train.py > $LOG\n", 5, "warning"),
    ("unset-variable", BARE + "mkdir -p $OUT\nOUT=/x/y\npython train.py --out $OUT\n", 4, "warning"),
    ("unset-variable", BARE + "source /x/setup.sh\nLOG=${RUN:-a}/log\nRUN=/x/y\npython train.py > $LOG\n", 0, ""),
    ("unset-variable", BARE + "source /x/setup.sh\nLOG=$RUN/log\nRUN=$RUN/y\npython train.py > $LOG\n", 0, ""),
    ("unset-variable", BARE + "run() {\n  python train.py --out $OUT\n}\nOUT=/x/y\nrun\n", 0, ""),
    (
        "unset-variable",
        BARE + "#ZERO_STAGE=2\npython train.py --strategy deepspeed_stage_${ZERO_STAGE}\n",
        5,
        "warning",
    ),
    ("unset-variable", BARE + "# LR=1e-4\npython train.py --lr $LR\n", 5, "warning"),
    ("unset-variable", BARE + "# for seed in 1 2 3; do\npython train.py --seed $seed\n", 5, "warning"),
    ("unset-variable", BARE + "# LR=1e-4 sbatch job.sh\npython train.py --lr $LR\n", 0, ""),
    ("unset-variable", BARE + "# LR=1e-4\nread LR < file\npython train.py --lr $LR\n", 0, ""),
    ("unset-variable", BARE + "# OPTIONS=-v\npython train.py $OPTIONS\n", 0, ""),
    ("unset-variable", BARE + "# LR=1e-4\npython train.py --lr ${LR:-1}\n", 0, ""),
]
LOOPS: list[tuple[str, str, int, str]] = [
    ("loop-values", BARE + "for i in {1..$N}; do\n  python train.py --seed $i\ndone\n", 4, "error"),
    ("loop-values", BARE + "for i in {0..$((N-1))}; do\n  python train.py --seed $i\ndone\n", 4, "error"),
    ("loop-values", BARE + "seeds=(1 2 3)\nfor s in $seeds\ndo\n  python train.py --seed $s\ndone\n", 5, "error"),
    ("loop-values", BARE + "layers=(1 2 3)\npython train.py --layers $layers\n", 5, "error"),
    ("loop-values", BARE + "for s in 1, 2, 3; do\n  python train.py --seed $s\ndone\n", 4, "error"),
    ("loop-values", BARE + "for s in [1 2 3]; do\n  python train.py --seed $s\ndone\n", 4, "error"),
    ("loop-values", BARE + "for lr in 1e-3 1e-4; do\n  python train.py --lr lr\ndone\n", 4, "error"),
    ("loop-values", BARE + "for i in {1..3}; do\n  python train.py --seed $i\ndone\n", 0, ""),
    ("loop-values", BARE + "for i in $(eval echo {1..$N}); do\n  python train.py --seed $i\ndone\n", 0, ""),
    ("loop-values", BARE + "seeds=(1 2 3)\nfor s in ${seeds[@]}; do\n  python train.py --seed $s\ndone\n", 0, ""),
    ("loop-values", BARE + "seeds='1 2 3'\nfor s in $seeds; do\n  python train.py --seed $s\ndone\n", 0, ""),
    ("loop-values", BARE + "for run in 1 2 3; do\n  python train.py\ndone\n", 0, ""),
    ("loop-values", BARE + "for lr in 1e-3 1e-4; do\n  name=a_$lr\n  python train.py --name $name\ndone\n", 0, ""),
    ("index-out-of-range", ARRAY.format("1-3") + RATE.format("$SLURM_ARRAY_TASK_ID"), 5, "error"),
    ("index-out-of-range", ARRAY.format("0-9%2") + RATE.format("SLURM_ARRAY_TASK_ID"), 5, "error"),
    ("index-out-of-range", ARRAY.format("1-4") + RATE.format("$((SLURM_ARRAY_TASK_ID-1))"), 5, "error"),
    ("index-out-of-range", ARRAY.format("0-2") + RATE.format("$SLURM_ARRAY_TASK_ID"), 0, ""),
    ("index-out-of-range", ARRAY.format("1-3") + RATE.format("$((SLURM_ARRAY_TASK_ID-1))"), 0, ""),
    ("index-out-of-range", ARRAY.format("0-8") + RATE.format("$((SLURM_ARRAY_TASK_ID%3))"), 0, ""),
    (
        "index-out-of-range",
        ARRAY.format("0-9").replace("(1 2 3)", "($LIST)") + RATE.format("$SLURM_ARRAY_TASK_ID"),
        0,
        "",
    ),
]
CONDITIONS: list[tuple[str, str, int, str]] = [
    ("test-syntax", BARE + "A=$1\nif $A == 1; then\n  ls\nfi\n", 5, "error"),
    ("test-syntax", BARE + "if ( $1 == 1 ); then\n  ls\nfi\n", 4, "error"),
    ("test-syntax", BARE + "if A=2; then\n  ls\nfi\n", 4, "error"),
    ("test-syntax", BARE + "$LR=1e-3\npython train.py --lr $LR\n", 4, "error"),
    ("test-syntax", BARE + "let N = 3\n", 4, "error"),
    ("test-syntax", BARE + "if A=$(ls); then\n  ls\nfi\nlet N=3\n(( N == 3 )) && ls\nif (( N == 3 )); then ls; fi\nls -lt /x\n", 0, ""),
    ("test-syntax", BARE + "if grep -q $1 == x; then\n  ls\nfi\nif [[ $1 == 1 ]]; then ls; fi\n", 0, ""),
    ("deletes-too-much", BARE + "cd /x/y\nrm -rf *\n", 5, "warning"),
    ("deletes-too-much", BARE + "cd $1/y\nrm -rf ./*\n", 5, "warning"),
    ("deletes-too-much", BARE + "rm -rf $OUT/*\n", 4, "warning"),
    ("deletes-too-much", BARE + "cd /x/y || exit 1\nrm -rf *\n", 0, ""),
    ("deletes-too-much", BARE + "cd /x/y && rm -rf *\n", 0, ""),
    ("deletes-too-much", BARE + "set -e\ncd /x/y\nrm -rf *\n", 0, ""),
    ("deletes-too-much", BARE + "cd /x/y\nrm -rf out\nOUT=/x\nrm -rf $OUT/*\nrm -rf $TMPDIR/*\n", 0, ""),
]  # fmt: skip
NAME_CASES = [*SPELLINGS, *WORDS, *NUMBERS, *FLOW, *LOOPS, *CONDITIONS]
