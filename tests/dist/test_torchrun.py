"""`allranks torchrun`: a program gets what torchrun gives it, and a failed rank is named with its line."""

import json
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.dist.harness import ALLRANKS, Ended, allranks, free_port

ENVIRONMENT = """
import json, os, sys
print("rank", os.environ["RANK"], sys.argv[1:], flush=True)
json.dump(dict(os.environ), open(f"{sys.argv[1]}.{os.environ['RANK']}", "w"))
"""
BOOM = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
if dist.get_rank() == 1:
    raise KeyError("tokens_17")
dist.all_reduce(torch.ones(1))
"""
OF_ONE_START = {"MASTER_PORT", "TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_RUN_ID"}


def torchrun(cwd: Path, *words: str, launcher: list[str]) -> Ended:
    env = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    return subprocess.run([*launcher, *words], cwd=cwd, env=env, capture_output=True, text=True, timeout=240)


@pytest.mark.parametrize("more", [[], pytest.param(["--virtual-local-rank"], marks=pytest.mark.full)])
def test_torchruns_variables_and_only_rank_0_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: list) -> None:
    (tmp_path / "env.py").write_text(ENVIRONMENT)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    line = ("--nproc-per-node=2", "--max-restarts=1", "--role=trainer", *more, "env.py")
    done = torchrun(tmp_path, *line, "ours", "--debug", launcher=[*ALLRANKS, "torchrun"])
    assert (done.returncode, done.stdout) == (0, "rank 0 ['ours', '--debug']\n")
    assert done.stderr.count("\n") == 1 and "run folder runs/env-" in done.stderr
    torchrun(tmp_path, *line, "theirs", launcher=[sys.executable, "-m", "torch.distributed.run"])
    for rank in range(2):
        ours, theirs = (json.loads((tmp_path / f"{name}.{rank}").read_text()) for name in ("ours", "theirs"))
        assert {name for name in theirs if ours.get(name) != theirs[name]} <= OF_ONE_START
        assert ours.keys() >= OF_ONE_START


def test_a_failed_rank_is_named_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "boom.py").write_text(BOOM)
    done = allranks("torchrun", "--nproc_per_node", "2", "--tee=3", "--log-dir=logs", "boom.py", cwd=tmp_path)
    assert done.returncode == 1
    assert "[default1]:[rank1]: KeyError: 'tokens_17'\n" in done.stdout
    verdict, folder = done.stderr.splitlines()
    assert f"failed: KeyError: 'tokens_17', in {tmp_path}/boom.py:5 in <module>. Log: " in verdict
    assert verdict.startswith("allranks: rank 1 on ")
    assert "run folder logs/boom-" in folder


SUM = """
import sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
x = torch.ones(1) * dist.get_rank()
dist.all_reduce(x)
print("sum", int(x), sys.argv[1:], flush=True)
dist.destroy_process_group()
"""


def test_two_command_lines_make_one_job_each_with_its_own_arguments_and_number_of_ranks(tmp_path: Path) -> None:
    (tmp_path / "sum.py").write_text(SUM)
    line = ("--nnodes=2", "--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{free_port()}", "--tee=3")

    def start(n: int) -> Ended:
        words = (*line, f"--nproc-per-node={n}", f"--log-dir=of{n}", "sum.py", f"on{n}")
        return allranks("torchrun", *words, cwd=tmp_path)

    with ThreadPoolExecutor() as pool:
        one, two = pool.map(start, (1, 2))
    assert (one.returncode, two.returncode) == (0, 0), one.stderr + two.stderr
    assert one.stdout == "[default0]:sum 3 ['on1']\n"
    assert sorted(two.stdout.splitlines()) == ["[default0]:sum 3 ['on2']", "[default1]:sum 3 ['on2']"]
    assert sorted((one.stderr + two.stderr).count(text) for text in ("run folder", "Traceback")) == [0, 1]


LONG = """
import torch.distributed as dist
dist.init_process_group("gloo")
print("much " * 100_000, flush=True)
dist.barrier()
if dist.get_rank() == 1:
    raise ValueError("Target 7 is out of bounds.")
dist.barrier()
"""


@pytest.mark.full
def test_the_failed_rank_is_named_if_the_end_of_the_other_node_ends_the_first(tmp_path: Path) -> None:
    """`srun --kill-on-bad-exit=1` sends SIGTERM; the first node still shows output, which nobody reads yet."""
    (tmp_path / "long.py").write_text(LONG)
    line = [*ALLRANKS, "torchrun", "--nnodes=2", "--master-addr=127.0.0.1", f"--master-port={free_port()}"]
    place = {"cwd": tmp_path, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([*line, "--node-rank=0", "long.py"], stdout=subprocess.PIPE, **place) as first:
        other = subprocess.run([*line, "--node-rank=1", "long.py"], stdout=subprocess.DEVNULL, timeout=240, **place)
        first.send_signal(signal.SIGTERM)
        errors = first.communicate(timeout=60)[1]
    assert (other.returncode, first.returncode) == (1, 1), other.stderr + errors
    assert f" failed: ValueError: Target 7 is out of bounds, in {tmp_path}/long.py:7 in <module>. Log: " in errors
