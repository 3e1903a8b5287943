"""Scripts whose variables do not meet, or whose values get lost: the rule, the script, the line and the severity; 0 for no finding."""

from __future__ import annotations

SHELL = "#!/bin/bash\n"
JOB = (
    SHELL
    + "#SBATCH --nodes=1\n#SBATCH --ntasks=1\n#SBATCH --gres=gpu:4\n#SBATCH --cpus-per-task=16\n#SBATCH --time=1:00:00\n"
)
SHARED = SHELL + "#SBATCH --nodes=1\n#SBATCH --gres=gpu:2\n#SBATCH --mem=50G\n"  # 4 lines
TWO_NODES = JOB.replace("nodes=1", "nodes=2").replace("ntasks=1", "ntasks-per-node=1")
U, PORT, LIST = "unset-variable", "fixed-port", "whole-node-list"
TAKES = "while [[ $# -gt 0 ]]; do\n  case $1 in\n    --base) base_config=$2; shift ;;\n    --few) few_config=$2; shift ;;\n  esac\n  shift\ndone\n"
LISTS = "a=(1 2 3)\nb=(4 5 6)\n"
DRAWN = "export MASTER_PORT=$((10000 + SLURM_JOB_ID % 20000))\n"
WRITTEN = (
    'part=gpu\nname=x\necho "'
    + SHELL
    + '#SBATCH -p $part\n#SBATCH -J $name\n#SBATCH --output=${OUT}\nhostname" > job.sh\nsbatch job.sh\n'
)

PAIRS: list[tuple[str, str, int, str]] = [
    (U, JOB + 'cache_dir=dataset_cache\npython t.py --cached "$dataset_cache"\n', 8, "warning"),
    (U, JOB + "output_dir=/a/b\npython t.py --output-dir=$target\n", 8, "warning"),
    (U, JOB + "export output_dir=/a/b\npython t.py --output-dir=$target\n", 0, ""),
    (U, JOB + "output_dir=/a/b\npython t.py --output-dir=$target ${output_dir}\n", 0, ""),
    (U, JOB + "# target: given by sbatch --export\noutput_dir=/a/b\npython t.py --output-dir=$target\n", 0, ""),
    (U, JOB + "output_dir=/a/b\npython t.py --output-dir=${target:-x}\n", 0, ""),
    (U, JOB + "OUTPUT_DIR=/a/b\npython t.py --out $OUT_DIR\n", 8, "warning"),
    (U, JOB + "INPUT_DIR=/a/b\npython t.py --out $OUT_DIR\n", 0, ""),
    (U, JOB + "NODES=4\npython t.py -n $NPROC\n", 0, ""),
    (U, JOB + "min_m_cost=4\npython t.py $max_t_cost\n", 0, ""),
    (U, JOB + "DIR_DATA=/a/b\npython t.py --d $DATA_DIR\n", 8, "warning"),
    (U, JOB + "dataDir=/a/b\npython t.py --d $data_dir\n", 8, "warning"),
    (U, JOB + "CURRENT_MODEL=$MODEL\npython t.py\n", 0, ""),
    (U, JOB + "MODEL_PATH=/a/b\npython t.py --m $MODEL\n", 8, "warning"),
    (U, JOB + "run() {\n  rate=$1\n  python t.py --lr $RATE\n}\nrun 1\n", 9, "warning"),
    (U, JOB + "while read -r name lr; do\n  python t.py --n $names --lr $lr\ndone < list.txt\n", 8, "warning"),
    (U, JOB + "for lrate in 1 2; do\n  for bs in 1 2; do\n    python t.py --l $lr --bs $bs\n  done\ndone\n", 9, "warning"),
    (U, JOB + "for lrate in 1 2; do\n  python t.py --l $lr --r $lrate\ndone\n", 0, ""),
    (U, SHELL + TAKES + "python t.py $base_config $few_config > log-$config.txt\n", 9, "warning"),
    (U, SHELL + TAKES.replace("few_config", "few") + "python t.py $base_config $few > log-$config.txt\n", 0, ""),
    (U, JOB + LISTS + "for k in 0 1 2; do\n  python t.py --a ${a[$k]} --b ${b[i]}\ndone\n", 10, "warning"),
    (U, JOB + LISTS + "for ((k=0;k<3;k++)); do\n  x=${b[$idx]}\n  python t.py ${a[$k]} $x\ndone\n", 10, "warning"),
    (U, JOB + LISTS + "for k in 0 1 2; do\n  i=$((k + 1))\n  python t.py --a ${a[$k]} --b ${b[i]}\ndone\n", 0, ""),
    (U, JOB + "declare -A a=([x]=1 [y]=2)\nfor k in 0 1; do\n  python t.py --a ${a[x]} $k\ndone\n", 0, ""),
    (U, SHELL + WRITTEN, 7, "warning"),
    (U, SHELL + "OUT=x\n" + WRITTEN, 0, ""),
    (U, SHELL + WRITTEN.replace("${OUT}", "${OUT}/x.log"), 0, ""),
    (U, JOB + "V=4\npython t.py -v $PL\n", 0, ""),
    (U, SHELL + WRITTEN.replace("hostname", "hostname $more $again"), 0, ""),
    (U, SHELL + "part=gpu\nname=x\nfor s in 1 2; do\n  sbatch -p $part -J $name --output=$logfile run.sh $s\ndone\n", 5, "warning"),
    (U, JOB + "#ending='_$(date)'\npython t.py --out run$ending\n", 0, ""),
    (U, JOB + "#ending='runs'\npython t.py --out $ending/x\n", 8, "warning"),
]  # fmt: skip
FUNCTIONS: list[tuple[str, str, int, str]] = [
    (U, JOB + "run() {\n  python t.py --seed $1 --lr $2\n}\nrun 1 0.1\nrun 2\n", 11, "warning"),
    (U, JOB + "function main {\n  python t.py --config $1\n}\nmain\n", 10, "warning"),
    (U, JOB + "train() {\n  local cfg=$1\n  local lr=$2\n  python t.py $cfg --lr $lr\n}\nfor c in a b; do train $c; done\n", 12, "warning"),
    (U, JOB + "main() {\n  python t.py --config $1\n}\nmain \"$@\"\n", 0, ""),
    (U, JOB + "run() {\n  python t.py --seed $1 $2\n}\nrun 1\n", 0, ""),
    (U, JOB + "run() {\n  python t.py --seed $1 --lr ${2:-1}\n}\nrun 1\n", 0, ""),
    (U, JOB + "run() {\n  [ -n \"$2\" ] && x=1\n  python t.py --seed $1 --lr $2\n}\nrun 1\n", 0, ""),
    (U, JOB + "run() {\n  python t.py --seed $1 --lr $2\n}\nrun $pairs\n", 0, ""),
]  # fmt: skip
PORTS: list[tuple[str, str, int, str]] = [
    (PORT, SHELL + "MASTER_PORT=$((RANDOM % 1000 + 24000))\necho $MASTER_PORT\nC=\"torchrun --nproc_per_node=4\"\n$C t.py\n", 2, "warning"),
    (PORT, SHARED + DRAWN + "torchrun --nproc_per_node=4 t.py\n", 5, "warning"),
    (PORT, SHARED + DRAWN + "deepspeed --num_gpus 2 t.py\n", 5, "warning"),
    (PORT, JOB + DRAWN + "torchrun --nproc_per_node=4 t.py\n", 7, "note"),
    (PORT, SHELL + "run() {\n  local port=$(shuf -i 20000-30000 -n 1)\n  torchrun --nproc_per_node=4 t.py $1\n}\nrun 1\n", 3, "warning"),
    (PORT, SHARED + DRAWN + "torchrun --nproc_per_node=4 --master_port=$MASTER_PORT t.py\n", 0, ""),
    (PORT, SHARED + DRAWN + "torchrun --standalone --nproc_per_node=4 t.py\n", 0, ""),
    (PORT, SHARED + DRAWN + "torchrun --nproc_per_node=4 t.py --port $MASTER_PORT\n", 0, ""),
    (PORT, SHARED + DRAWN + "torchrun --nproc_per_node=4 $OPTIONS t.py\n", 0, ""),
    (PORT, SHARED + DRAWN + "torchrun --nproc_per_node=4 t.py\npython u.py\n", 0, ""),
]  # fmt: skip
COMMAS: list[tuple[str, str, int, str]] = [
    (LIST, TWO_NODES + "IFS=',' read -ra nodes <<< \"$SLURM_JOB_NODELIST\"\nfor n in ${nodes[@]}; do ssh $n ls & done\nwait\n", 7, "warning"),
    (LIST, SHELL + "raw=$(scontrol show job $SLURM_JOBID | awk -F= '/ NodeList/ {print $2}')\nIFS=, read -ra n <<< \"$raw\"\nssh $n\n", 3, "warning"),
    (LIST, TWO_NODES + "nodes=$(echo $SLURM_NODELIST | tr ',' ' ')\n", 7, "warning"),
    (LIST, TWO_NODES + "for n in ${SLURM_JOB_NODELIST//,/ }; do ssh $n ls; done\n", 7, "warning"),
    (LIST, TWO_NODES + "hosts=$(squeue -j $SLURM_JOB_ID -h -o %N | sed 's/,/ /g')\n", 7, "warning"),
    (LIST, JOB + "nodes=$(echo $SLURM_NODELIST | tr ',' ' ')\n", 0, ""),
    (LIST, TWO_NODES + "raw=$(scontrol show hostnames $SLURM_JOB_NODELIST | paste -sd,)\nIFS=, read -ra nodes <<< \"$raw\"\n", 0, ""),
]  # fmt: skip
INSIDE: list[tuple[str, str, int, str]] = [
    (U, JOB + "f() {\n  local d=/x\n  mkdir -p $d\n}\nf\npython t.py --data $d\n", 12, "warning"),
    (U, JOB + "f() {\n  d=/x\n  mkdir -p $d\n}\npython t.py --data $d\n", 11, "warning"),
    (U, JOB + "f() {\n  d=/x\n  mkdir -p $d\n}\nf\npython t.py --data $d\n", 0, ""),
    (U, JOB + "f() {\n  local d=/x\n  mkdir -p $d\n}\nf\nd=/y\npython t.py --data $d\n", 0, ""),
    (U, JOB + "f() {\n  d=/x\n  mkdir -p $d\n}\n\"$@\"\npython t.py --data $d\n", 0, ""),
    (U, JOB + "for s in 1 2; do\n  mkdir -p $out\n  out=runs/$s\n  python t.py --o $out\ndone\n", 8, "warning"),
    (U, JOB + "run() {\n  mkdir -p $out\n  out=runs/$1\n  python t.py --o $out\n}\nrun 1\n", 8, "warning"),
    (U, JOB + "for s in 1 2; do\n  python t.py --from $prev_run\n  prev_run=runs/$s\ndone\n", 0, ""),
    (U, JOB + "for s in 1 2; do\n  if [ $s = 2 ]; then\n    mkdir $out\n  fi\n  out=runs/$s\ndone\n", 0, ""),
    (U, JOB + "export PATH=/x/bin:$PAHT\n", 7, "warning"),
    (U, JOB + "export PATH=/x/bin:$PATH\n", 0, ""),
    ("never-expanded", JOB + "cache_dir=/x/c\npython t.py --cache cache_dir\n", 8, "error"),
    ("never-expanded", JOB + "data_mode=fast\npython t.py --mode data_mode\n", 0, ""),
    ("never-expanded", JOB + "cache_dir=/x/c\npython t.py clean cache_dir\n", 0, ""),
]  # fmt: skip
DROPPED = "arguments-dropped"
CALLER: list[tuple[str, str, int, str]] = [
    (DROPPED, JOB + "seed=$1\ndata=$2\npython t.py --seed 42 --data $data\n", 7, "warning"),
    (DROPPED, SHELL + TAKES.replace("few_config", "seed") + "python t.py $base_config --seed=1\n", 5, "warning"),
    (DROPPED, JOB + "seed=$1\ndata=$2\npython t.py --seed $data --data $data\n", 0, ""),
    (DROPPED, JOB + "seed=$1\npython t.py --seed 42 --out run$seed\n", 0, ""),
    ("not-exported", SHELL + "lr=0.1\nsbatch --export=lr run.sh\n", 3, "error"),
    ("not-exported", SHELL + "for lr in 1 2; do\n  sbatch --export=ALL,lr run.sh\ndone\n", 3, "error"),
    ("not-exported", SHELL + "for lr in 1 2; do\n  lr=$lr sbatch --export=ALL,lr run.sh\ndone\n", 0, ""),
    ("not-exported", SHELL + "export lr=0.1\nsbatch --export=lr run.sh\n", 0, ""),
    ("not-exported", SHELL + "lr=0.1\nsbatch --export=ALL,lr=$lr run.sh\n", 0, ""),
]  # fmt: skip
RANGE, EXPORT = "index-out-of-range", "not-exported"
THREE = SHELL + "a=(1 2 3)\n"
BODY = "do\n  python t.py --a ${a[$i]}\ndone\n"
LOOPS: list[tuple[str, str, int, str]] = [
    (U, JOB + "CMD=\"python t.py --seed $seed\"\nfor seed in 1 2 3; do\n  eval $CMD\ndone\n", 7, "warning"),
    (U, SHELL + "OUT=runs/$name\nfor name in a b; do\n  python t.py --n $name --o $OUT\ndone\n", 2, "warning"),
    (U, JOB + "CMD='python t.py --seed $seed'\nfor seed in 1 2 3; do\n  eval $CMD\ndone\n", 0, ""),
    (U, JOB + "seed=0\nCMD=\"python t.py --seed $seed\"\nfor seed in 1 2 3; do\n  $CMD\ndone\n", 0, ""),
    (U, JOB + "CMD=\"python t.py\"\nfor seed in 1 2 3; do\n  $CMD --seed $seed\ndone\n", 0, ""),
    (RANGE, THREE + "for i in $(seq 0 ${#a[@]}); " + BODY, 4, "error"),
    (RANGE, THREE + "for i in $(seq 1 ${#a[@]}); " + BODY, 4, "error"),
    (RANGE, THREE + "for i in {0..3}; " + BODY, 4, "error"),
    (RANGE, THREE + "for ((i=0; i<=${#a[@]}; i++)); " + BODY, 4, "error"),
    (RANGE, THREE + "for ((i=0; i<4; ++i)); " + BODY, 4, "error"),
    (RANGE, THREE + "b=(4 5)\nfor i in \"${!a[@]}\"; do\n  python t.py ${a[i]} ${b[i]}\ndone\n", 5, "error"),
    (RANGE, THREE + "for i in $(seq 0 $((${#a[@]} - 1))); " + BODY, 0, ""),
    (RANGE, THREE + "for ((i=0; i<${#a[@]}; i++)); " + BODY, 0, ""),
    (RANGE, THREE + "a+=(4)\nfor i in {0..3}; " + BODY, 0, ""),
    (RANGE, THREE + "for i in {0..3}; do\n  [ $i = 3 ] && break\n  python t.py --a ${a[$i]}\ndone\n", 0, ""),
    (RANGE, SHELL + "a=(1 2 $x)\nfor i in {0..3}; " + BODY, 0, ""),
    (RANGE, JOB + "seeds=\"1 2 3\"\npython t.py --seed ${seeds[$SLURM_ARRAY_TASK_ID]}\n", 8, "error"),
    (RANGE, JOB + "seeds=\"1 2 3\"\nseeds=($seeds)\npython t.py --seed ${seeds[$SLURM_ARRAY_TASK_ID]}\n", 0, ""),
]  # fmt: skip
SHELLS: list[tuple[str, str, int, str]] = [
    (EXPORT, SHELL + "for lr in 1 2; do\n  sbatch --wrap='python t.py --lr $lr'\ndone\n", 3, "error"),
    (EXPORT, SHELL + "for lr in 1 2; do\n  sbatch --wrap=\"python t.py --lr $lr\"\ndone\n", 0, ""),
    (EXPORT, SHELL + "export lr=1\nsbatch --wrap='python t.py --lr $lr'\n", 0, ""),
    (EXPORT, SHELL + "n=1\nsbatch --wrap='n=2; python t.py --lr $n'\n", 0, ""),
    (EXPORT, SHELL + "out=/x\nparallel -j 4 'python t.py {} --o $out' ::: a b\n", 3, "error"),
    (EXPORT, SHELL + "d=/x\ntmux new-session -d -s a 'python t.py --d $d'\n", 3, "error"),
    (EXPORT, SHELL + "d=/x\nfor h in a b; do\nssh $h <<'EOF'\npython t.py --d $d\nEOF\ndone\n", 5, "error"),
    (EXPORT, SHELL + "d=/x\nfor h in a b; do\nssh $h <<EOF\npython t.py --d $d\nEOF\ndone\n", 0, ""),
    (EXPORT, SHELL + "d=/x\nssh h <<'EOF'\nd=/y\npython t.py --d $d\nEOF\n", 0, ""),
    (EXPORT, SHELL + "for lr in 1 2; do\n  qsub -v lr run.sh\ndone\n", 3, "error"),
    (EXPORT, SHELL + "for lr in 1 2; do\n  qsub -v lr=$lr run.sh\ndone\n", 0, ""),
    (EXPORT, SHELL + "CUDA_VISIBLE_DEVICES=1; python t.py\n", 2, "warning"),
    (EXPORT, SHELL + "for g in 0 1; do\n  CUDA_VISIBLE_DEVICES=$g\n  python t.py --seed $g &\ndone\nwait\n", 3, "warning"),
    (EXPORT, SHELL + "CUDA_VISIBLE_DEVICES=1 python t.py\n", 0, ""),
    (EXPORT, JOB + "CUDA_VISIBLE_DEVICES=1; python t.py\n", 0, ""),
]  # fmt: skip
GPU, TEXT = "same-gpu", "never-expanded"
RUNS = "for s in 1 2 3 4; do\n  CUDA_VISIBLE_DEVICES=$gpu python t.py --seed $s &\n"
RANKS = "for h in $(scontrol show hostnames $SLURM_JOB_NODELIST); do\n  srun -w $h -N1 -n1 torchrun --nnodes=2 --nproc_per_node=4 --master_addr=a --node_rank="
BRANCHES: list[tuple[str, str, int, str]] = [
    (U, SHELL + "if [ $1 = big ]; then\n  BATCH=4\nelse\n  BATCH_SIZE=8\nfi\npython t.py --bs $BATCH_SIZE\n", 3, "warning"),
    (U, SHELL + "case $1 in\n  a) MODEL=x;;\n  b) MODLE=y;;\nesac\npython t.py --m $MODEL\n", 4, "warning"),
    (U, SHELL + "if [ $1 = big ]; then\n  BATCH=4\nelse\n  BATCH_SIZE=8\nfi\npython t.py $BATCH --bs $BATCH_SIZE\n", 0, ""),
    (U, SHELL + "BATCH_SIZE=8\nif [ $1 = big ]; then\n  BATCH=4\nelse\n  BATCH_SIZE=8\nfi\npython t.py --bs $BATCH_SIZE\n", 0, ""),
    (U, SHELL + "if [ $1 = big ]; then\n  BATCH=4\n  BATCH_SIZE=4\nelse\n  BATCH_SIZE=8\nfi\npython t.py --bs $BATCH_SIZE\n", 0, ""),
    (U, TWO_NODES + RANKS + "$rank t.py &\ndone\nwait\n", 8, "warning"),
    (U, TWO_NODES + "rank=0\n" + RANKS + "$rank t.py &\n  rank=$((rank + 1))\ndone\nwait\n", 0, ""),
    (TEXT, SHELL + "i=0\nfor s in 1 2; do\n  python t.py --i $i --s $s\n  i=$i+1\ndone\n", 5, "error"),
    (TEXT, SHELL + "i=0\nfor s in 1 2; do\n  python t.py --i $i --s $s\n  i=i+1\ndone\n", 5, "error"),
    (TEXT, SHELL + "declare -i i=0\nfor s in 1 2; do\n  python t.py --i $i --s $s\n  i=i+1\ndone\n", 0, ""),
    (TEXT, SHELL + "i=0\nfor s in 1 2; do\n  python t.py --i $((i)) --s $s\n  i=$i+1\ndone\n", 0, ""),
    (GPU, SHELL + "gpu=0\n" + RUNS + "done\nwait\n", 4, "warning"),
    (GPU, SHELL + "gpu=0\n" + RUNS + "  gpu=$((gpu + 1))\ndone\nwait\n", 0, ""),
    (GPU, SHELL + "gpu=0\n" + RUNS.replace(" &", "") + "done\n", 0, ""),
    (RANGE, JOB + "a=(x y)\npython t.py --a ${a[2]}\n", 8, "error"),
    (RANGE, JOB + "a=(x y)\npython t.py --a ${a[1]}\n", 0, ""),
    (RANGE, JOB + "a=(x y)\nfor i in 0 1 2; do\n  python t.py --a ${a[i]}\ndone\n", 9, "error"),
    (EXPORT, SHELL + "export SEEDS=(1 2 3)\nsbatch run.sh\n", 2, "warning"),
    (EXPORT, SHELL + "export SEEDS=(1 2 3)\nfor s in ${SEEDS[@]}; do sbatch run.sh $s; done\n", 0, ""),
]  # fmt: skip
HEADING: list[tuple[str, str, int, str]] = [
    ("directive-refused", SHELL + "#SBATCH -N 1\n#SBATCH -o\n#SBATCH -p gpu\nhostname\n", 3, "warning"),
    ("directive-refused", SHELL + "#SBATCH -N 1\n#SBATCH -p\n#SBATCH gpu\nhostname\n", 0, ""),
    ("directive-refused", SHELL + "#SBATCH -N 1\n#SBATCH -o x.log\n#SBATCH --exclusive\nhostname\n", 0, ""),
    ("threads-oversubscribed", JOB + "SLURM_CPUS_PER_TASK=20\nnamd2 +p$SLURM_CPUS_PER_TASK a.namd\n", 7, "warning"),
    ("threads-oversubscribed", JOB + "SLURM_CPUS_PER_TASK=16\nnamd2 +p$SLURM_CPUS_PER_TASK a.namd\n", 0, ""),
]  # fmt: skip
MISMATCH_CASES = [*HEADING, *BRANCHES, *LOOPS, *SHELLS, *INSIDE, *CALLER, *PAIRS, *FUNCTIONS, *PORTS, *COMMAS]
