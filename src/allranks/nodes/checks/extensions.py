"""Check that no killed build of a C++ extension has left its lock on a node: every program that loads the extension would wait forever."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from allranks.nodes.checks import ChecksByHost, NodeCheck, NodeSurvey, failed_check, passed_check
from allranks.nodes.records import NodeRequirements
from allranks.spec.records import RunSpec
from allranks.spec.strategies import strategy_info

VARIABLE = "TORCH_EXTENSIONS_DIR"
DEFAULT = "~/.cache/torch_extensions"
MIN_AGE_S = 600.0  # a younger one may be that of a build on another node that shares the folder


def ask(spec: RunSpec, here: Path, required: NodeRequirements) -> NodeRequirements:
    """Add the folder of extensions, if the run may load some: the user's own programs, and DeepSpeed."""
    loads = spec.script is not None or strategy_info(spec.strategy.name).builds_extensions
    folder = {**os.environ, **spec.cluster.env}.get(VARIABLE) or DEFAULT
    return msgspec.structs.replace(required, extensions=str(here / Path(folder).expanduser())) if loads else required


def judge(survey: NodeSurvey) -> ChecksByHost:
    """Report locks that no process of the node holds open, and that are older than any build would be."""
    verdicts: ChecksByHost = {}
    for probe in survey.probes:
        old = [lock for lock in probe.build_locks if not lock.held and lock.age_s >= MIN_AGE_S]
        if old:
            names = ",".join(Path(lock.path).parent.name for lock in old)
            one = len(old) == 1
            cure = (
                f"a killed build left {'its lock' if one else 'locks'} on {probe.host}, {max(lock.age_s for lock in old) / 60:.0f} min ago; programs that "
                f"load {'this extension' if one else 'these extensions'} wait forever: rm {' '.join(lock.path for lock in old[:4])}"
            )
            verdicts[probe.host] = failed_check("extensions", f"LOCKED({names})", cure, blocks=False)
        elif survey.required.extensions:
            verdicts[probe.host] = passed_check("extensions", "ok")
    return verdicts


EXTENSIONS = NodeCheck(judge=judge, ask=ask)
