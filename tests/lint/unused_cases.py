"""Cases about what a script asks for or keeps without any use: the rule, the script, the line and the severity; 0 for none."""

from __future__ import annotations

from tests.lint.step_cases import asking

GPU = asking("--gres=gpu:1")  # 2 lines
RUN = "python train.py\n"
SIGNAL = asking("--gres=gpu:1", "--signal=SIGUSR1@90")  # 3 lines
ARRAY = asking("--gres=gpu:1", "--array=0-3")  # 3 lines
ZERO = asking("--partition=gpu", "--gres=gpu:0") + "module load cuda\n"  # 4 lines

SIGNALS: list[tuple[str, str, int, str]] = [
    ("signal-not-trapped", SIGNAL + RUN, 3, "warning"),
    ("signal-not-trapped", SIGNAL + "source venv/bin/activate\ntorchrun --nproc_per_node 1 x.py\n", 3, "warning"),
    ("signal-not-trapped", SIGNAL + "singularity exec --nv a.sif bash -c 'source env.sh; python x.py'\n", 3, "warning"),
    ("signal-not-trapped", asking("--gres=gpu:1", "--signal=2@60") + RUN, 3, "warning"),
    ("signal-not-trapped", SIGNAL + "srun " + RUN, 0, ""),
    ("signal-not-trapped", SIGNAL + "mpirun -np 2 " + RUN, 0, ""),
    ("signal-not-trapped", SIGNAL + "CMD=srun\n$CMD " + RUN, 0, ""),
    ("signal-not-trapped", SIGNAL + RUN + "bash evaluate.sh\n", 0, ""),
    ("signal-not-trapped", SIGNAL + "sbatch next.sh\n" + RUN, 0, ""),
    ("signal-not-trapped", SIGNAL + "./a.out\n", 0, ""),
    ("signal-not-trapped", asking("--gres=gpu:1", "--signal=$SIG") + RUN, 0, ""),
]

ZEROS: list[tuple[str, str, int, str]] = [
    ("no-gpu-requested", ZERO + RUN, 3, "warning"),
    ("no-gpu-requested", asking("-p gpu", "--gpus-per-node=0") + "nvidia-smi\n" + RUN, 3, "warning"),
    ("no-gpu-requested", asking("-p a100", "--gpus=0") + "python main.py --gpu 0\n", 3, "warning"),
    (
        "no-gpu-requested",
        asking("-p a100", "--gres=gpu:v100:0") + "export CUDA_VISIBLE_DEVICES=0\n" + RUN,
        3,
        "warning",
    ),
    ("no-gpu-requested", asking("-p long", "--gres=gpu:0  # Request 1 GPU") + "make\n", 3, "warning"),
    ("no-gpu-requested", asking("-p gpu", "--gres=gpu:0  # no GPU") + "make\n", 0, ""),
    ("no-gpu-requested", asking("-p gpu", "--gres=gpu:0") + RUN, 0, ""),
    ("no-gpu-requested", asking("-p cpu", "--gres=gpu:0") + "module load cuda\n" + RUN, 0, ""),
    ("no-gpu-requested", ZERO + "pip install torch\n", 0, ""),
    ("no-gpu-requested", asking("-p gpu", "--gpus-per-task=0", "--gres=gpu:4") + "module load cuda\n" + RUN, 0, ""),
    ("no-gpu-requested", asking("-p gpu", "--gres=gpu:10") + "module load cuda\n" + RUN, 0, ""),
    ("no-gpu-requested", asking("-p gpu", "--gres=gpu:01") + "module load cuda\n" + RUN, 0, ""),
]

FAILED = "  rv=${PIPESTATUS[0]}\n  [[ $rv -ne 0 ]] && echo failed && "
LOOP = "fails=0\nfor i in 1 2; do\n  python train.py --seed $i || "

FAILURES: list[tuple[str, str, int, str]] = [
    ("exit-code-lost", GPU + "rvs=0\nfor i in 1 2; do\n  python x.py |& tee log$i\n" + FAILED + "let rvs+=$rv\ndone\nrm tmp\n", 7, "warning"),
    ("exit-code-lost", GPU + LOOP + "((fails++))\ndone\necho done\n", 5, "warning"),
    ("exit-code-lost", GPU + LOOP + "fails=$((fails + 1))\ndone\necho done\n", 5, "warning"),
    ("exit-code-lost", GPU + LOOP.replace("=0", "=()") + 'fails+=("$i")\ndone\necho done\n', 5, "warning"),
    ("exit-code-lost", GPU + LOOP + "((fails++))\ndone\nexit $fails\n", 0, ""),
    ("exit-code-lost", GPU + LOOP + "((fails++))\ndone\n[ $fails -eq 0 ]\n", 0, ""),
    ("exit-code-lost", GPU + LOOP + "((fails++))\ndone\n((fails == 0))\n", 0, ""),
    ("exit-code-lost", GPU + LOOP.replace("fails", "n") + "((n++))\ndone\necho done\n", 0, ""),
    ("exit-code-lost", GPU + "set -e\n" + LOOP + "((fails++))\ndone\necho done\n", 0, ""),
]  # fmt: skip

CHOSEN = "# lrs=(1 2 3 4)\n# lr=${lrs[$SLURM_ARRAY_TASK_ID]}\nlr=1e-4\n"

ARRAYS: list[tuple[str, str, int, str]] = [
    ("array-not-used", ARRAY + CHOSEN + "out=run_$SLURM_ARRAY_TASK_ID\npython x.py --lr $lr --output_dir $out\n", 6, "warning"),
    ("array-not-used", ARRAY + CHOSEN + "python x.py --lr $lr --output_dir run_$SLURM_ARRAY_TASK_ID\n", 6, "warning"),
    ("array-not-used", ARRAY + "# lr=$(sed -n ${SLURM_ARRAY_TASK_ID}p list)\nlr=1e-4\necho $SLURM_ARRAY_TASK_ID\npython x.py --lr $lr\n", 5, "warning"),
    ("array-not-used", ARRAY + CHOSEN + "python x.py --lr $lr --seed $SLURM_ARRAY_TASK_ID\n", 0, ""),
    ("array-not-used", ARRAY + CHOSEN + "data=${files[SLURM_ARRAY_TASK_ID]}\npython x.py --lr $lr --data $data\n", 0, ""),
    ("array-not-used", ARRAY + CHOSEN.replace("lr=1e-4", "lr=$1") + "python x.py --lr $lr\n", 0, ""),
    ("array-not-used", ARRAY.replace("0-3", "2") + CHOSEN + "python x.py --lr $lr\n", 0, ""),
]  # fmt: skip

ARGUMENTS = "#!/bin/bash\nwhile [ $# -gt 0 ]; do\n case $1 in\n  --lr) LR=$2; shift 2;;\n"
ARGUMENTS_END = " esac\ndone\npython x.py --lr $LR\n"
SUBMITS = "#!/bin/bash\nSAVE=/tmp/me/run\nmkdir -p $SAVE\n"
OTHERS: list[tuple[str, str, int, str]] = [
    ("node-local-file", SUBMITS + 'echo "python x.py --save $SAVE/model" >> job.sh\nsbatch job.sh\n', 3, "error"),
    ("node-local-file", SUBMITS + "sbatch --gres=gpu:1 run.sh $SAVE\n", 3, "error"),
    ("node-local-file", SUBMITS + "sbatch ./run.sh $SAVE\n", 3, "error"),
    ("node-local-file", SUBMITS + 'echo "mkdir -p $SAVE; python x.py --save $SAVE" >> job.sh\nsbatch job.sh\n', 0, ""),
    ("node-local-file", SUBMITS + "cp job.sh $SAVE\nsbatch $SAVE/job.sh\n", 0, ""),
    ("node-local-file", SUBMITS.replace("/tmp", "/home") + "sbatch ./run.sh $SAVE\n", 0, ""),
    ("option-twice", asking("--partition=a", "--partition=b") + RUN, 2, "warning"),
    ("option-twice", asking("--exclude=n1", "--exclude=n2") + RUN, 2, "warning"),
    ("option-twice", asking("-p a", "--partition=a") + RUN, 0, ""),
    ("option-twice", asking("-p a", "-N 1", "hetjob", "-p b", "-N 2") + RUN, 0, ""),
    ("option-twice", "#!/bin/bash\nID=$(sbatch << EOF\n#!/bin/sh\n#SBATCH -p a\nls\nEOF\n)\n"
     "sbatch << EOF\n#!/bin/sh\n#SBATCH -p b\n#SBATCH --dependency=afterok:$ID\nls\nEOF\n", 0, ""),
    ("constant-condition", GPU + 'if [[ -z "SLURM_JOB_ID" || $N -eq 1 ]]; then\n  ls\nfi\n', 3, "warning"),
    ("constant-condition", GPU + 'D=$1\nif [ $N -eq 1 -o -n "D" ]; then\n  ls\nfi\n', 4, "warning"),
    ("constant-condition", GPU + 'if [[ -z "$SLURM_JOB_ID" || $N -eq 1 ]]; then\n  ls\nfi\n', 0, ""),
    ("constant-condition", GPU + 'D=$1\nif [ "$D" = -z -o D = "$E" ]; then\n  ls\nfi\n', 0, ""),
    ("constant-condition", GPU + "if [[ $1 -eq true ]]; then\n  ls\nfi\n", 3, "warning"),
    ("constant-condition", GPU + 'if [[ -n $2 && $1 -ne "NONE" ]]; then\n  ls\nfi\n', 3, "warning"),
    ("constant-condition", GPU + "max=$2\nif [[ $1 -eq max ]]; then\n  ls\nfi\n", 0, ""),
    ("constant-condition", GPU + "if [[ $1 -eq 0 ]]; then\n  ls\nfi\n", 0, ""),
    ("unset-variable", GPU + "python ${1:train.py} --lr 1\n", 3, "warning"),
    ("unset-variable", GPU + "MODE=${MODE:debug}\npython x.py --mode $MODE\n", 3, "warning"),
    ("unset-variable", GPU + "python ${1:-train.py} --part ${2:1} --rest ${3: -4}\n", 0, ""),
    ("unset-variable", GPU + "start=3\npython x.py --name ${1:start}\n", 0, ""),
    ("one-log-for-array", ARRAY + "cp c_$SLURM_ARRAY_TASK_ID.yaml c.yaml\npython x.py --config c.yaml\n", 4, "warning"),
    ("one-log-for-array", ARRAY + "N=$SLURM_ARRAY_TASK_ID\nsed s/X/$N/ t > c.yaml\npython x.py -c ./c.yaml\n", 5, "warning"),
    ("one-log-for-array", ARRAY + "git checkout run$SLURM_ARRAY_TASK_ID\n" + RUN, 4, "warning"),
    ("one-log-for-array", ARRAY + "cp d_$SLURM_ARRAY_TASK_ID.npz /tmp/d.npz\npython x.py --data /tmp/d.npz\n", 0, ""),
    ("one-log-for-array", ARRAY + "cp a.yaml c_$SLURM_ARRAY_TASK_ID.yaml\npython x.py --config c.yaml\n", 0, ""),
    ("one-log-for-array", ARRAY + "cp c_$SLURM_ARRAY_TASK_ID.yaml c.yaml\npython x.py --config d.yaml\n", 0, ""),
    ("one-log-for-array", ARRAY + "git checkout main\npython x.py --i $SLURM_ARRAY_TASK_ID\n", 0, ""),
    ("export-comma", GPU + "ID=$(cut -f 1 -d ',' list)\nsrun --export=ALL,A=$B,ID=$ID python x.py\n", 0, ""),
    ("export-comma", GPU + "srun --export=ALL,NCCL_SOCKET_IFNAME=^lo,docker0 python x.py\n", 3, "error"),
    ("idle-nodes", asking("--nodes=4") + "python driver.py --db_nodes=1 --sim_nodes=2\n", 0, ""),
    ("directive-not-read", asking("-N 1") + "#! a\n#! b\n#! c\n#! d\n#! e\n#! SBATCH -J x\n" + RUN, 8, "note"),
    ("directive-not-read", asking("-N 1") + "#! SBATCH -J x --time=1:00\n" + RUN, 3, "warning"),
    ("expanded-too-early", '#!/bin/bash\nsbatch --array=0-9 --wrap="python x.py $SLURM_ARRAY_TASK_ID"\n', 2, "error"),
    ("expanded-too-early", '#!/bin/bash\nsbatch --wrap "python x.py --out $O/$SLURM_JOB_ID"\n', 2, "error"),
    ("expanded-too-early", "#!/bin/bash\nsbatch --array=0-9 --wrap='python x.py $SLURM_ARRAY_TASK_ID'\n", 0, ""),
    ("expanded-too-early", '#!/bin/bash\nsbatch --wrap="python x.py \\$SLURM_JOB_ID $LR"\n', 0, ""),
    ("expanded-too-early", '#!/bin/bash\nsbatch --output=$SLURM_JOB_ID.txt --wrap="python x.py"\n', 0, ""),
    ("never-expanded", GPU + "OUT=/x/out\npython train.py 2>&1 | tee OUT/log.txt\n", 4, "error"),
    ("never-expanded", GPU + "LOG_DIR=$HOME/logs\npython train.py > LOG_DIR/log.txt\n", 4, "error"),
    ("never-expanded", GPU + "SRC=/x\ncp SRC/a.py .\n", 4, "error"),
    ("never-expanded", GPU + "DATA=/x/DATA\ncp DATA/a.py .\n", 0, ""),
    ("never-expanded", GPU + "DATA=/x\nmkdir DATA\ncp a DATA/b\n", 0, ""),
    ("never-expanded", GPU + "DATA=/x\ncp $DATA/a /y/DATA/b\n", 0, ""),
    ("secret-in-script", GPU + "export DB_PASSWORD=hunter2lake\n" + RUN, 3, "warning"),
    ("secret-in-script", GPU + "PGPASSWORD='tree-9-house'\n" + RUN, 3, "warning"),
    ("secret-in-script", GPU + "DB_PASSWORD=$(cat ~/.pw)\nREDIS_PASSWORD=5241590000000000\n" + RUN, 0, ""),
    ("endless-wait", ARGUMENTS + "  --bs) BS=$2;;\n" + ARGUMENTS_END, 5, "warning"),
    ("endless-wait", ARGUMENTS + "  *) echo unknown $1;;\n" + ARGUMENTS_END, 5, "warning"),
    ("endless-wait", ARGUMENTS + "  *) echo unknown $1; exit 1;;\n" + ARGUMENTS_END, 0, ""),
    ("endless-wait", ARGUMENTS + "  *) usage;;\n" + ARGUMENTS_END, 0, ""),
    ("endless-wait", ARGUMENTS + "  --x) X=1;;\n" + ARGUMENTS_END.replace("esac", "esac\n shift"), 0, ""),
    ("exits-early", GPU + "module load x\nexit 0\n" + RUN, 4, "error"),
    ("exits-early", GPU + 'source f.sh\nrun_or_die "python a.py"\nexit 0\n' + RUN, 0, ""),
    ("loop-values", GPU + "for n in `eval echo {1..$N}`; do\n  python x.py --n $n\ndone\n", 0, ""),
    ("loop-values", GPU + "for n in {1..$N}; do\n  python x.py --n $n\ndone\n", 3, "error"),
    ("idle-nodes", asking("--nodes=2") + "export RADICAL_LOG_LVL=DEBUG\npython x.py\n", 0, ""),
    ("threads-oversubscribed", asking("-n 2", "-c 20") + "export OMP_NUM_THREADS=$SLURM_CPUS_PER_TASK\nsrun -n 1 -c 1 python a.py &\n"
     "srun -n 1 -c 20 python x.py\nwait\n", 0, ""),
    ("node-local-file", asking("--nodes=2") + "PY=python\nF=/tmp/c.csv\nsbcast c.csv $F\nsrun $PY x.py --csv $F\n", 0, ""),
    ("option-twice", asking("-w, --nodelist=n[1-4]", "-N 4") + RUN, 0, ""),
    ("node-local-file", asking("--nodes=2") + "srun ./stage_in.sh /data /tmp/x\nsrun python x.py --data /tmp/x\n", 0, ""),
    ("node-local-file", asking("--nodes=2") + "srun ./other.sh /tmp/x\nsrun python x.py --data /tmp/x\n", 4, "error"),
    ("memory-unit", asking("-N 1", "--mem=500") + RUN, 3, "note"),
    ("memory-unit", asking("-N 1", "--mem=500M") + RUN, 3, "note"),
    ("memory-unit", asking("--mem-per-cpu=100  # MB") + RUN, 2, "note"),
    ("memory-unit", asking("--gres=gpu:1", "--mem=500") + RUN, 3, "warning"),
    ("memory-unit", asking("--gres=gpu:1", "--mem=500M") + RUN, 3, "warning"),
    ("memory-unit", asking("--gres=gpu:1", "--mem=500  # MB") + RUN, 3, "note"),
    ("conda-not-set-up", GPU + "conda init\nconda activate a\n" + RUN, 4, "warning"),
    ("conda-not-set-up", GPU + ". /etc/profile.d/modules.sh\nmodule load rhel8/default-amp\nconda activate a\n" + RUN, 5, "warning"),
    ("conda-not-set-up", GPU + "source /etc/profile.d/lmod.sh\nconda activate a\n" + RUN, 4, "warning"),
    ("conda-not-set-up", GPU + "source /etc/profile.d/conda.sh\nconda activate a\n" + RUN, 0, ""),
    ("conda-not-set-up", GPU + ". /etc/profile.d/modules.sh\nmodule load miniconda\nconda activate a\n" + RUN, 0, ""),
    ("array-not-used", '#!/bin/bash\n#BSUB -J "x[1-9]"\n#BSUB -n 4\npython x.py --lr 1\n', 2, "warning"),
    ("array-not-used", '#!/bin/bash\n#BSUB -J "x[1-9]"\n#BSUB -n 4\npython x.py --lr $LSB_JOBINDEX\n', 0, ""),
    ("array-not-used", "#!/bin/bash\n#$ -t 1-9\n#$ -l rt_F=1\npython x.py --lr 1\n", 2, "warning"),
    ("array-not-used", "#!/bin/bash\n#$ -t 1-9 -tc 1\n#$ -l rt_F=1\npython x.py --lr 1\n", 0, ""),
    ("overwritten-output", GPU + "for t in 1 2 #3\n\ndo python x.py --output m/en.model --t $t\ndone\n", 5, "warning"),
    ("overwritten-output", GPU + "for t in 1 2 #3\n\ndo python x.py --output m/en$t.model --t $t\ndone\n", 0, ""),
    ("value-split", GPU + "python x.py --data '/d/a', '/d/b'\n", 3, "warning"),
    ("value-split", GPU + "python x.py --data d/a, \\\n  d/b, d/c\n", 3, "warning"),
    ("value-split", GPU + "python x.py --data /d/a,/d/b --gpus 0, out\n", 0, ""),
    ("value-split", GPU + "python x.py --gpus 0, /d/b\n", 0, ""),
    ("unset-variable", GPU + "mkdir -p out/$LSLURM_JOB_ID\n" + RUN, 3, "warning"),
    ("unset-variable", GPU + "mkdir -p out/${SLURMJOB_ID}\n" + RUN, 3, "warning"),
    ("unset-variable", GPU + "mkdir -p $SLURMTMPDIR/a\n" + RUN, 0, ""),
    ("conda-not-set-up", GPU + "uenv miniconda3\nconda activate a\n" + RUN, 4, "note"),
    ("conda-not-set-up", GPU + "{% if gpu %}\nconda activate a\n{% endif %}\n" + RUN, 4, "note"),
    ("csh-syntax", GPU + "set echo\n" + RUN, 3, "warning"),
    ("csh-syntax", GPU + "set verbose\n" + RUN, 3, "warning"),
    ("csh-syntax", GPU + "set echo\necho $1\n", 0, ""),
    ("csh-syntax", GPU + "set -- echo\n" + RUN, 0, ""),
    ("threads-oversubscribed", asking("-n 2", "--mem-per-cpu=8G") + "export OMP_NUM_THREADS=32\nsrun " + RUN, 4, "warning"),
    ("threads-oversubscribed", asking("-n 2", "--gres=gpu:2") + "export OMP_NUM_THREADS=32\nsrun " + RUN, 0, ""),
    ("threads-oversubscribed", asking("-n 2", "-c 32") + "export OMP_NUM_THREADS=32\nsrun " + RUN, 0, ""),
]  # fmt: skip

UNUSED_CASES = [*SIGNALS, *ZEROS, *FAILURES, *ARRAYS, *OTHERS]
