"""Strategies implement one contract, and nothing reads a member of a strategy that the contract does not declare."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_type_hints

import pytest

import allranks
from allranks.spec.strategies import REGISTRY, resolve_options
from allranks.train.engines import Engine, engine_of
from allranks.train.strategies import import_target
from allranks.train.strategies.base import LoopStrategy, Strategy

SOURCE = Path(allranks.__file__).parent
IMPLEMENTATIONS = ("train/strategies/", "train/engines/")
"""What may read members of its own strategy; the types are those of pyright."""
LOOP = ("train/loop.py",)
SET_BY_SETUP = {"module", "optimizer"}


def members(contract: type[Strategy]) -> set[str]:
    named = {name for kind in contract.__mro__ for name in (*vars(kind), *vars(kind).get("__annotations__", {}))}
    return {name for name in named if not name.startswith("_")}


def holds_a_strategy(node: ast.expr) -> bool:
    """Whether an expression is called a strategy, or is a part of one; `spec.strategy` is a part of the spec."""
    if isinstance(node, ast.Name):
        return node.id in ("strategy", "_strategy")
    if isinstance(node, ast.Attribute):
        if node.attr in ("strategy", "_strategy"):
            return not (isinstance(node.value, (ast.Name, ast.Attribute)) and ast.unparse(node.value).endswith("spec"))
        return holds_a_strategy(node.value)
    return False


def is_strategy(node: ast.expr) -> bool:
    return holds_a_strategy(node) and ast.unparse(node).split(".")[-1] in ("strategy", "_strategy")


def reads_past_the_contract(text: str, contract: type[Strategy]) -> Iterator[str]:
    """Describe each read of a strategy that goes around the contract."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.args:
            asked = node.func.id in ("getattr", "hasattr", "setattr", "isinstance", "vars", "type")
            if asked and holds_a_strategy(node.args[0]):
                yield f"line {node.lineno}: {ast.unparse(node)}"
        elif isinstance(node, ast.Attribute) and is_strategy(node.value) and node.attr not in members(contract):
            yield f"line {node.lineno}: {ast.unparse(node)} is no member of {contract.__name__}"


def test_nothing_reads_a_strategy_past_its_contract() -> None:
    found, read = [], 0
    for file in sorted(SOURCE.rglob("*.py")):
        path = file.relative_to(SOURCE).as_posix()
        if not path.startswith("train/"):
            continue
        contract: type[Strategy] = LoopStrategy if path in LOOP else Strategy
        text = file.read_text()
        read += sum(isinstance(n, ast.Attribute) and is_strategy(n.value) for n in ast.walk(ast.parse(text)))
        own = path.startswith(IMPLEMENTATIONS)
        found += [
            f"{path} {problem}"
            for problem in reads_past_the_contract(text, contract)
            if not (own and problem.endswith(f"is no member of {contract.__name__}"))
        ]
    assert not found, "\n".join(found)
    assert read > 30  # the check sees something


@pytest.mark.parametrize(
    "text",
    [
        "getattr(strategy, 'remarks', ())",
        "hasattr(self._strategy, 'weight_loader')",
        "getattr(built.strategy.optimizer, 'optim', None)",
        "isinstance(strategy, DeepSpeedZero)",
        "self._strategy.shards",
        "built.strategy.step()",
    ],
)
def test_the_check_sees_a_read_past_the_contract(text: str) -> None:
    assert list(reads_past_the_contract(text, Strategy))


def test_the_check_accepts_the_contract_and_the_spec() -> None:
    text = "strategy.remarks; self._strategy.weights(True); spec.strategy.options; getattr(spec.strategy, 'name')"
    assert not list(reads_past_the_contract(text, Strategy))


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
    needed = get_type_hints(engine.__init__)["strategy"]
    assert issubclass(import_target(REGISTRY[name].target), needed)
    assert parameters(engine.__init__) == parameters(Engine.__init__)
    assert parameters(engine.run) == parameters(Engine.run)


def names_compared(text: str) -> Iterator[str]:
    """Describe each comparison of a strategy's name with one of the registry, or with its beginning."""
    known = {*REGISTRY, *(f"{name.split('_')[0]}{end}" for name in REGISTRY for end in ("", "_"))}
    for node in ast.walk(ast.parse(text)):
        sides: list[ast.expr] = []
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
            sides = [node.func.value, node.args[0]] if node.func.attr in ("startswith", "endswith") else []
        names = {c.value for side in sides for c in ast.walk(side) if isinstance(c, ast.Constant)}
        if names & known and "strategy" in " ".join(ast.unparse(side) for side in sides):
            yield f"line {node.lineno}: {ast.unparse(node)}"


def test_nothing_compares_a_strategy_with_a_name() -> None:
    files = sorted(SOURCE.rglob("*.py"))
    found = [f"{file.relative_to(SOURCE)} {problem}" for file in files for problem in names_compared(file.read_text())]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "text",
    [
        "spec.strategy.name.startswith('deepspeed_')",
        "strategy == 'hf_trainer'",
        "plan.strategy in ('zero1', 'zero2')",
    ],
)
def test_the_check_sees_a_comparison_with_a_name(text: str) -> None:
    assert list(names_compared(text))
