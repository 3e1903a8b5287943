"""Cases about other batch systems, files of several tasks, activation and secrets: the rule, the script, the line and the severity; line 0 for none."""

from __future__ import annotations

from tests.lint.cases import ONE, TWO

PBS = "#!/bin/bash\n#PBS -N a\n#PBS -l select=1:ncpus=8:ngpus=1\n"  # 3 lines
GO = "cd $PBS_O_WORKDIR\n"
TORQUE = "#!/bin/bash\n#PBS -l nodes=1:ppn=8:gpus=1\n"
ARRAY = "#!/bin/bash\n#SBATCH --array=0-9\n#SBATCH --gres=gpu:1\n"  # 3 lines
FOUR = ONE.replace("node=1\n", "node=4\n", 1)  # tasks per node; 6 lines
BATCH = "#!/bin/bash\n#SBATCH --nodes=1\n#SBATCH --gres=gpu:1\n"


def pbs_line(text: str) -> str:
    return f"#!/bin/bash\n#PBS {text}\n{GO}python x.py\n"


LINES: list[tuple[str, str, int, str]] = [
    *(("directive-refused", pbs_line(text), 2, "error") for text in (
        "--job-name=a", "-l select=2: ncpus=8:ngpus=4", "-l select=2,ncpus=8,ngpus=4", "-l walltime=24h", "-l walltime = 24:00:00",
        "-l walltime:24:00:00", "-l nodes=2,ppn=8", "-l node=2:ppn=8",
    )),
    ("directive-refused", PBS.replace("-N a", "-l nodes=1:ppn=8") + GO + "python x.py\n", 2, "error"),
    *(("directive-refused", pbs_line(text), 0, "") for text in (
        "-l select=2:ncpus=8:ngpus=4", "-l select=1:ncpus=2+4:ncpus=1", "-l walltime=24:00:00", "-l nodes=2:ppn=8,walltime=1:00:00", "--group=a",
        "-l select=2:ncpus=8:mem=4gb -l walltime=1:00:00", "-l ncpus=12,mem=4gb,ngpus=1", "-l walltime=<time>", "-l select={n}:ncpus=8",
    )),
    ("directive-refused", "#!/bin/bash\n#SBATCH --partition=gpu,...\nls\n", 2, "error"),
    ("directive-refused", "#!/bin/bash\n#SBATCH --partition=gpu,long\nls\n", 0, ""),
    ("variable-in-directive", "#!/bin/bash\n#PBS -N $NAME\n" + GO + "python x.py\n", 2, "error"),
    ("variable-in-directive", "#!/bin/bash\n#PBS -l select=${N}:ncpus=4\nN=4\n" + GO + "python x.py $N\n", 2, "error"),
    ("variable-in-directive", "#!/bin/bash\n#PBS -l select=${n}:ncpus=4\n#PBS -o $HOME/a\n" + GO + "python x.py\n", 0, ""),
    ("unset-variable", PBS + "cd $PBS_O_WORKIDR\npython x.py\n", 4, "warning"),
    ("unset-variable", PBS + GO + "python x.py --out $PBS_JOB_ID\n", 5, "warning"),
    ("unset-variable", PBS + "#PBS -J 0-9\n" + GO + "python x.py $PBS_ARRAYID\n", 6, "warning"),
    ("unset-variable", TORQUE + "#PBS -t 0-9\n" + GO + "python x.py $PBS_ARRAY_INDEX\n", 5, "warning"),
    ("unset-variable", PBS + "#PBS -J 0-9\n" + GO + "python x.py $PBS_ARRAY_INDEX $PBS_JOBID $PBS_JOBFS\n", 0, ""),
    ("unset-variable", BATCH + "export OMP_NUM_THREADS=$CPUS_ON_NODE\npython x.py\n", 4, "warning"),
    ("unset-variable", BATCH + "python x.py --job $JOB_ID\n", 4, "warning"),
    ("unset-variable", BATCH + "module load nvshmem\n# NVSHMEM_HOME=/a\npython x.py $NVSHMEM_HOME\n", 0, ""),
    ("unset-variable", BATCH + "source a.sh\nexport reference_file_path=$reference_file_path_subs\npython x.py $reference_file_path\n", 0, ""),
    ("output-folder", BATCH.replace("--nodes=1", "--array=0-2 --output=sims/RT-%a/x.log") + "python x.py\n", 2, "note"),
    ("output-folder", BATCH.replace("--nodes=1", "--array=0-2 --output=sims/RT-%A/x.log") + "python x.py\n", 2, "warning"),
    ("error-handling-off", BATCH + "NCCL_ASYNC_ERROR_HANDLING=0 python x.py\n", 4, "note"),
    ("error-handling-off", ONE + "NCCL_ASYNC_ERROR_HANDLING=0 torchrun x.py\n", 7, "warning"),
    ("unset-variable", BATCH + "CPUS_ON_NODE=$(nproc)\npython x.py $CPUS_ON_NODE\n", 0, ""),
    ("unset-variable", BATCH + "#$ -N a\npython x.py $JOB_ID\n", 0, ""),
    ("unset-variable", PBS + GO + "# srun is for Slurm\nif [ ! -f $SLURM_JOB_NAME.tpr ]; then\n  gmx grompp -o $SLURM_JOB_NAME.tpr\nfi\n", 6, "warning"),
    ("unset-variable", PBS + GO + "if [ -n \"$SLURM_JOB_ID\" ]; then\n  cd $SLURM_JOB_ID\nfi\npython x.py\n", 0, ""),
    ("unset-variable", PBS + GO + "python x.py ${SLURM_JOB_NAME:-a}\n", 0, ""),
    ("unset-variable", PBS + GO + "srun python x.py $SLURM_JOB_NAME\n", 0, ""),
    ("one-log-for-array", PBS + "#PBS -J 0-9\n#PBS -o log/a.txt\n" + GO + "python x.py $PBS_ARRAY_INDEX\n", 5, "warning"),
    ("one-log-for-array", PBS + "#PBS -J 0-9\n#PBS -o log/^array_index^.txt\n#PBS -e log/\n" + GO + "python x.py $PBS_ARRAY_INDEX\n", 0, ""),
    ("one-log-for-array", TORQUE + "#PBS -t 0-9\n#PBS -o a.txt\n" + GO + "python x.py $PBS_ARRAYID\n", 0, ""),  # Torque adds the number
    ("one-log-for-array", PBS + "#PBS -o a.txt\n" + GO + "python x.py\n", 0, ""),
    ("master-address", PBS.replace("=1:", "=2:") + GO + "MASTER_ADDR=localhost mpiexec -n 8 -ppn 4 python x.py\n", 5, "error"),
    ("master-address", PBS + GO + "MASTER_ADDR=localhost mpiexec -n 4 -ppn 4 python x.py\n", 0, ""),
    ("directive-not-read", "#!/bin/bash\n# PBS -l select=1:ngpus=1\n" + GO + "python x.py\n", 2, "warning"),
    ("directive-not-read", PBS + "# PBS -l walltime=1:00:00\n" + GO + "python x.py\n", 0, ""),
    ("mistyped-command", PBS.replace("=1:", "=2:") + GO + "srun python x.py\n", 5, "warning"),
    ("mistyped-command", PBS + GO + "mpiexec -n 1 python x.py\n", 0, ""),
    ("array-not-used", PBS + "#PBS -J 1-10\n" + GO + "python x.py --seed 1\n", 4, "warning"),
    ("array-not-used", PBS + "#PBS -J 1-10\n" + GO + "python x.py --seed $PBS_ARRAY_INDEX\n", 0, ""),
    ("idle-nodes", "#!/bin/bash\n#PBS -l nodes=4:ppn=32\n" + GO + "mpirun -np 8 -npernode 4 ./a.out\n", 4, "warning"),
    ("idle-nodes", "#!/bin/bash\n#PBS -l nodes=4:ppn=32\n" + GO + "mpirun -np 16 -npernode 4 ./a.out\n", 0, ""),
]  # fmt: skip
FILES: list[tuple[str, str, int, str]] = [
    ("one-log-for-array", ARRAY + "python x.py $SLURM_ARRAY_TASK_ID > x.log 2>&1\n", 4, "warning"),
    ("one-log-for-array", ARRAY + "python x.py $SLURM_ARRAY_TASK_ID | tee x.log\n", 4, "warning"),
    ("one-log-for-array", ARRAY + "python x.py $SLURM_ARRAY_TASK_ID > x.$SLURM_ARRAY_TASK_ID.log 2>&1\n", 0, ""),
    ("one-log-for-array", ARRAY + "cd run_$SLURM_ARRAY_TASK_ID\npython x.py > x.log\n", 0, ""),
    ("one-log-for-array", ARRAY + "D=run_$SLURM_ARRAY_TASK_ID\ncd $D\npython x.py > x.log\n", 0, ""),
    ("one-log-for-array", ARRAY + "python x.py >> x.log\npython y.py > /tmp/x.log\n", 0, ""),
    ("deletes-too-much", ARRAY + "rm -rf results\npython x.py --out results/$SLURM_ARRAY_TASK_ID\n", 4, "warning"),
    ("deletes-too-much", ARRAY + "rm -rf results/$SLURM_ARRAY_TASK_ID\npython x.py --out results/$SLURM_ARRAY_TASK_ID\n", 0, ""),
    ("deletes-too-much", BATCH + "rm -rf results\npython x.py --out results/a\n", 0, ""),
    ("prepared-by-all-tasks", FOUR + 'srun bash -c "pip install -r r.txt && python x.py"\n', 7, "warning"),
    ("prepared-by-all-tasks", FOUR + "srun tar -xf a.tar -C $TMPDIR\nsrun python x.py\n", 7, "warning"),
    ("prepared-by-all-tasks", FOUR + "srun --ntasks-per-node=1 -n1 pip install a\ntar -xf a.tar\nsrun python x.py\n", 0, ""),
    ("prepared-by-all-tasks", FOUR + "srun bash -c 'if [ $SLURM_LOCALID = 0 ]; then tar -xf a.tar; fi; python x.py'\n", 0, ""),
    ("prepared-by-all-tasks", ARRAY + "conda create -y -n a python\npython x.py $SLURM_ARRAY_TASK_ID\n", 4, "warning"),
    ("prepared-by-all-tasks", BATCH + "conda create -y -n a python\n", 0, ""),
    ("folder-not-copied", BATCH + "tar -xf a.tar $TMPDIR/data\n", 4, "warning"),
    ("folder-not-copied", BATCH + "tar -xfz a.tar.gz\n", 4, "warning"),
    ("folder-not-copied", BATCH + "tar -xzf a.tar.gz -C $TMPDIR\ntar xf a.tar data/train\ntar -C $TMPDIR -xf a.tar\n", 0, ""),
    ("results-left-on-node", BATCH + "O=/tmp/$SLURM_JOB_ID/out\npython x.py --output_dir $O\nrm -rf $O\n", 5, "warning"),
    ("results-left-on-node", BATCH + "O=/tmp/$SLURM_JOB_ID/out\npython x.py --output_dir $O\ncp -r $O/last.pt $HOME\nrm -rf $O\n", 0, ""),
    ("results-left-on-node", BATCH + "cd $SLURM_TMPDIR\npython x.py --output_dir $SLURM_TMPDIR/out\ncp -r out $HOME\n", 0, ""),
    ("results-left-on-node", BATCH + "python x.py --cache_dir $SLURM_TMPDIR/out --output_dir out\n", 0, ""),
    ("node-local-file", TWO + "cp -r $SLURM_SUBMIT_DIR/* $TMPDIR\ncd $TMPDIR\nsrun python x.py\n", 8, "error"),
    ("node-local-file", TWO + "srun cp -r $SLURM_SUBMIT_DIR/x.py $TMPDIR\ncd $TMPDIR\nsrun python x.py\n", 0, ""),
    ("node-local-file", TWO + "cd $TMPDIR\ncd $SLURM_SUBMIT_DIR\nsrun python x.py\n", 0, ""),
    ("out-of-place", BATCH + "cd code\npython a.py\ncd code\npython b.py\n", 6, "error"),
    ("out-of-place", BATCH + "cd code\npython a.py\ncd ..\ncd code\npython b.py\n(cd a; ls)\n(cd a; ls)\n", 0, ""),
]  # fmt: skip
ENVIRONMENTS: list[tuple[str, str, int, str]] = [
    *(("mistyped-command", BATCH + f"{text}\npython x.py\n", 4, "warning") for text in (
        "source ~/venv/bin", "source ~/venv/", "source ~/venv/bin/activte", "source ~/venv/bin/activate.fish", "source venv/Scripts/activate",
        "python venv/bin/activate", "source conda activate x", "conda source activate x", "conda activate ~/envs/a/bin/activate", "source ~.bashrc",
        "run -n 1 -- ./a.out", "srn --ntasks=2 ./a.out", "module load cuda/11.7.", "module load gcc, cuda", "srun--ntasks=4 ./a.out",
    )),
    *(("mistyped-command", BATCH + f"{text}\npython x.py\n", 0, "") for text in (
        "module load cuda/11.7 foss-2022a/",
        "source ~/venv/bin/activate", "source ~/miniconda3/bin/activate x", "source ~/spack/share/activate-env", ". /opt/rh/enable",
        "jsrun -n 1 ./a.out", "run() { srun \"$@\"; }\nrun -n 1 ./a.out",
    )),
    ("missing-colon", BATCH + "export PATH=/opt/cuda/bin\nmkdir a\n", 4, "error"),
    ("missing-colon", BATCH + "export PYTHONPATH=/a/b,/c/d\n", 4, "error"),
    ("missing-colon", BATCH + "export LD_LIBRARY_PATH=LD_LIBRARY_PATH:/a\n", 4, "error"),
    ("missing-colon", BATCH + "export PATH=/opt/cuda/bin:$PATH\nexport PATH=/a/bin:/usr/bin:/bin\nmkdir a\n", 0, ""),
    ("container-shell-ended", BATCH + "module load cuda\nmodule purge\npython x.py\n", 5, "warning"),
    ("container-shell-ended", BATCH + "module load a\nmodule purge\nmodule load cuda\npython x.py\n", 0, ""),
    ("container-shell-ended", BATCH + "module load a\nmodule purge\nsource env.sh\npython x.py\n", 0, ""),
    ("no-effect", BATCH + "python x.py\nexport OMP_NUM_THREADS=8\n", 5, "warning"),
    ("no-effect", BATCH + "python x.py\nexport OMP_NUM_THREADS=8\n./b.out\n", 0, ""),
    ("typographic-character", BATCH + "srun \u2013n 4 ./a.out\n", 4, "error"),
    ("value-split", BATCH + "export A=one two\npython x.py\n", 4, "error"),
    ("value-split", BATCH + "two=2\nexport A=one two\npython x.py $two\n", 0, ""),
]  # fmt: skip
HEX = "4f1c2a9be07d35864f1c2a9be07d35864f1c2a9b"
HF = "hf_" + "QwErTyUiOpAsDfGhJkLzXcVbNmQwErTyUi"
TABS = "#!/bin/bash\nsbatch <<- EOF\n\t#!/bin/bash\n\t#SBATCH --nodes=6\n\tsrun --nodes=3 python x.py\n\tEOF\n"
EIGHT = BATCH.replace("gpu:1", "gpu:8\n#SBATCH --ntasks-per-node=8")  # 4 lines
LATE: list[tuple[str, str, int, str]] = [
    ("signal-not-trapped", BATCH + "python x.py\ntrap 'cp -r out $HOME' EXIT\ntrap 'echo no' TERM\n", 6, "warning"),
    ("signal-not-trapped", BATCH + "trap 'echo no' TERM\npython x.py\ntrap - TERM\n", 0, ""),
    ("signal-not-trapped", BATCH + "python x.py\ntrap 'echo no' TERM\n./b.out\n", 0, ""),
    ("signal-not-trapped", BATCH + "P=/a/bin/python\n$P x.py\ntrap 'echo no' TERM\n$P y.py\n", 0, ""),
    ("signal-not-trapped", BATCH + "python x.py &\ntrap 'kill $!' TERM\nwait\n", 0, ""),
    ("threads-oversubscribed", EIGHT + "export OMP_NUM_THREADS=$SLURM_CPUS_ON_NODE\nsrun python x.py\n", 5, "warning"),
    ("threads-oversubscribed", EIGHT + "export OMP_NUM_THREADS=$(nproc)\nsrun -n1 python x.py\n", 0, ""),
    ("idle-gpus", BATCH.replace("gpu:1", "gpu:2") + "srun -n1 python single_gpu_trainer.py --lr 1\n", 4, "warning"),
    ("idle-gpus", BATCH + "python single_gpu_trainer.py --lr 1\n", 0, ""),
]
DOCUMENTS: list[tuple[str, str, int, str]] = [
    ("idle-nodes", TABS, 5, "warning"),
    ("idle-nodes", TABS.replace("<<-", "<<").replace("\t", ""), 5, "warning"),
    ("idle-nodes", TABS.replace("--nodes=6", "--nodes=3"), 0, ""),
    ("no-shebang", TABS, 0, ""),
    (
        "endless-wait",
        BATCH
        + "(while true; do\n  srun ./work.sh\n  sleep 60\ndone) &\nwhile true; do\n  srun ./work.sh\ndone &\nwait\n",
        0,
        "",
    ),
    ("endless-wait", BATCH + "python x.py &\nwhile true; do\n  nvidia-smi\n  sleep 60\ndone &\nwait\n", 9, "warning"),
    ("directive-not-read", TABS, 0, ""),
]
SECRETS: list[tuple[str, str, int, str]] = [
    ("secret-in-script", BATCH + f"python - <<P\nimport wandb\nwandb.login(key='{HEX}')\nP\n", 6, "warning"),
    ("secret-in-script", BATCH + f"cat > ~/.netrc <<P\nmachine api.wandb.ai\n  login user\n  password {HEX}\nP\n", 7, "warning"),
    ("secret-in-script", BATCH + f"# wandb key: {HEX}\n", 4, "warning"),
    ("secret-in-script", BATCH + f"python -c \"from a import F; F.save_token('{HF}')\"\n", 4, "warning"),
    ("secret-in-script", BATCH + "docker login -u me -p Hunter22 r.org\n", 4, "warning"),
    ("secret-in-script", BATCH + "mysql -u me -pHunter22 db\n", 4, "warning"),
    ("secret-in-script", BATCH + "export SSHPASS=Hunter22\nsshpass -e ssh a\n", 4, "warning"),
    ("secret-in-script", BATCH + f"aws configure set aws_secret_access_key {HEX}\n", 4, "warning"),
    ("secret-in-script", BATCH + f"git checkout {HEX}\npip install git+https://a.org/wandb@{HEX}\n", 0, ""),
    ("secret-in-script", BATCH + "PASS='<DOCKER_PASSWORD>'\ndocker login -u me -p $PASS r.org\nmysql -p db\nwandb.login(key)\ndocker run -p 80:80 a\n", 0, ""),
]  # fmt: skip
SYSTEM_CASES = [*LINES, *FILES, *ENVIRONMENTS, *DOCUMENTS, *LATE, *SECRETS]
