"""What the page of each rule shows besides its record: the symptom, and an example before and after the repair.

A fragment without ``#!`` stands in a batch script of two nodes (`script_of`). Tests lint both sides of every example.
"""

from __future__ import annotations

import msgspec

from allranks.analysis.lint.rules.count_examples import COUNTED
from allranks.analysis.lint.rules.more_examples import MORE
from allranks.analysis.lint.rules.shell_examples import SHELL


class RuleExample(msgspec.Struct, frozen=True):
    symptom: str
    bad: str
    good: str


HEAD = "#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=1\n#SBATCH --gpus-per-node=2\n#SBATCH --cpus-per-task=16\n#SBATCH --mem=64G\n"


def script_of(fragment: str) -> str:
    """Return the script that a fragment stands in."""
    if fragment.startswith("#!"):
        return fragment + "\n"
    head = "" if fragment.startswith("#SBATCH") else HEAD
    return f"#!/bin/bash\n{head}{fragment}\n"


EXAMPLES: dict[str, RuleExample] = {
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
    "needs-ssh": RuleExample(
        "`ssh exited with exit code 255`, a password prompt, or a notice that keys are required. A note: sites whose scripts do so allow SSH inside of a job.",
        "deepspeed --hostfile=hosts --num_gpus=2 train.py",
        "srun bash -c 'deepspeed --no_ssh --node_rank=$SLURM_NODEID --num_nodes=2 --num_gpus=2 --master_addr=$MASTER_ADDR train.py'",
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
    "variable-in-directive": RuleExample(
        "`sbatch: error: invalid number of nodes ($N)`; a file called `$HOME`; no log.",
        "#SBATCH --nodes=$NODES\nsrun torchrun train.py",
        "# sbatch --nodes=$NODES job.sbatch\nsrun torchrun train.py",
    ),
    "directive-too-late": RuleExample(
        "The job runs with the cluster's defaults: one node, the default time limit.",
        "#SBATCH --nodes=2\nset -e\n#SBATCH --time=01:00:00\nsrun torchrun train.py",
        "#SBATCH --nodes=2\n#SBATCH --time=01:00:00\nset -e\nsrun torchrun train.py",
    ),
    "directive-not-read": RuleExample(
        "As above, or `sbatch: error: unrecognized option`.",
        "#SBATCH --nodes=2\n#SBTACH --time=01:00:00\nsrun torchrun train.py",
        "#SBATCH --nodes=2\n#SBATCH --time=01:00:00\nsrun torchrun train.py",
    ),
    "output-folder": RuleExample(
        "The job fails within a second, with no output at all. A relative folder is looked for in the current folder, next to the script, and above it up to the root of the repository. A missing folder is a warning inside a repository, or if its parent folder exists; a note for a script that was copied to somewhere else. This holds for a folder that the script itself creates, too late, as well.",
        "#SBATCH --output=logs/%j/out.txt\nsrun torchrun train.py",
        "#SBATCH --output=%x-%j.out\nsrun torchrun train.py",
    ),
    "no-shebang": RuleExample(
        "`sbatch: error: This does not look like a batch script`.",
        "#SBATCH --nodes=1\nsrun torchrun train.py",
        "#!/bin/bash\n#SBATCH --nodes=1\nsrun torchrun train.py",
    ),
    "dos-line-breaks": RuleExample(
        "`sbatch: error: Batch script contains DOS line breaks`, or `$'\\r': command not found`.",
        "#!/bin/bash\r\nsrun torchrun train.py\r",
        "#!/bin/bash\nsrun torchrun train.py",
    ),
    "exit-code-lost": RuleExample(
        "`sacct` says COMPLETED for a training that failed. A pipe is a warning if the script has `set -e` or tests the pipe (`|| exit 1`), which then have no effect; else, and for another last command, such as `echo` or `exit 0`, a note.",
        "set -e\ntorchrun --standalone train.py | tee train.log",
        "set -eo pipefail\ntorchrun --standalone train.py | tee train.log",
    ),
    "exit-zero": RuleExample(
        "`sacct` says COMPLETED, and nothing was trained.",
        'if [ -z "$DATA" ]; then\n  echo "Error: DATA is missing"\n  exit 0\nfi',
        'if [ -z "$DATA" ]; then\n  echo "Error: DATA is missing"\n  exit 1\nfi',
    ),
    "endless-wait": RuleExample(
        "The training ends, and the job runs until its time limit.",
        "vllm serve model &\npython train.py &\nwait",
        "vllm serve model &\nserver=$!\npython train.py\nrc=$?\nkill $server\nexit $rc",
    ),
    "not-exported": RuleExample(
        "An option without its value, a path that begins in the wrong place, or a setting that is ignored.",
        "lr=1e-4\nsrun bash -c 'torchrun train.py --lr $lr'",
        "export lr=1e-4\nsrun bash -c 'torchrun train.py --lr $lr'",
    ),
    "unset-variable": RuleExample(
        "`argument --nproc_per_node: expected one argument`, or an option that takes the next word as its value.",
        "#SBATCH --nodes=1\n#SBATCH --gres=gpu:4\ntorchrun --nproc_per_node=$SLURM_GPUS_PER_NODE train.py",
        "#SBATCH --nodes=1\n#SBATCH --gpus-per-node=4\ntorchrun --nproc_per_node=$SLURM_GPUS_PER_NODE train.py",
    ),
    "test-syntax": RuleExample(
        "`[: missing ]`, and the branch that is never taken, or always.",
        'if [ -z "$DATA"]; then\n  exit 1\nfi',
        'if [ -z "$DATA" ]; then\n  exit 1\nfi',
    ),
    "broken-line": RuleExample(
        "`--lr: command not found`, and a run with default values.",
        "torchrun --standalone \\\n  # --nproc_per_node=4 \\\n  --nproc_per_node=2 train.py",
        "# torchrun with four ranks: --nproc_per_node=4\ntorchrun --standalone \\\n  --nproc_per_node=2 train.py",
    ),
    "typographic-character": RuleExample(
        "`unrecognized arguments`, or sbatch refuses the option, although it looks right.",
        "srun torchrun \u2013\u2013nnodes=2 train.py",
        "srun torchrun --nnodes=2 train.py",
    ),
    "blank-before-equals": RuleExample(
        "`invalid int value: '='`, or `can't open file '4'`.",
        "torchrun --nproc_per_node =4 train.py",
        "torchrun --nproc_per_node=4 train.py",
    ),
    "csh-syntax": RuleExample(
        "`setenv: command not found`; or nothing, and the value is empty.",
        "set jobid = $SLURM_JOB_ID",
        "jobid=$SLURM_JOB_ID",
    ),
    "folder-not-copied": RuleExample(
        "`cp: -r not specified; omitting directory`, and the results are gone when the job ends.",
        "cp results/ /scratch/me",
        "cp -r results/ /scratch/me",
    ),
    "unquoted-variable": RuleExample(
        "A node list `gpu[01-04]` that matches a file called `gpu0`; a test that is true for an empty value.",
        "if [ -n $DATA ]; then\n  ls\nfi",
        'if [ -n "$DATA" ]; then\n  ls\nfi',
    ),
    "literal-quotes": RuleExample(
        "`'model' is not a local folder and is not a valid model identifier`, with the quotes in the name.",
        "model=\"${1:-'mistral'}\"",
        'model="${1:-mistral}"',
    ),
    "runs-arguments": RuleExample(
        "`16: command not found`.",
        'batch=$1\n"$@"',
        'batch=$1\npython train.py --batch "$batch"',
    ),
    "mistyped-command": RuleExample(
        "`soruce: command not found`, and then packages that are missing.",
        "soruce env/bin/activate",
        "source env/bin/activate",
    ),
    "unterminated": RuleExample(
        "`unexpected EOF while looking for matching`, at the end of the file.",
        'export ARGS="--lr 1e-4\ntorchrun train.py $ARGS',
        'export ARGS="--lr 1e-4"\ntorchrun train.py $ARGS',
    ),
    "conda-not-set-up": RuleExample(
        "`CommandNotFoundError: Your shell has not been properly configured`, then the system's Python.",
        "conda activate train\nsrun torchrun train.py",
        'eval "$(conda shell.bash hook)"\nconda activate train\nsrun torchrun train.py',
    ),
    "background-not-awaited": RuleExample(
        "The job ends after a second, with exit code 0.",
        "srun python train.py &",
        "srun python train.py &\nwait",
    ),
    "nodes-in-sequence": RuleExample(
        "The first node waits at the rendezvous; the other nodes do nothing.",
        "for node in $NODES; do\n  srun -N1 -n1 -w $node torchrun --nnodes=2 --nproc_per_node=2 train.py\ndone",
        "srun --ntasks-per-node=1 torchrun --nnodes=2 --nproc_per_node=2 train.py",
    ),
    "secret-in-script": RuleExample(
        "None, until somebody uses the token.",
        "export WANDB_API_KEY=0123456789abcdef0123456789abcdef01234567",
        "export WANDB_API_KEY=$(cat ~/.wandb_key)",
    ),
    "placeholder": RuleExample(
        "`sbatch: error: invalid account`, or a path that does not exist.",
        "#SBATCH --account=<account>\nsrun torchrun train.py",
        "#SBATCH --account=project1\nsrun torchrun train.py",
    ),
    "script-folder": RuleExample(
        "`No such file or directory` below /var/spool/slurmd.",
        'cd "$(dirname "$0")"\nsrun torchrun train.py',
        'cd "$SLURM_SUBMIT_DIR"\nsrun torchrun train.py',
    ),
    "set-e": RuleExample(
        "The script ends before its own handling of the failure.",
        "set -e\nsrun torchrun train.py\nrc=$?\nexit $rc",
        "set -e\nrc=0\nsrun torchrun train.py || rc=$?\nexit $rc",
    ),
    "buffered-output": RuleExample(
        "The log of a killed rank ends kilobytes before it died.",
        "#SBATCH --ntasks-per-node=2\nsrun python train.py",
        "#SBATCH --ntasks-per-node=2\nsrun python -u train.py",
    ),
    "node-local-file": RuleExample(
        "`can't open file '/tmp/x.py': No such file or directory` on all nodes but the first; checkpoints that are incomplete.",
        "srun torchrun --nnodes=2 --nproc_per_node=2 train.py --output_dir=/tmp/$USER/out",
        "srun torchrun --nnodes=2 --nproc_per_node=2 train.py --output_dir=$HOME/out",
    ),
    "fixed-name-in-tmp": RuleExample(
        "`Permission denied` when somebody else was there first; settings of another job. It is a note unless the file shows that other jobs can be on the node.",
        "#SBATCH --nodes=1\n#SBATCH --gres=gpu:1\n#SBATCH --mem=32G\nrm -rf /tmp/cache",
        "cache=$(mktemp -d)\ntrap 'rm -rf \"$cache\"' EXIT",
    ),
    "slurm-tmpdir": RuleExample(
        "`mkdir: cannot create directory '/x': Permission denied`.",
        "cp data.tar $SLURM_TMPDIR/",
        'cp data.tar "${SLURM_TMPDIR:-/tmp/$USER.$SLURM_JOB_ID}/"',
    ),
    "cache-not-shared": RuleExample(
        "Every node downloads the model; `couldn't connect to 'https://huggingface.co'` on nodes without internet.",
        "export HF_HOME=/tmp/hf",
        "export HF_HOME=/shared/hf",
    ),
    "cache-missing": RuleExample(
        "`Disk quota exceeded` in the home folder; ranks that race for one cache.",
        "srun torchrun --nnodes=2 --nproc_per_node=2 train.py --model_name_or_path mistralai/Mistral-7B-v0.1",
        "export HF_HOME=/shared/hf\nsrun torchrun --nnodes=2 --nproc_per_node=2 train.py --model_name_or_path mistralai/Mistral-7B-v0.1",
    ),
    "sbcast": RuleExample(
        "`File exists`, or `No such file or directory`, from sbcast.",
        "sbcast data.tar /tmp/data.tar",
        "sbcast --force data.tar /tmp/data.tar",
    ),
    "ranks-in-separate-jobs": RuleExample(
        "The first job waits at the rendezvous with its GPUs held, and times out before the last one starts. Reported where a job array or a submission gives each job a rank, together with an address to meet at.",
        "#SBATCH --array=0-3\n#SBATCH --gres=gpu:1\nexport MASTER_ADDR=gpu01\nexport WORLD_SIZE=4\nexport RANK=$SLURM_ARRAY_TASK_ID\npython train.py",
        "#SBATCH --nodes=4\n#SBATCH --ntasks-per-node=1\n#SBATCH --gres=gpu:1\nsrun torchrun --nnodes=4 train.py",
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
    "wait-result-lost": RuleExample(
        "`Exit code was 0` below the traceback; the job is COMPLETED.",
        "srun python train.py &\nwait\nexit $?",
        "srun python train.py &\nwait $!\nexit $?",
    ),
    "pattern-not-expanded": RuleExample(
        "`/home/%u/.bashrc: No such file or directory`, or a folder called `%j`. A note for arguments of Python programs, which may replace it themselves.",
        "mkdir -p logs/%j",
        "mkdir -p logs/$SLURM_JOB_ID",
    ),
    "directive-refused": RuleExample(
        "`sbatch: error: Invalid --time specification`, `Invalid numeric value`, `unrecognized option`: no job is submitted.",
        "#SBATCH --nodes=1\n#SBATCH --time=24h\nsrun torchrun train.py",
        "#SBATCH --nodes=1\n#SBATCH --time=24:00:00\nsrun torchrun train.py",
    ),
    "stray-line": RuleExample(
        "`command not found`, or `Is a directory`, in the log; if it is the last line, the job is FAILED although the training was complete.",
        "srun torchrun --nnodes=2 train.py\nFooter",
        "srun torchrun --nnodes=2 train.py\n# Footer",
    ),
    "value-split": RuleExample(
        "`command not found` or `not a valid identifier` in the log; the program runs with an empty value.",
        "export MASTER_ADDR = localhost",
        "export MASTER_ADDR=localhost",
    ),
    "missing-colon": RuleExample(
        "`cannot open shared object file`, `No module named ...`, or `command not found` for ordinary commands.",
        "export LD_LIBRARY_PATH=/opt/nccl/lib$LD_LIBRARY_PATH",
        "export LD_LIBRARY_PATH=/opt/nccl/lib:$LD_LIBRARY_PATH",
    ),
    "quoted-tilde": RuleExample(
        "`No such file or directory: ~/...`, or a new folder with the name `~`.",
        'DATA="~/data"\ncd "$DATA"',
        'DATA="$HOME/data"\ncd "$DATA"',
    ),
    "variable-not-expanded": RuleExample(
        "A run or a folder is called `$NAME`, or the program refuses a number such as `'$SLURM_NNODES'`.",
        "OUT=/scratch/run1\nsrun python train.py --out '$OUT/checkpoints'",
        'OUT=/scratch/run1\nsrun python train.py --out "$OUT/checkpoints"',
    ),
    "module-after-activation": RuleExample(
        "`ModuleNotFoundError` for a package that is installed in the environment, or another version of torch than expected.",
        "source ~/conda/etc/profile.d/conda.sh\nconda activate mine\nmodule load pytorch/2.4\nsrun python train.py",
        "source ~/conda/etc/profile.d/conda.sh\nmodule load pytorch/2.4\nconda activate mine\nsrun python train.py",
    ),
    "container-without-gpu": RuleExample(
        "`torch.cuda.is_available()` is False; `Found no NVIDIA driver on your system`; or the training runs on the CPU.",
        "srun singularity exec image.sif python train.py",
        "srun singularity exec --nv image.sif python train.py",
    ),
    "asks-for-answer": RuleExample(
        "`Proceed ([y]/n)?` is the last line that the command writes; the environment is not there, or has not changed.",
        "conda install pytorch",
        "conda install -y pytorch",
    ),
    "secret-printed": RuleExample(
        "The token is in the job's log.",
        'echo "token: $HF_TOKEN"',
        'echo "token: ${HF_TOKEN:+set}"',
    ),
}

EXAMPLES.update({rule: RuleExample(*texts) for rule, texts in {**MORE, **COUNTED, **SHELL}.items()})
