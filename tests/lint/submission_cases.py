"""Cases about submitted jobs, cut commands and mounts, and what a script waits for: the rule, the script, the line and the severity; line 0 for none."""

from __future__ import annotations

from tests.lint.cases import ONE, TWO

SUBMIT = "#!/bin/bash\n"
TRAIN = "torchrun --nproc_per_node=4 train.py"
JOB = "#!/bin/bash\n#SBATCH --gres=gpu:4\n"
PBS = "#!/bin/bash\n#PBS -l select=2:ncpus=8:ngpus=4\n"

DEPENDENCIES: list[tuple[str, str, int, str]] = [
    ("dependency", SUBMIT + "J=$(sbatch a.sbatch)\nsbatch --dependency=afterok:$J b.sbatch\n", 3, "warning"),
    ("dependency", SUBMIT + "J=`sbatch a.sbatch`\nsbatch -d afterany:${J} b.sbatch\n", 3, "warning"),
    ("dependency", SUBMIT + "J=$(sbatch --parsable a.sbatch)\nsbatch --dependency=afterok:$J b.sbatch\n", 0, ""),
    ("dependency", SUBMIT + "J=$(sbatch a.sbatch | awk '{print $4}')\nsbatch --dependency=afterok:$J b.sbatch\n", 0, ""),
    ("dependency", SUBMIT + "J=$(sbatch a.sbatch)\nsbatch --dependency=afterok:${J##* } b.sbatch\n", 0, ""),
    ("dependency", SUBMIT + "J=$(sbatch a.sbatch)\nJ=${J##* }\nsbatch --dependency=afterok:$J b.sbatch\n", 0, ""),
    ("dependency", SUBMIT + "J=$(sbatch \\\n --parsable a.sbatch)\nsbatch --dependency=afterok:$J b.sbatch\n", 0, ""),
    ("dependency", SUBMIT + "J=$(sbatch --parsable a.sbatch)\nsbatch --dependency afterok=$J b.sbatch\n", 3, "warning"),
    ("dependency", SUBMIT + "J=$(sbatch --gres=lscratch:9 a.sbatch)\nsbatch --dependency=afterok:$J b.sbatch\n", 0, ""),
    ("option-of-program", SUBMIT + "sbatch train.sbatch --gres=gpu:4 --time=1:00:00\n", 2, "warning"),
    ("option-of-program", SUBMIT + "sbatch train.sh --array=0-3 --partition gpu 7\n", 2, "warning"),
    ("option-of-program", SUBMIT + "sbatch train.sbatch --lr 1e-3 --array float\n", 0, ""),
    ("option-of-program", SUBMIT + "sbatch --gres=gpu:4 train.sbatch --lr 1e-3\n", 0, ""),
    ("option-of-program", SUBMIT + "sbatch run_submit.sh --gres=gpu:4\n", 0, ""),
    ("option-of-program", ONE + "srun python train.py --gpus-per-task=1\n", 7, "warning"),
    ("option-of-program", ONE + "srun --gpus-per-task=1 python train.py --lr 1\n", 0, ""),
    ("unset-variable", SUBMIT + f"sbatch <<'EOF'\n{JOB}{TRAIN} --lr $1\nEOF\n", 5, "warning"),
    ("unset-variable", SUBMIT + f"for lr in 1 2; do\nsbatch <<'EOF'\n{JOB}{TRAIN} --lr $lr\nEOF\ndone\n", 6, "warning"),
    ("unset-variable", SUBMIT + f"for lr in 1 2; do\nexport lr\nsbatch <<'EOF'\n{JOB}{TRAIN} --lr $lr\nEOF\ndone\n", 0, ""),
    ("unset-variable", SUBMIT + f"N=x\nsbatch <<'EOF'\n{JOB}N=y\n{TRAIN} --lr $N\nEOF\n", 0, ""),
    ("expanded-too-early", SUBMIT + f"cat <<EOF > job.sh\n{JOB}V=5\nmodule load rocm/${{V}}\n{TRAIN}\nEOF\n", 6, "error"),
    ("expanded-too-early", SUBMIT + f"V=5\ncat <<EOF > job.sh\n{JOB}module load rocm/${{V}}\n{TRAIN}\nEOF\n", 0, ""),
    ("directive-not-read", "#!/bin/bash\n#SBATCH --nodes=1\nSBATCH --mem=4G\npython x.py\n", 3, "warning"),
]  # fmt: skip
LINES: list[tuple[str, str, int, str]] = [
    ("broken-line", ONE + "python train.py \\\n  mode=a \\\n  run.n=5\nopt.lr=1 \\\nopt.name=adam\n", 9, "error"),
    ("broken-line", ONE + "python train.py mode=a \\\n  data.x=/d\n  +trainer.n=1\n", 8, "error"),
    ("broken-line", ONE + "data-dir=/scratch/x\npython train.py\n", 7, "error"),
    ("broken-line", ONE + "python train.py \\\n  mode=a \\\n  run.n=5 \\\n  opt.lr=1\n", 0, ""),
    ("broken-line", ONE + "data_dir=/scratch/x\nlist[1]=a\nlist+=(b)\npython train.py $data_dir ${list[1]}\n", 0, ""),
    ("value-split", ONE + "srun --container-image=a.sqsh --container-mounts=/a:/a, /b:/b python x.py\n", 7, "error"),
    ("value-split", ONE + "srun --container-mounts=/a:/a /b:/b python x.py\n", 7, "error"),
    ("value-split", ONE + "apptainer exec --nv --bind /a:/a, /b:/b image.sif python x.py\n", 7, "error"),
    ("value-split", ONE + "apptainer exec --nv --bind /a:/a,/b:/b image.sif python x.py\n", 0, ""),
    ("value-split", ONE + "srun --container-mounts=/a:/a /opt/run.sh\n", 0, ""),
    ("never-expanded", ONE + 'echo "$A slots=4\\n$B slots=4" > hosts\ndeepspeed --hostfile hosts x.py\n', 7, "warning"),
    ("never-expanded", ONE + 'echo -e "$A slots=4\\n$B slots=4" > hosts\ndeepspeed --hostfile hosts x.py\n', 0, ""),
    ("never-expanded", ONE + 'echo "one\\ntwo"\npython x.py\n', 0, ""),
    ("never-expanded", ONE + "cat > a.yaml <<'EOF'\nip: $MASTER_ADDR\nEOF\npython x.py\n", 8, "error"),
    ("never-expanded", ONE + "cat > a.yaml <<EOF\nip: $MASTER_ADDR\nEOF\npython x.py\n", 0, ""),
    ("never-expanded", ONE + "cat > a.yaml <<'EOF'\nip: $MASTER_ADDR\nEOF\nenvsubst < a.yaml > b.yaml\n", 0, ""),
    ("never-expanded", ONE + "cat > a.sh <<'EOF'\necho $MASTER_ADDR\nEOF\nbash a.sh\n", 0, ""),
    ("loop-values", ONE + "for d in $A/*/; do\n  b=$(basename $d)\n  python x.py -i $A > $b.log\ndone\n", 7, "error"),
    ("loop-values", ONE + "for s in 10 20; do\n  python x.py > $s.log\ndone\n", 7, "error"),
    ("loop-values", ONE + "for s in 10 20; do\n  python x.py --seed $s > $s.log\ndone\n", 0, ""),
    ("loop-values", ONE + "for s in 10 20; do\n  export SEED=$s\n  python x.py > $s.log\ndone\n", 0, ""),
    ("loop-values", ONE + "for try in 1 2 3; do\n  python x.py > $try.log && break\ndone\n", 0, ""),
]  # fmt: skip
WAITING: list[tuple[str, str, int, str]] = [
    ("background-not-awaited", ONE + "python a.py &\npython b.py &\nwait $!\n", 9, "error"),
    ("background-not-awaited", ONE + "python a.py &\nP=$!\npython b.py &\nwait $!\nwait $P\n", 0, ""),
    ("background-not-awaited", ONE + "python a.py &\nwait $!\n", 0, ""),
    ("background-not-awaited", ONE + "docker run --rm --gpus all -d image python x.py\n", 7, "error"),
    ("background-not-awaited", ONE + "docker run --rm --gpus all image python x.py -d\n", 0, ""),
    ("container-shell-ended", ONE + "conda activate a\nconda deactivate\npython x.py\n", 8, "warning"),
    ("container-shell-ended", ONE + "conda deactivate\nconda activate a\npython x.py\nconda deactivate\n", 0, ""),
    ("container-shell-ended", ONE + "conda activate a\nconda deactivate\nconda activate b\npython x.py\n", 0, ""),
    ("srun-without-command", ONE + "srun bash\npython x.py\n", 7, "error"),
    ("srun-without-command", ONE + "srun bash <<'EOF'\npython x.py\nEOF\n", 0, ""),
    ("unset-variable", TWO + "python x.py --out out_$SLURM_JOB_ID_seed\n", 7, "warning"),
    ("unset-variable", TWO + "python x.py --seed $SGE_TASK_ID\n", 7, "warning"),
    ("unset-variable", PBS + "cd $PBS_O_WORKDIR\npython x.py --nodes $SLURM_NNODES\n", 4, "warning"),
    ("unset-variable", PBS + "cd $PBS_O_WORKDIR\npython x.py --nodes ${SLURM_NNODES:-2}\n", 0, ""),
    ("script-folder", PBS + "python x.py\n", 3, "note"),
    ("script-folder", PBS + "cd $PBS_O_WORKDIR\npython x.py\n", 0, ""),
    ("script-folder", PBS + "#PBS -l wd\npython x.py\n", 0, ""),
    ("exit-zero", ONE + 'if [ "$1" == "-h" ]; then\n  echo "Usage: x"\n  exit 0\nfi\npython x.py\n', 0, ""),
    ("exit-zero", ONE + 'if [ -z "$1" ]; then\n  echo "Usage: x"\n  exit 0\nfi\npython x.py\n', 9, "warning"),
    ("conda-not-set-up", ONE + "module load cray-mpich/8.1 cudatoolkit\nconda activate a\npython x.py\n", 8, "warning"),
    ("conda-not-set-up", ONE + "module load cray-python\nconda activate a\npython x.py\n", 0, ""),
]  # fmt: skip
WRITTEN: list[tuple[str, str, int, str]] = [
    ("mistyped-command", ONE + "python3 python3 train.py\n", 7, "warning"),
    ("mistyped-command", ONE + "python3 python_train.py\n", 0, ""),
    ("mistyped-command", ONE + "singularity exec --nv docker:a/b:1 python x.py\n", 7, "warning"),
    ("mistyped-command", ONE + "singularity exec --nv docker://a/b:1 python x.py\n", 0, ""),
    ("nodes-in-sequence", TWO + 'for r in 0 1; do\n  srun -N 1 -w ${H[$r]} lightning run model --node-rank=$r x.py\ndone\n', 8, "error"),
    ("nodes-in-sequence", TWO + 'for r in 0 1; do\n  srun -N 1 -w ${H[$r]} lightning run model --node-rank=$r x.py &\ndone\nwait\n', 0, ""),
    ("endless-wait", ONE + "dask-scheduler &\npython x.py\nwait\n", 9, "warning"),
    ("expanded-too-early", SUBMIT + 'echo "#!/bin/bash\n#SBATCH -N 1\ncd /x/$SLURM_JOB_ID" > job.sh\nsbatch job.sh\n', 4, "error"),
    ("expanded-too-early", SUBMIT + 'N=4\necho "#!/bin/bash\n#SBATCH -N $N\ncd /x" > job.sh\nsbatch job.sh\n', 0, ""),
    ("unset-variable", SUBMIT + "n=6\necho '#!/bin/bash\nfor ((i=0;i<$n;i++)); do ./x $i; done' > job.sh\nsbatch job.sh\n", 4, "warning"),
    ("unset-variable", SUBMIT + "n=6\necho '#!/bin/bash\nn=3\n./x $n' > job.sh\nsbatch job.sh\n", 0, ""),
    ("unset-variable", SUBMIT + "n=6\ncat > job.sh <<'EOF'\n#!/bin/bash\n./x $n\nEOF\nsbatch job.sh\n", 5, "warning"),
    ("unset-variable", SUBMIT + "n=6\ncat > job.sh <<'EOF'\n#!/bin/bash\n./x $n\nEOF\nsource job.sh\n", 0, ""),
]  # fmt: skip
SUBMISSION_CASES = [*WRITTEN, *DEPENDENCIES, *LINES, *WAITING]
