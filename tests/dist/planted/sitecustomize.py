"""Registers the defective strategies in every process of a test's run."""

from pathlib import Path

import allranks.train.strategies
from allranks.spec.strategies import REGISTRY, StrategyInfo

allranks.train.strategies.__path__.append(str(Path(__file__).parent))
for name in ("Silent", "Late", "Twice", "Lazy", "Broken", "Undivided", "Tiring", "Halfway", "LocalNorm"):
    REGISTRY[name.lower()] = StrategyInfo(f"allranks.train.strategies.defective_strategies:{name}", "planted by a test")
