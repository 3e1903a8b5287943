"""Strategies with full weights, gradients and optimizer state on every rank, and torch's ZeRO 1."""

from __future__ import annotations

from allranks.spec.strategies.base import (
    DEFAULT_BUCKET_MB,
    FULL_REPLICA,
    ONE_MICRO_STEP,
    OR_TORCH_ERROR,
    ZERO_GRADIENTS,
    Bucketed,
    ModelSizes,
    Options,
    Replicated,
    StrategyInfo,
    StrategyPage,
    StrategyState,
    bars,
    sharded_moments,
)


def _replicated(m: ModelSizes, o: Options) -> StrategyState:
    return Replicated(m)


SINGLE = StrategyInfo(
    "allranks.train.strategies.data_parallel:Single",
    "one process, nothing to communicate",
    single_process=True,
    memory=_replicated,
    page=StrategyPage(
        new="the reference",
        idea="One process, without communication.",
        improves="Nothing; it is the reference for all other strategies.",
        bytes="none",
        memory=FULL_REPLICA,
        ratio="1",
        unused="Not changed by the optimizer.",
        compute=(*ONE_MICRO_STEP, ("optimizer", 60, 68)),
    ),
)
SIMPLE_DDP = StrategyInfo(
    "allranks.train.strategies.data_parallel:SimpleDDP",
    "one all-reduce per gradient after every backward",
    memory=_replicated,
    page=StrategyPage(
        new="one all-reduce per parameter",
        idea="Every rank trains on its own rows. After each backward pass, every gradient is averaged over the ranks.",
        improves="`single` uses only one process.",
        bytes="A T g, in n A all-reduces after backward",
        memory=FULL_REPLICA,
        ratio="1",
        unused=ZERO_GRADIENTS,
        compute=(*ONE_MICRO_STEP, ("wait", 60, 92), ("optimizer", 92, 100)),
        communication=bars("all-reduce", 3.2, 60, 64, 68, 72, 76, 80, 84, 88),
    ),
)
SIMPLE_DDP_GA = StrategyInfo(
    "allranks.train.strategies.data_parallel:SimpleDDPAccumulating",
    "one all-reduce per gradient after the last backward",
    memory=_replicated,
    page=StrategyPage(
        new="once per optimizer step",
        idea="Like `simple_ddp`, but it communicates only after the last micro-step: gradients of the "
        "others are accumulated on each rank.",
        improves="`simple_ddp` communicates in every micro-step, although only the last one needs it.",
        bytes="T g, in n all-reduces after the last backward",
        memory=FULL_REPLICA,
        ratio="1",
        unused=ZERO_GRADIENTS,
        compute=(
            ("forward", 0, 10),
            ("backward", 10, 30),
            ("forward", 30, 40),
            ("backward", 40, 60),
            ("wait", 60, 92),
            ("optimizer", 92, 100),
        ),
        communication=bars("all-reduce", 3.2, 60, 64, 68, 72, 76, 80, 84, 88),
    ),
)
SIMPLE_DDP_HOOK = StrategyInfo(
    "allranks.train.strategies.data_parallel:SimpleDDPHook",
    "one blocking all-reduce per gradient during backward",
    memory=_replicated,
    page=StrategyPage(
        new="within backward",
        idea="A hook all-reduces each gradient as soon as it is ready, and waits for it. The order is "
        "always from the last parameter to the first, so that ranks whose gradients are ready in "
        "different orders reduce the same ones together.",
        improves="`simple_ddp_ga` starts to communicate only after backward.",
        bytes="T g, in n all-reduces within backward",
        memory=FULL_REPLICA,
        ratio="1",
        unused=ZERO_GRADIENTS,
        compute=(
            ("forward", 0, 20),
            *(bar for at in range(20, 92, 9) for bar in (("backward", at, at + 5), ("wait", at + 5, at + 9))),
            ("optimizer", 92, 100),
        ),
        communication=bars("all-reduce", 4, 25, 34, 43, 52, 61, 70, 79, 88),
    ),
)
SIMPLE_DDP_ASYNC = StrategyInfo(
    "allranks.train.strategies.data_parallel:SimpleDDPAsync",
    "one asynchronous all-reduce per gradient during backward",
    memory=_replicated,
    page=StrategyPage(
        new="without waiting",
        idea="The hook starts an asynchronous all-reduce; the update waits for all of them.",
        improves="`simple_ddp_hook` blocks computation during communication.",
        bytes="T g, in n all-reduces started within backward",
        memory=FULL_REPLICA,
        ratio="1",
        unused=ZERO_GRADIENTS,
        compute=(*ONE_MICRO_STEP, ("wait", 60, 66), ("optimizer", 66, 74)),
        communication=bars("all-reduce", 4, 25, 30, 35, 40, 45, 50, 55, 60),
    ),
)
BUCKET_DDP_ASYNC = StrategyInfo(
    "allranks.train.strategies.data_parallel:BucketDDPAsync",
    "asynchronous all-reduces of buckets during backward",
    {"bucket_mb": DEFAULT_BUCKET_MB},
    memory=lambda m, o: Bucketed(m),
    page=StrategyPage(
        new="few large messages",
        idea="Gradients are grouped in buckets, in a fixed order from the last parameter to the first "
        "(checked to be equal on all ranks). A full bucket is reduced while backward continues. "
        "Gradients are views of the buckets, so nothing is copied back.",
        improves="`simple_ddp_async` sends hundreds of small messages, each with its own latency.",
        bytes="T g, in about T g / 25 MB all-reduces started within backward",
        memory=FULL_REPLICA,
        ratio="1",
        unused=ZERO_GRADIENTS,
        compute=(*ONE_MICRO_STEP, ("wait", 60, 63), ("optimizer", 63, 71)),
        communication=(*bars("all-reduce", 9, 33, 44), ("all-reduce", 55, 63)),
    ),
)
PYTORCH_DDP = StrategyInfo(
    "allranks.train.strategies.data_parallel:PyTorchDDP",
    "torch DistributedDataParallel",
    {"bucket_mb": DEFAULT_BUCKET_MB, "find_unused_parameters": False, "static_graph": False},
    memory=lambda m, o: Bucketed(m, keeps_local_gradients=True),
    page=StrategyPage(
        new="buckets by readiness",
        idea="torch's DistributedDataParallel. Its buckets follow the order in which gradients were ready "
        "in the first step.",
        improves="The fixed order of `bucket_ddp_async` may differ from the order of readiness.",
        bytes="T g, in about T g / 25 MB all-reduces started within backward",
        memory=FULL_REPLICA,
        ratio="1",
        unused=OR_TORCH_ERROR,
        compute=(*ONE_MICRO_STEP, ("wait", 60, 63), ("optimizer", 63, 71)),
        communication=bars("all-reduce", 9, 30, 42, 54),
    ),
)
PYTORCH_ZERO1 = StrategyInfo(
    "allranks.train.strategies.data_parallel:PyTorchZero1",
    "torch DistributedDataParallel with ZeroRedundancyOptimizer",
    {"bucket_mb": DEFAULT_BUCKET_MB, "find_unused_parameters": False},
    memory=lambda m, o: Bucketed(m, keeps_local_gradients=True, state=sharded_moments(m)),
    page=StrategyPage(
        new="torch's `zero1`",
        idea="torch's DistributedDataParallel with ZeroRedundancyOptimizer: each parameter is updated by "
        "one rank and then broadcast.",
        improves="In `pytorch_ddp` every rank keeps the same moments.",
        bytes="2 T g: all-reduces in backward, n broadcasts in the step",
        memory="4P + 4T + about 8T/W (parts differ in size)",
        ratio="3/4",
        unused=OR_TORCH_ERROR,
        compute=(*ONE_MICRO_STEP, ("wait", 60, 63), ("optimizer", 63, 67), ("wait", 67, 83)),
        communication=(*bars("all-reduce", 9, 30, 42, 54), *bars("broadcast", 1.6, 67, 69, 71, 73, 75, 77, 79, 81)),
    ),
)
