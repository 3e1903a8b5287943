"""Cases about lines that do something else than their writer meant: rule, script, line, severity; line 0 for none."""

from __future__ import annotations

SH = "#!/bin/bash\n"
JOB = SH + "#SBATCH --gpus-per-node=4\n#SBATCH --nodes=1\n#SBATCH --job-name=a\n{}\n"
WORK = JOB.format("{}\npython x.py")

ENDS: list[tuple[str, str, int, str]] = [
    ("exit-zero", WORK.format('if [ ! -d d ]; then\n  echo "Error: no d"\n  exit\nfi'), 7, "warning"),
    ("exit-zero", WORK.format('if [[ $A == "" ]]; then\n  echo "Could not find it"; exit; fi'), 6, "warning"),
    ("exit-zero", WORK.format('[ -d d ] || { echo "d is missing" >&2; exit; }'), 5, "warning"),
    ("exit-zero", WORK.format('[ -d d ] || { echo "d is missing"; exit 0; }'), 5, "warning"),
    ("exit-zero", WORK.format('[ -z "$1" ] && echo "ERROR: no argument" && exit'), 5, "warning"),
    ("exit-zero", WORK.format('case $1 in\n*) echo "Invalid mode: $1"; exit ;;\nesac'), 6, "warning"),
    (
        "exit-zero",
        WORK.format('if [ -z "$1" ]; then\n  echo "missing input"\n  echo "give a file"\n  exit 0\nfi'),
        8,
        "warning",
    ),
    ("exit-zero", WORK.format('[ -n "$A" ] || { echo "Not in a job, exiting"; exit 0; }'), 0, ""),
    ("exit-zero", SH + 'if [ -z "$1" ]; then\n  echo "missing input"\n  exit\nfi\npython x.py\n', 4, "note"),
    ("exit-zero", WORK.format('if [ ! -d d ]; then\n  echo "Error: no d"\n  exit 1\nfi'), 0, ""),
    ("exit-zero", WORK.format('if [ -f done ]; then\n  echo "no work left"\n  exit\nfi'), 0, ""),
    ("exit-zero", WORK.format('if [ -f f ]; then\n  echo "failed runs are all finished already"\n  exit\nfi'), 0, ""),
    ("exit-zero", WORK.format('if ! cd d; then\n  echo "cannot enter d"\n  false\n  exit\nfi'), 0, ""),
    ("exit-zero", WORK.format('echo "Error: no d"\nif [ -d e ]; then\n  exit\nfi'), 0, ""),
]
REQUESTS: list[tuple[str, str, int, str]] = [
    ("directive-refused", WORK.format("#SBATCH --priority project-1"), 5, "error"),
    ("directive-refused", WORK.format("#SBATCH --priority=high"), 5, "error"),
    ("directive-refused", WORK.format("#SBATCH --priority=TOP"), 0, ""),
    ("directive-refused", WORK.format("#SBATCH --priority=10"), 0, ""),
    ("unset-variable", JOB.format("srun --gpus-per-node=$SBATCH_GPUS_PER_NODE python x.py"), 5, "warning"),
    ("unset-variable", WORK.format("touch ${SBATCH_JOB_NAME}.started"), 5, "warning"),
    ("unset-variable", WORK.format("touch $SBATCH_JOB_NAME.started").replace("--job-name=", "-J "), 5, "warning"),
    ("unset-variable", WORK.format("touch $SBATCH_PARTITION.started"), 0, ""),
    ("unset-variable", WORK.format("echo $SBATCH_JOB_NAME"), 0, ""),
    ("unset-variable", WORK.format("touch ${SBATCH_JOB_NAME:-run}.started"), 0, ""),
    ("unset-variable", WORK.format("SBATCH_JOB_NAME=b\ntouch $SBATCH_JOB_NAME"), 0, ""),
    ("unset-variable", WORK.format("SBATCH_JOB_NAME=b sbatch next.sh $SBATCH_JOB_NAME"), 0, ""),
    ("idle-gpus", JOB.format("srun -n 1 python x.py --device gpu --device_id 0"), 5, "warning"),
    ("idle-gpus", JOB.format("srun -n 1 python x.py --gpu 0"), 5, "warning"),
    ("idle-gpus", JOB.format("srun python x.py --device=cuda:0"), 5, "warning"),
    ("idle-gpus", JOB.format("srun python x.py --gpus 4"), 5, "note"),
    ("idle-gpus", JOB.format("srun python x.py"), 5, "note"),
    ("idle-gpus", JOB.format("srun python x.py --gpu 0 --multi_gpu"), 5, "note"),
    ("idle-gpus", JOB.format("srun -n 4 python x.py --gpu 0"), 0, ""),
]
TESTS: list[tuple[str, str, int, str]] = [
    (
        "constant-condition",
        WORK.format('if [[ -z "SLURM_JOB_ID" || $SLURM_NNODES -eq 1 ]]; then\n  echo one\nfi'),
        5,
        "warning",
    ),
    ("constant-condition", WORK.format('A=$1\nif [ ! -n A ] && [ ! -n "$B" ]; then\n  echo one\nfi'), 6, "warning"),
    ("constant-condition", WORK.format('if [ -z "$A" ] || [ -n "A" ]; then\n  echo one\nfi'), 5, "warning"),
    (
        "constant-condition",
        WORK.format('if [[ -z "$SLURM_JOB_ID" || $SLURM_NNODES -eq 1 ]]; then\n  echo one\nfi'),
        0,
        "",
    ),
    ("constant-condition", WORK.format('A=-z\nif [ "$A" = -n ] || [ "$B" = "-z" ]; then\n  echo one\nfi'), 0, ""),
    ("constant-condition", WORK.format('if [ -n "extra" ]; then\n  echo one\nfi'), 0, ""),
]
NUMBERS: list[tuple[str, str, int, str]] = [
    ("never-expanded", JOB.format("N=${SLURM_NTASKS}*${SLURM_NNODES}\nmpirun -np $N ./x"), 5, "error"),
    ("never-expanded", JOB.format('A=4\nexport N="$A * 2"\nmpirun -n "$N" ./x'), 6, "error"),
    ("never-expanded", JOB.format("#SBATCH --array=0-3\ni=$SLURM_ARRAY_TASK_ID+1\npython x.py --seed $i"), 6, "error"),
    ("never-expanded", JOB.format("A=4\nN=$A*2\nmpirun -n $((N)) ./x"), 0, ""),
    ("never-expanded", JOB.format("A=4\nN=$A*2\nmpirun -n $(echo $N | bc) ./x"), 0, ""),
    ("never-expanded", JOB.format("A=4\nN=$((A*2))\nmpirun -n $N ./x"), 0, ""),
    ("never-expanded", JOB.format("A=4\nN=$A+1\nB[$N]=x\nmpirun -n $N ./x"), 0, ""),
    ("never-expanded", JOB.format("A=data\nN=$A*2\nls $N"), 0, ""),
    ("never-expanded", JOB.format("A=4\nN=$A*2\necho $N\npython x.py"), 0, ""),
    ("never-expanded", JOB.format("declare -i N\nA=4\nN=$A*2\nmpirun -n $N ./x"), 0, ""),
    ("never-expanded", JOB.format("A=4\nB=2\nN=$A+$B\nmv results results_$N"), 0, ""),
]
PORTS: list[tuple[str, str, int, str]] = [
    ("fixed-port", JOB.format("for l in 1 2; do deepspeed --num_gpus 2 x.py --lr $l & done\nwait"), 5, "error"),
    ("fixed-port", JOB.format("for l in 1 2; do deepspeed --num_gpus 2 x.py --lr $l & wait; done"), 0, ""),
]
ALIKE = JOB.format("#SBATCH --array=1-10\n{}")
UNUSED: list[tuple[str, str, int, str]] = [
    ("array-not-used", ALIKE.format("D=$PWD/out\npython x.py --save_dir $D/1 --set_seed 1"), 5, "warning"),
    ("array-not-used", ALIKE.format("# if [ $SLURM_ARRAY_TASK_ID == 1 ]\npython x.py --seed 1"), 5, "warning"),
    ("array-not-used", ALIKE.format("python x.py --data $DATA --random_seed=1"), 5, "warning"),
    ("array-not-used", ALIKE.format("python x.py --seed $SLURM_JOB_ID"), 0, ""),
    ("array-not-used", ALIKE.format("D=$(date +%s)\npython x.py --save_dir out --run $D"), 0, ""),
    ("array-not-used", ALIKE.format("python x.py --data $TMPDIR --seed 1"), 0, ""),
    ("array-not-used", ALIKE.format("python x.py"), 0, ""),
    ("array-not-used", ALIKE.format("python x.py --seed 1").replace("1-10", "1-300"), 0, ""),
    ("array-not-used", ALIKE.format("python grid_search.py --seed 1"), 0, ""),
    ("array-not-used", ALIKE.format("python x.py $1 --seed 1"), 0, ""),
]
GRID = SH + "#$ -cwd\n{}\n"
LSF = SH + "#BSUB -n 1\n{}\n"
PBS = SH + "#PBS -l select=1:ngpus=1\n{}\n"
SYSTEMS: list[tuple[str, str, int, str]] = [
    ("one-log-for-array", GRID.format("#$ -t 1-4\npython x.py --seed $SGE_TASK_ID > out.txt"), 4, "warning"),
    ("one-log-for-array", LSF.format('#BSUB -J "a[1-4]%2"\npython x.py --seed $LSB_JOBINDEX > out.txt'), 4, "warning"),
    (
        "one-log-for-array",
        PBS.format("#PBS -J 1-4\ncd $PBS_O_WORKDIR\npython x.py --seed $PBS_ARRAY_INDEX > out.txt"),
        5,
        "warning",
    ),
    ("one-log-for-array", PBS.format("#PBS -J 1-4\ncd $PBS_JOBID\npython x.py > out.txt"), 0, ""),
    ("one-log-for-array", LSF.format('#BSUB -J "a[1-4]"\npython x.py > out.$LSB_JOBINDEX'), 0, ""),
    ("one-log-for-array", LSF.format("#BSUB -J a\npython x.py > out.txt"), 0, ""),
    ("time-unit", GRID.format("#$ -l h_rt=24,gpu=1\npython x.py"), 3, "warning"),
    ("time-unit", GRID.format("#$ -l h_rt=24:00:00\npython x.py"), 0, ""),
    ("time-unit", GRID.format("#$ -l h_rt=86400\npython x.py"), 0, ""),
    ("unset-variable", GRID.format("python x.py --seed $SLURM_ARRAY_TASK_ID"), 3, "warning"),
    ("unset-variable", GRID.format("python x.py --seed ${SLURM_ARRAY_TASK_ID:-1}"), 0, ""),
]
SIDE: list[tuple[str, str, int, str]] = [
    ("same-gpu", JOB.format("for s in 1 2 3 4; do\n  python x.py --seed $s &\ndone\nwait"), 6, "warning"),
    ("same-gpu", JOB.format("for s in $(seq 1 4); do python x.py --seed $s & done\nwait"), 5, "warning"),
    ("same-gpu", JOB.format("for s in 1 2 3 4; do\n  python x.py --seed $s &\n  wait\ndone"), 0, ""),
    ("same-gpu", JOB.format("for s in 1 2 3 4; do\n  python x.py --gpu $s &\ndone\nwait"), 0, ""),
    (
        "same-gpu",
        JOB.format("for s in 1 2 3 4; do\n  CUDA_VISIBLE_DEVICES=$s python x.py --seed $s &\ndone\nwait"),
        0,
        "",
    ),
    ("same-gpu", JOB.format("for s in 1 2 3 4; do\n  python x.py $s &\ndone\nwait"), 0, ""),
    ("same-gpu", JOB.format("for s in $LIST; do\n  python x.py --seed $s &\ndone\nwait"), 0, ""),
]
MONITOR = JOB.format("python x.py &\nwhile true; do\n  top -n 1\n  {}sleep 60\ndone{}")
FOREVER: list[tuple[str, str, int, str]] = [
    ("endless-wait", MONITOR.format("", ""), 6, "warning"),
    ("endless-wait", MONITOR.format("", "").replace("while true;", "while :;"), 6, "warning"),
    ("endless-wait", MONITOR.format("kill -0 $! || break; ", ""), 0, ""),
    ("endless-wait", JOB.format("while true; do\n  nvidia-smi\n  sleep 60\ndone &\npython x.py"), 0, ""),
    ("endless-wait", MONITOR.format("", " &\nwait"), 10, "warning"),
    ("background-not-awaited", MONITOR.format("", ""), 0, ""),
    ("background-not-awaited", JOB.format("python x.py &\nsleep 10h"), 0, ""),
    ("background-not-awaited", JOB.format("python x.py &\nsleep infinity"), 0, ""),
    ("background-not-awaited", JOB.format("python x.py &\nsleep 60"), 5, "error"),
    ("background-not-awaited", MONITOR.format("", " &"), 5, "error"),
]
CONTAINER: list[tuple[str, str, int, str]] = [
    ("misspelled-variable", WORK.format("export SINGULAIRTYENV_LD_LIBRARY_PATH=/opt/lib"), 5, "warning"),
    ("misspelled-variable", WORK.format("export APPTAINERNV_A=1"), 5, "warning"),
    ("misspelled-variable", WORK.format("export SINGULARITYENV_A=1\nexport APPTAINER_BIND=/data"), 0, ""),
]
NEW = JOB.format("D=/scratch/$USER/$SLURM_JOB_ID\nmkdir -p $D\n{}cd $D\n{}srun python {}")
FOLDERS: list[tuple[str, str, int, str]] = [
    ("not-runnable", NEW.format("", "", "main.py --lr 1"), 8, "error"),
    ("not-runnable", NEW.format("", "source ~/.bashrc\nsource activate ml\n", "src/main.py"), 10, "error"),
    ("not-runnable", NEW.format("", "", "/home/a/main.py"), 0, ""),
    ("not-runnable", NEW.format("", "", "$HOME/main.py"), 0, ""),
    ("not-runnable", NEW.format("cp main.py $D\n", "", "main.py"), 0, ""),
    ("not-runnable", NEW.format("", "cp -r ~/code/* .\n", "main.py"), 0, ""),
    (
        "not-runnable",
        NEW.format("cp main.py $D\n", "", "main.py").replace("srun", "$R").replace("D=", "R=srun\nD="),
        0,
        "",
    ),
    ("not-runnable", NEW.format("", "cd ~/code\n", "main.py"), 0, ""),
    ("not-runnable", NEW.format("", "git clone https://host/code\n", "code/main.py"), 0, ""),
    ("not-runnable", NEW.format("", "", "main.py").replace("mkdir -p $D\n", ""), 0, ""),
    ("not-runnable", NEW.format("", "", "main.py").replace("/$SLURM_JOB_ID", ""), 0, ""),
]
RANKS: list[tuple[str, str, int, str]] = [
    (
        "expanded-too-early",
        SH + "#SBATCH --ntasks-per-node=2\nexport RANK=$SLURM_PROCID\nsrun python x.py\n",
        3,
        "error",
    ),
    (
        "expanded-too-early",
        SH + "#SBATCH --ntasks-per-node=1\nexport RANK=$SLURM_PROCID\nsrun python x.py $SLURM_NNODES\n",
        3,
        "note",
    ),
    (
        "expanded-too-early",
        SH + "#SBATCH --ntasks-per-node=2\nexport RANK=$SLURM_PROCID\nsrun python main.py fit --config a.yaml\n",
        3,
        "note",
    ),
]
TWICE: list[tuple[str, str, int, str]] = [
    ("out-of-place", JOB.format("R=proj\ncd $R\npython $R/x.py"), 7, "error"),
    ("out-of-place", JOB.format('R=./proj/\ncd "$R"\npython x.py --data "${R}"/data'), 7, "error"),
    ("out-of-place", JOB.format("R=proj\ncd $R\npython x.py data=$R/data"), 7, "error"),
    ("out-of-place", JOB.format("R=$PWD/proj\ncd $R\npython $R/x.py"), 0, ""),
    ("out-of-place", JOB.format("R=proj\ncd $R\npython x.py\ncd ..\nls $R/out"), 0, ""),
    ("out-of-place", JOB.format("R=proj\ncd $R\npython x.py --name $R --out /data/$R/a"), 0, ""),
    ("out-of-place", JOB.format("R=proj\nls $R/a\ncd $R\npython x.py"), 0, ""),
    ("out-of-place", JOB.format("R=proj\n(cd $R && make)\npython $R/x.py"), 0, ""),
    ("background-not-awaited", JOB.format("python -m a.train --x 1 &\npython -m a.train --y 2"), 5, "error"),
    ("background-not-awaited", JOB.format("python -m a.serve --x 1 &\npython -m a.train --y 2"), 0, ""),
]
TWO = JOB.format("#SBATCH --array=0-2\n{}")
ONE_IF = "if [ $SLURM_ARRAY_TASK_ID == {} ]; then\n  python x.py --arch {}\nfi\n"
SLIPS: list[tuple[str, str, int, str]] = [
    ("unset-variable", WORK.format("suffix=$(date +%s)\necho $suffix\ncp a out-$suffic.txt"), 7, "warning"),
    ("unset-variable", WORK.format("epochs=$1\necho $epochs\ncp a out-$epoch.txt"), 7, "warning"),
    ("unset-variable", WORK.format("suffix=$1\nsuffic=$2\ncp $suffix out-$suffic.txt"), 0, ""),
    ("unset-variable", WORK.format("model1=a\necho $model1\ncp a $model2"), 0, ""),
    ("unset-variable", WORK.format("source ./settings.sh\nsuffix=a\ncp $suffix out-$suffic.txt"), 0, ""),
    ("unset-variable", WORK.format("suffix=a\ncp $suffix out-${suffic:-b}.txt"), 0, ""),
    ("unset-variable", WORK.format("DATE=a\necho $DATE\ncp a $DATA/x"), 0, ""),
    ("broken-line", WORK.format('export NCCL_SOCKET_IFNAME="eth0"#"ib0"'), 5, "error"),
    ("broken-line", WORK.format("LR=0.1# the rate"), 5, "error"),
    ("broken-line", WORK.format("LR='0.1'#the rate"), 5, "error"),
    ("broken-line", WORK.format("LR=0.1 # the rate"), 0, ""),
    ("broken-line", WORK.format("LINK=page.html#part"), 0, ""),
    ("broken-line", WORK.format('COLOR="#ff0000"'), 0, ""),
    ("stray-line", WORK.format("module load CUDA/11.7\nTensorFlow/2.11.0-CUDA-11.7"), 6, "error"),
    ("stray-line", WORK.format("ml CUDA/11.7\npython/3.6.0"), 6, "error"),
    ("stray-line", WORK.format("module load CUDA/11.7 \\\n  TensorFlow/2.11.0"), 0, ""),
    ("stray-line", WORK.format("module load CUDA/11.7\nbin/run2 a"), 0, ""),
    ("index-out-of-range", TWO.format(ONE_IF.format(0, "a")), 5, "error"),
    ("index-out-of-range", TWO.format(ONE_IF.format(0, "a") + ONE_IF.format(1, "b")), 5, "error"),
    ("index-out-of-range", TWO.format("".join(ONE_IF.format(n, n) for n in range(3))), 0, ""),
    ("index-out-of-range", TWO.format(ONE_IF.format(0, "a") + "python y.py"), 0, ""),
    ("index-out-of-range", TWO.format(ONE_IF.format(0, "a").replace("\nfi", "\nelse\n  python y.py\nfi")), 0, ""),
]
MEANT_CASES = [
    *ENDS,
    *REQUESTS,
    *TESTS,
    *NUMBERS,
    *PORTS,
    *SLIPS,
    *UNUSED,
    *SYSTEMS,
    *SIDE,
    *FOREVER,
    *CONTAINER,
    *FOLDERS,
    *RANKS,
    *TWICE,
]
