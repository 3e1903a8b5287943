"""Two ordinary users with one group in common, as whom root starts processes. Tests skip where that cannot be done."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.conftest import REPO

ANN, BEN, GROUP = 65001, 65002, 65000


@functools.cache
def _interpreter() -> str | None:
    """A Python that ordinary users may start and that can load the packages here: this one, or one of the same
    build."""
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    places = [sys.executable, *(f"{folder}/{version}" for folder in ("/usr/local/bin", "/usr/bin"))]
    for place in filter(os.path.exists, places):
        try:
            done = subprocess.run(
                [place, "-c", "import torch, yaml, allranks"],
                user=ANN, group=GROUP, extra_groups=[], cwd="/", env=_environment(Path("/")), capture_output=True, timeout=120, check=False,
            )  # fmt: skip
        except OSError:
            continue
        if done.returncode == 0:
            return place
    return None


def _environment(home: Path) -> dict[str, str]:
    return {
        "PATH": os.environ["PATH"],
        "HOME": str(home),
        "USER": home.name or "nobody",
        "PYTHONPATH": f"{REPO / 'src'}:{sysconfig.get_paths()['purelib']}",
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }


def need_users() -> None:
    """Skip the test where this process cannot act as other users."""
    if os.geteuid() != 0:
        pytest.skip("only root can act as two other users")
    if _interpreter() is None:
        pytest.skip("no Python here can be started by other users with these packages")


@contextmanager
def shared_place(tmp_path: Path) -> Iterator[Path]:
    """A folder that other users can reach: pytest's own lie below one that is closed to them."""
    place = Path("/var/tmp") / f"allranks-users-{os.getpid()}-{tmp_path.name}"  # noqa: S108
    place.mkdir(mode=0o755)
    try:
        yield place
    finally:
        shutil.rmtree(place)


def home_of(place: Path, uid: int) -> Path:
    """A user's own folder, closed to others."""
    home = place / f"user{uid}"
    if not home.exists():
        home.mkdir(mode=0o700)
        os.chown(home, uid, GROUP)
    return home


def shared_folder(place: Path, mode: int = 0o2770) -> Path:
    """A folder of the group."""
    folder = place / "cache"
    folder.mkdir()
    os.chown(folder, 0, GROUP)
    folder.chmod(mode)
    return folder


def start_as(uid: int, place: Path, *args: str, umask: int = 0o002) -> subprocess.Popen[str]:
    """Start Python as another user, in that user's home."""
    home, python = home_of(place, uid), _interpreter()
    assert python is not None
    return subprocess.Popen(
        [python, *args], user=uid, group=GROUP, extra_groups=[], umask=umask, cwd=home, env=_environment(home),
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def ended(process: subprocess.Popen[str], limit_s: float = 120) -> tuple[int, str]:
    """Exit code and output; a process that is late is killed."""
    try:
        output, _ = process.communicate(timeout=limit_s)
    finally:
        process.kill()
    return process.returncode, output
