"""Symptoms and examples of the rules for batch scripts and files, as `examples` has them for the other rules."""

from __future__ import annotations

from allranks.analysis.lint.records import RuleExample

SCRIPT_EXAMPLES: dict[str, RuleExample] = {
    # Batch script
    "variable-in-directive": RuleExample(
        "`sbatch: error: invalid number of nodes ($N)`; a file called `$HOME`; no log.",
        "#SBATCH --nodes=$NODES\nsrun torchrun train.py",
        "# sbatch --nodes=$NODES job.sbatch\nsrun torchrun train.py",
    ),
    "directive-refused": RuleExample(
        "`sbatch: error: Invalid --time specification`, `Invalid numeric value`, `unrecognized option`: no job is submitted.",
        "#SBATCH --nodes=1\n#SBATCH --time=24h\nsrun torchrun train.py",
        "#SBATCH --nodes=1\n#SBATCH --time=24:00:00\nsrun torchrun train.py",
    ),
    "directive-too-late": RuleExample(
        "The job runs with the cluster's defaults: one node, the default time limit.",
        "#SBATCH --nodes=2\nset -e\n#SBATCH --time=01:00:00\nsrun torchrun train.py",
        "#SBATCH --nodes=2\n#SBATCH --time=01:00:00\nset -e\nsrun torchrun train.py",
    ),
    "directive-not-read": RuleExample(
        "As above, or `sbatch: error: unrecognized option`.",
        "#SBATCH --nodes=2\n#SBTACH --time=01:00:00\nsrun torchrun train.py",
        "#SBATCH --nodes=2\n#SBATCH --time=01:00:00\nsrun torchrun train.py",
    ),
    "output-folder": RuleExample(
        "The job fails within a second, with no output at all. Not reported if Slurm is known to be 23.02 or newer (`--slurm-version 23.11`, or `module load slurm/23.11`); if it is known to be older, a missing folder is a warning everywhere. A relative folder is looked for in the current folder, next to the script, and above it up to the root of the repository. A missing folder is a warning inside a repository, or if the folder above it exists; else a note, and also if the script submits itself, if a comment of it says that `mkdir` comes first, or if a library creates the folder (`lightning_logs`, `wandb`). A relative folder that the script itself creates, too late, is a warning unless it exists, or a comment of the script says that `mkdir` comes first. Output that the script redirects into a folder that is nowhere (`> logs/x.log`, `| tee logs/x.log`) is a warning inside a repository, else a note.",
        "#SBATCH --output=logs/%j.txt\nsrun torchrun train.py",
        "#SBATCH --output=%x-%j.out\nsrun torchrun train.py",
    ),
    "no-shebang": RuleExample(
        "`sbatch: error: This does not look like a batch script`.",
        "#SBATCH --nodes=1\nsrun torchrun train.py",
        "#!/bin/bash\n#SBATCH --nodes=1\nsrun torchrun train.py",
    ),
    "dos-line-breaks": RuleExample(
        "`sbatch: error: Batch script contains DOS line breaks`, or `$'\\r': command not found`.",
        "#!/bin/bash\r\nsrun torchrun train.py\r",
        "#!/bin/bash\nsrun torchrun train.py",
    ),
    "exit-code-lost": RuleExample(
        "`sacct` says COMPLETED for a training that failed. A pipe is a warning if the script has `set -e` or tests the pipe (`|| exit 1`), which then have no effect; else a note. `exit 0` behind the work is a warning; another last command that hides its result, such as `echo done`, `date` or `cp`, is a note. A plain `wait` as the end of a job whose work runs in the background is a warning, also with `set -e`, if nothing checks the results; outside of a job only behind the launchers of one group of ranks.",
        "set -e\ntorchrun --standalone train.py | tee train.log",
        "set -eo pipefail\ntorchrun --standalone train.py | tee train.log",
    ),
    "not-exported": RuleExample(
        "An option without its value, a path that begins in the wrong place, or a setting that is ignored.",
        "lr=1e-4\nsrun bash -c 'torchrun train.py --lr $lr'",
        "export lr=1e-4\nsrun bash -c 'torchrun train.py --lr $lr'",
    ),
    "unset-variable": RuleExample(
        "`argument --nproc_per_node: expected one argument`, or an option that takes the next word as its value.",
        "#SBATCH --nodes=1\n#SBATCH --gres=gpu:4\ntorchrun --nproc_per_node=$SLURM_GPUS_PER_NODE train.py",
        "#SBATCH --nodes=1\n#SBATCH --gpus-per-node=4\ntorchrun --nproc_per_node=$SLURM_GPUS_PER_NODE train.py",
    ),
    "input-not-read": RuleExample(
        "An empty line where the list should be, or a file that stays empty.",
        "sort -u $PBS_NODEFILE | echo",
        "sort -u $PBS_NODEFILE | cat",
    ),
    "date-format": RuleExample(
        "Names of folders or lines of the log whose minutes do not change.",
        "out=runs/$(date +%Y%m%d-%H%m)\npython train.py --out $out",
        "out=runs/$(date +%Y%m%d-%H%M)\npython train.py --out $out",
    ),
    "joined-path": RuleExample(
        "`can't open file '/home/me/projecttrain.py'`, with the end of the folder's name in front of the file's.",
        "WORK_DIR=/home/me/project\nsrun python ${WORK_DIR}train.py",
        "WORK_DIR=/home/me/project\nsrun python ${WORK_DIR}/train.py",
    ),
    "test-syntax": RuleExample(
        "`[: missing ]`, and the branch that is never taken, or always.",
        'if [ -z "$DATA"]; then\n  exit 1\nfi',
        'if [ -z "$DATA" ]; then\n  exit 1\nfi',
    ),
    "broken-line": RuleExample(
        "`--lr: command not found`, and a run with default values.",
        "torchrun --standalone \\\n  # --nproc_per_node=4 \\\n  --nproc_per_node=2 train.py",
        "# torchrun with four ranks: --nproc_per_node=4\ntorchrun --standalone \\\n  --nproc_per_node=2 train.py",
    ),
    "typographic-character": RuleExample(
        "`unrecognized arguments`, or sbatch refuses the option, although it looks right.",
        "srun torchrun \u2013\u2013nnodes=2 train.py",
        "srun torchrun --nnodes=2 train.py",
    ),
    "stray-line": RuleExample(
        "`command not found`, or `Is a directory`, in the log; if it is the last line, the job is FAILED although the training was complete.",
        "srun torchrun --nnodes=2 train.py\nFooter",
        "srun torchrun --nnodes=2 train.py\n# Footer",
    ),
    "value-split": RuleExample(
        "`command not found` or `not a valid identifier` in the log; the program runs with an empty value.",
        "export MASTER_ADDR = localhost",
        "export MASTER_ADDR=localhost",
    ),
    "missing-colon": RuleExample(
        "`cannot open shared object file`, `No module named ...`, or `command not found` for ordinary commands.",
        "export LD_LIBRARY_PATH=/opt/nccl/lib$LD_LIBRARY_PATH",
        "export LD_LIBRARY_PATH=/opt/nccl/lib:$LD_LIBRARY_PATH",
    ),
    "quoted-tilde": RuleExample(
        "`No such file or directory: ~/...`, or a new folder with the name `~`.",
        'DATA="~/data"\ncd "$DATA"',
        'DATA="$HOME/data"\ncd "$DATA"',
    ),
    "variable-not-expanded": RuleExample(
        "A run or a folder is called `$NAME`, or the program refuses a number such as `'$SLURM_NNODES'`.",
        "OUT=/scratch/run1\nsrun python train.py --out '$OUT/checkpoints'",
        'OUT=/scratch/run1\nsrun python train.py --out "$OUT/checkpoints"',
    ),
    "blank-before-equals": RuleExample(
        "`invalid int value: '='`, or `can't open file '4'`.",
        "torchrun --nproc_per_node =4 train.py",
        "torchrun --nproc_per_node=4 train.py",
    ),
    "csh-syntax": RuleExample(
        "`setenv: command not found`; or nothing, and the value is empty.",
        "set jobid = $SLURM_JOB_ID",
        "jobid=$SLURM_JOB_ID",
    ),
    "folder-not-copied": RuleExample(
        "`cp: -r not specified; omitting directory`, and the results are gone when the job ends.",
        "cp results/ /scratch/me",
        "cp -r results/ /scratch/me",
    ),
    "unquoted-variable": RuleExample(
        "A node list `gpu[01-04]` that matches a file called `gpu0`; a test that is true for an empty value.",
        "if [ -n $DATA ]; then\n  ls\nfi",
        'if [ -n "$DATA" ]; then\n  ls\nfi',
    ),
    "literal-quotes": RuleExample(
        "`'model' is not a local folder and is not a valid model identifier`, with the quotes in the name.",
        "model=\"${1:-'mistral'}\"",
        'model="${1:-mistral}"',
    ),
    "runs-arguments": RuleExample(
        "`16: command not found`.",
        'batch=$1\n"$@"',
        'batch=$1\npython train.py --batch "$batch"',
    ),
    "mistyped-command": RuleExample(
        "`soruce: command not found`, and then packages that are missing.",
        "soruce env/bin/activate",
        "source env/bin/activate",
    ),
    "unterminated": RuleExample(
        "`unexpected EOF while looking for matching`, at the end of the file.",
        'export ARGS="--lr 1e-4\ntorchrun train.py $ARGS',
        'export ARGS="--lr 1e-4"\ntorchrun train.py $ARGS',
    ),
    "exit-zero": RuleExample(
        "`sacct` says COMPLETED, and nothing was trained.",
        'if [ -z "$DATA" ]; then\n  echo "Error: DATA is missing"\n  exit 0\nfi',
        'if [ -z "$DATA" ]; then\n  echo "Error: DATA is missing"\n  exit 1\nfi',
    ),
    "wait-result-lost": RuleExample(
        "`Exit code was 0` below the traceback; the job is COMPLETED.",
        "srun python train.py &\nwait\nexit $?",
        "srun python train.py &\nwait $!\nexit $?",
    ),
    "endless-wait": RuleExample(
        "The training ends, and the job runs until its time limit.",
        "vllm serve model &\npython train.py &\nwait",
        "vllm serve model &\nserver=$!\npython train.py\nrc=$?\nkill $server\nexit $rc",
    ),
    "conda-not-set-up": RuleExample(
        "`CommandNotFoundError: Your shell has not been properly configured`, then the Python of the shell that called `sbatch`, or the system's. A note in scripts of PBS, whose shells read the profile, and behind commands of a site that name conda or Python.",
        "conda activate train\nsrun torchrun train.py",
        'eval "$(conda shell.bash hook)"\nconda activate train\nsrun torchrun train.py',
    ),
    "module-after-activation": RuleExample(
        "`ModuleNotFoundError` for a package that is installed in the environment, or another version of torch than expected.",
        "source ~/conda/etc/profile.d/conda.sh\nconda activate mine\nmodule load pytorch/2.4\nsrun python train.py",
        "source ~/conda/etc/profile.d/conda.sh\nmodule load pytorch/2.4\nconda activate mine\nsrun python train.py",
    ),
    "container-without-gpu": RuleExample(
        "`torch.cuda.is_available()` is False; `Found no NVIDIA driver on your system`; or the training runs on the CPU.",
        "srun singularity exec image.sif python train.py",
        "srun singularity exec --nv image.sif python train.py",
    ),
    "asks-for-answer": RuleExample(
        "`EOFError: EOF when reading a line` behind `Proceed (Y/n)?`, or `Abort.`; the packages are as before.",
        "pip uninstall torch",
        "pip uninstall -y torch",
    ),
    "background-not-awaited": RuleExample(
        "The job ends after a second, with exit code 0.",
        "srun python train.py &",
        "srun python train.py &\nwait",
    ),
    "nodes-in-sequence": RuleExample(
        "The first node waits at the rendezvous; the other nodes do nothing.",
        "for node in $NODES; do\n  srun -N1 -n1 -w $node torchrun --nnodes=2 --nproc_per_node=2 train.py\ndone",
        "srun --ntasks-per-node=1 torchrun --nnodes=2 --nproc_per_node=2 train.py",
    ),
    "secret-in-script": RuleExample(
        "None, until somebody uses the token.",
        "export WANDB_API_KEY=0123456789abcdef0123456789abcdef01234567",
        "export WANDB_API_KEY=$(cat ~/.wandb_key)",
    ),
    "secret-printed": RuleExample(
        "The token is in the job's log.",
        'echo "token: $HF_TOKEN"',
        'echo "token: ${HF_TOKEN:+set}"',
    ),
    "placeholder": RuleExample(
        "`sbatch: error: invalid account`, or a path that does not exist.",
        "#SBATCH --account=<account>\nsrun torchrun train.py",
        "#SBATCH --account=project1\nsrun torchrun train.py",
    ),
    "script-folder": RuleExample(
        "`No such file or directory` below /var/spool/slurmd.",
        'cd "$(dirname "$0")"\nsrun torchrun train.py',
        'cd "$SLURM_SUBMIT_DIR"\nsrun torchrun train.py',
    ),
    "set-e": RuleExample(
        "The script ends before its own handling of the failure.",
        "set -e\nsrun torchrun train.py\nrc=$?\nexit $rc",
        "set -e\nrc=0\nsrun torchrun train.py || rc=$?\nexit $rc",
    ),
    "buffered-output": RuleExample(
        "The log of a killed rank ends kilobytes before it died.",
        "#SBATCH --ntasks-per-node=2\nsrun python train.py",
        "#SBATCH --ntasks-per-node=2\nsrun python -u train.py",
    ),
    "blocks-script": RuleExample(
        "The log shows `nvidia-smi`'s table again and again, and the training has not started when the time limit is reached.",
        "nvidia-smi -l 5\npython train.py",
        "nvidia-smi -l 5 > gpu.log &\nmonitor=$!\npython train.py\nrc=$?\nkill $monitor\nexit $rc",
    ),
    "exits-early": RuleExample(
        "The job is COMPLETED after some seconds, and nothing was trained.",
        "module load cuda\nexit\npython train.py",
        "module load cuda\npython train.py",
    ),
    "same-node-rank": RuleExample(
        "Both nodes start as rank 0; one of them stops with `Address already in use`, or each waits for a rank 1 that never comes.",
        "srun bash -c 'torchrun --nnodes=2 --node_rank=$SLURM_LOCALID --master_addr=$HEAD --master_port=15001 train.py'",
        "srun bash -c 'torchrun --nnodes=2 --node_rank=$SLURM_NODEID --master_addr=$HEAD --master_port=15001 train.py'",
    ),
    "arguments-dropped": RuleExample(
        "`bash train.sh 4 --lr 0.1` trains with the default learning rate, and nothing says so.",
        "MORE=${@:2}\ntorchrun --standalone --nproc_per_node=$1 train.py --data data",
        "MORE=${@:2}\ntorchrun --standalone --nproc_per_node=$1 train.py --data data $MORE",
    ),
    "launcher-option": RuleExample(
        "`accelerate launch: error: unrecognized arguments`, or `can't open file 'python'`; or the launcher starts one rank instead of four.",
        "accelerate launch --nproc_per_node=2 train.py",
        "accelerate launch --num_processes=2 train.py",
    ),
    "loop-values": RuleExample(
        "The loop runs once, or all its runs give the same result; the program gets `1,` or `{0..$N}` as its value.",
        "seeds=(1 2 3)\nfor seed in $seeds; do\n  python train.py --seed $seed\ndone",
        'seeds=(1 2 3)\nfor seed in "${seeds[@]}"; do\n  python train.py --seed $seed\ndone',
    ),
    "index-out-of-range": RuleExample(
        "The last task of the array stops with `expected one argument`, or trains with another option's name as its value.",
        "#SBATCH --array=1-3\nrates=(1e-3 1e-4 1e-5)\npython train.py --lr ${rates[$SLURM_ARRAY_TASK_ID]}",
        "#SBATCH --array=0-2\nrates=(1e-3 1e-4 1e-5)\npython train.py --lr ${rates[$SLURM_ARRAY_TASK_ID]}",
    ),
    "array-not-used": RuleExample(
        "Ten tasks give ten times the same result, and their checkpoints overwrite each other.",
        "#SBATCH --array=0-9\npython train.py --seed 1 --out runs/a",
        "#SBATCH --array=0-9\npython train.py --seed $SLURM_ARRAY_TASK_ID --out runs/a$SLURM_ARRAY_TASK_ID",
    ),
    "deletes-too-much": RuleExample(
        "The scratch folder was missing, and the files of the folder where sbatch was called are gone.",
        "cd /scratch/run\nrm -rf *",
        "cd /scratch/run || exit 1\nrm -rf *",
    ),
    "lost-in-subshell": RuleExample(
        "`ModuleNotFoundError` although the environment was activated; or a counter that is 0 behind its loop.",
        "source ~/conda/bin/activate train | tee setup.log\npython train.py",
        "source ~/conda/bin/activate train > setup.log\npython train.py",
    ),
    "options-in-one-word": RuleExample(
        "`error: unrecognized arguments: --lr 1 --epochs 2`, with all options in one.",
        'ARGS="--lr 1 --epochs 2"\npython train.py "$ARGS"',
        'ARGS=(--lr 1 --epochs 2)\npython train.py "${ARGS[@]}"',
    ),
    "unbound-variable": RuleExample(
        "`PYTHONPATH: unbound variable`, and the job has failed after a second.",
        "set -eu\nexport PYTHONPATH=$HOME/code:$PYTHONPATH\npython train.py",
        "set -eu\nexport PYTHONPATH=$HOME/code${PYTHONPATH:+:$PYTHONPATH}\npython train.py",
    ),
    "constant-condition": RuleExample(
        "One branch of an `if` runs always, whatever the value; or `integer expression expected` in the log.",
        "if [ $LOSS -gt 1.5 ]; then\n  python train.py\nfi",
        'if [ "$(echo "$LOSS > 1.5" | bc)" = 1 ]; then\n  python train.py\nfi',
    ),
    "out-of-place": RuleExample(
        "`prepare: command not found`, or commands at the end of the script that never run.",
        "prepare data\nprepare() {\n  python prepare.py $1\n}\npython train.py",
        "prepare() {\n  python prepare.py $1\n}\nprepare data\npython train.py",
    ),
    "unknown-option": RuleExample(
        "`no such option: -y`, and then a missing package.",
        "pip install -y wandb\npython train.py",
        "pip install wandb\npython train.py",
    ),
    "other-shell": RuleExample(
        "`no matches found`, or the same random port in every run.",
        "#!/bin/zsh\npython train.py --tag run[base]",
        "#!/bin/zsh\npython train.py --tag 'run[base]'",
    ),
    "dependency": RuleExample(
        "`sbatch: error: Job dependency problem`: the second job is not submitted.",
        "ID=$(sbatch prepare.sbatch)\nsbatch --dependency=afterok:$ID train.sbatch",
        "ID=$(sbatch --parsable prepare.sbatch)\nsbatch --dependency=afterok:$ID train.sbatch",
    ),
    "option-of-program": RuleExample(
        "The job runs with the resources that its `#SBATCH` lines request; or the program stops with `unrecognized arguments`.",
        "sbatch train.sbatch --gres=gpu:4",
        "sbatch --gres=gpu:4 train.sbatch",
    ),
    # Files
    "path-in-front": RuleExample(
        "`cd: ..//home/me/run: No such file or directory`; the script goes on in another folder.",
        "cd ../$SLURM_SUBMIT_DIR\npython train.py",
        'cd "$SLURM_SUBMIT_DIR/.."\npython train.py',
    ),
    "overwritten-output": RuleExample(
        "The log has the last run of the loop only.",
        "for seed in 1 2 3; do\n  python train.py --seed $seed > train.log\ndone",
        "for seed in 1 2 3; do\n  python train.py --seed $seed > train_$seed.log\ndone",
    ),
    "node-local-file": RuleExample(
        "`can't open file '/tmp/x.py': No such file or directory` on all nodes but the first; checkpoints that are incomplete.",
        "srun torchrun --nnodes=2 --nproc_per_node=2 train.py --output_dir=/tmp/$USER/out",
        "srun torchrun --nnodes=2 --nproc_per_node=2 train.py --output_dir=$HOME/out",
    ),
    "prepared-by-all-tasks": RuleExample(
        "`ERROR: Could not install packages due to an OSError`, or a file that is half written when another task reads it.",
        "#SBATCH --nodes=1\n#SBATCH --ntasks-per-node=4\nsrun pip install -r requirements.txt\nsrun python train.py",
        "#SBATCH --nodes=1\n#SBATCH --ntasks-per-node=4\npip install -r requirements.txt\nsrun python train.py",
    ),
    "results-left-on-node": RuleExample(
        "The job completes, and there are no checkpoints.",
        "#SBATCH --nodes=1\npython train.py --output_dir $SLURM_TMPDIR/out",
        "#SBATCH --nodes=1\npython train.py --output_dir $SLURM_TMPDIR/out\ncp -r $SLURM_TMPDIR/out $HOME/results",
    ),
    "pattern-not-expanded": RuleExample(
        "`/home/%u/.bashrc: No such file or directory`, or a folder called `%j`. A note for arguments of Python programs, which may replace it themselves.",
        "mkdir -p logs/%j",
        "mkdir -p logs/$SLURM_JOB_ID",
    ),
    "fixed-name-in-tmp": RuleExample(
        "`Permission denied` when somebody else was there first; settings of another job. It is a note unless the file shows that other jobs can be on the node.",
        "#SBATCH --nodes=1\n#SBATCH --gres=gpu:1\n#SBATCH --mem=32G\nrm -rf /tmp/cache",
        "cache=$(mktemp -d)\ntrap 'rm -rf \"$cache\"' EXIT",
    ),
    "slurm-tmpdir": RuleExample(
        "`mkdir: cannot create directory '/x': Permission denied`.",
        "cp data.tar $SLURM_TMPDIR/",
        'cp data.tar "${SLURM_TMPDIR:-/tmp/$USER.$SLURM_JOB_ID}/"',
    ),
    "cache-not-shared": RuleExample(
        "Every node downloads the model; `couldn't connect to 'https://huggingface.co'` on nodes without internet.",
        "export HF_HOME=/tmp/hf",
        "export HF_HOME=/shared/hf",
    ),
    "cache-missing": RuleExample(
        "`Disk quota exceeded` in the home folder; ranks that race for one cache.",
        "srun torchrun --nnodes=2 --nproc_per_node=2 train.py --model_name_or_path mistralai/Mistral-7B-v0.1",
        "export HF_HOME=/shared/hf\nsrun torchrun --nnodes=2 --nproc_per_node=2 train.py --model_name_or_path mistralai/Mistral-7B-v0.1",
    ),
    "sbcast": RuleExample(
        "`File exists`, or `No such file or directory`, from sbcast.",
        "sbcast data.tar /tmp/data.tar",
        "sbcast --force data.tar /tmp/data.tar",
    ),
}
