"""The workload all variants share: tokenizer, tiny Mistral, rows, packed rows and held-out rows.

Built once from an Alpaca file (a JSON list of ``instruction``, ``input``, ``output``) into a folder that the variants
only read. Nothing here is random but by a fixed seed, and a folder that was built from the same file with the same
settings is used again.

Run as: ``python -m benchmarks.train_throughput.workload --alpaca alpaca.json --out work/``
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.train_throughput import memory

if TYPE_CHECKING:
    from peft import PeftModel
    from tokenizers import Tokenizer

WORLD = 2
SEQ_LEN = 512
WARMUP_STEPS = 5
VOCAB = 4096
HELDOUT_FRACTION = 0.05
DATA_SEED = 1234
MODEL_SEED = 1234
IGNORED = -100  # the label of what is not predicted
EOS, PAD, UNK = "</s>", "<pad>", "<unk>"

MODEL = {
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 1024,
    "sliding_window": None,
    "tie_word_embeddings": False,
}
LORA_TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
LORA = {"r": 8, "lora_alpha": 16, "lora_dropout": 0.05, "target_modules": LORA_TARGETS}
LEARNING_RATE = 2e-3
WEIGHT_DECAY = 0.0
CLIP_NORM = 1.0
ENV = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


def prompt_text(row: dict[str, str]) -> str:
    """The Alpaca prompt; the input's section is left out where there is no input."""
    middle = f"### Input:\n{row['input']}\n\n" if row["input"].strip() else ""
    return f"### Instruction:\n{row['instruction']}\n\n{middle}### Response:\n"


def row_text(row: dict[str, str]) -> str:
    """Prompt and answer, without the end-of-sequence token."""
    return prompt_text(row) + row["output"]


class RaggedRows:
    """Rows of token ids of uneven length, one flat memory-mapped array and its offsets."""

    def __init__(self, flat: np.ndarray, offsets: np.ndarray) -> None:
        self.flat = flat
        self.offsets = offsets

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> np.ndarray:
        return self.flat[self.offsets[index] : self.offsets[index + 1]]

    def __iter__(self) -> Iterator[np.ndarray]:
        return (self[i] for i in range(len(self)))

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each row."""
        return np.diff(self.offsets)

    @classmethod
    def load(cls, folder: Path, name: str) -> RaggedRows:
        """Open what ``save`` wrote."""
        return cls(np.load(folder / f"{name}.ids.npy", mmap_mode="r"), np.load(folder / f"{name}.offsets.npy"))

    @staticmethod
    def save(rows: list[list[int]], folder: Path, name: str) -> None:
        """Write rows as two arrays."""
        np.save(folder / f"{name}.ids.npy", np.concatenate([np.asarray(r, dtype=np.int32) for r in rows]))
        np.save(folder / f"{name}.offsets.npy", np.cumsum([0] + [len(r) for r in rows], dtype=np.int64))


@dataclass(frozen=True)
class Job:
    """One run of one variant: what it trains and where it may write."""

    workload: Workload
    useful_tokens: int
    seed: int
    folder: Path
    timeout_s: float


@dataclass(frozen=True)
class Workload:
    """A built workload folder."""

    folder: Path

    @cached_property
    def meta(self) -> dict[str, Any]:
        """What was built, with its counts."""
        return json.loads((self.folder / "workload.json").read_text())

    @property
    def model_path(self) -> Path:
        """Config, weights and tokenizer, in Hugging Face's form."""
        return self.folder / "model"

    @cached_property
    def train(self) -> RaggedRows:
        """Training rows, each ending in EOS; their number is a multiple of the ranks."""
        return RaggedRows.load(self.folder, "train")

    @cached_property
    def heldout(self) -> RaggedRows:
        """Held-out rows, never trained on."""
        return RaggedRows.load(self.folder, "heldout")

    @cached_property
    def packed(self) -> np.ndarray:
        """The training rows joined and cut every SEQ_LEN tokens; a multiple of the ranks, no padding."""
        return np.load(self.folder / "packed.npy", mmap_mode="r")

    @property
    def pad_id(self) -> int:
        """The padding token, which occurs nowhere in the rows."""
        return int(self.meta["pad_id"])

    def lora_model(self, seed: int, attention: str = "sdpa") -> PeftModel:
        """The base in float32 with fresh adapters; the same seed gives the same adapters."""
        import torch
        from peft import LoraConfig, get_peft_model
        from transformers import AutoModelForCausalLM

        memory.model_begins()
        torch.manual_seed(seed)
        base = AutoModelForCausalLM.from_pretrained(self.model_path, dtype=torch.float32, attn_implementation=attention)
        base.config.use_cache = False
        return get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", **LORA))  # type: ignore[arg-type, return-value]


def _train_tokenizer(texts: list[str]) -> Tokenizer:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE(unk_token=UNK))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=[UNK, EOS, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _save_model(tokenizer: Tokenizer, folder: Path, vocabulary: int) -> dict[str, int]:
    import torch
    from transformers import MistralConfig, MistralForCausalLM, PreTrainedTokenizerFast

    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token=UNK, eos_token=EOS, pad_token=PAD, model_max_length=SEQ_LEN
    )
    fast.save_pretrained(folder)
    torch.manual_seed(MODEL_SEED)
    config = MistralConfig(
        vocab_size=max(vocabulary, tokenizer.get_vocab_size()),
        bos_token_id=None,
        eos_token_id=tokenizer.token_to_id(EOS),
        pad_token_id=tokenizer.token_to_id(PAD),
        dtype="float32",
        **MODEL,  # type: ignore[arg-type]
    )
    model = MistralForCausalLM(config)
    model.save_pretrained(folder)
    parameters = sum(p.numel() for p in model.parameters())
    embedding = model.model.embed_tokens.weight.numel()
    return {"parameters": parameters, "parameters_without_embedding": parameters - embedding}


def _split(rows: list[dict[str, str]]) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Held-out rows are drawn by a fixed seed; the training rows are shuffled once, for all variants."""
    shuffled = rows.copy()
    random.Random(DATA_SEED).shuffle(shuffled)
    heldout = max(WORLD, round(len(shuffled) * HELDOUT_FRACTION))
    train = shuffled[heldout:]
    return train[: len(train) // WORLD * WORLD], shuffled[:heldout]


def _write_rows(rows: list[dict[str, str]], path: Path) -> None:
    """The rows as given, for programs that render and tokenize on their own."""
    path.write_text(json.dumps(rows, ensure_ascii=False))


def _pack(rows: list[list[int]]) -> np.ndarray:
    flat = np.concatenate([np.asarray(r, dtype=np.int32) for r in rows])
    count = len(flat) // (SEQ_LEN * WORLD) * WORLD
    return flat[: count * SEQ_LEN].reshape(count, SEQ_LEN)


def _key(alpaca: Path, vocabulary: int) -> str:
    """What the folder depends on: the file's bytes, this file's, and the vocabulary."""
    digest = hashlib.sha256(alpaca.read_bytes())
    digest.update(Path(__file__).read_bytes())
    digest.update(str(vocabulary).encode())
    return digest.hexdigest()


def _read_rows(alpaca: Path) -> list[dict[str, str]]:
    rows = json.loads(alpaca.read_text())
    return [{k: str(row.get(k) or "") for k in ("instruction", "input", "output")} for row in rows]


def build(alpaca: Path, out: Path, vocabulary: int = 0) -> Workload:
    """Build the workload into ``out`` unless it already stands there; the model's vocabulary has at least this size."""
    key = _key(alpaca, vocabulary)
    done = Workload(out)
    if (out / "workload.json").exists() and done.meta["key"] == key:
        return done
    part = out.with_name(f"{out.name}.part-{os.getpid()}")
    part.mkdir(parents=True)
    try:
        _build_into(part, alpaca, key, vocabulary)
        shutil.rmtree(out, ignore_errors=True)
        part.rename(out)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return Workload(out)


def _build_into(folder: Path, alpaca: Path, key: str, vocabulary: int) -> None:
    rows = _read_rows(alpaca)
    train, heldout = _split(rows)
    tokenizer = _train_tokenizer([row_text(row) for row in rows])
    eos = tokenizer.token_to_id(EOS)
    sizes = _save_model(tokenizer, folder / "model", vocabulary)
    encoded = {
        name: [[*e.ids, eos] for e in tokenizer.encode_batch([row_text(row) for row in part])]
        for name, part in (("train", train), ("heldout", heldout))
    }
    for name, ids in encoded.items():
        RaggedRows.save(ids, folder, name)
    np.save(folder / "packed.npy", _pack(encoded["train"]))
    _write_rows(train, folder / "train.json")
    _write_rows(heldout, folder / "heldout.json")
    lengths = np.array([len(r) for r in encoded["train"]])
    meta = {
        "key": key,
        "rows": len(rows),
        "train_rows": len(train),
        "heldout_rows": len(heldout),
        "train_tokens": int(lengths.sum()),
        "train_tokens_cut_at_seq_len": int(np.maximum(lengths - SEQ_LEN, 0).sum()),
        "mean_tokens_per_row": round(float(lengths.mean()), 1),
        "padded_share_useful": round(float(np.minimum(lengths, SEQ_LEN).mean() / SEQ_LEN), 4),
        "packed_rows": len(_pack(encoded["train"])),
        "vocab": max(vocabulary, tokenizer.get_vocab_size()),
        "pad_id": tokenizer.token_to_id(PAD),
        "seq_len": SEQ_LEN,
        "model": MODEL,
        **sizes,
        "lora": LORA,
        "learning_rate": LEARNING_RATE,
        "clip_norm": CLIP_NORM,
    }
    (folder / "workload.json").write_text(json.dumps(meta, indent=2))


def main() -> None:
    """Build from the command line and print what was built."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--alpaca", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    print(json.dumps(build(args.alpaca, args.out).meta, indent=2))


if __name__ == "__main__":
    main()
