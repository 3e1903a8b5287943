"""More mistakes that `lint_planted` plants: misspelt options and directives, secrets, removals, servers, processes that are not awaited, folders."""

from __future__ import annotations

import random
import re
from collections.abc import Callable

from benchmarks.lint_mistakes import FORMS, Plant, Planted, Script, add, replace_launch, result

__all__ = ["FORMS"]

# Misspelt options and directives

WRONG_OPTION = "launcher-option unknown-option directive-refused misspelled-option"
for launch in (
    "torchrun --nproc_pernode=4 NAME.py", "torchrun --npoc_per_node=4 NAME.py", "torchrun --nproc_per_node=4 --master_adress=localhost NAME.py",
    "torchrun --nnodes=1 --nproc_per_node=4 --rdzv_endpont=localhost:29500 NAME.py", "accelerate launch --num_procs 4 NAME.py",
    "accelerate launch --mixed_precison bf16 NAME.py", "deepspeed --num_gpus_per_node 4 NAME.py", "srun --cpu-per-task=4 python NAME.py",
    "srun --gpus-per-tasks=1 python NAME.py", "srun --ntask=1 python NAME.py", "mpirun -np 4 --map_by node python NAME.py", "srun --mpi pmix --bind-cpu=none python NAME.py",
):  # fmt: skip
    add("option misspelt", launch.removesuffix(" NAME.py"), WRONG_OPTION, replace_launch(launch))


def change_directive(pattern: str, new: Callable[[re.Match[str]], str]) -> Plant:
    """Return a function that writes one of the script's directives in another way."""

    def plant(script: Script, rng: random.Random) -> Planted | None:
        if not script.is_slurm or "{" in "".join(line for line in script.lines if line.startswith("#SBATCH")):
            return None
        found = [i for i, line in enumerate(script.lines[: script.body()]) if re.fullmatch(pattern, line.rstrip())]
        if not found:
            return None
        at = rng.choice(found)
        match = re.fullmatch(pattern, script.lines[at].rstrip())
        lines = list(script.lines)
        lines[at] = new(match) if match else ""
        return result(lines, at, at)

    return plant


SIZED = r"#SBATCH (--(?:nodes|ntasks-per-node|gres|time|mem|cpus-per-task|partition|gpus-per-node|ntasks))=(\S+)"
DIRECTIVE = "directive-refused directive-not-read unknown-option typographic-character time-unit directive-too-late blank-before-equals variable-in-directive"
for way, new in {
    "letters swapped": lambda m: f"#SBTACH {m[1]}={m[2]}",
    "blank": lambda m: f"# SBATCH {m[1]}={m[2]}",
    "lower case": lambda m: f"#sbatch {m[1]}={m[2]}",
    "joined": lambda m: f"#SBATCH{m[1]}={m[2]}",
    "blanks around =": lambda m: f"#SBATCH {m[1]} = {m[2]}",
    "blank after =": lambda m: f"#SBATCH {m[1]}= {m[2]}",
    "one hyphen": lambda m: f"#SBATCH {m[1][1:]}={m[2]}",
    "dash": lambda m: f"#SBATCH \u2014{m[1][2:]}={m[2]}",
    "underscore": lambda m: (
        f"#SBATCH {m[1]}={m[2]}".replace("-per-", "_per_") if "-per-" in m[1] else "#SBATCH --job_name=a"
    ),
    "plural": lambda m: (
        f"#SBATCH {m[1].replace('-per-node', '-per-nodes')}={m[2]}"
        if "-per-node" in m[1]
        else f"#SBATCH --partitions={m[2]}"
    ),
    "no option": lambda m: f"#SBATCH {m[1][2:]}={m[2]}",
    "variable": lambda m: f"#SBATCH {m[1]}=$VALUE",
    "exclamation": lambda m: f"#!SBATCH {m[1]}={m[2]}",
}.items():
    add("directive misspelt", way, DIRECTIVE, change_directive(SIZED, new))


def late_directive(command: str) -> Plant:
    def plant(script: Script, rng: random.Random) -> Planted | None:
        found = [i for i, line in enumerate(script.lines[: script.body()]) if re.match(SIZED, line)]
        if not script.is_slurm or len(found) < 2:
            return None
        lines = list(script.lines)
        at = found[-1]
        lines.insert(at, command)
        return result(lines, at, at + 1)

    return plant


for command in (
    "module purge",
    "set -e",
    "NAME=run1",
    "export OMP_NUM_THREADS=4",
    'echo "starting"',
    "source ~/.bashrc",
    "cd ~/project",
    ": ${X:=1}",
):
    add("directive too late", command.split()[0], "directive-too-late", late_directive(command))

# Secrets, removals, servers, containers, processes in the background


def insert(text: str, end: bool = False, lines_from: int = 0) -> Plant:
    """Return a function that inserts lines in front of the script's first command or behind its last."""

    def plant(script: Script, rng: random.Random) -> Planted | None:
        last = script.last
        if last is None or re.search(r"\btrap\b|set -\w*u", script.text):
            return None
        at = len(script.lines) if end else last[0]
        new = text.split("\n")
        lines = [*script.lines[:at], *new, *script.lines[at:]]
        return result(lines, at + lines_from, at + len(new) - 1)

    return plant


HEX, HF, OPENAI, GITHUB = (
    "0123456789abcdef" * 2 + "89abcdef",
    "hf_" + "qWxRtYuIoPkLmNoPqRsTuVzXyZabKdMfGh",
    "sk-proj-" + "Ab1Cd2Ef3" * 5,
    "ghp_" + "Ab1Cd2" * 6,
)
LEAKED = "secret-in-script secret-printed"
for way, line in {
    "export": f"export WANDB_API_KEY={HEX}", "quoted": f'export WANDB_API_KEY="{HEX}"', "wandb login": f"wandb login {HEX}", "relogin": f"wandb login --relogin {HEX}",
    "not exported": f"WANDB_API_KEY={HEX} python x.py", "hf login": f"huggingface-cli login --token {HF}", "hf export": f"export HF_TOKEN='{HF}'", "hub option": f"python push.py --hub_token {HF}",
    "hub option =": f"python push.py --token={HF}", "git": f"git clone https://user:{GITHUB}@github.com/a/b.git", "curl": f'curl -H "Authorization: Bearer {OPENAI}" https://api.openai.com/v1/models',
    "openai": f"export OPENAI_API_KEY={OPENAI}", "docker -e": f"docker run --gpus all -e HF_TOKEN={HF} img python x.py", "env": f"env HF_TOKEN={HF} python x.py", "netrc": f'echo "machine api.wandb.ai login user password {HEX}" > ~/.netrc',
    "python -c": f"python -c \"import wandb; wandb.login(key='{HEX}')\"", "srun export": f"srun --export=ALL,WANDB_API_KEY={HEX} python x.py", "sshpass": "sshpass -p 'Xy7!kQ2p' ssh user@host ls",
    "default": f'export WANDB_API_KEY="${{WANDB_API_KEY:-{HEX}}}"', "comment": f"# export WANDB_API_KEY={HEX}", "array": f"ARGS=(--wandb_key {HEX})", "here-document": f"cat > .env <<EOF\nHF_TOKEN={HF}\nEOF",
    "singularity": f"singularity exec --nv --env HF_TOKEN={HF} x.sif python x.py", "apptainer variable": f"export APPTAINERENV_WANDB_API_KEY={HEX}", "other name": f"export MY_WANDB={HEX}", "aws": "export AWS_SECRET_ACCESS_KEY=wJalrXUtnFEMIxK7MDENGxbPxRfiCYzzzzzzKEYa",
    "generic": "export COMET_API_KEY=aB3dE5fG7hI9jK1lM3nO5pQ7r", "password option": "mysql -u root -pXk29sLq8 db < a.sql", "kaggle": "export KAGGLE_KEY=0123456789abcdef0123456789abcdef",
}.items():  # fmt: skip
    add("secret", way, LEAKED, insert(line))

REMOVES = "deletes-too-much fixed-name-in-tmp"
for way, line in {
    "unset": "rm -rf $NO_SUCH_DIR/*", "unset braces": 'rm -rf "${NO_SUCH_DIR}/"', "tmp": "rm -rf /tmp/*", "home cache": "rm -rf ~/.cache/*", "cd": "cd $NO_SUCH_DIR\nrm -rf *", "cd known": "cd results\nrm -rf *",
    "scratch": "rm -rf $SCRATCH/*", "command": "rm -rf $(find_old)/*", "substitution": 'rm -rf "$(cat folder.txt)"/*', "shm": "rm -rf /dev/shm/*", "find": "find /tmp -user $USER -delete", "home": "rm -rf $HOME/*",
}.items():  # fmt: skip
    add("removes too much", way, REMOVES, insert(line))

BLOCKS = "blocks-script"
for way, line in {
    "vllm": "vllm serve org/model --port 8000", "vllm module": "python -m vllm.entrypoints.openai.api_server --model x --port 8000", "ray": "ray start --head --port 6379 --block", "tensorboard": "tensorboard --logdir runs --port 6006",
    "jupyter": "jupyter notebook --no-browser --port 8888", "lab": "srun jupyter lab --ip 0.0.0.0 --no-browser", "ollama": "ollama serve", "sglang": "python -m sglang.launch_server --model-path x --port 30000", "http": "python -m http.server 8000",
    "srun": "srun --nodes=1 --ntasks=1 ray start --head --block", "container": "singularity exec --nv x.sif vllm serve org/model", "prefix": "CUDA_VISIBLE_DEVICES=0 vllm serve org/model --port 8000", "conda run": "conda run -n vllm vllm serve org/model",
    "nohup": "nohup vllm serve org/model > server.log 2>&1", "variable": 'SERVER="vllm serve org/model"\n$SERVER', "bash -c": 'bash -c "vllm serve org/model"', "tgi": "text-generation-launcher --model-id org/model", "tail": "tail -f train.log",
    "llama": "llama-server -m model.gguf --port 8080", "trl": "trl vllm-serve --model org/model", "watch": "watch -n 5 nvidia-smi", "nvidia-smi": "nvidia-smi -l 10 > gpu.log", "python -m notebook": "python -m jupyter lab --no-browser",
}.items():  # fmt: skip
    add("blocks", way, BLOCKS, insert(line))

LEFT = "background-not-awaited"
for way, line in {
    "last": "python NAME.py &", "nohup": "nohup python NAME.py > log 2>&1 &", "redirected": "torchrun --standalone NAME.py > log.txt 2>&1 &", "group": "(python NAME.py) &", "loop": "for i in 0 1 2 3; do\n  CUDA_VISIBLE_DEVICES=$i python NAME.py --fold $i &\ndone",
    "srun": "srun python NAME.py &", "then echo": 'python NAME.py &\necho "started"', "pid": "python NAME.py &\nPID=$!\necho $PID", "function": "run() {\n  python NAME.py --a $1 &\n}\nrun 1\nrun 2", "disown": "python NAME.py &\ndisown",
    "sleep": "python NAME.py &\nsleep 60", "while": "i=0\nwhile [ $i -lt 4 ]; do\n  CUDA_VISIBLE_DEVICES=$i python NAME.py &\n  i=$((i+1))\ndone", "bash -c": 'bash -c "python NAME.py &"', "setsid": "setsid python NAME.py > log 2>&1 &", "screen": "screen -dmS train python NAME.py", "tmux": "tmux new-session -d -s train 'python NAME.py'",
}.items():  # fmt: skip
    add("not awaited", way, LEFT, replace_launch(line, head="--nodes=1 --ntasks=1 --gres=gpu:4", end=True))

ENDLESS = "endless-wait"
for way, line in {
    "vllm": "vllm serve org/model --port 8000 &", "ray": "ray start --head --block &", "nvidia-smi": "nvidia-smi dmon -s u > gpu.log &", "loop": "while true; do nvidia-smi >> gpu.log; sleep 30; done &", "tensorboard": "tensorboard --logdir runs &",
    "srun": "srun --nodes=1 --ntasks=1 --overlap ray start --head --block &", "module": "python -m vllm.entrypoints.openai.api_server --model x > server.log 2>&1 &", "nohup": "nohup vllm serve org/model > s.log 2>&1 &", "prefix": "CUDA_VISIBLE_DEVICES=0 vllm serve org/model &", "function": "watch_gpu() {\n  while true; do nvidia-smi; sleep 5; done\n}\nwatch_gpu > gpu.log &",
}.items():  # fmt: skip
    add("endless wait", way, ENDLESS, replace_launch(f"{line}\npython NAME.py --epochs 3\nwait", end=True))


def without_driver(script: Script, rng: random.Random) -> Planted | None:
    """Remove --nv from containers in which a program is trained."""
    at = [
        i
        for i, line in enumerate(script.lines)
        if re.search(r"\b(?:singularity|apptainer) (?:exec|run)\b.* --(?:nv|rocm)\b", line)
    ]
    if not at or "SINGULARITY_NV" in script.text or re.search(r"--nv(?!\s)|=.*--nv", script.text):
        return None
    lines = [re.sub(r" --(?:nv|rocm)\b", "", line) for line in script.lines]
    whole = [j for i in at for j in range(i, min(i + 8, len(lines)))]
    if not any(re.search(r"torchrun|cuda|gpu|accelerate|deepspeed|train", lines[j], re.I) for j in whole):
        return None
    return Planted("\n".join(lines) + "\n", {i + 1 for i in at})


add("container without driver", "no --nv", "container-without-gpu", without_driver)


def folder_too_late(create: str) -> Plant:
    def plant(script: Script, rng: random.Random) -> Planted | None:
        if not script.is_slurm or not script.launches:
            return None
        lines = [
            line
            for line in script.lines
            if not re.match(r"#SBATCH\s+(?:--output|--error|-o|-e)\b", line) and "mkdir" not in line
        ]
        lines.insert(1, "#SBATCH --output=slurm_logs_a/%x-%j.out")
        lines.insert(next(i for i, line in enumerate(lines) if line.strip() and not line.startswith("#")), create)
        return Planted("\n".join(lines) + "\n", {2})

    return plant


for create in (
    "mkdir -p slurm_logs_a",
    "mkdir slurm_logs_a",
    "[ -d slurm_logs_a ] || mkdir slurm_logs_a",
    "if [ ! -d slurm_logs_a ]; then mkdir -p slurm_logs_a; fi",
    "LOGS=slurm_logs_a; mkdir -p $LOGS",
    "mkdir -p ./slurm_logs_a checkpoints",
    "true",
):
    add("folder of the log", create, "output-folder", folder_too_late(create))
