"""Cases about counts of nodes, tasks, GPUs and slots, refused requests, and visible GPUs: the rule, the script, the line and the severity; line 0 for none."""

from __future__ import annotations

from tests.lint.cases import ONE, TWO

EIGHT = TWO.replace("--ntasks-per-node=1", "--ntasks-per-node=4")
PBS = "#!/bin/bash\n#PBS -l select={}:ncpus=32:ngpus=4\n"
LSF = "#!/bin/bash\n#BSUB -nnodes 4\n"
SLURM = "#!/bin/bash\n#SBATCH --time=1-0\n"
LOCAL = "srun bash -c 'python x.py {}'\n"
PAIR = "python train.py --seed 1 &\npython train.py --seed 2 &\nwait\n"


def asks(*options: str, system: str = "SBATCH") -> str:
    """A script with these options below the first line."""
    return "#!/bin/bash\n" + "".join(f"#{system} {option}\n" for option in options)


NAMED: list[tuple[str, str, int, str]] = [
    ("named-nodes", asks("-N 2", "-w gpu[01-03]") + "srun python x.py\n", 3, "error"),
    ("named-nodes", asks("--nodes=1", "--nodelist=a1,b-2") + "python x.py\n", 3, "error"),
    ("named-nodes", asks("--nodes=1-2", "--nodelist=a[1,3-4]") + "python x.py\n", 3, "error"),
    ("named-nodes", asks("-n 1", "-w a,b") + "python x.py\n", 3, "warning"),
    ("named-nodes", asks("-N 2", "-w a,b", "-x c,b") + "srun python x.py\n", 3, "error"),
    ("named-nodes", asks("-N 2", "-w gpu[01-02]", "-x gpu03") + "srun python x.py\n", 0, ""),
    ("named-nodes", asks("-N 4", "-w gpu[01-03]") + "srun python x.py\n", 0, ""),
    ("named-nodes", asks("-w a,b,c") + "srun python x.py\n", 0, ""),
    ("named-nodes", asks("-N 2", "-w a[1,1],a2") + "srun python x.py\n", 0, ""),
    ("named-nodes", asks("-N 1", "-w $HOSTS") + "srun python x.py\n", 0, ""),
]
TASKS: list[tuple[str, str, int, str]] = [
    ("tasks-contradict", asks("-n 1", "-N 1", "--ntasks-per-node=2") + "srun python x.py\n", 2, "warning"),
    ("tasks-contradict", asks("-N 2", "--tasks-per-node 4", "--ntasks=4") + "srun python x.py\n", 4, "warning"),
    ("tasks-contradict", asks("-N 2", "--ntasks-per-node=4", "-n 16") + "srun python x.py\n", 4, "error"),
    ("tasks-contradict", asks("-N 1", "--ntasks-per-node=4", "-n 16") + "python x.py\n", 4, "error"),
    ("tasks-contradict", EIGHT + "srun -n 1 --ntasks-per-node=4 python x.py\n", 7, "warning"),
    ("tasks-contradict", asks("-n 8", "--gpus-per-task=1", "--gpus=4") + "srun python x.py\n", 3, "error"),
    (
        "tasks-contradict",
        asks("-N 2", "--ntasks-per-node=8", "--gpus-per-task=1", "--gres=gpu:a100:4") + "srun python x.py\n",
        4,
        "error",
    ),
    (
        "tasks-contradict",
        asks("-n 8", "-N 2", "--ntasks-per-node=4", "--gpus-per-task=1", "--gpus=8") + "srun python x.py\n",
        0,
        "",
    ),
    (
        "tasks-contradict",
        asks("-n 1", "-N 1", "--ntasks-per-node=2") + "torchrun --nproc_per_node=2 x.py\n",
        0,
        "",
    ),  # only CPUs
    ("tasks-contradict", asks("-n 4", "--ntasks-per-node=8") + "srun python x.py\n", 0, ""),  # at most eight on a node
    ("tasks-contradict", asks("-n 1", "-N 1", "--ntasks-per-node=2") + "srun -n 2 python x.py\n", 0, ""),
    ("tasks-contradict", asks("-N 1-2", "-n 4", "--ntasks-per-node=4") + "srun python x.py\n", 0, ""),
    ("tasks-contradict", EIGHT + "srun -n 8 --ntasks-per-node=4 python x.py\n", 0, ""),
    ("tasks-contradict", asks("-N 1", "-n 2", "--gpus-per-task=1", "--gres=gpu:4") + "srun python x.py\n", 4, "error"),
    ("tasks-contradict", asks("-N 1", "-n 2", "--gpus-per-task=2", "--gres=gpu:4") + "srun python x.py\n", 0, ""),
    ("tasks-contradict", asks("-N 2", "-n 8", "--gpus-per-task=1", "--gres=gpu:8") + "srun python x.py\n", 0, ""),
    ("steps-wait", ONE + "srun -n1 python a.py &\nsrun -n1 python b.py &\nwait\n", 8, "warning"),
    ("steps-wait", ONE + "srun -n1 --exact ./server &\nsleep 9\nsrun -n1 python b.py\n", 9, "warning"),
    ("steps-wait", ONE + "for i in 1 2 3; do\n  srun -n1 -c8 python a.py $i &\ndone\nwait\n", 8, "warning"),
    (
        "steps-wait",
        ONE + "srun -n1 --exact --gpus=1 python a.py &\nsrun -n1 --exact --gpus=1 python b.py &\nwait\n",
        0,
        "",
    ),
    ("steps-wait", ONE + "srun --overlap python a.py &\nsrun --overlap python b.py &\nwait\n", 0, ""),
    ("steps-wait", ONE + "srun python a.py &\nwait\nsrun python b.py\n", 0, ""),
    ("steps-wait", ONE + "srun python a.py &\nwait\n", 0, ""),
    ("steps-wait", TWO + "srun -N1 -n1 python a.py &\nsrun -N1 -n1 python b.py &\nwait\n", 0, ""),
    (
        "steps-wait",
        asks("-n 2", "-N 1", "--gpus-per-task=1")
        + "srun -n1 --exact python a.py &\nsrun -n1 --exact python b.py &\nwait\n",
        0,
        "",
    ),
    ("steps-wait", ONE + "module load slurm/20.02\nsrun -n1 python a.py &\nsrun -n1 python b.py &\nwait\n", 0, ""),
    ("steps-wait", asks("-N 1", "-n 2") + "srun -n1 python a.py &\nsrun -n1 python b.py &\nwait\n", 0, ""),
    ("directive-not-read", "#!/bin/bash\n#sbatch --nodes=1\n#SBATCH -n 8\nsrun python x.py\n", 2, "warning"),
    ("directive-not-read", "#!/bin/bash\n#sbatch --nodes=1\n#SBATCH -n 1\nsrun python x.py\n", 2, "note"),
    ("one-log-for-array", asks("--array=0-4%1", "--output=x.out") + "python x.py $SLURM_ARRAY_TASK_ID\n", 3, "warning"),
    (
        "one-log-for-array",
        asks("--array=0-4%1", "--output=x.out", "--open-mode=append") + "python x.py $SLURM_ARRAY_TASK_ID\n",
        0,
        "",
    ),
]
IDLE: list[tuple[str, str, int, str]] = [
    ("idle-nodes", LSF + "jsrun -n1 -r1 -a1 -c1 -g1 python x.py\n", 3, "warning"),
    ("idle-nodes", LSF + "jsrun --nrs=2 --gpu_per_rs=6 ./train\n", 3, "warning"),
    ("idle-nodes", LSF + "jsrun -n 6 --rs_per_host 6 python x.py\n", 3, "warning"),
    ("idle-nodes", "#!/bin/bash\n#PBS -l nodes=4:ppn=16\naprun -n 1 -N 1 python x.py\n", 3, "warning"),
    ("idle-nodes", "#!/bin/bash\n#COBALT -n 8\naprun -n 8 -N 4 python x.py\n", 3, "warning"),
    ("idle-nodes", PBS.format(4) + "mpiexec -n 2 ./train\n", 3, "warning"),
    ("idle-nodes", LSF + "jsrun -n4 -r1 -a1 -g1 python x.py\n", 0, ""),
    ("idle-nodes", LSF + "jsrun -n $N -r1 python x.py\n", 0, ""),
    ("idle-nodes", LSF + "jsrun -n1 python a.py &\njsrun -n3 python b.py &\nwait\n", 0, ""),
    ("idle-nodes", LSF + "jsrun -n1 hostname\njsrun -n4 -r1 python x.py\n", 0, ""),
    ("idle-nodes", LSF + "jsrun -n1 python x.py\n./others.sh\n", 0, ""),
    ("idle-nodes", "#!/bin/bash\n#COBALT -n 8\naprun -n 8 python x.py\n", 0, ""),
    ("same-gpu", ONE + PAIR, 7, "warning"),
    ("same-gpu", PBS.format(1) + "nohup python train.py --lr 1 > a.log 2>&1 &\nnohup python train.py --lr 2 > b.log 2>&1 &\nwait\n", 3, "warning"),
    ("same-gpu", ONE.replace("gpus-per-node=4", "gpus-per-node=1") + PAIR, 0, ""),
    ("same-gpu", ONE + "export CUDA_VISIBLE_DEVICES=0\n" + PAIR, 0, ""),
    ("same-gpu", ONE + PAIR.replace("--seed", "--gpu"), 0, ""),
    ("same-gpu", ONE + PAIR.replace("--seed", "--config"), 0, ""),
    ("same-gpu", ONE + PAIR.replace("--seed ", ""), 0, ""),  # perhaps the number of the GPU
    ("same-gpu", ONE + "python server.py --seed 1 &\npython train.py --seed 2 &\nwait\n", 0, ""),
    ("same-gpu", ONE + PAIR.replace("python", "srun --exact --gpus=1 -n1 python"), 0, ""),
    ("same-gpu", ONE + "source pool.sh\n" + PAIR, 0, ""),
]  # fmt: skip
TOLD: list[tuple[str, str, int, str]] = [
    ("world-size", EIGHT + "srun python -m x.train --distributed-world-size 2\n", 7, "error"),
    ("world-size", EIGHT + "srun python x.py distributed_training.distributed_world_size=4\n", 7, "error"),
    ("world-size", EIGHT + "srun python x.py --num_nodes 1 --devices 4\n", 7, "error"),
    ("world-size", EIGHT + "srun python x.py trainer.num_nodes=4 trainer.devices=4\n", 7, "error"),
    ("world-size", ONE + "python x.py --multiprocessing-distributed --world-size 4 --rank 0\n", 7, "error"),
    ("world-size", EIGHT + "srun python x.py --distributed-world-size 8\n", 0, ""),
    ("world-size", EIGHT + "srun python x.py --distributed-world-size $N\n", 0, ""),
    ("world-size", EIGHT + "srun python x.py --num_nodes 2 --devices 4\n", 0, ""),
    ("world-size", EIGHT + "srun python x.py --num_nodes 1\n", 0, ""),
    ("world-size", ONE + "python x.py --multiprocessing-distributed --world-size 1 --rank 0\n", 0, ""),
    ("world-size", TWO + "srun python x.py --distributed-world-size 8\n", 0, ""),  # each task starts the ranks of its node
    ("more-ranks-than-gpus", ONE + "python x.py --gpus 8\n", 7, "error"),
    ("more-ranks-than-gpus", ONE + "python x.py trainer.devices=8\n", 7, "error"),
    ("more-ranks-than-gpus", ONE + "python x.py --num-gpus=6\n", 7, "error"),
    ("more-ranks-than-gpus", ONE + "python x.py --gpus 4\n", 0, ""),
    ("more-ranks-than-gpus", ONE + "python x.py --epochs 8\n", 0, ""),
    ("more-ranks-than-gpus", TWO + "python x.py --gpus 8\n", 0, ""),
    ("device-of-one-gpu", asks("-N 1", "--ntasks-per-node=4", "--gpus-per-task=1") + LOCAL.format("--gpu $SLURM_LOCALID"), 5, "error"),
    ("device-of-one-gpu", asks("-N 1", "--ntasks-per-node=4", "--gpus-per-task=a100:1") + LOCAL.format("--device=cuda:$SLURM_LOCALID"), 5, "error"),
    ("device-of-one-gpu", asks("-N 1", "-n 4", "--gres=gpu:4") + "srun --gpu-bind=single:1 bash -c 'python x.py --local_rank ${SLURM_LOCALID}'\n", 5, "error"),
    ("device-of-one-gpu", asks("-n 4", "-N 1", "--gpus-per-task=1") + "srun mace_run_train --distributed\n", 4, "error"),
    ("device-of-one-gpu", asks("-N 1", "--ntasks-per-node=4", "--gpus-per-task=1") + LOCAL.format("--gpu 0"), 0, ""),
    ("device-of-one-gpu", asks("-N 1", "--ntasks-per-node=4", "--gpus-per-task=1") + LOCAL.format("--node $SLURM_LOCALID"), 0, ""),
    ("device-of-one-gpu", asks("-N 1", "--ntasks-per-node=4", "--gres=gpu:4") + LOCAL.format("--gpu $SLURM_LOCALID"), 0, ""),
    ("device-of-one-gpu", asks("-N 1", "--ntasks-per-node=4", "--gpus-per-task=1", "--gpu-bind=none") + LOCAL.format("--gpu $SLURM_LOCALID"), 0, ""),
    ("device-of-one-gpu", asks("-n 4", "-N 1", "--gpus-per-task=1") + "srun mace_run_train\n", 0, ""),
    ("gpu-per-task", asks("-N 1", "--ntasks-per-node=4", "--gpus-per-task=1") + "srun bash -c 'export LOCAL_RANK=$SLURM_LOCALID; python x.py'\n", 4, "note"),
]  # fmt: skip
STARTED: list[tuple[str, str, int, str]] = [
    ("too-few-slots", "#!/bin/bash\nhorovodrun -np 8 -H a:4,b:2 python x.py\n", 2, "error"),
    ("too-few-slots", "#!/bin/bash\nmpirun -np 8 --host a:4,b:2 python x.py\n", 2, "error"),
    ("too-few-slots", "#!/bin/bash\nmpirun -np 8 --host a:4,b:2 --oversubscribe python x.py\n", 0, ""),
    ("too-few-slots", "#!/bin/bash\nmpirun -np 8 --host a:4,b:4 python x.py\nhorovodrun -np 2 -H a,b python x.py\n", 0, ""),
    ("launcher-option", ONE + "deepspeed --include localhost:0,1 --num_gpus 2 x.py\n", 7, "error"),
    ("launcher-option", ONE + "deepspeed --include localhost:0,1 --exclude localhost:2 x.py\n", 7, "error"),
    ("launcher-option", ONE + "deepspeed --include localhost:0,1 x.py --num_gpus 2\n", 0, ""),
    ("visible-devices", "#!/bin/bash\nCUDA_VISIBLE_DEVICES=2,3 deepspeed --num_gpus 2 x.py\n", 2, "warning"),
    ("visible-devices", "#!/bin/bash\nexport CUDA_VISIBLE_DEVICES=3\ndeepspeed --num_gpus=1 x.py\n", 3, "warning"),
    ("visible-devices", "#!/bin/bash\nCUDA_VISIBLE_DEVICES=0,1 deepspeed --num_gpus 2 x.py\nCUDA_VISIBLE_DEVICES=2,3 deepspeed x.py\n", 0, ""),
    ("not-exported", PBS.format(2) + "export MASTER_ADDR=$(head -n1 $PBS_NODEFILE)\nmpirun -np 8 -x PATH -H a:4,b:4 python x.py\n", 3, "warning"),
    ("not-exported", PBS.format(2) + "export MASTER_ADDR=$(head -n1 $PBS_NODEFILE)\nmpirun -np 8 -x PATH -x MASTER_ADDR -H a:4,b:4 python x.py\n", 0, ""),
    ("not-exported", PBS.format(2) + "export MASTER_ADDR=$(head -n1 $PBS_NODEFILE)\nmpirun -np 8 -H a:4,b:4 python x.py\n", 0, ""),  # perhaps not Open MPI
    ("master-address", "#!/bin/bash\naccelerate launch --num_machines 2 --num_processes 8 --machine_rank $1 x.py\n", 2, "warning"),
    ("master-address", "#!/bin/bash\naccelerate launch --num_machines 2 --config_file a.yaml --machine_rank $1 x.py\n", 0, ""),
    ("master-address", "#!/bin/bash\naccelerate launch --num_machines 1 --num_processes 8 x.py\n", 0, ""),
    ("master-address", EIGHT + "srun python x.py --dist-url tcp://127.0.0.1:3000\n", 7, "error"),
    ("master-address", PBS.format(2) + "mpiexec -n 8 python x.py --init_method=tcp://localhost:3000\n", 3, "error"),
    ("master-address", ONE.replace("--ntasks-per-node=1", "--ntasks-per-node=4") + "srun python x.py --dist-url tcp://127.0.0.1:3000\n", 0, ""),
    ("master-address", EIGHT + "srun -N1 -w $n python x.py --dist-url tcp://127.0.0.1:3000\n", 0, ""),
    ("master-address", PBS.format(2) + "export MASTER_ADDR=`hostname`\nmpiexec -n 8 --ppn 4 python x.py\n", 0, ""),
    ("port-per-node", TWO + "MASTER_PORT=$(python -c 'import socket as s; t=s.socket(); t.bind((\"\", 0)); print(t)') srun python x.py\n", 0, ""),
    ("port-per-node", TWO + "P=$RANDOM\nsrun bash -c \"MASTER_PORT=$P python x.py\"\n", 0, ""),
    ("invalid-value", EIGHT + "export MASTER_PORT=$SLURM_JOB_ID\nsrun python x.py\n", 7, "error"),
    ("invalid-value", EIGHT + "srun -n2 torchrun --nnodes=2 --master_port=${PBS_JOBID} x.py\n", 7, "error"),
    ("invalid-value", EIGHT + "export MASTER_PORT=$((10000 + SLURM_JOB_ID % 20000))\nsrun python x.py\n", 0, ""),
    ("blocks-script", TWO + "ray start --head --block\npython x.py\n", 7, "warning"),
    ("blocks-script", TWO + "srun -N1 -n1 ray start --head --block\npython x.py\n", 7, "warning"),
    ("blocks-script", TWO + "ray start --head --block &\npython x.py\n", 0, ""),
    ("ray-step-ends", TWO + "srun -N1 -n1 -w $b ray start --address=$a:6379 &\npython x.py\n", 7, "warning"),
    ("ray-step-ends", TWO + "srun -N1 -n1 -w $b ray start --address=$a:6379 --block &\npython x.py\n", 0, ""),
    ("ray-step-ends", TWO + "srun -N1 -n1 -w $b bash -c 'ray start --address=$a:6379; sleep 1d' &\npython x.py\n", 0, ""),
    ("no-effect", "#!/bin/bash\n# or: CONF=small bsub < job\n#BSUB -J base\nNAME=${LSB_JOBNAME:-${CONF:-base}}\npython x.py $NAME\n", 4, "warning"),
    ("no-effect", "#!/bin/bash\n# or: CONF=small bsub < job\n#BSUB -J base\nNAME=${CONF:-${LSB_JOBNAME:-base}}\npython x.py $NAME\n", 0, ""),
    ("no-effect", "#!/bin/bash\n#BSUB -J base\nNAME=${LSB_JOBNAME:-${CONF:-base}}\npython x.py $NAME\n", 0, ""),
]  # fmt: skip
LINES: list[tuple[str, str, int, str]] = [
    ("time-unit", asks("-l select=1", "-l walltime=48", system="PBS") + "python x.py\n", 3, "warning"),
    ("time-unit", asks("-l select=1,walltime=24:00", system="PBS") + "python x.py\n", 2, "warning"),
    ("time-unit", asks("-gpu num=1", "-W 24", system="BSUB") + "python x.py\n", 3, "warning"),
    ("time-unit", asks("-l select=1", "-l walltime=86400", system="PBS") + "python x.py\n", 0, ""),
    ("time-unit", asks("-l walltime=00:30:00", "-l select=1", system="PBS") + "python x.py\n", 0, ""),
    ("time-unit", asks("-gpu num=1", "-W 24:00", system="BSUB") + "python x.py\n", 0, ""),
    ("directive-refused", asks("-l select=1", "-l walltime=2-00:00:00", system="PBS") + "python x.py\n", 3, "error"),
    ("directive-refused", asks("-gpu num=1", "-W 48:00:00", system="BSUB") + "python x.py\n", 3, "error"),
    ("directive-refused", asks("-gpu num=1", "-W 48:00", system="BSUB") + "python x.py\n", 0, ""),
    ("memory-unit", asks("-l select=1:mem=16", system="PBS") + "python x.py\n", 2, "warning"),
    ("memory-unit", asks("-l select=1:mem=16gb", "-l mem=16GB", system="PBS") + "python x.py\n", 0, ""),
    ("pattern-not-expanded", asks("-l select=1", "-o logs/%j.out", system="PBS") + "python x.py\n", 3, "warning"),
    ("pattern-not-expanded", asks("-gpu num=1", "-o logs/%j.out", system="BSUB") + "python x.py\n", 3, "warning"),
    ("pattern-not-expanded", asks("-gpu num=1", "-o logs/%J_%I.out", system="BSUB") + "python x.py\n", 0, ""),
    ("pattern-not-expanded", asks("-l select=1", "-o logs/", system="PBS") + "python x.py\n", 0, ""),
]
COUNT_CASES = [*NAMED, *TASKS, *IDLE, *TOLD, *STARTED, *LINES]

STEP = "srun python x.py\n"
FIXED_ADDRESS = "export MASTER_ADDR=10.0.0.1\n"

REQUESTS: list[tuple[str, str, int, str]] = [
    ("directive-refused", asks("-N 2", "--gpus-per-node=4", "--gpus=4") + STEP, 4, "error"),
    ("directive-refused", asks("-N 1", "--gres=gpu:a100:4", "-G 2") + STEP, 4, "error"),
    ("directive-refused", asks("-N 1", "--gres=gpu:2", "--gpus-per-node=4") + STEP, 4, "error"),
    ("directive-refused", asks("-N 1", "--ntasks-per-gpu=1", "--ntasks-per-node=4") + STEP, 4, "error"),
    ("directive-refused", asks("-N 1", "-c 8", "--cpus-per-gpu=8") + STEP, 4, "warning"),
    ("directive-refused", asks("-l select=1:ncpus=8:walltime=10:00:00", system="PBS") + "python x.py\n", 2, "error"),
    ("directive-refused", asks("-N 2", "--gpus-per-node=4", "--gpus=8") + STEP, 0, ""),
    ("directive-refused", asks("-N 1", "--gres=gpu:2", "--gpus-per-node=2") + STEP, 0, ""),
    ("directive-refused", asks("-N 1", "--gres=gpu:2", "--gpus-per-node=4") + "python x.py\n", 0, ""),  # no step
    ("directive-refused", asks("-N 1", "--cpus-per-gpu=8", "--ntasks-per-gpu=1") + STEP, 0, ""),
    ("directive-refused", asks("-l select=1:ncpus=8 -l walltime=10:00:00", system="PBS") + "python x.py\n", 0, ""),
    ("directive-not-read", asks("-l select=1:ncpus=8, walltime=1:00:00", system="PBS") + "python x.py\n", 2, "warning"),
    ("directive-not-read", asks("-l select=1:ncpus=8 -l walltime=1:00:00", system="PBS") + "python x.py\n", 0, ""),
]
CONTAINERS: list[tuple[str, str, int, str]] = [
    ("not-exported", "#!/bin/bash\n" + FIXED_ADDRESS + "docker run --gpus all img python x.py\n", 2, "warning"),
    ("not-exported", "#!/bin/bash\nCUDA_VISIBLE_DEVICES=1 docker run --gpus all --rm img python x.py\n", 2, "warning"),
    ("not-exported", EIGHT + FIXED_ADDRESS + "srun singularity exec --nv --cleanenv x.sif python x.py\n", 7, "warning"),
    ("not-exported", EIGHT + "export NCCL_DEBUG=INFO\nsrun apptainer exec -e --nv x.sif python x.py\n", 7, "warning"),
    ("not-exported", "#!/bin/bash\n" + FIXED_ADDRESS + "docker run -e MASTER_ADDR --gpus all img python x.py\n", 0, ""),
    ("not-exported", "#!/bin/bash\n" + FIXED_ADDRESS + "docker compose run dev python x.py\n", 0, ""),
    ("not-exported", "#!/bin/bash\n" + FIXED_ADDRESS + "docker run --env-file e --gpus all img python x.py\n", 0, ""),
    ("not-exported", "#!/bin/bash\n" + FIXED_ADDRESS + "docker run img torchrun --master_addr=$MASTER_ADDR x.py\n", 0, ""),
    ("not-exported", EIGHT + FIXED_ADDRESS + "srun singularity exec --nv x.sif python x.py -e 1\n", 0, ""),
    ("not-exported", EIGHT + FIXED_ADDRESS + "export APPTAINERENV_MASTER_ADDR=1\nsrun apptainer exec -e x.sif python x.py\n", 0, ""),
    ("not-exported", EIGHT + FIXED_ADDRESS + "srun apptainer exec -e --env MASTER_ADDR=1 x.sif python x.py\n", 0, ""),
    ("world-size", LSF + "jsrun -n 4 -r 1 -a 6 -g 6 python x.py --world-size 4\n", 3, "error"),
    ("world-size", LSF + "jsrun -n 4 -r 1 -a 6 -g 6 python x.py --world-size 24\n", 0, ""),
    ("several-torchruns", "#!/bin/bash\n#COBALT -n 2\naprun -n 8 -N 4 torchrun --nproc_per_node=4 x.py\n", 3, "error"),
    ("several-torchruns", "#!/bin/bash\n#COBALT -n 2\naprun -n 2 -N 1 torchrun --nproc_per_node=4 x.py\n", 0, ""),
    ("same-gpu", TWO + "srun -N1 python train.py --seed 1 &\nsrun -N1 python train.py --seed 2 &\nwait\n", 0, ""),
]  # fmt: skip
REQUEST_CASES = [*REQUESTS, *CONTAINERS]

START = "#!/bin/bash\n"
SEEN = "CUDA_VISIBLE_DEVICES="
ADDRESS = "export MASTER_ADDR=$HEAD\n"
MANY = ONE.replace("--ntasks-per-node=1", "--ntasks-per-node=4")
LOOP = "for i in {}; do\n  " + SEEN + "$i python x.py --seed $i &\ndone\nwait\n"
SIDE = (
    SEEN
    + "0,1 torchrun --nproc_per_node=2 --master_port 12001 a.py &\n"
    + SEEN
    + "{} torchrun --nproc_per_node=2 --master_port 12002 b.py &\nwait\n"
)

VISIBLE_CASES: list[tuple[str, str, int, str]] = [
    ("device-of-one-gpu", START + SEEN + "3 python x.py --device cuda:3\n", 2, "error"),
    ("device-of-one-gpu", START + "export " + SEEN + "0,1\npython x.py --device=cuda:2\n", 3, "error"),
    ("device-of-one-gpu", START + SEEN + "3 python x.py --device cuda:0\n", 0, ""),
    ("device-of-one-gpu", START + SEEN + "2 python x.py --gpu 2\n", 0, ""),  # the program may set the variable itself
    ("device-of-one-gpu", START + SEEN + "2 python a.py\npython x.py --device cuda:2\n", 0, ""),
    ("visible-devices", EIGHT + "srun bash -c 'export " + SEEN + "$SLURM_PROCID; python x.py'\n", 7, "error"),
    ("visible-devices", MANY + ADDRESS + "srun bash -c '" + SEEN + "0 python x.py'\n", 8, "warning"),
    ("visible-devices", EIGHT + "srun bash -c 'export " + SEEN + "$SLURM_LOCALID; python x.py'\n", 0, ""),
    ("visible-devices", MANY + "srun bash -c 'export " + SEEN + "$SLURM_PROCID; python x.py'\n", 0, ""),
    ("visible-devices", ONE + LOOP.format("1 2 3 4"), 8, "warning"),
    ("visible-devices", ONE + LOOP.format("{1..4}"), 8, "warning"),
    ("visible-devices", ONE + LOOP.format("{0..3}"), 0, ""),
    ("visible-devices", ONE + LOOP.format("1 2 3 4").replace("$i p", "$((i-1)) p"), 0, ""),
    ("same-gpu", ONE + SIDE.format("1,2"), 8, "warning"),
    ("same-gpu", ONE + SIDE.format("2,3"), 0, ""),
    ("same-gpu", ONE + SIDE.format("1,2").replace("&\n", "\n", 1), 0, ""),
    ("more-ranks-than-gpus", START + SEEN + "4,5 accelerate launch --num_processes 8 x.py\n", 2, "error"),
    ("more-ranks-than-gpus", START + SEEN + "4,5 accelerate launch --num_processes 2 x.py\n", 0, ""),
    ("more-ranks-than-gpus", START + SEEN + "4,5 accelerate launch --num_machines 2 --num_processes 4 x.py\n", 0, ""),
    ("invalid-value", TWO + "srun torchrun --nnodes=2 --rdzv_backend=c10d --rdzv_endpoint=$H:99999 x.py\n", 7, "error"),
    ("invalid-value", START + "torchrun --nproc_per_node=4 --master-port 80 x.py\n", 2, "warning"),
    ("invalid-value", START + "torchrun --nproc_per_node=4 --master_port=12080 x.py\n", 0, ""),
    ("invalid-value", START + "torchrun --nproc_per_node=4 --rdzv_endpoint=localhost:0 x.py\n", 0, ""),
]  # fmt: skip
