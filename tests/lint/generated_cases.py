"""Cases about batch scripts that a script writes or passes on, and about folders of logs: the rule, the script, the line, the severity; line 0 for none."""

from __future__ import annotations

HEAD = "#!/bin/bash\n"
JOB = "#!/bin/bash\n#SBATCH --nodes=1\n#SBATCH --ntasks-per-node=1\n#SBATCH --gres=gpu:4\n"
EIGHT = "torchrun --standalone --nproc_per_node=8 train.py"
REQUEST = "-N 1 --ntasks-per-node=1 --gres=gpu:{}"
FILE = HEAD + "cat > job.sh <<EOF\n" + JOB + EIGHT + " --seed $s\nEOF\n"
ECHO = HEAD + "".join(f'echo "{line}" >> job.sh\n' for line in (JOB + EIGHT).split("\n")).replace(">>", ">", 1)

GENERATED: list[tuple[str, str, int, str]] = [
    ("more-ranks-than-gpus", FILE + "sbatch job.sh\n", 7, "error"),
    ("more-ranks-than-gpus", FILE, 7, "error"),
    ("more-ranks-than-gpus", FILE + "sbatch --gres=gpu:8 job.sh\n", 0, ""),
    ("more-ranks-than-gpus", FILE + "sbatch --gres=gpu:8 $DIR/$s\n", 0, ""),
    ("more-ranks-than-gpus", FILE + "sbatch --parsable $DIR/$s\n", 7, "error"),
    ("more-ranks-than-gpus", FILE + "sed -i s/gpu:4/gpu:8/ job.sh\nsbatch job.sh\n", 0, ""),
    ("more-ranks-than-gpus", FILE.replace("8 train", "4 train") + "sbatch job.sh\n", 0, ""),
    ("more-ranks-than-gpus", ECHO + "sbatch job.sh\n", 6, "error"),
    ("more-ranks-than-gpus", ECHO + "echo done >> job.sh &\ncat more >> job.sh\n", 0, ""),
    ("more-ranks-than-gpus", HEAD + f"sbatch {REQUEST.format(4)} --wrap='{EIGHT}'\n", 2, "error"),
    ("more-ranks-than-gpus", HEAD + f'sbatch {REQUEST.format(4)} --wrap "{EIGHT}"\n', 2, "error"),
    ("more-ranks-than-gpus", HEAD + f"sbatch {REQUEST.format(8)} --wrap='{EIGHT}'\n", 0, ""),
    ("more-ranks-than-gpus", HEAD + f"sbatch $OPTIONS {REQUEST.format(4)} --wrap='{EIGHT}'\n", 0, ""),
    ("more-ranks-than-gpus", HEAD + f"sbatch {REQUEST.format(4)} <<EOF\n#!/bin/bash\n{EIGHT}\nEOF\n", 4, "error"),
    ("more-ranks-than-gpus", HEAD + f"sbatch --gres=gpu:8 <<EOF\n{JOB}{EIGHT}\nEOF\n", 0, ""),
    ("broken-line", HEAD + f"sbatch \\\n -N 1 \\\n --gres=gpu:8 \\\n --wrap='{EIGHT}'\n", 0, ""),
    ("variable-in-directive", FILE.replace("--nodes=1", "--nodes=$((a + 1))"), 0, ""),
    ("variable-in-directive", FILE.replace("EOF", "'EOF'", 1).replace("--nodes=1", "--nodes=$((a + 1))"), 4, "error"),
]

LOGS = "#!/bin/bash\n#SBATCH --output=logs/%j.out\n"
FOLDERS: list[tuple[str, str, int, str]] = [
    ("output-folder", LOGS + "mkdir -p {logs,models}\n", 2, "warning"),
    ("output-folder", LOGS.replace("logs", "out/logs") + "mkdir -p out/{logs,models}\n", 2, "warning"),
    ("output-folder", LOGS + 'D=$(pwd)\nmkdir -p "$D/logs"\n', 2, "warning"),
    ("output-folder", LOGS + "mkdir -p $PWD/logs\n", 2, "warning"),
    ("output-folder", LOGS + "srun mkdir -p logs\n", 2, "warning"),
    ("output-folder", LOGS + "bash -c 'mkdir -p logs'\n", 2, "warning"),
    ("output-folder", LOGS + "install -d logs\n", 2, "warning"),
    ("output-folder", LOGS.replace("logs", "logs/a") + "#SBATCH -J a\nmkdir -p logs/$SLURM_JOB_NAME\n", 2, "warning"),
    ("output-folder", LOGS.replace("logs", "/big/logs") + "D=/big\nmkdir -p $D/logs\n", 2, "warning"),
    ("output-folder", LOGS.replace("logs", "/big/logs") + "mkdir -p /big/logs/run1\n", 2, "note"),
    ("output-folder", HEAD + "mkdir -p logs\nsbatch <<EOF\n" + LOGS + "mkdir -p logs\npython x.py\nEOF\n", 5, "note"),
]

BATCH = "#!/bin/bash\n#SBATCH --gres=gpu:4\n"
WORDS: list[tuple[str, str, int, str]] = [
    ("secret-in-script", HEAD + "# login: me\n# password: Bright7field\npython x.py\n", 3, "warning"),
    ("secret-in-script", HEAD + "# Mot de passe : enpc_2627\npython x.py\n", 2, "warning"),
    ("secret-in-script", HEAD + "# password: see the wiki\n# password: $PASS1\n# password: <yours1>\n", 0, ""),
    ("secret-in-script", HEAD + 'echo "password: ${P1}"\necho redis_password: a1b2c3\n', 0, ""),
    ("secret-in-script", HEAD + "echo Bright7field | kinit me\n", 2, "warning"),
    ("secret-in-script", HEAD + "echo Bright7field | docker login -u me --password-stdin\n", 2, "warning"),
    ("secret-in-script", HEAD + 'echo "$PW" | kinit me\necho y | docker login\n', 0, ""),
    ("launcher-option", HEAD + "ray start --address=\npython x.py\n", 2, "error"),
    ("launcher-option", HEAD + "ray start --address ''\npython x.py\n", 2, "error"),
    ("launcher-option", HEAD + "H=$(hostname)\nray start --address=$H:6379\nray start --address=$EMPTY\n", 0, ""),
    ("launcher-option", HEAD + "torchrun --nproc_per_node=4 --master_addr= $HOST x.py\n", 2, "error"),
    ("launcher-option", HEAD + "torchrun --nproc_per_node=4 --master_addr=$HOST x.py\n", 0, ""),
    ("node-local-file", BATCH + "scp me@host:/data/a.mp4 C:\\Users\\me\\Desktop\n", 3, "error"),
    ("node-local-file", HEAD + "cd C:\\Users\\me\\project\npython x.py\n", 2, "error"),
    ("node-local-file", BATCH + 'python x.py --data="D:\\data"\n', 3, "error"),
    ("node-local-file", HEAD + 'scp out.tar "C:\\Users\\me"\n', 0, ""),
    ("node-local-file", BATCH + "python x.py --format a\\n --map ab:\\1\n", 0, ""),
]

ONE = "torchrun --standalone --nproc_per_node=1 train.py"
MAIN = JOB + "main() {\n  " + ONE + "\n}\n"
LOOP = JOB + "for s in 1 2 3; do\n  " + ONE + " --seed $s\ndone\n"
BLOCKS: list[tuple[str, str, int, str]] = [
    ("idle-gpus", MAIN + "# main runs all\ncd code\nmain\n", 6, "warning"),
    ("idle-gpus", MAIN.replace("main() {", "function main\n{") + 'main "$@"\n', 7, "warning"),
    ("idle-gpus", MAIN + "main &\nmain &\nwait\n", 0, ""),
    ("idle-gpus", MAIN + "main | tee log &\nsrun python b.py\nwait\n", 0, ""),
    ("idle-gpus", MAIN + "for i in 0 1; do main; done\n", 6, "warning"),
    ("idle-gpus", MAIN + "[ -f done.txt ] || main\n", 0, ""),
    ("idle-gpus", LOOP, 6, "warning"),
    ("idle-gpus", LOOP.replace("$s", "$s &") + "wait\n", 0, ""),
    ("idle-gpus", LOOP.replace("done", "done &") + "wait\n", 0, ""),
]

GENERATED_CASES = [*GENERATED, *FOLDERS, *WORDS, *BLOCKS]
