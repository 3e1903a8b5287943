"""Code, packages, model and data for nodes that do not see them: built once, sent to who lacks them, checked, removed.

bundle = build(spec)                                        # on the login node, or: allranks stage SPEC
with staged(bundle, Allocation.current()) as manifest:      # inside the job
    manifest.of("n2").python, manifest.of("n2").environment()
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from allranks.stage.bootstrap import write_bootstrap
    from allranks.stage.broadcast import staged
    from allranks.stage.bundle import Bundle, build, load_bundle
    from allranks.stage.manifest import NodeStage, StageManifest, for_node, load_manifest, spec_here
    from allranks.stage.steps import Allocation

__all__ = [
    "Allocation",
    "Bundle",
    "NodeStage",
    "StageManifest",
    "build",
    "for_node",
    "load_bundle",
    "load_manifest",
    "spec_here",
    "staged",
    "write_bootstrap",
]
_WHERE = {
    "Allocation": "steps",
    "Bundle": "bundle",
    "build": "bundle",
    "load_bundle": "bundle",
    "staged": "broadcast",
    "write_bootstrap": "bootstrap",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'allranks.stage' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"allranks.stage.{_WHERE.get(name, 'manifest')}"), name)
