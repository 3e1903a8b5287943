"""Symptoms and examples, as texts, for `examples`: subshells, words, conditions and other shells."""

from __future__ import annotations

SHELL: dict[str, tuple[str, str, str]] = {
    "lost-in-subshell": (
        "`ModuleNotFoundError` although the environment was activated; or a counter that is 0 behind its loop.",
        "source ~/conda/bin/activate train | tee setup.log\npython train.py",
        "source ~/conda/bin/activate train > setup.log\npython train.py",
    ),
    "options-in-one-word": (
        "`error: unrecognized arguments: --lr 1 --epochs 2`, with all options in one.",
        'ARGS="--lr 1 --epochs 2"\npython train.py "$ARGS"',
        'ARGS=(--lr 1 --epochs 2)\npython train.py "${ARGS[@]}"',
    ),
    "unbound-variable": (
        "`PYTHONPATH: unbound variable`, and the job has failed after a second.",
        "set -eu\nexport PYTHONPATH=$HOME/code:$PYTHONPATH\npython train.py",
        "set -eu\nexport PYTHONPATH=$HOME/code${PYTHONPATH:+:$PYTHONPATH}\npython train.py",
    ),
    "constant-condition": (
        "One branch of an `if` runs always, whatever the value; or `integer expression expected` in the log.",
        "if [ $LOSS -gt 1.5 ]; then\n  python train.py\nfi",
        'if [ "$(echo "$LOSS > 1.5" | bc)" = 1 ]; then\n  python train.py\nfi',
    ),
    "out-of-place": (
        "`prepare: command not found`, or commands at the end of the script that never run.",
        "prepare data\nprepare() {\n  python prepare.py $1\n}\npython train.py",
        "prepare() {\n  python prepare.py $1\n}\nprepare data\npython train.py",
    ),
    "unknown-option": (
        "`no such option: -y`, and then a missing package.",
        "pip install -y wandb\npython train.py",
        "pip install wandb\npython train.py",
    ),
    "other-shell": (
        "`no matches found`, or the same random port in every run.",
        "#!/bin/zsh\npython train.py --tag run[base]",
        "#!/bin/zsh\npython train.py --tag 'run[base]'",
    ),
    "path-in-front": (
        "`cd: ..//home/me/run: No such file or directory`; the script goes on in another folder.",
        "cd ../$SLURM_SUBMIT_DIR\npython train.py",
        'cd "$SLURM_SUBMIT_DIR/.."\npython train.py',
    ),
    "overwritten-output": (
        "The log has the last run of the loop only.",
        "for seed in 1 2 3; do\n  python train.py --seed $seed > train.log\ndone",
        "for seed in 1 2 3; do\n  python train.py --seed $seed > train_$seed.log\ndone",
    ),
}
