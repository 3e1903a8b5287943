"""Strategies with full weights, gradients and optimizer state on every rank, and torch's ZeRO 1."""

from __future__ import annotations

from allranks.spec.strategies.base import DEFAULT_BUCKET_MB, Bucketed, ModelSizes, Options, StrategyInfo, StrategyState


def _replicated(m: ModelSizes, o: Options) -> StrategyState:
    return StrategyState(m)


SINGLE = StrategyInfo(
    "allranks.train.strategies.data_parallel:Single",
    "one process, nothing to communicate",
    single_process=True,
    memory=_replicated,
)
SIMPLE_DDP = StrategyInfo(
    "allranks.train.strategies.data_parallel:SimpleDDP",
    "one all-reduce per gradient after every backward",
    memory=_replicated,
)
SIMPLE_DDP_GA = StrategyInfo(
    "allranks.train.strategies.data_parallel:SimpleDDPAccumulating",
    "one all-reduce per gradient after the last backward",
    memory=_replicated,
)
SIMPLE_DDP_HOOK = StrategyInfo(
    "allranks.train.strategies.data_parallel:SimpleDDPHook",
    "one blocking all-reduce per gradient during backward",
    memory=_replicated,
)
SIMPLE_DDP_ASYNC = StrategyInfo(
    "allranks.train.strategies.data_parallel:SimpleDDPAsync",
    "one asynchronous all-reduce per gradient during backward",
    memory=_replicated,
)
BUCKET_DDP_ASYNC = StrategyInfo(
    "allranks.train.strategies.data_parallel:BucketDDPAsync",
    "asynchronous all-reduces of buckets during backward",
    {"bucket_mb": DEFAULT_BUCKET_MB},
    memory=lambda m, o: Bucketed(m),
)
PYTORCH_DDP = StrategyInfo(
    "allranks.train.strategies.data_parallel:PyTorchDDP",
    "torch DistributedDataParallel",
    {"bucket_mb": DEFAULT_BUCKET_MB, "find_unused_parameters": False, "static_graph": False},
    memory=lambda m, o: Bucketed(m, keeps_local_gradients=True),
)
PYTORCH_ZERO1 = StrategyInfo(
    "allranks.train.strategies.data_parallel:PyTorchZero1",
    "torch DistributedDataParallel with ZeroRedundancyOptimizer",
    {"bucket_mb": DEFAULT_BUCKET_MB, "find_unused_parameters": False},
    memory=lambda m, o: Bucketed(m, keeps_local_gradients=True, shards_moments=True),
)
