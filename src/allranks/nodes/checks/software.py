"""Check project, interpreter, packages, model, data and folders: present, writable and the same on every node.

Models and data sets of the Hugging Face hub must be in a node's cache, or the node must reach the hub. A killed build of a C++ extension
must not have left its lock: every program that loads the extension would wait forever.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from urllib.parse import urlsplit

import msgspec

from allranks.nodes.checks import (
    ChecksByHost,
    NodeCheck,
    NodeSurvey,
    failed_check,
    join_names,
    majority_value,
    passed_check,
)
from allranks.nodes.records import Check, FolderFacts, HubItem, NodeRequirements, Probe, RequiredFolder
from allranks.spec.data_sources import key_of, looks_like_file, parts_of, source_of
from allranks.spec.records import RunSpec
from allranks.spec.strategies import strategy_info
from allranks.utils.filesystem import datasets_cache, hub_cache
from allranks.utils.text import format_bytes_word

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
    wanted = [item for item in survey.required.folders if item.role in roles]
    verdicts: ChecksByHost = {}
    for item in wanted:
        digests = {
            probe.host: facts.fingerprint.digest
            for probe in survey.probes
            if (facts := probe.folders.get(item.role)) and facts.exists and facts.fingerprint
        }
        own = survey.here.get(item.role, FolderFacts()).fingerprint
        usual = majority_value(digests, own.digest if own else None)
        for probe in survey.probes:
            facts = probe.folders.get(item.role, FolderFacts())
            if probe.host in verdicts and not verdicts[probe.host].ok:
                continue
            if facts.error:
                verdicts[probe.host] = failed_check(
                    name, f"UNREADABLE({item.path})", f"{probe.host}: {facts.error}; {cure}"
                )
            elif not facts.exists:
                verdicts[probe.host] = failed_check(
                    name, f"MISSING({item.path})", f"{probe.host} does not see {item.path}: {cure}"
                )
            elif digests.get(probe.host) != usual:
                why = f"its content on {probe.host} differs from the other nodes: {cure}"
                verdicts[probe.host] = failed_check(name, f"DIFFERS({item.path})", why)
            else:
                verdicts[probe.host] = passed_check(name, "ok")
    return verdicts


def py(survey: NodeSurvey) -> ChecksByHost:
    """Check that the launcher's interpreter exists, in the same version."""
    usual = majority_value({p.host: p.python for p in survey.probes if _right_python(survey, p)})
    verdicts: ChecksByHost = {}
    for probe in survey.probes:
        if not _right_python(survey, probe):
            cure = f"{probe.host} does not have {survey.required.python}: create the environment on a file system shared by all nodes"
            verdicts[probe.host] = failed_check("py", f"MISSING({survey.required.python})", cure)
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
            extras = ",".join(["train", *(n for n in ("deepspeed", "tensorboard", "wandb") if n in missing)])
            cure = (
                f"{where} -m pip install 'allranks[{extras}]' on {probe.host}, or one environment that all nodes share"
            )
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


def torch(survey: NodeSurvey) -> ChecksByHost:
    """Check that torch is built for the GPUs of the node. A build without a label is one of PyPI, for NVIDIA; `pkgs` compares versions."""
    verdicts: ChecksByHost = {}
    for probe in survey.probes:
        if not _has(probe, "torch"):
            continue
        version = probe.packages["torch"].version or "?"
        label = version.partition("+")[2]
        names = " ".join(str(gpu.get("name")) for gpu in probe.gpus)
        amd, nvidia = "AMD" in names, bool(names) and "AMD" not in names
        if survey.need.device == "cuda" and (
            label == "cpu" or (label.startswith("rocm") and nvidia) or (label.startswith("cu") and amd)
        ):
            cure = (
                f"torch {version} on {probe.host} is not built for its GPUs ({names or 'none seen'}): install a build for them "
                "(https://pytorch.org/get-started/locally), or set cluster.device: cpu"
            )
            verdicts[probe.host] = failed_check("torch", f"BUILD({version})", cure)
        else:
            verdicts[probe.host] = passed_check("torch", version)
    return verdicts


def _has(probe: Probe, name: str) -> bool:
    return name in probe.packages and probe.packages[name].origin is not None


def imports(survey: NodeSurvey) -> ChecksByHost:
    """Check that the packages can be imported within the time limit."""
    verdicts: ChecksByHost = {}
    for probe in survey.probes:
        if probe.imports is None:
            continue
        failed = {
            n: i.error for n, i in probe.imports.items() if i.error and (_has(probe, n) or n not in probe.packages)
        }
        seconds = sum(item.seconds or 0.0 for item in probe.imports.values())
        if failed:
            why = next(iter(failed.values()))
            cure = f"{join_names(list(failed))} cannot be imported on {probe.host}: {why}"
            verdicts[probe.host] = failed_check("imports", f"FAILED({','.join(failed)})", cure)
        else:
            verdicts[probe.host] = passed_check("imports", f"{seconds:.1f}s")
    return verdicts


MIN_FREE_BYTES = 64 * 2**20


def run(survey: NodeSurvey) -> ChecksByHost:
    """Check the run folder: every rank writes there, and rank 0 reads the files of the others."""
    return _written(survey, "run", "run_root", "--set run_root=FOLDER")


def cache(survey: NodeSurvey) -> ChecksByHost:
    """Check the cache of models and prepared data, if the spec names one."""
    return _written(survey, "cache", "cluster.cache", "--set cluster.cache=FOLDER")


def _written(survey: NodeSurvey, role: str, key: str, option: str) -> ChecksByHost:
    wanted = next((item for item in survey.required.folders if item.role == role), None)
    if wanted is None:
        return {}
    return {
        probe.host: _judge(survey, wanted, probe.host, probe.folders.get(role, FolderFacts()), f"{key} ({option})")
        for probe in survey.probes
    }


def _judge(survey: NodeSurvey, wanted: RequiredFolder, host: str, facts: FolderFacts, key: str) -> Check:
    name, path = wanted.role, wanted.path
    cure = f"set {key} to a folder shared by all nodes"
    secret = survey.nonces.get(wanted.role)
    if facts.error:
        return failed_check(name, f"UNREADABLE({path})", f"{host}: {facts.error}; {cure}")
    if not facts.exists:
        return failed_check(name, f"MISSING({path})", f"{host} does not see this folder: {cure}")
    if survey.must_share and secret and facts.nonce != secret:
        return failed_check(
            name, f"NOT-SHARED({path})", f"{host} has a different folder there, not the launcher's: {cure}"
        )
    if facts.write_error:
        return failed_check(name, f"READ-ONLY({path})", f"{host} cannot write there: {facts.write_error}; {cure}")
    free = facts.free_bytes or 0
    if free < MIN_FREE_BYTES:
        short = (
            f"less than {MIN_FREE_BYTES >> 20} MiB are free on {host}: free space there, or set {key} to another folder"
        )
        return failed_check(name, f"FULL({path},{free >> 20}MiB)", short)
    room = format_bytes_word(free)
    return passed_check(name, f"rw,{room}" + ("" if secret or not survey.must_share else ",sharing-not-proved"))


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


def ask_hub_names(spec: RunSpec, here: Path, required: NodeRequirements) -> NodeRequirements:
    """Add the folders of each name in the cache, and the hub's address. Nodes of the local launcher are this machine: `check_hub` asks the hub itself."""
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
    found = urlsplit(proxy if "://" in proxy else f"http://{proxy}" if proxy else base)
    return f"{found.hostname}:{found.port or (443 if found.scheme == 'https' else 80)}"


def judge_hub_names(survey: NodeSurvey) -> ChecksByHost:
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
            cure = _hub_cure(probe.host, missing[0], survey.required, facts.error)
            stageable = all(item.here for item in missing)
            verdicts[probe.host] = failed_check("hub", f"NOT-CACHED({names})", cure, stageable=stageable)
    return verdicts


def _hub_cure(host: str, item: HubItem, required: NodeRequirements, error: str) -> str:
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


HUB_NAMES = NodeCheck(judge=judge_hub_names, ask=ask_hub_names)


EXTENSIONS_VARIABLE = "TORCH_EXTENSIONS_DIR"
DEFAULT_EXTENSIONS = "~/.cache/torch_extensions"
MIN_LOCK_AGE_S = 600.0  # a younger one may be that of a build on another node that shares the folder


def ask_extensions(spec: RunSpec, here: Path, required: NodeRequirements) -> NodeRequirements:
    """Add the folder of extensions, if the run may load some: the user's own programs, and DeepSpeed."""
    loads = spec.script is not None or strategy_info(spec.strategy.name).builds_extensions
    folder = {**os.environ, **spec.cluster.env}.get(EXTENSIONS_VARIABLE) or DEFAULT_EXTENSIONS
    return msgspec.structs.replace(required, extensions=str(here / Path(folder).expanduser())) if loads else required


def judge_extensions(survey: NodeSurvey) -> ChecksByHost:
    """Report locks that no process of the node holds open, and that are older than any build would be."""
    verdicts: ChecksByHost = {}
    for probe in survey.probes:
        old = [lock for lock in probe.build_locks if not lock.held and lock.age_s >= MIN_LOCK_AGE_S]
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


EXTENSIONS = NodeCheck(judge=judge_extensions, ask=ask_extensions)
