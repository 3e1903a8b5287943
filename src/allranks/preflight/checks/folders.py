"""Folders that ranks write: writable, with room, and truly the same one on every node."""

from __future__ import annotations

from allranks.preflight.checks.survey import Survey, Verdicts, bad, good
from allranks.preflight.records import Check, Folder, FolderFacts

MIN_FREE_BYTES = 64 * 2**20
GIB = 2**30


def run(survey: Survey) -> Verdicts:
    """The run folder: every rank writes there, and rank 0 reads what others wrote."""
    return _written(survey, "run", "run_root", "--set run_root=FOLDER")


def cache(survey: Survey) -> Verdicts:
    """The cache of models and prepared data, where the spec names one."""
    return _written(survey, "cache", "cluster.cache", "--set cluster.cache=FOLDER")


def _written(survey: Survey, role: str, key: str, option: str) -> Verdicts:
    wanted = next((item for item in survey.wish.folders if item.role == role), None)
    if wanted is None:
        return {}
    return {
        probe.host: _judge(survey, wanted, probe.host, probe.folders.get(role, FolderFacts()), f"{key} ({option})")
        for probe in survey.probes
    }


def _judge(survey: Survey, wanted: Folder, host: str, facts: FolderFacts, key: str) -> Check:
    name, path = wanted.role, wanted.path
    cure = f"name a folder that all nodes share in {key}"
    secret = survey.nonces.get(wanted.role)
    if facts.error:
        return bad(name, f"UNREADABLE({path})", f"{host}: {facts.error}; {cure}")
    if not facts.exists:
        return bad(name, f"MISSING({path})", f"{host} does not see this folder: {cure}")
    if survey.must_share and secret and facts.nonce != secret:
        return bad(name, f"NOT-SHARED({path})", f"{host} has a folder of its own there, not the launcher's: {cure}")
    if facts.write_error:
        return bad(name, f"READ-ONLY({path})", f"{host} cannot write there: {facts.write_error}; {cure}")
    free = facts.free_bytes or 0
    if free < MIN_FREE_BYTES:
        short = f"less than {MIN_FREE_BYTES >> 20} MiB are free on {host}: make room, or name another folder in {key}"
        return bad(name, f"FULL({path},{free >> 20}MiB)", short)
    room = f"{free / GIB:.0f}GiB" if free >= GIB else f"{free >> 20}MiB"
    return good(name, f"rw,{room}" + ("" if secret or not survey.must_share else ",sharing-not-proved"))
