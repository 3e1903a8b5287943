r"""Cases of correct scripts beside faults that look like them: the rule, the script, the line and the severity; line 0 for none."""

from __future__ import annotations

from tests.lint.cases import EIGHT, ONE, TWO

BATCH = "#!/bin/bash\n#SBATCH -N 1\n"
SHARED = "#!/bin/bash\n#SBATCH -N 1\n#SBATCH --gres=gpu:1\n#SBATCH --mem=8G --array=0-9\n"
NONE = "#!/bin/bash\n#SBATCH -N 1 --ntasks-per-node=1\n"
VARIABLES: list[tuple[str, str, int, str]] = [
    ("unset-variable", ONE + "mkdir -p a/b && cd $_\nold=$IFS\nIFS=,\n", 0, ""),
    ("unset-variable", ONE + "seconds=$(( `date +%s` - $SECONDS ))\ns=$(( $seconds % 60 ))\necho $s\n", 0, ""),
    ("unset-variable", ONE + "seconds=$(( s - $SECONDS ))\ns=$(( $seconds % 60 ))\necho $s\n", 7, "warning"),
    ("unset-variable", ONE + "f() {\n  local a=$(python x.py --in $DATA_LIST)\n  echo $a\n}\nDATA_LIST=a\nf\n", 0, ""),
    ("unset-variable", BATCH + "if [ -z $SLURM_NTASKS ]; then\n  echo none\n  exit 1\nfi\n", 0, ""),
    ("unset-variable", BATCH + "if [ -z $SLURM_NTASKS ]; then\n  exit 1\nfi\npython x.py\n#SBATCH -A a\n", 0, ""),
    ("unset-variable", ONE + ". config_$HOSTNAME.sh\nDEVICES=${DEVICES:-$PGDEVICES}\npython x.py $DEVICES\n", 0, ""),
    ("unset-variable", ONE + ". $sizes\nfor i in 1 2; do\n  _maxrank=${maxrank[i]}\n  ./a.out $_maxrank\ndone\n", 0, ""),
    ("unset-variable", ONE + '# SWITCH="--one-shot"\npython x.py $SWITCH\n', 0, ""),
    ("unset-variable", ONE + '# CONTAINER="singularity exec a.sif"\nCMD="$CONTAINER python x.py"\neval $CMD\n', 0, ""),
    ("unset-variable", ONE + "# CORPUS=/a/b\npython x.py --data $CORPUS\n", 8, "warning"),
    ("unset-variable", "#!/bin/bash\nmode=$1\ncat <<END > a.job\n#!/bin/bash\n#SBATCH -N 1\ncat <<'E2' > run\n"
     "if [ $mode = a ]; then ls; fi\nE2\nsrun ./run\nEND\nsbatch a.job\n", 0, ""),
    ("misspelled-variable", ONE + "export PATH=$CUDA_HOME/bin:$PATH\nexport PYTHON_PATH=$PATH\npython x.py\n", 8, "note"),
    ("misspelled-variable", ONE + "export PYTHON_PATH=$PWD/src\npython x.py\n", 7, "warning"),
    ("lost-in-subshell", ONE + "STAMP=$(date +%s)\n(\nexport STAMP=${STAMP}\npython x.py\n)\npython y.py $STAMP\n", 0, ""),
    ("unquoted-variable", ONE + "if [ -n $SLURM_JOB_ID ]; then\n  python x.py\nfi\n", 7, "note"),
    ("unquoted-variable", ONE + "if [ -n $EXTRA ]; then\n  python x.py\nfi\n", 7, "warning"),
    ("secret-in-script", ONE + "ARGS=( --rm -u $CONTAINER_UID:$CONTAINER_GID )\n", 0, ""),
]  # fmt: skip
DIRECTIVES: list[tuple[str, str, int, str]] = [
    ("directive-not-read", ONE + "python x.py\n#sbatch --dependency=afterok:$SLURM_JOB_ID next.sh\n", 0, ""),
    ("directive-not-read", "#!/bin/bash\n#sbatch --nodes=2\n#SBATCH -A a\npython x.py\n", 2, "warning"),
    ("directive-too-late", ONE + "python x.py\n\n# kept for later\n#SBATCH --constraint=v100\n", 10, "note"),
    ("directive-too-late", ONE + "python x.py\nexit\n#SBATCH --constraint=v100\n", 9, "note"),
    ("directive-too-late", ONE + "python x.py\n#SBATCH --constraint=v100\n", 8, "error"),
    ("directive-too-late", "#!/bin/bash\n#SBATCH -N 1\n{slurm.sbatch}\n#SBATCH -c 4\npython x.py\n", 0, ""),
    ("option-twice", "#!/bin/bash\n#SBATCH --gres=gpu:1\n#SBATCH --gres=gpu:v100:1\npython x.py\n", 2, "note"),
    ("option-twice", "#!/bin/bash\n#SBATCH --gres=gpu:v100:1\n#SBATCH --gres=gpu:1\npython x.py\n", 2, "warning"),
    ("option-twice", "#!/bin/bash\n#SBATCH --gres=gpu:4\n#SBATCH --gres=gpu:v100:1\npython x.py\n", 2, "warning"),
    ("variable-in-directive", "#!/bin/bash\n# Run it as: bash a.sh <Config_Name>\nsbatch <<EOT\n#!/bin/bash\n"
     "#SBATCH --output=\"a_${1}.log\"\npython x.py ${1}\nEOT\n", 0, ""),
    ("variable-in-directive", "#!/bin/bash\nA=`cat $LIST | head -2`\nsbatch <<EOT\n#!/bin/bash\n#SBATCH -J a_$A\npython x.py\nEOT\n", 0, ""),
    ("variable-in-directive", "#!/bin/bash\n#SBATCH -o a_${1}.log\npython x.py\n", 2, "error"),
    ("directive-not-read", "#!/bin/bash\nNAME=\"a.$(date +'%F %T')\"\nsbatch <<EOT\n#!/bin/bash\n#SBATCH -J ${NAME}\npython x.py\nEOT\n", 0, ""),
    ("directive-refused", "#!/bin/bash\nmail=FAIL\nwhile [ $# -gt 0 ]; do\ncase $1 in\n"
     "--mail) mail=\"$2\"; shift; shift; ;;\nesac\ndone\nsbatch <<EOT\n#!/bin/bash\n#SBATCH --mail-type=$mail\npython x.py\nEOT\n", 0, ""),
    ("time-unit", "#!/bin/bash\n#SBATCH -t 144     # Duration of the job (Ex: 15 mins)\n#SBATCH --gres=gpu:1\npython x.py\n", 0, ""),
    ("signal-not-trapped", "#!/bin/bash\n#SBATCH --signal=B:12@600\ntrap 'stop; exit 0' 12\nsrun ./a.out &\nwait\n", 0, ""),
]  # fmt: skip
LINES: list[tuple[str, str, int, str]] = [
    ("broken-line", ONE + "python x.py --size (8,) \\\n  --blocks 2\n", 0, ""),
    ("unterminated", ONE + "python x.py --size (8,) \\\n  --blocks 2\n", 7, "error"),
    ("unterminated", ONE + "settings=${4:-'{}'}\npython x.py $settings\n", 0, ""),
    ("unterminated", ONE + "conda activate /work/<<username>>/envs/<<env-name>>/\npython x.py\n", 0, ""),
    ("exit-zero", "#!/bin/bash\nif [ $# -ne 3 ]; then\n  echo \"usage: $0 <case> <nodes> <time>\"\n  exit 0\nfi\nsbatch -N $2 a.job\n", 4, "note"),
    ("exit-zero", ONE + "if [ $# -ne 3 ]; then\n  echo \"usage: $0 <case> <nodes> <time>\"\n  exit 0\nfi\npython x.py\n", 9, "warning"),
    ("unknown-option", ONE + "srun $1 --standalone --nproc_per_node=4 train.py\n", 0, ""),
    ("unknown-option", ONE + "srun --nproc_per_node=4 python train.py\n", 7, "error"),
    ("variable-not-expanded", ONE + "srun singularity run --nv a.sif python3 x.py --data /a/\\$SLURM_PROCID\n", 0, ""),
    ("variable-not-expanded", ONE + "srun singularity exec --nv a.sif python3 x.py --data /a/\\$SLURM_PROCID\n", 7, "error"),
    ("mistyped-command", ONE + "crun -p env python x.py\n", 0, ""),
    ("mistyped-command", ONE + "if [ $MODE = trun ]; then\n  trun -m 1 ./a.out\nfi\n", 0, ""),
    ("mistyped-command", ONE + "srub -n 1 ./a.out\n", 7, "warning"),
    ("constant-condition", ONE + "if [[ $SIZE > 1 ]]; then\n  ls\nfi\n", 7, "note"),
    ("constant-condition", ONE + "if [[ $SIZE > 10 ]]; then\n  ls\nfi\n", 7, "warning"),
    ("loop-values", ONE + "for f in a/*.txt; do\n  python x.py --name $(basename -- $f)\ndone\n", 0, ""),
]  # fmt: skip
STEPS: list[tuple[str, str, int, str]] = [
    ("idle-nodes", TWO + "python driver.py $PROCS $SLURM_JOB_NODELIST\n", 0, ""),
    ("idle-nodes", TWO + "LIST=$(echo $SLURM_JOB_NODELIST)\npython driver.py $PROCS $LIST\n", 0, ""),
    ("idle-nodes", TWO + "mpirun -np 1 R --slave < Rmpi.R\n", 0, ""),
    ("more-ranks-than-gpus", "#!/bin/bash\n#SBATCH -N 1\n#SBATCH --ntasks-per-node=6\n#SBATCH --gpus-per-node=2\n"
     "#SBATCH -J ddp\nsrun -K python x.py\n", 6, "error"),
    ("idle-nodes", TWO + "mpirun -np 1 ./a.out\n", 7, "warning"),
    ("more-ranks-than-gpus", "#!/bin/bash\n#SBATCH -N 1\n#SBATCH --ntasks-per-node=6\n#SBATCH --gpus-per-node=2\n"
     "#SBATCH --gpu-bind=single:3\n#SBATCH -J ddp\nsrun -K python x.py\n", 0, ""),
    ("container-without-gpu", "#!/bin/bash\n#SBATCH --gres=gpu:0\nsingularity exec a.sif python x.py\n", 0, ""),
    ("container-without-gpu", ONE + "singularity exec --nv a.sif python x.py\nsingularity exec a.sif python y.py\n", 0, ""),
    ("container-without-gpu", ONE + "singularity exec a.sif python x.py\n", 7, "warning"),
    ("expanded-too-early", TWO + "echo ls > w_${SLURM_PROCID}.sh\nsrun bash w_${SLURM_PROCID}.sh\n", 0, ""),
    ("node-count", TWO + 'if [ $MANY ]; then\n  MORE="--nnodes=$SLURM_NNODES --node_rank=$SLURM_NODEID"\nelse\n'
     '  MORE=""\nfi\nsrun torchrun --nproc_per_node=4 $MORE x.py\n', 0, ""),
    ("node-local-file", TWO + "LIST=/tmp/a.csv\nsbcast --force $DATA $LIST\nsrun -K -c32 python x.py --list $LIST\n", 0, ""),
    ("endless-wait", ONE + "srun vllm serve a --port 8001 &\nsrun vllm serve b --port 8002 &\nwait\n", 0, ""),
    ("endless-wait", ONE + "srun vllm serve a --port 8001 &\nsrun python x.py &\nwait\n", 9, "warning"),
    ("background-not-awaited", "#!/bin/bash\nfor i in 1 2; do\n  python worker.py $i &\ndone\n", 0, ""),
    ("fixed-name-in-tmp", ONE + "declare -xr PLUGINS='/tmp/me/stage/stage-openmm-7.5.0-fjiqzymyngtbtisos5koguvos4c3urjv/src/plugins'\n./a.out\n", 0, ""),
    ("fixed-name-in-tmp", "#!/bin/bash\nif [ $SLURM_LOCALID -eq 0 ]; then\n  rm -rf /dev/shm/* || true\nfi\nexec \"$@\"\n", 3, "note"),
    ("deletes-too-much", ONE + 'cp a $PFSDIR\nrm -rf "$PFSDIR"/*\n', 0, ""),
    ("secret-printed", '#!/bin/bash\necho "https://$HOST?token=${JUPYTER_TOKEN}"\nsbatch a.job\n', 0, ""),
    ("threads-oversubscribed", ONE + "export OMP_NUM_THREADS=32\nsrun -n 1 -c 1 dask scheduler &\nsrun -n 1 -c 32 ./a.out\n", 0, ""),
]  # fmt: skip
SECOND_LOOK: list[tuple[str, str, int, str]] = [
    ("unset-variable", ONE + "#export ROCPROF=\"$ROCM_PATH/bin/rocprof -d results\"\nsrun $ROCPROF ./a.out\n", 0, ""),
    ("unset-variable", ONE + '# SHOT="--one-shot"\nmore=" ${SHOT} --save"\npython x.py $more\n', 0, ""),
    ("unset-variable", ONE + "suffix=$1\ncat <<END > a.sh\n# python old.py ${isuffix}\npython new.py $suffix\nEND\nbash a.sh\n", 0, ""),
    ("secret-in-script", ONE + "ID=0\nARGS=(\n  --rm\n  --net=host\n  -u $ID:$ID\n)\ndocker run ${ARGS[@]} img\n", 0, ""),
    ("idle-nodes", TWO + "python setup.py install\npython x.py\n", 8, "warning"),
    ("idle-nodes", TWO + "singularity exec --nv a.sif mpirun -np $SLURM_NTASKS -H $LIST -x A=1 python x.py\n", 0, ""),
    ("idle-nodes", TWO + "python run_one.py --num_gpus=16 --input a\n", 0, ""),
    ("idle-nodes", "#!/bin/bash\n#PBS -l nodes=03\npython x.py\n", 0, ""),
    ("idle-nodes", "#!/bin/bash\n#PBS -l nodes=3\npython x.py\n", 3, "warning"),
    ("fixed-name-in-tmp", SHARED + "wget --load-cookies /tmp/cookies.txt a && rm -rf /tmp/cookies.txt\n", 5, "note"),
    ("fixed-name-in-tmp", SHARED + "rm -rf /tmp/.nv\n", 5, "warning"),
    ("not-exported", NONE + "MASTER_ADDR=$(hostname)\nMASTER_PORT=6000\nWORLD_SIZE=1\nsrun ./a.out\n", 0, ""),
    ("unterminated", "#!/bin/bash\n<% if mail == 'yes' -%>\n#SBATCH --mail-type END\n<% end -%>\npython x.py\n", 0, ""),
    ("unterminated", "#!/bin/bash\n./caffe train --solver=./%(fold)d-solver.prototxt\n", 0, ""),
    ("idle-gpus", EIGHT + "singularity exec --nv a.sif mpirun -np $SLURM_NTASKS -H $LIST python x.py\n", 0, ""),
    ("unterminated", '#!/bin/bash\npython $$DIR/a.py --dir $$(pwd) --set "a"\n', 0, ""),
    ("unset-variable", ONE + "module load nvshmem\n# NVSHMEM_HOME=/a/b\nexport LD_LIBRARY_PATH=$NVSHMEM_HOME/lib\n", 0, ""),
    ("unset-variable", ONE + "# CORPUS_HOME=/a/b\npython x.py --data $CORPUS_HOME\n", 8, "warning"),
    ("idle-gpus", ONE.replace("node=1", "node=4") + "srun hostname\npython -u x.py\n", 8, "warning"),
    ("idle-gpus", ONE.replace("node=1", "node=4") + "srun dask-worker $HOST:80 &\npython -u x.py $HOST:80\n", 8, "note"),
    ("variable-in-directive", "#!/bin/bash\n#SBATCH -p ${PARTITION}\n${GIVEN_NODE}\npython x.py\n", 2, "note"),
    ("variable-in-directive", "#!/bin/bash\n#SBATCH -p $partition\npython x.py --gpus £gpus\n", 2, "note"),
    ("variable-in-directive", "#!/bin/bash\n#SBATCH -p $partition\npython x.py\n", 2, "error"),
    ("variable-in-directive", '#!/bin/bash\nsbatch <<END\n#!/bin/bash\n#SBATCH -c $([[ "$A" == b ]] && echo 2 || echo 1)\nls\nEND\n', 0, ""),
    ("directive-not-read", '#!/bin/bash\nsbatch <<END\n#!/bin/bash\n#SBATCH -c $([[ "$A" == b ]] && echo 2 || echo 1)\nls\nEND\n', 0, ""),
    ("variable-in-directive", "#!/bin/bash\nsbatch <<'END'\n#!/bin/bash\n#SBATCH -c $(nproc)\nls\nEND\n", 4, "error"),
    ("unset-variable", ONE + "BSTATE_ARGS=--a\nw_init $BSTATE_ARGS $TSTATE_ARGS\n", 0, ""),
    ("unset-variable", ONE + "BSTATE_DIR=a\npython x.py --in $BSTATE_DIR --out $TSTATE_DIR\n", 8, "warning"),
    ("missing-colon", ONE + 'export PATH="/a/bin:£PATH"\nrm -f a\n', 0, ""),
    ("idle-gpus", EIGHT.replace("nodes=2", "nodes=1") + "PY=/a/b/python3\n\nCUDA_VISIBLE_DEVICES=0 $PY x.py\n", 9, "warning"),
    ("idle-nodes", TWO + "PY=/a/b/python3\n\n$PY x.py\n", 9, "warning"),
    ("idle-gpus", EIGHT.replace("nodes=2", "nodes=1") + "source ./start_api.sh\nCUDA_VISIBLE_DEVICES=2,3 python x.py\n", 0, ""),
    ("idle-gpus", ONE.replace("node=1", "node=4") + "python -u x.py smartsim.run_command=srun\n", 7, "note"),
    ("idle-nodes", TWO + "python x.py smartsim.launcher=\"slurm\"\n", 0, ""),
    ("idle-nodes", TWO + "python x.py launcher=pytorch\n", 7, "warning"),
    ("no-shebang", '{% extends "base.sh" %}\n#!/bin/bash\n#SBATCH -N 1\npython x.py\n', 0, ""),
]  # fmt: skip
PRECISION_CASES = [*VARIABLES, *DIRECTIVES, *LINES, *STEPS, *SECOND_LOOK]
