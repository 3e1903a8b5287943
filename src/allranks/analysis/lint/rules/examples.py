"""What the page of each rule shows besides its record: the symptom, and an example before and after the repair.

The examples are in the order of the rules: those for batch scripts and files are in `script_examples`.
A fragment without ``#!`` stands in a batch script of two nodes (`script_of`). Tests lint both sides of every example.
"""

from __future__ import annotations

from allranks.analysis.lint.records import RuleExample
from allranks.analysis.lint.rules.script_examples import SCRIPT_EXAMPLES

HEAD = "#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=1\n#SBATCH --gpus-per-node=2\n#SBATCH --cpus-per-task=16\n#SBATCH --mem=64G\n"


def script_of(fragment: str) -> str:
    """Return the script that a fragment stands in."""
    if fragment.startswith("#!"):
        return fragment + "\n"
    head = "" if fragment.startswith("#SBATCH") else HEAD
    return f"#!/bin/bash\n{head}{fragment}\n"


EXAMPLES: dict[str, RuleExample] = {
    # Environment variables
    "unknown-variable": RuleExample(
        "The setting is in the script, and the run behaves as if it were not: the timeout stays 10 minutes, the backend stays what the program asked for.",
        "export NCCL_TIMEOUT=1800",
        '# in the program:\n# torch.distributed.init_process_group("nccl", timeout=datetime.timedelta(minutes=30))',
    ),
    "misspelled-variable": RuleExample(
        "As above; `NCCL_DEBUG=INFO` prints every variable that NCCL did take, and this one is not among them.",
        "export NCCL_SOCKET_IFNAMES=ib0",
        "export NCCL_SOCKET_IFNAME=ib0",
    ),
    "deprecated-variable": RuleExample(
        "A warning about the name in the log, or, after an update, a setting that no longer works. A note: most of these settings are no longer needed. A name that no version knew is a warning.",
        "export NCCL_TREE_THRESHOLD=0",
        "export NCCL_ALGO=Ring",
    ),
    "gloo-interface-syntax": RuleExample(
        "`Unable to find address for: ^lo`, or `no such interface`, from Gloo, at the first process group.",
        "export GLOO_SOCKET_IFNAME=^lo,docker0",
        "export GLOO_SOCKET_IFNAME=eno1",
    ),
    "invalid-value": RuleExample(
        "`Invalid value` or nothing at all in the log; the default is used.",
        "export NCCL_P2P_LEVEL=NVLINK",
        "export NCCL_P2P_LEVEL=NVL",
    ),
    "no-effect": RuleExample(
        "None. Readers believe that InfiniBand or shared memory was turned on.",
        "export NCCL_IB_DISABLE=0",
        "# no line: InfiniBand is used if it is there",
    ),
    "hard-coded-interface": RuleExample(
        "`Bootstrap : no socket interface found` on some nodes, or a slow run over the wrong network.",
        "export NCCL_SOCKET_IFNAME=eth0",
        "export NCCL_SOCKET_IFNAME=^lo,docker",
    ),
    "loopback-across-nodes": RuleExample(
        "Ranks of the first node are ready, all others wait; a timeout after 10 to 30 minutes.",
        "export GLOO_SOCKET_IFNAME=lo",
        "# no line: each rank uses the interface of its host's name",
    ),
    "transport-disabled": RuleExample(
        "The run works, and is slow: `NET/Socket` or `SHM` in NCCL's log where `NET/IB` or `P2P` could be. It is a warning only if the file also shows that the nodes have what it disables, such as `NCCL_IB_HCA` or `--constraint=nvlink`; else the site may have a reason.",
        "export NCCL_IB_HCA=mlx5\nexport NCCL_IB_DISABLE=1",
        "export NCCL_IB_HCA=mlx5\n# the firmware of these adapters hangs, replaced in May\nexport NCCL_IB_DISABLE=1",
    ),
    "fixed-gid-index": RuleExample(
        "`ibv_modify_qp failed`, or a timeout of the first collective, on the nodes whose address has another index.",
        "export NCCL_IB_GID_INDEX=3",
        "# no line: NCCL 2.21 and later choose it",
    ),
    "error-handling-off": RuleExample(
        "One rank's error, then silence: the others wait in a collective until the job's time limit.",
        "export TORCH_NCCL_ASYNC_ERROR_HANDLING=0",
        "# no line: torch ends the ranks after the timeout",
    ),
    "debug-setting": RuleExample(
        "Training runs at a fraction of its speed; GPUs idle between kernels.",
        "export CUDA_LAUNCH_BLOCKING=1",
        "# no line; for one debugging run: CUDA_LAUNCH_BLOCKING=1 sbatch job.sbatch",
    ),
    # Rendezvous
    "fixed-port": RuleExample(
        "`Address already in use`; or two jobs in one rendezvous, of which one dies with `RendezvousConnectionError` when the other ends. A note, since another job has to be on the node and use the same port; a warning for a job array whose tasks can meet on a node, an error for two launchers of one script that run side by side; with whole nodes (`--exclusive`, `--mem=0`, eight GPUs) it is not reported.",
        "#SBATCH --nodes=1\n#SBATCH --gres=gpu:1\n#SBATCH --mem=32G\nexport MASTER_PORT=29500\nsrun python train.py",
        "#SBATCH --nodes=1\n#SBATCH --gres=gpu:1\n#SBATCH --mem=32G\nexport MASTER_PORT=$((15000 + SLURM_JOB_ID % 15000))\nsrun python train.py",
    ),
    "ephemeral-port": RuleExample(
        "`Address already in use`, now and then, with no other job on the node. A note, since many scripts draw a port at random and are seldom unlucky; a warning if several ranks meet at a fixed port and other jobs can be on the node, or if the range goes below 1024 or above 65535.",
        "export MASTER_PORT=$(shuf -i 20000-60000 -n 1)",
        "export MASTER_PORT=$((15000 + SLURM_JOB_ID % 15000))",
    ),
    "port-per-node": RuleExample(
        "All nodes wait at the rendezvous; each prints another port.",
        "srun bash -c 'export MASTER_PORT=$((15000 + RANDOM % 10000)); python train.py'",
        "export MASTER_PORT=$((15000 + RANDOM % 10000))\nsrun python train.py",
    ),
    "fixed-rendezvous-id": RuleExample(
        "A job is killed when another starts, or the world size is that of two jobs together.",
        "srun torchrun --nnodes=2 --nproc_per_node=2 --rdzv_backend=c10d --rdzv_id=101 --rdzv_endpoint=$MASTER_ADDR:$MASTER_PORT train.py",
        "srun torchrun --nnodes=2 --nproc_per_node=2 --rdzv_backend=c10d --rdzv_id=$SLURM_JOB_ID --rdzv_endpoint=$MASTER_ADDR:$MASTER_PORT train.py",
    ),
    "rendezvous-id-per-node": RuleExample(
        "`RendezvousTimeoutError` on every node; each node's log shows another run id.",
        "srun bash -c 'torchrun --nnodes=2 --nproc_per_node=2 --rdzv_backend=c10d --rdzv_id=$SLURM_PROCID --rdzv_endpoint=$MASTER_ADDR:$MASTER_PORT train.py'",
        "srun bash -c 'torchrun --nnodes=2 --nproc_per_node=2 --rdzv_backend=c10d --rdzv_id=$SLURM_JOB_ID --rdzv_endpoint=$MASTER_ADDR:$MASTER_PORT train.py'",
    ),
    "node-rank-ignored": RuleExample(
        "Rank 0 and its output are on another node than expected; `node_rank is only used for static rdzv_backend` in newer torch.",
        "srun bash -c 'torchrun --nnodes=2 --nproc_per_node=2 --node_rank=$SLURM_NODEID --rdzv_backend=c10d --rdzv_id=$SLURM_JOB_ID --rdzv_endpoint=$MASTER_ADDR:15000 train.py'",
        "srun torchrun --nnodes=2 --nproc_per_node=2 --rdzv_backend=c10d --rdzv_id=$SLURM_JOB_ID --rdzv_endpoint=$MASTER_ADDR:15000 train.py",
    ),
    "node-rank-missing": RuleExample(
        "All nodes wait for each other until the timeout; or `Address already in use` if they share a host.",
        "srun torchrun --nnodes=2 --nproc_per_node=2 --master_addr=$MASTER_ADDR --master_port=$MASTER_PORT train.py",
        "srun bash -c 'torchrun --nnodes=2 --nproc_per_node=2 --node_rank=$SLURM_NODEID --master_addr=$MASTER_ADDR --master_port=$MASTER_PORT train.py'",
    ),
    "expanded-too-early": RuleExample(
        "Every node prints node rank 0; the launcher hangs, or all ranks claim to be rank 0.",
        "srun torchrun --nnodes=2 --nproc_per_node=2 --node_rank=$SLURM_NODEID --master_addr=$MASTER_ADDR train.py",
        "srun bash -c 'torchrun --nnodes=2 --nproc_per_node=2 --node_rank=$SLURM_NODEID --master_addr=$MASTER_ADDR train.py'",
    ),
    "master-address": RuleExample(
        "Ranks on other nodes cannot connect (`Connection refused` at 127.0.1.1), or every node trains alone.",
        "export MASTER_ADDR=127.0.0.1\nsrun python train.py",
        'export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)\nsrun python train.py',
    ),
    "address-without-host": RuleExample(
        "`The client socket has failed to connect`, `RendezvousTimeoutError` on every node, the first included.",
        "head=$(srun -N 1 ip -4 -o addr show dev ib0)\nsrun torchrun --nnodes=2 --nproc_per_node=2 --rdzv_backend=c10d --rdzv_id=$SLURM_JOB_ID --rdzv_endpoint=$head:15000 train.py",
        'head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)\nsrun torchrun --nnodes=2 --nproc_per_node=2 --rdzv_backend=c10d --rdzv_id=$SLURM_JOB_ID --rdzv_endpoint=$head:15000 train.py',
    ),
    "scontrol-in-container": RuleExample(
        "`scontrol: command not found`, then an empty MASTER_ADDR.",
        "srun apptainer exec x.sif bash -c 'export MASTER_ADDR=$(scontrol show hostnames | head -n 1); python train.py'",
        "export MASTER_ADDR=$(scontrol show hostnames | head -n 1)\nsrun apptainer exec x.sif python train.py",
    ),
    "whole-node-list": RuleExample(
        "Ranks look for a host whose name has line breaks: `Name or service not known`.",
        'nodes=( "$(scontrol show hostnames "$SLURM_JOB_NODELIST")" )\nexport MASTER_ADDR=${nodes[0]}',
        'nodes=( $(scontrol show hostnames "$SLURM_JOB_NODELIST") )\nexport MASTER_ADDR=${nodes[0]}',
    ),
    "compressed-node-list": RuleExample(
        "`ssh: Could not resolve hostname node[01-02]`, or a launch on no node at all.",
        "for node in $SLURM_JOB_NODELIST; do\n  ssh $node nvidia-smi\ndone",
        'for node in $(scontrol show hostnames "$SLURM_JOB_NODELIST"); do\n  ssh $node nvidia-smi\ndone',
    ),
    "never-expanded": RuleExample(
        "`invalid int value: '$SLURM_NODEID'`, or an address `$MASTER_ADDR` that no resolver knows.",
        "srun torchrun --nnodes=2 --nproc_per_node=2 --node_rank=\\$SLURM_NODEID --master_addr=$MASTER_ADDR --master_port=15000 train.py",
        "srun bash -c 'torchrun --nnodes=2 --nproc_per_node=2 --node_rank=$SLURM_NODEID --master_addr=$MASTER_ADDR --master_port=15000 train.py'",
    ),
    "octal-number": RuleExample(
        '`value too great for base (error token is "0089")` for one job in about fifty.',
        "export MASTER_PORT=$((10000 + ${SLURM_JOB_ID: -4}))",
        "export MASTER_PORT=$((10000 + 10#${SLURM_JOB_ID: -4}))",
    ),
    # Tasks and resources
    "several-torchruns": RuleExample(
        "World size is too large by the tasks a node; `Address already in use`; out of memory on every GPU.",
        "#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=4\nsrun torchrun --nproc_per_node=4 train.py",
        "#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=1\nsrun torchrun --nproc_per_node=4 train.py",
    ),
    "one-node-only": RuleExample(
        "One node works or waits, the others are idle; with `--nnodes=2` a timeout at the rendezvous.",
        "torchrun --nnodes=2 --nproc_per_node=2 train.py",
        "srun torchrun --nnodes=2 --nproc_per_node=2 train.py",
    ),
    "node-count": RuleExample(
        "Nothing happens until the rendezvous times out; or every node prints a world size of its own ranks only.",
        "srun torchrun --nnodes=4 --nproc_per_node=2 train.py",
        "srun torchrun --nnodes=$SLURM_JOB_NUM_NODES --nproc_per_node=2 train.py",
    ),
    "fewer-tasks-than-nodes": RuleExample(
        "`can't run 1 processes on 24 nodes, setting nnodes to 1`, and a rendezvous that times out. Steps in the background or on named nodes add up, and a loop starts one per round.",
        "#SBATCH --nodes=2\n#SBATCH --ntasks=1\nsrun torchrun --nnodes=2 train.py",
        "#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=1\nsrun torchrun --nnodes=2 train.py",
    ),
    "processes-of-one-node": RuleExample(
        "World size is the GPUs of one node, and `nvidia-smi` shows idle GPUs on every node.",
        "srun bash -c 'accelerate launch --num_machines 2 --num_processes 2 --machine_rank $SLURM_NODEID train.py'",
        "srun bash -c 'accelerate launch --num_machines 2 --num_processes 4 --machine_rank $SLURM_NODEID train.py'",
    ),
    "cpus-not-inherited": RuleExample(
        "GPUs wait for data; `taskset -p` in a task shows one CPU. A note, unless Slurm's version is known to be affected (`--slurm-version 23.02`, or `module load slurm/23.02`).",
        "#SBATCH --ntasks-per-node=8\n#SBATCH --cpus-per-task=8\nsrun python train.py",
        '#SBATCH --ntasks-per-node=8\n#SBATCH --cpus-per-task=8\nsrun --cpus-per-task="$SLURM_CPUS_PER_TASK" python train.py',
    ),
    "cpus-missing": RuleExample(
        "GPUs wait for data; torch's DataLoader warns that it wants more workers than there are CPUs.",
        "#SBATCH --nodes=1\n#SBATCH --gres=gpu:2\ntorchrun --standalone --nproc_per_node=2 train.py",
        "#SBATCH --nodes=1\n#SBATCH --gres=gpu:2\n#SBATCH --cpus-per-task=16\ntorchrun --standalone --nproc_per_node=2 train.py",
    ),
    "threads-missing": RuleExample(
        "`Setting OMP_NUM_THREADS environment variable for each process to be 1` (slow preparation of data), or load far above the number of cores.",
        "torchrun --nproc_per_node=2 train.py",
        "export OMP_NUM_THREADS=8\ntorchrun --nproc_per_node=2 train.py",
    ),
    "gpus-for-the-job": RuleExample(
        "`invalid device ordinal` on one node, idle GPUs on another.",
        "#SBATCH --nodes=2\n#SBATCH --gpus=7\nsrun python train.py",
        "#SBATCH --nodes=2\n#SBATCH --gpus-per-node=4\nsrun python train.py",
    ),
    "gpu-per-task": RuleExample(
        "`invalid device ordinal` on all ranks but the first of a node, if the program selects the GPU of its local rank.",
        "#SBATCH --ntasks-per-node=4\n#SBATCH --gpus-per-task=1\nsrun python train.py",
        "#SBATCH --ntasks-per-node=4\n#SBATCH --gpus-per-task=1\nsrun --gres-flags=allow-task-sharing python train.py",
    ),
    "device-of-one-gpu": RuleExample(
        "`CUDA error: invalid device ordinal` on all tasks of a node but the first.",
        "#SBATCH --ntasks-per-node=4\n#SBATCH --gpus-per-task=1\nsrun bash -c 'python train.py --gpu $SLURM_LOCALID'",
        "#SBATCH --ntasks-per-node=4\n#SBATCH --gpus-per-node=4\nsrun bash -c 'python train.py --gpu $SLURM_LOCALID'",
    ),
    "tasks-contradict": RuleExample(
        "One rank trains, or the program waits for ranks that nobody starts; or `sbatch: error: Requested node configuration is not available`.",
        "#SBATCH --nodes=2\n#SBATCH --ntasks=2\n#SBATCH --ntasks-per-node=4\nsrun python train.py",
        "#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=4\nsrun python train.py",
    ),
    "named-nodes": RuleExample(
        "`sbatch: error: invalid number of nodes (-N 8-2)`; or a job that waits for one host while others are free.",
        "#SBATCH --nodes=2\n#SBATCH --nodelist=gpu[01-08]\nsrun python train.py",
        "#SBATCH --nodes=2\n#SBATCH --exclude=gpu[09-12]\nsrun python train.py",
    ),
    "same-gpu": RuleExample(
        "`nvidia-smi` shows both programs on GPU 0, and the others at 0 %.",
        "#SBATCH --nodes=1\n#SBATCH --gres=gpu:2\npython train.py --seed 1 &\npython train.py --seed 2 &\nwait",
        "#SBATCH --nodes=1\n#SBATCH --gres=gpu:2\nCUDA_VISIBLE_DEVICES=0 python train.py --seed 1 &\nCUDA_VISIBLE_DEVICES=1 python train.py --seed 2 &\nwait",
    ),
    "steps-wait": RuleExample(
        "`srun: Job 123 step creation temporarily disabled, retrying (Requested nodes are busy)`; the programs run one after another.",
        "#SBATCH --nodes=1\n#SBATCH --ntasks=2\n#SBATCH --gres=gpu:2\nsrun -n1 python a.py &\nsrun -n1 python b.py &\nwait",
        "#SBATCH --nodes=1\n#SBATCH --ntasks=2\n#SBATCH --gres=gpu:2\nsrun -n1 --exact --gpus=1 python a.py &\nsrun -n1 --exact --gpus=1 python b.py &\nwait",
    ),
    "too-few-slots": RuleExample(
        "`There are not enough slots available in the system`, or `Requested more processes than there are available slots`.",
        "mpirun -np 8 -H node1:4,node2:2 python train.py",
        "mpirun -np 8 -H node1:4,node2:4 python train.py",
    ),
    "parallel-sizes": RuleExample(
        "`world size (4) is not divisible by total_model_size`, or `global batch size is not divisible by micro batch size times data parallel size`, from every rank, a minute after the start.",
        "srun --nodes=1 --ntasks=1 torchrun --standalone --nproc_per_node=2 pretrain_gpt.py --tensor-model-parallel-size 4",
        "srun --nodes=1 --ntasks=1 torchrun --standalone --nproc_per_node=2 pretrain_gpt.py --tensor-model-parallel-size 2",
    ),
    "host-file": RuleExample(
        "`Hostfile contains a bad entry`, or a run on fewer nodes than the job has.",
        "scontrol show hostnames > hosts.$SLURM_JOB_ID\ndeepspeed --hostfile=hosts.$SLURM_JOB_ID train.py",
        'scontrol show hostnames | sed "s/$/ slots=2/" > hosts.$SLURM_JOB_ID\ndeepspeed --hostfile=hosts.$SLURM_JOB_ID train.py',
    ),
    "ray-step-ends": RuleExample(
        "`ray status` shows the head alone; the workers' logs end after a second.",
        "srun --nodes=1 --ntasks=1 -w $worker ray start --address=$head:6379\npython train.py",
        "srun --nodes=1 --ntasks=1 -w $worker ray start --address=$head:6379 --block &\npython train.py",
    ),
    "more-ranks-than-gpus": RuleExample(
        "`invalid device ordinal`, or `Duplicate GPU detected` from NCCL.",
        "#SBATCH --gres=gpu:2\ntorchrun --standalone --nproc_per_node=4 train.py",
        "#SBATCH --gres=gpu:4\ntorchrun --standalone --nproc_per_node=4 train.py",
    ),
    "idle-gpus": RuleExample(
        "`nvidia-smi` shows GPUs of the job without a process. A note where one process may use all GPUs itself: a plain `python`, one task of `srun`, `--num_processes 1`.",
        "#SBATCH --gres=gpu:4\ntorchrun --standalone --nproc_per_node=2 train.py",
        "#SBATCH --gres=gpu:4\ntorchrun --standalone --nproc_per_node=gpu train.py",
    ),
    "idle-nodes": RuleExample(
        "The run is as fast as on one node.",
        "#SBATCH --nodes=2\npython train.py",
        "#SBATCH --nodes=2\nsrun python train.py",
    ),
    "ranks-in-separate-jobs": RuleExample(
        "The first job waits at the rendezvous with its GPUs held, and times out before the last one starts. Reported where a job array or a submission gives each job a rank, together with an address to meet at.",
        "#SBATCH --array=0-3\n#SBATCH --gres=gpu:1\nexport MASTER_ADDR=gpu01\nexport WORLD_SIZE=4\nexport RANK=$SLURM_ARRAY_TASK_ID\npython train.py",
        "#SBATCH --nodes=4\n#SBATCH --ntasks-per-node=1\n#SBATCH --gres=gpu:1\nsrun torchrun --nnodes=4 train.py",
    ),
    "world-size": RuleExample(
        "All ranks wait in `init_process_group` until the timeout; or `rank 8 is not smaller than 8`.",
        "#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=4\nexport WORLD_SIZE=4\nsrun python train.py",
        "#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=4\nexport WORLD_SIZE=$SLURM_NTASKS\nsrun python train.py",
    ),
    "threads-oversubscribed": RuleExample(
        "Load far above the number of cores, slow data preparation.",
        "#SBATCH --cpus-per-task=32\nexport OMP_NUM_THREADS=$SLURM_CPUS_PER_TASK\ntorchrun --standalone --nproc_per_node=4 train.py",
        "#SBATCH --cpus-per-task=32\nexport OMP_NUM_THREADS=$((SLURM_CPUS_PER_TASK / 4))\ntorchrun --standalone --nproc_per_node=4 train.py",
    ),
    "fewer-cpus-than-ranks": RuleExample(
        "`nvidia-smi` shows the GPUs at a few percent; the log of torch's data loader says that it suggests at most one worker.",
        "#SBATCH --nodes=1\n#SBATCH --gres=gpu:4\n#SBATCH --cpus-per-task=1\ntorchrun --standalone --nproc_per_node=4 train.py",
        "#SBATCH --nodes=1\n#SBATCH --gres=gpu:4\n#SBATCH --cpus-per-task=32\ntorchrun --standalone --nproc_per_node=4 train.py",
    ),
    "no-gpu-requested": RuleExample(
        "`No CUDA GPUs are available`, or a training that is many times slower than usual: it runs on the CPU.",
        "#SBATCH --partition=gpu\n#SBATCH --gres=gpu:0\nmodule load cuda\npython train.py",
        "#SBATCH --partition=gpu\n#SBATCH --gres=gpu:1\nmodule load cuda\npython train.py",
    ),
    "nothing-to-do": RuleExample(
        "The job is COMPLETED after a second, with an empty log.",
        "#SBATCH --gres=gpu:1\nmodule load cuda\n#srun python train.py",
        "#SBATCH --gres=gpu:1\nmodule load cuda\nsrun python train.py",
    ),
    "gpus-held": RuleExample(
        "The job is in state RUNNING, its GPUs are idle until the time limit; some sites cancel such jobs.",
        "nvidia-smi\nsleep 86400",
        "nvidia-smi\nsrun torchrun --nnodes=2 train.py",
    ),
    "memory-unit": RuleExample(
        "The job ends within seconds with state OUT_OF_MEMORY, or `Exceeded job memory limit`.",
        "#SBATCH --nodes=1\n#SBATCH --mem=64\nsrun torchrun train.py",
        "#SBATCH --nodes=1\n#SBATCH --mem=64G\nsrun torchrun train.py",
    ),
    "one-log-for-array": RuleExample(
        "The log has parts of several tasks, and most of their lines are missing.",
        "#SBATCH --array=0-9\n#SBATCH --output=train.out\nsrun python train.py",
        "#SBATCH --array=0-9\n#SBATCH --output=train-%A_%a.out\nsrun python train.py",
    ),
    "option-twice": RuleExample(
        "The option that was meant has its default: one node instead of two, or the first GPU request is gone.",
        "torchrun --nproc_per_node=2 --nproc_per_node=4 train.py",
        "torchrun --nnodes=2 --nproc_per_node=4 train.py",
    ),
    "visible-devices": RuleExample(
        "`No CUDA GPUs are available`, or out of memory on a GPU that another job uses.",
        "#SBATCH --gres=gpu:1\nexport CUDA_VISIBLE_DEVICES=3\npython train.py",
        "#SBATCH --gres=gpu:1\npython train.py",
    ),
    "one-failed-rest-waits": RuleExample(
        "One rank's error, then silence, then a collective's timeout on all others.",
        "srun torchrun --nnodes=2 --nproc_per_node=2 train.py",
        "srun --kill-on-bad-exit=1 torchrun --nnodes=2 --nproc_per_node=2 train.py",
    ),
    "step-exceeds-job": RuleExample(
        "`srun: error: Unable to create step for job: More processors requested than permitted`, or `Invalid generic resource (gres) specification`.",
        "srun --nodes=4 --ntasks=4 python train.py",
        "srun --nodes=2 --ntasks=2 python train.py",
    ),
    "step-nodes": RuleExample(
        "A command for one node prints as many lines as the job has nodes; two launchers have the same rank; or `srun: error: Unable to create step: More processors requested than permitted`.",
        "nodes=($(scontrol show hostnames $SLURM_JOB_NODELIST))\nsrun -w ${nodes[0]} ray start --head --block &",
        "nodes=($(scontrol show hostnames $SLURM_JOB_NODELIST))\nsrun -N 1 -n 1 -w ${nodes[0]} ray start --head --block &",
    ),
    "job-inside-job": RuleExample(
        "`salloc: Pending job allocation` in the log of a job that does nothing; or the same job is submitted several times.",
        "srun sbatch train.sbatch",
        "sbatch train.sbatch",
    ),
    "time-unit": RuleExample(
        "The job is `TIMEOUT` after less than an hour, although two days were meant.",
        "#SBATCH --time=48:00\npython train.py",
        "#SBATCH --time=48:00:00\npython train.py",
    ),
    "launchers-disagree": RuleExample(
        "Rank 0 waits at one port, the other node tries another one; both stop at the timeout of the rendezvous.",
        "srun -N1 -n1 -r0 torchrun --nnodes=2 --node_rank=0 --master_addr=$HEAD --master_port=15001 train.py &\n"
        "srun -N1 -n1 -r1 torchrun --nnodes=2 --node_rank=1 --master_addr=$HEAD --master_port=15002 train.py &\nwait",
        "srun -N1 -n1 -r0 torchrun --nnodes=2 --node_rank=0 --master_addr=$HEAD --master_port=15001 train.py &\n"
        "srun -N1 -n1 -r1 torchrun --nnodes=2 --node_rank=1 --master_addr=$HEAD --master_port=15001 train.py &\nwait",
    ),
    # Launchers, environment and signals
    "needs-ssh": RuleExample(
        "`ssh exited with exit code 255`, a password prompt, or a notice that keys are required. A note: sites whose scripts do so allow SSH inside of a job.",
        "deepspeed --hostfile=hosts --num_gpus=2 train.py",
        "srun bash -c 'deepspeed --no_ssh --node_rank=$SLURM_NODEID --num_nodes=2 --num_gpus=2 --master_addr=$MASTER_ADDR train.py'",
    ),
    "ssh-without-command": RuleExample(
        "`Pseudo-terminal will not be allocated because stdin is not a terminal`; files are on the first node only.",
        "for node in $(scontrol show hostnames); do\n  ssh $node\n  mkdir /scratch/data\ndone",
        "srun --ntasks-per-node=1 mkdir /scratch/data",
    ),
    "srun-without-command": RuleExample(
        "`srun: fatal: No command given to execute`, and a training that runs on one GPU.",
        "srun --cpu-bind=cores --label\npython train.py",
        "srun --cpu-bind=cores --label \\\n  python train.py",
    ),
    "no-terminal": RuleExample(
        "`the input device is not a TTY`. A note for `-t` alone and for podman, which goes on with a warning.",
        "docker run -it --gpus all image torchrun train.py",
        "docker run --gpus all image torchrun train.py",
    ),
    "container-shell-ended": RuleExample(
        "`torchrun: command not found`, or another Python and torch than in the image. A note if the script prepares an environment on the host as well.",
        'singularity exec --nv image.sif bash -c "source /ext3/env.sh"\nsrun torchrun --nnodes=2 train.py',
        'srun singularity exec --nv image.sif bash -c "source /ext3/env.sh; torchrun --nnodes=2 train.py"',
    ),
    "builtin-as-program": RuleExample(
        "`cd: executable file not found`, `execve(): source: No such file or directory`; or nothing, and the training misses its folder or its environment.",
        "singularity exec --nv image.sif cd /workspace && torchrun --standalone --nproc_per_node=2 train.py",
        'srun singularity exec --nv image.sif bash -c "cd /workspace && torchrun --standalone --nproc_per_node=2 train.py"',
    ),
    "not-runnable": RuleExample(
        "`train.py: command not found`; under srun `execve(): train.py: Permission denied`; `import: command not found` from `bash train.py`.",
        "srun train.py --epochs 3",
        "srun python train.py --epochs 3",
    ),
    "old-launcher": RuleExample(
        "A `FutureWarning`; `unrecognized arguments: --local-rank` from the program.",
        "python -m torch.distributed.launch --nproc_per_node=2 train.py",
        "torchrun --nproc_per_node=2 train.py",
    ),
    "export-comma": RuleExample(
        "NCCL uses an interface that the list excluded; `printenv` in the task shows the value cut off.",
        "srun --export=ALL,NCCL_SOCKET_IFNAME=^lo,docker0 python train.py",
        "export NCCL_SOCKET_IFNAME=^lo,docker0\nsrun python train.py",
    ),
    "export-drops-environment": RuleExample(
        "`command not found`, wrong Python, missing modules, or defaults of NCCL in the tasks only.",
        "srun --export=NCCL_DEBUG=INFO torchrun train.py",
        "export NCCL_DEBUG=INFO\nsrun torchrun train.py",
    ),
    "login-shell": RuleExample(
        "Another Python, CUDA or PATH in the task than in the batch script.",
        "module load cuda\nsrun bash -lc 'torchrun train.py'",
        "module load cuda\nsrun bash -c 'torchrun train.py'",
    ),
    "kills-others": RuleExample(
        "Another job of yours on the node dies with SIGKILL.",
        "srun pkill -9 -f python",
        "# no line: Slurm ends all processes of a job",
    ),
    "signal-kills-torchrun": RuleExample(
        "Exit code 138 before the time limit; workers are found still running; no checkpoint.",
        "#SBATCH --signal=USR1@120\nsrun torchrun train.py",
        "#SBATCH --signal=USR1@120\nsrun bash -c \"trap '' USR1; exec torchrun train.py\"",
    ),
    "signal-not-trapped": RuleExample(
        "The job ends at the signal, or the handler's line is printed only when it is too late.",
        "#SBATCH --signal=B:USR1@120\nsrun torchrun train.py",
        "#SBATCH --signal=B:USR1@120\ntrap 'touch stop' USR1\nsrun torchrun train.py &\nwait",
    ),
    "requeue-truncates-log": RuleExample(
        "The log begins with the second attempt. Reported if the script asks to be requeued: `--requeue`, or `scontrol requeue`, also in a trap.",
        "#SBATCH --requeue\nsrun torchrun train.py",
        "#SBATCH --requeue\n#SBATCH --open-mode=append\nsrun torchrun train.py",
    ),
    **SCRIPT_EXAMPLES,
}
