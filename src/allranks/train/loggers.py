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
    """Pass metrics to other programs: by name, what logs values at a step, and what closes. One that fails (no network,
    full disk) is reported once and disabled; the run continues."""

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
    package = ""
    try:
        if spec.observe.tensorboard:
            package = "tensorboard"
            from torch.utils.tensorboard import SummaryWriter

            writer = SummaryWriter(str(run.root / "tensorboard"))
            loggers["TensorBoard"] = (
                lambda step, values: [writer.add_scalar(name, value, step) for name, value in values.items()],
                writer.close,
            )
        if spec.observe.wandb:
            package = "wandb"
            import wandb  # pyright: ignore[reportMissingImports] - an extra

            facts = {"name": run.name, "id": run.name, "dir": str(run.root), "config": spec_to_dict(spec)}
            own = wandb.init(project="allranks", resume="allow", **facts)
            loggers["WandB"] = (lambda step, values: own.log(values, step=step), own.finish)
    except ImportError:
        raise EnvironmentNotAble(
            f"observe.{package}: the package {package} is missing; pip install 'allranks[{package}]'"
        ) from None
    return MetricLoggers(loggers, report) if loggers else None
