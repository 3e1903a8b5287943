"""Cases about the shell, the directives and the software environment: the rule, the script, the line and the severity; line 0 for none."""

from __future__ import annotations

from tests.lint.cases import ONE, TWO

BARE = "#!/bin/bash\n#SBATCH --nodes=1\n#SBATCH --gpus-per-node=1\n"  # 3 lines
TRAIN = "python train.py\n"


def directive(text: str) -> str:
    """A script whose second line has this option."""
    return f"#!/bin/bash\n#SBATCH {text}\nls\n"


REFUSED = [
    "--time=24h", "--time=1:00:00:00", "--time=10:", "--time=2days", "--mem=0.5G", "--mem=16GiB", "--mem-per-cpu=4GBs", "--ntasks=1-4",
    "--cpus-per-task=4GB", "--nodes=2nodes", "-t=10:00", "-N=2", "-p=gpu", "-J=run", "--signal=USR1@60s", "--exclusive=true", "--open-mode=x",
    "--mail-type=START", "--mail-type=BEGINNING,ABORT", "--gres=gpu=2", "--gres=gpu:", "--walltime=10:00", "--memory=64G", "--queue=gpu",
    "--cpus_per_task=4", "--mem=4G --mem-per-cpu=2G", "--unbuffered",
]  # fmt: skip
ACCEPTED = [
    "--time=24:00:00", "--time=2-12", "--time=1-", "--time=90", "--time=UNLIMITED", "--time=4320:00", "--mem=0", "--mem=16gb", "--mem=64G",
    "--nodes=2-4", "-N 2-4", "-N2", "-t 10:00", "-p gpu", "--signal=B:USR1@60", "--signal=SIGTERM@120", "--signal=10@30", "--exclusive",
    "--exclusive=user", "--open-mode=append", "--mail-type=begin,end,fail", "--mail-type=TIME_LIMIT_80", "--gres=gpu:a100:2", "--gres=gpu",
    "--time={time}",
    "--time=WALLTIME", "--ntasks=2{n}", "--ntasks=NTASKS", "--mem=$MEM", "--nodes=<n>", "--time=", "--container-image=a.sqsh", "--cpus-per-task={{ cpus }}",
]  # fmt: skip
DIRECTIVES: list[tuple[str, str, int, str]] = [
    *(("directive-refused", directive(text), 2, "error") for text in REFUSED),
    *(("directive-refused", directive(text), 0, "") for text in ACCEPTED),
    ("directive-refused", "#!/bin/bash\nls\n#SBATCH --time=24h\n", 0, ""),  # it is not read at all
    ("directive-refused", "#!/bin/bash\n#SBATCH --mem=4G\n##SBATCH --mem-per-cpu=4G\nls\n", 0, ""),
    ("directive-not-read", "#!/bin/bash\n#SBATCH -N 1 three stray words\nls\n", 2, "error"),
]
STRAY: list[tuple[str, str, int, str]] = [
    ("stray-line", ONE + TRAIN + "Footer\n", 8, "error"),
    ("stray-line", ONE + TRAIN + "~\n", 8, "error"),
    ("stray-line", ONE + TRAIN + "EOF\n", 8, "error"),
    ("stray-line", ONE + "$ python train.py\n", 7, "error"),
    ("stray-line", ONE + "This script trains the model.\n" + TRAIN, 7, "error"),
    ("stray-line", ONE + "${SLURM_ARRAY_TASK_ID:=3}\n" + TRAIN, 7, "error"),
    ("stray-line", ONE + "export A=1\n3.8 cuda/11.2\n", 8, "error"),
    ("stray-line", ONE + "CUDA_VISIBLE_DEVICES=0, 1 python train.py\n", 7, "error"),
    ("stray-line", ONE + "MASTER_PORT= 29500\n", 7, "error"),
    ("stray-line", ONE + "```\n" + TRAIN + "```\n", 7, "error"),
    ("stray-line", ONE + "<<<<<<< HEAD\n" + TRAIN + "=======\nls\n>>>>>>> other\n", 7, "error"),
    ("stray-line", ONE + "!nvidia-smi\n!pip install x\n", 7, "error"),
    ("stray-line", ONE + "https://docs.site.org/jobs\n", 7, "error"),
    ("stray-line", ONE + "\u200b\n" + TRAIN, 7, "note"),
    ("stray-line", ONE + "set -e\n\u200b\n" + TRAIN, 8, "error"),
    ("stray-line", ONE + "'''\nold text\n'''\n" + TRAIN, 7, "error"),
    ("stray-line", ONE + 'if [ -z "$A" ]; then\n  "no A, exiting"\nfi\n', 8, "error"),
    ("stray-line", ONE + 'CMD="python train.py"\n"$CMD"\n', 8, "error"),
    ("stray-line", ONE + 'CMD="python train.py"\n$CMD\neval "$CMD"\nCMD=(python train.py)\n"${CMD[@]}"\n', 0, ""),
    ("stray-line", ONE + 'case "$1" in\n  "a b") ls ;;\nesac\n! grep x y\n"/opt/my tools/run"\n', 0, ""),
    ("stray-line", ONE + "Footer() { ls; }\n" + TRAIN + "Footer\n", 0, ""),
    ("stray-line", ONE + "function Setup {\n  ls\n}\nSetup\n", 0, ""),
    ("stray-line", ONE + "source lib.sh\nSetup\n", 0, ""),
    ("stray-line", ONE + "Rscript plot.R\nR\nXvfb\n", 0, ""),
    ("stray-line", ONE + ": ${SLURM_ARRAY_TASK_ID:=3}\n$CMD\n${PYTHON:-python} x.py\n", 0, ""),
    ("stray-line", ONE + "cat <<EOF\nFooter\n~\nEOF\n", 0, ""),
    ("stray-line", ONE + "A=(\n  One\n  2\n)\ncase $1 in\n  1) ls ;;\nesac\n", 0, ""),
    ("stray-line", ONE + "cat > README.md <<'X'\n```bash\nls\n```\nX\n", 0, ""),
    ("stray-line", "Some text about jobs.\nFooter\n", 0, ""),  # not a script
]
VALUES: list[tuple[str, str, int, str]] = [
    ("value-split", ONE + "export MASTER_ADDR = localhost\n", 7, "error"),
    ("value-split", ONE + "export CUDA_VISIBLE_DEVICES=0, 1\n", 7, "error"),
    ("value-split", ONE + "export PYTHONPATH=$PYTHONPATH: /opt/lib\n", 7, "error"),
    ("value-split", ONE + "MASTER_PORT =29500\n", 7, "error"),
    ("value-split", ONE + "ARGS=--lr 1\nOTHER=--name run\npython train.py $OTHER\n", 8, "error"),
    ("value-split", ONE + "DATA= /scratch/data\npython train.py --data $DATA\n", 7, "error"),
    ("value-split", ONE + "export A=1 B=2 C\nexport -f run\nexport \"A=b c\"\nexport $(cat .env | xargs)\n", 0, ""),
    ("value-split", ONE + "OMP_NUM_THREADS=4 python train.py\nSEED=1 ./run.sh\necho $SEED\n", 0, ""),
    ("value-split", ONE + "N=$[$A * 4]\necho $N\n", 0, ""),
    ("value-split", ONE + "X=1 make all\nX=2\necho $X\n", 0, ""),
    ("value-split", ONE + "export N={{ nodes * 4 }}\n", 0, ""),
    ("test-syntax", ONE + "for ((i = 1; i <= n; i++)); do\n  ls $i\ndone\n", 0, ""),
    ("unterminated", ONE + "for (( i = 1; i <= n; i++ ))\ndo\n  ls $i\ndone\n", 0, ""),
    ("value-split", ONE + 'L=("a.json", "b.json")\n', 7, "error"),
    ("value-split", ONE + 'L=("a.json" "b,c" 1,2,)\nM=(a,)\n', 0, ""),
    ("test-syntax", ONE + "if [ $A > 20 ]; then ls; fi\n", 7, "error"),
    ("test-syntax", ONE + "if [ $A -gt 20 ] && [ -s x ] > log; then ls; fi\n(( A > 20 )) && ls\n", 0, ""),
    ("unterminated", ONE + "N=print(3 % 2)\n", 7, "error"),
    ("unterminated", ONE + "shopt -s extglob\nrm !(x|y)\n", 0, ""),
    ("unterminated", ONE + "(ls) && ( pwd )\nif (ls); then ls; fi\nf() (ls)\nA=(1 2)\ncase $1 in (a) ls;; esac\n[[ a =~ (b) ]]\n", 0, ""),
    ("missing-colon", ONE + "export LD_LIBRARY_PATH=/opt/lib$LD_LIBRARY_PATH\n", 7, "error"),
    ("missing-colon", ONE + 'export PATH="/opt/bin${PATH}"\n', 7, "error"),
    ("missing-colon", ONE + "PYTHONPATH=$PYTHONPATH/home/me/code\n", 7, "error"),
    ("missing-colon", ONE + "export PYTHONPATH=$PYTHONPATH;/home/me/code\n", 7, "error"),
    ("missing-colon", ONE + "export PATH=/a:$PATH LD_LIBRARY_PATH=$LD_LIBRARY_PATH:/b\n", 0, ""),
    ("missing-colon", ONE + "export PATH=/a${PATH:+:$PATH}\nexport PATH=$PATH; ls\nA=$PATH\n", 0, ""),
    ("missing-colon", ONE + "cat <<E\nexport PATH=/a:\\$PATH\nE\n# PATH=/a$PATH\n", 0, ""),
    ("quoted-tilde", ONE + 'D="~/data"\nsource $D/env.sh\n', 7, "error"),
    ("quoted-tilde", ONE + 'D="~/code"\npython $D/train.py\n', 7, "error"),
    ("quoted-tilde", ONE + 'cd "~/code"\n', 7, "error"),
    ("quoted-tilde", ONE + 'export PYTHONPATH="$PYTHONPATH:~/code"\n', 7, "error"),
    ("quoted-tilde", ONE + "D=~/data\ncd $D\ncd ~/x\nexport PYTHONPATH=$PYTHONPATH:~/code\n", 0, ""),
    ("quoted-tilde", ONE + 'D="~/data"\npython train.py --data $D\n', 0, ""),  # the program may expand it
    ("quoted-tilde", ONE + 'D="~/data"\ncd "${D/#\\~/$HOME}"\n', 0, ""),
    ("variable-not-expanded", ONE + "OUT=/x\npython train.py --out '$OUT/a'\n", 8, "error"),
    ("variable-not-expanded", ONE + "OUT=/x\ntorchrun --standalone train.py --out \\$OUT\n", 8, "error"),
    ("variable-not-expanded", ONE + "OUT=/x\npython train.py --out \"$OUT\" --re 'a$' '$OTHER' 'a b $OUT'\n", 0, ""),
    ("variable-not-expanded", ONE + "export OUT=/x\nsrun bash -c 'python train.py --out $OUT'\n", 0, ""),
    ("variable-not-expanded", ONE + "dir=/x\npython train.py 'out=${dir}/a'\n", 0, ""),  # interpolation of the program
    ("variable-not-expanded", ONE + "DIR=/x\npython $$DIR/train.py\n", 8, "error"),
    ("variable-not-expanded", ONE + "DIR=/x\nmkdir /tmp/$$ /tmp/$$DIRS\n# $$DIR\n", 0, ""),
    ("broken-line", ONE + "torchrun --nproc_per_node=4\ntrain.py --lr 1\n", 7, "error"),
    ("broken-line", ONE + "apptainer exec --nv x.sif\npython train.py\n", 7, "error"),
    ("broken-line", ONE + "torchrun --nproc_per_node=4 \\\n  train.py\npython -m x\ntrain.py\napptainer exec --nv x.sif $CMD\npython a.py\n", 0, ""),
    ("broken-line", ONE + "srun --ntasks=1 $COMMAND\nls\nsrun --version\nls\n", 0, ""),
    ("broken-line", ONE + "srun --ntasks=1 <<E\n#!/bin/bash\nls\nE\nls\n", 0, ""),
]  # fmt: skip
SOFTWARE: list[tuple[str, str, int, str]] = [
    ("conda-not-set-up", BARE + "module load cuda/12.1 gcc\nconda activate e\n" + TRAIN, 5, "warning"),
    ("conda-not-set-up", BARE + "module load gpu/cuda-11.3 compilers/gcc\nconda activate e\n" + TRAIN, 5, "warning"),
    ("conda-not-set-up", BARE + "conda init bash\nconda activate e\n" + TRAIN, 5, "warning"),
    ("conda-not-set-up", BARE + "module load anaconda3\nconda activate e\n" + TRAIN, 0, ""),
    ("conda-not-set-up", BARE + "module load intel-python3\nconda activate e\n" + TRAIN, 0, ""),
    ("conda-not-set-up", BARE + "module load cuda\nconda activate e\nsource activate e\n" + TRAIN, 0, ""),
    ("conda-not-set-up", BARE.replace("/bash", "/bash --login") + "conda activate e\n" + TRAIN, 0, ""),
    ("module-after-activation", BARE + "source ~/v/bin/activate\nmodule load python/3.11\n" + TRAIN, 5, "note"),
    ("module-after-activation", BARE + "conda activate v\nmodule load pytorch/2.1\n" + TRAIN, 5, "warning"),
    ("module-after-activation", BARE + "conda activate v\nmodule load python/3.11\n" + TRAIN, 5, "note"),
    ("module-after-activation", BARE + "conda activate e\nml CUDA TensorFlow/2.11.0-foss-2022a\ntorchrun x.py\n", 5, "warning"),
    ("module-after-activation", BARE + "module load python\nsource ~/v/bin/activate\nmodule load cuda\n" + TRAIN, 0, ""),
    ("module-after-activation", BARE + "module load python\nsource ~/v/bin/activate\nmodule load python\n" + TRAIN, 0, ""),
    ("module-after-activation", BARE + "source ~/v/bin/activate\nmodule load python\nsource ~/w/bin/activate\n" + TRAIN, 0, ""),
    ("module-after-activation", BARE + "source ~/v/bin/activate\nmodule load python\n~/v/bin/python train.py\n", 0, ""),
    ("container-without-gpu", BARE + "singularity exec x.sif " + TRAIN, 4, "warning"),
    ("container-without-gpu", BARE + "docker run --rm img " + TRAIN, 4, "warning"),
    ("container-without-gpu", BARE + "singularity exec /opt/images/pytorch.sif " + TRAIN, 4, "note"),
    ("container-without-gpu", BARE + "singularity exec /home/me/pytorch.sif " + TRAIN, 4, "warning"),
    ("container-without-gpu", BARE + "apptainer exec x.sif --nv " + TRAIN, 4, "error"),
    ("container-without-gpu", BARE + "singularity exec --nv x.sif " + TRAIN, 0, ""),
    ("container-without-gpu", BARE + "A=$(singularity exec x.sif python hosts.py)\nls\n", 0, ""),
    ("container-without-gpu", BARE + "export APPTAINER_NV=1\napptainer exec x.sif " + TRAIN, 0, ""),
    ("container-without-gpu", BARE + "singularity exec $OPTIONS x.sif " + TRAIN, 0, ""),
    ("container-without-gpu", BARE + "docker run --gpus all img " + TRAIN, 0, ""),
    ("container-without-gpu", BARE + "module load rocm\nsingularity exec x.sif " + TRAIN, 0, ""),
    ("container-without-gpu", BARE + "singularity exec x.sif python -m pip install x\n", 0, ""),
    ("container-without-gpu", BARE + "singularity exec x.sif python tools/merge_data_files.py\n", 4, "note"),
    ("container-without-gpu", "#!/bin/bash\n#SBATCH --nodes=1\nsingularity exec x.sif " + TRAIN, 0, ""),
    ("asks-for-answer", BARE + "conda install pytorch\nmamba create -n x\nconda remove -n x --all\n", 0, ""),
    ("directive-not-read", "#!/bin/bash\n#SBATCH --nodes={1.number of nodes}\n" + TRAIN, 0, ""),
    ("unterminated", BARE + TRAIN + ":<<++++\n| a | b |\n++++\n", 0, ""),
    ("asks-for-answer", BARE + "apt-get install libgl1\n", 4, "warning"),
    ("asks-for-answer", BARE + "pip uninstall torch\n", 4, "warning"),
    ("asks-for-answer", BARE + "srun --pty bash\n", 4, "warning"),
    ("asks-for-answer", BARE + "pip uninstall -y a\napt-get -qy install b\nyes | pip uninstall b\npip list\n", 0, ""),
    ("asks-for-answer", BARE + "srun --pty python x.py\n", 0, ""),
    ("asks-for-answer", "#!/bin/bash\npip uninstall a\n", 0, ""),  # a script for the terminal
    ("mistyped-command", BARE + "singularity-gpu exec x.sif " + TRAIN, 0, ""),
]  # fmt: skip
PROXY = "http://me:" + "q7rT9xLm" + "@10.1.2.3:3128"
HEX_KEY = "0f3a9b8c7d6e5f4a3b2c" + "1d0e9f8a7b6c5d4e3f2a"
TOKEN = "ghp_" + "abcdefABCDEF1234567890abcdefABCD"
KEY = "wJalrX" + "UtnFEMI/K7MDENG/bPxRfiCYzQ8vT3nLs9d"
SECRETS: list[tuple[str, str, int, str]] = [
    ("secret-in-script", ONE + f"export http_proxy={PROXY}\n", 7, "warning"),
    ("secret-in-script", ONE + f"git clone {PROXY}/x.git\n", 7, "warning"),
    ("secret-in-script", ONE + f"export AWS_SECRET_ACCESS_KEY={KEY}\n", 7, "warning"),
    ("secret-in-script", ONE + f"# export http_proxy={PROXY}\n", 7, "warning"),
    ("secret-in-script", ONE + f"git clone https://{TOKEN}@github.com/x/y.git\n", 7, "warning"),
    ("secret-in-script", ONE + f"WANDB={HEX_KEY} python x.py\n", 7, "warning"),
    ("secret-in-script", ONE + f"echo 'machine api.wandb.ai login user password {HEX_KEY}' > ~/.netrc\n", 7, "warning"),
    ("secret-in-script", ONE.replace("--nodes=1", f"--export=ALL,WANDB_API_KEY={HEX_KEY}"), 2, "warning"),
    ("secret-in-script", ONE + "sshpass -p hunter22 ssh n1 ls\n", 7, "warning"),
    ("secret-in-script", ONE + "echo hunter22 | sudo -S ls\n", 7, "warning"),
    ("secret-in-script", ONE + "export http_proxy=http://user:password@proxy:3128\nexport A=http://$U:$P@proxy:1\n", 0, ""),
    ("secret-in-script", ONE + "export https_proxy=http://proxy.site:3128\nexport SSH_KEY=/home/me/.ssh/id_rsa\n", 0, ""),
    ("secret-in-script", ONE + "mkdir -p outputs_2024x7f3a91c\npython a.py --wandb_tag run2023x7f3a91c5d2e8b\nexport WANDB_PROJECT=v2023x7f3a91c\n", 0, ""),
    ("secret-printed", ONE + "echo $WANDB_API_KEY\n", 7, "warning"),
    ("secret-printed", ONE + "export HF_TOKEN=$(cat ~/.t)\nenv\n", 8, "warning"),
    ("secret-printed", ONE + "echo ${HF_TOKEN:+set} $PAD_TOKEN ${#HF_TOKEN}\necho $HF_TOKEN | docker login\necho $HF_TOKEN > ~/.t\nenv\n", 0, ""),
    ("secret-printed", ONE + 'echo "$MAX_TOKENS $USE_AUTH_TOKEN $token"\nexport A=1\nenv\n', 0, ""),
]  # fmt: skip
SIGNALS: list[tuple[str, str, int, str]] = [
    ("signal-not-trapped", ONE.replace("--nodes=1", "--signal=USR1@60") + "trap 'touch stop' USR1\nsrun python x.py\n", 7, "warning"),
    ("signal-not-trapped", ONE.replace("--nodes=1", "--signal=USR1@60") + "srun python x.py\n", 0, ""),
    ("signal-not-trapped", ONE.replace("--nodes=1", "--signal=TERM@60") + "trap 'touch stop' TERM\nsrun python x.py\n", 0, ""),
    ("background-not-awaited", ONE + "python a.py 1 &\npython a.py 2\n", 7, "error"),
    ("background-not-awaited", ONE + "python a.py 1 &\npython a.py 2\nwait\n", 0, ""),
    ("background-not-awaited", ONE + "python monitor.py &\npython a.py 2\n", 0, ""),
    ("exit-code-lost", ONE + "python a.py\necho done\nexit $?\n", 9, "warning"),
    ("exit-code-lost", ONE + "python a.py\nrc=$?\necho done\nexit $rc\n", 0, ""),
    ("exit-code-lost", ONE + "python a.py\necho $?\nexit $?\n", 9, "warning"),
    ("exit-code-lost", ONE + "python a.py || true\n", 7, "warning"),
    ("exit-code-lost", ONE + "for i in 1 2; do\n  python a.py $i || true\ndone\n", 0, ""),
    ("misspelled-variable", ONE + "CL_SOCKET_IFNAME=eno1 python a.py\n", 7, "warning"),
    ("misspelled-variable", ONE + "export CCL_ATL_TRANSPORT=ofi RCCL_IB_HCA=mlx5\n", 0, ""),
    ("deprecated-variable", TWO + "export NCCL_TREE_THRESHOLD=0\n", 7, "note"),
    ("deprecated-variable", TWO + "export TORCH_DISTRIBUTED_DETAIL=DEBUG\n", 7, "warning"),
    ("unset-variable", ONE.replace("--nodes=1", "--nodes=1 --time=10") + "python a.py $SLURM_ARRAY_TASK_ID\n", 7, "note"),
    ("export-drops-environment", "#!/bin/bash\n#SBATCH --export=NONE\npython a.py\n", 0, ""),
    ("export-drops-environment", "#!/bin/bash\n#SBATCH --export=NONE\nsrun python a.py\n", 2, "warning"),
    ("output-folder", "#!/bin/bash\n#SBATCH --output=../no_such_logs/%j.out\nls\n", 2, "note"),
    ("output-folder", "#!/bin/bash\n#SBATCH --output=no_such_logs/a/%j.out\nls\n", 2, "note"),
    ("fixed-port", BARE + "#SBATCH --mem=8G\ntorchrun --nproc_per_node=2 --master_port $3 a.py\n", 0, ""),
]  # fmt: skip
SHELL_CASES = [*DIRECTIVES, *STRAY, *VALUES, *SOFTWARE, *SECRETS, *SIGNALS]
