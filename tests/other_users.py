"""Two ordinary users with one group in common, as whom root starts processes. Tests skip where that cannot be done."""

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest

from tests.conftest import REPO

ANN, BEN, GROUP = 65001, 65002, 65000
OTHER_USER = BEN
needs_other_user = pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process as another user")


def run_as(
    uid: int,
    argv: Sequence[str],
    *,
    gid: int | None = None,
    timeout_s: float = 60.0,
    env: Mapping[str, str] | None = None,
    input_text: str = "",
) -> subprocess.CompletedProcess[str]:
    """Run a command as a user who is in no group but `gid` (the same number if not given), with PATH alone."""
    return subprocess.run(
        list(argv), user=uid, group=uid if gid is None else gid, extra_groups=[], cwd="/", input=input_text,
        env=dict(env) if env is not None else {"PATH": os.environ.get("PATH", os.defpath)},
        capture_output=True, text=True, errors="replace", timeout=timeout_s,
    )  # fmt: skip


@cache
def other_python(code: str = "") -> str:
    """A Python that ordinary users may start for this code: this one, or of the same build; else the test skips."""
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    places = [sys.executable, *(f"{folder}/{version}" for folder in ("/usr/local/bin", "/usr/bin"))]
    for place in filter(os.path.exists, places):
        try:
            if run_as(ANN, [place, "-c", code], gid=GROUP, env=_environment(Path("/")), timeout_s=120).returncode == 0:
                return place
        except OSError:
            continue
    pytest.skip("no Python here can be started by other users with these packages")


def _environment(home: Path) -> dict[str, str]:
    return {
        "PATH": os.environ["PATH"], "HOME": str(home), "USER": home.name or "nobody", "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONPATH": f"{REPO / 'src'}:{sysconfig.get_paths()['purelib']}", "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }  # fmt: skip


def need_users() -> None:
    """Skip the test where this process cannot act as other users."""
    if os.geteuid() != 0:
        pytest.skip("only root can act as two other users")
    other_python("import yaml, allranks")


def open_up(folder: Path) -> None:
    """Let all users pass through the parents of a test's folder: pytest makes them for their owner alone."""
    for parent in (folder, *folder.parents):
        if parent.stat().st_uid == os.geteuid() and parent.stat().st_mode & 0o001 == 0:
            parent.chmod(parent.stat().st_mode | 0o711)


@contextmanager
def shared_place(tmp_path: Path) -> Iterator[Path]:
    """A folder that other users can reach: pytest's own lie below one that is closed to them."""
    place = Path("/var/tmp") / f"allranks-users-{os.getpid()}-{tmp_path.name}"  # noqa: S108
    place.mkdir(mode=0o755)
    try:
        yield place
    finally:
        shutil.rmtree(place)


def shared_folder(place: Path, mode: int = 0o2770) -> Path:
    """A folder of the group."""
    folder = place / "cache"
    folder.mkdir()
    os.chown(folder, 0, GROUP)
    folder.chmod(mode)
    return folder


def start_as(uid: int, place: Path, *args: str, umask: int = 0o002) -> subprocess.Popen[str]:
    """Start Python as another user, in that user's home, which is closed to others."""
    home, python = place / f"user{uid}", other_python("import yaml, allranks")
    if not home.exists():
        home.mkdir(mode=0o700)
        os.chown(home, uid, GROUP)
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
