"""Scripts whose values are empty, literal, lost or always the same: the rule, the script, the line and the severity; 0 for no finding."""

from __future__ import annotations

SHELL = "#!/bin/bash\n"
JOB = (
    SHELL
    + "#SBATCH --nodes=1\n#SBATCH --ntasks=1\n#SBATCH --gres=gpu:1\n#SBATCH --cpus-per-task=8\n#SBATCH --time=1:00:00\n"
)
LSF = SHELL + "#BSUB -nnodes 4\n#BSUB -W 60\n"
U, LITERAL, QUOTED = "unset-variable", "never-expanded", "variable-not-expanded"
SPLIT, PLACE, LOOPS = "value-split", "out-of-place", "loop-values"
RANGE, OVER = "index-out-of-range", "overwritten-output"
SAME, TEST, DROPPED = "constant-condition", "test-syntax", "arguments-dropped"
TRAIN = "python t.py --lr $LR --bs $BS\n"
PARSES = "while [ $# -gt 0 ]; do\n  case $1 in\n    --lr) LR=$2; shift ;;\n    --bs) BS=$2; shift ;;\n    --steps) STEPS=$2; shift ;;\n  esac\n  shift\ndone\n"
SHIFTS = 'while [ "$1" != "" ]; do\n  case $1 in\n    -l | --lr ) shift\n      LR=$1\n      ;;\n    -b ) shift\n      BS=$1\n      ;;\n  esac\n  shift\ndone\n'
OPTS = 'while getopts "l:b:" o; do\n  case $o in\n    l) LR=$OPTARG ;;\n    b) BS=${OPTARG} ;;\n  esac\ndone\n'

CONDITIONS: list[tuple[str, str, int, str]] = [
    (SAME, JOB + "DEBUG=false\nif [ $DEBUG ]; then\n  python t.py --debug\nfi\n", 8, "warning"),
    (SAME, JOB + 'RESUME=0\nif [[ "$RESUME" ]]; then\n  python t.py --resume\nfi\n', 8, "warning"),
    (SAME, JOB + "DEBUG=false\nif $DEBUG; then\n  python t.py --debug\nfi\n", 0, ""),
    (SAME, JOB + "DEBUG=false\nDEBUG=\nif [ $DEBUG ]; then\n  python t.py --debug\nfi\n", 0, ""),
    (SAME, JOB + "NAME=run\nif [ $NAME ]; then\n  python t.py --n $NAME\nfi\n", 0, ""),
    (SAME, JOB + "if [ -n $1 ]; then\n  python t.py --n $1\nfi\n", 7, "warning"),
    (SAME, JOB + "CKPT=$(ls out | tail -n 1)\nif [ ! -n $CKPT ]; then\n  python t.py\nfi\n", 8, "warning"),
    (SAME, JOB + 'if [ -n "$1" ]; then\n  python t.py --n $1\nfi\n', 0, ""),
    (SAME, JOB + "if [[ -n $1 ]]; then\n  python t.py --n $1\nfi\n", 0, ""),
    (SAME, JOB + "if [ -n $SLURM_JOB_ID ]; then\n  python t.py\nfi\n", 0, ""),
    (SAME, JOB + 'M=$1\nif [[ $M == "a" || "b" ]]; then\n  python t.py\nfi\n', 8, "warning"),
    (SAME, JOB + "M=$1\nif [ $M = a -o b ]; then\n  python t.py\nfi\n", 8, "warning"),
    (SAME, JOB + 'M=$1\nif [[ $M == "a" || $M == "b" ]]; then\n  python t.py\nfi\n', 0, ""),
    (SAME, JOB + "M=$1\nif [ $M = a -o $M = b ]; then\n  python t.py\nfi\n", 0, ""),
    (SAME, JOB + 'AMP=True\nif [ "$AMP" = "true" ]; then\n  python t.py --amp\nfi\n', 8, "warning"),
    (SAME, JOB + 'AMP=True\nif [ "$AMP" = "True" ]; then\n  python t.py --amp\nfi\n', 0, ""),
    (SAME, JOB + 'AMP=${1:-True}\nif [ "$AMP" = "true" ]; then\n  python t.py --amp\nfi\n', 0, ""),
    (SAME, JOB + 'AMP=True\n[ -n "$1" ] && AMP=true\nif [ "$AMP" = "true" ]; then\n  python t.py --amp\nfi\n', 0, ""),
    (TEST, JOB + 'M=$1\nif [ $M!="a" ]; then\n  python t.py\nfi\n', 8, "warning"),
    (TEST, JOB + 'M=$1\nif [ $M != "a" ]; then\n  python t.py\nfi\n', 0, ""),
]  # fmt: skip
CALLERS: list[tuple[str, str, int, str]] = [
    (DROPPED, JOB + PARSES + TRAIN, 11, "warning"),
    (DROPPED, JOB + PARSES + TRAIN.replace("$BS", "$BS --s $STEPS"), 0, ""),
    (DROPPED, JOB + PARSES + "export STEPS\n" + TRAIN, 0, ""),
    (DROPPED, JOB + PARSES + "source more.sh\n" + TRAIN, 0, ""),
    (DROPPED, JOB + OPTS + "python t.py --lr $LR\n", 10, "warning"),
    (DROPPED, JOB + "rank=$1\nsize=$2\nLR=$3\npython t.py --lr $LR\n", 7, "warning"),
    (DROPPED, JOB + "rank=${1:-0}\nsize=${2:-1}\nLR=$3\npython t.py --lr $LR\n", 7, "note"),
    (DROPPED, JOB + "rank=$1\nLR=$2\npython t.py --lr $LR\n", 0, ""),
    (DROPPED, JOB + 'EXTRA="--max_steps 10 --eval"\npython t.py --lr 1\n', 7, "warning"),
    (DROPPED, JOB + 'EXTRA="--max_steps 10 --eval"\nBS=8\nSEED=1\nSTEPS=5\npython t.py --lr 1\n', 7, "note"),
    (DROPPED, JOB + "EXTRA=(--max_steps 10 --eval)\npython t.py --lr 1\n", 7, "warning"),
    (DROPPED, JOB + 'EXTRA="--max_steps 10 --eval"\npython t.py --lr 1 $EXTRA\n', 0, ""),
    (DROPPED, JOB + 'EXTRA="--max_steps 10 --eval"\npython t.py --lr 1 --max_steps 20\n', 0, ""),
    (DROPPED, JOB + 'ARGS="--lr 1"\nARGS="--bs 2"\npython t.py $ARGS\n', 8, "warning"),
    (DROPPED, JOB + 'ARGS="--lr 1"\nARGS="$ARGS --bs 2"\npython t.py $ARGS\n', 0, ""),
    (DROPPED, JOB + 'ARGS="--lr 1"\nARGS="--lr 2"\npython t.py $ARGS\n', 0, ""),
    (DROPPED, JOB + 'ARGS="--lr 1"\npython t.py $ARGS\nARGS="--bs 2"\npython t.py $ARGS\n', 0, ""),
    (DROPPED, JOB + 'if [ -n "$1" ]; then\nARGS="--lr 1"\nelse\nARGS="--bs 2"\nfi\npython t.py $ARGS\n', 0, ""),
    (DROPPED, JOB + "EPOCHS=100\nLR=1\npython t.py --lr $LR --epochs 50\n", 7, "warning"),
    (DROPPED, JOB + "EPOCHS=100\nLR=1\npython t.py --lr $LR --epochs=50\n", 7, "warning"),
    (DROPPED, JOB + "EPOCHS=100\nLR=1\npython t.py --lr $LR --epochs $EPOCHS\n", 0, ""),
    (DROPPED, JOB + "EPOCHS=50\nLR=1\npython t.py --lr $LR --epochs 50\n", 0, ""),
    (DROPPED, JOB + "EPOCHS=100\nLR=1\npython t.py --lr $LR --warmup_epochs 5\n", 0, ""),
    (DROPPED, JOB + SHIFTS + "python t.py --bs $BS\n", 10, "warning"),
    (DROPPED, JOB + SHIFTS + "python t.py --bs $BS --lr $LR\n", 0, ""),
    (DROPPED, JOB + 'for a in "$@"; do\n  [[ $a == --lr=* ]] && LR="${a#--lr=}"\ndone\npython t.py\n', 8, "warning"),
    (DROPPED, JOB + "units=70\nlayers=3\npython t.py\n", 7, "warning"),
    (DROPPED, JOB + "units=70\nlayers=3\npython t.py --units $units\n", 0, ""),
    (DROPPED, JOB + "export units=70\nexport layers=3\npython t.py\n", 0, ""),
    (DROPPED, JOB + "LR=$1\nLR=0.1\npython t.py --lr $LR\n", 8, "warning"),
    (DROPPED, JOB + 'LR=$1\n[ -z "$LR" ] && LR=0.1\npython t.py --lr $LR\n', 0, ""),
    (DROPPED, JOB + "LR=$1\necho $LR\nLR=0.1\npython t.py --lr $LR\n", 0, ""),
]  # fmt: skip
EMPTY: list[tuple[str, str, int, str]] = [
    (U, JOB + "cuda=$true\npython t.py --cuda $cuda\n", 7, "warning"),
    (U, JOB + "true=1\npython t.py --cuda $true\n", 0, ""),
    (U, JOB + "LR=0.1 python t.py --lr $LR\n", 7, "warning"),
    (U, JOB + "FC=ftn F77=$FC make\n", 0, ""),  # from left to right
    (QUOTED, JOB + "cat <<EOF > job.sh\n#!/bin/bash\n#SBATCH -N 1\nexport A=\\$SCRATCH/a\ncd \\$SLURM_SUBMIT_DIR\npython t.py $X\nEOF\nsbatch job.sh\n", 0, ""),
    (U, JOB + "LR=0.1\nLR=$LR python t.py --lr $LR\n", 0, ""),
    (U, JOB + "LR=0.1 bash -c 'python t.py --lr $LR'\n", 0, ""),
    (U, JOB + "LR=0.1; python t.py --lr $LR\n", 0, ""),
    (U, JOB + "export CUDA_VISIBLE_DEVICES=$SLURM_STEP_GPUS\npython t.py\n", 7, "warning"),
    (U, JOB + "export CUDA_VISIBLE_DEVICES=${SLURM_STEP_GPUS:-$SLURM_JOB_GPUS}\npython t.py\n", 0, ""),
    (U, JOB + "srun bash -c 'echo $SLURM_STEP_GPUS; python t.py'\n", 0, ""),
    (U, LSF + "export OUT=/a/${GROUP_COUNT}_nodes\nexport GROUP_COUNT=$(wc -l < hosts)\nsource /opt/s.sh\njsrun python t.py --o $OUT\n", 4, "warning"),
    (U, LSF + "source /opt/s.sh\nexport OUT=/a/${GROUP_COUNT}_nodes\nexport GROUP_COUNT=$(wc -l < hosts)\njsrun python t.py --o $OUT\n", 0, ""),
    (U, JOB + "if [ -d $OUT ]; then\n  rm -r $OUT/old\nfi\nOUT=/a/b\npython t.py --o $OUT\n", 7, "warning"),
    (U, JOB + "B=${X:-$NAME_OF_RUN}\nif [ -n \"$1\" ]; then\n  NAME_OF_RUN=$1\nelse\n  NAME_OF_RUN=a\nfi\npython t.py --o $B --n $NAME_OF_RUN\n", 7, "warning"),
    (U, JOB + "if [ ! -f $CFG ]; then\n  exit 1\nfi\nread_it() {\n  CFG=$1\n  cat $CFG\n}\nread_it c.cfg\npython t.py\n", 7, "warning"),
    (U, JOB + 'if [ -z "$OUT" ]; then\n  echo no\nfi\nOUT=/a/b\npython t.py --o $OUT\n', 0, ""),
    (U, JOB + "a1=1\nlr=2\nseed=3\nbs=4\npython t.py --lr $lr --seed $seed --bs $bs --task $task --a $a1\n", 11, "warning"),
    (U, JOB + "a1=1\nlr=2\nseed=3\npython t.py $lr $seed ${noise} $a1\n", 10, "warning"),
    (U, JOB + "a1=1\nlr=2\nseed=3\npython t.py --lr $lr --seed $seed --a $a1 $extra_args\n", 0, ""),
    (U, JOB + "a1=1\nlr=2\nseed=3\npython t.py --lr $lr --seed $seed --a $a1 --d $data/x\n", 0, ""),
    (U, JOB + "name=1\nlr=2\nseed=3\npython t.py model.name=$name opt.lr=$lr data.task=$task seed=$seed\n", 10, "warning"),
    (U, JOB + "name=1\nlr=2\nseed=3\npython t.py --o out_${name}_${lr}_${seed}.${use_amp}\n", 10, "warning"),
    (U, JOB + "# task: from sbatch --export\na1=1\nlr=2\nseed=3\npython t.py --lr $lr --seed $seed --a $a1 --task $task\n", 0, ""),
    (U, JOB + "SEED=1\npython t.py --seed $seed --out runs/$SEED\n", 8, "warning"),
    (U, JOB + "SEED=$seed\npython t.py --seed $seed --out runs/$SEED\n", 0, ""),
    (U, JOB + "SUFFIX=_a\npython t.py --o out$SUFFIX --c out${SUFFIX_BASE}/m\n", 8, "warning"),
    (U, JOB + "SUFFIX=_a\ndeclare $1=$2\npython t.py --o out$SUFFIX --c out${SUFFIX_BASE}/m\n", 0, ""),
    (U, JOB + "SUFFIX=$SUFFIX_BASE\npython t.py --o out$SUFFIX --c out${SUFFIX_BASE}/m\n", 0, ""),
    (U, JOB + "SUFFIX=_a\nsource more.sh\npython t.py --o out$SUFFIX --c out${SUFFIX_BASE}/m\n", 0, ""),
    (U, JOB + "scene_graph=g.json\npython t.py --scene-graph $scene-graph --x $scene_graph\n", 8, "warning"),
    (U, JOB + "scene=1\nscene_graph=g.json\npython t.py --scene-graph $scene-graph --x $scene_graph\n", 0, ""),
    (U, JOB.replace("gpu:1", "gpu:XXXgpusXXX") + "cp XXXlogXXX logs/$SLURM_JOB_ID_0\npython t.py\n", 7, "warning"),
]  # fmt: skip
TEXTS: list[tuple[str, str, int, str]] = [
    (LITERAL, JOB + "ID=a\npython t.py --o ../out/{$ID} --n ${ID}\n", 8, "error"),
    (LITERAL, JOB + "OUT=/a\nmkdir -p {$OUT}/logs\npython t.py --o $OUT\n", 8, "error"),
    (LITERAL, JOB + "ID=a\npython t.py --o ../out/${ID}\n", 0, ""),
    (LITERAL, JOB + "ID=a\necho \"done: {$ID}\"\npython t.py --o $ID\n", 0, ""),
    (LITERAL, JOB + "ID=a\npython t.py --o \"{'run': {$ID}}\"\n", 0, ""),
    (LITERAL, JOB + "ID=a\npython t.py --o out/$ID}/x\n", 8, "error"),
    (LITERAL, JOB + "ID=a\npython t.py --o out/{x,$ID}/x\n", 0, ""),
    (LITERAL, JOB + "A=(a b)\nN=${A[0]}}\npython t.py --n $N\n", 8, "error"),
    (LITERAL, JOB + "A=(a b)\nN=${A[0]}\npython t.py --n $N\n", 0, ""),
    (LITERAL, JOB + "A=(a b)\nN={x,${A[0]}}\npython t.py --n $N\n", 0, ""),
    (LITERAL, JOB + "LR=1\npython t.py --lr $LR --o runs/lr_{LR}/x\n", 8, "error"),
    (LITERAL, JOB + "name=1\nlr=2\npython t.py --lr $lr --n $name --o 'runs/{name}'\n", 0, ""),
    (LITERAL, JOB + "LR=1\ncat > c.json <<'EOF'\n{\"lr\": $LR}\nEOF\npython t.py --c c.json\n", 9, "error"),
    (LITERAL, JOB + "LR=1\ncat > c.json <<EOF\n{\"lr\": $LR}\nEOF\npython t.py --c c.json\n", 0, ""),
    (LITERAL, JOB + "LR=1\ncat > c.json <<'EOF'\n{\"lr\": $LR}\nEOF\nenvsubst < c.json > d.json\npython t.py --c d.json\n", 0, ""),
    (QUOTED, JOB + "source \\$WORK/venv/bin/activate\npython t.py --o $SLURM_JOB_ID\n", 7, "error"),
    (QUOTED, JOB + "export WANDB_DIR=\\$WORK/runs\npython t.py --o $SLURM_JOB_ID\n", 7, "error"),
    (QUOTED, JOB + "scontrol show job \\$SLURM_JOB_ID\npython t.py --o $SLURM_JOB_ID\n", 7, "error"),
    (QUOTED, JOB + "source $WORK/venv/bin/activate\npython t.py --o $SLURM_JOB_ID\n", 0, ""),
    (QUOTED, JOB + "cat > run.sh <<EOF\ncd \\$WORK/x\nEOF\nbash run.sh\npython t.py --o $SLURM_JOB_ID\n", 0, ""),
    (QUOTED, JOB + "LR=1\npython t.py --config '{\"lr\": $LR}'\n", 8, "error"),
    (QUOTED, JOB + "LR=1\npython t.py --config \"{\\\"lr\\\": $LR}\"\n", 0, ""),
]  # fmt: skip
ARGUMENTS: list[tuple[str, str, int, str]] = [
    (DROPPED, JOB + OPTS.replace("l:b:", "l:b") + "python t.py --lr $LR --bs $BS\n", 10, "warning"),
    (DROPPED, JOB + OPTS.replace("l:b:", "l:") + "python t.py --lr $LR --bs $BS\n", 10, "warning"),
    (DROPPED, JOB + OPTS + "python t.py --lr $LR --bs $BS\n", 0, ""),
    (DROPPED, JOB + PARSES.replace("; shift ;;", " ;;").replace("  esac", "    *) exit 1 ;;\n  esac") + TRAIN + "echo $STEPS\n", 9, "warning"),
    (DROPPED, JOB + PARSES.replace("  esac", "    *) exit 1 ;;\n  esac") + TRAIN.replace("$BS", "$BS $STEPS"), 0, ""),
    (U, JOB + "if [ $# -ne 2 ]; then\n  exit 1\nfi\npython t.py --lr $1 --bs $2 --seed $3\n", 10, "warning"),
    (U, JOB + "if [ $# -ne 3 ]; then\n  exit 1\nfi\npython t.py --lr $1 --bs $2 --seed $3\n", 0, ""),
    (U, JOB + "if [ $# -lt 2 ]; then\n  exit 1\nfi\npython t.py --lr $1 --bs $2 --seed $3\n", 0, ""),
    (SPLIT, JOB + 'NAME="my first run"\npython t.py --name $NAME\n', 8, "error"),
    (SPLIT, JOB + 'NAME="my first run"\npython t.py --name "$NAME"\n', 0, ""),
    (SPLIT, JOB + 'SETS="coco flickr"\npython t.py --datasets $SETS\n', 0, ""),
    (PLACE, JOB + "for d in a b c; do\n  cd $d\n  python t.py\ndone\n", 8, "error"),
    (PLACE, JOB + "for d in a b c; do\n  cd $d\n  python t.py\n  cd ..\ndone\n", 0, ""),
    (PLACE, JOB + "for d in a b c; do\n  (cd $d && python t.py)\ndone\n", 0, ""),
    (PLACE, JOB + "for d in /a /b; do\n  cd $d\n  python t.py\ndone\n", 0, ""),
    (LOOPS, JOB + "for i in 1 2; do\n  for i in a b; do\n    python t.py --s $i\n  done\ndone\n", 8, "error"),
    (LOOPS, JOB + "for i in 1 2; do\n  for i in a b; do\n    ls $i\n  done\n  python t.py --s $i\ndone\n", 8, "error"),
    (LOOPS, JOB + "for i in 1 2; do\n  a=x$i\n  for i in $a/*; do\n    python t.py --s $i\n  done\ndone\n", 0, ""),
    (LOOPS, JOB + "for f in a b; do mv $f c; done\nfor f in d e; do mv $f c; done\n", 0, ""),
    (LOOPS, JOB + 'A=()\nA="$A --lr 1"\npython t.py "${A[@]}"\n', 8, "error"),
    (LOOPS, JOB + 'A=()\nA+=(--lr 1)\npython t.py "${A[@]}"\n', 0, ""),
    (LOOPS, JOB + 'A=""\nA="$A --lr 1"\npython t.py $A\n', 0, ""),
    (LOOPS, JOB + "for i in 1 2; do\n  for j in a b; do\n    python t.py --s $i $j\n  done\ndone\n", 0, ""),
]  # fmt: skip
LISTS: list[tuple[str, str, int, str]] = [
    (RANGE, JOB + "#SBATCH --array=0-3\nA=(a b c d)\nA=(a b)\npython t.py --n ${A[$SLURM_ARRAY_TASK_ID]}\n", 10, "error"),
    (RANGE, JOB + "#SBATCH --array=0-3\nA=(a b)\nA=(a b c d)\npython t.py --n ${A[$SLURM_ARRAY_TASK_ID]}\n", 0, ""),
    (RANGE, JOB + "#SBATCH --array=0-3\nA=(a b)\nA+=(c d)\npython t.py --n ${A[$SLURM_ARRAY_TASK_ID]}\n", 0, ""),
    (RANGE, JOB + "#SBATCH --array=0-3\nA=(a b c d)\nif [ $1 ]; then\nA=(a b)\nfi\npython t.py --n ${A[$SLURM_ARRAY_TASK_ID]}\n", 0, ""),
    (OVER, JOB + "LOG=run.log\necho start >> $LOG\npython t.py > $LOG 2>&1\n", 9, "warning"),
    (OVER, JOB + "LOG=run.log\necho start >> $LOG\npython t.py >> $LOG 2>&1\n", 0, ""),
    (OVER, JOB + "LOG=run.log\necho start >> $LOG\ncp $LOG old.log\npython t.py > $LOG\n", 0, ""),
    (OVER, JOB + "LOG=run.log\necho start > $LOG\npython t.py >> $LOG\n", 0, ""),
]  # fmt: skip

FLOW_CASES = [*CONDITIONS, *CALLERS, *EMPTY, *TEXTS, *ARGUMENTS, *LISTS]
