"""Progress of unchanged programs with a Trainer of Hugging Face or Lightning: what is reported, and the switch."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from allranks.rundir.events import EventLog, read_events, reporter
from allranks.rundir.files import read_json
from tests import sampling
from tests.dist.harness import train

HUGGING_FACE = """
import sys
print("imported before the program:", [name for name in ("torch", "transformers") if name in sys.modules])
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                                     num_attention_heads=2, num_key_value_heads=2))
rows = [{"input_ids": torch.randint(0, 32, (8,))} for _ in range(64)]
rows = [{**row, "labels": row["input_ids"]} for row in rows]
args = TrainingArguments("out", max_steps=7, per_device_train_batch_size=2, logging_steps=3, eval_strategy="steps",
                         eval_steps=7, save_strategy="no", report_to="none", use_cpu=True, disable_tqdm=True,
                         log_level="error")
trainer = Trainer(model, args, train_dataset=rows, eval_dataset=rows[:4])
trainer.pop_callback(type(trainer.callback_handler.callbacks[-1]))  # the one that prints the logs
trainer.train()
"""
LIGHTNING = """
import os, torch
import lightning.pytorch as pl
class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
    def training_step(self, batch, index):
        return self.layer(batch).sum() * 0 + 3.5
    def validation_step(self, batch, index):
        self.log("val_loss", self.layer(batch).sum() * 0 + 1.5)
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
loader = lambda: torch.utils.data.DataLoader(torch.ones(16, 4), batch_size=1)
pl.Trainer(accelerator="cpu", devices=int(os.environ["LOCAL_WORLD_SIZE"]), max_epochs=1, accumulate_grad_batches=2,
           logger=False, enable_checkpointing=False, enable_progress_bar=False).fit(Model(), loader(), loader())
"""


@pytest.mark.parametrize(
    ("program", "package", "steps", "loss", "eval_loss"),
    [(HUGGING_FACE, "transformers", 7, None, None), (LIGHTNING, "lightning", 4, 3.5, 1.5)],
    ids=["hugging face", "lightning"],
)
def test_an_unchanged_program_reports_its_steps_and_losses(
    tmp_path: Path, program: str, package: str, steps: int, loss: float | None, eval_loss: float | None
) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    (tmp_path / "prog.py").write_text(program)
    spec = {
        "name": "prog", "script": {"path": str(tmp_path / "prog.py"), "workdir": str(tmp_path)},
        "cluster": {"procs_per_node": 1 + sampling.ALL}, "run_root": str(tmp_path / "runs"),
    }  # fmt: skip
    anew = sampling.ALL or package != "transformers"
    done, run = train(tmp_path, spec, anew=anew)
    assert done.returncode == 0, done.stdout + done.stderr
    metrics = read_json(run.metrics)
    assert (metrics["progress_source"], metrics["steps"]) == ("report", steps)
    records = [e for e in read_events(run.events_of(0)) if e["event"] == "progress"]
    assert {e["total"] for e in records if "total" in e} == {steps}
    assert metrics["train_loss_last"] == loss if loss else 2 < metrics["train_loss_last"] < 5
    assert metrics["eval_loss"] == eval_loss if eval_loss else 2 < metrics["eval_loss"] < 5
    if package == "transformers":
        assert not anew or "imported before the program: []" in done.stdout
        assert [e["step"] for e in records if "loss" in e][-1] == 6  # a loss keeps its step; the last one is 7


def test_callbacks_can_be_switched_off_and_never_raise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from allranks.train import progress_callbacks

    before = list(sys.meta_path)
    monkeypatch.setenv(progress_callbacks.SWITCH, "0")
    progress_callbacks.add_progress_callbacks()
    assert sys.meta_path == before

    trainer: Any = ModuleType("transformers.trainer")
    trainer.TrainerCallback, trainer.DEFAULT_CALLBACKS = type("TrainerCallback", (), {}), []
    progress_callbacks._TRAINERS["transformers.trainer"](trainer)
    (callback,) = (kind() for kind in trainer.DEFAULT_CALLBACKS)
    reporter.open(EventLog(tmp_path / "rank0.jsonl", 0))
    state: Any = type("State", (), {"global_step": 1, "max_steps": -1})
    callback.on_step_end(None, state, None)
    callback.on_log(None, object(), None, logs={"loss": "none"})  # no state, no number
    reporter.report(5, 0.5, None)  # the program's own reports count from now on
    callback.on_log(None, state, None, logs={"loss": 9.0})
    reporter.close()
    assert [(e.get("step"), e.get("loss")) for e in read_events(tmp_path / "rank0.jsonl")] == [(1, None), (5, 0.5)]
    assert callback.__reduce__() == (trainer.TrainerCallback, ())  # in another process it does nothing
