"""Which strategy shares memory in which way. A new strategy is one line below; one that is not here is told as unknown."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from allranks.fit.deepspeed import DeepSpeedReplicated, DeepSpeedZero3
from allranks.fit.offload import Offloaded
from allranks.fit.sharded import FSDP2, Zero3
from allranks.fit.sharing import MOMENTS, Bucketed, Model, Replicated, Scattered, Sharing, Twice, _share

Options = dict[str, Any]
MB = 1 << 20


def _sharded_state(m: Model) -> int:
    return MOMENTS * _share(m.gradients, m.world)


def _zero(options: Options, key: str) -> int | None:
    """A number of the DeepSpeed configuration, or None where it leaves the choice."""
    config = options.get("config")
    section = config.get("zero_optimization") if isinstance(config, dict) else None
    value = section.get(key) if isinstance(section, dict) else None
    return int(value) if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < 1e15 else None


def _deepspeed(stage: int) -> Callable[[Model, Options], Sharing]:
    return lambda m, o: DeepSpeedReplicated(
        m, stage, bucket=_zero(o, "reduce_bucket_size"), foreach=m.device == "cuda" and _torch_adam(o)
    )


def _torch_adam(options: Options) -> bool:
    """The configuration brings torch's own Adam, whose foreach form makes a temporary as large as a moment; ours is fused."""
    config = options.get("config")
    section = config.get("optimizer") if isinstance(config, dict) else None
    params = section.get("params") if isinstance(section, dict) else None
    return isinstance(params, dict) and params.get("torch_adam") is True and params.get("fused") is not True


def _trainer(m: Model, o: Options) -> Sharing:
    return Replicated(m) if m.world == 1 else Twice(m)


def _replicated(m: Model, o: Options) -> Sharing:
    return Replicated(m)


SHARING: dict[str, Callable[[Model, Options], Sharing]] = {
    "single": _replicated,
    "simple_ddp": _replicated,
    "simple_ddp_ga": _replicated,
    "simple_ddp_hook": _replicated,
    "simple_ddp_async": _replicated,
    "bucket_ddp_async": lambda m, o: Bucketed(m),
    "pytorch_ddp": lambda m, o: Bucketed(m, own_too=True),
    "zero1": lambda m, o: Bucketed(m, state=_sharded_state(m)),
    "pytorch_zero1": lambda m, o: Bucketed(m, own_too=True, state=_sharded_state(m)),
    "zero2": lambda m, o: Scattered(m, float(o.get("bucket_mb", 25.0)) * MB),
    "zero3": lambda m, o: Zero3(m),
    "pytorch_zero2": lambda m, o: FSDP2(m, reshard=False, adapters=str(o.get("adapters", "auto"))),
    "pytorch_zero3": lambda m, o: FSDP2(m, reshard=True, adapters=str(o.get("adapters", "auto"))),
    "deepspeed_zero1": _deepspeed(1),
    "deepspeed_zero2": _deepspeed(2),
    "deepspeed_zero3": lambda m, o: DeepSpeedZero3(
        m,
        live=_zero(o, "stage3_max_live_parameters"),
        bucket=_zero(o, "reduce_bucket_size"),
        prefetch=_zero(o, "stage3_prefetch_bucket_size"),
    ),
    "hf_trainer": _trainer,
}


def sharing(name: str, model: Model, options: Options) -> Sharing | None:
    """How the strategy shares; None where that is not known."""
    make = SHARING.get(name)
    if make is None:
        return None
    offload = str(options.get("offload", "none"))
    made = make(model, options)
    return made if offload == "none" else Offloaded(made, offload, model)
