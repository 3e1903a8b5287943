"""Cases about log folders, waits for launchers, and resources: the rule, the script, the line, the severity; line 0 for none."""

from __future__ import annotations

from tests.lint.cases import TWO

LOGS = "#!/bin/bash\n#SBATCH --output=logs/%j.out\n"
FOLDERS: list[tuple[str, str, int, str]] = [
    ("output-folder", LOGS + "mkdir -p logs/runs checkpoints\n", 2, "warning"),
    ("output-folder", LOGS + "# before sbatch: mkdir -p logs\nmkdir -p logs\n", 2, "note"),
    ("output-folder", LOGS + '[ -z "$SLURM_JOB_ID" ] && mkdir -p logs && sbatch "$0" && exit\n', 2, "note"),
    ("output-folder", LOGS.replace("logs", "/big/logs") + "mkdir -p /big/logs\n", 2, "warning"),
    ("no-shebang", "# A comment.\n\n#!/bin/bash\n#SBATCH --nodes=1\nls\n", 3, "error"),
    ("no-shebang", "job.sh\n#!/bin/bash\n#SBATCH --nodes=1\nls\n", 1, "error"),
    ("no-shebang", "# A comment.\n#SBATCH --nodes=1\nls\n", 1, "error"),
]

RANK = "torchrun --nnodes=2 --nproc_per_node=4 --node_rank=$i --master_addr=$M --master_port=29501 x.py"
EACH = "for i in 0 1; do\n  {} &\ndone\n"
SRUN = EACH.format("srun -N1 -n1 -w ${hosts[i]} " + RANK)
WAIT = TWO + SRUN
LOCAL = "#!/bin/bash\n" + EACH.format("ssh ${hosts[i]} " + RANK) + "wait\n"
WAITS: list[tuple[str, str, int, str]] = [
    ("exit-code-lost", WAIT + "wait\necho done\n", 10, "warning"),
    ("exit-code-lost", TWO + EACH.format("ssh ${hosts[i]} " + f"'{RANK}'") + "wait\n", 10, "warning"),
    ("exit-code-lost", TWO + f'c="{RANK}"\n' + EACH.format("eval $c") + "wait\n", 11, "warning"),
    ("exit-code-lost", WAIT + "wait\npython average.py || exit 1\n", 0, ""),
    ("exit-code-lost", WAIT + 'for p in $(jobs -p); do wait "$p" || exit 1; done\n', 0, ""),
    ("exit-code-lost", WAIT.replace("x.py &", "x.py & pids+=($!)") + 'wait "${pids[@]}"\n', 0, ""),
    ("exit-code-lost", WAIT + "wait -n || exit 1\nwait\n", 0, ""),
    ("exit-code-lost", TWO + EACH.format("srun -N1 -n1 --exact python x.py --seed $i") + "wait\n", 10, "warning"),
    ("exit-code-lost", LOCAL, 5, "note"),  # started at a terminal, perhaps
    ("exit-code-lost", LOCAL.replace("for i", "hosts=($(cat $PBS_NODEFILE))\nfor i"), 6, "warning"),
    ("exit-code-lost", TWO + "srun nvidia-smi -l 60 &\n" + f"srun {RANK}\nwait\n", 0, ""),
    ("endless-wait", TWO + "export MASTER_ADDR=$h\nsrun -n1 vllm serve m &\nwait\n", 9, "warning"),
    ("exit-code-lost", TWO + "export MASTER_ADDR=$h\nsrun -n1 vllm serve m &\nwait\n", 0, ""),
]

PBS = "#!/bin/bash\n#PBS -l nodes=2:ppn=8:gpus=2\ncd $PBS_O_WORKDIR\n"
PRO = "#!/bin/bash\n#PBS -l select=2:ncpus=64:ngpus=4{}\n#PBS -l place=scatter\n"
TORCH = "torchrun --nnodes={} --nproc_per_node=2 --rdzv_backend=c10d --rdzv_id=$PBS_JOBID --rdzv_endpoint=$A:1 x.py\n"
COUNTED = "N=$(cat $PBS_NODEFILE | wc -l)\nmpirun -np 2 --map-by ppr:1:node " + TORCH.format("$N")
LOOP = "for n in $({} $PBS_NODEFILE); do\n  ssh $n " + TORCH.format(2).strip() + " &\ndone\nwait\n"
FILLS = "mpirun -np {} {}" + TORCH.format(2)
SLURM_FILLS = TWO.replace("ntasks-per-node=1", "ntasks-per-node=4")
NODES: list[tuple[str, str, int, str]] = [
    ("node-count", PBS + COUNTED, 4, "error"),
    ("node-count", PBS + COUNTED.replace("cat $PBS_NODEFILE | wc -l", "wc -l < $PBS_NODEFILE"), 4, "error"),
    ("node-count", PBS + COUNTED.replace("cat", "sort -u"), 0, ""),
    ("node-count", PRO.format(":mpiprocs=4") + COUNTED, 4, "error"),
    ("node-count", PRO.format("") + COUNTED, 0, ""),
    ("node-count", PBS + LOOP.format("cat"), 4, "error"),
    ("node-count", PBS + LOOP.format("sort -u"), 0, ""),
    ("node-count", PBS + "# " + LOOP.format("cat"), 0, ""),
    ("several-torchruns", PBS + FILLS.format(2, "-hostfile $PBS_NODEFILE "), 4, "error"),
    ("several-torchruns", PBS + FILLS.format("$PBS_NUM_NODES", ""), 4, "error"),
    ("several-torchruns", PBS + FILLS.format(2, "-hostfile hosts "), 0, ""),
    ("several-torchruns", PBS + FILLS.format(2, "--map-by node "), 0, ""),
    ("several-torchruns", PBS + FILLS.format(2, "-N 1 "), 0, ""),
    ("several-torchruns", PRO.format("") + FILLS.format(2, ""), 0, ""),
    ("several-torchruns", SLURM_FILLS + FILLS.format(2, ""), 7, "error"),
    ("several-torchruns", TWO + FILLS.format(2, ""), 0, ""),
    ("more-ranks-than-gpus", PBS + "torchrun --standalone --nproc_per_node=$PBS_NUM_PPN x.py\n", 4, "error"),
    ("more-ranks-than-gpus", PBS + "n=$((PBS_NP / PBS_NUM_NODES / 4))\ntorchrun --nproc_per_node=$n x.py\n", 0, ""),
]

FIRST = "if [ $SLURM_NODEID -eq 0 ]; then\n  echo $(hostname) > $F\nelse\n  while [ ! -f $F ]; do sleep 1; done\nfi\n"
FILES: list[tuple[str, str, int, str]] = [
    ("fixed-rendezvous-id", "#!/bin/bash\nF=/shared/address\n" + FIRST, 2, "warning"),
    ("fixed-rendezvous-id", "#!/bin/bash\nF=/shared/address.$SLURM_JOB_ID\n" + FIRST, 0, ""),
    ("fixed-rendezvous-id", "#!/bin/bash\nF=/shared/address\nrm -f $F\n" + FIRST, 0, ""),
    ("fixed-rendezvous-id", "#!/bin/bash\nF=/shared/address\n" + FIRST.replace("$(hostname)", "ready"), 0, ""),
]

ALONE = "#!/bin/bash\n#SBATCH --nodes=1\n#SBATCH --gpus-per-node=2\n"
DASK = "#!/bin/bash\n#SBATCH --nodes=2\nF=scheduler.json\n{}srun -n1 dask-scheduler --scheduler-file=$F &\n"
DASK += "while [ ! -f $F ]; do sleep 1; done\nsrun dask-worker --scheduler-file=$F\n"
IDLE = (
    "nodes=($(sinfo -hN --state=idle | awk '{print $1}'))\nsrun -N1 -n1 -w ${nodes[i]} ray start --address=$A --block\n"
)
STEPS: list[tuple[str, str, int, str]] = [
    ("job-inside-job", TWO + "srun --jobid=171866 python x.py\n", 7, "warning"),
    ("job-inside-job", TWO + "srun --jobid=$SLURM_JOB_ID python x.py\n", 0, ""),
    ("job-inside-job", TWO + IDLE, 7, "warning"),
    ("job-inside-job", TWO + "sinfo\n" + IDLE.replace("sinfo -hN --state=idle", "scontrol show hostnames"), 0, ""),
    ("background-not-awaited", ALONE + "srun python a.py & python b.py\n", 4, "error"),
    ("background-not-awaited", ALONE + "srun python a.py & python b.py; wait\n", 0, ""),
    ("background-not-awaited", ALONE + "python a.py && python b.py\n", 0, ""),
    ("fixed-rendezvous-id", DASK.format(""), 3, "warning"),
    ("fixed-rendezvous-id", DASK.format("rm -f $F\n"), 0, ""),
    ("fixed-rendezvous-id", DASK.format("").replace("scheduler.json", "done.json"), 0, ""),
    ("output-folder", LOGS.replace("logs", "%x") + "mkdir -p $SLURM_JOB_NAME\n", 2, "warning"),
    ("idle-gpus", ALONE + "python x.py n_gpus=1 lr=0.1\n", 4, "warning"),
    ("idle-gpus", ALONE + "n=1\npython x.py model.n_gpus=$n\n", 5, "warning"),
    ("idle-gpus", ALONE + "python x.py n_gpus=2\n", 4, "note"),
]
RESOURCE_CASES = [*FOLDERS, *WAITS, *NODES, *FILES, *STEPS]
