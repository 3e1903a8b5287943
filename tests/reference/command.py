"""Write what a user brings, start allranks by its command line, read its files. Nothing here imports the package."""

import json
import random
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

from tests import sampling, warm

ALLRANKS = [sys.executable, "-m", "allranks"]


@dataclass(frozen=True)
class Run:
    folder: Path

    @property
    def metrics(self) -> dict[str, Any]:
        return json.loads((self.folder / "metrics.json").read_text())

    def steps(self) -> list[dict[str, Any]]:
        """Return the step events of rank 0; a step that was repeated after a resume counts once."""
        found: dict[int, dict[str, Any]] = {}
        for event in events(self):
            if event["event"] == "resume":
                found = {step: e for step, e in found.items() if step <= event["from_step"]}
            elif event["event"] == "step":
                found[event["step"]] = event
        return [found[step] for step in sorted(found)]

    def export(self, to: Path) -> str:
        allranks("export", self.folder.name, "--run-root", str(self.folder.parent), "--out", str(to), cwd=to.parent)
        return str(to)


def events(run: Run, name: str | None = None, rank: int = 0) -> list[dict[str, Any]]:
    """Return the events of a rank so far, all or those of one name; the last line may still be in the making."""
    file = run.folder / "events" / f"rank{rank}.jsonl"
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    found = [json.loads(line) for line in lines if line.endswith("\n")]
    return [event for event in found if name in (None, event["event"])]


def allranks(*args: str, cwd: Path, limit_s: float = 200) -> str:
    done = warm.allranks(*args, cwd=cwd, timeout_s=limit_s, kind="heavy", anew=sampling.ALL)
    assert done.returncode == 0, done.stderr[-4000:] + done.stdout[-4000:]
    return done.stdout


def write_spec(folder: Path, spec: dict[str, Any]) -> Path:
    path = folder / f"{spec['name']}.yaml"
    path.write_text(yaml.safe_dump(spec))
    return path


def run(folder: Path, spec: dict[str, Any]) -> Run:
    allranks("run", str(write_spec(folder, spec)), cwd=folder)
    return run_of(spec)


def run_of(spec: dict[str, Any]) -> Run:
    (found,) = Path(spec["run_root"]).glob(f"{spec['name']}-*")
    return Run(found)


def start(folder: Path, spec: dict[str, Any]) -> subprocess.Popen[str]:
    command = [*ALLRANKS, "run", str(write_spec(folder, spec))]
    files = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    return subprocess.Popen(command, cwd=folder, text=True, start_new_session=True, **files)


LENGTH = 96  # tokens; a few rows are longer


def write_answers(path: Path, n: int, seed: int = 0) -> list[str]:
    """Write rows of uneven length and return their texts; some are cut, one prompt is too long, one has no answer."""
    draw = random.Random(seed)
    words = ["say", "count", "number", "the", "please", "again", "yes", "no", "of", "and", "all"]

    def text(least: int, most: int) -> str:
        return " ".join(draw.choice(words) for _ in range(draw.randint(least, most)))

    def row(i: int) -> dict[str, str]:
        instruction, more = f"{text(1, 6)} {i}", text(1, 4) if i % 3 == 0 else ""
        return {"instruction": instruction, "input": more, "output": text(1, 40 if i % 5 == 0 else 9)}

    rows = [row(i) for i in range(n)]
    rows[7]["instruction"] = "too long " * LENGTH
    rows[11]["output"] = "  "
    path.write_text(json.dumps(rows))
    return [value for row in rows for value in row.values()]


def write_classes(path: Path, n: int, seed: int = 0) -> list[str]:
    """Write texts of uneven length with one of three labels and return them; some are cut."""
    draw = random.Random(seed)
    words = ["market", "team", "goal", "price", "planet", "rocket", "win", "bank", "star"]

    def row(i: int) -> dict[str, str]:
        text = " ".join(draw.choice(words) for _ in range(draw.randint(1, 60 if i % 8 == 0 else 20)))
        return {"text": text, "label": ["sport", "money", "space"][draw.randrange(3)]}

    rows = [row(i) for i in range(n)]
    path.write_text(json.dumps(rows))
    return [row["text"] for row in rows]


def save_tokenizer(folder: Path, texts: list[str], *, first: str | None = None, labelled: bool = False) -> int:
    """Save a byte-level tokenizer that adds `first`, or ``[CLS]`` and ``[SEP]``; return its number of tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "[CLS]", "[SEP]"] if labelled else ["<pad>", "<s>", "</s>"]
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    how = {"special_tokens": special, "initial_alphabet": alphabet, "show_progress": False}
    made.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=300, **how))
    template = processors.TemplateProcessing
    if labelled:
        made.post_processor = template(single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)])
        ends = {"cls_token": "[CLS]", "sep_token": "[SEP]"}
    else:
        if first:
            made.post_processor = template(single=f"{first} $A", special_tokens=[(first, 1)])
        ends = {"bos_token": "<s>", "eos_token": "</s>"}
    PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", **ends).save_pretrained(folder)  # noqa: S106
    return made.get_vocab_size()


SMALL = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "tie_word_embeddings": False, "initializer_range": 0.1,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "mistral": {**SMALL, "sliding_window": None},
    "llama": {**SMALL, "tie_word_embeddings": True},
    "gpt2": {
        "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, "attn_pdrop": 0.0, "embd_pdrop": 0.0,
        "resid_pdrop": 0.0, "initializer_range": 0.1,
    },
    "mixtral": {**SMALL, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "glm4_moe": {
        **SMALL, "head_dim": 8, "moe_intermediate_size": 24, "n_routed_experts": 4, "num_experts_per_tok": 2,
        "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
    },
    "bert": {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "max_position_embeddings": 128, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
        "initializer_range": 0.1, "num_labels": 3,
    },
}  # fmt: skip


def save_model(folder: Path, family: str, vocab: int) -> None:
    """Save a small model with random weights, also in norms and biases, whose errors would be multiplied by 0."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

    torch.manual_seed(11)
    ids = {"vocab_size": vocab, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    config = AutoConfig.for_model(family, **ids, **CONFIGS[family])
    kind = AutoModelForSequenceClassification if family == "bert" else AutoModelForCausalLM
    model: Any = kind.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    model.save_pretrained(folder)
