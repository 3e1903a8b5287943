"""Ends of all kinds (signals, kills, bad numbers) of real processes, and resumes, which are exact or refused."""

import json
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import MistralConfig, MistralForCausalLM

from allranks.launch.local_job import INTERRUPT_GRACE_S
from allranks.rundir.events import read_events
from allranks.rundir.files import read_json
from allranks.rundir.paths import RunDir
from allranks.train.data.tokenization import train_tokenizer
from tests.dist import harness
from tests.dist.harness import Background, allranks, equal, rows_spec, step_events, train, until, weights_of, write_spec
from tests.dist.making import CONFIG


@pytest.fixture
def endless(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Background]:
    harness.slow_down(monkeypatch, 0.05)
    background = Background(tmp_path, "run", str(write_spec(tmp_path, rows_spec(tmp_path, train={"max_steps": 10**6}))))
    try:
        background.until_step(5)
        yield background
    finally:
        background.stop()


def all_gone(pids: list[int], limit_s: float) -> None:
    until(lambda: not any(psutil.pid_exists(p) for p in pids), limit_s)


def resumable(folder: Path, name: str, steps: int) -> dict[str, Any]:
    """A mixture of two files, one of them repeated."""
    (folder / "pairs.csv").write_text("prompt,response\n" + "".join(f"say {i},word {i}\n" for i in range(9)))
    train = {"max_steps": steps, "grad_accum": 2, "warmup_steps": 5}
    spec = rows_spec(folder, name=name, train=train, checkpoint={"mode": "full"}, eval={"samples": 0})
    del spec["data"]["source"]
    pairs = {"source": str(folder / "pairs.csv"), "weight": 0.5}
    spec["data"]["sources"] = [{"source": str(folder / "rows.json")}, pairs]
    return spec


@pytest.mark.parametrize("signals", [(signal.SIGINT,), (signal.SIGUSR1, signal.SIGTERM)], ids=["Ctrl-C", "twice"])
def test_a_resumed_run_is_bitwise_one_unbroken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, signals: Any) -> None:
    """Dropout, packing, accumulation, schedule, optimizer and a mixture of data, whose cache is gone, go on.

    After Ctrl-C the steps and the save take longer than ranks with nothing to save get.
    """
    slow = signals == (signal.SIGINT,)
    steps = 20 if slow else 80
    _, whole = train(tmp_path, resumable(tmp_path, "whole", steps), code=0)
    if slow:
        harness.stall_ranks(monkeypatch, "slow_everywhere:0:-7;slow_everywhere:1:-7", 0.8)
    background = Background(tmp_path, "run", str(write_spec(tmp_path, resumable(tmp_path, "parts", steps))))
    monkeypatch.delenv("STUCK", raising=False)
    parts, stops = background.run, []
    for asked in signals:
        background.until_step((stops or [0])[-1] + 3)
        pids = background.all_pids()
        background.signal(asked)
        began = time.monotonic()
        all_gone(pids, 30 if slow else 5)
        assert not slow or time.monotonic() - began > INTERRUPT_GRACE_S
        code, out = background.wait(limit_s=20)
        assert code == 1
        told = "interrupted" if asked == signal.SIGINT else f"(allranks received {asked.name})"
        assert "stopped after step" in out and told in out, out
        assert read_json(parts.metrics)["steps"] >= 3 and parts.report.exists()
        stops.append(parts.checkpoint_steps()[-1])
        shutil.rmtree(tmp_path / "cache" / "allranks" / "data")
        background = Background(tmp_path, "resume", parts.name)
    code, out = background.wait()
    assert code == 0, out
    assert stops[0] >= 3 and stops[-1] < steps and sorted(set(stops)) == stops
    for rank in (0, 1):
        one, other = ([(e["step"], e["loss"], e["tokens"]) for e in step_events(run, rank)] for run in (whole, parts))
        assert one == other
    assert equal(weights_of(whole, steps), weights_of(parts, steps))
    attempts = [*range(1, len(signals) + 2)]
    assert parts.attempts() == attempts and read_json(parts.metrics)["attempts"] == len(attempts)
    assert all(parts.rank_logs(attempt) for attempt in attempts)


@pytest.mark.parametrize("deaf", [False, pytest.param(True, marks=pytest.mark.full)])
def test_a_killed_rank_is_named_and_the_others_end(endless: Background, deaf: bool) -> None:
    """A deaf peer is stopped: it can heed no signal but SIGKILL, like one inside a collective."""
    pids = endless.all_pids()
    if deaf:
        psutil.Process(endless.pid_of(0)).suspend()
    psutil.Process(endless.pid_of(1)).kill()
    began = time.monotonic()
    code, out = endless.wait(limit_s=40)
    assert time.monotonic() - began < 15 and code == 1
    for words in ("rank 1 ", "SIGKILL", "after step ", ".rank1.log"):
        assert words in out, out
    all_gone(pids, 1)
    assert "[RANK 1]" in endless.run.rank_logs(1)[1].read_text()
    assert read_json(endless.run.metrics)["status"] == "failed"


TRAINER = {"strategy": {"name": "hf_trainer"}, "checkpoint": {"mode": "full", "every": 2}, "eval": {"samples": 0}}


@pytest.mark.parametrize("more", [{"cluster": {"procs_per_node": 1}}, pytest.param(TRAINER, marks=pytest.mark.full)])
def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_the_last_good_state(tmp_path: Path, more: Any) -> None:
    wild = {"max_steps": 20, "lr": 1e30, "schedule": "constant", "max_grad_norm": None}
    done, run = train(tmp_path, {**rows_spec(tmp_path, train=wild, **more), "adapter": {"type": "none"}}, code=1)
    for words in ("not finite", "rank 0", "step 2"):
        assert words in done.stderr
    assert "Traceback" not in done.stderr + done.stdout and run.checkpoint_steps() == [1]
    assert all(bool(torch.isfinite(v).all()) for v in weights_of(run, 1).values())


def test_an_evaluation_that_is_nan_ends_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    harness.stall_ranks(monkeypatch, "nan_evaluation:0:1;nan_evaluation:1:1")
    done, run = train(tmp_path, rows_spec(tmp_path, eval={"baseline": True, "samples": 1}), code=0)
    assert "held out loss nan" in done.stdout and "nan (not finite)" in done.stdout
    metrics = read_json(run.metrics)
    wanted = {"status": "succeeded", "steps": 6, "eval_loss": None, "perplexity": None}
    assert {name: metrics[name] for name in wanted} == wanted and run.report.exists()


def test_a_rank_that_fails_reports_first_and_stays_in_the_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under NCCL leaving the group waits for peers that wait for this rank; a sleep stands for it here."""
    harness.stall_ranks(monkeypatch, "fail_beside_a_collective:1:4")
    began = time.monotonic()
    done, run = train(tmp_path, rows_spec(tmp_path, cluster={"timeout_s": 600}))
    assert time.monotonic() - began < 90  # far less than the ranks' own limit of 600 s
    assert done.returncode == 1
    assert "rank 1" in done.stderr and "planted failure" in done.stderr
    assert "RuntimeError: planted failure" in run.rank_logs(1)[1].read_text()
    (error,) = [e for e in read_events(run.events_of(1)) if e["event"] == "error"]
    assert error["message"] == "planted failure" and not run.hang(1).exists()


def save_base(folder: Path) -> None:
    tokenizer = train_tokenizer(["say word 0 1 2 3 4 5 6 7 8 9"], 320, classifier=False)
    torch.manual_seed(1)
    MistralForCausalLM(MistralConfig(vocab_size=len(tokenizer), **CONFIG)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A LoRA run on a base in a folder, two steps of four, with a full checkpoint."""
    folder = tmp_path_factory.mktemp("exact")
    save_base(folder / "base")
    short = {"max_steps": 2, "schedule": "constant"}
    spec = rows_spec(folder, 40, checkpoint={"mode": "full"}, train=short, data={"packing": "none"})
    _, run = train(folder, {**spec, "model": {"name": str(folder / "base")}}, code=0)
    return folder, run.name


def resumed(stopped: tuple[Path, str], tmp_path: Path, *more: str) -> tuple[int, str, RunDir]:
    folder, name = stopped
    shutil.copytree(folder / "runs" / name, tmp_path / name)
    done = allranks("resume", name, "--run-root", str(tmp_path), "--set", "train.max_steps=4", *more, cwd=folder)
    return done.returncode, done.stderr + done.stdout, RunDir(tmp_path / name)


def test_nothing_changed(stopped: tuple[Path, str], tmp_path: Path) -> None:
    code, said, run = resumed(stopped, tmp_path)
    assert code == 0, said
    progress = read_json(run.checkpoint(4) / "state" / "progress.json")
    assert len(progress["data_hash"]) == len(progress["base_hash"]) == 64


@pytest.mark.parametrize("inexact", [False, True], ids=["exact", "inexact"])
def test_rewritten_answers_and_another_base_are_refused(stopped: Any, tmp_path: Path, inexact: bool) -> None:
    source, file = stopped[0] / "rows.json", stopped[0] / "base" / "model.safetensors"
    text, weights = source.read_text(), file.read_bytes()
    tensors = load_file(file)
    name = next(n for n in tensors if n.endswith("down_proj.weight"))
    try:
        source.write_text(json.dumps([{**row, "output": str(row["output"])[::-1]} for row in json.loads(text)]))
        save_file({**tensors, name: torch.flip(tensors[name], [0])}, file, metadata={"format": "pt"})
        code, said, _ = resumed(stopped, tmp_path)
        assert code == 1 and "Traceback" not in said
        assert said.count("the training data (its rows, the template or the tokenizer) changed") == 1, said
        assert said.count("the weights of the base model changed") == 1, said
        if inexact:
            code, said, _ = resumed(stopped, tmp_path / "again", "--allow-inexact")
            assert code == 0, said
    finally:
        source.write_text(text)
        file.write_bytes(weights)
