"""allranks: bring up, run, compare and diagnose distributed PyTorch training.

``allranks.run(spec)`` and ``allranks.plan(spec)`` do what the verbs of the command line do.
``allranks.launch(function)`` runs a Python function on all ranks and returns their values. A program started by
``script:`` reports its progress with ``allranks.report(step=..., loss=..., tokens=...)``. Importing this package
imports neither torch nor anything slow.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from allranks.version import __version__

if TYPE_CHECKING:
    from allranks.api import load_spec, plan, resume, run
    from allranks.functions import launch

__all__ = ["__version__", "launch", "load_spec", "plan", "report", "resume", "run"]


def report(*, step: Any = None, loss: Any = None, tokens: Any = None) -> None:
    """Report your program's progress (``script:``). Does nothing outside a run of allranks. Never raises for a value.

    Call it after each step, on rank 0 or on all ranks. It takes microseconds; at most one record per second is saved.

    Args:
        step: number of the step that is done.
        loss: its training loss: a number, or anything that ``float()`` accepts. A tensor on a GPU is waited for.
        tokens: tokens that this rank has processed since its last report; summed over the ranks that report.
    """
    events = sys.modules.get("allranks.rundir.events")  # loaded in the ranks of a run; the reporter writes only there
    if events is not None:
        events.reporter.report(step, loss, tokens)


def __getattr__(name: str) -> Any:
    if name == "launch":  # the package, which can be called: importing it sets this attribute
        return importlib.import_module("allranks.launch")
    if name in __all__:
        from allranks import api

        return getattr(api, name)
    raise AttributeError(f"module 'allranks' has no attribute {name!r}")


def __dir__() -> list[str]:
    """List also names that are loaded on first use, for completion in a shell."""
    return sorted({*globals(), *__all__})
