"""Plants faults in the ranks of a run, as the JSON list in ``CHAOS`` says: how, where, rank (-1: all), call, seconds.

A place is a function of the training code. It is wrapped when its module is imported, so that nothing is imported
early.
"""

import functools
import importlib.abc
import importlib.machinery
import json
import os
import sys
from typing import Any

PLACES = {
    "join": ("allranks.train.distributed", "", "join_process_group"),
    "prepare": ("allranks.train.worker", "Worker", "_prepare"),
    "build": ("allranks.train.worker", "Worker", "_prove"),
    "step": ("allranks.train.tasks", "", "collate"),
    "eval": ("allranks.train.evaluation", "Evaluator", "run"),
    "save": ("allranks.train.checkpoint.saver", "Saver", "_write"),
    "end": ("allranks.train.worker", "Worker", "_finish"),
}


def wrap(owner: Any, name: str, plants: list[dict[str, Any]]) -> None:
    """Replace a function by one that acts first, or that changes its result (``nan``)."""
    from chaos_acts import act, mark

    usual, calls = getattr(owner, name), 0

    @functools.wraps(usual)
    def planted(*args: Any, **more: Any) -> Any:
        nonlocal calls
        calls += 1
        result = None
        for plant in plants:
            if plant["call"] not in (0, calls):
                continue
            if plant["how"] == "nan":
                import msgspec

                mark(plant["where"])
                result = msgspec.structs.replace(usual(*args, **more), loss=float("nan"), perplexity=float("nan"))
            else:
                act(plant["how"], plant["where"], plant["seconds"])
        return usual(*args, **more) if result is None else result

    setattr(owner, name, planted)


class Finder(importlib.abc.MetaPathFinder):
    def __init__(self, plants: list[dict[str, Any]]) -> None:
        self.plants, self.busy = plants, False

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        places = {w: p for w, p in PLACES.items() if p[0] == fullname and any(x["where"] == w for x in self.plants)}
        if not places:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return None
        usual = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            usual(module)
            for where, (_, owner, name) in places.items():
                wrap(getattr(module, owner) if owner else module, name, [x for x in self.plants if x["where"] == where])

        spec.loader.exec_module = exec_module
        return spec


if os.environ.get("CHAOS") and "RANK" in os.environ:
    _attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    _rank, _all = int(os.environ["RANK"]), json.loads(os.environ["CHAOS"])
    _mine = [x for x in _all if x["rank"] in (-1, _rank) and x["attempt"] in (-1, _attempt)]
    if _mine:
        sys.meta_path.insert(0, Finder(_mine))
