"""Build the implementation of a strategy. A new one is a class in a file next to this and a line in the registry."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from allranks.spec.strategies import resolve_options, strategy_info

if TYPE_CHECKING:
    from allranks.train.strategies.base import Strategy


def import_target(target: str) -> Any:
    """Import the object that the registry names as ``module:attribute``."""
    module, _, attribute = target.partition(":")
    return getattr(import_module(module), attribute)


def create(name: str, options: dict[str, Any]) -> Strategy:
    """Import and build a strategy (imports torch)."""
    return import_target(strategy_info(name).target)(**resolve_options(name, options))
