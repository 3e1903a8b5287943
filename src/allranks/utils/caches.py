"""Locate the caches of Hugging Face's libraries and of allranks on this machine, from environment variables only."""

from __future__ import annotations

import os
from pathlib import Path

from allranks.errors import EnvironmentNotAble


def hf_home() -> Path:
    """Return HF_HOME, or the default of Hugging Face's libraries."""
    default = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    return _expanded(Path(os.environ.get("HF_HOME") or default))


def cache_root(given: str | None) -> Path:
    """Return ``cluster.cache`` of a spec, or `hf_home`; prepared data and bundles are below it."""
    return _expanded(Path(given)) if given else hf_home()


def hub_cache(given: str | None = None) -> Path:
    """Return the folder of hub models; `given` is ``cluster.cache``, which takes precedence over the environment, as on the ranks."""
    if given:
        return cache_root(given) / "hub"
    return _expanded(Path(os.environ.get("HF_HUB_CACHE") or hf_home() / "hub"))


def datasets_cache() -> Path:
    """Return the folder of prepared data sets of the hub."""
    return _expanded(Path(os.environ.get("HF_DATASETS_CACHE") or hf_home() / "datasets"))


def private_root(root: Path) -> Path:
    """Return this user's own folder in a cache, for private content, or if another user's folder is not accessible."""
    return root / f"allranks-{os.getuid()}"


def _expanded(path: Path) -> Path:
    try:
        return path.expanduser()
    except RuntimeError:  # the user id has no account, as in containers
        raise EnvironmentNotAble(
            f"{path}: this user (uid {os.getuid()}) has no home folder; set HOME, HF_HOME or cluster.cache to a folder"
        ) from None
