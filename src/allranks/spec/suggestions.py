"""Suggest the name that was meant: near spellings, and the names that other tools have for the same thing. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from allranks.utils.text import nearest_name, suggest

STRATEGY_SYNONYMS: dict[str, tuple[str, ...]] = {
    "ddp": ("pytorch_ddp",),
    "torch_ddp": ("pytorch_ddp",),
    "dp": ("pytorch_ddp",),
    "data_parallel": ("pytorch_ddp",),
    "distributed_data_parallel": ("pytorch_ddp",),
    "distributeddataparallel": ("pytorch_ddp",),
    "horovod": ("pytorch_ddp",),
    "fsdp": ("pytorch_zero3", "pytorch_zero2"),
    "fsdp1": ("pytorch_zero3", "pytorch_zero2"),
    "fsdp2": ("pytorch_zero3", "pytorch_zero2"),
    "torch_fsdp": ("pytorch_zero3", "pytorch_zero2"),
    "pytorch_fsdp": ("pytorch_zero3", "pytorch_zero2"),
    "pytorch_fsdp2": ("pytorch_zero3", "pytorch_zero2"),
    "fully_shard": ("pytorch_zero3",),
    "full_shard": ("pytorch_zero3",),
    "fully_sharded_data_parallel": ("pytorch_zero3",),
    "fullyshardeddataparallel": ("pytorch_zero3",),
    "shard_grad_op": ("pytorch_zero2",),
    "zero_redundancy_optimizer": ("pytorch_zero1",),
    "zeroredundancyoptimizer": ("pytorch_zero1",),
    "zero": ("zero1", "zero2", "zero3"),
    "deepspeed": ("deepspeed_zero3", "deepspeed_zero2", "deepspeed_zero1"),
    "ds": ("deepspeed_zero3", "deepspeed_zero2", "deepspeed_zero1"),
    "deepspeed1": ("deepspeed_zero1",),
    "deepspeed2": ("deepspeed_zero2",),
    "deepspeed3": ("deepspeed_zero3",),
    "none": ("single",),
    "no": ("single",),
    "one_process": ("single",),
    "trainer": ("hf_trainer",),
    "hf": ("hf_trainer",),
    "huggingface": ("hf_trainer",),
    "accelerate": ("hf_trainer",),
}
"""Names of other tools, in lower case with underscores, and the strategies that do the same, the most usual one first."""

KEY_SYNONYMS = {
    "dataset": "data",
    "datasets": "data",
    "lora": "adapter",
    "peft": "adapter",
    "trainer": "train",
    "evaluation": "eval",
    "checkpointing": "checkpoint",
    "output_dir": "run_root",
    "run_name": "name",
    "model_name": "model.name",
    "model_name_or_path": "model.name",
    "bf16": "model.dtype",
    "fp16": "model.dtype",
    "precision": "model.dtype",
    "mixed_precision": "model.dtype",
    "attn_implementation": "model.attention",
    "dataset_name": "data.source",
    "seq_len": "data.max_length",
    "seq_length": "data.max_length",
    "max_seq_len": "data.max_length",
    "max_seq_length": "data.max_length",
    "cutoff_len": "data.max_length",
    "max_samples": "data.subset",
    "lora_r": "adapter.r",
    "lora_rank": "adapter.r",
    "lora_alpha": "adapter.alpha",
    "lora_dropout": "adapter.dropout",
    "target_modules": "adapter.targets",
    "batch_size": "train.micro_batch_size",
    "per_device_train_batch_size": "train.micro_batch_size",
    "per_device_batch_size": "train.micro_batch_size",
    "gradient_accumulation_steps": "train.grad_accum",
    "accumulate_grad_batches": "train.grad_accum",
    "train_batch_size": "train.global_batch_size",
    "learning_rate": "train.lr",
    "num_train_epochs": "train.epochs",
    "num_epochs": "train.epochs",
    "steps": "train.max_steps",
    "num_steps": "train.max_steps",
    "lr_scheduler": "train.schedule",
    "lr_scheduler_type": "train.schedule",
    "scheduler": "train.schedule",
    "gradient_clipping": "train.max_grad_norm",
    "eval_steps": "eval.every",
    "per_device_eval_batch_size": "eval.batch_size",
    "save_steps": "checkpoint.every",
    "save_total_limit": "checkpoint.keep",
    "logging_steps": "observe.log_every",
    "gpus": "cluster.procs_per_node",
    "num_gpus": "cluster.procs_per_node",
    "num_processes": "cluster.procs_per_node",
    "nproc_per_node": "cluster.procs_per_node",
    "ntasks_per_node": "cluster.procs_per_node",
    "num_nodes": "cluster.nodes",
    "nnodes": "cluster.nodes",
    "num_machines": "cluster.nodes",
}
"""Keys of other tools' configurations, and the key of the spec."""

VERB_SYNONYMS = {
    "train": "run",
    "start": "run",
    "launch": "run",
    "fit": "plan",
    "validate": "plan",
    "dry-run": "plan",
    "new": "init",
    "create": "init",
    "list": "runs",
    "ls": "runs",
    "ps": "runs",
    "status": "runs",
    "stop": "cancel",
    "kill": "cancel",
    "restart": "resume",
    "continue": "resume",
    "benchmark": "compare",
    "bench": "compare",
    "profile": "trace",
    "preflight": "doctor",
    "check": "doctor",
    "debug": "diagnose",
    "save": "export",
    "box": "cluster",
}
"""Words that users try for a verb."""


def near_strategies(name: str, known: Iterable[str]) -> list[str]:
    """Return the strategies that a wrong name may mean, most likely first; by what other tools call them, then by spelling."""
    names = list(known)
    plain = name.strip().lower().replace("-", "_").replace(" ", "_")
    meant = STRATEGY_SYNONYMS.get(plain) or STRATEGY_SYNONYMS.get(plain.replace("_", ""))
    if meant:
        return [strategy for strategy in meant if strategy in names]
    if plain in names:
        return [plain]
    plain = plain.replace("stage", "zero")
    joined = {strategy.replace("_", ""): strategy for strategy in names}
    if exact := joined.get(plain.replace("_", "")):
        return [exact]
    near = nearest_name(plain, names)
    return [] if near is None else [near]


def suggest_strategies(near: list[str], summaries: Mapping[str, str]) -> str:
    """Return ``; did you mean 'a'?``, with what each of several strategies does; empty without a suggestion."""
    return suggest(*(repr(name) if len(near) == 1 else f"{name!r} ({summaries[name]})" for name in near))
