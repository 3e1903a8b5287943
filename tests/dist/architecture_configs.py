"""A small config of each tested architecture. Sizes differ where a shape could be mistaken for another."""

from typing import Any

DENSE: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128,
}  # fmt: skip
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}
MHA = {k: v for k, v in DENSE.items() if k != "num_key_value_heads"}
MAMBA = {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 8}

CONFIGS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("bert", "gpt_neox", "mpnet", "phi"), MHA),
    **dict.fromkeys(("gpt2", "gpt_bigcode"), GPT2),
    **dict.fromkeys(("falcon_mamba", "mamba"), MAMBA),
    **dict.fromkeys(
        ("cohere", "granite", "llama", "olmo2", "phi3", "qwen2", "smollm3", "stablelm", "starcoder2"), DENSE),
    "gemma": {**DENSE, "head_dim": 8},
    "glm4": {**DENSE, "head_dim": 8},
    "qwen3": {**DENSE, "head_dim": 8},
    "albert": {**MHA, "embedding_size": 16},
    "electra": {**MHA, "embedding_size": 16},
    "roberta": {**MHA, "max_position_embeddings": 130},
    "xlm-roberta": {**MHA, "max_position_embeddings": 130},
    "bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 4},
    "deberta-v2": {**MHA, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
    "deepseek_v3": {
        **DENSE, "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8, "v_head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 24, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
    },
    "distilbert": {"dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4, "max_position_embeddings": 128},
    "falcon": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4},
    "gemma2": {**DENSE, "head_dim": 8, "sliding_window": 16},
    "gemma3_text": {
        **DENSE, "head_dim": 8, "sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"],
    },
    "glm4_moe": {
        **DENSE, "head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
        "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
    },
    "gpt_neo": {
        "hidden_size": 32, "num_layers": 2, "num_heads": 4, "max_position_embeddings": 128,
        "attention_types": [[["global", "local"], 1]], "window_size": 16,
    },
    "gpt_oss": {**DENSE, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16},
    "gptj": {**GPT2, "rotary_dim": 4},
    "mamba2": {**MAMBA, "num_heads": 8, "head_dim": 8, "n_groups": 1, "expand": 2, "chunk_size": 16},
    "mistral": {**DENSE, "sliding_window": 16},
    "mixtral": {**DENSE, "num_local_experts": 4, "num_experts_per_tok": 2},
    "modernbert": {**MHA, "global_attn_every_n_layers": 2, "local_attention": 16},
    "olmoe": {**DENSE, "num_experts": 4, "num_experts_per_tok": 2},
    "opt": {"hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "max_position_embeddings": 128, "word_embed_proj_dim": 32},
    "qwen2_moe": {**DENSE, **MOE, "shared_expert_intermediate_size": 24},
    "qwen3_moe": {**DENSE, **MOE, "head_dim": 8},
}  # fmt: skip
