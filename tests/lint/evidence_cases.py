"""Scripts that differ in what they show: the rule, the script, the line and the severity; line 0 for no finding at all."""

from __future__ import annotations

from tests.lint.cases import HEAD, ONE, RUN, TWO

LAUNCH = "python -m torch.distributed.launch --nproc_per_node=4 "
NODES = "nodes=( $(scontrol show hostnames $SLURM_JOB_NODELIST) )\n"
BARE = "#!/bin/bash\n#SBATCH --nodes=1\n#SBATCH --gpus-per-node=2\n"
SMALL = BARE + "#SBATCH --mem=32G\n"  # 4 lines
COBALT = "#!/bin/bash\n#COBALT -n 2\n#COBALT -t 10\n"
PBS_TWO = "#!/bin/bash\n#PBS -l select=2:ncpus=32:ngpus=4\n"
HEX = "c565652490ee305fe9f28" + "5a92b16aa29374f98861"[:19]
HF = "hf_" + "RokJZpgroEpAgSmQNwgkmgbrKQrKjayAtE"
IN_IMAGE = "singularity exec --nv x.sif /bin/bash -c "
RANKS = ONE.replace("--ntasks-per-node=1", "--ntasks-per-node=4")
ARRAY = "#!/bin/bash\n#SBATCH --array=0-3\n#SBATCH --gres=gpu:1\n"

TOGETHER: list[tuple[str, str, int, str]] = [
    ("fewer-tasks-than-nodes", TWO + NODES + "for i in 0 1; do\n  srun -N1 -n1 -w ${nodes[$i]} " + LAUNCH + "--nnodes=2 --node_rank=$i x.py &\ndone\nwait\n", 0, ""),
    ("fewer-tasks-than-nodes", TWO + "srun -N1 -n1 -w a " + LAUNCH + "--nnodes=2 --node_rank=0 x.py &\nsrun -N1 -n1 -w b " + LAUNCH + "--nnodes=2 --node_rank=1 x.py\n", 0, ""),
    ("fewer-tasks-than-nodes", TWO + "run() {\n  srun -N1 -n1 -r $1 " + LAUNCH + "--nnodes=2 --node_rank=$1 x.py\n}\nrun 0 & run 1\n", 0, ""),
    ("fewer-tasks-than-nodes", TWO + "srun -n1 -w a " + LAUNCH + "--nnodes=4 --node_rank=0 x.py &\nsrun -n1 -w b " + LAUNCH + "--nnodes=4 --node_rank=1 x.py &\nwait\n", 7, "error"),
    ("fewer-tasks-than-nodes", TWO + "srun -n1 torchrun --nnodes=2 x.py\n", 7, "error"),
]  # fmt: skip
TEMPLATES: list[tuple[str, str, int, str]] = [
    ("directive-not-read", "#!/bin/bash\n#SBATCH -N 1\n#SBATCH --mail-user=[replace with yours]\nls\n", 0, ""),
    ("placeholder", "#!/bin/bash\n#SBATCH -N 1\n#SBATCH --mail-user=[replace with yours]\nls\n", 3, "note"),
    ("placeholder", "#!/bin/bash\n#SBATCH -N 1\n#SBATCH --account=<fill with yours>\nls\n", 3, "note"),
    ("directive-not-read", "#!/bin/bash\n#SBATCH -N 1\n#SBATCH --account={fill in your account}\nls\n", 0, ""),
    ("placeholder", '#!/bin/bash\nif [ replace = "$1" ]; then ls ${names[change]}; fi\n', 0, ""),
    ("directive-not-read", "#!/bin/bash\n#SBATCH -N 1\n#SBATCH --gres =[gpu]\nls\n", 3, "error"),
]
PORTS: list[tuple[str, str, int, str]] = [
    ("ephemeral-port", TWO + "export MASTER_PORT=$(shuf -i 10000-65500 -n 1)\n", 7, "note"),
    ("ephemeral-port", SMALL + "export MASTER_PORT=$(shuf -i 49152-65535 -n 1)\n", 5, "note"),
    ("ephemeral-port", TWO + "export MASTER_PORT=52386\n", 7, "note"),
    ("ephemeral-port", SMALL + "export MASTER_PORT=52386\nsrun -n2 python x.py\n", 5, "warning"),
    ("ephemeral-port", SMALL + "export MASTER_PORT=52386\nsrun -n1 python x.py\n", 5, "note"),
    ("ephemeral-port", SMALL + "export MASTER_PORT=52386\npython x.py\n", 5, "note"),
    ("ephemeral-port", SMALL + "torchrun --nproc_per_node=1 --master_port=45000 x.py\n", 5, "note"),
    ("ephemeral-port", TWO + "export MASTER_PORT=$(($(date +%N) % 30000))\n", 7, "note"),
    ("fixed-port", SMALL + "torchrun --nproc_per_node=2 --master_port=23000 x.py\n", 5, "note"),
    ("fixed-port", ARRAY + "torchrun --nproc_per_node=2 --master_port=23000 x.py\n", 4, "warning"),
    (
        "fixed-port",
        SMALL + "torchrun --nproc_per_node=2 a.py &\ntorchrun --nproc_per_node=2 b.py &\nwait\n",
        6,
        "error",
    ),
    ("ephemeral-port", SMALL + "torchrun --nproc_per_node=2 --master_port=45000 x.py\n", 5, "warning"),
    ("ephemeral-port", TWO + "export MASTER_PORT=$((60000 + RANDOM))\n", 7, "warning"),
    ("ephemeral-port", TWO + "export MASTER_PORT=$((500 + RANDOM % 100))\n", 7, "warning"),
]
WORKING: list[tuple[str, str, int, str]] = [
    ("debug-setting", TWO + "export CUDA_LAUNCH_BLOCKING=1\n", 7, "note"),
    ("invalid-value", TWO + "export NCCL_DEBUG=DEBUG\n", 7, "note"),
    ("invalid-value", TWO + "export TORCH_DISTRIBUTED_DEBUG=DEBUG\n", 7, "error"),
    ("invalid-value", TWO + "export NCCL_DEBUG_FILE=/logs/nccl.%r\n", 7, "note"),
    ("not-exported", TWO + "NCCL_DEBUG=INFO\nsrun python x.py\n", 7, "note"),
    ("not-exported", TWO + "WANDB_MODE=offline\nsrun python x.py\n", 7, "error"),
    ("misspelled-variable", TWO + "export GLOO_SOCKET_FAMILY=AF_INET\n", 7, "note"),
    ("misspelled-variable", TWO + "export NCCL_OWN_SETTING=1\n", 7, "note"),
    ("misspelled-variable", TWO + "export NCCL_MIN_CHANNELS=32\n", 7, "warning"),
    ("exit-code-lost", ONE + "torchrun --standalone x.py | tee log\n", 7, "note"),
    ("exit-code-lost", ONE + "set -e\ntorchrun --standalone x.py | tee log\n", 8, "warning"),
    ("exit-code-lost", ONE + "torchrun --standalone x.py | tee log || exit 1\npython eval.py\n", 7, "warning"),
    ("exit-code-lost", ONE + "torchrun --standalone x.py\nexit 0\n", 8, "note"),
    (
        "exit-zero",
        ONE
        + 'bad=0\nfor s in ${all[@]}; do ((bad+=s)); done\nif [ $bad -ne 0 ]; then echo "ERR: failed"; exit $bad; fi\n',
        0,
        "",
    ),
    ("exit-zero", ONE + 'if [ $bad -ne 0 ]; then echo "Error: failed"; exit 0; fi\n', 7, "warning"),
    ("directive-refused", "#!/bin/bash\n#SBATCH --mail-type=begin,fail,abort\nls\n", 0, ""),
    ("variable-in-directive", "#!/bin/bash\n#SBATCH --mail-user=$USER@x.org\nls\n", 2, "note"),
    ("variable-in-directive", "#!/bin/bash\n#SBATCH --account=$GROUP\nls\n", 2, "error"),
    ("directive-not-read", "#!/bin/bash\n#SBATCH -N 1\n#SBTACH --job-name=x\nls\n", 3, "note"),
    ("directive-not-read", "#!/bin/bash\n#SBATCH -N 1\n#BATCH --ntasks=1\nls\n", 3, "note"),
    ("directive-not-read", "#!/bin/bash\n#SBATCH -N 1\n#BATCH --ntasks=8\nls\n", 3, "warning"),
    ("directive-not-read", "#!/bin/bash\n#SBATCH -N 1\n#SBATCH --cluster=gpu\nls\n", 0, ""),
    ("directive-not-read", "#!/bin/bash\n#SBATCH -N 1\n#SBATCH --clustr=gpu\nls\n", 3, "error"),
    ("directive-not-read", "#!/bin/bash\n#SBATCH -N 1\n#SBATCH XXXextra3XXX\nls\n", 0, ""),
    ("directive-too-late", "#!/bin/bash\n#SBATCH -N ${NODES}\n$PARTITION_LINE\n#SBATCH -c ${CPUS}\nls\n", 0, ""),
    ("directive-too-late", "#!/bin/bash\n{% if gpu %}\n#SBATCH -p gpu\n{% endif %}\nls\n", 0, ""),
    ("directive-too-late", "#!/bin/bash\nT=1\n#PBS -q !TBG_queue\nls\n", 0, ""),
    ("directive-too-late", "#!/bin/bash\nT=1\n#PBS -q gpu\nls\n", 3, "error"),
    ("directive-not-read", "#!/bin/bash\n#SBATCH --job-name=<%= job.name %>\nls\n", 0, ""),
    (
        "directive-not-read",
        "#!/bin/bash\n#SBATCH -N 1\nls\n#sbatch --dependency=afterok:$SLURM_JOB_ID next.sh\n",
        0,
        "",
    ),
    ("directive-not-read", "#!/bin/bash\n#SBATCH -N 1\n#sbatch --ntasks=8\nls\n", 3, "warning"),
    ("invalid-value", ONE.replace("=8", "=@THREADS@") + "ls\n", 0, ""),
    ("invalid-value", ONE.replace("=8", "=all") + "ls\n", 6, "error"),
    ("folder-not-copied", "#!/bin/bash\nf() {\n  mkdir -p $1\n}\ncp $1 results\n", 0, ""),
    ("folder-not-copied", "#!/bin/bash\nmkdir -p out\ncp out results\n", 3, "warning"),
    ("directive-too-late", "#!/bin/bash\n#SBATCH -N 1\n$SETUP\n#SBATCH -c 4\nls\n", 4, "error"),
    ("directive-too-late", "#!/bin/bash\n#SBATCH -N 1\nls\n#!/bin/bash\n#SBATCH -N 2\nls\n", 0, ""),
    ("output-folder", "#!/bin/bash\n#SBATCH -o /big/logs/%j.out\nmkdir -p /big/logs\n", 2, "note"),
    ("output-folder", "#!/bin/bash\n#SBATCH -o logs/%j.out\nmkdir -p logs\n", 2, "warning"),
    ("export-comma", TWO + "srun --export=ALL,NCCL_SOCKET_IFNAME=$I, python x.py\n", 0, ""),
    ("export-drops-environment", "#!/bin/bash\n#SBATCH -N 1 --export=NONE\nsrun --export=ALL jupyter lab\n", 0, ""),
    ("export-drops-environment", "#!/bin/bash\n#SBATCH -N 1 --export=NONE\nsrun jupyter lab\n", 2, "warning"),
    ("background-not-awaited", ONE + "python x.py &\nP=$!\nwhile kill -0 $P; do sleep 9; done\n", 0, ""),
    ("background-not-awaited", ONE + "python x.py &\nP=$!\necho $P\n", 7, "error"),
    ("secret-in-script", ONE + "export WANDB_API_KEY='enter the key here'\n", 0, ""),
    ("script-folder", ONE + 'HERE=$(cd "$(dirname "$0")" && pwd)\necho $HERE\npython /a/x.py\n', 0, ""),
    ("script-folder", ONE + 'HERE=$(cd "$(dirname "$0")" && pwd)\npython $HERE/x.py\n', 7, "warning"),
    ("literal-quotes", ONE + ": \"${PREFIX:=''}\"\n", 7, "note"),
    ("memory-unit", "#!/bin/bash\n#SBATCH -N 1\n#SBATCH --mem=1000\nls\n", 0, ""),
    ("memory-unit", "#!/bin/bash\n#SBATCH -N 1\n#SBATCH --mem=64\nls\n", 3, "warning"),
]
"""What is wrong, but changes nothing in a job that works, is a note; next to each what fails or does something else."""
OF_THE_JOB: list[tuple[str, str, int, str]] = [
    (
        "visible-devices",
        "#!/bin/bash\n#SBATCH --gres=gpu:1\nCUDA_VISIBLE_DEVICES=0,1 python a.py\nCUDA_VISIBLE_DEVICES=0,1 python b.py\n",
        3,
        "note",
    ),
    ("visible-devices", "#!/bin/bash\n#SBATCH --gres=gpu:1\nCUDA_VISIBLE_DEVICES=1,0 python a.py\n", 3, "warning"),
    (
        "expanded-too-early",
        TWO
        + "srun $HOME/bin/torchrun --nnodes=2 --node_rank=$SLURM_NODEID --rdzv_backend=c10d --rdzv_endpoint=$H:1 x.py\n",
        0,
        "",
    ),
    (
        "expanded-too-early",
        TWO + "srun $HOME/bin/torchrun --nnodes=2 --node_rank=$SLURM_NODEID --master_addr=$H x.py\n",
        7,
        "error",
    ),
    ("expanded-too-early", ONE + "srun python x.py --name=run_$SLURM_PROCID\n", 0, ""),
    ("expanded-too-early", ONE + "srun -n2 python x.py --name=run_$SLURM_PROCID\n", 7, "error"),
    ("expanded-too-early", TWO + "R=$SLURM_PROCID\nmpirun -np 8 python x.py > log.$R\n", 0, ""),
    ("expanded-too-early", TWO + "R=$SLURM_PROCID\nmpirun -np 8 python x.py --rank $R\n", 7, "error"),
    (
        "expanded-too-early",
        "#!/bin/bash\n#SBATCH --gres=gpu:4\ntorchrun --nnodes=$SLURM_NNODES --node_rank=$SLURM_NODEID --master_addr=$H x.py\n",
        3,
        "note",
    ),
    (
        "one-node-only",
        "#!/bin/bash\n#SBATCH --gres=gpu:4\ntorchrun --nnodes=$SLURM_NNODES --node_rank=$R --master_addr=$H x.py\n",
        3,
        "note",
    ),
    (
        "one-node-only",
        TWO
        + 'C="torchrun --nnodes=2 --node_rank=$R --master_addr=$H x.py"\nfor n in $NODES; do\n  if [ $n = $H ]; then eval $C & else ssh $n "bash -lc \'$C\'" & fi\ndone\nwait\n',
        0,
        "",
    ),
    ("more-ranks-than-gpus", TWO + "srun accelerate launch --config_file c.yaml --num_processes 8 x.py\n", 0, ""),
    ("more-ranks-than-gpus", TWO + "srun accelerate launch --num_processes 8 x.py\n", 7, "error"),
    (
        "more-ranks-than-gpus",
        "#!/bin/bash\n#SBATCH -N 1 -p pvc\n#SBATCH --gpus-per-node=4\nexport MASTER_ADDR=x\nsrun -n8 python x.py\n",
        0,
        "",
    ),
    (
        "more-ranks-than-gpus",
        "#!/bin/bash\n#SBATCH -N 1\n#SBATCH --gpus-per-node=4\nexport MASTER_ADDR=x\nsrun -n8 python x.py\n",
        5,
        "error",
    ),
    ("idle-gpus", RANKS + "python x.py\n", 7, "warning"),
    ("idle-gpus", RANKS + "python x.py --num_gpus=4\n", 7, "note"),
    ("idle-gpus", RANKS + "python deepy.py x.py\n", 7, "note"),
    ("idle-gpus", RANKS + "python x.py --dataparallel\n", 7, "note"),
    ("idle-gpus", RANKS + "python x.py --device_ids 0,1,2,3\n", 7, "note"),
    ("idle-nodes", "#!/bin/bash\n#SBATCH -N 2\npython launch.py --mpi_params '-x A'\n", 0, ""),
    ("idle-nodes", "#!/bin/bash\n#SBATCH -N 2\npython train.py\n", 3, "warning"),
    ("unset-variable", ONE + "echo $SLRUM_JOB_ID\n", 7, "note"),
    ("unset-variable", ONE + "echo $SLRUM_JOB_ID > id\n", 7, "warning"),
    ("unset-variable", ONE + "N=$(scontrol show hostnames $SLURM_JOB_NODELIS)\n", 7, "note"),
    ("unset-variable", ONE + 'srun bash -c "A=${A} python x.py"\n', 0, ""),
    ("unset-variable", ONE + 'ARGS="--master_addr $MASTER_ADDR"\nsrun python x.py\n', 0, ""),
    ("unset-variable", ONE + 'ARGS="--master_addr $MASTER_ADDR"\nsrun python x.py $ARGS\n', 7, "warning"),
    (
        "unset-variable",
        "#!/bin/bash\n#SBATCH -N 1 -t 9\n# SBATCH --cpus-per-task=4\nn=$SLURM_CPUS_PER_TASK\npython x.py $n\n",
        4,
        "note",
    ),
    ("unset-variable", "#!/bin/bash\n#SBATCH -N 1 -t 9\nn=$SLURM_CPUS_PER_TASK\npython x.py $n\n", 3, "warning"),
    (
        "address-without-host",
        TWO + RUN + "--rdzv_backend=c10d --rdzv_id=$SLURM_JOB_ID --rdzv_endpoint=10.1.2.3:9 x.py\n",
        0,
        "",
    ),
]
SSH_AND_LOGS: list[tuple[str, str, int, str]] = [
    ("needs-ssh", TWO + "deepspeed --hostfile hosts --num_gpus=4 x.py\n", 7, "note"),
    ("needs-ssh", TWO + "deepspeed --launcher slurm --include=n1:0 x.py\n", 7, "warning"),
    ("requeue-truncates-log", ONE.replace("--nodes=1", "--nodes=1 --requeue"), 2, "note"),
    (
        "requeue-truncates-log",
        ONE + "trap 'scontrol requeue $SLURM_JOB_ID' USR1\nsrun python x.py & wait\n",
        7,
        "warning",
    ),
    ("requeue-truncates-log", ONE + "trap 'echo requeue' USR1\nsrun python x.py & wait\n", 0, ""),
    ("requeue-truncates-log", ONE.replace("--nodes=1", "--nodes=1 --no-requeue") + "srun python x.py\n", 0, ""),
]
NAMES: list[tuple[str, str, int, str]] = [
    ("unset-variable", ONE + "source ./settings.sh\nexport STEPS=500\npython x.py --steps=$STEP\n", 9, "warning"),
    ("unset-variable", ONE + "source ./settings.sh\nSTEPS=500\n" + IN_IMAGE + '"source /env.sh; python x.py --steps=$STEP"\n', 9, "warning"),
    ("unset-variable", ONE + "STEPS=500\napptainer exec x.sif sh -c \"python x.py \\\n  --steps=$STEP\"\n", 9, "warning"),
    ("unset-variable", ONE + "source ./env.sh\nSCRIPT_ARGS='--a 1'\nsrun python x.py $ARGS\n", 9, "warning"),
    ("unset-variable", ONE + "source ./env.sh\nexport SCRIPT=/a/x.py\nRUN=\"torchrun --nproc_per_node=4\"\nexport CMD=\"$RUN $PYTHON_FILE\"\nsrun $CMD\n", 10, "warning"),
    ("unset-variable", ONE + "source ./env.sh\nexport SCRIPT=/a/x.py\ntorchrun --nproc_per_node=4 $PYTHON_FILE --a 1\n", 9, "warning"),
    ("unset-variable", ONE + "STEPS=500\npython x.py --steps=$STEP --more=$STEPS\n", 0, ""),  # both are used: perhaps two settings
    ("unset-variable", ONE + "export STEPS=500\npython x.py --steps=${STEP:-3}\n", 0, ""),
    ("unset-variable", ONE + "STEPS=500\necho $STEP\n", 0, ""),
    ("unset-variable", ONE + "MODEL1=/a\ntorchrun x.py $MODEL2\n", 0, ""),
    ("unset-variable", ONE + "export SCRIPT=/a/x.py\ntorchrun --nproc_per_node=4 main.py $EXTRA\n", 0, ""),
    ("unset-variable", ONE + "export HF_HOME=/x\npython x.py $HOME $HF_NAME\n", 0, ""),
    ("unset-variable", ONE + "num_node=4\nfor (( node = 0; node <= 3; node++ )); do\n  ls w-$node\ndone\n", 0, ""),
    ("unset-variable", ONE + "num_node=4\nls w-$node\n", 0, ""),
    ("unset-variable", ONE + "num_gpus=4\ntorchrun --nproc_per_node=4 x.py --n $gpus\n", 8, "warning"),
    ("unset-variable", ONE + "export SINGULARITYENV_DATA_PORT=${DATA_PORT}\npython x.py\n", 0, ""),
    ("unset-variable", ONE + "export APPTAINERENV_DATA_PORT=3\npython x.py $DATA_PORT\n", 0, ""),
    ("unset-variable", ONE + "steps=4\nfor (( step = 0; step <= 3; step++ )); do\n  python x.py $step\ndone\n", 0, ""),
    ("unset-variable", ONE + "source ./env.sh\nDATA_DIR=/x\npython x.py $MODEL_DIR\n", 0, ""),
]  # fmt: skip
SECRETS: list[tuple[str, str, int, str]] = [
    ("secret-in-script", f"#!/bin/bash\nls\n#python -m wandb login {HEX}\n", 3, "warning"),
    ("secret-in-script", f"#!/bin/bash\n# huggingface-cli login --token {HF}\nls\n", 2, "warning"),
    ("secret-in-script", f"#!/bin/bash\n# export WANDB_API_KEY={HEX}\nls\n", 2, "warning"),
    ("secret-in-script", f"#!/bin/bash\nls # wandb.login(key='{HEX}')\n", 2, "warning"),
    ("secret-in-script", f"#!/bin/bash\npython -m wandb login {HEX}\n", 2, "warning"),
    ("secret-in-script", f"#!/bin/bash\necho {HF} | transformers-cli login\n", 2, "warning"),
    ("secret-in-script", f"#!/bin/bash\n# pip install git+https://github.com/wandb/wandb@{HEX}\n# commit {HEX}\nls\n", 0, ""),
    ("secret-in-script", "#!/bin/bash\n# wandb login <your key>, or export WANDB_API_KEY=your_key\n# hf_transfer\nls\n", 0, ""),
    ("secret-in-script", "#!/bin/bash\n# LR_DECAY_TOKEN=157286400000\nls\n", 0, ""),
    ("secret-in-script", "#!/bin/bash\n# tokens per batch: MAX_TOKENS=4096, KEY_FILE=/home/me/key\nls\n", 0, ""),
]  # fmt: skip
TERMINALS: list[tuple[str, str, int, str]] = [
    ("no-terminal", ONE + "docker run -it --gpus all image torchrun x.py\n", 7, "error"),
    ("no-terminal", ONE + "sudo docker run --rm -ti \\\n -v /a:/b image:v1 torchrun x.py\n", 7, "error"),
    ("no-terminal", ONE + "docker exec --interactive --tty box python x.py\n", 7, "error"),
    ("no-terminal", PBS_TWO + "docker run -i -t image python x.py\n", 3, "error"),
    ("no-terminal", ONE + "docker run -t image python x.py\n", 7, "note"),
    ("no-terminal", ONE + "podman run -it image python x.py\n", 7, "note"),
    ("no-terminal", ONE + "docker run -i image python x.py -t 3\n", 0, ""),
    ("no-terminal", ONE + "docker run -d -it image python x.py\n", 0, ""),
    ("no-terminal", ONE + "docker run image cmd -it\n", 0, ""),
    ("no-terminal", "#!/bin/bash\ndocker run -it image python x.py\n", 0, ""),  # from a terminal, perhaps
    ("ssh-without-command", TWO + "for node in $(scontrol show hostnames); do\n  ssh $node\n  mkdir /scratch/x\n  cp -r /d /scratch/x\ndone\n", 8, "warning"),
    ("ssh-without-command", TWO + "ssh -o StrictHostKeyChecking=no gpu02\ncd /x\npython x.py\n", 7, "warning"),
    ("ssh-without-command", TWO + "for n in a b; do\n  ssh $n mkdir /scratch/x\ndone\nls\n", 0, ""),
    ("ssh-without-command", TWO + "ssh gpu02 <<EOF\nmkdir /x\nEOF\nls\n", 0, ""),
    ("ssh-without-command", TWO + "ssh -N -f -L 8000:localhost:8000 login\nls\nssh gpu02 < run.sh\ncat run.sh | ssh gpu02\nls\n", 0, ""),
    ("ssh-without-command", TWO + "for n in a b; do\n  ssh -q $n \\\n    python -m torch.distributed.launch x.py\ndone\nwait\n", 0, ""),
    ("ssh-without-command", TWO + "ssh $TO_HEAD\nls\n", 0, ""),  # perhaps with a command
    ("ssh-without-command", "#!/bin/bash\nssh gpu02\nls\n", 0, ""),
    ("container-shell-ended", ONE + IN_IMAGE + '"source /ext3/env.sh;"\n\ntorchrun --nproc_per_node=4 x.py\n', 7, "warning"),
    ("container-shell-ended", ONE + "singularity shell --nv x.sif\nsource env.sh\npython x.py\n", 7, "warning"),
    ("container-shell-ended", ONE + "docker exec box bash -c 'source /e; conda activate a'\nsrun python x.py\n", 7, "warning"),
    ("container-shell-ended", ONE + IN_IMAGE + "'source /env.sh'\nconda activate own\npython x.py\n", 7, "note"),
    ("container-shell-ended", ONE + IN_IMAGE + "'source /env.sh; pip install -e .'\ntorchrun x.py\n", 0, ""),
    ("container-shell-ended", ONE + IN_IMAGE + "'source /env.sh; torchrun x.py'\npython plot.py\n", 0, ""),
    ("container-shell-ended", ONE + IN_IMAGE + "'source /env.sh'\n" + IN_IMAGE + "'source /env.sh; torchrun x.py'\n", 0, ""),
    ("container-shell-ended", ONE + "singularity shell x.sif <<EOF\npython x.py\nEOF\npython y.py\n", 0, ""),
]  # fmt: skip
RESULTS: list[tuple[str, str, int, str]] = [
    ("wait-result-lost", TWO + "srun -n1 python a.py &\nsrun -n1 python b.py &\nwait\nrc=$?\nexit $rc\n", 9, "warning"),
    ("wait-result-lost", TWO + "srun python a.py &\nwait\nexit $?\n", 8, "warning"),
    ("wait-result-lost", TWO + "srun python a.py &\nwait || exit 1\n", 8, "warning"),
    ("wait-result-lost", TWO + "srun python a.py &\nif wait; then touch done; fi\n", 8, "warning"),
    ("wait-result-lost", TWO + "srun python a.py &\nwait $!\nrc=$?\n", 0, ""),
    ("wait-result-lost", TWO + "srun python a.py &\nwait\npython b.py\nrc=$?\n", 0, ""),
    ("wait-result-lost", TWO + "srun python a.py &\nwait -n\nrc=$?\nwait\n", 0, ""),
]  # fmt: skip
GPUS: list[tuple[str, str, int, str]] = [
    ("idle-gpus", ONE + "CUDA_VISIBLE_DEVICES=0,1,2,3 python -m torch.distributed.launch --nproc_per_node=3 x.py\n", 7, "warning"),
    ("idle-gpus", ONE + "export CUDA_VISIBLE_DEVICES=0,1\ntorchrun --standalone --nproc_per_node=2 x.py\n", 8, "warning"),
    ("idle-gpus", ONE + "torchrun --nproc_per_node=2 a.py\ntorchrun --nproc_per_node=2 b.py\n", 7, "warning"),
    ("idle-gpus", ONE + "torchrun --nproc_per_node=2 a.py\ntorchrun --nproc_per_node=4 b.py\n", 0, ""),
    ("idle-gpus", ONE + "torchrun --nproc_per_node=2 a.py &\ntorchrun --nproc_per_node=2 --master_port=3 b.py\nwait\n", 0, ""),
    ("idle-gpus", ONE + "for s in 1 2; do\n  torchrun --nproc_per_node=2 --master_port=300$s b.py &\ndone\nwait\n", 0, ""),
    ("idle-gpus", ONE + "accelerate launch --num_processes 2 a.py\n", 7, "warning"),
    ("idle-gpus", ONE + "accelerate launch --num_processes 1 a.py\n", 7, "note"),
    ("idle-gpus", TWO + "srun accelerate launch --num_processes 8 --num_machines 2 a.py\n", 0, ""),
    ("idle-gpus", ONE + "deepspeed --num_gpus=2 a.py\n", 7, "warning"),
    ("idle-gpus", ONE + "CUDA_VISIBLE_DEVICES=0,1 torchrun --nproc_per_node=2 a.py &\nCUDA_VISIBLE_DEVICES=2,3 python b.py\nwait\n", 0, ""),
    ("idle-gpus", ONE + "srun python x.py\n", 7, "note"),
    ("idle-gpus", BARE + "#SBATCH --ntasks-per-node=2\n#SBATCH --cpus-per-task=8\npython x.py\n", 6, "warning"),
    ("idle-gpus", BARE + "#SBATCH --ntasks-per-node=2\npython x.py\n", 5, "note"),  # two CPUs, perhaps
    ("idle-gpus", ONE + "python x.py --nodes=1 --ngpus=1\n", 7, "warning"),
    ("idle-gpus", ONE.replace("--ntasks-per-node=1", "--ntasks-per-node=4") + "srun python x.py\n", 0, ""),
]  # fmt: skip
PATTERNS: list[tuple[str, str, int, str]] = [
    ("pattern-not-expanded", ONE + "source /private/home/%u/.bashrc\n", 7, "warning"),
    ("pattern-not-expanded", ONE + "mkdir -p logs/%j\n", 7, "warning"),
    ("pattern-not-expanded", ONE + "python x.py > logs/train_%j.log\n", 7, "warning"),
    ("pattern-not-expanded", ONE + "tar -xf data.tar /scratch/%USER/data\n", 7, "warning"),
    ("pattern-not-expanded", ONE + "python x.py --log-dir runs/%x\n", 7, "note"),
    ("pattern-not-expanded", ONE + "srun -o logs/%j_%t.out --error=logs/%j.err python x.py\n", 0, ""),
    ("pattern-not-expanded", ONE + "LOG=logs/%j_%t.out\nsrun --output=$LOG python x.py\nsbatch -o l/%j.out next.sh\n", 0, ""),
    ("pattern-not-expanded", ONE + "date +%Y/%u/%j > x\nstat -c /%u/ x\nnsys profile -o a/%q{SLURM_PROCID} python x.py\n", 0, ""),
    ("pattern-not-expanded", ONE + "export NCCL_DEBUG_FILE=/tmp/nccl.%h.%p\nls ${x%/j} ${x%.u}\n", 0, ""),
    ("pattern-not-expanded", ONE + "python run_with_submitit.py --job_dir /checkpoint/%j\n", 0, ""),
]  # fmt: skip
ADDRESSES: list[tuple[str, str, int, str]] = [
    ("master-address", ONE + "export MASTER_ADDR=gpu:192.168.1.1\nsrun python x.py\n", 7, "error"),
    ("master-address", ONE + "export MASTER_ADDR=tcp://gpu01\nsrun python x.py\n", 7, "error"),
    ("master-address", TWO + HEAD + 'export MASTER_ADDR="$HEAD:29500"\nsrun python x.py\n', 8, "error"),
    ("master-address", ONE + 'export MASTER_ADDR="a01 a02"\nsrun python x.py\n', 7, "error"),
    ("master-address", ONE + "export MASTER_ADDR=a01,a02\nsrun python x.py\n", 7, "error"),
    ("master-address", ONE + "export MASTER_ADDR=10.0.0.300\nsrun python x.py\n", 7, "error"),
    ("master-address", TWO + "srun torchrun --nnodes=2 --node_rank=$R --master_addr=http://a --master_port=1 x.py\n", 7, "error"),
    ("master-address", TWO + "export MASTER_ADDR=0.0.0.0\nsrun python x.py\n", 7, "error"),
    ("master-address", TWO + "torchrun --nnodes=1 --nproc_per_node=4 --master_addr=localhost x.py\n", 0, ""),
    ("master-address", ONE + "export MASTER_ADDR=fd00::1\nsrun python x.py\n", 0, ""),
    ("master-address", ONE + "export MASTER_ADDR=fd00::ab:12\nsrun python x.py\n", 0, ""),
    ("master-address", ONE + "export MASTER_ADDR=localhost\nsrun python x.py\n", 0, ""),
    ("master-address", TWO + "export MASTER_ADDR=$(scontrol show hostnames $L | tr ' ' ',' | cut -d: -f1)\nsrun python x.py\n", 0, ""),
    ("master-address", COBALT + LAUNCH + "--nnodes=$N --node_rank=$R x.py\n", 4, "error"),
    ("master-address", COBALT + 'L="' + LAUNCH + '"\nL+="--nnodes=$N "\nif [ $N -eq 1 ]; then\n  L+="--standalone "\nfi\nfor node in $(cat $COBALT_NODEFILE); do\n  eval "$L --node_rank $RANK x.py" &\n  RANK=$((RANK+1))\ndone\nwait\n', 5, "error"),
    ("master-address", "#!/bin/bash\n#BSUB -n 2\nblaunch torchrun --nnodes=2 --nproc_per_node=4 --node_rank=$R x.py\n", 3, "error"),
    ("master-address", COBALT + 'for n in $(cat $COBALT_NODEFILE); do\n  ssh $n "cd $PWD; ' + LAUNCH + '--nnodes=2 --node_rank=$i x.py" &\ndone\nwait\n', 5, "error"),
    ("master-address", PBS_TWO + "mpirun -np 2 -ppn 1 torchrun --nnodes=2 --nproc_per_node=4 x.py\n", 3, "error"),
    ("master-address", COBALT + LAUNCH + "--nnodes=$N --node_rank=$R --master_addr=$A x.py\n", 0, ""),
    ("master-address", COBALT + LAUNCH + "--nnodes=1 --node_rank=0 x.py\n", 0, ""),
    ("master-address", COBALT + LAUNCH + "--nnodes=$N --node_rank=$R $MORE x.py\n", 0, ""),
    ("master-address", COBALT + "export PET_MASTER_ADDR=$A\n" + LAUNCH + "--nnodes=$N --node_rank=$R x.py\n", 0, ""),
]  # fmt: skip
JOBS: list[tuple[str, str, int, str]] = [
    ("ranks-in-separate-jobs", ARRAY + "export MASTER_ADDR=gpu01\nexport WORLD_SIZE=4\nexport RANK=$SLURM_ARRAY_TASK_ID\npython x.py\n", 2, "warning"),
    ("ranks-in-separate-jobs", ARRAY + "torchrun --nnodes=4 --node_rank=$SLURM_ARRAY_TASK_ID --master_addr=gpu01 x.py\n", 2, "warning"),
    ("ranks-in-separate-jobs", ARRAY + "export MASTER_ADDR=a\nexport WORLD_SIZE=2\nif [[ $SLURM_ARRAY_TASK_ID -eq 0 ]]; then\n  export NODE_RANK=0\nelse\n  export NODE_RANK=1\nfi\npython x.py\n", 2, "warning"),
    ("ranks-in-separate-jobs", ARRAY + "python x.py --rank $SLURM_ARRAY_TASK_ID --world-size 4 --dist-url tcp://a:3000\n", 2, "warning"),
    ("ranks-in-separate-jobs", ARRAY + "python x.py --rank $SLURM_ARRAY_TASK_ID --world-size 4\n", 0, ""),  # shards of data
    ("ranks-in-separate-jobs", ARRAY + "export MASTER_ADDR=localhost\npython x.py --seed $SLURM_ARRAY_TASK_ID\n", 0, ""),
    ("ranks-in-separate-jobs", "#!/bin/bash\n#PBS -l ncpus=48\n#PBS -l ngpus=4\nexport MASTER_ADDR=$(hostname -i)\nfor i in 1 2; do\n  qsub -v MASTER_ADDR=$MASTER_ADDR,NIDX=$i job.sh\ndone\npython x.py -n 3\n", 6, "warning"),
    ("ranks-in-separate-jobs", "#!/bin/bash\nfor i in 0 1; do\n  sbatch --export=ALL,MASTER_ADDR=gpu01,NODE_RANK=$i job.sh\ndone\n", 3, "warning"),
    ("ranks-in-separate-jobs", ONE + "torchrun --nnodes=$2 --nproc_per_node=4 --node_rank=$1 --master_addr=gpu01 x.py\n", 7, "warning"),
    ("ranks-in-separate-jobs", ONE + 'RANK=$1\ntorchrun --nnodes=$2 --nproc_per_node=4 --node_rank="$RANK" --master_addr=gpu01 x.py\n', 8, "warning"),
    ("ranks-in-separate-jobs", "#!/bin/bash\ntorchrun --nnodes=2 --nproc_per_node=4 --node_rank=$1 --master_addr=gpu01 x.py\n", 0, ""),  # started by hand on each node
    ("ranks-in-separate-jobs", "#!/bin/bash\nfor lr in 1 2; do\n  sbatch --export=ALL,LR=$lr job.sh\ndone\n", 0, ""),
]  # fmt: skip
CASES = [*TOGETHER, *TEMPLATES, *PORTS, *WORKING, *OF_THE_JOB, *SSH_AND_LOGS, *NAMES, *SECRETS, *TERMINALS, *RESULTS, *GPUS, *PATTERNS, *ADDRESSES, *JOBS]  # fmt: skip
