"""Check that the nodes have, or can load, the model and the data sets that a spec names on the Hugging Face hub."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from allranks.nodes.checks import ChecksByHost, NodeCheck, NodeSurvey, failed_check, passed_check
from allranks.nodes.records import HubItem, NodeRequirements
from allranks.spec.data_sources import key_of, looks_like_file, parts_of, source_of
from allranks.spec.records import RunSpec
from allranks.utils.filesystem import datasets_cache, hub_cache

HUB = "https://huggingface.co"
OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")


def hub_names(spec: RunSpec) -> list[tuple[str, str, list[Path]]]:
    """Return each model and data set that must come from the hub: its key, its name, and its folders in the cache."""
    if spec.model is None:
        return []
    name, cache = spec.model.name, hub_cache(spec.cluster.cache or spec.cluster.env.get("HF_HOME"))
    local = name.startswith(("tiny:", "mlp:", "/", "./", "../", "~")) or Path(name).expanduser().is_dir()
    found = [] if local else [("model.name", name, [cache / f"models--{name.replace('/', '--')}"])]
    for number, part in enumerate(parts_of(spec.data) if spec.data is not None else []):
        source = source_of(part)
        if not (source.startswith("builtin:") or looks_like_file(source)):
            key = key_of(spec.data, number) if spec.data is not None else "data.source"
            folders = [cache / f"datasets--{source.replace('/', '--')}", datasets_cache() / source.replace("/", "___")]
            found.append((key, source, folders))
    return found


def offline_variable(environment: Mapping[str, str]) -> str:
    """Return the variable that disables access to the hub; empty if none does."""
    return next((n for n in OFFLINE if environment.get(n, "").lower() in ("1", "true", "yes", "on")), "")


def ask(spec: RunSpec, here: Path, required: NodeRequirements) -> NodeRequirements:
    """Add the folders of each name in the cache, and the hub's address. Nodes of the local launcher are this machine: `check_hub` asks the hub itself."""
    from allranks.nodes.probes.probe import is_cached  # `hub_names` is used without it

    if spec.cluster.launched_by.runs_here:
        return required
    environment = {**os.environ, **spec.cluster.env}
    offline = offline_variable(environment)
    address = "" if offline else _address(environment)
    items = [
        HubItem(key=key, name=name, folders=[str(f) for f in folders], here=any(map(is_cached, map(str, folders))))
        for key, name, folders in hub_names(spec)
    ]
    return msgspec.structs.replace(required, hub=items, hub_offline=offline, hub_address=address if items else "")


def _address(environment: Mapping[str, str]) -> str:
    """Return host and port that a node connects to for the hub: of its proxy, if it has one."""
    base = environment.get("HF_ENDPOINT") or HUB
    proxy = next((v for n in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy") if (v := environment.get(n))), "")
    found = urlsplit(proxy if "://" in proxy else f"http://{proxy}" if proxy else base)
    return f"{found.hostname}:{found.port or (443 if found.scheme == 'https' else 80)}"


def judge(survey: NodeSurvey) -> ChecksByHost:
    """Check the cache of each node, and if a name is missing there, whether the node may and can reach the hub."""
    verdicts: ChecksByHost = {}
    for probe in survey.probes if survey.required.hub else []:
        facts = probe.hub
        missing = [item for item in survey.required.hub if facts and not facts.cached.get(item.name)]
        if facts is None or not facts.cached:
            verdicts[probe.host] = passed_check("hub", "unknown")
        elif not missing:
            verdicts[probe.host] = passed_check("hub", "cached")
        elif facts.reached:
            verdicts[probe.host] = passed_check("hub", "reachable")
        else:
            names = ",".join(item.name for item in missing)
            cure = _cure(probe.host, missing[0], survey.required, facts.error)
            stageable = all(item.here for item in missing)
            verdicts[probe.host] = failed_check("hub", f"NOT-CACHED({names})", cure, stageable=stageable)
    return verdicts


def _cure(host: str, item: HubItem, required: NodeRequirements, error: str) -> str:
    why = (
        f"{required.hub_offline} disables access to the hub"
        if required.hub_offline
        else f"it does not reach {required.hub_address}: {error}"
    )
    option = "" if item.key == "model.name" else "--repo-type dataset "
    return (
        f"{item.key} {item.name} is neither a path nor in {item.folders[0]} on {host}, and {why}; on a machine with network that shares "
        f"this folder: hf download {option}{item.name}; or set cluster.cache, or name a folder or file"
    )


HUB_NAMES = NodeCheck(judge=judge, ask=ask)
