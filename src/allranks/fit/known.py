"""Configs of well-known models, so that `plan` can tell before anything is downloaded. Sizes alone, as their config.json has them."""

from __future__ import annotations

from typing import Any


def _llama(
    h: int,
    i: int,
    layers: int,
    heads: int,
    kv: int,
    vocab: int,
    *,
    tied: bool = False,
    kind: str = "llama",
    **more: Any,
) -> dict[str, Any]:
    return {
        "model_type": kind,
        "hidden_size": h,
        "intermediate_size": i,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "vocab_size": vocab,
        "tie_word_embeddings": tied,
        **more,
    }


def _gpt2(h: int, layers: int, heads: int) -> dict[str, Any]:
    return {
        "model_type": "gpt2",
        "n_embd": h,
        "n_layer": layers,
        "n_head": heads,
        "n_positions": 1024,
        "vocab_size": 50257,
    }


def _bert(
    h: int, i: int, layers: int, heads: int, vocab: int, kind: str = "bert", positions: int = 512, types: int = 2
) -> dict[str, Any]:
    return {
        "model_type": kind,
        "hidden_size": h,
        "intermediate_size": i,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "vocab_size": vocab,
        "max_position_embeddings": positions,
        "type_vocab_size": types,
    }


KNOWN: dict[str, dict[str, Any]] = {
    "mistralai/mistral-7b-v0.1": _llama(4096, 14336, 32, 32, 8, 32000, kind="mistral"),
    "mistralai/mistral-7b-instruct-v0.2": _llama(4096, 14336, 32, 32, 8, 32000, kind="mistral"),
    "mistralai/mistral-7b-v0.3": _llama(4096, 14336, 32, 32, 8, 32768, kind="mistral"),
    "mistralai/mistral-7b-instruct-v0.3": _llama(4096, 14336, 32, 32, 8, 32768, kind="mistral"),
    "mistralai/mixtral-8x7b-v0.1": _llama(4096, 14336, 32, 32, 8, 32000, kind="mixtral", num_local_experts=8, num_experts_per_tok=2),
    "meta-llama/llama-2-7b-hf": _llama(4096, 11008, 32, 32, 32, 32000),
    "meta-llama/llama-2-13b-hf": _llama(5120, 13824, 40, 40, 40, 32000),
    "meta-llama/llama-2-70b-hf": _llama(8192, 28672, 80, 64, 8, 32000),
    "meta-llama/llama-3.1-8b": _llama(4096, 14336, 32, 32, 8, 128256),
    "meta-llama/llama-3.1-8b-instruct": _llama(4096, 14336, 32, 32, 8, 128256),
    "meta-llama/meta-llama-3-8b": _llama(4096, 14336, 32, 32, 8, 128256),
    "meta-llama/llama-3.1-70b": _llama(8192, 28672, 80, 64, 8, 128256),
    "meta-llama/llama-3.3-70b-instruct": _llama(8192, 28672, 80, 64, 8, 128256),
    "meta-llama/llama-3.1-405b": _llama(16384, 53248, 126, 128, 8, 128256),
    "meta-llama/llama-3.2-1b": _llama(2048, 8192, 16, 32, 8, 128256, tied=True),
    "meta-llama/llama-3.2-3b": _llama(3072, 8192, 28, 24, 8, 128256, tied=True, head_dim=128),
    "tinyllama/tinyllama-1.1b-chat-v1.0": _llama(2048, 5632, 22, 32, 4, 32000),
    "huggingfacetb/smollm2-135m": _llama(576, 1536, 30, 9, 3, 49152, tied=True),
    "huggingfacetb/smollm2-360m": _llama(960, 2560, 32, 15, 5, 49152, tied=True),
    "huggingfacetb/smollm2-1.7b": _llama(2048, 8192, 24, 32, 32, 49152, tied=True),
    "qwen/qwen2.5-0.5b": _llama(896, 4864, 24, 14, 2, 151936, tied=True, kind="qwen2"),
    "qwen/qwen2.5-1.5b": _llama(1536, 8960, 28, 12, 2, 151936, tied=True, kind="qwen2"),
    "qwen/qwen2.5-3b": _llama(2048, 11008, 36, 16, 2, 151936, tied=True, kind="qwen2"),
    "qwen/qwen2.5-7b": _llama(3584, 18944, 28, 28, 4, 152064, kind="qwen2"),
    "qwen/qwen2.5-14b": _llama(5120, 13824, 48, 40, 8, 152064, kind="qwen2"),
    "qwen/qwen2.5-32b": _llama(5120, 27648, 64, 40, 8, 152064, kind="qwen2"),
    "qwen/qwen2.5-72b": _llama(8192, 29568, 80, 64, 8, 152064, kind="qwen2"),
    "qwen/qwen3-0.6b": _llama(1024, 3072, 28, 16, 8, 151936, tied=True, kind="qwen3", head_dim=128),
    "qwen/qwen3-1.7b": _llama(2048, 6144, 28, 16, 8, 151936, tied=True, kind="qwen3", head_dim=128),
    "qwen/qwen3-4b": _llama(2560, 9728, 36, 32, 8, 151936, tied=True, kind="qwen3", head_dim=128),
    "qwen/qwen3-8b": _llama(4096, 12288, 36, 32, 8, 151936, kind="qwen3", head_dim=128),
    "qwen/qwen3-14b": _llama(5120, 17408, 40, 40, 8, 151936, kind="qwen3", head_dim=128),
    "qwen/qwen3-32b": _llama(5120, 25600, 64, 64, 8, 151936, kind="qwen3", head_dim=128),
    "microsoft/phi-3-mini-4k-instruct": _llama(3072, 8192, 32, 32, 32, 32064, kind="phi3"),
    "google/gemma-2b": _llama(2048, 16384, 18, 8, 1, 256000, tied=True, kind="gemma", head_dim=256),
    "zai-org/glm-4.5-air": _llama(
        4096, 10944, 46, 96, 8, 151552, kind="glm4_moe", head_dim=128, attention_bias=True, moe_intermediate_size=1408,
        n_routed_experts=128, num_experts_per_tok=8, n_shared_experts=1, first_k_dense_replace=1, use_qk_norm=False,
    ),
    "openai-community/gpt2": _gpt2(768, 12, 12),
    "openai-community/gpt2-medium": _gpt2(1024, 24, 16),
    "openai-community/gpt2-large": _gpt2(1280, 36, 20),
    "openai-community/gpt2-xl": _gpt2(1600, 48, 25),
    "google-bert/bert-base-uncased": _bert(768, 3072, 12, 12, 30522),
    "google-bert/bert-large-uncased": _bert(1024, 4096, 24, 16, 30522),
    "facebookai/roberta-base": _bert(768, 3072, 12, 12, 50265, "roberta", 514, 1),
    "distilbert/distilbert-base-uncased": {
        "model_type": "distilbert", "dim": 768, "hidden_dim": 3072, "n_layers": 6, "n_heads": 12, "vocab_size": 30522,
        "max_position_embeddings": 512,
    },
}  # fmt: skip
_SHORT = {"gpt2": "openai-community/gpt2", "bert-base-uncased": "google-bert/bert-base-uncased"}
_SHORT |= {f"gpt2-{size}": f"openai-community/gpt2-{size}" for size in ("medium", "large", "xl")}


def known_config(name: str) -> dict[str, Any] | None:
    """The config of a hub name, whatever its capitals; None where it is not among these. Tuned models have the sizes of their base."""
    low = name.lower()
    low = _SHORT.get(low, low)
    return KNOWN.get(low) or KNOWN.get(low.removesuffix("-instruct").replace("-chat-hf", "-hf"))
