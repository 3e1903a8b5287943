"""Cases about the exit code of the work on its way to the end of a script: the rule, the script, the line and the severity; 0 for none."""

from __future__ import annotations

from tests.lint.step_cases import asking

GPU = asking("--gres=gpu:1")  # 2 lines
TWO = asking("--nodes=2", "--ntasks-per-node=1", "--gres=gpu:4")  # 4 lines
RUN = "python train.py\n"
TEE = "python train.py 2>&1 | tee log\n"
CHECK = "if [ $? -ne 0 ]; then\n  exit 1\nfi\n"
SERVE = "vllm serve m --port 8000"
SGE = "#!/bin/bash\n#$ -l rt_F=2\n#$ -cwd\n"

REPLACED: list[tuple[str, str, int, str]] = [
    ("exit-code-lost", GPU + RUN + 'echo "Completed: $(date) (exit code: $?)"\n', 4, "warning"),
    ("exit-code-lost", GPU + RUN + "echo `date` rc $?\n", 4, "warning"),
    ("exit-code-lost", GPU + RUN + 'echo "exit code: $? at $(date)"\n', 0, ""),
    ("exit-code-lost", GPU + RUN + "END=$(date +%s)\n" + CHECK, 5, "warning"),
    ("exit-code-lost", GPU + RUN + "DONE=1\nrc=$?\nexit $rc\n", 5, "warning"),
    ("exit-code-lost", GPU + RUN + "sleep 5\n" + CHECK, 5, "warning"),
    ("exit-code-lost", GPU + RUN + "OUT=$(python evaluate.py)\n" + CHECK, 0, ""),
    ("exit-code-lost", GPU + RUN + "rc=$?\nEND=$(date +%s)\nexit $rc\n", 0, ""),
    ("exit-code-lost", GPU + RUN + "cd out\n" + CHECK, 0, ""),
    ("exit-code-lost", GPU + "train() {\n  " + TEE + CHECK + "}\ntrain\n", 4, "warning"),
    ("exit-code-lost", "#!/bin/bash\ntrain() {\n  " + TEE + CHECK + "}\ntrain\n", 3, "warning"),
    ("exit-code-lost", GPU + "bash train.sh | tee log\n" + CHECK, 3, "warning"),
    ("exit-code-lost", GPU + "bash train.sh | grep -q done\n" + CHECK, 0, ""),
    ("exit-code-lost", GPU + "cat list | tee log\n" + CHECK, 0, ""),
    ("exit-code-lost", GPU + "set -o pipefail\nbash train.sh | tee log\n" + CHECK, 0, ""),
    ("exit-code-lost", GPU + "if " + TEE.strip() + "; then\n  echo ok\nelse\n  exit 1\nfi\n", 3, "warning"),
    ("exit-code-lost", GPU + "if python train.py | grep -q ok; then\n  echo ok\nelse\n  exit 1\nfi\n", 0, ""),
    ("exit-code-lost", GPU + "main() {\n  " + RUN + "}\nmain 2>&1 | tee log\n", 6, "warning"),
    ("exit-code-lost", GPU + "main() {\n  ls\n}\nmain 2>&1 | tee log\n", 0, ""),
    ("exit-code-lost", "torchrun --nproc_per_node 8 x.py 2>&1 | tee log\n", 1, "warning"),
    ("exit-code-lost", "torchrun --nproc_per_node 8 x.py 2>&1 | tee log\necho done\n", 1, "note"),
    ("exit-code-lost", "python x.py 2>&1 | tee log\n", 1, "note"),
    ("exit-code-lost", TWO + "srun python a.py\nfor i in 1 2; do\n  srun python x.py --i $i | tee log$i\ndone\n", 7, "warning"),
]  # fmt: skip

ENDS: list[tuple[str, str, int, str]] = [
    ("exit-code-lost", GPU + RUN + "exit 0\n", 4, "warning"),
    ("exit-code-lost", GPU + "bash train.sh\nexit 0\n", 4, "warning"),
    ("exit-code-lost", GPU + "cd src && " + RUN + "exit 0\n", 4, "warning"),
    ("exit-code-lost", GPU + "cd src && " + TEE, 3, "warning"),
    ("exit-code-lost", GPU + "[ -f model.pt ] || " + TEE, 0, ""),
    ("gpus-held", GPU + RUN + "sleep 300\n", 4, "warning"),
    ("gpus-held", GPU + RUN + "sleep 10m\n", 4, "warning"),
    ("gpus-held", GPU + RUN + "sleep 10\n", 0, ""),
    ("gpus-held", GPU + "python serve.py &\n" + RUN + "sleep 300\n", 0, ""),
    ("gpus-held", GPU + RUN + "sleep 300\nls\n", 0, ""),
    ("exit-code-lost", GPU + "set -e\n" + RUN + "exit 0\n", 0, ""),
    ("exit-code-lost", GPU + "set -e\nbash train.sh\nexit 0\n", 0, ""),
    ("exit-code-lost", GPU + RUN + CHECK + "exit 0\n", 0, ""),
    ("exit-code-lost", GPU + RUN + "[ -f model.pt ] && exit 0\nexit 1\n", 0, ""),
    ("exit-code-lost", GPU + RUN + "exit\n", 0, ""),
    ("exit-code-lost", GPU + RUN + "rc=$?\necho rc $rc\n", 4, "warning"),
    ("exit-code-lost", GPU + "set -e\nset +e\n" + RUN + 'rc=$?\nset -e\necho "exit code: $rc"\ndate\n', 6, "warning"),
    ("exit-code-lost", GPU + RUN + 'rc=$?\necho "exit code: $rc"\nexit $rc\n', 0, ""),
    ("exit-code-lost", GPU + RUN + 'rc=$?\necho "exit code: $rc"\n(( rc == 0 )) || exit 1\n', 0, ""),
    ("exit-code-lost", GPU + RUN + "rc=$?\necho $rc > status.txt\n", 0, ""),
    ("exit-code-lost", GPU + RUN + "scancel $SLURM_JOB_ID\n", 4, "warning"),
    ("exit-code-lost", GPU + RUN + 'scancel "${SLURM_JOBID}" || true\n', 4, "warning"),
    ("exit-code-lost", GPU + RUN + "scancel $OTHER_JOB\n", 4, "note"),
    ("exit-code-lost", GPU + 'if [ ! -f data ]; then\n  scancel $SLURM_JOB_ID\nfi\n' + RUN, 0, ""),
    ("exit-zero", GPU + RUN + 'if [ $? -eq 0 ]; then\n  echo ok\nelse\n  echo "training failed"\nfi\ndate\n', 7, "warning"),
    ("exit-zero", GPU + RUN + 'if [ $? -ne 0 ]; then\n  echo "Error: training failed"\nfi\n', 5, "warning"),
    ("exit-zero", GPU + RUN + 'if [ $? -ne 0 ]; then\n  echo "Error: training failed"\nfi\npython evaluate.py\n', 0, ""),
    ("exit-zero", GPU + RUN + 'if [ $? -ne 0 ]; then\n  echo "Error: training failed"\n  exit 1\nfi\necho done\n', 0, ""),
    ("overwritten-output", GPU + "python train.py | tee train.log\necho finished | tee train.log\n", 4, "warning"),
    ("overwritten-output", GPU + "python train.py > train.log 2>&1\necho finished > train.log\n", 4, "warning"),
    ("overwritten-output", GPU + "python train.py > train.log 2>&1\necho finished >> train.log\n", 0, ""),
    ("overwritten-output", GPU + "python train.py > train.log 2>&1\nmv train.log old.log\necho finished > train.log\n", 0, ""),
    ("overwritten-output", GPU + "L=a.log\npython train.py | tee $L\nL=b.log\necho finished | tee $L\n", 0, ""),
]  # fmt: skip

WAITS: list[tuple[str, str, int, str]] = [
    ("background-not-awaited", SGE + "ssh $A sh run.sh 0 &\nssh $B sh run.sh 1\n", 4, "error"),
    ("background-not-awaited", SGE + "ssh $A singularity exec x.sif sh run.sh 0 &\nssh $B singularity exec x.sif sh run.sh 1\n", 4, "error"),
    ("background-not-awaited", SGE + "ssh $A sh run.sh 0 &\nssh $B sh run.sh 1\nwait\n", 0, ""),
    ("background-not-awaited", SGE + "ssh $A nvidia-smi -l &\nssh $B sh run.sh 1\n", 0, ""),
    ("background-not-awaited", "#!/bin/bash\nssh $A sh run.sh 0 &\nssh $B sh run.sh 1\n", 0, ""),
    ("background-not-awaited", GPU + "bash run.sh 1 &\nbash run.sh 2\n", 3, "error"),
    ("blocks-script", f"{SERVE}\n{SERVE}1\n", 1, "warning"),
    ("blocks-script", f"{SERVE} &\n{SERVE}1\n", 0, ""),
    ("blocks-script", f"#!/bin/bash\n{SERVE} | tee log\npython client.py\n", 2, "warning"),
    ("blocks-script", f"#!/bin/bash\n{SERVE}\n", 0, ""),
    ("blocks-script", f"#!/bin/bash\nif [ $1 = a ]; then\n  {SERVE}\nelse\n  {SERVE}1\nfi\n", 0, ""),
    ("blocks-script", f"#!/bin/bash\nfor p in 1 2; do\n  {SERVE}$p\ndone\n", 3, "warning"),
    ("blocks-script", f"#!/bin/bash\nwhile true; do\n  {SERVE}\ndone\n", 0, ""),
    ("blocks-script", GPU + f"srun {SERVE}\npython client.py\n", 3, "warning"),
    ("blocks-script", "#!/bin/bash\ngunicorn app:app --daemon\npython client.py\n", 0, ""),
]  # fmt: skip


LAST: list[tuple[str, str, int, str]] = [
    ("exit-code-lost", GPU + RUN + "echo done\n", 4, "note"),
    ("exit-code-lost", GPU + RUN + "\necho\necho end: $(date)\n", 6, "note"),
    ("exit-code-lost", GPU + RUN + "date\n", 4, "note"),
    ("exit-code-lost", GPU + RUN + "seff $SLURM_JOB_ID\n", 4, "note"),
    ("exit-code-lost", GPU + RUN + "conda deactivate\n", 4, "note"),
    ("exit-code-lost", GPU + "source venv/bin/activate\n" + RUN + "deactivate\n", 5, "note"),
    ("exit-code-lost", GPU + RUN + "echo done\nexit\n", 4, "note"),
    ("exit-code-lost", GPU + RUN + "wait\n", 4, "note"),
    ("exit-code-lost", GPU + RUN + "rm -rf cache\n", 4, "note"),
    ("exit-code-lost", "#!/bin/bash\n#PBS -l select=1:ngpus=1\n" + RUN + "date\n", 4, "note"),
    ("exit-code-lost", GPU + "for s in 1 2; do\n  python train.py $s\ndone\necho done\n", 6, "note"),
    ("exit-code-lost", GPU + RUN + "cp -r out $HOME\n", 4, "note"),
    ("exit-code-lost", GPU + "set -e\n" + RUN + "echo done\n", 0, ""),
    ("exit-code-lost", "#!/bin/bash -e\n#SBATCH --gres=gpu:1\n" + RUN + "echo done\n", 0, ""),
    ("exit-code-lost", GPU + RUN + "rc=$?\necho done\nexit $rc\n", 0, ""),
    ("exit-code-lost", GPU + "trap 'echo failed' ERR\n" + RUN + "echo done\n", 0, ""),
    ("exit-code-lost", GPU + "python train.py && echo done\n", 0, ""),
    ("exit-code-lost", GPU + "if python train.py; then\n  echo done\nelse\n  exit 1\nfi\n", 0, ""),
    ("exit-code-lost", GPU + "python -m pip install torch\n./serve\necho done\n", 5, "note"),
    ("exit-code-lost", GPU + 'CMD="python train.py"\necho "$CMD"\n$CMD\n', 0, ""),
    ("exit-code-lost", GPU + "nvidia-smi -l 9 >> log &\n" + RUN + "kill $!\nwait\n", 0, ""),
    ("exit-code-lost", GPU + RUN + "deactivate\n", 4, "note"),
    ("exit-code-lost", "#!/bin/bash\n" + RUN + "echo done\n", 0, ""),
]

EACH_GPU = "for g in 0 1; do\n  CUDA_VISIBLE_DEVICES=$g python train.py &\ndone\n"
BEHIND: list[tuple[str, str, int, str]] = [
    ("exit-code-lost", GPU + "python a.py &\npython b.py &\nwait\n", 5, "warning"),
    ("exit-code-lost", GPU + "set -e\n" + EACH_GPU + "wait\n", 7, "warning"),
    ("exit-code-lost", GPU + EACH_GPU + "wait\necho done\ndate\n", 6, "warning"),
    ("exit-code-lost", GPU + EACH_GPU + "wait\npython merge.py\n", 0, ""),
    ("exit-code-lost", GPU + "python a.py & p=$!\npython b.py & q=$!\nwait $p && wait $q\n", 0, ""),
    ("exit-code-lost", GPU + "python monitor.py &\npython train.py\n", 0, ""),
    ("exit-code-lost", GPU + "python -m vllm.entrypoints.api_server --model m &\nwait\n", 0, ""),
    ("exit-code-lost", "#!/bin/bash\n" + EACH_GPU + "wait\n", 0, ""),
]

TRIAL = "#!/bin/bash\n#SBATCH --nodes=2\nset {}\n(\n  srun sh -c './run.sh'\n) |& tee log\n"
ALONE = asking("--nodes=1", "--ntasks-per-node=1", "--gres=gpu:8")  # 4 lines
GROUPS: list[tuple[str, str, int, str]] = [
    ("exit-code-lost", TRIAL.format("-eux"), 6, "warning"),
    ("exit-code-lost", TRIAL.format("-euxo pipefail"), 0, ""),
    ("exit-code-lost", TRIAL.format("-eux").replace("srun sh", "sh"), 0, ""),
    ("not-exported", ALONE + "MASTER_ADDR=$(hostname)\nsrun python train.py\n", 0, ""),
    ("not-exported", TWO + "MASTER_ADDR=$(hostname)\nsrun python train.py\n", 5, "error"),
]

MOUNTED = "#!/bin/bash\n#SBATCH --nodes=1\nsingularity exec {} \\\n    image.sif \\\n    python train.py\n"
TARGETS: list[tuple[str, str, int, str]] = [
    ("broken-line", MOUNTED.format("--env PYTHONPATH=/a:/usr/bin/python"), 0, ""),
    ("broken-line", MOUNTED.format("-B /opt/python:/opt/python"), 0, ""),
]

STATUS_CASES = [*REPLACED, *ENDS, *WAITS, *LAST, *BEHIND, *GROUPS, *TARGETS]
