"""Start, follow and supervise runs. The package can be called: it has the name of `allranks.functions.launch`, which is
above it, and importing any of its modules sets the attribute ``launch`` of the package ``allranks``."""

import importlib
import sys
from types import ModuleType
from typing import Any


class _LaunchPackage(ModuleType):
    def __call__(self, *args: Any, **options: Any) -> Any:
        return importlib.import_module("allranks.functions").launch(*args, **options)


sys.modules[__name__].__class__ = _LaunchPackage
