"""What is read in the output of a user's program: lines as libraries print them, and lines that nobody should print."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from allranks.analysis.diagnose import diagnose
from allranks.analysis.metrics import describe_non_finite_loss, progress_metrics
from allranks.cli.run_output import CHUNK_BYTES, ProgramOutput, ProgramProgress
from allranks.launch.monitor import log_progress
from allranks.launch.monitor.log_progress import LineReader, LogProgress
from allranks.rundir.paths import RunDir

TRAINER_5 = "{'loss': '6.21', 'grad_norm': '1.2', 'learning_rate': '4e-05', 'epoch': '0.1562'}"
TRAINER_4 = "{'loss': 6.2134, 'grad_norm': 1.2, 'learning_rate': 4e-05, 'epoch': 0.16}"


def read(*lines: str) -> dict[str, Any]:
    reader = LineReader()
    for line in lines:
        reader.feed(line)
    return (reader.take(last=True) or [{}])[-1]


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        ([TRAINER_5], {"loss": 6.21, "epoch": 0.1562}),
        ([TRAINER_4], {"loss": 6.2134, "epoch": 0.16}),
        (
            [TRAINER_5, " 25%|██▌       | 5/20 [00:01<00:03,  4.12it/s]"],
            {"loss": 6.21, "epoch": 0.1562, "step": 5, "total": 20},
        ),
        (
            [TRAINER_5, " 25%|██▌       | 5/20 [00:01<00:03,  4.12it/s]", " 50%|█████     | 4/8 [00:00<00:00, 90it/s]"],
            {"loss": 6.21, "epoch": 0.1562, "step": 5, "total": 20},  # the other one is that of an evaluation
        ),
        (["{'eval_loss': '5.9', 'eval_runtime': '0.2', 'epoch': '1'}"], {"eval_loss": 5.9, "epoch": 1.0}),
        ([" 25%|██▌       | 5/20 [00:01<00:03,  4.12it/s]"], {}),  # of what?
        (["Map: 100%|██████████| 256/256 [00:00<00:00, 9000.1 examples/s]"], {}),
        (["train:  10%|█         | 5/50 [00:01<00:03,  4.1it/s, loss=2.3]"], {"step": 5, "total": 50, "loss": 2.3}),
        (["Epoch 0:  50%|█████     | 8/16 [00:00<00:00, 200.00it/s, v_num=0]"], {"step": 8, "epoch": 0.0}),
        (
            [
                "Epoch 0: 100%|██████████| 16/16 [00:00<00:00, v_num=0]",
                "Epoch 1:  50%|█████     | 8/16 [00:00<00:00, train_loss=1.25]",
            ],
            {"step": 24, "epoch": 1.0, "loss": 1.25},
        ),
        (
            ["Epoch 2/2  ━━━━━━━━━━━━ 16/16 0:00:00 • 0:00:00 100.0it/s v_num: 0.000 train_loss: 1.5"],
            {
                "step": 48,
                "epoch": 2.0,
                "loss": 1.5,
            },  # Lightning in a file shows only the bar of its last epoch, here of three
        ),
        (["Epoch 3/3: 100%|██████████| 16/16 [00:00<00:00, 9it/s]"], {"step": 48, "epoch": 3.0}),
        (["step 5 loss 54.3"], {"step": 5, "loss": 54.3}),
        (["2026-01-01 10:00:00 INFO global_step=5 train_loss=54.3 lr=1e-4"], {"step": 5, "loss": 54.3}),
        (["[GPU0] Epoch 1 | Iter 100 | Train Loss 4.1703"], {"step": 100, "loss": 4.1703, "epoch": 1.0}),
        (
            [
                " iteration       40/     100 | elapsed time per iteration (ms): 3.2 | lm loss: 1.03E+01 | loss scale: "
                "1.0"
            ],
            {"step": 40, "loss": 10.3},
        ),
        (
            [f"Epoch [{e}/3], Step [{n}/40], Loss: {e}.{n}" for e in (1, 2, 3) for n in (20, 40)],
            {"step": 120, "epoch": 3.0, "loss": 3.4},
        ),
        ([f"step {n} loss 2.5" for n in (0, 10, 20, 30) * 3], {"step": 110, "loss": 2.5}),
        ([f"train: 50%|█| {n}/9 [00:01<00:03, 4.1it/s, loss=2.3]" for n in (3, 9) * 2], {"step": 18, "loss": 2.3}),
        (["step 5: val_loss 3.25"], {"step": 5, "eval_loss": 3.25}),
        (["Validation: 10%|█| 5/50 [00:01<00:03, 4.1it/s, loss=2.3]"], {}),
        (["Validation DataLoader 0: 100%|██████████| 1/1 [00:00<00:00, 900it/s]"], {}),
        (["iter 10: loss 4.1234, time 12.34ms, mfu -100.00%"], {"step": 10, "loss": 4.1234}),
        (["step 20: train loss 4.0123, val loss 4.1234"], {"step": 20, "eval_loss": 4.1234}),
        (["iter 30: loss nan, time 12.34ms, mfu -100.00%"], {"step": 30, "loss": None}),
        (["\x1b[32miter 10: loss 4.5\x1b[0m, time 1ms"], {"step": 10, "loss": 4.5}),
        (["my loss is 7 at step 3", "iterations: 5", "{'accuracy': 0.5}", "Epoch 1 evaluation: 5"], {}),
    ],
)
def test_lines_are_read_as_they_are_printed(lines: list[str], found: dict[str, Any]) -> None:
    assert read(*lines) == found


def test_the_trainers_loss_has_the_step_of_the_bar_after_it_and_no_later_one() -> None:
    reader, bars, records = LineReader(), [f"  5%|█| {n}/20 [00:01<00:03, 4.12it/s]" for n in range(7)], []
    for line in (bars[0], bars[1], TRAINER_5, bars[1], bars[2], bars[3], TRAINER_4, bars[4], bars[5]):
        reader.feed(line)
        records += reader.take()
    assert [(r["step"], r["loss"]) for r in records if "loss" in r] == [(1, 6.21), (4, 6.2134)]
    whole = LineReader()
    for line in (bars[0], bars[1], TRAINER_5, bars[1], bars[2], bars[3], TRAINER_4, bars[4], bars[5]):
        whole.feed(line)
    assert [(r["step"], r.get("loss")) for r in whole.take()] == [(1, 6.21), (4, 6.2134), (5, None)]


def test_hostile_output_ends_nothing_and_takes_no_time(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.events.mkdir()
    log = tmp_path / "log"
    reader = LogProgress(log, run.events_of(0))
    reader.look()  # no log yet
    log.write_bytes(b"iter 10: loss 4.0\n" + b"y" * (8 << 20))
    reader.look()
    hostile = [b"{'loss': '" * 800, b"0%|" * 2000, b"Epoch 1" * 900, b"\x1b[" * 4000, b" " * 8000]
    hostile += [b"\xff\x00\x80" * 1000, b"iter 9" * 1000]
    with log.open("ab") as file:
        file.write(b"\r".join(hostile * 3) + b"\n" + b"a" * 3000 + b"\r\niter 20: loss 3.0\r\n")
    began = time.process_time()
    reader.look()
    assert time.process_time() - began < 1.0
    events = [json.loads(line) for line in run.events_of(0).read_text().splitlines()]
    assert [(e["step"], e["loss"], e["source"]) for e in events] == [(20, 3.0, "log")]
    log.write_bytes(b"")  # the program has truncated its log
    reader.look()


def test_a_line_that_is_split_between_two_reads_is_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_progress, "WRITE_INTERVAL_S", 0.01)
    run, log = RunDir(tmp_path), tmp_path / "log"
    run.events.mkdir()
    reader = LogProgress(log, run.events_of(0))
    for part in (b"iter 1", b"0: loss 4", b".25, time 1ms\n"):
        with log.open("ab") as file:
            file.write(part)
        reader.look()
    (event,) = map(json.loads, run.events_of(0).read_text().splitlines())
    assert (event["step"], event["loss"]) == (10, 4.25)


def test_a_bar_is_read_while_it_overwrites_itself_and_at_the_end(tmp_path: Path) -> None:
    run, log = RunDir(tmp_path), tmp_path / "log"
    run.events.mkdir()
    reader = LogProgress(log, run.events_of(0))
    log.write_bytes("\r".join(f"Epoch 0: 50%|██  | {done}/9 [00:00<00:00, 9it/s]" for done in (1, 2, 3)).encode())
    reader.look()
    reader.look(last=True)
    assert [json.loads(line)["step"] for line in run.events_of(0).read_text().splitlines()] == [2, 3]


def event(rank: int, time_s: float, source: str = "report", **values: Any) -> dict[str, Any]:
    return {"event": "progress", "rank": rank, "time": time_s, "source": source, **values}


def test_figures_come_from_what_was_said_and_from_nothing_else() -> None:
    assert progress_metrics({0: [{"event": "start", "time": 1.0}]}) == {}
    assert progress_metrics({0: [event(0, 1.0, loss=2.0)]}) == {
        "progress_source": "report", "train_loss_first": 2.0, "train_loss_last": 2.0,
    }  # fmt: skip
    logged = [event(0, 0.0, "log", step=9, loss=9.0), event(0, 9.0, "log", step=99, loss=8.0)]
    assert progress_metrics({0: logged})["steps_per_s"] == 10.0
    reports = {
        0: [
            *logged,
            event(0, 1.0, step=1, loss=5.0, tokens=50),
            event(0, 11.0, last=6.0, step=11, loss=None, tokens=500),
        ],
        1: [event(1, 1.0, step=1, tokens=50), event(1, 6.0, step=11, tokens=1000)],
    }
    assert progress_metrics(reports) == {
        "progress_source": "report", "steps": 11, "steps_per_s": 2.0, "train_loss_first": 5.0, "train_loss_last": None,
        "tokens_reported": 1600, "tokens_per_s": 300.0, "loss_not_finite": {"step": 11, "source": "report"},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("losses", "since"),
    [([2.0, None, None], 20), ([None, None], 10), ([None, 2.0], None), ([2.0, None, 1.0, None], 40), ([1.0], None)],
)
def test_a_loss_is_not_finite_since_a_step_after_which_none_was(losses: list[float | None], since: int | None) -> None:
    story = {0: [event(0, float(i), "log", step=10 * i, loss=loss) for i, loss in enumerate(losses, 1)]}
    metrics = progress_metrics(story)
    assert metrics.get("loss_not_finite") == ({"step": since, "source": "log"} if since else None)
    said = describe_non_finite_loss(metrics)
    expected = f"the loss is not finite (NaN or infinite) from step {since} on, as the output of rank 0 says"
    assert said == (expected if since else "")


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        ("iter 10: loss nan, time 2.0ms", True),
        ("{'loss': 'nan', 'grad_norm': 'nan', 'epoch': '0.1'}", True),
        ("Epoch 1:  50%|██| 8/16 [00:01<00:00, 9it/s, train_loss=nan.0]", True),
        ("iter 10: loss nan, time 2.0ms\niter 20: loss 2.5, time 2.0ms", False),  # it came back
        ("found inf in the gradients, loss scale 1024", False),
        ('{"event":"progress","time":1.0,"rank":0,"source":"report","step":3,"loss":null}', True),
    ],
)
def test_diagnose_names_a_loss_that_stays_not_finite(tmp_path: Path, lines: str, found: bool) -> None:
    (tmp_path / "n1.rank0.log").write_text(lines + "\n")
    assert [(f.id, f.rank) for f in diagnose([tmp_path]).findings] == ([("loss_not_finite", None)] if found else [])


def test_the_line_of_progress_prefers_reports() -> None:
    shown = ProgramProgress()
    assert shown.take(event(0, 1.0, "log", step=5, total=20)) == {"step": "step 5/20 (log)", "loss": "", "speed": ""}
    first = shown.take(event(0, 2.0, step=1, loss=2.0, tokens=10))
    assert first == {"step": "step 1", "loss": "loss 2.0000", "speed": ""}
    assert shown.take(event(0, 3.0, "log", step=9)) is None
    assert shown.take(event(1, 3.0, tokens=10)) is not None
    assert shown.take(event(1, 4.0, tokens=30)) == {"step": "step 1", "loss": "loss 2.0000", "speed": "30 tokens/s"}
    assert shown.take(event(0, 4.0, step="x", loss="y", tokens=-1.5, last="z")) is None


def test_live_output_is_safe_whole_and_bounded(tmp_path: Path) -> None:
    run, said = RunDir(tmp_path), list[str]()
    run.logs_of(1).mkdir(parents=True)
    log, other = run.log_of(1, "n1", 0), run.log_of(1, "n1", 1)
    other.write_text("of rank 1\n")
    output = ProgramOutput(run, said.append, "rank0")
    log.write_bytes(b"one\n 10%|#\r 20%|##\rsecret hf_aB3dE5fG7hJ9kL1mN2pQ4rS6tU8vW0xY2z\nthr")
    output._look()
    with log.open("ab") as file:
        file.write(b"ee \x1b[31mred\x1b[0m \xff\n")
    output._look()
    assert said[0] == "one"
    assert "hf_aB3d" not in said[1]
    assert "10%" not in said[1]
    assert said[2:] == ["three red \ufffd"]
    with log.open("ab") as file:
        file.write(b"z" * (3 * CHUNK_BYTES) + b"\nlast without a line feed")
    output._look(last=True)
    assert "bytes are not shown" in said[3]
    assert said[4:] == ["last without a line feed"]
