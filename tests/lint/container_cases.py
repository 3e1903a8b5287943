"""Cases about docker run, loops, names without $, and GPUs that programs are told: the rule, the script, the line and the severity; 0 for none."""

from __future__ import annotations

JOB = "#!/bin/bash\n#SBATCH --nodes=1\n#SBATCH --ntasks=1\n#SBATCH --gres=gpu:4\n#SBATCH --cpus-per-task=8\n#SBATCH --time=1:00:00\n"
NODES = JOB.replace("--nodes=1", "--nodes=4").replace("--ntasks=1", "--ntasks-per-node=1")
TORQUE = "#PBS -l nodes=1:ppn=4\n#PBS -l walltime=1:00:00\n"
OPTION, LEFT, QUOTES, UNSET = "launcher-option", "background-not-awaited", "literal-quotes", "unset-variable"
IDLE, NODE, CSH = "idle-gpus", "idle-nodes", "csh-syntax"
LIST = 'ARGS=("--volume=$DATA:$DATA" "--volume=${LOGS}:${LOGS}")\nnvidia-docker run "${ARGS[@]}" image python t.py\n'
FIRST = "for i in 1 2; do\n  python t.py --fold $fold --i $i\ndone\n"
SLEEP = "docker run -d --rm --name lab image sleep infinity\ndocker exec lab python t.py\n"

FOLDERS: list[tuple[str, str, int, str]] = [
    (OPTION, JOB + "docker run -v ./out:./out image python t.py\n", 7, "error"),
    (OPTION, JOB + "podman run --rm --volume=$PWD/out:out:ro image python t.py\n", 7, "error"),
    (OPTION, JOB + "sudo docker run --rm -v ~/data:~/data image python t.py\n", 7, "error"),
    (OPTION, JOB + 'LOGS=${LOGS:-./logs}\n' + LIST, 8, "error"),
    (OPTION, JOB + ': "${LOGS:=./logs}"\n' + LIST, 8, "warning"),
    (OPTION, JOB + ': "${LOGS:=/logs}"\ndocker run -v $LOGS:$LOGS image python t.py\n', 0, ""),
    (OPTION, JOB + "docker run -v ./out:/out -v $PWD:$PWD -v $(pwd):/w -v /a:/a:ro -v cache:/root/.cache image python t.py\n", 0, ""),
    (OPTION, JOB + "docker run --rm image python -v a:b\n", 0, ""),
    (OPTION, JOB + "docker run -v /out:ro image python t.py\n", 0, ""),
]  # fmt: skip
ENDLESS: list[tuple[str, str, int, str]] = [
    (LEFT, JOB + SLEEP, 7, "warning"),
    (LEFT, JOB + SLEEP.replace("-d", "--detach").replace("sleep infinity", "tail -f /dev/null"), 7, "warning"),
    (LEFT, JOB + SLEEP + "docker stop lab\n", 0, ""),
    (LEFT, JOB + "trap 'docker rm -f lab' EXIT\n" + SLEEP, 0, ""),
    (LEFT, JOB + SLEEP + 'for c in lab; do docker rm -f "$c"; done\n', 0, ""),
    (LEFT, JOB + SLEEP.replace("sleep infinity", "redis-server"), 0, ""),
    (LEFT, JOB + SLEEP.replace("-d ", ""), 0, ""),
    (LEFT, "#!/bin/bash\n" + SLEEP, 0, ""),
    (QUOTES, JOB + ": \"${MOUNTS:='/a:/a'}\"\npython t.py\n", 7, "note"),
    (QUOTES, JOB + ": \"${MOUNTS:='/a:/a'}\"\npython t.py --m $MOUNTS\n", 7, "warning"),
    ("no-terminal", JOB + "nvidia-docker run -it image python t.py\n", 7, "error"),
]  # fmt: skip
LOOPS: list[tuple[str, str, int, str]] = [
    (UNSET, JOB + FIRST + "for j in 1 2; do\n  fold=$j\n  python e.py --fold $fold\ndone\n", 8, "warning"),
    (UNSET, JOB + FIRST + "fold=3\npython e.py --fold $fold\n", 8, "warning"),
    (UNSET, JOB + "for ((i=0; i<2; i++)); do\n  python t.py --k $((fold - 1))\ndone\n#fold=5\nfor j in 1 2; do\n  fold=$j\n  ls $fold\ndone\n", 8, "warning"),
    (UNSET, JOB + "for i in 1 2; do\n  python t.py --last $last\n  last=$i\ndone\n", 0, ""),
    (UNSET, JOB + "while read n; do\n  for i in 1 2; do\n    python t.py --last $last\n  done\n  for i in 1 2; do\n    last=$i\n  done\ndone < list\n", 0, ""),
    (UNSET, JOB + FIRST + "for j in 1 2; do\n  if [ $j = 2 ]; then\n    fold=$j\n  fi\n  python e.py --fold $fold\ndone\n", 0, ""),
    (UNSET, JOB + "source settings.sh\nfor i in 1 2; do\n  python t.py --fold $fold --i $i\ndone\nfold=3\npython e.py --fold $fold\n", 0, ""),
]  # fmt: skip
PARTS: list[tuple[str, str, int, str]] = [
    (IDLE, JOB + "python t.py --gpus 1 -c conf.yaml\n", 7, "warning"),
    (IDLE, JOB + "python -c 'import t' --gpus 1 x.py\n", 0, ""),
    (IDLE, JOB + "python tools/train.py -f exps/default/yolox_s.py -d 1 -b 16\n", 7, "warning"),
    (IDLE, JOB + "python -m yolox.tools.train -n yolox-s -d 2 -b 16\n", 7, "warning"),
    (IDLE, JOB + "python tools/train.py -f exps/default/yolox_s.py -d 4 -b 16\n", 7, "note"),
    (IDLE, JOB + "python tools/train.py -f conf.py -d 1 -b 16\n", 7, "note"),
    (IDLE, JOB + "python main.py fit --trainer.devices=1\n", 7, "warning"),
    (IDLE, JOB + "python main.py fit --trainer.gpus 2\n", 7, "warning"),
    (IDLE, JOB + "python main.py fit --trainer.devices=4\n", 7, "note"),
    (NODE, NODES + "python t.py -c conf.yaml\n", 7, "warning"),
    (NODE, NODES + ". /apps/conda_init.sh\npython t.py\n", 8, "warning"),
    (NODE, NODES + "source ~/t/setup_env.sh\npython t.py\n", 8, "warning"),
    (NODE, NODES + "source start_cluster.sh\npython t.py\n", 0, ""),
    (CSH, TORQUE + "set n = `wc -l < $PBS_NODEFILE`\necho $n\npython t.py\n", 0, ""),
    (CSH, TORQUE + "set n = `wc -l < $PBS_NODEFILE`\nexport A=1\npython t.py\n", 3, "error"),
    (CSH, "#!/bin/sh\n" + TORQUE + "set n = `wc -l < $PBS_NODEFILE`\npython t.py\n", 4, "error"),
]  # fmt: skip

NAMES: list[tuple[str, str, int, str]] = [
    (UNSET, JOB + "out_dir=/a/b\nmkdir -p out_dir\npython t.py --o $out_dir\n", 8, "warning"),
    (UNSET, JOB + "OUT=$SCRATCH/runs\ncd OUT\npython t.py\n", 8, "warning"),
    (UNSET, JOB + "out_dir=/a/out_dir\nmkdir -p out_dir\npython t.py --o $out_dir\n", 0, ""),
    (UNSET, JOB + "out=/a/b\nmkdir -p out\npython t.py --o $out\n", 0, ""),
    (UNSET, JOB + "out_dir=a\nmkdir -p out_dir\npython t.py --o $out_dir\n", 0, ""),
    (UNSET, JOB + "out_dir=/a/b\nmkdir -p out_dir\ncp x out_dir/y\npython t.py --o $out_dir\n", 0, ""),
]  # fmt: skip
TOLD: list[tuple[str, str, int, str]] = [
    (IDLE, JOB + "python t.py --gpu_ids 0,1\n", 7, "warning"),
    (IDLE, JOB + "python t.py gpus=[0,1]\n", 7, "warning"),
    (IDLE, JOB + "time -p singularity exec --nv image.sif python3 t.py --gpu_ids 0,1\n", 7, "warning"),
    (IDLE, JOB + "/usr/bin/time -v -o time.txt numactl -N 0 python t.py --device 0\n", 7, "warning"),
    (IDLE, JOB + "python tools/run_net.py --cfg c.yaml NUM_GPUS 2 TRAIN.BATCH_SIZE 8\n", 7, "warning"),
    (IDLE, JOB + "python tools/run_net.py --cfg c.yaml NUM_GPUS 4\n", 7, "note"),
    ("more-ranks-than-gpus", JOB + "python tools/run_net.py --cfg c.yaml NUM_GPUS 8\n", 7, "error"),
    ("more-ranks-than-gpus", JOB + "python tools/run_net.py --cfg c.yaml NUM_GPUS 4\n", 0, ""),
    (IDLE, JOB + "python tools/train.py --set NUM_GPUS 2\n", 7, "note"),
    (QUOTES, JOB + "X=\"''\"\npython train.py --x $X\n", 7, "note"),
    (QUOTES, JOB + "X=\"'a'\"\npython train.py --x $X\n", 7, "warning"),
    (IDLE, JOB + "python t.py --gpu_ids 0,1,2,3\n", 7, "note"),
    (IDLE, JOB + "python t.py --gpu_ids 0,1,2 --render_id 3\n", 7, "note"),
    (IDLE, JOB + "ssh host python t.py --gpu_ids 0,1\n", 7, "note"),
    ("option-of-program", JOB + "srun python t.py --gpus-per-node=$SLURM_GPUS_PER_NODE\n", 0, ""),
    ("option-of-program", JOB + "srun python t.py --gpus-per-node=4\n", 7, "warning"),
]  # fmt: skip

ON_NODE = "cp -r data $SLURM_TMPDIR\ncd $SLURM_TMPDIR\n"
LOST: list[tuple[str, str, int, str]] = [
    ("results-left-on-node", JOB + ON_NODE + "python t.py --output_dir $SLURM_TMPDIR/out\necho done\n", 9, "warning"),
    ("results-left-on-node", JOB + ON_NODE + "mkdir out\ncd out\npython t.py --output_dir run1\n", 11, "warning"),
    ("results-left-on-node", JOB + ON_NODE + "python t.py --output_dir out\ncp -r out $HOME\n", 0, ""),
    ("results-left-on-node", JOB + ON_NODE + "python t.py --output_dir out\n./save.sh\n", 0, ""),
    ("results-left-on-node", JOB + "trap 'cp -r out /a' EXIT\n" + ON_NODE + "python t.py --output_dir out\n", 0, ""),
    ("results-left-on-node", JOB + ON_NODE + "cd $HOME/run\npython t.py --output_dir out\n", 0, ""),
    ("results-left-on-node", JOB + ON_NODE + "python t.py --output_dir ../out --data x\n", 0, ""),
]  # fmt: skip

CONTAINER_CASES = [*FOLDERS, *ENDLESS, *LOOPS, *PARTS, *NAMES, *TOLD, *LOST]
