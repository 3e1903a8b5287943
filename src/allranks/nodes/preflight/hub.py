"""Ask the hub for a model or a data set that is not in this machine's cache, before ranks are started."""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import quote, urlsplit

from allranks.errors import EnvironmentNotAble, RequestError, SpecError
from allranks.nodes.checks.hub import HUB, hub_names, offline_variable
from allranks.spec.data_mixture import parts_of
from allranks.spec.records import RunSpec
from allranks.utils.caches import hf_home
from allranks.utils.inputs import read_text
from allranks.version import __version__

TIMEOUT_S = 5.0


def check_hub(spec: RunSpec) -> None:
    """Ask the hub if the ranks run on this machine. Nodes of a cluster may see another network.

    Raises:
        SpecError, EnvironmentNotAble: as `ask_hub`.
    """
    if spec.cluster.launched_by.runs_here:
        ask_hub(spec)


def ask_hub(spec: RunSpec) -> None:
    """Check that a model and a data set of the hub are in this machine's cache, or that the hub has them.

    Raises:
        SpecError: the hub does not know the name or the revision, or demands a token.
        EnvironmentNotAble: neither cached nor reachable.
    """
    from allranks.nodes.probes.probe import is_cached  # a program of the nodes, which loads much

    for key, name, folders in hub_names(spec):
        if any(is_cached(str(folder)) for folder in folders):
            continue
        if key == "model.name":
            revision = (spec.model.revision if spec.model else None) or "main"
            _ask_hub(f"/{name}/resolve/{revision}/config.json", key, name)
        else:
            revision = next((p.revision for p in parts_of(spec.data) if p.source == name), None) if spec.data else None
            _ask_hub(f"/api/datasets/{name}/revision/{revision or 'main'}", key, name)


def _ask_hub(path: str, key: str, name: str) -> None:
    base = os.environ.get("HF_ENDPOINT") or HUB
    cure = "use a local folder or file, or fill the cache on a machine with network (HF_HOME)"
    if variable := offline_variable(os.environ):
        raise EnvironmentNotAble(
            f"{key} {name}: is not in this machine's cache, and {variable} forbids asking the hub; {cure}"
        )
    if urlsplit(base).scheme not in ("http", "https"):
        raise EnvironmentNotAble(f"HF_ENDPOINT is {base}; it must be an http or https address")
    from urllib import error, request

    token = _token()
    headers = {"User-Agent": f"allranks/{__version__}", **({"Authorization": f"Bearer {token}"} if token else {})}
    question = request.Request(base.rstrip("/") + quote(path), headers=headers, method="HEAD")  # noqa: S310 - checked above
    try:
        with request.urlopen(question, timeout=TIMEOUT_S):  # noqa: S310
            return
    except error.HTTPError as answer:
        if answer.code in (401, 403, 404):
            raise _refused(answer.code, key, name, base) from None
    except (OSError, ValueError) as problem:
        why = getattr(problem, "reason", problem)
        raise EnvironmentNotAble(
            f"{key} {name}: is neither a local path nor in this machine's cache, and the hub ({base}) is not reachable: {why}; {cure}"
        ) from None


def _token() -> str:
    """Return the user's token as the hub's client finds it; empty if there is none."""
    if token := os.environ.get("HF_TOKEN"):
        return token.strip()
    try:
        return read_text(Path(os.environ.get("HF_TOKEN_PATH") or hf_home() / "token"), 4096).strip()
    except (OSError, ValueError):
        return ""


def _refused(code: int, key: str, name: str, base: str) -> RequestError:
    if code == 404:
        return SpecError(
            f"{key} {name}: is not a local path, and the hub ({base}) has no such repository or revision; check the name"
        )
    return SpecError(
        f"{key} {name}: is not a local path, and the hub ({base}) has no such public repository (HTTP {code}); check the name, and set "
        "HF_TOKEN if it is private or gated"
    )
