"""What the Hugging Face cache of this machine holds at a pinned revision. Reads folders only; asks no network."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from allranks.caches import datasets_cache, hub_cache
from allranks.errors import EnvironmentNotAble
from allranks.rundir import read_json

_COMMIT = re.compile(r"^[0-9a-f]{40}$")


def cached_model(name: str, revision: str | None) -> tuple[Path, str]:
    """Folder and commit of a model of the hub.

    Raises:
        EnvironmentNotAble: it is not here, or not whole.
    """
    repo = hub_cache() / f"models--{name.replace('/', '--')}"
    cure = f"on a machine with network: hf download {name}" + (f" --revision {revision}" if revision else "")
    commit = _commit(repo, revision)
    if commit is None:
        raise EnvironmentNotAble(
            f"model.name {name}: revision {revision or 'main'} is not in the cache {hub_cache()}; {cure}"
        )
    folder = repo / "snapshots" / commit
    missing = [shard for shard in _shards(folder) if not (folder / shard).is_file()]
    if missing or not any((*folder.glob("*.safetensors"), *folder.glob("*.bin"))):
        raise EnvironmentNotAble(
            f"model.name {name}: {folder} is not whole: {', '.join(missing[:3]) or 'no weights'} missing; {cure}"
        )
    return folder, commit


def _commit(repo: Path, revision: str | None) -> str | None:
    wanted = revision or "main"
    if not _COMMIT.match(wanted):
        try:
            wanted = (repo / "refs" / wanted).read_text().strip()
        except OSError:
            return None
    return wanted if (repo / "snapshots" / wanted).is_dir() else None


def _shards(folder: Path) -> set[str]:
    shards: set[str] = set()
    for index in folder.glob("*.index.json"):
        content: Any = read_json(index)
        if isinstance(content, dict) and isinstance(content.get("weight_map"), dict):
            shards |= set(content["weight_map"].values())
    return shards


def cached_dataset(name: str, config: str | None, revision: str | None) -> tuple[Path, Path, str]:
    """Cache, folder and commit of a prepared data set of the hub: ``<cache>/<owner>___<name>/<config>/<version>/<commit>``.

    Raises:
        EnvironmentNotAble: it is not here at that revision, or there are several and none is pinned.
    """
    cache = datasets_cache()
    parent = cache / name.replace("/", "___")
    entries = [p for p in parent.glob(f"{config or '*'}/*/*") if (p / "dataset_info.json").is_file()]
    if revision is not None:
        pinned = _commit(hub_cache() / f"datasets--{name.replace('/', '--')}", revision) or revision
        entries = [p for p in entries if p.name == pinned]
    if len(entries) == 1:
        return cache, entries[0], entries[0].name
    what = "several versions or configurations are" if entries else "it is not"
    pin = "pin data.revision and data.config" if entries else "load it once on a machine with network"
    raise EnvironmentNotAble(
        f"data.source {name}: {what} in the cache {cache}{' at revision ' + revision if revision else ''}; {pin}, "
        "or give a local file"
    )
