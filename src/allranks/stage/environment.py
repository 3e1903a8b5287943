"""The running Python environment as a part of a bundle."""

from __future__ import annotations

import importlib.metadata
import json
import sys
from pathlib import Path

from allranks.errors import EnvironmentNotAble
from allranks.stage.source import Source, walk


def environment_source(site: Path, prefix: Path | None = None) -> Source:
    """The packages of an environment. It is known by the RECORD of every package, which lists their hashes.

    Args:
        site: the folder ``site-packages``.
        prefix: the environment that it belongs to, if that is to be checked.

    Raises:
        EnvironmentNotAble: packages alone would not run elsewhere, or there are none.
    """
    problem = _not_whole(prefix) if prefix is not None else None
    if problem:
        raise EnvironmentNotAble(f"the packages of {prefix} cannot be staged: {problem}")
    if not site.is_dir():
        raise EnvironmentNotAble(f"there is no folder of packages at {site}")
    below = f"lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"
    files = tuple((f"{below}/{p.relative_to(site)}", p) for p in walk(site, compiled=True) if not is_own(p, site))
    probe = tuple(sorted(f"{p.parent.name}/RECORD" for p in site.glob("*.dist-info/RECORD") if not is_own(p, site)))
    if not probe:
        raise EnvironmentNotAble(f"{site} holds no installed packages; run allranks from the environment to be staged")
    return Source(name="env", path=site, files=files, probe=probe)


def is_own(path: Path, site: Path) -> bool:
    """Whether a file belongs to the installed allranks, which is a part by itself: installing it anew changes no other."""
    top = path.relative_to(site).parts[0]
    return top == "allranks" or top.startswith("allranks-") or top in ("_editable_impl_allranks.pth", "__pycache__")


def brings_packages(environment: str | None) -> bool:
    """Whether this interpreter's packages are those of ``cluster.environment``; a container or conda has its own.

    Raises:
        EnvironmentNotAble: it is another virtual environment than the one that runs this.
    """
    if environment is None:
        return True
    folder = Path(environment).expanduser()
    if environment.startswith(("conda:", "pyxis:")) or environment.endswith(".sif"):
        return False
    if folder.resolve() == Path(sys.prefix).resolve():
        return True
    raise EnvironmentNotAble(
        f"cluster.environment {environment} is not the environment that runs this ({sys.prefix}); "
        f"stage from it: {folder}/bin/python -m allranks.cli.main stage SPEC"
    )


def _not_whole(prefix: Path) -> str | None:
    """Why the packages of an environment are not all that its programs need."""
    if (prefix / "conda-meta").is_dir():
        return (
            "it is a conda environment, whose libraries lie outside the packages; use a venv, or a container image "
            "as cluster.environment"
        )
    try:
        lines = (prefix / "pyvenv.cfg").read_text().lower().splitlines()
    except OSError:
        return None
    if any(line.replace(" ", "") == "include-system-site-packages=true" for line in lines):
        return "it also uses the system's packages; make a venv without --system-site-packages"
    return None


def package_versions() -> dict[str, str]:
    """Name and version of every package that this interpreter sees, sorted."""
    found = {d.metadata["Name"]: d.version for d in importlib.metadata.distributions() if d.metadata["Name"]}
    return dict(sorted(found.items(), key=lambda item: item[0].lower()))


def editable_packages(site: Path) -> dict[str, str]:
    """Packages that are installed as a reference to a folder, and that folder: they are not in `site`."""
    found = {}
    for path in sorted(site.glob("*.dist-info/direct_url.json")):
        try:
            content = json.loads(path.read_text())
        except (OSError, ValueError):
            continue
        if content.get("dir_info", {}).get("editable"):
            found[path.parent.name.split("-")[0]] = str(content.get("url", "")).removeprefix("file://")
    return found
