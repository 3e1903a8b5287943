"""Cases about values and launchers that no program gets: the rule, the script, the line and the severity; line 0 for none."""

from __future__ import annotations

from tests.lint.cases import ONE
from tests.lint.step_cases import asking

GPU = asking("--gres=gpu:1")  # 2 lines
FOUR = asking("--nodes=1", "--gres=gpu:4")  # 3 lines
NODES = asking("--nodes=4", "--ntasks-per-node=36")  # 3 lines
LIST = asking("--array=0-5") + "names=(a b c d e)\n"  # 3 lines
RUN = "python train.py\n"
LOOP = "for part in a b; do\n  python x.py $TMPDIR/$part\n  {}\ndone\n"
BEYOND = "if [ $SLURM_ARRAY_TASK_ID {1} ${{#names[@]}} ]; then exit 1; fi\npython x.py ${{names[{0}]}}\n"

LAUNCHERS: list[tuple[str, str, int, str]] = [
    ("arguments-dropped", FOUR + 'cmd="torchrun --nproc_per_node=4"\n' + RUN, 5, "warning"),
    ("arguments-dropped", FOUR + 'RUN="accelerate launch --num_processes 4"\necho hello\n' + RUN, 6, "warning"),
    ("arguments-dropped", FOUR + 'if [ $N = 1 ]; then\n  L="torchrun --standalone"\nelse\n  L="torchrun --nnodes 2"\nfi\n' + RUN, 9, "warning"),
    ("arguments-dropped", FOUR + 'L="python -u -m torch.distributed.launch --nproc_per_node=4"\n' + RUN, 5, "warning"),
    ("arguments-dropped", FOUR + 'cmd="torchrun --nproc_per_node=4"\n$cmd train.py\n', 0, ""),
    ("arguments-dropped", FOUR + 'cmd="torchrun --nproc_per_node=4"\neval "$cmd train.py"\n' + RUN, 0, ""),
    ("arguments-dropped", FOUR + 'export cmd="torchrun --nproc_per_node=4"\n' + RUN, 0, ""),
    ("arguments-dropped", FOUR + 'cmd="torchrun --nproc_per_node=4"\n. ./env.sh\n' + RUN, 0, ""),
    ("arguments-dropped", FOUR + 'cmd="torchrun --nproc_per_node=4"\nsrun python train.py\n', 0, ""),
    ("arguments-dropped", GPU + 'cmd="torchrun --nproc_per_node=1"\n' + RUN, 0, ""),
]  # fmt: skip

SHELLS: list[tuple[str, str, int, str]] = [
    ("lost-in-subshell", ONE + 'srun bash -c "export A=1"\npython x.py\n', 7, "warning"),
    ("lost-in-subshell", ONE + "srun -N1 -n1 sh -c 'export A=1; export B=2'\nsrun python x.py\n", 7, "warning"),
    ("lost-in-subshell", ONE + 'f() {\n  IDS=$(nvidia-smi -L)\n  export A=$IDS\n}\nsrun bash -c "$(declare -f f); f"\npython x.py\n', 11, "warning"),
    ("lost-in-subshell", ONE + 'f() {\n  export A=1\n  ray start\n}\nsrun bash -c "$(declare -f f); f"\npython x.py\n', 0, ""),
    ("lost-in-subshell", ONE + 'srun bash -c "export A=1; python x.py"\npython y.py\n', 0, ""),
    ("lost-in-subshell", ONE + 'srun bash -c "export A=1 && env > env.txt"\npython y.py\n', 0, ""),
    ("lost-in-subshell", ONE + 'srun bash -c "A=1 python x.py"\npython y.py\n', 0, ""),
    ("lost-in-subshell", ONE + 'python x.py\nsrun bash -c "export A=1"\n', 0, ""),
]  # fmt: skip

PLACES: list[tuple[str, str, int, str]] = [
    ("idle-nodes", NODES + "mpirun -np 11 python x.py\n", 4, "warning"),
    ("idle-nodes", NODES + "mpirun -n 36 ./solver\n", 4, "warning"),
    ("idle-nodes", NODES + "mpiexec -n 72 ./solver\n", 4, "warning"),
    ("idle-nodes", "#!/bin/bash\n#PBS -l nodes=2:ppn=12\nmpirun -np 12 ./solver\n", 3, "warning"),
    ("idle-nodes", NODES + "mpirun -np 144 ./solver\n", 0, ""),
    ("idle-nodes", NODES + "mpirun -np 120 ./solver\n", 0, ""),
    ("idle-nodes", NODES + "mpirun --map-by node -np 11 ./solver\n", 0, ""),
    ("idle-nodes", NODES + "mpirun -np 11 --bynode ./solver\n", 0, ""),
    ("idle-nodes", NODES + "export I_MPI_PERHOST=3\nmpirun -np 11 ./solver\n", 0, ""),
    ("idle-nodes", NODES + "mpirun -np 11 ./a &\nmpirun -np 11 ./b &\nwait\n", 0, ""),
]

PATHS: list[tuple[str, str, int, str]] = [
    ("quoted-tilde", GPU + "python train.py --data=~/data/x.zip\n", 3, "warning"),
    ("quoted-tilde", GPU + "torchrun --nproc_per_node=1 train.py \\\n  --out-dir=~/runs\n", 4, "warning"),
    ("quoted-tilde", GPU + "python -m pack.train --opts.dir=~/runs\n", 3, "warning"),
    ("quoted-tilde", GPU + "python train.py --data ~/x.zip --name=a~/b --url=~user\n", 0, ""),
    ("quoted-tilde", GPU + "DATA=~/x python train.py --data=$HOME/x\n", 0, ""),
    (
        "quoted-tilde",
        GPU + "pip install --find-links=~/wheels x\npython -m pip install --find-links=~/wheels x\n",
        0,
        "",
    ),
    ("pattern-not-expanded", GPU + "python x.py --output_dir runs/x-%j\n", 3, "warning"),
    ("pattern-not-expanded", GPU + "torchrun x.py --save-path=runs/%A_%a\n", 3, "warning"),
    ("pattern-not-expanded", GPU + "python x.py --job_dir runs/%j\n", 3, "note"),
    ("pattern-not-expanded", GPU + "python run_with_submitit.py --output_dir runs/%j\n", 0, ""),
    ("pattern-not-expanded", GPU + "jsrun -n1 --stdio_stdout /logs/out.%j x\n", 0, ""),
]

OTHERS: list[tuple[str, str, int, str]] = [
    ("index-out-of-range", LIST + BEYOND.format("$SLURM_ARRAY_TASK_ID", "-gt"), 4, "error"),
    ("index-out-of-range", LIST + BEYOND.format("SLURM_ARRAY_TASK_ID", "-gt"), 4, "error"),
    ("index-out-of-range", LIST + BEYOND.format("$SLURM_ARRAY_TASK_ID", "-ge"), 0, ""),
    ("index-out-of-range", LIST + BEYOND.format("$SLURM_ARRAY_TASK_ID-1", "-gt"), 0, ""),
    ("index-out-of-range", LIST.replace("0-5", "0-4") + BEYOND.format("$SLURM_ARRAY_TASK_ID", "-gt"), 0, ""),
    ("idle-gpus", asking("--gres=gpu:2", "--ntasks=1") + "srun python tools/train.py c.py --launcher=slurm\n", 4, "warning"),
    ("idle-gpus", asking("--gres=gpu:2", "--ntasks=1") + "srun python tools/train.py c.py --launcher slurm\n", 4, "warning"),
    ("idle-gpus", asking("--gres=gpu:2", "--ntasks-per-node=2") + "srun python tools/train.py c.py --launcher=slurm\n", 0, ""),
    ("never-expanded", GPU + LOOP.format("rm -rf $TMPDIR/part"), 5, "warning"),
    ("never-expanded", GPU + LOOP.format('rm -rf "${TMPDIR}"/x $TMPDIR/part'), 5, "warning"),
    ("never-expanded", GPU + LOOP.format("rm -rf $TMPDIR/part.tar $TMPDIR/part/x out/part"), 0, ""),
    ("never-expanded", GPU + LOOP.format("# rm -rf $TMPDIR/part"), 0, ""),
    ("no-effect", GPU + 'command="python -u"\nPYTHONPATH=. $command train.py\n', 0, ""),
]  # fmt: skip

DATA_FLOW_CASES = [*LAUNCHERS, *SHELLS, *PLACES, *PATHS, *OTHERS]
