"""Registers the defective strategies in every process of a test's run."""

from pathlib import Path

import allranks.train.strategies
from allranks.spec.strategies import REGISTRY, StrategyInfo
from allranks.train.benchmark import measurements

allranks.train.strategies.__path__.append(str(Path(__file__).parent))
for name in ("Silent", "Late", "Twice", "Lazy", "Broken", "Undivided", "Tiring", "Halfway", "LocalNorm"):
    REGISTRY[name.lower()] = StrategyInfo(f"allranks.train.strategies.defective_strategies:{name}", "planted by a test")
measurements.EXTRA_ROUNDS = 0  # the machine is busy with other tests: each strategy would be timed three times
