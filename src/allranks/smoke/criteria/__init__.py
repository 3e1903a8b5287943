"""Criteria that several tests share. Each is a function over a run's records; each can fail, and a test shows how.

meeting.py    ranks that come together     engines.py   the strategy that really ran
training.py   steps, losses, batches       saving.py    checkpoints
"""

from __future__ import annotations

from allranks.smoke.criteria.engines import adapters_only, bf16, built, engine, fused_adam, zero_stage
from allranks.smoke.criteria.meeting import accelerator, as_decided, barriers, nodes, transport, versions, world
from allranks.smoke.criteria.saving import reloaded, saved, state_files
from allranks.smoke.criteria.training import (
    batch_product,
    computes,
    loss_aggregated,
    own_work,
    prepared_once,
    steps_done,
    synchronised,
    throughput_written,
)
from allranks.smoke.records import Criterion

__all__ = [
    "BACKWARD",
    "BARRIERS",
    "BATCH",
    "BF16",
    "FORWARD",
    "GPU",
    "LOSS",
    "OWN_DATA",
    "RELOAD",
    "SAVE",
    "STEPS",
    "SYNC",
    "TORCH",
    "WORLD",
    "adapters_only",
    "as_decided",
    "built",
    "computes",
    "engine",
    "fused_adam",
    "nodes",
    "prepared_once",
    "state_files",
    "throughput_written",
    "transport",
    "world",
    "zero_stage",
]

GPU = Criterion("gpu", "GPU detected on every rank", accelerator)
TORCH = Criterion("torch", "One version of PyTorch", versions)
WORLD = Criterion("world", "Ranks form one group", world)
OWN_DATA = Criterion("data", "Each rank trains its own rows", own_work)
FORWARD = Criterion("forward", "Forward pass on every rank", computes("forward"))
BACKWARD = Criterion("backward", "Backward pass on every rank", computes("backward"))
SYNC = Criterion("sync", "Gradients synchronised", synchronised)
STEPS = Criterion("steps", "All training steps complete", steps_done)
LOSS = Criterion("loss", "Loss aggregated over the ranks", loss_aggregated)
BATCH = Criterion("batch", "Batch product right", batch_product)
BF16 = Criterion("bf16", "bfloat16 enabled and working", bf16)
SAVE = Criterion("save", "Checkpoint saved by all ranks", saved)
RELOAD = Criterion("reload", "Checkpoint reloaded", reloaded)
BARRIERS = Criterion("barriers", "Barriers complete without timeout", barriers, late=True)
