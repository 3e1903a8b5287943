"""Mistakes that `lint_planted` plants into real launch scripts, each in the spellings in which people make it.

A form is a function that returns the script with the mistake and the lines that have it, or nothing if the script is not suited. The mistake must be there by
construction, whatever else the script does.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

LAUNCHER = re.compile(
    r"\s*(?:(?:srun|time|nohup)\b[^|;&]*?\s)?(?:torchrun|accelerate launch|deepspeed|mpirun|mpiexec|horovodrun|python3? -m torch\.distributed\.\w+"
    r"|python3? (?:-u )?\S+\.py)\b"
)
SIZES = re.compile(
    r"#SBATCH\s+(?:--(?:nodes|ntasks|ntasks-per-node|tasks-per-node|gres|gpus|gpus-per-node|gpus-per-task|cpus-per-gpu|ntasks-per-gpu|array|exclusive|gpus-per-socket"
    r"|cpus-per-task|mem\S*|nodelist|constraint|output|error)\b|-[NnGacweoC]\b)"
)
BLOCK_WORDS = re.compile(
    r"\s*(?:if|then|else|elif|fi|for|while|until|do|done|case|esac|function|select|\(|\)|\{|\}|\w+\s*\(\))"
)
MAX_CHARACTERS = 10_000
ADDRESS = 'MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)'


@dataclass
class Script:
    """A real script, as lines, with the line numbers of its launches (first and last)."""

    name: str
    lines: list[str]
    launches: list[tuple[int, int]] = field(default_factory=list)

    @classmethod
    def of(cls, name: str, text: str) -> Script:
        script = cls(name, text.splitlines())
        at = 0
        while at < len(script.lines):
            last = at
            while last + 1 < len(script.lines) and script.lines[last].endswith("\\"):
                last += 1
            if LAUNCHER.match(script.lines[at]):
                script.launches.append((at, last))
            at = last + 1
        return script

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    @property
    def is_slurm(self) -> bool:
        return any(line.startswith("#SBATCH") for line in self.lines) and self.lines[0].startswith("#!")

    @cached_property
    def last(self) -> tuple[int, int] | None:
        """The last launch if it stands alone at the top level: in no block, pipe, list or here-document."""
        if not self.launches:
            return None
        first, last = self.launches[-1]
        command = "\n".join(self.lines[first : last + 1])
        level = sum(_depth(line) for line in self.lines[:first])
        quotes = "\n".join(line for line in self.lines[:first] if not line.lstrip().startswith("#"))
        alone = not re.search(r"[|;&<>`]|\\\s*$", command) and "<<" not in self.text and command.count('"') % 2 == 0
        return (
            (first, last)
            if alone and level == 0 and quotes.count('"') % 2 == 0 and quotes.count("'") % 2 == 0
            else None
        )

    def body(self) -> int:
        """Return the number of the first line behind the head of comments."""
        return next(
            (i for i, line in enumerate(self.lines) if line.strip() and not line.startswith("#")), len(self.lines)
        )


@dataclass
class Planted:
    text: str
    lines: set[int]


Plant = Callable[[Script, random.Random], Planted | None]


@dataclass
class Form:
    """One spelling of one mistake; `rules` are those that report it, or none for any."""

    mistake: str
    name: str
    rules: frozenset[str]
    plant: Plant


FORMS: list[Form] = []


def add(mistake: str, name: str, rules: str, plant: Plant) -> None:
    FORMS.append(Form(mistake, name, frozenset(rules.split()), plant))


def _depth(line: str) -> int:
    word = line.strip()
    if word.startswith("#"):
        return 0
    opened = len(re.findall(r"(?:^|[;&|]\s*|\b(?:then|do|else)\s+)(?:if|for|while|until|case|select)\b", word)) + len(
        re.findall(r"\{\s*$", word)
    )
    return opened - len(re.findall(r"(?:^|[;&]\s*)(?:fi|done|esac|\})(?=\s|;|$|[|>&])", word))


def result(lines: list[str], first: int, last: int) -> Planted:
    return Planted("\n".join(lines) + "\n", set(range(first + 1, last + 2)))


# Commands in the place of the last launch


def replace_launch(command: str, before: str = "", head: str = "", after: str = "", end: bool = False) -> Plant:
    """Return a function that writes `command` in the place of a script's last launch, with its own Slurm request if `head` is given.

    `NAME.py` stands for the program that the script started. With `end`, nothing of the script follows.
    """

    def plant(script: Script, rng: random.Random) -> Planted | None:
        place = script.last
        if place is None or not (script.is_slurm or not head):
            return None
        first, last = place
        old = " ".join(line.rstrip("\\").strip() for line in script.lines[first : last + 1])
        program = re.search(r"\S+\.py\b", old)
        if (
            program is None
            or "$" in program[0]
            or re.search(r"SLURM_(?:NTASKS|NNODES|GPUS)|set -\w*[eu]|pipefail|srun\b.*hostname", script.text)
        ):
            return None
        lines = list(script.lines)
        put = [line for line in before.split("\n") if line]
        launch = command.replace("NAME.py", program[0]).split("\n")
        behind = [line for line in after.split("\n") if line]
        lines[first : last + 1] = put + launch + behind
        if end:
            lines = lines[: first + len(put) + len(launch) + len(behind)]
        start = first
        if head:
            kept = [i for i, line in enumerate(lines) if not SIZES.match(line)]
            start = sum(i < first for i in kept)
            lines = [lines[i] for i in kept]
            options = [f"#SBATCH {spelled(option, rng)}" for option in head.split()]
            lines[1:1] = options
            start += len(options)
        return Planted(
            "\n".join(lines) + "\n",
            set(range(start + 1, start + len(put) + len(launch) + len(behind) + 1))
            | set(range(2, 2 + len(head.split()))),
        )

    return plant


def spelled(option: str, rng: random.Random) -> str:
    """Return an option of sbatch in one of its spellings."""
    name, _, value = option.partition("=")
    short = {"--nodes": "-N", "--ntasks": "-n", "--cpus-per-task": "-c"}.get(name)
    ways = [option, f"{name} {value}", *([f"{short} {value}"] if short else [])]
    return rng.choice(ways)


TORCHRUN = "torchrun --nnodes=2 --nproc_per_node=4 --rdzv_id=$SLURM_JOB_ID --rdzv_backend=c10d --rdzv_endpoint=$MASTER_ADDR:29500 NAME.py"
STATIC = (
    "torchrun --nnodes=2 --nproc_per_node=4 --master_addr=$MASTER_ADDR --master_port=29500 --node_rank=RANK NAME.py"
)

# Exit codes

LOST = "exit-code-lost exit-zero status-tested-late wait-result-lost set-e constant-condition"
for way, tested in {
    "if": 'if [ $? -ne 0 ]; then\n  echo "training failed"\n  exit 1\nfi',
    "if else": 'if [ $? -eq 0 ]; then\n  echo "finished"\nelse\n  echo "failed"\n  exit 1\nfi',
    "variable": 'rc=$?\necho "exit code $rc"\nexit $rc',
    "[[": "if [[ $? != 0 ]]; then echo failed; exit 1; fi",
    "((": "STATUS=$?\nif (( STATUS != 0 )); then\n  exit $STATUS\nfi",
    "list": '[ $? -eq 0 ] && echo "done" || exit 1',
    "test": "test $? -eq 0 || exit 1",
}.items():
    add("status of tee", way, LOST, replace_launch("python NAME.py 2>&1 | tee train.log", after=tested, end=True))
    add(
        "status of echo",
        way,
        LOST,
        replace_launch(
            "torchrun --standalone --nproc_per_node=2 NAME.py", after='echo "Finished at $(date)"\n' + tested, end=True
        ),
    )
for launcher in (
    "python",
    "torchrun --standalone",
    "srun python",
    "accelerate launch",
    "deepspeed",
    "singularity exec --nv x.sif python",
):
    add(
        "status of tee",
        launcher,
        LOST,
        replace_launch(f"{launcher} NAME.py | tee -a log.txt", after="if [ $? -ne 0 ]; then exit 1; fi", end=True),
    )
    add(
        "set -e and tee",
        launcher,
        LOST,
        replace_launch(f"{launcher} NAME.py 2>&1 | tee log.txt", before="set -e", after="echo done"),
    )
    add("or echo", launcher, LOST, replace_launch(f'{launcher} NAME.py || echo "training failed"', end=True))
    add(
        "ranks and bare wait",
        launcher,
        LOST,
        replace_launch(
            f'for i in 0 1; do\n  ssh node$i "cd $PWD && {launcher} NAME.py --node_rank=$i" &\ndone\nwait',
            after='echo "all done"',
            end=True,
        ),
    )
add(
    "ranks and bare wait",
    "pids",
    LOST,
    replace_launch(
        "python NAME.py --rank 0 --world_size 2 &\npython NAME.py --rank 1 --world_size 2 &\nwait",
        after="echo finished",
        end=True,
    ),
)
add(
    "status in function",
    "tee",
    LOST,
    replace_launch(
        "train() {\n  python NAME.py 2>&1 | tee $1.log\n  return $?\n}\nif train a; then echo ok; else echo failed; exit 1; fi",
        end=True,
    ),
)
add(
    "status in loop",
    "tee",
    LOST,
    replace_launch(
        'for seed in 1 2 3; do\n  python NAME.py --seed $seed 2>&1 | tee log_$seed.txt\n  if [ $? -ne 0 ]; then\n    echo "failed"\n    exit 1\n  fi\ndone'
    ),
)

# Continued lines


def break_continuation(change: Callable[[list[str], int], None]) -> Plant:
    def plant(script: Script, rng: random.Random) -> Planted | None:
        places = [(a, b) for a, b in script.launches if b - a >= 3]
        if not places or "<<" in script.text:
            return None
        first, last = rng.choice(places)
        own = "\n".join(script.lines[first : last + 1])
        candidates = [
            i
            for i in range(first, last)
            if script.lines[i + 1].lstrip().startswith("--") and script.lines[i].endswith(" \\")
        ]
        if not candidates or own.count('"') % 2 or own.count("'") % 2 or "`" in own:
            return None
        at = rng.choice(candidates)
        if any(script.lines[at].count(quote) % 2 for quote in "\"'"):
            return None
        lines = list(script.lines)
        change(lines, at)
        return result(lines, at, min(at + 3, len(lines) - 1))

    return plant


def _replace_at(new: Callable[[str], list[str]]) -> Callable[[list[str], int], None]:
    def change(lines: list[str], at: int) -> None:
        lines[at : at + 1] = new(lines[at])

    return change


CUT = "broken-line stray-line option-of-program lost-continuation"
for way, new in {
    "no backslash": lambda s: [s[:-1].rstrip()],
    "blank behind": lambda s: [s + " "],
    "empty line": lambda s: [s, ""],
    "comment line": lambda s: [s, "    # --old_option 1 \\"],
    "comment behind": lambda s: [s + " # changed"],
    "comment before": lambda s: [s[:-1] + "# changed \\"],
    "slash": lambda s: [s[:-1] + "/"],
}.items():
    add("line not continued", way, CUT, break_continuation(_replace_at(new)))

# Names


def misname(change: Callable[[str, random.Random], str]) -> Plant:
    """Return a function that renames the use of a variable in a launch, where the script sets it once."""

    def plant(script: Script, rng: random.Random) -> Planted | None:
        if re.search(r"\b(?:source|read|eval|getopts|module|declare|envsubst)\b|^\s*\. ", script.text, re.M):
            return None
        set_once = [
            n
            for n, c in Counter(re.findall(r"^\s*(?:export )?([A-Za-z_]\w{3,})=", script.text, re.M)).items()
            if c == 1
        ]
        uses = [
            (first, last, name)
            for first, last in script.launches
            for name in set_once
            if any(re.search(rf"--?[\w-]+[ =]\"?\$\{{?{name}\b", line) for line in script.lines[first : last + 1])
            and len(re.findall(rf"\$\{{?{name}\b", script.text)) == 1
        ]
        if not uses:
            return None
        first, last, name = rng.choice(uses)
        other = change(name, rng)
        if other == name or not re.fullmatch(r"[A-Za-z_]\w+", other) or re.search(rf"\b{other}\b", script.text):
            return None
        lines = list(script.lines)
        at = next(i for i in range(first, last + 1) if re.search(rf"\$\{{?{name}\b", lines[i]))
        lines[at] = re.sub(rf"(\$\{{?){name}\b", rf"\g<1>{other}", lines[at])
        planted = result(lines, first, last)
        planted.lines |= {i + 1 for i, line in enumerate(lines) if re.match(rf"\s*(?:export )?{name}=", line)}
        return planted

    return plant


def _drop(name: str, rng: random.Random) -> str:
    at = rng.randrange(1, len(name))
    return name[:at] + name[at + 1 :]


def _swap(name: str, rng: random.Random) -> str:
    at = rng.randrange(1, len(name) - 1)
    return name[:at] + name[at + 1] + name[at] + name[at + 2 :]


UNSET = "unset-variable misspelled-variable unknown-variable mismatched-name unbound-variable name-not-used"
add("variable not set", "letter dropped", UNSET, misname(_drop))
add("variable not set", "letters swapped", UNSET, misname(_swap))
add("variable not set", "other case", UNSET, misname(lambda n, _: n.lower() if n.isupper() else n.upper()))
add("variable not set", "plural", UNSET, misname(lambda n, _: n + ("S" if n.isupper() else "s")))
add("variable not set", "underscore", UNSET, misname(lambda n, _: n.replace("_", "", 1)))
add(
    "variable not set",
    "another name",
    UNSET,
    misname(lambda n, _: {"_DIR": n[:-4] + "_PATH", "_dir": n[:-4] + "_path"}.get(n[-4:], n)),
)

READ_BY_LIBRARIES = r"NCCL_\w+|GLOO_\w+|HF_HOME|HF_DATASETS_CACHE|TRANSFORMERS_CACHE|TORCH_HOME|WANDB_\w+|TOKENIZERS_PARALLELISM|OMP_NUM_THREADS|PYTHONUNBUFFERED|CUDA_LAUNCH_BLOCKING"


def unexport(several: bool) -> Plant:
    def plant(script: Script, rng: random.Random) -> Planted | None:
        if re.search(r"set -a|allexport|\benv\b|declare -x|source |^\s*\. ", script.text, re.M) or not script.launches:
            return None
        found = [i for i, line in enumerate(script.lines) if re.match(rf"export (?:{READ_BY_LIBRARIES})=\S+\s*$", line)]
        names = [re.split(r"[ =]", script.lines[i])[1] for i in found]
        found = [
            i
            for i, n in zip(found, names, strict=True)
            if len(re.findall(rf"\b{n}\b", script.text)) == 1 and i < script.launches[0][0]
        ]
        if not found:
            return None
        chosen = found if several else [rng.choice(found)]
        lines = list(script.lines)
        for i in chosen:
            lines[i] = lines[i].removeprefix("export ")
        return Planted("\n".join(lines) + "\n", {i + 1 for i in chosen})

    return plant


add("not exported", "one", "not-exported", unexport(False))
add("not exported", "all", "not-exported", unexport(True))

# Values that each node or task should compute for itself

EARLY = "expanded-too-early same-node-rank same-rank launchers-disagree many-launchers node-rank-missing"
TWO_NODES = "--nodes=2 --ntasks-per-node=1 --gpus-per-node=4"
for way, (before, launch) in {
    "option": ("", "srun " + STATIC.replace("RANK", "$SLURM_PROCID", 1)),
    "braces": ("", "srun " + STATIC.replace("RANK", "${SLURM_NODEID}", 1)),
    "blank": ("", "srun " + STATIC.replace("=RANK", " $SLURM_NODEID", 1)),
    "variable": ("NODE_RANK=$SLURM_NODEID", "srun " + STATIC.replace("RANK", "$NODE_RANK", 1)),
    "exported": ("export NODE_RANK=$SLURM_PROCID", "srun " + STATIC.replace("RANK", "${NODE_RANK}", 1)),
    "text": (f'LAUNCHER="{STATIC.replace("RANK", "$SLURM_PROCID", 1)}"', "srun $LAUNCHER --epochs 3"),
    "text and bash -c": (f'CMD="{STATIC.replace("RANK", "$SLURM_PROCID", 1)}"', 'srun bash -c "$CMD"'),
    "array": (
        "ARGS=(--node_rank $SLURM_PROCID --nproc_per_node 4 --nnodes 2 --master_addr $MASTER_ADDR --master_port 29500)",
        'srun torchrun "${ARGS[@]}" NAME.py',
    ),
    "bash -c": ("", f'srun bash -c "{STATIC.replace("RANK", "$SLURM_PROCID", 1)}"'),
    "here-document": ("", "srun bash <<EOF\n" + STATIC.replace("RANK", "$SLURM_NODEID", 1) + "\nEOF"),
    "accelerate": (
        "",
        "srun accelerate launch --multi_gpu --num_machines 2 --num_processes 8 --machine_rank $SLURM_PROCID --main_process_ip $MASTER_ADDR --main_process_port 29500 NAME.py",
    ),
    "container": ("", "srun singularity exec --nv x.sif " + STATIC.replace("RANK", "$SLURM_NODEID", 1)),
    "rank of the group": ("export RANK=$SLURM_PROCID\nexport WORLD_SIZE=2", "srun python NAME.py"),
    "node name": (
        "",
        "srun " + TORCHRUN.replace("$MASTER_ADDR", "$(hostname)").replace("torchrun", "bash -c 'torchrun") + "'",
    ),
}.items():
    add(
        "expanded too early",
        way,
        EARLY + " address-per-node port-per-node rendezvous-per-node loopback-across-nodes",
        replace_launch(launch, before="export " + ADDRESS + "\n" + before, head=TWO_NODES),
    )

# Nodes, tasks and GPUs

IDLE = "idle-nodes one-node-only nodes-in-sequence idle-gpus launcher-without-srun node-count nodes-disagree"
LOCAL = {
    "torchrun": "torchrun --standalone --nproc_per_node=4 NAME.py",
    "torchrun without standalone": "torchrun --nproc_per_node 4 NAME.py",
    "accelerate": "accelerate launch --multi_gpu --num_processes 4 --num_machines 1 NAME.py",
    "deepspeed": "deepspeed --num_gpus 4 NAME.py",
    "torch.distributed.launch": "python -m torch.distributed.launch --nproc_per_node=4 --use_env NAME.py",
    "python": "python NAME.py --epochs 10",
    "container": "singularity exec --nv x.sif torchrun --standalone --nproc_per_node=4 NAME.py",
    "conda run": "conda run -n env torchrun --standalone --nproc_per_node=4 NAME.py",
    "variable": 'LAUNCHER="torchrun --standalone --nproc_per_node=4"\n$LAUNCHER NAME.py',
    "array": 'cmd=(torchrun --standalone --nproc_per_node=4 NAME.py)\n"${cmd[@]}"',
    "bash -c": "bash -c 'torchrun --standalone --nproc_per_node=4 NAME.py'",
    "function": "run() {\n  torchrun --standalone --nproc_per_node=4 NAME.py\n}\nrun",
    "loop": "for seed in 1 2; do\n  torchrun --standalone --nproc_per_node=4 NAME.py --seed $seed\ndone",
    "eval": 'CMD="torchrun --standalone --nproc_per_node=4 NAME.py"\neval $CMD',
    "all nodes without srun": f"export {ADDRESS}\n{TORCHRUN}",
    "srun with one node": "srun --nodes=1 --ntasks=1 torchrun --standalone --nproc_per_node=4 NAME.py",
    "deepspeed in uv": "uv run deepspeed --num_gpus=4 NAME.py",
    "redirected": "nohup torchrun --standalone --nproc_per_node=4 NAME.py > out.log 2>&1",
}
for way, launch in LOCAL.items():
    add("one node of two used", way, IDLE, replace_launch(launch, head=TWO_NODES))

SEVERAL = "several-torchruns more-ranks-than-gpus launcher-per-task several-launchers tasks-start-launchers world-size launchers-collide same-gpu process-count too-many-launchers node-rank-from-tasks fixed-port"
for way, launch in {
    "torchrun": "srun " + TORCHRUN,
    "accelerate": "srun accelerate launch --multi_gpu --num_machines 2 --num_processes 8 --main_process_ip $MASTER_ADDR --main_process_port 29500 NAME.py",
    "deepspeed": "srun deepspeed --num_gpus 4 NAME.py",
    "bash -c": f"srun bash -c '{TORCHRUN}'",
    "bash -c with lines": "srun bash -c '\n  source env/bin/activate\n  " + TORCHRUN + "\n'",
    "variable": f'LAUNCHER="{TORCHRUN.removesuffix(" NAME.py")}"\nsrun $LAUNCHER NAME.py',
    "container": "srun singularity exec --nv x.sif " + TORCHRUN,
    "options of srun": "srun --kill-on-bad-exit=1 --cpu-bind=none -l " + TORCHRUN,
    "python -m": "srun python -m torch.distributed.run" + TORCHRUN.removeprefix("torchrun"),
}.items():
    add(
        "launcher in every task",
        way,
        SEVERAL,
        replace_launch(launch, before="export " + ADDRESS, head="--nodes=2 --ntasks-per-node=4 --gpus-per-node=4"),
    )

MORE = "more-ranks-than-gpus same-gpu ranks-over-gpus world-size gpu-count"
for way, launch in {
    "torchrun": "torchrun --standalone --nproc_per_node=8 NAME.py",
    "python -m": "python -m torch.distributed.launch --nproc_per_node 8 NAME.py",
    "accelerate": "accelerate launch --num_processes=8 --multi_gpu NAME.py",
    "deepspeed": "deepspeed --num_gpus=8 NAME.py",
    "variable": "NPROC=8\ntorchrun --nproc_per_node=$NPROC NAME.py",
    "calculated": "NODES=1\nGPUS=8\naccelerate launch --multi_gpu --num_machines $NODES --num_processes $((NODES * GPUS)) NAME.py",
    "exported": "export NUM_GPUS=8\ntorchrun --standalone --nproc-per-node ${NUM_GPUS} NAME.py",
    "default": "torchrun --standalone --nproc_per_node=${NGPUS:-8} NAME.py",
    "container": "srun singularity exec --nv x.sif torchrun --standalone --nproc_per_node=8 NAME.py",
    "bash -c": 'srun bash -c "torchrun --standalone --nproc_per_node=8 NAME.py"',
    "array": 'ARGS=(--standalone --nproc_per_node=8)\ntorchrun "${ARGS[@]}" NAME.py',
    "function": "train() {\n  torchrun --standalone --nproc_per_node=$1 NAME.py\n}\ntrain 8",
    "visible": "export CUDA_VISIBLE_DEVICES=0,1\ntorchrun --standalone --nproc_per_node=4 NAME.py",
    "visible prefix": "CUDA_VISIBLE_DEVICES=0 torchrun --standalone --nproc_per_node=2 NAME.py",
    "visible variable": 'GPUS="0,1"\nCUDA_VISIBLE_DEVICES=$GPUS accelerate launch --multi_gpu --num_processes 4 NAME.py',
    "include": "deepspeed --include localhost:0,1,2,3,4,5,6,7 NAME.py",
}.items():
    for gpus in ("--gres=gpu:2", "--gpus-per-node=2", "--gres=gpu:a100:2", "--gpus=2"):
        add(
            "more ranks than GPUs",
            f"{way} {gpus}",
            MORE,
            replace_launch(launch, head=f"--nodes=1 --ntasks-per-node=1 {gpus}"),
        )

# Ports

PORT = "fixed-port same-port port-shared ephemeral-port launchers-meet"
for way, launch in {
    "default": "CUDA_VISIBLE_DEVICES=0,1 torchrun --nproc_per_node=2 NAME.py --lr 1 &\nCUDA_VISIBLE_DEVICES=2,3 torchrun --nproc_per_node=2 NAME.py --lr 2 &\nwait",
    "option": "CUDA_VISIBLE_DEVICES=0,1 torchrun --nproc_per_node=2 --master_port=29501 NAME.py --lr 1 &\nCUDA_VISIBLE_DEVICES=2,3 torchrun --nproc_per_node=2 --master_port=29501 NAME.py --lr 2 &\nwait",
    "variable": "PORT=29510\nCUDA_VISIBLE_DEVICES=0,1 torchrun --nproc_per_node=2 --master_port $PORT NAME.py --lr 1 &\nCUDA_VISIBLE_DEVICES=2,3 torchrun --nproc_per_node=2 --master_port $PORT NAME.py --lr 2 &\nwait",
    "loop": "for i in 0 1; do\n  CUDA_VISIBLE_DEVICES=$((2*i)),$((2*i+1)) torchrun --nproc_per_node=2 --master_port 29505 NAME.py --fold $i &\ndone\nwait",
    "accelerate": "CUDA_VISIBLE_DEVICES=0,1 accelerate launch --multi_gpu --num_processes 2 NAME.py --lr 1 &\nCUDA_VISIBLE_DEVICES=2,3 accelerate launch --multi_gpu --num_processes 2 NAME.py --lr 2 &\nwait",
    "deepspeed": "deepspeed --include localhost:0,1 NAME.py --lr 1 &\ndeepspeed --include localhost:2,3 NAME.py --lr 2 &\nwait",
    "exported": "export MASTER_PORT=29500\nCUDA_VISIBLE_DEVICES=0 python -m torch.distributed.launch --nproc_per_node=1 NAME.py --a 1 &\nCUDA_VISIBLE_DEVICES=1 python -m torch.distributed.launch --nproc_per_node=1 NAME.py --a 2 &\nwait",
}.items():
    add("one port for two", way, PORT, replace_launch(launch, head="--nodes=1 --ntasks-per-node=1 --gpus-per-node=4"))
