"""Scripts about which process runs where: the rule, the script, the line and the severity; line 0 for no finding at all."""

from __future__ import annotations

from tests.lint.cases import EIGHT, HEAD, ONE, TWO

FOUR = TWO.replace("--ntasks-per-node=1", "--ntasks-per-node=4")  # two nodes, four tasks and four GPUs on each
PAIR = ONE.replace("--ntasks-per-node=1", "--ntasks-per-node=2")
ADDRESS = 'export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)\n'
MEET = "--rdzv_backend=c10d --rdzv_endpoint=$MASTER_ADDR:$PORT"
EACH = "srun -c32 bash -c 'torchrun --nnodes=2 --nproc_per_node=4 " + MEET + " --rdzv_id={} x.py'\n"
PBS_TWO = "#!/bin/bash\n#PBS -l select=2:ncpus=32:ngpus=4\n"
SLOTS = "#!/bin/bash\n#SBATCH --nodes=4\n#SBATCH --ntasks-per-node=20\n"
LSF_TWO = "#!/bin/bash\n#BSUB -nnodes 2\n"
LSF_ONE = '#!/bin/bash\n#BSUB -n 8\n#BSUB -R "span[hosts=1]"\n#BSUB -gpu "num=4"\n'
LOOP = 'i=0\nfor n in $(scontrol show hostnames); do\n  ssh "$n" {}\n  i=$((i+1))\ndone\n'
STATIC = "torchrun --nnodes=2 --nproc_per_node=4 --node_rank=$i --master_addr=$HEAD --master_port=1 x.py"

TWO_PARTS = "export MASTER_ADDR=${SLURM_NODELIST:0:9}${SLURM_NODELIST:10:4}\nsrun python x.py\n"
TESTED = """if [ "${SLURM_NODELIST:4:1}" == "[" ]; then
  export MASTER_ADDR=${SLURM_NODELIST:0:4}${SLURM_NODELIST:5:3}
else
  export MASTER_ADDR=$SLURM_NODELIST
fi
"""
CUT = """first=$(echo $SLURM_NODELIST | cut -d, -f1)
if [[ "$first" == *'['* ]]; then
  MASTER_ADDR=$(echo $first | tr -d [ | cut -d- -f1)
else
  MASTER_ADDR=$first
fi
export MASTER_ADDR
"""

IDS: list[tuple[str, str, int, str]] = [
    ("rendezvous-id-per-node", TWO + ADDRESS + EACH.format("$SLURM_PROCID"), 8, "error"),
    ("rendezvous-id-per-node", TWO + ADDRESS + EACH.format("$RANDOM"), 8, "error"),
    ("rendezvous-id-per-node", TWO + ADDRESS + EACH.format("$(hostname)"), 8, "error"),
    ("rendezvous-id-per-node", "#!/bin/bash\ntorchrun --nnodes $SLURM_NNODES --rdzv_id $SLURM_PROCID " + MEET + " x.py\n", 2, "error"),
    ("rendezvous-id-per-node", TWO + ADDRESS + EACH.format("$SLURM_JOB_ID"), 0, ""),
    ("rendezvous-id-per-node", TWO + ADDRESS + EACH.format("$RANDOM").replace("'", '"'), 0, ""),  # the batch shell draws one
    ("rendezvous-id-per-node", ONE + EACH.format("$RANDOM").replace("--nnodes=2", "--nnodes=1"), 0, ""),
    ("rendezvous-id-per-node", "#!/bin/bash\ntorchrun --nnodes=1 --rdzv_id=$RANDOM " + MEET + " x.py\n", 0, ""),
]  # fmt: skip
STARTS: list[tuple[str, str, int, str]] = [
    ("several-torchruns", TWO + "mpirun -np 8 torchrun --nnodes=2 --nproc_per_node=4 x.py\n", 7, "error"),
    ("several-torchruns", TWO + "mpirun --map-by ppr:4:node torchrun --nnodes=2 --nproc_per_node=4 x.py\n", 7, "error"),
    ("several-torchruns", PBS_TWO + "mpiexec -n 8 --ppn 4 torchrun --nnodes=2 --nproc_per_node=4 x.py\n", 3, "error"),
    ("several-torchruns", LSF_TWO + "jsrun -n 12 -a 1 -g 1 torchrun --nnodes=2 --nproc_per_node=6 x.py\n", 3, "error"),
    ("several-torchruns", PBS_TWO + "mpiexec -n 2 --ppn 1 torchrun --nnodes=2 --nproc_per_node=4 x.py\n", 0, ""),
    ("several-torchruns", TWO + "mpirun -np 2 torchrun --nnodes=2 --nproc_per_node=4 x.py\n", 0, ""),
    ("several-torchruns", LSF_TWO + "jsrun -n 2 -r 1 -a 1 -g 6 torchrun --nnodes=2 --nproc_per_node=6 x.py\n", 0, ""),
    ("several-torchruns", PBS_TWO + "mpiexec -n $N torchrun --nnodes=2 --nproc_per_node=4 x.py\n", 0, ""),
    ("one-node-only", LSF_TWO + "python -m torch.distributed.launch --nproc_per_node=6 x.py\n", 3, "error"),
    ("one-node-only", "#!/bin/bash\n#PBS -b 2\n#PBS -l gpunum_job=8\ntorchrun --nnodes=1 --nproc_per_node=8 x.py\n", 4, "error"),
    ("one-node-only", TWO + "horovodrun -np 8 python x.py\n", 7, "error"),
    ("one-node-only", '#!/bin/bash\n#BSUB -n 8\n#BSUB -R "span[hosts=1]"\ntorchrun --nproc_per_node=4 x.py\n', 0, ""),
    ("one-node-only", "#!/bin/bash\n#BSUB -n 8\ntorchrun --nproc_per_node=4 x.py\n", 0, ""),  # perhaps on one host
    ("one-node-only", "#!/bin/bash\n#!BSUB -nnodes 2\n#BSUB -n 1\ntorchrun --nproc_per_node=4 x.py\n", 0, ""),
    ("one-node-only", TWO + "horovodrun -np 8 -H a:4,b:4 python x.py\n", 0, ""),
    ("one-node-only", LSF_TWO + "horovodrun -np 12 python x.py\n", 0, ""),
    ("idle-nodes", '#!/bin/bash\n#BSUB -n 4\n#BSUB -R "span[ptile=2]"\npython x.py\n', 4, "warning"),
    ("idle-nodes", "#!/bin/bash\n#COBALT -n 2 -t 10\npython x.py\n", 3, "warning"),
    ("idle-nodes", "#!/bin/bash\n#SBATCH -N 4\n#SBATCH --array=0-9\npython x.py $SLURM_ARRAY_TASK_ID\n", 4, "warning"),
    ("idle-nodes", "#!/bin/bash\n#SBATCH -N 4\n#SBATCH --array=0-9\nsrun python x.py $SLURM_ARRAY_TASK_ID\n", 0, ""),
    ("idle-nodes", "#!/bin/bash\n#SBATCH -N 4\n#SBATCH --array=0-9\npython -m scoop --host $H x.py\n", 0, ""),
    ("idle-nodes", "#!/bin/bash\n#PBS -l select=21:ncpus=40\npython x.py\n", 3, "warning"),
    ("idle-nodes", "#!/bin/bash\n#PBS -l select=4:system=polaris\npython x.py\n", 3, "warning"),
    ("idle-nodes", "#!/bin/bash\n#PBS -l select=4 -l filesystems=home\npython x.py\n", 3, "warning"),
    ("idle-nodes", "#!/bin/bash\n#PBS -l select=4:ncpus=8\npython x.py\n", 0, ""),
    ("idle-nodes", "#!/bin/bash\n#PBS -l select=4:ncpus=20\npython x.py\n", 0, ""),
    ("idle-nodes", SLOTS + "mpirun -np 20 python x.py\n", 4, "warning"),
    ("idle-nodes", SLOTS + "N=11\nmpiexec -n $N ./a.out\n", 5, "warning"),
    ("idle-nodes", SLOTS + "mpirun -np 80 python x.py\n", 0, ""),
    ("idle-nodes", SLOTS + "mpirun -np 20 --map-by node python x.py\n", 0, ""),
    ("idle-nodes", SLOTS + "mpirun -np 20 $OPTIONS python x.py\n", 0, ""),
    ("idle-nodes", SLOTS + "mpirun -np 20 ./test || exit 1\nmy_mpirun ./a.out\n", 0, ""),
    ("idle-nodes", SLOTS + "if a; then N=20; else N=80; fi\nmpirun -np $N ./a.out\n", 0, ""),
    ("idle-nodes", FOUR + "srun -N 1 -n 4 python x.py\n", 7, "warning"),
    ("idle-nodes", FOUR + "srun -n 1 python x.py\n", 7, "warning"),
    ("idle-nodes", FOUR + "srun -N 1 -n 4 python a.py &\nsrun -N 1 -n 4 python b.py &\nwait\n", 0, ""),
    ("idle-nodes", FOUR + "srun -N 2 -n 8 python x.py\n", 0, ""),
    ("idle-nodes", TWO + "ray start --head --port=6379\npython x.py\n", 7, "warning"),
    ("idle-nodes", TWO + "ray start --head --port=6379\nsrun -N1 -n1 -w $b ray start --address=$a:6379 --block &\npython x.py\n", 0, ""),
    ("idle-nodes", TWO + "ray start --head --port=6379\n./workers.sh\npython x.py\n", 0, ""),
    ("idle-nodes", ONE + "ray start --head --port=6379\npython x.py\n", 0, ""),
    ("idle-nodes", TWO + 'run="srun python"\nif [ $# -gt 0 ]; then\n  run=python\nfi\n$run x.py\n', 0, ""),
    ("nodes-in-sequence", TWO + HEAD + LOOP.format(f'"{STATIC}"'), 10, "error"),
    ("nodes-in-sequence", TWO + HEAD + LOOP.format(f'"{STATIC}" &') + "wait\n", 0, ""),
    ("nodes-in-sequence", TWO + HEAD + LOOP.format(f'"nohup {STATIC} > log 2>&1 &"'), 0, ""),
    ("nodes-in-sequence", TWO + HEAD + LOOP.replace("ssh", "ssh -f").format(f'"{STATIC}"'), 0, ""),
    ("not-exported", TWO + "export HEAD=a\n" + LOOP.format(f"'{STATIC}' &") + "wait\n", 10, "error"),
    ("not-exported", TWO + LOOP.format("'torchrun --nnodes=2 --node_rank=$SLURM_NODEID x.py' &") + "wait\n", 9, "error"),
    ("not-exported", TWO + HEAD + LOOP.format(f'"{STATIC}" &') + "wait\n", 0, ""),
    ("srun-without-command", FOUR + "srun --cpu-bind=v --accel-bind=gn\npython x.py\n", 7, "error"),
    ("srun-without-command", FOUR + "srun -n 8 \\\n  --label\npython x.py\n", 7, "error"),
    ("srun-without-command", FOUR + 'srun $ARGS\nsrun -n 4 $CMD\nsrun "${A[@]}"\nsrun --version\nsrun -n 4 <<EOF\nls\nEOF\n', 0, ""),
    ("srun-without-command", FOUR + "srun --multi-prog --label plan.conf\nsrun \\\n  --label \\\n  python x.py\n", 0, ""),
    ("srun-without-command", "#!/bin/bash\nsrun -n 4\n", 0, ""),
]  # fmt: skip
RANKS: list[tuple[str, str, int, str]] = [
    ("more-ranks-than-gpus", EIGHT + ADDRESS + "mpirun -np 16 python x.py\n", 8, "error"),
    ("more-ranks-than-gpus", EIGHT + "mpirun -np 16 python train_hvd.py\n", 7, "error"),
    ("more-ranks-than-gpus", EIGHT + "mpirun -np 16 python x.py\n", 0, ""),  # perhaps a simulation that shares GPUs
    ("more-ranks-than-gpus", FOUR + ADDRESS + "mpirun -np 8 python x.py\n", 0, ""),
    ("more-ranks-than-gpus", TWO + "srun accelerate launch --num_machines 2 --num_processes 16 x.py\n", 7, "error"),
    ("more-ranks-than-gpus", TWO + "srun accelerate launch --num_machines 2 --num_processes $((SLURM_NNODES * 8)) x.py\n", 7, "error"),
    ("more-ranks-than-gpus", TWO + "G=4\nsrun accelerate launch --num_machines 2 --num_processes $((SLURM_NNODES * G)) x.py\n", 0, ""),
    ("more-ranks-than-gpus", ONE + "deepspeed --include localhost:2,3,4 x.py\n", 7, "error"),
    ("more-ranks-than-gpus", ONE + "deepspeed --include localhost:2,3 x.py\n", 0, ""),
    ("more-ranks-than-gpus", FOUR + "export CUDA_VISIBLE_DEVICES=0\nmpirun -np 8 python x.py\n", 8, "error"),
    ("more-ranks-than-gpus", FOUR + "export CUDA_VISIBLE_DEVICES=0\nsrun python x.py\n", 0, ""),  # Slurm sets it again
    ("idle-gpus", ONE + "deepspeed --include localhost:2,3 x.py\n", 7, "warning"),
    ("idle-gpus", PAIR + ADDRESS + "srun python x.py\n", 3, "warning"),
    ("idle-gpus", PAIR + "srun python x.py --dist-url env:// --world-size 2\n", 3, "warning"),
    ("idle-gpus", PAIR + ADDRESS + "mpirun -np 2 python x.py\n", 8, "warning"),
    ("idle-gpus", PAIR.replace("--gpus-per-node=4", "--gpus-per-task=2") + ADDRESS + "srun python x.py\n", 0, ""),
    ("idle-gpus", PAIR + "srun python sweep.py\n", 0, ""),
    ("idle-gpus", PAIR + ADDRESS + "srun python a.py &\nsrun python b.py &\nwait\n", 0, ""),
    ("idle-gpus", ONE + ADDRESS + "srun python x.py --ranks-per-node=${SLURM_NTASKS_PER_NODE}\n", 8, "warning"),
    ("idle-gpus", ONE + "python x.py --device cuda:1\n", 7, "warning"),
    ("idle-gpus", ONE + "python a.py --gpu 0\npython b.py --gpu 1\n", 7, "warning"),
    ("idle-gpus", ONE + "python a.py --gpu 0 &\npython b.py --gpu 1 &\nwait\n", 0, ""),
    ("idle-gpus", ONE + "python x.py --gpus 4\n", 7, "note"),
    ("idle-gpus", ONE + "export CUDA_VISIBLE_DEVICES=0,1\npython x.py\n", 7, "warning"),
    ("idle-gpus", ONE + "export CUDA_VISIBLE_DEVICES=0,1\ntorchrun --standalone --nproc_per_node=gpu x.py\n", 7, "warning"),
    ("idle-gpus", ONE + "CUDA_VISIBLE_DEVICES=0 python a.py &\nCUDA_VISIBLE_DEVICES=1 python b.py &\npython c.py\n", 0, ""),
    ("idle-gpus", PAIR + "stdbuf -oL -eL srun python x.py\n", 0, ""),
    ("idle-gpus", PAIR + "./workers.sh $HEAD\npython x.py\n", 8, "note"),
    ("idle-gpus", ONE + "accelerate launch --num_processes 3 x.py --use_vllm true\n", 0, ""),
    ("world-size", FOUR + "export WORLD_SIZE=$SLURM_NNODES\nsrun python x.py\n", 7, "error"),
    ("world-size", FOUR + "export WORLD_SIZE=$((SLURM_NNODES * 2))\nsrun python x.py\n", 7, "error"),
    ("world-size", FOUR + "srun python x.py --world_size 4\n", 7, "error"),
    ("world-size", FOUR + "export WORLD_SIZE=4\nmpirun -np 8 python x.py\n", 7, "error"),
    ("world-size", FOUR + "export WORLD_SIZE=$((SLURM_NNODES * 4))\nsrun python x.py --world_size=$SLURM_NTASKS\n", 0, ""),
    ("world-size", TWO + "export WORLD_SIZE=8\nsrun python x.py\n", 0, ""),  # each task starts the ranks of its GPUs
    ("world-size", TWO + "srun python x.py --world-size 8\n", 0, ""),
    ("world-size", FOUR + "WORLD_SIZE=4\necho $WORLD_SIZE\nsrun python x.py\n", 0, ""),
    ("world-size", FOUR + "export WORLD_SIZE=$((SLURM_NNODES * UNKNOWN))\nsrun python x.py\n", 0, ""),
    ("fewer-tasks-than-nodes", "#!/bin/bash\n#SBATCH --ntasks=8\n#SBATCH --ntasks-per-node=4\nsrun python x.py\n", 0, ""),
]  # fmt: skip
HOSTS: list[tuple[str, str, int, str]] = [
    ("master-address", TWO + "export MASTER_ADDR=$SLURM_SUBMIT_HOST\nsrun python x.py\n", 7, "error"),
    ("master-address", TWO + ADDRESS.replace("head", "tail") + "srun python x.py\n", 7, "error"),
    ("master-address", TWO + ADDRESS.replace("head", "tail") + EACH.format("$SLURM_JOB_ID"), 0, ""),  # c10d meets anywhere
    ("master-address", PAIR + "export MASTER_ADDR=${SLURM_NODELIST:0:4}${SLURM_NODELIST:5:3}\nsrun python x.py\n", 7, "note"),
    ("master-address", PAIR.replace("--nodes=1", "--nodes=1 -p learnfair") + TWO_PARTS, 7, "error"),
    ("master-address", ONE + "export MASTER_ADDR=${SLURM_NODELIST:0:4}${SLURM_NODELIST:5:3}\nsrun python x.py\n", 0, ""),
    ("master-address", PAIR + TESTED + "srun python x.py\n", 0, ""),
    ("master-address", TWO + "export MASTER_ADDR=${SLURM_NODELIST:0:4}${SLURM_NODELIST:5:3}\nsrun python x.py\n", 0, ""),
    ("master-address", TWO + "export MASTER_ADDR=${SLURM_NODELIST:0:7}\nsrun python x.py\n", 7, "warning"),
    ("master-address", PAIR + "export MASTER_ADDR=10.1.2.3\nsrun python x.py\n", 7, "warning"),
    ("master-address", ONE + "torchrun --nnodes=1 --nproc_per_node=4 --master_addr=10.1.2.3 --master_port=1 x.py\n", 7, "warning"),
    ("master-address", PAIR.replace("=1\n", "=1 --nodelist=gpu7\n", 1) + "export MASTER_ADDR=gpu7\nsrun python x.py\n", 0, ""),
    ("master-address", TWO.replace("=2\n", "=2 --nodelist=a1,a2\n", 1) + "export MASTER_ADDR=a1\nsrun python x.py\n", 0, ""),
    ("master-address", PAIR + "export HEAD_NODE=gpu7\nsrun python x.py\n", 0, ""),
    ("whole-node-list", PBS_TWO + "export MASTER_ADDR=$(cat $PBS_NODEFILE)\nmpiexec -n 8 python x.py\n", 3, "error"),
    ("whole-node-list", PBS_TWO + "export MASTER_ADDR=$(sort -u $PBS_NODEFILE | uniq)\nmpiexec -n 8 python x.py\n", 3, "error"),
    ("whole-node-list", PBS_TWO + "export MASTER_ADDR=$(cat $PBS_NODEFILE | head -n 1)\nmpiexec -n 8 python x.py\n", 0, ""),
    ("whole-node-list", TWO + 'nodes=( $(scontrol show hostnames) )\nsame=("${nodes[@]}")\nexport MASTER_ADDR=${same[0]}\n', 0, ""),
    ("unset-variable", FOUR + "srun python x.py --init_method tcp://${MASTER_ADDR}:29500\n", 7, "warning"),
    ("unset-variable", TWO + "module load site/settings\nsrun python x.py --dist-url tcp://$MASTER_ADDR:1\n", 8, "note"),
    ("unset-variable", TWO + "source ./site.sh\nsrun python x.py --dist-url tcp://$MASTER_ADDR:1\n", 0, ""),
    ("unset-variable", TWO + "srun python x.py --dist-url tcp://${MASTER_ADDR:-localhost}:1\n", 0, ""),
    ("unset-variable", "#!/bin/bash\npython x.py --dist-url tcp://$MASTER_ADDR:1\n", 0, ""),
    ("unset-variable", ONE + "torchrun --nnodes=$WORLD_SIZE --nproc_per_node=4 x.py\n", 7, "warning"),
    ("unset-variable", TWO + "mpirun -np 2 torchrun --nnodes=2 --node_rank=$RANK x.py\n", 0, ""),
    ("unset-variable", ONE + "#SBATCH -t 1\npython x.py $SLURM_TASK_ARRAY_ID\n", 8, "warning"),
    ("unset-variable", ONE + "#SBATCH -t 1\npython x.py $SLURM_ARRAY_TASK_ID\n", 8, "note"),  # sbatch --array=0-3 job.sbatch
    ("unset-variable", PBS_TWO + "NGPUS=4\nn=$NCPUS\npython x.py $n\n", 0, ""),  # PBS Pro sets it
    ("unset-variable", ONE + 'python x.py $TOTAL\nlet TOTAL="$A * 2"\nTOTAL=3\n', 0, ""),
    ("unset-variable", ONE + "base=PWD\ncd $base\npython x.py\n", 7, "warning"),
    ("unset-variable", ONE + "name=SLURM_JOB_ID\necho ${!name}\nTRUE=PWD\n", 0, ""),
    ("test-syntax", ONE + "for ((i = 1; i <= 3; i++)); do\n  python x.py $i\ndone\nfor (( j = 1; j < 3; j++ ))\ndo\n  ls\ndone\n", 0, ""),
    ("test-syntax", ONE + "for x in a; do\n  i = 1\ndone\n", 8, "error"),
]  # fmt: skip
LISTS: list[tuple[str, str, int, str]] = [
    ("unset-variable", ONE + "seeds=(1 2 3)\nfor s in seeds; do\n  python x.py --seed ${seeds[$s]}\ndone\n", 8, "warning"),
    ("unset-variable", ONE + 'seeds=(1 2 3)\nfor s in "${seeds[@]}"; do\n  python x.py --seed $s\ndone\n', 0, ""),
    ("unset-variable", ONE + "train=a.txt\nfor part in train; do\n  python x.py $part $train\ndone\n", 0, ""),
    ("several-torchruns", TWO + "srun -n 8 mpirun ./solver\n", 7, "error"),
    ("several-torchruns", ONE + "srun mpirun -np 4 ./solver\n", 0, ""),
    ("master-address", TWO + CUT + "srun python x.py\n", 0, ""),
]  # fmt: skip
TEXTS: list[tuple[str, str, int, str]] = [
    ("never-expanded", TWO + "srun torchrun --nnodes=2 --node_rank=\\$SLURM_NODEID --master_addr=$A x.py\n", 7, "error"),
    ("never-expanded", TWO + "srun torchrun --nnodes=2 --node_rank '$SLURM_NODEID' --master_addr=$A x.py\n", 7, "error"),
    ("never-expanded", TWO + "srun bash -c 'torchrun --nnodes=2 --node_rank=\\$SLURM_NODEID --master_addr=$A x.py'\n", 7, "error"),
    ("never-expanded", TWO + 'CMD="torchrun --nnodes=2 --node_rank=\\$SLURM_PROCID x.py"\nsrun $CMD\n', 7, "error"),
    ("never-expanded", FOUR + "srun python x.py --rank \\$SLURM_PROCID\n", 7, "error"),
    ("never-expanded", FOUR + "srun env RANK=\\$SLURM_PROCID python x.py\n", 7, "error"),
    ("never-expanded", FOUR + "export WORLD_SIZE=$SLURM_NNODES*4\nsrun python x.py\n", 7, "error"),
    ("never-expanded", TWO + "srun accelerate launch --num_machines 2 --num_processes $SLURM_NNODES*4 x.py\n", 7, "error"),
    ("never-expanded", TWO + 'CMD="torchrun --nnodes=2 --node_rank=\\$SLURM_PROCID x.py"\nsrun bash -c "$CMD"\n', 0, ""),
    ("never-expanded", TWO + "srun bash -c 'torchrun --nnodes=2 --node_rank=$SLURM_NODEID --master_addr=$A x.py'\n", 0, ""),
    ("never-expanded", TWO + "ssh n torchrun --nnodes=2 --node_rank=\\$RANK x.py --port '$MASTER_PORT'\n", 0, ""),
    ("never-expanded", TWO + "srun python x.py --name 'costs $5 and $SLURM_NODEID in words'\n", 0, ""),
    ("never-expanded", FOUR + "export WORLD_SIZE=$((SLURM_NNODES*4))\nsrun python x.py\n", 0, ""),
    ("never-expanded", TWO + "export WORLD_SIZE=$SLURM_NNODES*4\nsrun torchrun --nnodes=2 x.py\n", 0, ""),  # torchrun sets it again
    ("compressed-node-list", TWO + "for n in $SLURM_JOB_NODELIST; do\n  ssh $n ls\ndone\n", 7, "error"),
    ("compressed-node-list", TWO + "mpirun -np 2 -H $SLURM_JOB_NODELIST python x.py\n", 7, "error"),
    ("compressed-node-list", ONE + "for n in $SLURM_JOB_NODELIST; do\n  ssh $n ls\ndone\n", 0, ""),
    ("compressed-node-list", TWO + "for n in $(scontrol show hostnames $SLURM_JOB_NODELIST); do\n  ssh $n ls\ndone\n", 0, ""),
    ("compressed-node-list", TWO + "mpirun -np 2 python x.py --hosts $SLURM_JOB_NODELIST\npdsh -w $SLURM_JOB_NODELIST ls\n", 0, ""),
    ("master-address", FOUR + "export MASTER_ADDR=$(srun hostname | head -n 1)\nsrun python x.py\n", 7, "warning"),
    ("master-address", FOUR + "export MASTER_ADDR=$(srun hostname | sort | head -n 1)\nsrun python x.py\n", 0, ""),
    ("master-address", FOUR + "export MASTER_ADDR=$(srun -N1 -n1 hostname | head -n 1)\nsrun python x.py\n", 0, ""),
    ("node-count", TWO + "srun accelerate launch --num_machines 1 --machine_rank $SLURM_NODEID --main_process_ip $A x.py\n", 7, "error"),
    ("node-count", TWO + "srun accelerate launch --num_machines 1 x.py --shard $SLURM_NODEID\n", 0, ""),
]  # fmt: skip
MORE: list[tuple[str, str, int, str]] = [
    ("world-size", TWO + "srun python x.py --devices 4 --num_nodes 2\n", 7, "error"),
    ("world-size", TWO + "srun python x.py trainer.devices=4 trainer.num_nodes=$SLURM_NNODES\n", 7, "error"),
    ("world-size", FOUR + "srun python x.py --devices 4 --num_nodes 2\n", 0, ""),
    ("world-size", TWO + "srun python x.py --gpus 4 --num_nodes 2\n", 0, ""),  # perhaps it starts its ranks itself
    ("world-size", TWO + "srun python x.py --devices auto --num_nodes 2\n", 0, ""),
    ("expanded-too-early", FOUR + "mpirun -np 8 python x.py --local_rank $OMPI_COMM_WORLD_LOCAL_RANK\n", 7, "error"),
    ("expanded-too-early", PBS_TWO + "pbsdsh -- torchrun --nnodes=2 --node_rank=$PBS_NODENUM --master_addr=$A x.py\n", 3, "error"),
    ("expanded-too-early", FOUR + "mpirun -np 8 bash -c 'python x.py --local_rank $OMPI_COMM_WORLD_LOCAL_RANK'\n", 0, ""),
    ("expanded-too-early", "#!/bin/bash\npython x.py --rank $PMI_RANK\n", 0, ""),  # mpirun starts this script
    ("more-ranks-than-gpus", TWO + 'for h in a b; do\n  echo "$h slots=8" >> hosts\ndone\ndeepspeed --hostfile hosts x.py\n', 8, "error"),
    ("more-ranks-than-gpus", TWO + 'for h in a b; do\n  echo "$h slots=4" >> hosts\ndone\ndeepspeed --hostfile hosts x.py\n', 0, ""),
    ("expanded-too-early", TWO + "export RANK=$SLURM_PROCID\nsrun torchrun --nnodes=2 x.py\n", 0, ""),  # torchrun sets it again
    ("expanded-too-early", TWO + "export NODE_RANK=$SLURM_NODEID\nsrun bash run.sh\n", 7, "error"),
    ("expanded-too-early", FOUR + "export RANK=$SLURM_PROCID\nsrun python x.py\n", 7, "error"),
    ("rendezvous-id-per-node", TWO + EACH.format("$RANDOM").replace("--nnodes=2", "--nnodes=1"), 0, ""),
    ("never-expanded", FOUR + "srun parallel python x.py --rank '$SLURM_PROCID' ::: 1 2\n", 0, ""),
    ("more-ranks-than-gpus", LSF_ONE + "mpirun -np 8 python train_hvd.py\n", 5, "error"),
    ("more-ranks-than-gpus", LSF_ONE.replace("[hosts=1]", "[hosts=2]") + "mpirun -np 8 python train_hvd.py\n", 0, ""),
    ("more-ranks-than-gpus", TWO + "horovodrun -np 8 -H a:4,b:4 python train_hvd.py\n", 0, ""),
    ("idle-gpus", ONE + "export CUDA_VISIBLE_DEVICES=0,1\nsrun python x.py\n", 8, "note"),  # Slurm sets it again
    ("idle-nodes", "#!/bin/bash\n#SBATCH --ntasks=8\n#SBATCH --ntasks-per-node=4\npython x.py\n", 4, "warning"),
]  # fmt: skip
PLACEMENT = [*IDS, *STARTS, *RANKS, *HOSTS, *LISTS, *TEXTS, *MORE]
