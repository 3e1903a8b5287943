"""Log rank 0's metrics to TensorBoard and Weights & Biases. Both are off by default."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from allranks.errors import EnvironmentNotAble
from allranks.rundir.paths import RunDir
from allranks.spec import spec_to_dict
from allranks.spec.records import RunSpec

Log = Callable[[int, dict[str, float]], Any]


LOGGED_FIELDS = {
    "step": ("loss", "router_aux_loss", "lr", "grad_norm", "step_time_s", "memory_bytes"),
    "eval": ("loss", "perplexity", "accuracy", "exact_match"),
}


class MetricLoggers:
    """Pass metrics to other programs. One that fails (no network, full disk) is reported once and disabled; the run
    continues.

    Args:
        loggers: by name, what logs values at a step, and what closes.
        report: takes one line for the rank's log.
    """

    def __init__(self, loggers: Mapping[str, tuple[Log, Callable[[], Any]]], report: Callable[[str], None]) -> None:
        self._loggers, self._report = dict(loggers), report

    def event(self, event: str, fields: dict[str, Any]) -> None:
        """Log the metrics of a step or an evaluation; other events have none."""
        if event not in LOGGED_FIELDS:
            return
        prefix = "train" if event == "step" else "eval"
        given = {k: fields.get(k) for k in LOGGED_FIELDS[event]}
        values = {f"{prefix}/{k}": float(v) for k, v in given.items() if isinstance(v, (int, float))}
        for name, (log, _) in list(self._loggers.items()):
            self._try(name, lambda log=log: log(int(fields["step"]), values))

    def close(self) -> None:
        """Close all loggers, which flushes them."""
        for name, (_, close) in list(self._loggers.items()):
            self._try(name, close)

    def _try(self, name: str, action: Callable[[], Any]) -> None:
        try:
            action()
        except Exception as error:  # noqa: BLE001 - other libraries; reporting never ends a run
            del self._loggers[name]
            self._report(f"observe: {name} is disabled from here on: {type(error).__name__}: {error}")


def make_loggers(spec: RunSpec, run: RunDir, report: Callable[[str], None]) -> MetricLoggers | None:
    """Return the loggers that the spec enables, or None.

    TensorBoard's event files are in ``<run>/tensorboard``. Weights & Biases has the run's name; mode and key come from
    the WANDB_ variables.

    Raises:
        EnvironmentNotAble: a package is missing.
    """
    loggers: dict[str, tuple[Log, Callable[[], Any]]] = {}
    if spec.observe.tensorboard:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise EnvironmentNotAble(
                "observe.tensorboard: the package tensorboard is missing; pip install 'allranks[tensorboard]'"
            ) from None
        writer = SummaryWriter(str(run.root / "tensorboard"))
        loggers["TensorBoard"] = (
            lambda step, values: [writer.add_scalar(name, value, step) for name, value in values.items()],
            writer.close,
        )
    if spec.observe.wandb:
        try:
            import wandb  # pyright: ignore[reportMissingImports] - an extra
        except ImportError:
            raise EnvironmentNotAble(
                "observe.wandb: the package wandb is missing; pip install 'allranks[wandb]'"
            ) from None
        own = wandb.init(
            project="allranks", name=run.name, dir=str(run.root), config=spec_to_dict(spec), resume="allow", id=run.name
        )
        loggers["WandB"] = (lambda step, values: own.log(values, step=step), own.finish)
    return MetricLoggers(loggers, report) if loggers else None
