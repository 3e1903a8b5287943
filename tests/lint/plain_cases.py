"""Cases about commands without input, dates, values of loops, names without $ and fixed hosts: rule, script, line, severity; line 0 for none."""

from __future__ import annotations

SH = "#!/bin/bash\n"
JOB = SH + "#SBATCH --gpus=1\n#SBATCH --nodes=1\n#SBATCH --output=%j.out\n{}\n"
PART = JOB.format("#SBATCH --cpus-per-task=4\n{}\npython x.py")
WORK = JOB.format("{}\npython x.py")
LOOP = JOB.format('for i in 1 2 3; do\n  {}\ndone\npython x.py --data-path "$FILES"')
TASKS = SH + "#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=16\n#SBATCH --mem=8G\n{}\n"
PBS = SH + "#PBS -l select=2:ncpus=8:mpiprocs=8\ncd $PBS_O_WORKDIR\n{}\n"

INPUT: list[tuple[str, str, int, str]] = [
    ("input-not-read", WORK.format("sort -u $LIST | echo"), 5, "warning"),
    ("input-not-read", WORK.format("echo < $PBS_NODEFILE"), 5, "warning"),
    ("input-not-read", WORK.format("echo <<EOF > list.txt\na\nb\nEOF"), 5, "warning"),
    ("input-not-read", WORK.format("pgrep -u $USER ray | kill -9"), 5, "warning"),
    ("input-not-read", WORK.format("cat list.txt | mkdir -p"), 5, "warning"),
    ("input-not-read", WORK.format("pgrep -u $USER ray | xargs kill -9"), 0, ""),
    ("input-not-read", WORK.format("cat list.txt | while read a; do echo $a; done"), 0, ""),
    ("input-not-read", WORK.format("cat list.txt | { echo head; cat; } > all.txt"), 0, ""),
    ("input-not-read", WORK.format("date | echo $(cat)"), 0, ""),
    ("input-not-read", WORK.format('cat list.txt | printf "%s" "$(</dev/stdin)"'), 0, ""),
    ("input-not-read", WORK.format("cat <<EOF > list.txt\na\nEOF\necho done | tee log"), 0, ""),
    ("date-format", WORK.format("echo $(date +%H:%m)"), 5, "warning"),
    ("date-format", WORK.format("OUT=runs/$(date +'%Y%m%d_%H%m%S')\nmkdir -p $OUT"), 5, "warning"),
    ("date-format", WORK.format("OUT=runs/`date +%Y-%M-%d`\nmkdir -p $OUT"), 5, "warning"),
    ("date-format", WORK.format('date "+%d/%M/%Y %H:%M"'), 5, "warning"),
    ("date-format", WORK.format('date "+%H:%M:%s"'), 5, "warning"),
    ("date-format", WORK.format('date "+%d-%h:%M"'), 5, "warning"),
    ("date-format", WORK.format('date "+%Y-%m-%d %H:%M:%S"'), 0, ""),
    ("date-format", WORK.format('date "+%m%d-%H%M"'), 0, ""),
    ("date-format", WORK.format('date "+%d%h%Y %s"'), 0, ""),
    ("date-format", WORK.format('date -d "$(date +%H)" "+%H %d.%m.%Y"'), 0, ""),
]  # fmt: skip
VALUES: list[tuple[str, str, int, str]] = [
    ("loop-values", LOOP.format('FILES="0.1 data/part_$i"'), 6, "error"),
    ("loop-values", LOOP.replace("1 2 3", "$(seq 0 9)").format('FILES="data/part_${i}.json"'), 6, "error"),
    ("loop-values", LOOP.replace("1 2 3", "{{0..9}}").format("FILES=data/part_$i.json"), 6, "error"),
    ("loop-values", LOOP.format('FILES="$FILES 0.1 data/part_$i"'), 0, ""),
    ("loop-values", LOOP.format('FILES+=" data/part_$i"'), 0, ""),
    ("loop-values", LOOP.format('FILES=data/part_$i\n  python prepare.py "$FILES"'), 0, ""),
    ("loop-values", LOOP.format("FILES=data/part_$i\n  [ -e $FILES ] && break"), 0, ""),
    ("loop-values", LOOP.replace("1 2 3", "out/*").format("FILES=$i/model.pt"), 0, ""),
    ("loop-values", LOOP.replace("FILES", "LAST").format("LAST=data/part_$i"), 0, ""),
    ("loop-values", JOB.format('A=(--a 1)\nA="${A[*]} $B"\nA="$A --c 2"\npython x.py $A'), 0, ""),
    ("never-expanded", WORK.format("python s.py & \nSERVER_PID=$!\nkill SERVER_PID"), 7, "error"),
    ("never-expanded", WORK.format("python s.py & \npid=$!\nkill -9 pid"), 7, "error"),
    ("never-expanded", WORK.format("python s.py & \npid=$!\nwait pid"), 7, "error"),
    ("never-expanded", JOB.format("python x.py\nRC=$?\nexit RC"), 7, "error"),
    ("never-expanded", WORK.format('python s.py & \npid=$!\nkill "$pid"'), 0, ""),
    ("never-expanded", WORK.format("python s.py & \nTERM=$!\nkill -s TERM $TERM"), 0, ""),
    ("never-expanded", WORK.format("kill SERVER_PID"), 0, ""),
    ("value-split", WORK.format("export VT_ACTIVITY=SYSTEM ON"), 5, "error"),
    ("value-split", WORK.format("export OMP_NUM_THREADS=1 PATH"), 0, ""),
    ("value-split", WORK.format("DATA=/x\nexport OMP_NUM_THREADS=1 DATA"), 0, ""),
    ("invalid-value", WORK.format("export NCCL_DEBUG=ERROR"), 5, "warning"),
    ("invalid-value", WORK.format("export NCCL_DEBUG=off"), 5, "note"),
]  # fmt: skip
REQUESTS: list[tuple[str, str, int, str]] = [
    ("directive-not-read", JOB.format("#SBATCsH --mem=8G\npython x.py"), 5, "warning"),
    ("directive-not-read", JOB.format("#SBtACH --mem=8G\npython x.py"), 5, "warning"),
    ("directive-not-read", JOB.format("#SBATCHx --mem=8G\npython x.py"), 0, ""),
    ("directive-not-read", JOB.format("#xSBATCH --mem=8G\npython x.py"), 0, ""),
    ("directive-not-read", PBS.replace("cd", "#PSB -l walltime=1:00:00\ncd").format("python x.py"), 3, "warning"),
    ("directive-not-read", PBS.replace("cd", "##PBS -l walltime=1:00:00\ncd").format("python x.py"), 0, ""),
    ("option-twice", SH + "#SBATCH --export=A=1\n#SBATCH --export=B=2\npython x.py\n", 2, "warning"),
    ("option-twice", SH + "#SBATCH --mail-type=END\n#SBATCH --mail-type=FAIL\npython x.py\n", 0, ""),
    ("pattern-not-expanded", SH + "#SBATCH --output=log-%a.out\npython x.py\n", 2, "warning"),
    ("pattern-not-expanded", SH + "#SBATCH --output=log-%A_%a.out\npython x.py\n", 0, ""),
    ("pattern-not-expanded", SH + "#SBATCH --output=log-%a.out\npython x.py $SLURM_ARRAY_TASK_ID\n", 0, ""),
    ("pattern-not-expanded", SH + "#SBATCH --array=1-2\n#SBATCH --output=log-%a.out\npython x.py\n", 0, ""),
    ("unset-variable", PBS.format("echo ${PBS_NUM_PPN}\nmpiexec -n 16 python x.py"), 4, "warning"),
    ("unset-variable", PBS.format("mpiexec -n $PBS_NP python x.py"), 4, "warning"),
    ("unset-variable", PBS.replace("select=2:ncpus=8:mpiprocs=8", "nodes=2:ppn=8").format("mpiexec -n $PBS_NP python x.py"), 0, ""),
    ("unset-variable", PBS.format("mpiexec -n ${PBS_NP:-16} python x.py"), 0, ""),
    ("named-nodes", TASKS.format("mpirun -host cn011 -np 32 python x.py"), 5, "warning"),
    ("named-nodes", TASKS.format("mpirun -H gpu-a:4,gpu-b:4 -np 32 python x.py"), 0, ""),
    ("named-nodes", TASKS.format("horovodrun -H gpu01:4,gpu02:4 -np 8 python x.py"), 5, "warning"),
    ("named-nodes", TASKS.format("srun --nodelist=cn011 -N1 -n1 python x.py"), 5, "warning"),
    ("named-nodes", TASKS.format('H=$(hostname)\nmpirun -host $H -np 16 python x.py'), 0, ""),
    ("named-nodes", TASKS.format("mpirun -host localhost -np 16 python x.py"), 0, ""),
    ("named-nodes", TASKS.replace("--mem=8G", "--nodelist=cn[011-012]").format("mpirun -host cn011 -np 16 python x.py"), 0, ""),
    ("too-few-slots", TASKS.format("module load intel-mpi\nN=$((2 * 100))\nmpirun -np $N python x.py"), 7, "warning"),
    ("too-few-slots", TASKS.format("module load intel-mpi\nmpirun -np 32 python x.py"), 0, ""),
    ("too-few-slots", TASKS.replace("=16", "=1").format("module load intel-mpi\nmpirun -np 64 python x.py"), 0, ""),
]  # fmt: skip
WRAPPED: list[tuple[str, str, int, str]] = [
    ("exit-code-lost", JOB.format(f"{starter} python x.py 2>&1 | tee log"), 5, "warning")
    for starter in (
        "time -p", "/usr/bin/time -v", "/usr/bin/time -f %e -o time.txt", "xvfb-run -a", "coverage run", "ibrun", "flux run -n4", "vtune -collect x --",
        "mpirun.openmpi -np 1", "perf stat -e cycles", "flock -n lock", "pdm run",
    )
]  # fmt: skip
WRAPPED += [
    ("exit-code-lost", JOB.format("viztracer -o x.json x.py 2>&1 | tee log"), 5, "warning"),
    ("exit-code-lost", JOB.format("cd build\n./run 8 2>&1 | tee log"), 6, "warning"),
    ("exit-code-lost", JOB.format("jsrun -n 4 $EXE 2>&1 | tee log"), 5, "warning"),
    ("exit-code-lost", JOB.format("set -o pipefail\n./run 8 2>&1 | tee log"), 0, ""),
    ("exit-code-lost", JOB.format("time -p python x.py"), 0, ""),
    ("exit-code-lost", JOB.format("cp a b\nsacct -j $SLURM_JOB_ID | tee usage"), 0, ""),
    ("idle-nodes", JOB.replace("nodes=1", "nodes=2").format("ibrun python x.py"), 0, ""),
    ("not-runnable", JOB.format("kernprof -l x.py"), 0, ""),
]
DISKS: list[tuple[str, str, int, str]] = [
    ("node-local-file", TASKS.format("srun python x.py --data-dir /local/reference/images"), 5, "note"),
    ("node-local-file", TASKS.format("cp a.tar /local/reference\nsrun python x.py --data-dir /local/reference/images"), 6, "error"),
    ("node-local-file", TASKS.format("srun python x.py --data-dir /tmp/images"), 5, "error"),
]  # fmt: skip
TOLD: list[tuple[str, str, int, str]] = [
    ("option-of-program", TASKS.format("srun python x.py --gpus-per-node=4"), 5, "warning"),
    ("option-of-program", TASKS.format("srun python x.py --gpus-per-node=$SLURM_GPUS_ON_NODE"), 0, ""),
    ("option-of-program", TASKS.format("srun python x.py --ntasks-per-node 16"), 0, ""),
]
SYSTEMS = "if [ $system == 'slurm' ]; then\n  D=$SLURM_SUBMIT_DIR\nelif [ $system == 'pbs' ]; then\n  D=$PBS_O_WORKDIR\nfi\npython x.py $D"
HELP = '    echo "' + "  -n COUNT  count\n" * 20 + '"\n    echo "-a ARGS  must be the last one"\n'
SUBMITS = "#!/bin/bash\nBASE=$PWD\ncat <<EOF > job.pbs\n#!/bin/bash\n#PBS -l select=1:ncpus=4\nexport BASE=$BASE\n$BASE/install.sh\nEOF\nqsub job.pbs\n"
SILENT: list[tuple[str, str, int, str]] = [
    ("directive-not-read", JOB.format("#SBATCH -p {Partition Name}\npython x.py"), 0, ""),
    ("directive-not-read", JOB.format("#SBATCH --mail-user=your email\npython x.py"), 0, ""),
    ("directive-not-read", JOB.format("#SBATCH hetjob\n#SBATCH --nodes=1\npython x.py"), 0, ""),
    ("unset-variable", JOB.format(SYSTEMS), 0, ""),
    ("unset-variable", JOB.format("case $SYSTEM in\n  pbs)\n    D=$PBS_O_WORKDIR;;\nesac\npython x.py $D"), 0, ""),
    ("unset-variable", JOB.format("cd $PBS_O_WORKDIR\npython x.py"), 5, "warning"),
    (
        "unset-variable",
        JOB.format('MANAGERS=/x\ncmd "export MANAGER=/x"\ncmd "$MANAGER/start.sh"\npython x.py $MANAGERS'),
        0,
        "",
    ),
    ("directive-too-late", PBS.format("#PBS has no variable for this\npython x.py"), 0, ""),
    ("directive-too-late", PBS.format("#PBS -l mem=8gb\npython x.py"), 4, "error"),
    ("exit-zero", SH + f"case $1 in\n  -h|--help)\n{HELP}    exit 0\n    ;;\nesac\npython x.py\n", 0, ""),
    ("exit-zero", SH + f"case $1 in\n  -n)\n{HELP}    exit 0\n    ;;\nesac\npython x.py\n", 26, "warning"),
    ("script-folder", SUBMITS, 0, ""),
]
PARSES = (
    SH
    + "while [ $# -gt 0 ]; do\n  case $1 in\n    --lr) LR={}; shift 2;;\n    *) shift;;\n  esac\ndone\npython x.py --lr $LR\n"
)
FOUR = JOB.replace("gpus=1", "gpus=4")
FOLDS = FOUR.format("for i in 0 1 2 3; do\n  CUDA_VISIBLE_DEVICES=$i python x.py --fold $i\ndone {}")
WORDS: list[tuple[str, str, int, str]] = [
    ("unterminated", JOB.format("if [ $1 = a ]; then\n  echo a\nelseif [ $1 = b ]; then\n  echo b\nfi\npython x.py"), 7, "error"),
    ("unterminated", JOB.format("if [ $1 = a ]; then\n  echo a\nelif [ $1 = b ]; then\n  echo b\nfi\npython x.py"), 0, ""),
    ("unterminated", JOB.format("awk '{\n  elseif [ x ] then\n}' a\npython x.py"), 0, ""),
    ("no-shebang", JOB.replace("/bin/bash", "/usr/bin/env bash -l").format("python x.py"), 1, "error"),
    ("no-shebang", JOB.replace("/bin/bash", "/usr/bin/env -S bash -l").format("python x.py"), 0, ""),
    ("no-shebang", JOB.replace("/bin/bash", "/usr/bin/env bash").format("python x.py"), 0, ""),
    ("no-shebang", "#!/usr/bin/env bash -l\necho a\n", 0, ""),
    ("value-split", WORK.format("export A=1, B=2"), 5, "error"),
    ("value-split", WORK.format("CUDA_VISIBLE_DEVICES=0, 1, 2 python y.py"), 5, "error"),
    ("value-split", WORK.format('export A="1, B=2"'), 0, ""),
    ("value-split", WORK.format("export A=1,2 B=2"), 0, ""),
    ("value-split", PBS.format("NP=$(echo $PBS_NODEFILE | wc -l)\nmpiexec -n $NP python x.py"), 4, "error"),
    ("value-split", PBS.format("NP=$(cat $PBS_NODEFILE | wc -l)\nmpiexec -n $NP python x.py"), 0, ""),
    ("input-not-read", WORK.format("CKPT=$(ls -t ckpt | head 1)"), 5, "warning"),
    ("input-not-read", WORK.format("CKPT=$(ls -t ckpt | head -1)"), 0, ""),
    ("input-not-read", WORK.format("head 1"), 0, ""),
    ("arguments-dropped", PARSES.format("$1"), 4, "warning"),
    ("arguments-dropped", PARSES.format("$2"), 0, ""),
    ("background-not-awaited", FOLDS.format("&"), 6, "error"),
    ("background-not-awaited", FOLDS.format("&\nwait"), 0, ""),
    ("background-not-awaited", FOLDS.format(""), 0, ""),
    ("exit-code-lost", JOB.format("python x.py || exit 0"), 5, "warning"),
    ("exit-code-lost", JOB.format("python x.py || exit 1"), 0, ""),
    ("unset-variable", JOB.format("D=pwd\npython $D/x.py"), 5, "warning"),
    ("unset-variable", JOB.format("D=$(pwd)\npython $D/x.py"), 0, ""),
    ("idle-gpus", JOB.format("CUDA_VISIBLE_DEVICES=-1 python x.py"), 5, "warning"),
    ("idle-gpus", JOB.format("CUDA_VISIBLE_DEVICES=-1 python prepare.py\npython x.py"), 0, ""),
    ("more-ranks-than-gpus", FOUR.format("ray start --head --num-gpus=8\npython x.py"), 5, "error"),
    ("more-ranks-than-gpus", FOUR.format("ray start --head --num-gpus 4\npython x.py"), 0, ""),
    ("overwritten-output", WORK.format("pip install torch>=2.0"), 5, "warning"),
    ("overwritten-output", WORK.format("conda install -y numpy>1.20 scipy"), 5, "warning"),
    ("overwritten-output", WORK.format("pip install 'torch>=2.0' > install.log"), 0, ""),
    ("loop-values", JOB.format("N=4\nfor i in `eval echo {1..$N}`; do\n  python x.py $i\ndone"), 0, ""),
    ("blocks-script", JOB.format("jupyter nbconvert --execute --to notebook a.ipynb\npython x.py"), 0, ""),
    ("blocks-script", JOB.format("jupyter notebook --no-browser\npython x.py"), 5, "warning"),
    ("endless-wait", JOB.format("jupyter-serverextension enable a &\npython x.py &\nwait"), 0, ""),
    ("endless-wait", JOB.format("jupyter-lab --no-browser &\npython x.py &\nwait"), 7, "warning"),
    ("fixed-name-in-tmp", WORK.format("N=$(ls *.h5 | sed -e 's/.$//' -e \"s/a$//\" | tail -1)"), 0, ""),
    ("threads-oversubscribed", PART.format("OMP_NUM_THREADS=16"), 0, ""),
    ("threads-oversubscribed", PART.format("export OMP_NUM_THREADS=16"), 6, "warning"),
]  # fmt: skip
PLAIN_CASES = [*WORDS, *SILENT, *TOLD, *DISKS, *WRAPPED, *INPUT, *VALUES, *REQUESTS]
