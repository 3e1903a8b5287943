"""Which forms of a model each strategy is tried on."""

from typing import Any

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {"clip": None},
    "accumulation": {"accum": 3, "recompute": "selective"},
    "lora": {"lora": True},
    "tied": {"tied": True},
    "frozen": {"frozen": True},
    "unused": {"extra": "sometimes", "accum": 2},
    "unused_in_block": {"extra": "in_block", "accum": 2},
    "uneven": {"extra": "always", "config": {"intermediate_size": 61}},
    "bf16": {"dtype": "bfloat16"},
    "lora_on_bf16": {"lora": True, "base_dtype": "bfloat16"},
    "shared": {"shared": True},
    "lora_sharded": {"lora": True, "accum": 2, "options": {"adapters": "sharded"}},
    "lora_whole": {"lora": True, "accum": 2, "options": {"adapters": "ignored"}, "base_dtype": "bfloat16"},
    "lora_sharded_on_bf16": {"lora": True, "accum": 2, "options": {"adapters": "sharded"}, "base_dtype": "bfloat16"},
    "moe": {"moe": True},
    "moe_bf16": {"moe": True, "dtype": "bfloat16"},
    "moe_lora": {"moe": True, "lora": True, "accum": 2},
    "moe_lora_sharded": {"moe": True, "lora": True, "accum": 2, "options": {"adapters": "sharded"}},
    "moe_lora_on_bf16": {"moe": True, "lora": True, "accum": 2, "base_dtype": "bfloat16"},
    "moe_lora_recomputed": {
        "moe": True, "lora": True, "recompute": "selective", "options": {"adapters": "sharded"},
        "base_dtype": "bfloat16",
    },
    "static_graph": {"lora": True, "recompute": "full", "options": {"static_graph": True}},
    "compiled": {"lora": True, "recompute": "full", "compiled": True},
    "compiled_selective": {"accum": 2, "recompute": "selective", "compiled": True},
    "host_moments": {"accum": 2, "options": {"offload": "optimizer"}},
    "on_host": {"options": {"offload": "all"}},
    "lora_on_host": {"lora": True, "accum": 2, "options": {"adapters": "ignored", "offload": "all"}},
}  # fmt: skip
FSDP2 = ("pytorch_zero2", "pytorch_zero3")
SPLIT = ("pytorch_ddp", "zero1", "zero3", *FSDP2)
SLOW = ("compiled", "compiled_selective")
FAMILIES = (
    "simple_ddp_hook", "pytorch_ddp", "bucket_ddp_async", "zero1", "zero2", "zero3", *FSDP2, "deepspeed_zero1",
    "deepspeed_zero3", "hf_trainer",
)  # fmt: skip
"""One or two strategies of each kind."""
# variants of some strategies
ONLY = {
    "lora_sharded": FSDP2, "lora_whole": FSDP2, "lora_sharded_on_bf16": FSDP2,
    "moe": SPLIT, "moe_bf16": SPLIT, "moe_lora": SPLIT, "moe_lora_on_bf16": SPLIT,
    "moe_lora_sharded": FSDP2, "moe_lora_recomputed": FSDP2,
    "static_graph": ("pytorch_ddp",),
    "compiled": (*SPLIT, "zero2", "deepspeed_zero2"), "compiled_selective": (*SPLIT, "zero2", "deepspeed_zero2"),
    "host_moments": ("zero1", "zero2", "zero3", *FSDP2), "on_host": FSDP2, "lora_on_host": FSDP2,
}  # fmt: skip
# with tests that run on ranks of several nodes, or pretend to
REPLICATED: dict[str, dict[str, Any]] = {
    f"replicated_{name}": {**how, "options": {**how.get("options", {}), "replicate": "nodes"}}
    for name, how in {
        "plain": {"clip": None},
        "accumulation": {"accum": 3},
        "uneven": {**VARIANTS["uneven"], "accum": 2},
        "unused": {**VARIANTS["unused"], "options": {"find_unused_parameters": True}},
        **{v: VARIANTS[v] for v in ("lora_whole", "lora_sharded", "moe_lora_sharded", "host_moments", "on_host")},
    }.items()
}
# in tests of their own
ALONE: dict[str, dict[str, Any]] = {
    "lora_unused": {"lora": True, "options": {"find_unused_parameters": True}},
    "moe_router_loss": {"router_loss": 5.0, "accum": 2},
    "moe_router_loss_recomputed": {"router_loss": 5.0, "accum": 2, "recompute": "full"},
    "lora_recomputed": {"lora": True, "accum": 2, "recompute": "full"},
}
REFUSED = {("pytorch_zero2", "shared"), ("pytorch_zero3", "shared")}
DEEPSPEED = {"deepspeed_zero1", "deepspeed_zero2", "deepspeed_zero3"}
UNUSED_OPTIONS = {"hf_trainer", "pytorch_ddp", "pytorch_zero1", "pytorch_zero2", "pytorch_zero3"} | DEEPSPEED
# Only a GPU has bf16 matrix units, fused optimizers and flash attention: tests/gpu reaches them with these.
GPU_VARIANTS: dict[str, dict[str, Any]] = {
    "plain": VARIANTS["plain"],
    "mixed": {"accum": 2},  # bf16 autocast over float32 weights
    "lora_on_bf16": VARIANTS["lora_on_bf16"],
}
