"""Check project, interpreter, packages, model, data and folders: present, writable and the same on every node.

Models and data sets of the Hugging Face hub must be in a node's cache, or the node must reach the hub. A killed build
of a C++ extension must not have left its lock: every program that loads the extension would wait forever.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from urllib.parse import urlsplit

import msgspec

from allranks.nodes.checks import ChecksByHost, NodeSurvey, each_node, failed_check, majority_value, passed_check
from allranks.nodes.records import CPU_TORCH, Check, FolderFacts, HubItem, NodeRequirements, Probe
from allranks.spec.data_sources import key_of, looks_like_file, parts_of, source_of
from allranks.spec.records import RunSpec
from allranks.spec.strategies import strategy_info
from allranks.utils.filesystem import datasets_cache, hub_cache
from allranks.utils.text import format_bytes_word, format_list

STAGE = "put it on a file system shared by all nodes, or let `allranks stage` copy it (cluster.stage: auto)"


def proj(survey: NodeSurvey) -> ChecksByHost:
    """Check that the program of the ranks exists, with the same content."""
    return same_content(survey, "proj", ["project", "script"], STAGE)


def workdir(survey: NodeSurvey) -> ChecksByHost:
    """Check that the program's working directory exists; its content may differ from node to node."""
    cure = "set script.workdir to a folder that all nodes have; a run copies the program, but not its working directory"
    return same_content(survey, "workdir", ["workdir"], cure)


def data(survey: NodeSurvey) -> ChecksByHost:
    """Check that the data exist, with the same content."""
    cure = "copy it to a file system shared by all nodes and set data.source to that path"
    roles = [item.role for item in survey.required.folders if item.role == "eval data" or item.role.startswith("data")]
    return same_content(survey, "data", roles, cure)


def model(survey: NodeSurvey) -> ChecksByHost:
    """Check that the model's folder exists, with the same content."""
    return same_content(survey, "model", ["model"], "copy it to a file system that all nodes share")


def same_content(survey: NodeSurvey, name: str, roles: list[str], cure: str) -> ChecksByHost:
    """Check that each role's path exists on every node and has the same content."""
    verdicts: ChecksByHost = {}
    for item in (item for item in survey.required.folders if item.role in roles):
        seen = {probe.host: probe.folders.get(item.role, FolderFacts()) for probe in survey.probes}
        digests = {h: facts.fingerprint.digest for h, facts in seen.items() if facts.exists and facts.fingerprint}
        own = survey.own_folders.get(item.role, FolderFacts()).fingerprint
        usual = majority_value(digests, own.digest if own else None)
        for host, facts in seen.items():
            if host in verdicts and not verdicts[host].ok:
                continue
            if facts.error:
                word, why = "UNREADABLE", f"{host}: {facts.error}"
            elif not facts.exists:
                word, why = "MISSING", f"{host} does not see {item.path}"
            elif digests.get(host) != usual:
                word, why = "DIFFERS", f"its content on {host} differs from the other nodes"
            else:
                verdicts[host] = passed_check(name, "ok")
                continue
            verdicts[host] = failed_check(name, f"{word}({item.path})", f"{why}; {cure}")
    return verdicts


def py(survey: NodeSurvey) -> ChecksByHost:
    """Check that the launcher's interpreter exists, in the same version."""
    usual = majority_value({p.host: p.python for p in survey.probes if _right_python(survey, p)})
    verdicts: ChecksByHost = {}
    for probe in survey.probes:
        if not _right_python(survey, probe):
            python, share = survey.required.python, "create the environment on a file system shared by all nodes"
            cure = f"{probe.host} does not have {python}: {share}"
            verdicts[probe.host] = failed_check("py", f"MISSING({python})", cure)
        elif probe.python != usual:
            cure = f"the other nodes have {usual}: use one environment on a file system that all nodes share"
            verdicts[probe.host] = failed_check("py", f"VERSION({probe.python})", cure)
        else:
            verdicts[probe.host] = passed_check("py", probe.python)
    return verdicts


def _right_python(survey: NodeSurvey, probe: Probe) -> bool:
    return bool(probe.executable) and PurePosixPath(probe.executable) == PurePosixPath(survey.required.python)


def pkgs(survey: NodeSurvey) -> ChecksByHost:
    """Check that every needed package is installed, in the same version."""
    names = survey.required.packages
    usual = {
        name: majority_value({p.host: p.packages[name].version for p in survey.probes if _has(p, name)})
        for name in names
    }
    verdicts: ChecksByHost = {}
    for probe in survey.probes if names else []:
        missing = [name for name in names if not _has(probe, name)]
        other = [n for n in names if n not in missing and probe.packages[n].version != usual[n]]
        where = probe.executable or survey.required.python
        if missing:
            extras = ",".join(["train", *(n for n in ("deepspeed", "tensorboard", "wandb", "mlflow") if n in missing)])
            cure = (
                f"{where} -m pip install 'allranks[{extras}]' on {probe.host}, or one environment that all nodes share"
            )
            if "torch" in missing and not probe.gpus and not probe.gpu_error:
                cure = f"without a GPU first {where} -m {CPU_TORCH}; {cure}"
            if not _right_python(survey, probe):
                cure = f"{probe.host} was checked with another interpreter, so fix py first"
            verdicts[probe.host] = failed_check("pkgs", f"MISSING({','.join(missing)})", cure)
        elif other:
            shown = ", ".join(f"{n} {probe.packages[n].version}, others {usual[n]}" for n in other)
            cure = f"{where} -m pip install {' '.join(f'{n}=={usual[n]}' for n in other)} on {probe.host}"
            verdicts[probe.host] = failed_check("pkgs", f"VERSION({shown})", cure)
        else:
            verdicts[probe.host] = passed_check("pkgs", "ok")
    return verdicts


@each_node
def torch(survey: NodeSurvey, probe: Probe) -> Check | None:
    """Check that torch is built for the node's GPUs. No label: from PyPI, for NVIDIA. `pkgs` compares versions."""
    if not _has(probe, "torch"):
        return None
    version = probe.packages["torch"].version or "?"
    label = version.partition("+")[2]
    names = " ".join(str(gpu.get("name")) for gpu in probe.gpus)
    other = ("cpu",) if not names else ("cpu", "cu") if "AMD" in names else ("cpu", "rocm")
    if survey.need.device != "cuda" or not label.startswith(other):
        return passed_check("torch", version)
    cure = (
        f"torch {version} on {probe.host} is not built for its GPUs ({names or 'none seen'}): install a build for them "
        "(https://pytorch.org/get-started/locally), or set cluster.device: cpu"
    )
    return failed_check("torch", f"BUILD({version})", cure)


def _has(probe: Probe, name: str) -> bool:
    return name in probe.packages and probe.packages[name].origin is not None


@each_node
def imports(survey: NodeSurvey, probe: Probe) -> Check | None:
    """Check that the packages can be imported within the time limit."""
    if probe.imports is None:
        return None
    failed = {n: i.error for n, i in probe.imports.items() if i.error and (_has(probe, n) or n not in probe.packages)}
    if not failed:
        return passed_check("imports", f"{sum(item.seconds or 0.0 for item in probe.imports.values()):.1f}s")
    why = next(iter(failed.values()))
    cure = f"{format_list(list(failed), 4)} cannot be imported on {probe.host}: {why}"
    return failed_check("imports", f"FAILED({','.join(failed)})", cure)


MIN_FREE_BYTES = 64 * 2**20


@each_node
def run(survey: NodeSurvey, probe: Probe) -> Check | None:
    """Check the run folder: every rank writes there, and rank 0 reads the files of the others."""
    return _written(survey, probe, "run", "run_root (--set run_root=FOLDER)")


@each_node
def cache(survey: NodeSurvey, probe: Probe) -> Check | None:
    """Check the cache of models and prepared data, if the spec names one."""
    return _written(survey, probe, "cache", "cluster.cache (--set cluster.cache=FOLDER)")


def _written(survey: NodeSurvey, probe: Probe, role: str, key: str) -> Check | None:
    wanted = next((item for item in survey.required.folders if item.role == role), None)
    if wanted is None:
        return None
    host, facts, secret = probe.host, probe.folders.get(role, FolderFacts()), survey.nonces.get(role)
    free = facts.free_bytes or 0
    cure = f"set {key} to a folder shared by all nodes"
    if facts.error:
        word, why = "UNREADABLE", f"{host}: {facts.error}"
    elif not facts.exists:
        word, why = "MISSING", f"{host} does not see this folder"
    elif survey.must_share and secret and facts.nonce != secret:
        word, why = "NOT-SHARED", f"{host} has a different folder there, not the launcher's"
    elif facts.write_error:
        word, why = "READ-ONLY", f"{host} cannot write there: {facts.write_error}"
    elif free < MIN_FREE_BYTES:
        why = (
            f"less than {MIN_FREE_BYTES >> 20} MiB are free on {host}: free space there, or set {key} to another folder"
        )
        return failed_check(role, f"FULL({wanted.path},{free >> 20}MiB)", why)
    else:
        proved = "" if secret or not survey.must_share else ",sharing-not-proved"
        return passed_check(role, f"rw,{format_bytes_word(free)}{proved}")
    return failed_check(role, f"{word}({wanted.path})", f"{why}; {cure}")


HUB = "https://huggingface.co"
OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")


def hub_names(spec: RunSpec) -> list[tuple[str, str, list[Path]]]:
    """Return each model and data set that must come from the hub: its key, its name, and its folders in the cache."""
    if spec.model is None:
        return []
    name, cache = spec.model.name, hub_cache(spec.cluster.cache or spec.cluster.env.get("HF_HOME"))
    local = name.startswith(("tiny:", "mlp:", "/", "./", "../", "~")) or Path(name).expanduser().is_dir()
    hub_names = [] if local else [("model.name", name, [cache / f"models--{name.replace('/', '--')}"])]
    for number, part in enumerate(parts_of(spec.data) if spec.data is not None else []):
        source = source_of(part)
        if not (source.startswith("builtin:") or looks_like_file(source)):
            key = key_of(spec.data, number) if spec.data is not None else "data.source"
            folders = [cache / f"datasets--{source.replace('/', '--')}", datasets_cache() / source.replace("/", "___")]
            hub_names.append((key, source, folders))
    return hub_names


def offline_variable(environment: Mapping[str, str]) -> str:
    """Return the variable that disables access to the hub; empty if none does."""
    return next((n for n in OFFLINE if environment.get(n, "").lower() in ("1", "true", "yes", "on")), "")


def ask_hub_names(spec: RunSpec, base_folder: Path, required: NodeRequirements) -> NodeRequirements:
    """Add each name's cache folders and the hub's address; for the local launcher `check_sources` asks it."""
    from allranks.nodes.probes.probe import is_cached  # `hub_names` is used without it

    if spec.cluster.launched_by.runs_here:
        return required
    environment = {**os.environ, **spec.cluster.env}
    offline = offline_variable(environment)
    address = "" if offline else _hub_address(environment)
    items = [
        HubItem(key=key, name=name, folders=[str(f) for f in folders], here=any(map(is_cached, map(str, folders))))
        for key, name, folders in hub_names(spec)
    ]
    return msgspec.structs.replace(required, hub=items, hub_offline=offline, hub_address=address if items else "")


def _hub_address(environment: Mapping[str, str]) -> str:
    """Return host and port that a node connects to for the hub: of its proxy, if it has one."""
    base = environment.get("HF_ENDPOINT") or HUB
    proxy = next((v for n in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy") if (v := environment.get(n))), "")
    url = urlsplit(proxy if "://" in proxy else f"http://{proxy}" if proxy else base)
    return f"{url.hostname}:{url.port or (443 if url.scheme == 'https' else 80)}"


@each_node
def hub(survey: NodeSurvey, probe: Probe) -> Check | None:
    """Check the cache of each node, and if a name is missing there, whether the node may and can reach the hub."""
    required, facts = survey.required, probe.hub
    if not required.hub:
        return None
    if facts is None or not facts.cached:
        return passed_check("hub", "unknown")
    missing = [item for item in required.hub if not facts.cached.get(item.name)]
    if not missing or facts.reached:
        return passed_check("hub", "reachable" if missing else "cached")
    first, option = missing[0], "" if missing[0].key == "model.name" else "--repo-type dataset "
    why = f"it does not reach {required.hub_address}: {facts.error}"
    why = f"{required.hub_offline} disables access to the hub" if required.hub_offline else why
    cure = (
        f"{first.key} {first.name} is neither a path nor in {first.folders[0]} on {probe.host}, and {why}; on a "
        f"machine with network that shares this folder: hf download {option}{first.name}; or set cluster.cache, or "
        "name a folder or file"
    )
    names, stageable = ",".join(item.name for item in missing), all(item.here for item in missing)
    return failed_check("hub", f"NOT-CACHED({names})", cure, stageable=stageable)


EXTENSIONS_VARIABLE = "TORCH_EXTENSIONS_DIR"
DEFAULT_EXTENSIONS = "~/.cache/torch_extensions"
MIN_LOCK_AGE_S = 600.0  # a younger one may be that of a build on another node that shares the folder


def ask_extensions(spec: RunSpec, base_folder: Path, required: NodeRequirements) -> NodeRequirements:
    """Add the folder of extensions, if the run may load some: the user's own programs, and DeepSpeed."""
    loads = spec.script is not None or strategy_info(spec.strategy.name).builds_extensions
    folder = {**os.environ, **spec.cluster.env}.get(EXTENSIONS_VARIABLE) or DEFAULT_EXTENSIONS
    return (
        msgspec.structs.replace(required, extensions=str(base_folder / Path(folder).expanduser()))
        if loads
        else required
    )


@each_node
def extensions(survey: NodeSurvey, probe: Probe) -> Check | None:
    """Report locks that no process of the node holds open, and that are older than any build would be."""
    old = [lock for lock in probe.build_locks if not lock.held and lock.age_s >= MIN_LOCK_AGE_S]
    if not old:
        return passed_check("extensions", "ok") if survey.required.extensions else None
    left, load = ("its lock", "this extension") if len(old) == 1 else ("locks", "these extensions")
    cure = (
        f"a killed build left {left} on {probe.host}, {max(lock.age_s for lock in old) / 60:.0f} min ago; programs "
        f"that load {load} wait forever: rm {' '.join(lock.path for lock in old[:4])}"
    )
    names = ",".join(Path(lock.path).parent.name for lock in old)
    return failed_check("extensions", f"LOCKED({names})", cure, blocks=False)
