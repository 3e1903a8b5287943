"""Cases about launches on several nodes, how files are started, and commands that end other jobs; line 0 for none."""

from __future__ import annotations

from tests.lint.cases import ONE, RUN, TWO

FOUR = TWO.replace("--ntasks-per-node=1", "--ntasks-per-node=4")
FEW = TWO.replace("#SBATCH --ntasks-per-node=1\n", "#SBATCH --time=1:00:00\n")
NODES = TWO + "nodes=($(scontrol show hostnames $SLURM_JOB_NODELIST))\n"
LIST = TWO + "list=$(scontrol show hostnames $SLURM_JOB_NODELIST)\nnodes=($list)\nhead=${nodes[0]}\n"
B = "#!/bin/bash\n"
MEET = "--nproc_per_node=8 --master_addr=10.0.0.1 --master_port=29500 x.py\n"

STEPS: list[tuple[str, str, int, str]] = [
    ("step-nodes", NODES + "srun -w ${nodes[0]} ray start --head --block &\nwait\n", 8, "error"),
    ("step-nodes", LIST + 'ip=$(srun --nodelist="$head" hostname -I)\n', 10, "error"),
    ("step-nodes", TWO + "for n in $L; do\n  srun -w $n python x.py &\ndone\nwait\n", 8, "error"),
    ("step-nodes", TWO + "run() {\n  local node=$1\n  srun -w $node python x.py\n}\nrun a\n", 9, "error"),
    ("step-nodes", FEW + "srun -w node7 hostname\n", 7, "error"),
    ("step-nodes", TWO + "srun -N 1 torchrun --nnodes=1 x.py\n", 7, "error"),
    ("step-nodes", FOUR + "srun --nodes=1 -w $(hostname) python x.py\n", 7, "error"),
    ("step-nodes", NODES + "srun -N 1 -n 1 -w ${nodes[0]} hostname\nsrun -n1 -w ${nodes[1]} hostname\n", 0, ""),
    ("step-nodes", TWO + "srun -w $SLURM_JOB_NODELIST hostname\nsrun -w a,b hostname\nsrun -w ${L[@]} hostname\n", 0, ""),
    ("step-nodes", FEW + "srun -N 1 -w node7 hostname\n", 0, ""),  # without --ntasks the step has one task per node
    ("step-nodes", ONE + "srun -w node7 hostname\nsrun -N 1 hostname\n", 0, ""),
    ("step-nodes", FOUR + "srun -N 2 python x.py\n", 0, ""),
    ("step-nodes", TWO + "unset SLURM_NTASKS\nsrun -N 1 hostname\n", 0, ""),
    ("step-nodes", TWO + "srun $OPTIONS -w node7 hostname\n", 0, ""),
    ("host-file", B + "deepspeed --num_nodes 2 --num_gpus 8 x.py --deepspeed z.json\n", 2, "error"),
    ("host-file", TWO + "srun deepspeed --num_nodes=$SLURM_NNODES --num_gpus=4 x.py\n", 7, "error"),
    ("host-file", B + "deepspeed --num_nodes 2 --hostfile hosts --num_gpus 8 x.py\n", 0, ""),
    ("host-file", B + "deepspeed --num_nodes 1 --num_gpus 8 x.py\ndeepspeed $MORE --num_nodes 2 x.py\n", 0, ""),
    ("master-address", B + "docker run --gpus all -v /a:/a image torchrun --nnodes=2 --node_rank=$1 " + MEET, 2, "warning"),
    ("master-address", B + 'docker run --rm image bash -c "torchrun --nnodes=2 --node_rank=$1 ' + MEET[:-1] + '"\n', 2, "warning"),
    ("master-address", B + "docker run --net=host image torchrun --nnodes=2 --node_rank=$1 " + MEET, 0, ""),
    ("master-address", B + "docker run -p 29500:29500 image torchrun --nnodes=2 --node_rank=$1 " + MEET, 0, ""),
    ("master-address", B + "docker run $OPTIONS --rm image torchrun --nnodes=2 --node_rank=$1 " + MEET, 0, ""),
    ("master-address", B + "docker run --rm image torchrun --nnodes=1 --nproc_per_node=8 x.py\n", 0, ""),
    ("master-address", B + "docker exec box torchrun --nnodes=2 --node_rank=$1 " + MEET, 0, ""),
]  # fmt: skip
STARTS: list[tuple[str, str, int, str]] = [
    ("not-runnable", FOUR + "srun train.py --epochs 3\n", 7, "warning"),
    ("not-runnable", FOUR + "FILE=main.py\nsrun $FILE --epochs 3\n", 8, "warning"),
    ("not-runnable", FOUR + "mpirun -np 8 train.py\n", 7, "warning"),
    ("not-runnable", ONE + "train.py --epochs 3\n", 7, "error"),
    ("not-runnable", ONE + "nohup train.sh > log &\nwait\n", 7, "error"),
    ("not-runnable", ONE + "if [ -f a ]; then train_net.py; fi\n", 7, "error"),
    ("not-runnable", ONE + 'application="nli.sh"\nCMD="$application $options"\neval $CMD\n', 7, "error"),
    ("not-runnable", ONE + "bash train.py\n", 7, "error"),
    ("not-runnable", ONE + "srun sh -x tools/train.py\n", 7, "error"),
    ("not-runnable", ONE + "source prepare.py\n", 7, "error"),
    ("not-runnable", ONE + "python -u scripts/run.sh\n", 7, "error"),
    ("not-runnable", ONE + "basecall.py --gpu 0\nstart-master.sh\nsrun m2m.py train\n", 0, ""),  # of packages
    ("not-runnable", ONE + "module load taiyaki\ntrain_flipflop.py a\n", 0, ""),
    ("not-runnable", ONE + "export PATH=$PWD/tools:$PATH\ntrain.py\n", 0, ""),
    ("not-runnable", ONE + "chmod +x train.py\nsrun train.py\n", 0, ""),
    ("not-runnable", ONE + "./train.sh\nsrun ./train.py\nbash train.sh\n. train.sh\npython train.py run.sh\n", 0, ""),
    ("not-runnable", ONE + "mpirun -np 4 nrniv -mpi -python run.py\napptainer run a.sif train.py\n", 0, ""),
    ("not-runnable", ONE + "bash run.sh train.py\nbash -c train_all\npython -m pkg run.sh\n", 0, ""),
    ("not-runnable", ONE + "run.sh() { echo; }\nrun.sh\n", 0, ""),
]
ENDS: list[tuple[str, str, int, str]] = [
    ("kills-others", ONE + "srun python x.py\nscancel -w $(hostname)\n", 8, "warning"),
    ("kills-others", ONE + "scancel --user=$(whoami)\n", 7, "warning"),
    ("kills-others", ONE + "squeue -u $USER -h -o %i | xargs scancel\n", 7, "warning"),
    ("kills-others", ONE + "scancel $(squeue -u $USER -h -o %i)\n", 7, "warning"),
    ("kills-others", ONE + "pkill -9 -u $USER\n", 7, "warning"),
    ("kills-others", ONE + "kill -9 -1\n", 7, "warning"),
    ("kills-others", ONE + "docker rm -f $(docker ps -aq)\n", 7, "warning"),
    ("kills-others", ONE + "kill -9 $(nvidia-smi | sed -n 's/| *\\([0-9]*\\).*/\\1/p')\n", 7, "warning"),
    ("kills-others", ONE + "scancel -u $USER -t PENDING\nscancel -u $USER -n other\nscancel $OTHER\n", 0, ""),
    ("kills-others", ONE + "scancel $(squeue -u $USER -n other -h -o %i)\n", 0, ""),
    ("kills-others", ONE + "squeue -u $USER | grep other | awk '{print $1}' | xargs scancel\n", 0, ""),
    ("kills-others", ONE + "pkill -u $USER wandb\ndocker stop $NAME\ndocker rm $(docker ps -aq --filter name=a)\n", 0, ""),
    ("kills-others", B + "scancel -u $USER\npkill -u $USER\n", 0, ""),  # no job
]  # fmt: skip
UNSET: list[tuple[str, str, int, str]] = [
    ("unset-variable", TWO + "run() {\n  local node=$1\n  srun -N1 -n1 -w $node python x.py\n}\nrun a\nrun b\n", 0, ""),
]
AT = "--nproc_per_node=4 --master_addr=$H --master_port=$P x.py"
LOOP = TWO + "for {}\n  ssh $n torchrun --nnodes={} --node_rank=$i " + AT + " &\ndone\nwait\n"
WORKERS = TWO + "for n in $L; do\n  srun -N1 -n1 -w $n ray start --address=$H --block &\ndone\n"
RENDEZVOUS: list[tuple[str, str, int, str]] = [
    ("launcher-option", TWO + RUN + "--rdzv_backend=nccl --rdzv_endpoint=$H:$P x.py\n", 7, "error"),
    ("launcher-option", TWO + RUN + "--rdzv_backend=$B --rdzv_endpoint=$H:$P x.py\n", 0, ""),
    ("launcher-option", TWO + RUN + "--rdzv_backend c10d --rdzv_endpoint $H: $PORT x.py\n", 7, "error"),
    ("launcher-option", TWO + RUN + "--node_rank 0 --master_addr $H 29500 x.py\n", 7, "error"),
    ("launcher-option", TWO + RUN + "--rdzv_backend c10d --rdzv_endpoint $H:$PORT x.py --port 29500\n", 0, ""),
    ("launcher-option", LOOP.format("((i=1; i<=$SLURM_NNODES; i++)); do", "$SLURM_NNODES"), 8, "error"),
    ("launcher-option", LOOP.format("i in $(seq 0 $N); do", "$N"), 8, "error"),
    ("launcher-option", LOOP.format("i in {1..4}; do", "4"), 8, "error"),
    ("launcher-option", LOOP.format("i in 1 2; do", "2"), 8, "error"),
    ("launcher-option", LOOP.format("((i=0; i<$SLURM_NNODES; i++)); do", "$SLURM_NNODES"), 0, ""),
    ("launcher-option", LOOP.format("i in $(seq 1 $((N - 1))); do", "$N"), 0, ""),
    ("launcher-option", LOOP.format("i in {0..3}; do", "4"), 0, ""),
    ("step-nodes", WORKERS + "srun python driver.py\n", 10, "error"),
    ("step-nodes", WORKERS + "srun -N 1 -n 1 python driver.py\nsrun ray stop\npython more.py\n", 0, ""),
]
FUNCTIONS: list[tuple[str, str, int, str]] = [
    ("builtin-as-program", TWO + "run_one() {\n  python x.py\n}\nsrun run_one\n", 10, "error"),
    ("builtin-as-program", TWO + "function run_one {\n  python x.py\n}\nsrun bash -c run_one\n", 10, "error"),
    ("builtin-as-program", TWO + "run_one() {\n  python x.py\n}\nexport -f run_one\nsrun bash -c run_one\n", 0, ""),
    ("builtin-as-program", TWO + "run_one() {\n  python x.py\n}\nrun_one\nsrun bash run_one.sh\n", 0, ""),
    ("builtin-as-program", TWO + "a() {\n  python x.py\n}\na\nsrun bash -c 'a() { echo; }; a'\n", 0, ""),
]
HOSTS = "torchrun --nnodes=2 --node_rank={} " + AT
WORDS: list[tuple[str, str, int, str]] = [
    ("not-runnable", ONE + 'CMD="python x.py --a 1"\nsrun "$CMD"\n', 8, "error"),
    ("not-runnable", ONE + "srun -l 'torchrun --nproc_per_node 4 x.py'\n", 7, "error"),
    ("not-runnable", ONE + 'mpirun -np 4 "python x.py"\n', 7, "error"),
    ("not-runnable", ONE + 'apptainer exec --nv a.sif "python x.py"\n', 7, "error"),
    ("not-runnable", ONE + 'bash "python x.py"\n', 7, "error"),
    ("not-runnable", ONE + 'CMD="python x.py"\nsrun $CMD\nsrun bash -c "$CMD"\nssh a "python x.py"\n', 0, ""),
    ("not-runnable", ONE + 'apptainer run a.sif "python x.py"\nmpirun -np 4 ./wrap.sh "python x.py"\n', 0, ""),
    ("not-runnable", ONE + "torchrun \\\r\n  train.py \\\r\n  --lr 1\r\n", 0, ""),
    ("not-runnable", ONE + 'apptainer exec a.sif bash -c "python x.py"\necho "python x.py"\n', 0, ""),
    ("host-file", B + "deepspeed --include='node1:0,1@node2:0,1' x.py\n", 2, "error"),
    ("host-file", B + "deepspeed --include localhost:0,1 x.py\ndeepspeed --hostfile h --include node1:0 x.py\n", 0, ""),
    ("same-node-rank", B + 'pdsh -w node[1-2] "' + HOSTS.format(0) + '"\n', 2, "error"),
    ("same-node-rank", B + "for h in a b; do\n  ssh $h " + HOSTS.format("$i") + " &\ndone\nwait\n", 3, "error"),
    ("same-node-rank", B + 'ssh node1 "' + HOSTS.format(0) + '" &\nwait\n', 0, ""),
    ("same-node-rank", B + "read i\n" + HOSTS.format("$i") + "\n" + HOSTS.format("$NODE_RANK") + "\n", 0, ""),
    ("same-node-rank", B + "i=0\nfor h in a b; do\n  ssh $h " + HOSTS.format("$i") + " &\n  ((i++))\ndone\nwait\n", 0, ""),
    ("nodes-in-sequence", B + 'for i in 0 1; do\n  ssh ${H[$i]} "cd /w; NODE_RANK=$i bash train.sh"\ndone\n', 3, "error"),
    ("nodes-in-sequence", B + 'for i in 0 1; do\n  ssh ${H[$i]} "NODE_RANK=$i bash train.sh" &\ndone\nwait\n', 0, ""),
    ("nodes-in-sequence", B + 'for h in a b; do\n  ssh $h "bash install.sh"\ndone\n', 0, ""),
    ("too-few-slots", B + "mpirun -np 16 -H node1,node2 -x PATH python x.py\n", 2, "error"),
    ("too-few-slots", B + "mpirun -np 2 -H node1,node2 -x PATH python x.py\nmpirun -np 16 -H a,b python x.py\n", 0, ""),
]  # fmt: skip
CONFIG = "cat > a.yaml <<EOF\nmachine_rank: 0\nnum_machines: {}\nnum_processes: {}\nEOF\n"
START = "srun -K1 -c32 accelerate launch --config_file a.yaml {}--main_process_ip $H x.py\n"
SETUP = "cat > env.sh <<'EOF'\nconda activate a\nexport A=1\n{}EOF\nfor n in a b; do\n  ssh $n 'bash ~/env.sh'\ndone\npython x.py\n"
WRITTEN: list[tuple[str, str, int, str]] = [
    ("same-node-rank", TWO + CONFIG.format(2, 8) + START.format(""), 12, "error"),
    ("same-node-rank", TWO + CONFIG.format(2, 8) + START.format("--machine_rank $R "), 0, ""),
    ("same-node-rank", ONE + CONFIG.format(1, 4) + START.format(""), 0, ""),
    ("more-ranks-than-gpus", ONE + CONFIG.format(1, 8) + START.format(""), 12, "error"),
    ("more-ranks-than-gpus", ONE + CONFIG.format(1, 8) + START.format("--num_processes 4 "), 0, ""),
    ("more-ranks-than-gpus", TWO + CONFIG.format(2, 8) + START.format("--machine_rank $R "), 0, ""),
    ("launcher-option", ONE + "apptainer --nv exec a.sif python x.py\n", 7, "error"),
    ("launcher-option", ONE + "apptainer --debug exec --nv a.sif python x.py\n", 0, ""),
    ("lost-in-subshell", B + SETUP.format(""), 7, "warning"),
    ("lost-in-subshell", B + SETUP.format("pip install a\n"), 0, ""),
]
SEVERAL_CASES = [*STEPS, *STARTS, *ENDS, *UNSET, *RENDEZVOUS, *FUNCTIONS, *WORDS, *WRITTEN]
