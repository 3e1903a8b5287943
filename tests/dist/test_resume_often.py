"""Runs that are ended again and again at random steps, by signals and by kill -9 of a random rank, and gone on with: they
are bitwise one that was never stopped. On other numbers of ranks: the same data in the same order, losses within a tolerance."""

from __future__ import annotations

import random
import shutil
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file

from allranks.rundir.events import read_events
from allranks.rundir.paths import RunDir
from tests.conftest import tiny_spec, write_rows
from tests.dist.harness import Background, allranks, shared_strategies, step_events, train, until, write_spec

pytestmark = [pytest.mark.dist, pytest.mark.timeout(1200)]
KINDS = ("simple_ddp_hook", "zero1", "zero3", "pytorch_zero3", "deepspeed_zero1", "deepspeed_zero3", "hf_trainer")
"""Those that save and load their state each in its own way; of all others: test_strategy_state.py."""
NUMBERS = ("loss", "grad_norm", "lr", "tokens", "tokens_trained")


def often(folder: Path, name: str, strategy: str, steps: int) -> dict[str, Any]:
    """Adapters with dropout, packed rows, two micro-steps, a schedule; a checkpoint every ten steps for what is killed."""
    return tiny_spec(
        folder / "rows.json", folder, name=name, strategy={"name": strategy}, eval={"samples": 0, "at_end": False},
        train={"max_steps": steps, "grad_accum": 2, "warmup_steps": 5}, checkpoint={"mode": "full", "every": 10, "keep": 2, "async": True},
    )  # fmt: skip


def numbers(event: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(event[name] for name in NUMBERS)


def all_steps(run: RunDir, rank: int) -> list[tuple[int, tuple[Any, ...]]]:
    """Every step that was ever done, also those that were done again after a kill."""
    return [(e["step"], numbers(e)) for e in read_events(run.events_of(rank)) if e["event"] == "step"]


def end(background: Background, how: str, rank: int) -> None:
    """End a run in one of the three ways; it must have noticed."""
    if how == "kill":
        psutil.Process(background.pid_of(rank)).kill()
    else:
        background.signal(getattr(signal, how))
    code, out = background.wait()
    assert code == 1, f"{how} of rank {rank}: the run had already ended\n{out[-2000:]}"


def end_often(tmp_path: Path, spec: dict[str, Any], seed: int, stops: int) -> RunDir:
    """Run to the end with `stops` ends at random steps between; nothing else may stop it."""
    rng, total = random.Random(seed), spec["train"]["max_steps"]
    at = sorted(rng.sample(range(4, total * 3 // 4), stops))
    ways = ["kill", "SIGTERM", "SIGUSR1"] * (stops // 3 + 1)
    background = Background(tmp_path, "run", str(write_spec(tmp_path, spec)))
    run = background.run
    try:
        for attempt, (step, how) in enumerate(zip(at, ways, strict=False), 1):
            # A run that is ended before its first checkpoint has nothing to go on from.
            background.until_step(max(step, 11, (run.checkpoint_steps() or [0])[-1] + 1), attempt)
            end(background, how, rng.randrange(2))
            background = Background(tmp_path, "resume", run.name)
        code, out = background.wait(300)
        assert code == 0, out
    finally:
        background.stop()
    assert len(run.attempts()) == stops + 1
    return run


def same_to_the_bit(one: RunDir, other: RunDir, total: int) -> None:
    for rank in (0, 1):
        whole = dict(all_steps(one, rank))
        assert sorted(whole) == list(range(1, total + 1))
        assert [e["step"] for e in step_events(other, rank)] == sorted(whole)
        wrong = [(step, got, whole[step]) for step, got in all_steps(other, rank) if got != whole[step]]
        assert not wrong, f"rank {rank}: {len(wrong)} steps differ, first {wrong[0]}"
    a, b = (load_file(run.checkpoint(total) / "adapter_model.safetensors") for run in (one, other))
    assert a.keys() == b.keys() and len(a) > 0
    assert all(torch.equal(a[k], b[k]) for k in a)


@pytest.mark.parametrize(
    ("strategy", "stops", "steps"),
    [
        ("pytorch_ddp", 3, 250),
        *(pytest.param(name, 3, 250, marks=pytest.mark.full) for name in KINDS if name in shared_strategies()),
        pytest.param("pytorch_ddp", 12, 700, marks=pytest.mark.full),
    ],
)  # fmt: skip
def test_ended_at_random_steps_and_gone_on_with_is_never_stopped(
    tmp_path: Path, strategy: str, stops: int, steps: int
) -> None:
    write_rows(tmp_path / "rows.json", 60)
    done, whole = train(tmp_path, often(tmp_path, "whole", strategy, steps))
    assert done.returncode == 0, done.stderr
    seed = random.SystemRandom().randrange(10**6)
    print("seed", seed)
    same_to_the_bit(whole, end_often(tmp_path, often(tmp_path, "parts", strategy, steps), seed, stops), steps)


@pytest.mark.parametrize(
    ("strategy", "ranks"),
    [
        ("zero3", 3),
        *(pytest.param(n, r, marks=pytest.mark.full) for n in ("pytorch_ddp", "zero2", "pytorch_zero3") for r in (1, 3)),
    ],
)  # fmt: skip
def test_on_another_number_of_ranks_the_data_is_the_same(tmp_path: Path, strategy: str, ranks: int) -> None:
    """Without dropout, whose masks belong to ranks. Rows are not packed, so that each step's tokens are a mark of its rows."""
    write_rows(tmp_path / "rows.json", 60)
    spec = often(tmp_path, "whole", strategy, 24)
    spec["data"]["packing"] = "none"
    spec["adapter"]["dropout"] = 0.0
    spec["train"] = {
        "max_steps": 24,
        "micro_batch_size": 2,
        "global_batch_size": 12,
        "schedule": "constant",
        "lr": 1e-2,
    }
    done, whole = train(tmp_path, spec)
    assert done.returncode == 0, done.stderr
    done, other = train(tmp_path, {**spec, "name": "other", "train": {**spec["train"], "max_steps": 12}})
    assert done.returncode == 0, done.stderr
    resume = ["resume", other.name, "--set", "train.max_steps=24", "--set", f"cluster.procs_per_node={ranks}"]
    refused = allranks(*resume, cwd=tmp_path)
    assert refused.returncode == 2 and "--allow-inexact" in refused.stderr
    done = allranks(*resume, "--allow-inexact", cwd=tmp_path)
    assert done.returncode == 0, done.stderr

    def tokens(run: RunDir, count: int) -> list[tuple[int, int]]:
        steps = [[e for e in step_events(run, r) if e["step"] > 12] for r in range(count)]
        assert all(len(s) == 12 for s in steps)
        return [(sum(e["tokens"] for e in at), sum(e["tokens_trained"] for e in at)) for at in zip(*steps, strict=True)]

    assert tokens(whole, 2) == tokens(other, ranks)
    assert len(set(tokens(whole, 2))) > 6
    for one, two in zip(step_events(whole), step_events(other), strict=True):
        assert two["loss"] == pytest.approx(one["loss"], rel=1e-5)


def test_a_mixture_that_is_killed_and_gone_on_with_is_never_stopped(tmp_path: Path) -> None:
    """The rows of both sources are in the epoch, one of them repeated; the cache of the data is removed before the resume."""
    write_rows(tmp_path / "rows.json", 60)
    (tmp_path / "pairs.csv").write_text("prompt,response\n" + "".join(f"say {i},word {i}\n" for i in range(9)))
    sources = [{"source": str(tmp_path / "rows.json")}, {"source": str(tmp_path / "pairs.csv"), "weight": 0.5}]

    def mixed(name: str) -> dict[str, Any]:
        spec = often(tmp_path, name, "pytorch_ddp", 250)
        del spec["data"]["source"]
        return {**spec, "data": {**spec["data"], "sources": sources}}

    done, whole = train(tmp_path, mixed("whole"))
    assert done.returncode == 0, done.stderr
    background = Background(tmp_path, "run", str(write_spec(tmp_path, mixed("parts"))))
    try:
        until(background.run.checkpoint_steps)
        background.until_step(background.run.checkpoint_steps()[-1] + 3)
        end(background, "kill", 1)
        shutil.rmtree(tmp_path / "cache" / "allranks" / "data")
        background = Background(tmp_path, "resume", background.run.name)
        code, out = background.wait(300)
        assert code == 0, out
    finally:
        background.stop()
    same_to_the_bit(whole, background.run, 250)
    data = next(e for e in read_events(whole.events_of(0)) if e["event"] == "data")
    assert [one["rows_train"] for one in data["sources"]] == [37, 18]


def test_a_mixture_goes_on_with_the_same_rows_on_another_number_of_ranks(tmp_path: Path) -> None:
    """Also over the end of an epoch; the cache of the data is removed before the resume. Losses are equal up to the order of sums."""
    write_rows(tmp_path / "rows.json", 30)
    (tmp_path / "pairs.csv").write_text("prompt,response\n" + "".join(f"say {'so ' * i},word {i}\n" for i in range(9)))
    spec = often(tmp_path, "whole", "pytorch_ddp", 16)
    del spec["data"]["source"]
    sources = [{"source": str(tmp_path / "rows.json")}, {"source": str(tmp_path / "pairs.csv"), "weight": 0.5}]
    spec["data"] |= {"sources": sources, "packing": "none"}
    spec["adapter"]["dropout"] = 0.0
    spec["train"] = {"max_steps": 16, "global_batch_size": 6, "schedule": "constant", "lr": 1e-2}
    done, whole = train(tmp_path, spec)
    assert done.returncode == 0, done.stderr
    done, other = train(tmp_path, {**spec, "name": "other", "train": {**spec["train"], "max_steps": 4}})
    assert done.returncode == 0, done.stderr
    shutil.rmtree(tmp_path / "cache" / "allranks" / "data")
    resume = ["resume", other.name, "--set", "train.max_steps=16", "--set", "cluster.procs_per_node=3"]
    refused = allranks(*resume, cwd=tmp_path)
    assert refused.returncode == 2 and "--allow-inexact" in refused.stderr
    done = allranks(*resume, "--allow-inexact", cwd=tmp_path)
    assert done.returncode == 0, done.stderr

    def tokens(run: RunDir, ranks: int) -> list[int]:
        steps = [[e["tokens"] for e in step_events(run, rank) if e["step"] > 4] for rank in range(ranks)]
        return [sum(at) for at in zip(*steps, strict=True)]

    assert len(tokens(whole, 2)) == 12 and tokens(whole, 2) == tokens(other, 3) and len(set(tokens(whole, 2))) > 6
    for one, two in zip(step_events(whole), step_events(other), strict=True):
        assert two["loss"] == pytest.approx(one["loss"], rel=1e-5)
    data = [e for e in read_events(other.events_of(0)) if e["event"] == "data"]
    assert len(data) == 2 and data[0]["sources"] == data[1]["sources"]
