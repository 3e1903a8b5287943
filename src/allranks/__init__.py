"""allranks: bring up, run, compare and diagnose distributed PyTorch training.

``allranks.run(spec)`` and ``allranks.plan(spec)`` do what the verbs of the command line do. Importing this
package imports neither torch nor anything slow.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from allranks.version import __version__

if TYPE_CHECKING:
    from allranks.api import load_spec, plan, resume, run

__all__ = ["__version__", "load_spec", "plan", "resume", "run"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from allranks import api

        return getattr(api, name)
    raise AttributeError(f"module 'allranks' has no attribute {name!r}")


def __dir__() -> list[str]:
    """What is loaded when first used counts, too: for completion in a shell."""
    return sorted({*globals(), *__all__})
