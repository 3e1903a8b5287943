"""TensorBoard and Weights & Biases, fed from rank 0's events; off unless the spec asks."""

from __future__ import annotations

from typing import Any, Protocol

from allranks.errors import EnvironmentNotAble
from allranks.rundir import RunDir
from allranks.spec.records import RunSpec


class Logger(Protocol):
    """Takes numbers by name at a step."""

    def log(self, step: int, values: dict[str, float]) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    """Writes event files into ``<run>/tensorboard``."""

    def __init__(self, run: RunDir) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise EnvironmentNotAble(
                "observe.tensorboard: the package tensorboard is missing; pip install 'allranks[tensorboard]'"
            ) from None
        self._writer = SummaryWriter(str(run.root / "tensorboard"))

    def log(self, step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WandB:
    """Logs to Weights & Biases under the run's name; mode and key come from its own WANDB_ variables."""

    def __init__(self, spec: RunSpec, run: RunDir) -> None:
        try:
            import wandb  # pyright: ignore[reportMissingImports] - an extra
        except ImportError:
            raise EnvironmentNotAble(
                "observe.wandb: the package wandb is missing; pip install 'allranks[wandb]'"
            ) from None
        from allranks.spec import spec_to_dict

        self._run = wandb.init(
            project="allranks", name=run.name, dir=str(run.root), config=spec_to_dict(spec), resume="allow", id=run.name
        )

    def log(self, step: int, values: dict[str, float]) -> None:
        self._run.log(values, step=step)

    def close(self) -> None:
        self._run.finish()


def make_loggers(spec: RunSpec, run: RunDir) -> list[Logger]:
    """The loggers that the spec asks for."""
    loggers: list[Logger] = []
    if spec.observe.tensorboard:
        loggers.append(TensorBoard(run))
    if spec.observe.wandb:
        loggers.append(WandB(spec, run))
    return loggers


def forward_event(loggers: list[Logger], event: str, fields: dict[str, Any]) -> None:
    """Hand the numbers of a step or an evaluation to the loggers."""
    names = {
        "step": ("loss", "lr", "grad_norm", "step_time_s", "memory_bytes"),
        "eval": ("loss", "perplexity", "accuracy", "exact_match"),
    }
    if event not in names or not loggers:
        return
    prefix = "train" if event == "step" else "eval"
    values = {f"{prefix}/{k}": float(fields[k]) for k in names[event] if isinstance(fields.get(k), (int, float))}
    for logger in loggers:
        logger.log(int(fields["step"]), values)
