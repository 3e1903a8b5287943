"""Strategies implement one contract, and nothing reads a member of a strategy that the contract does not declare."""

import inspect
from typing import Any, get_type_hints

import pytest

from allranks.spec.strategies import REGISTRY, resolve_options
from allranks.train.engines import Engine, engine_of
from allranks.train.strategies import import_target
from allranks.train.strategies.base import LoopStrategy, Strategy

SET_BY_SETUP = {"module", "optimizer"}


def members(contract: type[Strategy]) -> set[str]:
    named = {name for kind in contract.__mro__ for name in (*vars(kind), *vars(kind).get("__annotations__", {}))}
    return {name for name in named if not name.startswith("_")}


def parameters(function: Any) -> list[tuple[str, Any, Any]]:
    return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]


@pytest.mark.parametrize("name", REGISTRY)
def test_each_strategy_implements_the_contract(name: str) -> None:
    kind = import_target(REGISTRY[name].target)
    assert issubclass(kind, Strategy)
    assert not inspect.isabstract(kind), kind.__abstractmethods__
    inspect.signature(kind).bind(**resolve_options(name, {}))
    contract: type[Strategy] = LoopStrategy if issubclass(kind, LoopStrategy) else Strategy
    for member in members(contract) - SET_BY_SETUP:
        declared = inspect.getattr_static(contract, member, None)
        own = inspect.getattr_static(kind, member, None)
        if inspect.isfunction(declared):
            assert inspect.isfunction(own), member
            assert parameters(own) == parameters(declared), member
        elif isinstance(declared, property):
            assert isinstance(own, property), member
        else:
            assert hasattr(kind, member), f"{name} does not define {member}"
    for member in ("replicated", "forward_has_collectives", "claims_overlap", "loads_in_parts", "keeps_master"):
        assert isinstance(getattr(kind, member), bool), member


@pytest.mark.parametrize("name", REGISTRY)
def test_the_engine_of_each_strategy_can_run_it(name: str) -> None:
    engine = engine_of(name)
    assert issubclass(import_target(REGISTRY[name].target), get_type_hints(engine.__init__)["strategy"])
    assert parameters(engine.__init__) == parameters(Engine.__init__)
    assert parameters(engine.run) == parameters(Engine.run)
