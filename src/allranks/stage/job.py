"""The bundle of one job: what lies where only the login side sees it is packed before the job is submitted, the rest
within the job, and only what some node lacks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

from allranks.rundir import RunDir, write_json
from allranks.spec.records import RunSpec
from allranks.stage.broadcast import lacking
from allranks.stage.bundle import Bundle, assemble, checked_sources, load_bundle, store_of
from allranks.stage.environment import package_versions
from allranks.stage.sources import TEMPORARY, asked
from allranks.stage.steps import Allocation

Log = Callable[[str], None]


def pack_ahead(spec: RunSpec, run: RunDir, log: Log = lambda _: None) -> Bundle | None:
    """On the login side: pack the script, model and data that lie in a folder for temporary files, of which each node
    has its own: the job's first node, which packs the rest, could not read them.

    Returns:
        The bundle, which is also noted in the run folder; None if there is nothing of the kind.
    """
    parts = [part for part in asked(spec) if part.path is not None and may_be_hidden(part.path, run.root)]
    if not parts:
        return None
    store = store_of(spec)
    if may_be_hidden(store, run.root):
        store = run.root / "bundle"
    bundle = assemble([source for part in parts for source in part.find()], store, package_versions(), log)
    write_json(run.bundle, msgspec.to_builtins(bundle))
    return bundle


def may_be_hidden(path: Path, run_root: Path) -> bool:
    """Whether a path lies in a folder for temporary files, and the run folder, which all nodes see, does not."""
    path, seen = path.expanduser().resolve(), run_root.resolve()
    return any(path.is_relative_to(folder) and not seen.is_relative_to(folder) for folder in TEMPORARY)


def packed_ahead(run: RunDir) -> Bundle | None:
    """What `pack_ahead` noted."""
    return load_bundle(run.bundle) if run.bundle.exists() else None


def bundle_for(
    spec: RunSpec,
    allocation: Allocation,
    *,
    packages: bool,
    always: bool,
    ahead: Bundle | None = None,
    log: Log = lambda _: None,
) -> Bundle:
    """In the job: a bundle of the parts that some node lacks, or of all.

    Args:
        packages: whether a node may lack Python packages; looking through them all takes a moment.
        ahead: what the login side has packed; it is taken as it is.
    """
    packed = ahead.parts if ahead else []
    found = checked_sources(spec, packages=packages, without={part.name for part in packed}, log=log)
    if not always:
        needed = lacking(found, allocation)
        found = [source for source in found if source.name in needed]
    return assemble(found, store_of(spec), package_versions(), log, packed=packed)
