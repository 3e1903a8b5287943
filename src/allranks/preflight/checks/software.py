"""Project, interpreter and packages: visible everywhere, and the same."""

from __future__ import annotations

from pathlib import PurePosixPath

from allranks.preflight.checks.survey import Survey, Verdicts, bad, common, good, several_names
from allranks.preflight.records import FolderFacts, Probe

STAGE = "put it on a file system that all nodes share, or let `allranks stage` carry it (cluster.stage: auto)"


def proj(survey: Survey) -> Verdicts:
    """The program that the ranks run is there, with the same content."""
    return same_content(survey, "proj", ["project", "script"], STAGE)


def data(survey: Survey) -> Verdicts:
    """The data are there, with the same content."""
    cure = "copy it to a file system that all nodes share and name that in data.source"
    return same_content(survey, "data", ["data", "eval data"], cure)


def model(survey: Survey) -> Verdicts:
    """The model's folder is there, with the same content."""
    return same_content(survey, "model", ["model"], "copy it to a file system that all nodes share")


def same_content(survey: Survey, name: str, roles: list[str], cure: str) -> Verdicts:
    """Each role's path exists on every node and holds what it holds elsewhere."""
    wanted = [item for item in survey.wish.folders if item.role in roles]
    verdicts: Verdicts = {}
    for item in wanted:
        digests = {
            probe.host: facts.fingerprint.digest
            for probe in survey.probes
            if (facts := probe.folders.get(item.role)) and facts.exists and facts.fingerprint
        }
        own = survey.here.get(item.role, FolderFacts()).fingerprint
        usual = common(digests, own.digest if own else None)
        for probe in survey.probes:
            facts = probe.folders.get(item.role, FolderFacts())
            if probe.host in verdicts and not verdicts[probe.host].ok:
                continue
            if facts.error:
                verdicts[probe.host] = bad(name, f"UNREADABLE({item.path})", f"{probe.host}: {facts.error}; {cure}")
            elif not facts.exists:
                verdicts[probe.host] = bad(name, f"MISSING({item.path})", f"{probe.host} does not see it: {cure}")
            elif digests.get(probe.host) != usual:
                why = f"its content on {probe.host} is not that of the other nodes: {cure}"
                verdicts[probe.host] = bad(name, f"DIFFERS({item.path})", why)
            else:
                verdicts[probe.host] = good(name, "ok")
    return verdicts


def py(survey: Survey) -> Verdicts:
    """The launcher's interpreter is there, and of the same version."""
    usual = common({p.host: p.python for p in survey.probes if _right_python(survey, p)})
    verdicts: Verdicts = {}
    for probe in survey.probes:
        if not _right_python(survey, probe):
            cure = f"{probe.host} does not have {survey.wish.python}: make the environment where all nodes see it"
            verdicts[probe.host] = bad("py", f"MISSING({survey.wish.python})", cure)
        elif probe.python != usual:
            cure = f"the other nodes have {usual}: use one environment on a file system that all nodes share"
            verdicts[probe.host] = bad("py", f"VERSION({probe.python})", cure)
        else:
            verdicts[probe.host] = good("py", probe.python)
    return verdicts


def _right_python(survey: Survey, probe: Probe) -> bool:
    return bool(probe.executable) and PurePosixPath(probe.executable) == PurePosixPath(survey.wish.python)


def pkgs(survey: Survey) -> Verdicts:
    """Every needed package is there, in the version that the others have."""
    names = survey.wish.packages
    usual = {name: common({p.host: p.packages[name].version for p in survey.probes if _has(p, name)}) for name in names}
    verdicts: Verdicts = {}
    for probe in survey.probes if names else []:
        missing = [name for name in names if not _has(probe, name)]
        other = [n for n in names if n not in missing and probe.packages[n].version != usual[n]]
        where = probe.executable or survey.wish.python
        if missing:
            extras = "train,deepspeed" if "deepspeed" in missing else "train"
            cure = (
                f"{where} -m pip install 'allranks[{extras}]' on {probe.host}, or one environment that all nodes share"
            )
            if not _right_python(survey, probe):
                cure = f"{probe.host} was asked with another interpreter, so mend py first"
            verdicts[probe.host] = bad("pkgs", f"MISSING({','.join(missing)})", cure)
        elif other:
            shown = ", ".join(f"{n} {probe.packages[n].version}, others {usual[n]}" for n in other)
            cure = f"{where} -m pip install {' '.join(f'{n}=={usual[n]}' for n in other)} on {probe.host}"
            verdicts[probe.host] = bad("pkgs", f"VERSION({shown})", cure)
        else:
            verdicts[probe.host] = good("pkgs", "ok")
    return verdicts


def torch(survey: Survey) -> Verdicts:
    """The version of torch, for the eye; `pkgs` judges it."""
    return {
        probe.host: good("torch", probe.packages["torch"].version or "?")
        for probe in survey.probes
        if _has(probe, "torch")
    }


def _has(probe: Probe, name: str) -> bool:
    return name in probe.packages and probe.packages[name].origin is not None


def imports(survey: Survey) -> Verdicts:
    """The packages can really be imported, in bounded time."""
    verdicts: Verdicts = {}
    for probe in survey.probes:
        if probe.imports is None:
            continue
        failed = {
            n: i.error for n, i in probe.imports.items() if i.error and (_has(probe, n) or n not in probe.packages)
        }
        seconds = sum(item.seconds or 0.0 for item in probe.imports.values())
        if failed:
            why = next(iter(failed.values()))
            cure = f"{several_names(list(failed))} cannot be imported on {probe.host}: {why}"
            verdicts[probe.host] = bad("imports", f"FAILED({','.join(failed)})", cure)
        else:
            verdicts[probe.host] = good("imports", f"{seconds:.1f}s")
    return verdicts
