"""Registers the liars in every process of a test's run."""

from pathlib import Path

import allranks.train.strategies as registry

registry.__path__.append(str(Path(__file__).parent))
for name in ("Silent", "Late", "Twice", "Lazy", "Broken", "Undivided"):
    registry.REGISTRY[name.lower()] = registry.Entry(f"liars:{name}", "planted by a test")
