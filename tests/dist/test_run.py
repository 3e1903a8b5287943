"""Whole runs through the command line: two gloo ranks, real files, real checkpoints."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from allranks.analysis.trace import analyse
from allranks.rundir.events import read_events
from allranks.rundir.files import read_json
from tests import sampling
from tests.conftest import shared, tiny_spec, write_rows
from tests.dist.harness import allranks, rows_spec, stall_ranks, step_events, train, write_spec


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("finished")
    spec = rows_spec(
        folder, train={"max_steps": 8, "grad_accum": 2}, eval={"baseline": True, "every": 4},
        checkpoint={"mode": "full", "every": 4}, observe={"tensorboard": True, "telemetry_s": 0.2},
        cluster={"env": {"MY_TOKEN": "hf_verysecretvalue1234"}},
    )  # fmt: skip
    done, run = train(folder, spec, code=0)
    return folder, done, run


def test_metrics_hold_all_that_the_contract_names(finished: Any) -> None:
    _, _, run = finished
    metrics = json.loads(run.metrics.read_text())
    assert metrics["sync_proof"] == {"world_size": 2, "weights_equal": True, "data_disjoint": True}
    assert (metrics["steps"], metrics["world_size"], metrics["status"]) == (8, 2, "succeeded")
    assert metrics["train_loss_last"] < metrics["train_loss_first"]
    assert metrics["eval_loss"] < metrics["eval_loss_first"]
    assert metrics["mfu"] is None and metrics["mfu_with_attention"] is None
    assert metrics["tokens_per_s"] > 0 and metrics["attention_flops_per_token"] > 0
    assert metrics["peak_memory_bytes"] > 100 * 2**20  # of a process with torch
    (seen,) = metrics["network"]["observed"]
    assert metrics["network"]["findings"] == [] and list(seen["connections"]) == ["lo"], metrics["network"]
    decided = read_json(run.network(1))["nodes"][0]["environment"]
    assert {item["name"]: item["value"] for item in decided if item["value"]} == {"GLOO_SOCKET_IFNAME": "lo"}


def test_token_counts_are_those_of_the_data(finished: Any) -> None:
    _, _, run = finished
    metrics = read_json(run.metrics)
    each = [sum(e["tokens"] for e in step_events(run, rank)) for rank in (0, 1)]
    assert sum(each) == metrics["tokens_real"] and metrics["tokens_trained"] < metrics["tokens_real"]


def test_the_run_folder_is_complete(finished: Any) -> None:
    _, _, run = finished
    files = (run.spec, run.plan, run.run_args, run.preflight, run.preflight_text, run.events_of(0), run.events_of(1))
    assert [path for path in files if not path.exists()] == []
    logs = run.rank_logs(1)
    assert list(logs) == [0, 1] and "[RANK 1] WORLD_SIZE=2" in logs[1].read_text()
    assert run.checkpoint_steps() == [4, 8]
    assert next(run.telemetry.glob("*.jsonl")).read_text().count("\n") > 3
    assert list((run.root / "tensorboard").iterdir())


def test_secrets_reach_no_file(finished: Any) -> None:
    _, done, run = finished
    files = [path for path in run.root.rglob("*") if path.is_file()]
    assert files and [path for path in files if b"verysecret" in path.read_bytes()] == []
    assert "verysecret" not in done.stdout


def test_the_adapter_loads_in_plain_peft_with_its_named_base(finished: Any) -> None:
    from peft import AutoPeftModelForCausalLM

    _, _, run = finished
    model = AutoPeftModelForCausalLM.from_pretrained(str(run.checkpoint(8)))
    saved = load_file(run.checkpoint(8) / "adapter_model.safetensors")
    assert any("lora_B" in k and v.abs().max() > 0 for k, v in saved.items())
    assert read_json(run.checkpoint(8) / "adapter_config.json")["base_model_name_or_path"] == str(run.model)
    assert model(torch.tensor([[5, 6, 7]])).logits.shape[-1] == model.config.vocab_size


def test_verbs_on_a_finished_run(finished: Any) -> None:
    folder, _, run = finished
    (row,) = json.loads(allranks("runs", "--json", cwd=folder).stdout)
    assert (row["run"], row["status"], row["steps"]) == (run.name, "succeeded", 8)
    assert json.loads(allranks("logs", run.name, "--rank", "1", "--json", cwd=folder).stdout)[0]["rank"] == 1
    assert "[rank 0]" in allranks("logs", "latest", cwd=folder).stdout
    run.report.unlink()
    assert json.loads(allranks("report", run.name, "--json", cwd=folder).stdout)["steps"] == 8
    assert run.report.exists()
    allranks("logs", run.name, "--rank", "7", cwd=folder, code=2)
    allranks("report", "nosuch", cwd=folder, code=2)
    assert "has done its 8 steps" in allranks("resume", run.name, cwd=folder, code=2).stderr


def test_a_damaged_checkpoint_is_passed_over_by_name(finished: Any) -> None:
    folder, _, run = finished
    victim = next((run.checkpoint(8) / "state").glob("shard-*.safetensors"))
    content = victim.read_bytes()
    victim.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    sets = ("--set", "train.max_steps=9", "--set", "checkpoint.mode=none")
    done = allranks("resume", run.name, *sets, cwd=folder, code=0)
    for words in ("skipped", "wrong hash", "resuming after step 4"):
        assert words in done.stdout


FEW = {"cluster": {"procs_per_node": 4}, "data": {"subset": 3, "packing": "none", "eval_fraction": 0}}


@pytest.mark.parametrize(
    ("change", "code", "words"),
    [
        (FEW, 2, "3 training sequences for 4 ranks"),
        ({"data": {"max_length": 4}}, 2, "no row has a trained token"),
        ({"cluster": {"cache": "/proc/nowhere"}}, 3, "cluster.cache"),
        ({"model": {"name": "no-such-org/no-such-model", "config": {}}}, 3, "no-such-org/no-such-model"),
    ],
)
def test_what_only_the_ranks_can_find_is_said_as_clearly(
    tmp_path: Path, rows_file: Path, change: Any, code: int, words: str
) -> None:
    """Some of it is found before there is a run folder."""
    done = allranks("run", str(write_spec(tmp_path, tiny_spec(rows_file, tmp_path, **change))), cwd=tmp_path, code=code)
    assert words in done.stderr and "Traceback" not in done.stderr + done.stdout


def test_weights_only_checkpoints_resume_only_when_told_so(tmp_path: Path, rows_file: Path) -> None:
    _, run = train(tmp_path, tiny_spec(rows_file, tmp_path, train={"max_steps": 4}), code=0)
    resume = ("resume", run.name, "--set", "train.max_steps=6")
    assert "--allow-inexact" in allranks(*resume, cwd=tmp_path, code=2).stderr
    allranks(*resume, "--allow-inexact", "--set", "checkpoint.mode=full", cwd=tmp_path, code=0)
    assert read_json(run.metrics)["steps"] == 6 and run.checkpoint_steps() == [4, 6]
    resume = ("resume", run.name, "--set", "checkpoint.mode=weights_only", "--set")
    for end in (
        "train.max_steps=7",
        "train.max_steps=8",
    ):  # the full one is taken also where one without state is newer
        done = allranks(*resume, end, cwd=tmp_path, code=0)
        assert "resuming after step 6 (full checkpoint)" in done.stdout
    assert "skipped: step 7 is a weights-only checkpoint" in done.stdout


def test_other_forms_of_one_run(tmp_path: Path) -> None:
    """Chats, wrapped packing, bf16, checkpointing, full fine-tuning, epochs, one process, seldom logging at once."""
    from transformers import AutoModelForCausalLM

    texts = [(("user", f"say {i}"), ("assistant", f"it is {i}")) for i in range(40)]
    rows = [{"messages": [{"role": role, "content": text} for role, text in pair]} for pair in texts]
    (tmp_path / "chat.jsonl").write_text("\n".join(map(json.dumps, rows)))
    spec = tiny_spec(
        tmp_path / "chat.jsonl", tmp_path, data={"packing": "wrapped"}, train={"epochs": 2, "max_steps": None},
        observe={"log_every": 4}, strategy={"name": "single"},
        model={"name": "tiny:llama", "dtype": "bfloat16", "gradient_checkpointing": True},
    )  # fmt: skip
    _, run = train(tmp_path, {**spec, "adapter": {"type": "none"}}, code=0)
    metrics = read_json(run.metrics)
    assert (metrics["world_size"], metrics["dtype"], metrics["use_lora"]) == (1, "bfloat16", False)
    saved = AutoModelForCausalLM.from_pretrained(run.checkpoint(metrics["steps"]))
    assert saved.dtype == torch.float32, "what the optimizer updates; forward passes are in bfloat16"
    assert sum(e["steps"] for e in step_events(run)) == metrics["steps"]
    assert [e["template"] for e in read_events(run.events_of(0)) if e["event"] == "data"] == ["chat"]


def test_padded_rows_and_evaluation_only(tmp_path: Path, rows_file: Path) -> None:
    """On a set of its own, of which nothing is trained and from which nothing is held out."""
    write_rows(tmp_path / "other.json", 15)
    own = {"source": str(tmp_path / "other.json")}
    spec = tiny_spec(rows_file, tmp_path, data={"packing": "none"}, train={"max_steps": 0}, eval=own)
    _, run = train(tmp_path, spec, code=0)
    metrics = read_json(run.metrics)
    assert metrics["steps"] == 0 and metrics["perplexity"] > 1 and run.checkpoint_steps() == []
    assert [e["rows"] for e in read_events(run.events_of(0)) if e["event"] == "eval"] == [15]


class Observer:
    def __init__(self) -> None:
        self.seen: list[str] = []

    def event(self, event: dict[str, Any]) -> None:
        self.seen.append(event["event"])

    def say(self, text: str) -> None: ...


def test_a_run_from_python_tells_an_observer(tmp_path: Path) -> None:
    import allranks

    (tmp_path / "program.py").write_text(
        "import sys\nassert not {'torch', 'transformers', 'numpy'} & sys.modules.keys(), 'imported too early'\n"
        "import allranks\nallranks.report(step=3, loss=2.0)\n"
    )
    spec = {"name": "p", "script": {"path": str(tmp_path / "program.py")}, "run_root": str(tmp_path / "runs")}
    observer = Observer()
    result = allranks.run(spec, ["cluster.procs_per_node=2"], observer=observer)
    assert (result.status, result.exit_code, result.metrics["steps"]) == ("succeeded", 0, 3)
    assert result.metrics["world_size"] == allranks.plan(spec).world_size == 2
    assert observer.seen.count("start") == observer.seen.count("progress") == 2


def test_a_tiny_bert_classifies_real_news(tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    columns = {"text": ["title", "description"], "label": "label"}
    data = {"columns": columns, "subset": 1500, "max_length": 64 if sampling.ALL else 24, "eval_fraction": 0.1}
    steps = {"max_steps": 120, "micro_batch_size": 16, "lr": 2e-3}
    spec = tiny_spec(shared("text", "ag_news.csv"), tmp_path, data=data, train=steps)
    spec["model"], spec["adapter"] = {"name": "tiny:bert"}, {"type": "none"}
    _, run = train(tmp_path, spec, code=0)
    metrics = read_json(run.metrics)
    assert metrics["accuracy"] > 0.4 and metrics["perplexity"] is None
    model = AutoModelForSequenceClassification.from_pretrained(run.checkpoint(120))
    assert model.config.id2label == {0: "1", 1: "2", 2: "3", 3: "4"}


LATE_S = 0.3


def test_each_rank_leaves_a_trace_with_all_that_analysis_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 is late with every batch, and the analysis of the traces says so."""
    stall_ranks(monkeypatch, "sleep_a_while:1:-1", LATE_S)
    profile = {"wait": 2, "warmup": 1, "active": 2}
    spec = rows_spec(tmp_path, observe={"profile": profile}, train={"max_steps": 8, "grad_accum": 2})
    done, run = train(tmp_path, spec, code=0)
    assert run.traced_ranks() == [0, 1]
    for rank in (0, 1):
        document = json.loads(gzip.decompress(run.trace_of(rank).read_bytes()))
        told = document["distributedInfo"]
        assert (told["rank"], told["world_size"], told["backend"]) == (rank, 2, "gloo")
        groups = {g["pg_desc"]: g["ranks"] for g in told["pg_config"]}
        assert groups == {name: [0, 1] for name in ("default_pg", "control", "checkpoint")}
        assert document["allranks"] == {
            "run": run.name, "attempt": 1, "rank": rank, "world_size": 2, "backend": "gloo", "device": "cpu",
            "strategy": "pytorch_ddp", "grad_accum": 2,
        }  # fmt: skip
        names = [e["name"] for e in document["traceEvents"] if e.get("cat") == "user_annotation"]
        assert sorted(n for n in names if n.startswith("ProfilerStep")) == ["ProfilerStep#4", "ProfilerStep#5"]
        parts = {"data": 4, "forward": 4, "backward": 4, "optimizer": 2, "control": 2}
        assert {part: names.count(f"allranks.{part}") for part in parts} == parts
        assert "gloo:all_reduce" in names
        assert any(n.startswith("allranks.module:") and n.endswith("q_proj") for n in names)
        (event,) = [e for e in read_events(run.events_of(rank)) if e["event"] == "trace"]
        assert (event["first_step"], event["last_step"], event["bytes"]) == (4, 5, run.trace_of(rank).stat().st_size)
    assert "allranks trace" in done.stdout
    (analysed,) = analyse([run.root])
    rows = {row.rank: row for row in analysed.stragglers}
    assert rows[1].max_late_s > 0.5 * LATE_S and rows[1].caused_wait_s > 2 * rows[0].caused_wait_s, rows
