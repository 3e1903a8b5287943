"""Write what a user brings: a file with rows, and the folder of a model with random weights and its tokenizer."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import torch

LENGTH = 96  # tokens; a few rows are longer


def write_answers(path: Path, n: int, seed: int = 0) -> list[str]:
    """Write instruction rows of uneven length and return their texts.

    Some rows are cut, the prompt of one is too long by itself, and one has no answer.
    """
    draw = random.Random(seed)
    words = ["say", "count", "number", "the", "please", "again", "yes", "no", "of", "and", "all"]

    def text(least: int, most: int) -> str:
        return " ".join(draw.choice(words) for _ in range(draw.randint(least, most)))

    rows = [
        {
            "instruction": f"{text(1, 6)} {i}",
            "input": text(1, 4) if i % 3 == 0 else "",
            "output": text(1, 40 if i % 5 == 0 else 9),
        }
        for i in range(n)
    ]
    rows[7]["instruction"] = "too long " * LENGTH
    rows[11]["output"] = "  "
    path.write_text(json.dumps(rows))
    return [value for row in rows for value in row.values()]


def write_classes(path: Path, n: int, seed: int = 0) -> list[str]:
    """Write texts of uneven length with one of three labels and return them; some are cut."""
    draw = random.Random(seed)
    words = ["market", "team", "goal", "price", "planet", "rocket", "win", "bank", "star"]
    rows = [
        {
            "text": " ".join(draw.choice(words) for _ in range(draw.randint(1, 60 if i % 8 == 0 else 20))),
            "label": ["sport", "money", "space"][draw.randrange(3)],
        }
        for i in range(n)
    ]
    path.write_text(json.dumps(rows))
    return [row["text"] for row in rows]


def save_tokenizer(folder: Path, texts: list[str], *, first: str | None = None, labelled: bool = False) -> int:
    """Save a byte-level tokenizer and return its number of tokens.

    Args:
        first: the beginning-of-text token, if the tokenizer adds one.
        labelled: for a classifier, with ``[CLS]`` and ``[SEP]`` around the text.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "[CLS]", "[SEP]"] if labelled else ["<pad>", "<s>", "</s>"]
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        texts,
        trainers.BpeTrainer(vocab_size=300, special_tokens=special, initial_alphabet=alphabet, show_progress=False),
    )
    if labelled:
        made.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
        )
        ends = {"cls_token": "[CLS]", "sep_token": "[SEP]"}
    else:
        if first:
            made.post_processor = processors.TemplateProcessing(single=f"{first} $A", special_tokens=[(first, 1)])
        ends = {"bos_token": "<s>", "eos_token": "</s>"}
    PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", **ends).save_pretrained(folder)  # noqa: S106
    return made.get_vocab_size()


SMALL = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 128, "tie_word_embeddings": False, "initializer_range": 0.1,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "mistral": {**SMALL, "sliding_window": None},
    "llama": {**SMALL, "tie_word_embeddings": True},
    "gpt2": {
        "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0,
        "initializer_range": 0.1,
    },
    "mixtral": {**SMALL, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "glm4_moe": {
        **SMALL, "head_dim": 8, "moe_intermediate_size": 24, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1,
        "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
    },
    "bert": {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 128,
        "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "initializer_range": 0.1, "num_labels": 3,
    },
}  # fmt: skip


def save_model(folder: Path, family: str, vocab: int) -> None:
    """Save a small model with random weights; norms and biases are random, too, so that no error in them is multiplied
    by 0."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

    torch.manual_seed(11)
    config = AutoConfig.for_model(
        family, vocab_size=vocab, bos_token_id=1, eos_token_id=2, pad_token_id=0, **CONFIGS[family]
    )
    kind = AutoModelForSequenceClassification if family == "bert" else AutoModelForCausalLM
    model: Any = kind.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    model.save_pretrained(folder)
