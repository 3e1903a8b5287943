"""Completion in the shell: the real function in bash, and the keys and values that it offers."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from allranks.spec.loader import parse_spec
from allranks.spec.records import RunSpec
from allranks.spec.validation import all_keys, settable_keys
from tests.conftest import REPO

BASH = """
eval "$(allranks completion bash)"
COMP_WORDS=(allranks "$@"); COMP_CWORD=$(( ${#COMP_WORDS[@]} - 1 ))
compopt() { printf 'compopt %s\\n' "${!#}"; }
_allranks_completion allranks
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_completes_verbs_keys_values_strategies_smoke_tests_and_runs(tmp_path: Path) -> None:
    command, run = tmp_path / "bin" / "allranks", tmp_path / "runs" / "demo-1"
    for folder in (command.parent, run):
        folder.mkdir(parents=True)
    (run / "spec.yaml").write_text("name: demo\n")
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m allranks "$@"\n')
    command.chmod(0o700)
    env = {**os.environ, "PATH": f"{command.parent}:{os.environ['PATH']}", "PYTHONPATH": str(REPO / "src")}

    def complete(*words: str) -> list[str]:
        """Complete the last word; words are as bash divides them, at ``=`` and ``:`` too."""
        bash = ["bash", "--norc", "-c", BASH, "bash", *words]
        done = subprocess.run(bash, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=60)
        assert not done.stderr, done.stderr
        return done.stdout.split("\n")[:-1]

    assert complete("pl") == ["plan"]
    assert complete("plan", "spec.yaml", "--set", "train.sch") == ["compopt nospace", "train.schedule="]
    assert complete("plan", "spec.yaml", "--set", "train.schedule", "=", "co") == ["cosine", "constant"]
    assert complete("run", "s", "--set", "=", "data.source", "=", "builtin", ":", "n") == ["news", "noise"]
    assert complete("compare", "s", "--strategies", "zero1,zero") == ["zero1,zero2", "zero1,zero3"]
    assert complete("smoke", "01") == ["01_single"]
    assert complete("logs", "de") == ["demo-1"]
    assert complete("no-such-verb", "pla") == ["plan"]


def test_every_key_is_offered_once_and_can_be_set() -> None:
    keys = settable_keys()
    assert {"train.lr", "cluster.slurm.partition", "strategy.bucket_mb", "checkpoint.async"} <= set(keys)
    assert not {"train", "cluster.slurm", "strategy.options"} & set(keys)
    assert set(keys) - set(all_keys(RunSpec)) == {k for k in keys if k.startswith("strategy.") and k != "strategy.name"}
    base = {"model": {"name": "tiny:llama"}, "data": {"source": "builtin:instructions"}}
    # Depends on the data, other keys of the cluster, evaluations, the adapter.
    depends = {"data.template", "cluster.launcher", "checkpoint.keep_best", "model.float8", "model.quantize"}
    for key, values in keys.items():
        if key.startswith("strategy.") or key in depends:
            continue
        for value in values:
            parse_spec(base, [f"{key}={value}", *(["model.name=mlp:8x2"] if value == "builtin:noise" else [])])
