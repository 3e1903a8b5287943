"""Cases about results that are always success, programs in variables and packages of arrays: the rule, the script, the line, the severity; line 0 for none."""

from __future__ import annotations

HEAD = "#!/bin/bash\n#SBATCH --nodes=1\n#SBATCH --gpus-per-node=1\n"  # 3 lines
TWO = "#!/bin/bash\n#SBATCH --nodes=1\n#SBATCH --gres=gpu:a100:2\n"
ARRAY = "#!/bin/bash\n#SBATCH --array=0-7\n#SBATCH --gres=gpu:1\n"
PLAIN = "#!/bin/bash\n"
TRAIN = "python train.py\n"
ON_ALL = (
    'for h in a b; do\n  if [ "$h" = a ]; then\n    ssh $h ls && \\\n    ssh $h date {}\n  else\n    docker run x {}\n  fi\n'
    "  rc+=($?)\ndone\nexit ${{rc[0]}}\n"
)

RESULTS: list[tuple[str, str, int, str]] = [
    ("constant-condition", HEAD + 'if [[ -z "SLURM_JOB_ID" || $SLURM_NNODES -eq 1 ]]; then ls; fi\n', 4, "warning"),
    ("constant-condition", HEAD + 'if [ "$A" = x -a ! -n "OUT_DIR" ]; then ls; fi\n', 4, "warning"),
    ("constant-condition", HEAD + 'if [ ! -z RESUME ]; then python train.py; fi\n', 4, "warning"),
    ("constant-condition", HEAD + 'A=1\nif [[ -n "$A" && ( ! -z A ) ]]; then ls; fi\n', 5, "warning"),
    ("constant-condition", HEAD + 'if [[ -z "$OUT_DIR" || "$1" == "-z" ]] || [ x = -z ]; then ls; fi\n', 0, ""),
    ("constant-condition", HEAD + 'if [ -n "$(ls)" ] && [ -z "${OUT_DIR}" ] && [ -n true ]; then ls; fi\n', 0, ""),
    ("exit-code-lost", HEAD + ON_ALL.format("&", "&"), 11, "warning"),
    ("exit-code-lost", HEAD + ON_ALL.format("&", ""), 0, ""),
    ("exit-code-lost", HEAD + ON_ALL.format("", "&"), 0, ""),
    ("exit-code-lost", HEAD + "if [ -f a ]; then\n  ls &\nfi\nrc=$?\nexit $rc\n", 7, "warning"),
    ("exit-zero", HEAD + 'if [ ! -d data ]; then echo "Could not find data"; exit; fi\n' + TRAIN, 4, "warning"),
    ("exit-zero", HEAD + '[ -d data ] || { echo "no data"; exit; }\n' + TRAIN, 4, "warning"),
    ("exit-zero", HEAD + '[ ! -d data ] && echo "ERROR: no data" && exit\n' + TRAIN, 4, "warning"),
    ("exit-zero", HEAD + "cp a b\nif [ $? -ne 0 ]; then\n  echo copy\n  exit # stop\nfi\n" + TRAIN, 7, "warning"),
    ("exit-zero", PLAIN + 'if [ $# -lt 1 ]; then\n  echo "missing name"\n  exit\nfi\npython train.py $1\n', 4, "note"),
    ("exit-zero", HEAD + 'if [ -f done ]; then\n  echo "all epochs are there"\n  exit\nfi\n' + TRAIN, 0, ""),
    ("exit-zero", HEAD + 'if [ ! -d data ]; then\n  echo "not found"\n  exit 3\nfi\n' + TRAIN + "exit\n", 0, ""),
    ("exit-zero", HEAD + 'if [ "$1" = --help ]; then\n  echo "usage: job.sh NAME"\n  exit\nfi\n' + TRAIN, 0, ""),
]  # fmt: skip
PROGRAMS: list[tuple[str, str, int, str]] = [
    ("never-expanded", HEAD + "python=/envs/a/bin/python\npython train.py\n", 5, "warning"),
    ("never-expanded", HEAD + "PYTHON=/envs/a/bin/python3.9\nsrun python3 train.py\n", 5, "warning"),
    ("never-expanded", HEAD + "TORCHRUN='/envs/a/bin/torchrun'\ntorchrun --nproc_per_node=1 train.py\n", 5, "warning"),
    ("never-expanded", HEAD + "PYTHON=/envs/a/bin/python\n$PYTHON prepare.py\npython train.py\n", 0, ""),
    ("never-expanded", HEAD + "PYTHON=/envs/a/bin/python\nsource /envs/a/bin/activate\npython train.py\n", 0, ""),
    ("never-expanded", HEAD + "PYTHON=/envs/a/bin/python\nmodule load python\npython train.py\n", 0, ""),
    ("never-expanded", HEAD + "export PYTHON=/envs/a/bin/python\npython train.py\n", 0, ""),
    ("never-expanded", HEAD + "export PATH=/envs/a/bin:$PATH\nPYTHON=/envs/a/bin/python\npython train.py\n", 0, ""),
    ("never-expanded", HEAD + "PYTHON=/envs/a/bin/python\nsingularity exec x.sif python train.py\n", 0, ""),
    ("never-expanded", HEAD + "OLD=/envs/a/bin/python\npython train.py\n", 0, ""),
    ("launcher-option", HEAD + "mpirun -np 8 --mca pml ucx -x coll_hcoll_enable=0 ./bench\n", 4, "note"),
    ("launcher-option", HEAD + "mpirun -x btl_tcp_if_include=eth0 -np 8 ./bench\n", 4, "note"),
    ("launcher-option", HEAD + "mpirun --mca coll_hcoll_enable 0 -x NCCL_DEBUG=WARN -x OMPI_MCA_btl=tcp -np 8 ./bench\n", 0, ""),
    ("prepared-by-all-tasks", ARRAY + "source activate e\nconda install -y pytorch -c pytorch\npython x.py $SLURM_ARRAY_TASK_ID\n", 5, "warning"),
    ("prepared-by-all-tasks", ARRAY + "mamba env update -n e -f env.yml\npython x.py $SLURM_ARRAY_TASK_ID\n", 4, "warning"),
    ("prepared-by-all-tasks", ARRAY + "conda activate e$SLURM_ARRAY_TASK_ID\nconda install -y a\n", 0, ""),
    ("prepared-by-all-tasks", ARRAY + "if [ ! -d e ]; then conda install -y a; fi\nconda list\n", 0, ""),
    ("prepared-by-all-tasks", ARRAY.replace("0-7", "0-7%1") + "conda install -y a\n", 0, ""),
    ("prepared-by-all-tasks", HEAD + "conda install -y a\n", 0, ""),
]  # fmt: skip
REQUESTS: list[tuple[str, str, int, str]] = [
    ("directive-refused", "#!/bin/bash\n#SBATCH --group abc\nls\n", 2, "error"),
    ("directive-refused", "#!/bin/bash\n#SBATCH --runtime=2\nls\n", 2, "error"),
    ("directive-refused", "#!/bin/bash\n#SBATCH --mem-per-task=4G\nls\n", 2, "error"),
    ("directive-refused", "#!/bin/bash\n#SBATCH --account=abc --container-image=a.sqsh\nls\n", 0, ""),
]  # fmt: skip
RUN = "torchrun --nproc_per_node=1 "
USES: list[tuple[str, str, int, str]] = [
    ("idle-gpus", TWO + RUN + "a.py\nCUDA_VISIBLE_DEVICES=1 " + RUN + "b.py\n", 4, "warning"),
    ("idle-gpus", TWO + "CUDA_VISIBLE_DEVICES=0 " + RUN + "a.py\nCUDA_VISIBLE_DEVICES=0 " + RUN + "b.py &\nwait\n", 4, "warning"),
    ("idle-gpus", TWO + "CUDA_VISIBLE_DEVICES=0 " + RUN + "a.py &\nCUDA_VISIBLE_DEVICES=1 " + RUN + "b.py\nwait\n", 0, ""),
    ("idle-gpus", TWO + "CUDA_VISIBLE_DEVICES=0 python serve.py &\nCUDA_VISIBLE_DEVICES=1 " + RUN + "b.py\n", 0, ""),
    ("master-address", TWO.replace("nodes=1", "nodes=4") + "head_node=localhost\necho \"head: $head_node\"\nray start --head\n", 0, ""),
    ("master-address", TWO.replace("nodes=1", "nodes=4") + "head_node=localhost\nsrun ray start --address $head_node:6379\n", 4, "error"),
]  # fmt: skip
CASE = 'while [ $# -gt 0 ]; do\n  case "$1" in\n    --model | -m) M=$2 ;;\n    {}\n    *) echo "x) ;;" ;;\n  esac\n  shift 2\ndone\n'
LATER = (
    'for m in x-a x-b; do\n  if [[ $kind == "a" ]]; then n=1; else n=2; fi\n  {}\n  python train.py $kind $n\ndone\n'
)
PREFIX = "ip_prefix=$(hostname -i)\nhead=$ip_prefix:6379\npython train.py $head\n"
MESSAGES: list[tuple[str, str, int, str]] = [
    ("unset-variable", HEAD + PREFIX + 'echo "ip_prefix: "$ip_pref\n', 7, "warning"),
    ("unset-variable", HEAD + PREFIX + 'echo "ip_prefix: $ip_prefix of $ip_pref"\n', 0, ""),
    ("unset-variable", HEAD + PREFIX + 'echo "prefix: $ip_pref"\n', 0, ""),
    ("unset-variable", HEAD + PREFIX + "echo ip_prefix: $ip_pref > a.txt\n", 0, ""),
]  # fmt: skip
BRANCHES: list[tuple[str, str, int, str]] = [
    ("constant-condition", PLAIN + CASE.format("--machine | -m) N=$2 ;;"), 5, "warning"),
    ("constant-condition", PLAIN + CASE.format('"-m") N=$2 ;;'), 5, "warning"),
    ("constant-condition", PLAIN + CASE.format("*) N=$2 ;;\n    -n) O=$2 ;;"), 6, "warning"),
    ("constant-condition", PLAIN + CASE.format("-n) case $2 in a) ls ;; b) pwd ;; a) date ;; esac ;;"), 5, "warning"),
    ("constant-condition", PLAIN + CASE.format("--machine | -n) case $2 in --model) ls ;; *) pwd ;; esac ;;"), 0, ""),
    ("constant-condition", PLAIN + CASE.format("--again | -m) M=$2 ;;"), 0, ""),  # does the same
    ("constant-condition", PLAIN + "case $a in\n  x) ls ;;&\n  x) pwd ;;\nesac\ncase $a in\n  x) ls ;;\nesac\n", 0, ""),
    ("constant-condition", PLAIN + 'echo "case $a in x) ls ;; x) pwd ;; esac"\n# case $a in x) ls ;; x) pwd ;; esac\n', 0, ""),
    ("constant-condition", HEAD + "N=3\nif [[ $N>2 ]]; then python train.py; fi\n", 5, "warning"),
    ("constant-condition", HEAD + LATER.format("kind=${m#x-}"), 5, "warning"),
    ("constant-condition", HEAD + LATER.format('kind=$(basename "$m")'), 5, "warning"),
    ("constant-condition", HEAD + LATER.format("kind=done"), 0, ""),
    ("constant-condition", HEAD + LATER.format("kind=$m"), 0, ""),  # the pass before is meant
    ("constant-condition", HEAD + "kind=a\n" + LATER.format("kind=${m#x-}"), 0, ""),
    ("mistyped-command", HEAD + "python train.py --resume Flase\n", 4, "warning"),
    ("mistyped-command", HEAD + "python train.py --resume=ture --amp true\n", 4, "warning"),
    ("mistyped-command", HEAD + "python train.py in.txt Fasle\n", 4, "warning"),
    ("mistyped-command", HEAD + "python train.py ture --name=mixture fase\n", 0, ""),
    ("directive-not-read", "#!/bin/sh\n#BSUB -q gpu\nBSUB -n 4\npython train.py\n", 3, "warning"),
    ("directive-not-read", "#!/bin/sh\n#PBS -q gpu\nPBS -l select=1\npython train.py\n", 3, "warning"),
    ("directive-not-read", "#!/bin/sh\n#BSUB -q gpu\nPBS -n 4\npython train.py\n", 0, ""),
    ("directive-refused", PLAIN + "cat <<EOF | tee a.sh\n#!/bin/bash\n#SBATCH --nodes=1\n#SBATCH --cpus_per_task=4\nEOF\necho x | tee -a a.sh\n", 5, "error"),
    ("directive-refused", PLAIN + "cat <<EOF | grep a\n#!/bin/bash\n#SBATCH --nodes=1\n#SBATCH --cpus_per_task=4\nEOF\n", 0, ""),
    ("idle-gpus", TWO + "python run.py --which_gpu '0' --size 4\n", 4, "warning"),
    ("idle-gpus", TWO + "python run.py --visible_gpus 0,1\n", 4, "note"),
]  # fmt: skip
RESULT_CASES = [*MESSAGES, *BRANCHES, *RESULTS, *PROGRAMS, *REQUESTS, *USES]
