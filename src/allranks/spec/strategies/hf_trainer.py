"""``hf_trainer``: Hugging Face's Trainer: its record, and its TrainingArguments. No torch.

The arguments are completed from the spec, and the user's additions are checked against the spec.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from allranks.errors import SpecError
from allranks.spec.strategies.base import (
    ADAM_BETAS,
    ADAM_EPS,
    ENGINE_SETTINGS,
    Parts,
    StrategyInfo,
    StrategyState,
    same_setting,
)
from allranks.utils.text import did_you_mean

if TYPE_CHECKING:
    from allranks.spec.records import TrainSpec
    from allranks.spec.strategies.base import PlannedWork


Json = dict[str, Any]
KEY = "strategy.args"

# What the records, the data and the checkpoints of a run ask for.
FIXED: Json = {
    "logging_strategy": "no",
    "logging_nan_inf_filter": False,  # asks the device for every micro-batch, and hides what is not finite
    "eval_strategy": "no",
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
    "remove_unused_columns": False,
    "dataloader_pin_memory": False,
    "ddp_broadcast_buffers": False,  # constants of the model, equal from the start
}
# Names that may be added, with their types: they change neither what a step means nor who writes what.
FREE: dict[str, type] = {
    "ddp_bucket_cap_mb": int, "ddp_static_graph": bool, "full_determinism": bool, "log_level": str,
    "log_level_replica": str, "skip_memory_metrics": bool, "tf32": bool, "torch_empty_cache_steps": int,
}  # fmt: skip
UNSUPPORTED = ENGINE_SETTINGS["hf_trainer_unsupported"]
"""Names that cannot be set, and why."""


class TrainerExpectations(msgspec.Struct, frozen=True, kw_only=True):
    """Values of the spec. None means unknown: nothing is compared with it."""

    train: Any  # TrainSpec
    micro_batch_size: int
    grad_accum: int
    world_size: int
    device: str
    find_unused_parameters: bool
    backend: str | None = None


def read_options(options: Json) -> Json:
    """Return the options unchanged; they name no files."""
    return options


def param_dtype(options: Json) -> str | None:
    """Return None: the Trainer stores weights as it gets them."""
    return None


def plan_options(options: Json, train: TrainSpec, work: PlannedWork) -> Json:
    """Return the options with all TrainingArguments that are known before the ranks start.

    Raises:
        SpecError: an argument contradicts the spec, or users cannot set it.
    """
    expected = TrainerExpectations(
        train=train,
        micro_batch_size=work.micro_batch_size,
        grad_accum=work.grad_accum,
        world_size=work.world_size,
        device=work.device,
        find_unused_parameters=options["find_unused_parameters"],
    )
    return {**options, "args": complete_arguments(options["args"], expected)}


def complete_arguments(given: Any, expected: TrainerExpectations) -> Json:
    """Return TrainingArguments as keywords: values of the spec and of the user.

    Raises:
        SpecError: the message names every argument that contradicts the spec or cannot be set, with the fix.
    """
    if given is not None and not isinstance(given, dict):
        raise SpecError(f"{KEY}: expected a mapping of TrainingArguments, got {given!r}")
    given = given or {}
    settled = _settled(expected)
    problems = [p for name, value in given.items() if (p := _problem(str(name), value, settled))]
    if problems:
        raise SpecError(f"{KEY}: " + "; ".join(problems))
    backend = {"ddp_backend"} if expected.backend is None else set()
    own = {name: value for name, value in given.items() if name in {*FREE, *backend}}
    return {name: value for name, (value, _) in settled.items() if value is not None} | FIXED | own


def _settled(expected: TrainerExpectations) -> dict[str, tuple[Any, str]]:
    """Return each argument's value, and the spec key that sets it."""
    train: TrainSpec = expected.train
    return {
        "per_device_train_batch_size": (expected.micro_batch_size, "train.micro_batch_size"),
        "gradient_accumulation_steps": (
            expected.grad_accum,
            "the accumulation (train.grad_accum, train.global_batch_size)",
        ),
        "learning_rate": (train.lr, "train.lr"),
        "lr_scheduler_type": (train.schedule, "train.schedule"),
        "warmup_steps": (train.warmup_steps, "train.warmup_steps"),
        "weight_decay": (train.weight_decay, "train.weight_decay"),
        "max_grad_norm": (train.max_grad_norm or 0.0, "train.max_grad_norm (0 is none)"),
        "max_steps": (train.max_steps, "train.max_steps"),
        "num_train_epochs": (train.epochs, "train.epochs"),
        "seed": (train.seed, "train.seed"),
        "optim": ("adamw_torch_fused", "the project's AdamW"),
        "adam_beta1": (ADAM_BETAS[0], "that of the project's AdamW"),
        "adam_beta2": (ADAM_BETAS[1], "that of the project's AdamW"),
        "adam_epsilon": (ADAM_EPS, "that of the project's AdamW"),
        # On CPUs both are needed: without use_cpu the model is not wrapped and the ranks diverge silently.
        "use_cpu": (expected.device == "cpu", "cluster.device"),
        "ddp_backend": (expected.backend, "cluster.backend"),
        "ddp_find_unused_parameters": (expected.find_unused_parameters, "strategy.find_unused_parameters"),
    }


def _problem(name: str, value: Any, settled: dict[str, tuple[Any, str]]) -> str | None:
    if name in settled:
        ours, key = settled[name]
        if ours is None and key.startswith("train.") and value not in (None, -1):
            return f"{name} is {value!r}, but {key} is not set; set {key}"
        agrees = ours is None or same_setting(value, ours)
        return None if agrees else f"{name} is {value!r}, but {key} is {ours!r}; remove {name}"
    if name in FREE:
        return None if type(value) is FREE[name] else f"{name}: expected {FREE[name].__name__}, got {value!r}"
    if name in UNSUPPORTED:
        off = value in (None, False, "no", "none", "", 0, [], {}) or (name in FIXED and value == FIXED[name])
        return None if off else f"{name} cannot be set here: {UNSUPPORTED[name]}"
    if name in FIXED and value == FIXED[name]:
        return None
    hint = did_you_mean(name, [*settled, *FREE, *UNSUPPORTED], 0.75)
    return f"{name} cannot be set here{hint} (free to set: {', '.join(FREE)})"


class CopiedBuckets(StrategyState):
    """DDP whose gradients are not views of its buckets: both exist. The Hugging Face Trainer wraps models so."""

    def kept(self) -> Parts:
        return super().kept() | {"communication": self._m.gradients}

    def setup(self) -> Parts:
        return super().setup() | {"communication": self._m.gradients}


HF_TRAINER = StrategyInfo(
    "allranks.train.engines.hf_trainer:HFTrainer",
    "Hugging Face Trainer and Accelerate in place of the loop",
    {"find_unused_parameters": False, "args": None},
    memory=lambda m, o: StrategyState(m) if m.world == 1 else CopiedBuckets(m),
    package="accelerate",
    imports_bytes=114 << 20,  # measured with a model of almost no weights, compared with pytorch_ddp
    planner="allranks.spec.strategies.hf_trainer",
    engine="allranks.train.engines.hf_trainer:TrainerLoop",
)
