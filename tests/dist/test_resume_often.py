"""Runs that are ended again and again at random steps, by signals and by kill -9 of a random rank, and gone on with."""

import random
import signal
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from allranks.rundir.events import read_events
from allranks.rundir.paths import RunDir
from tests.dist import harness
from tests.dist.harness import Background, allranks, equal, rows_spec, step_events, train, weights_of, write_spec

pytestmark = pytest.mark.timeout(1200)
KINDS = ("zero3", "deepspeed_zero3")  # that save and load their state each in its own way
full = partial(pytest.param, marks=pytest.mark.full)
NUMBERS = ("loss", "grad_norm", "lr", "tokens", "tokens_trained")


def often(folder: Path, name: str, strategy: str, steps: int) -> dict[str, Any]:
    """Adapters with dropout, packed rows, two micro-steps, a schedule; checkpoints for what is killed."""
    return rows_spec(
        folder, name=name, strategy={"name": strategy}, eval={"samples": 0, "at_end": False},
        train={"max_steps": steps, "grad_accum": 2, "warmup_steps": 5},
        checkpoint={"mode": "full", "every": 10, "keep": 2, "async": True},
    )  # fmt: skip


def all_steps(run: RunDir, rank: int) -> list[tuple[int, tuple[Any, ...]]]:
    """Every step that was ever done, also those that were done again after a kill."""
    events = [e for e in read_events(run.events_of(rank)) if e["event"] == "step"]
    return [(e["step"], tuple(e[name] for name in NUMBERS)) for e in events]


def end(background: Background, how: str, rank: int) -> None:
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
    assert equal(weights_of(one, total), weights_of(other, total))


@pytest.mark.parametrize("strategy", ["pytorch_ddp", *(full(n) for n in KINDS if n in harness.shared_strategies())])
def test_ended_at_random_steps_and_gone_on_with_is_never_stopped(tmp_path: Path, strategy: str) -> None:
    stops, steps = 3, 250
    _, whole = train(tmp_path, often(tmp_path, "whole", strategy, steps), code=0)
    seed = random.SystemRandom().randrange(10**6)
    print("seed", seed)
    same_to_the_bit(whole, end_often(tmp_path, often(tmp_path, "parts", strategy, steps), seed, stops), steps)


@pytest.mark.parametrize(("strategy", "ranks"), [("zero3", 3), pytest.param("zero2", 1, marks=pytest.mark.full)])
def test_on_another_number_of_ranks_the_data_is_the_same(tmp_path: Path, strategy: str, ranks: int) -> None:
    """Without dropout, whose masks belong to ranks. Rows are not packed: each step's tokens are a mark of its rows."""
    spec = often(tmp_path, "whole", strategy, 24)
    spec["data"]["packing"] = "none"
    spec["adapter"]["dropout"] = 0.0
    batch = {"micro_batch_size": 2, "global_batch_size": 12}
    spec["train"] = {"max_steps": 24, **batch, "schedule": "constant", "lr": 1e-2}
    _, whole = train(tmp_path, spec, code=0)
    _, other = train(tmp_path, {**spec, "name": "other", "train": {**spec["train"], "max_steps": 12}}, code=0)
    resume = ["resume", other.name, "--set", "train.max_steps=24", "--set", f"cluster.procs_per_node={ranks}"]
    refused = allranks(*resume, cwd=tmp_path)
    assert refused.returncode == 2 and "--allow-inexact" in refused.stderr
    allranks(*resume, "--allow-inexact", cwd=tmp_path, code=0)

    def tokens(run: RunDir, count: int) -> list[tuple[int, int]]:
        steps = [[e for e in step_events(run, r) if e["step"] > 12] for r in range(count)]
        assert all(len(s) == 12 for s in steps)
        return [(sum(e["tokens"] for e in at), sum(e["tokens_trained"] for e in at)) for at in zip(*steps, strict=True)]

    assert tokens(whole, 2) == tokens(other, ranks) and len(set(tokens(whole, 2))) > 6
    for one, two in zip(step_events(whole), step_events(other), strict=True):
        assert two["loss"] == pytest.approx(one["loss"], rel=1e-5)
