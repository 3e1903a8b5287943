"""Log rank 0's metrics to TensorBoard and Weights & Biases. Both are off by default."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from allranks.errors import EnvironmentNotAble
from allranks.rundir.paths import RunDir
from allranks.spec.records import RunSpec


class MetricLogger(Protocol):
    """Log named values at a step."""

    def log(self, step: int, values: dict[str, float]) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    """Write event files into ``<run>/tensorboard``."""

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
    """Log to Weights & Biases under the run's name; mode and key come from the WANDB_ variables."""

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


LOGGED_FIELDS = {
    "step": ("loss", "router_aux_loss", "lr", "grad_norm", "step_time_s", "memory_bytes"),
    "eval": ("loss", "perplexity", "accuracy", "exact_match"),
}


class MetricLoggers:
    """Pass metrics to the loggers. A logger that fails (no network, full disk) is reported once and disabled; the run continues.

    Args:
        report: takes one line for the rank's log.
    """

    def __init__(self, loggers: Sequence[MetricLogger], report: Callable[[str], None]) -> None:
        self._loggers, self._report = list(loggers), report

    def event(self, event: str, fields: dict[str, Any]) -> None:
        """Log the metrics of a step or an evaluation; other events have none."""
        if event not in LOGGED_FIELDS:
            return
        prefix = "train" if event == "step" else "eval"
        values = {
            f"{prefix}/{k}": float(fields[k]) for k in LOGGED_FIELDS[event] if isinstance(fields.get(k), (int, float))
        }
        self._each(lambda logger: logger.log(int(fields["step"]), values))

    def close(self) -> None:
        """Close all loggers, which flushes them."""
        self._each(lambda logger: logger.close())

    def _each(self, action: Callable[[MetricLogger], None]) -> None:
        for logger in list(self._loggers):
            try:
                action(logger)
            except Exception as error:  # noqa: BLE001 - other libraries; reporting never ends a run
                self._loggers.remove(logger)
                self._report(
                    f"observe: {type(logger).__name__} is disabled from here on: {type(error).__name__}: {error}"
                )


def make_loggers(spec: RunSpec, run: RunDir, report: Callable[[str], None]) -> MetricLoggers | None:
    """Return the loggers that the spec enables, or None."""
    loggers: list[MetricLogger] = []
    if spec.observe.tensorboard:
        loggers.append(TensorBoard(run))
    if spec.observe.wandb:
        loggers.append(WandB(spec, run))
    return MetricLoggers(loggers, report) if loggers else None
