"""Runs that start again by themselves after a failure, or do not: two gloo ranks with an end planted into them."""

from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from allranks.analysis.effective_time import KINDS
from allranks.rundir.files import read_json
from allranks.rundir.paths import RunDir
from tests.dist.harness import equal, rows_spec, stall_ranks, train, until, weights_of
from tests.dist.test_program_ends import started

SECTIONS: dict[str, Any] = {"checkpoint": {"every": 2, "mode": "full"}, "cluster": {"restarts": {"max": 3}}}


def test_after_a_kill_the_weights_are_as_undisturbed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = rows_spec(tmp_path, train={"max_steps": 12}, **SECTIONS)
    _, undisturbed = train(tmp_path, spec, code=0)
    stall_ranks(monkeypatch, "killed:1:9")  # batches are made ahead of their steps
    monkeypatch.setenv("STUCK_ATTEMPTS", "0")
    done, run = train(tmp_path, spec, code=0)
    assert equal(weights_of(run, 12), weights_of(undisturbed, 12))
    (one,) = read_json(run.restarts)
    step = one["after_step"]
    assert step in (4, 6, 8) and (one["action"], one["cause"], one["rank"]) == ("restart", "unknown", 1)
    metrics = read_json(run.metrics)
    assert (metrics["status"], metrics["attempts"], metrics["restarts"]) == ("succeeded", 2, [one])
    for text in (f"restart  after step {step}", "attempt 1: rank 1", "SIGKILL", "started again"):
        assert text in done.stdout, done.stdout
    page = run.report.read_text()
    assert "started again: one process crashed" in page and "Wall time of the attempts" in page
    time = metrics["effective_training_time"]
    assert time["wall_time_s"] == pytest.approx(sum(time[f"{kind}_s"] for kind in KINDS), abs=1e-6)
    assert all(time[f"{kind}_s"] > 0 for kind in KINDS if kind not in ("evaluation", "repeated"))
    assert len(time["attempts"]) == 2
    assert f"effective      {time['share']:.1%} of the time was training that counts" in done.stdout


@pytest.mark.full
def test_a_second_failure_of_unknown_cause_ends_it_with_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stall_ranks(monkeypatch, "killed:1:4")
    monkeypatch.setenv("STUCK_ATTEMPTS", "0,1,2")
    done, run = train(tmp_path, rows_spec(tmp_path, train={"max_steps": 12}, **SECTIONS), code=1)
    first, second = read_json(run.restarts)
    assert (first["action"], second["action"]) == ("restart", "stop") and len(run.attempts()) == 2
    assert "rank 1" in done.stderr and "SIGKILL" in done.stderr and f"restart  none: {second['reason']}" in done.stdout
    assert read_json(run.metrics)["restarts"] == [first, second]


def test_an_exception_of_the_program_is_not_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stall_ranks(monkeypatch, "fail_beside_a_collective:1:4")
    done, run = train(tmp_path, rows_spec(tmp_path, **SECTIONS), code=1)
    (one,) = read_json(run.restarts)
    assert (one["action"], one["cause"], run.attempts()) == ("stop", "deterministic", [1])
    assert "the next attempt would end the same way" in done.stdout and "planted failure" in done.stderr


@pytest.mark.parametrize("most", [None, 1])
def test_an_own_program_starts_again_only_on_request_and_knows_the_attempt(tmp_path: Path, most: int | None) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import os, signal\n"
        "if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0' and os.environ['RANK'] == '0':\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "print('attempt', os.environ['TORCHELASTIC_RESTART_COUNT'])\n"
    )
    cluster = {"procs_per_node": 2, "device": "cpu", "restarts": {"max": most}}
    spec = {"name": "p", "script": {"path": str(program)}, "cluster": cluster, "run_root": str(tmp_path / "runs")}
    done, run = train(tmp_path, spec, code=0 if most else 1)
    assert run.attempts() == ([1, 2] if most else [1])
    assert ("attempt 1\n" in done.stdout) == bool(most)


TRAINER = """
import os, signal, sys, torch
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.line = torch.nn.Linear(4, 1)

    def forward(self, x, labels):
        return {"loss": torch.nn.functional.mse_loss(self.line(x).squeeze(-1), labels)}

class Killed(TrainerCallback):
    def on_step_end(self, args, state, control, **more):
        if state.global_step == 5 and os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)

torch.manual_seed(0)
x = torch.randn(64, 4)
rows = [{"x": row, "labels": row.sum()} for row in x]
args = TrainingArguments(sys.argv[1], max_steps=8, save_steps=2, logging_steps=1, use_cpu=True, report_to="none")
trainer = Trainer(Model(), args, train_dataset=rows, callbacks=[Killed()] if sys.argv[2] == "killed" else [])
last = get_last_checkpoint(sys.argv[1]) if os.path.isdir(sys.argv[1]) else None
trainer.train(resume_from_checkpoint=last)
attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
print(f"attempt {attempt} from {last and last[-1]}:", trainer.model.line.weight.tolist())
"""


@pytest.mark.full
def test_a_hugging_face_trainer_continues_bitwise_from_its_own_checkpoint(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    (tmp_path / "trainer.py").write_text(TRAINER)
    cluster = {"procs_per_node": 2, "device": "cpu", "restarts": {"max": 1}}
    ends = {}
    for name in ("whole", "killed"):
        script = {"path": str(tmp_path / "trainer.py"), "args": [str(tmp_path / name), name]}
        spec = {"name": name, "script": script, "cluster": cluster, "run_root": str(tmp_path / "runs")}
        done, run = train(tmp_path, spec, code=0)
        attempts = run.attempts()
        ends[name] = [log.read_text().split("attempt ")[-1] for log in run.rank_logs(attempts[-1]).values()]
    assert attempts == [1, 2] and "restart  from the program's own checkpoints" in done.stdout, done.stdout
    assert all(end.startswith("1 from 4:") for end in ends["killed"]), ends
    assert [end.split(":")[1] for end in ends["killed"]] == [end.split(":")[1] for end in ends["whole"]]
    (one,) = read_json(run.restarts)
    assert one["reached_step"] in (4, 5) and one["after_step"] is None


BY_HAND = """
import os, signal, time
attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
print("attempt", attempt, flush=True)
if "{killed}" == "rank" and attempt == "0" and os.environ["RANK"] == "1":
    os.kill(os.getpid(), signal.SIGKILL)
if attempt == "0":
    time.sleep(60)
"""


@pytest.mark.parametrize("killed", ["rank", pytest.param("agent", marks=pytest.mark.full)])
def test_nodes_started_by_hand_start_again_unless_one_is_gone(tmp_path: Path, killed: str) -> None:
    with started(tmp_path, program=BY_HAND.format(killed=killed), restarts={"max": 1}) as (launcher, agents, out):
        if killed == "agent":
            logs = partial(tmp_path.glob, "runs/*/logs/attempt-1/*rank1.log")
            until(lambda: any("attempt 0" in log.read_text() for log in logs()), limit_s=60)
            shell = psutil.Process(agents[1].pid)  # or the agent itself, by which it may have been replaced
            for process in (shell, *shell.children(recursive=True)):
                process.kill()
        assert launcher.wait(timeout=90) == (killed == "agent"), out.read_text()
        assert agents[0].wait(timeout=20) == (killed == "agent")
    said, run = " ".join(out.read_text().split()), RunDir(next((tmp_path / "runs").iterdir()))
    (one,) = read_json(run.restarts)
    if killed == "rank":
        assert run.attempts() == [1, 2] and "start attempt 2 by themselves" in said and one["action"] == "restart", said
    else:
        assert one["action"] == "stop" and "the agent of node 1 (127.0.0.1) is gone, and launcher hosts cannot" in said
        assert f"to start again: allranks run {run.spec}" in out.read_text()
