"""Where the caches of Hugging Face's libraries, and ours beside them, are on this machine. Asks the environment only."""

from __future__ import annotations

import os
from pathlib import Path


def hf_home() -> Path:
    """HF_HOME, or where Hugging Face's libraries put it."""
    default = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    return Path(os.environ.get("HF_HOME") or default).expanduser()


def cache_root(given: str | None) -> Path:
    """``cluster.cache`` of a spec, or else `hf_home`: prepared data and bundles lie below it."""
    return Path(given).expanduser() if given else hf_home()


def hub_cache(given: str | None = None) -> Path:
    """Where models of the hub are; `given` is ``cluster.cache``, which wins over the environment as it does on the ranks."""
    if given:
        return cache_root(given) / "hub"
    return Path(os.environ.get("HF_HUB_CACHE") or hf_home() / "hub").expanduser()


def datasets_cache() -> Path:
    """Where data sets of the hub are, once prepared."""
    return Path(os.environ.get("HF_DATASETS_CACHE") or hf_home() / "datasets").expanduser()
