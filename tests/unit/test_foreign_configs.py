"""`allranks init --from`: what a configuration of another tool says in a spec, and that none of its lines is lost."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from allranks.launch import preview
from allranks.spec.foreign_configs import tables
from allranks.spec.loader import parse_yaml
from allranks.spec.records import RunSpec
from allranks.spec.validation import all_keys
from tests.warm import allranks

AXOLOTL = """\
base_model: NousResearch/Llama-3.2-1B
load_in_4bit: true
datasets:
  - path: teknium/GPT4-LLM-Cleaned
    type: alpaca
val_set_size: 0.1
adapter: lora
lora_model_dir:
lora_target_modules: [q_proj, v_proj]
sample_packing: true
micro_batch_size: 2
max_steps: 30
num_epochs: 1
optimizer: adamw_8bit
learning_rate: 2e-4
bf16: auto
hub_token: hf_aB3dE5fG7hJ9kL1mN2pQ4rS6tU8vW0xY2z
fsdp: [full_shard, auto_wrap]
special_tokens: {pad_token: "<|end_of_text|>"}
"""
TRL = """\
model_name_or_path:
  Qwen/Qwen2.5-0.5B
dataset_mixture:
  datasets:
    - id: org/one
      split: train_sft
      weight: 1.0
    - id: org/two
      columns: [messages]
  seed: 0
report_to: [tensorboard, wandb]
bf16: true
max_steps: -1
lr_scheduler_type: polynomial
warmup_ratio: 0.1
use_bnb_nested_quant: true
use_peft: true
load_in_4bit: true
bnb_4bit_quant_type: fp4
"""
ACCELERATE = """\
compute_environment: LOCAL_MACHINE
distributed_type: DEEPSPEED
deepspeed_config:
  zero_stage: 3
  offload_optimizer_device: cpu
mixed_precision: bf16
num_machines: 2
num_processes: 16
main_process_ip: 10.0.0.1
tpu_env: []
"""
DEEPSPEED = """{
\t"zero_optimization": {"stage": 2, "overlap_comm": true, "reduce_bucket_size": "auto", \
"offload_param": {"device": "cpu"}},
\t"fp16": {"enabled": true},
\t"gradient_accumulation_steps": 4, "train_batch_size": 64, "gradient_clipping": 0,
\t"optimizer": {"type": "AdamW", "params": {"lr": 3e-5, "betas": [0.8, 0.999]}},
\t"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 100, "warmup_num_steps": 5}}
}"""
CASES: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "axolotl": (
        AXOLOTL,
        {
            "model": {"name": "NousResearch/Llama-3.2-1B", "quantize": "nf4_double"},
            "data": {
                "source": "teknium/GPT4-LLM-Cleaned", "template": "alpaca", "eval_fraction": 0.1, "packing": "isolated",
            },
            "adapter": {"type": "lora", "targets": ["q_proj", "v_proj"]},
            "strategy": {"name": "pytorch_zero3"},
            "train": {"max_steps": 30, "micro_batch_size": 2, "lr": 2e-4, "schedule": "cosine"},
        },
        ["13 num_epochs", "14 optimizer", "17 hub_token: ***", "19 special_tokens.pad_token"],
    ),
    "trl": (
        TRL,
        {
            "model": {"name": "Qwen/Qwen2.5-0.5B", "dtype": "bfloat16", "quantize": "nf4_double"},
            "adapter": {"type": "lora"},
            "data": {
                "sources": [{"source": "org/one", "split": "train_sft", "weight": 1.0}, {"source": "org/two"}],
                "seed": 0, "max_length": 1024, "packing": "none", "eval_fraction": 0.0,
            },
            "train": {"epochs": 3.0, "micro_batch_size": 8, "lr": 2e-5},
            "observe": {"tensorboard": True, "wandb": True},
        },
        ["9 dataset_mixture.datasets[1].columns", "14 lr_scheduler_type", "15 warmup_ratio", "19 bnb_4bit_quant_type"],
    ),
    "accelerate": (
        ACCELERATE,
        {
            "model": {"name": "tiny:llama", "dtype": "bfloat16"}, "data": {"source": "builtin:instructions"},
            "strategy": {"name": "deepspeed_zero3"},
            "cluster": {"launcher": "slurm", "nodes": 2, "procs_per_node": 8, "rendezvous": {"address": "10.0.0.1"}},
        },
        ["5 deepspeed_config.offload_optimizer_device"],
    ),
    "deepspeed": (
        DEEPSPEED,
        {
            "model": {"name": "tiny:llama"}, "data": {"source": "builtin:instructions"},
            "strategy": {"name": "deepspeed_zero2", "config": {"zero_optimization": {"overlap_comm": True}}},
            "train": {
                "grad_accum": 4, "max_grad_norm": None, "lr": 3e-5, "schedule": "linear", "max_steps": 100,
                "warmup_steps": 5,
            },
        },
        [
            "2 zero_optimization.offload_param.device", "3 fp16.enabled", "4 train_batch_size",
            "5 optimizer.params.betas",
        ],
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", sorted(CASES))
def test_the_spec_is_planned_and_every_line_is_in_it(tmp_path: Path, kind: str) -> None:
    text, expected, left = CASES[kind]
    (tmp_path / "config").write_text(text)
    done = allranks("init", "--from", "config", "-o", "spec.yaml", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    spec = (tmp_path / "spec.yaml").read_text()
    assert (told["kind"], told["text"]) == (kind, spec)
    names = [line.partition("  (")[0].partition(": ")[0] for line in told["not_taken_over"]]
    assert names == [line.partition(": ")[0] for line in left]
    assert {key: value for key, value in parse_yaml(spec, "spec.yaml").items() if value and key != "name"} == expected
    for line in (
        line for line in text.splitlines() if ":" in line
    ):  # every key of the file is named, also within braces
        for key in re.findall(r'"?([a-z0-9_]+)"?: *(?![{\s]|$)', line):
            assert re.search(rf"# .*\b{key}\b", spec), f"{key} is lost"
    assert "aB3dE5" not in done.stdout + spec
    _ = preview.prepare(tmp_path / "spec.yaml").plan


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "the file is empty"), (b"a: [1\n", "line 2: invalid YAML"), (b"- 1\n", "found a list"),
        (b"\xff\xfe\x00", "not a UTF-8"), (b"x: 1\n", "base_model"), (b"model: {name: x}\n", "allranks plan"),
        (b"base_model: a\nbase_model: b\n", "line 2: invalid YAML: duplicate key"),
    ],
)  # fmt: skip
def test_what_is_no_configuration_is_refused(tmp_path: Path, text: bytes, message: str) -> None:
    (tmp_path / "c.yaml").write_bytes(text)
    done = allranks("init", "--from", "c.yaml", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "--from c.yaml" in done.stderr and message in done.stderr
    assert not (tmp_path / "spec.yaml").exists()


def test_the_table_names_keys_of_the_spec() -> None:
    known = {*all_keys(RunSpec), "cluster.world_size", "strategy.offload", "strategy.config.zero_optimization.*"}
    for kind, table in tables().items():
        named = [entry if isinstance(entry, str) else entry.get("to") for entry in table["keys"].values()]
        values = [v for e in table["keys"].values() if isinstance(e, dict) for v in e.get("values", {}).values()]
        named += [key for value in values if isinstance(value, dict) for key in value] + [*table.get("defaults", {})]
        general = [re.sub(r"^data\.sources\[\]", "data", key) for key in named if key]
        general = [key.removesuffix(".messages").removesuffix(".text") for key in general]
        assert {key.replace("data.weight", "data.source") for key in general} <= known, kind
