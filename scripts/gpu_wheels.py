"""Download the packages that `make gpu` needs and an offline machine lacks.

``python scripts/gpu_wheels.py --have FREEZE --python 3.12``. FREEZE is the output of ``python3 -m pip list
--format=freeze`` on that machine. What is there in a version that fits is left out; torch must be there. Of the rest
the versions of constraints.txt are taken, or others that fit what is there. Without --have everything but torch is
downloaded. Needs pip and a package index here; the machine itself needs neither (the Makefile unpacks the wheels).
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from collections import deque
from email.parser import Parser
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
EXTRAS = ("train", "deepspeed", "gpu")
TESTS = ("pytest", "pytest-timeout", "hypothesis", "jsonschema")
GLIBC = (39, 34, 31, 28, 27, 26, 24, 17, 12, 5)  # pip matches each number exactly
FROM_SOURCE = {"deepspeed", "hjson"}  # published without wheels


def wanted() -> list[Requirement]:
    """Return what the package itself, its training extras and its tests need."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [*project["dependencies"], *(line for extra in EXTRAS for line in project["optional-dependencies"][extra])]
    dev = {Requirement(line).name: line for line in project["optional-dependencies"]["dev"]}
    return [Requirement(line) for line in [*lines, *(dev[name] for name in TESTS)]]


def versions(text: str) -> dict[str, str]:
    """Return the versions of ``name==version`` lines."""
    pairs = [line.split("==", 1) for line in text.splitlines() if "==" in line and not line.startswith("#")]
    return {canonicalize_name(name.strip()): version.strip() for name, version in pairs}


def download(name: str, spec: str, python: str, machine: str, into: Path) -> Path:
    """Download or build one wheel, without its dependencies."""
    before = set(into.glob("*.whl"))
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    if name in FROM_SOURCE:
        words = [*pip, "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(into), f"{name}{spec}"]
    else:
        platforms = [f"manylinux_2_{n}_{machine}" for n in GLIBC] + [
            f"manylinux2014_{machine}",
            f"manylinux1_{machine}",
            "any",
        ]
        where = [word for p in platforms for word in ("--platform", p)]
        tags = ["--only-binary=:all:", "--python-version", python, "--implementation", "cp", *where]
        words = [*pip, "download", "-q", "--no-deps", *tags, "-d", str(into), f"{name}{spec}"]
    done = subprocess.run(words, env={**os.environ, "DS_BUILD_OPS": "0"}, capture_output=True, text=True, check=False)
    new = set(into.glob("*.whl")) - before
    same = [p for p in before if canonicalize_name(p.name.split("-")[0]) == name]
    if done.returncode or not (new or same):
        sys.exit(f"gpu-wheels: {name}{spec}: {done.stderr.strip()[-600:]}")
    return next(iter(new or same))


def needs_of(wheel: Path, extras: set[str], python: str) -> list[Requirement]:
    """Return the dependencies of a wheel on the offline machine."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [n for n in archive.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", n)]
        lines = Parser().parsestr(archive.read(name).decode()).get_all("Requires-Dist") or []
    place = {
        "python_version": python,
        "python_full_version": f"{python}.0",
        "sys_platform": "linux",
        "platform_system": "Linux",
        "os_name": "posix",
    }
    found = []
    for line in lines:
        one = Requirement(line)
        if one.marker is None or any(one.marker.evaluate({**place, "extra": extra}) for extra in {"", *extras}):
            found.append(one)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--have", type=Path, help="pip list --format=freeze of the offline machine")
    parser.add_argument("--python", default=f"{sys.version_info.major}.{sys.version_info.minor}")
    parser.add_argument("--machine", default="x86_64")
    parser.add_argument("--into", type=Path, default=ROOT / ".wheels")
    given = parser.parse_args()
    have = versions(given.have.read_text()) if given.have else {}
    tested = versions((ROOT / "constraints.txt").read_text())
    given.into.mkdir(exist_ok=True)
    queue, seen, files, replaced = deque(wanted()), set(), [], []
    while queue:
        need = queue.popleft()
        name = canonicalize_name(need.name)
        here = have.get(name)
        if name == "torch" or name in seen or (here and need.specifier.contains(here, prereleases=True)):
            continue
        seen.add(name)
        if here:
            replaced.append(f"{name} {here} (needs {need.specifier})")
        known = tested.get(name)
        spec = f"=={known}" if known and need.specifier.contains(known, prereleases=True) else str(need.specifier)
        wheel = download(name, spec, given.python, given.machine, given.into)
        files.append(wheel)
        queue.extend(needs_of(wheel, need.extras, given.python))
    size = sum(f.stat().st_size for f in files)
    names = ", ".join(sorted(f.name.split("-")[0] for f in files))
    print(f"gpu-wheels: {len(files)} wheels, {size / 2**20:.1f} MiB in {given.into}: {names}")
    if replaced:
        print(f"gpu-wheels: there, but too old: {', '.join(replaced)}")


if __name__ == "__main__":
    main()
