"""Failures 1 to 20 of the field notes: what is injected without ranks, and what no other test shows."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from allranks.planning.planner import make_plan
from allranks.planning.rank_environment import as_variables
from allranks.spec import parse_spec
from allranks.train.data.prepared import prepare
from allranks.utils.machine import machine_facts
from tests.conftest import tiny_spec, write_rows
from tests.warm import allranks


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """Sixty rows on disk, all different."""
    path = tmp_path / "sixty.json"
    write_rows(path, 60)
    return path


def held_out(rows: Path, cache: Path, **sections: Any) -> list[list[int]]:
    """The tokens of each held-out row, prepared in a cache of its own."""
    found = prepare(parse_spec(tiny_spec(rows, cache, **sections)), cache, classifier=False, log=print).held_out
    assert found is not None
    return [found.ids[a:b].tolist() for a, b in zip(found.offsets[:-1], found.offsets[1:], strict=True)]


def test_the_rows_that_are_held_out_depend_on_the_datas_seed_alone(rows: Path, tmp_path: Path) -> None:
    first = held_out(rows, tmp_path / "1")
    other = {"seed": 7, "max_steps": 30, "micro_batch_size": 4, "grad_accum": 3}
    again = held_out(rows, tmp_path / "2", train=other, cluster={"procs_per_node": 3}, strategy={"name": "zero3"})
    assert again == first and len(first) == 12 and held_out(rows, tmp_path / "3", data={"seed": 7}) != first


def test_a_smaller_subset_is_the_beginning_of_a_larger_one(rows: Path, tmp_path: Path) -> None:
    assert held_out(rows, tmp_path / "1", eval={"subset": 5}) == held_out(rows, tmp_path / "2")[:5]


def test_a_subset_is_drawn_by_the_datas_seed(rows: Path, tmp_path: Path) -> None:
    """Not the first rows of a file; and what is prepared once is found by every run that needs the same."""

    def taken(how: str, train: int, **data: Any) -> list[str]:
        sections = {"data": {"subset": 20, "eval_fraction": 0, "max_length": 512, **data}, "train": {"seed": train}}
        spec = parse_spec(tiny_spec(rows, tmp_path, **sections))
        found = prepare(spec, tmp_path / "cache", classifier=False, log=print)
        assert (found.origin, found.held_out) == (how, None)
        ends = zip(found.train.offsets[:-1], found.train.offsets[1:], strict=True)
        return sorted(found.tokenizer.decode(found.train.ids[a:b]) for a, b in ends)

    drawn = taken("built", 1)
    assert len(drawn) == 20 and taken("found", 2) == drawn and taken("built", 1, seed=7) != drawn
    everything = taken("built", 1, subset=60)
    assert set(drawn) < set(everything) and any(f"number {i} " in text for text in drawn for i in range(20, 60))


def test_ranks_really_have_the_threads_that_were_planned(tmp_path: Path) -> None:
    """Without the plan's environment two ranks would take all cores each."""
    cores = len(os.sched_getaffinity(0))
    spec = parse_spec(tiny_spec("builtin:instructions", tmp_path, cluster={"procs_per_node": 2, "device": "cpu"}))
    planned = as_variables(make_plan(spec, machine_facts()).environment)
    bare = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    command, env = [sys.executable, "-c", "import torch; print(torch.get_num_threads())"], {**bare, **planned}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=True)
    assert int(done.stdout) == max(1, cores // 2) == int(planned["OMP_NUM_THREADS"])


def test_the_doctor_says_that_threads_are_too_many(tmp_path: Path) -> None:
    spec = tiny_spec("builtin:instructions", tmp_path, cluster={"procs_per_node": 2, "device": "cpu"})
    (tmp_path / "spec.yaml").write_text(yaml.safe_dump(spec))
    words = ["doctor", str(tmp_path / "spec.yaml"), "--no-imports", "--set", "cluster.env.OMP_NUM_THREADS='64'"]
    done = allranks(*words)
    assert done.returncode == 1, done.stderr
    assert f"threads=MANY(2x64/{len(os.sched_getaffinity(0))})" in done.stdout
    assert "--set cluster.env.OMP_NUM_THREADS=" in done.stdout
