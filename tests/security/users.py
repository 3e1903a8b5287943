"""Runs commands as another user of this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

import pytest

OTHER_USER = 65002

needs_other_user = pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process as another user")


def run_as(
    uid: int,
    argv: Sequence[str],
    *,
    gid: int | None = None,
    timeout_s: float = 60.0,
    cwd: Path | str = "/",
    env: Mapping[str, str] | None = None,
    input_text: str | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a command with the rights of a user who is in no other group.

    Args:
        uid: the user; `OTHER_USER` is one who owns nothing.
        gid: its group; the same number if not given.
        timeout_s: after this time the command is killed, and `subprocess.TimeoutExpired` raised.
        env: the whole environment; PATH alone if not given.
    """
    return subprocess.run(
        list(argv),
        user=uid,
        group=uid if gid is None else gid,
        extra_groups=[],
        cwd=cwd,
        env=dict(env) if env is not None else {"PATH": os.environ.get("PATH", os.defpath)},
        input=input_text,
        stdin=subprocess.DEVNULL if input_text is None else None,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=timeout_s,
        check=False,
    )


@cache
def other_python() -> str:
    """Return a Python that `OTHER_USER` may start (this one may lie in a private folder); the test skips where there is
    none."""
    for python in (sys.executable, "/usr/bin/python3", "/usr/local/bin/python3"):
        try:
            if run_as(OTHER_USER, [python, "-c", "print(1)"]).stdout.strip() == "1":
                return python
        except OSError:
            continue
    pytest.skip("no Python that another user may start")


def open_up(folder: Path) -> None:
    """Let all users pass through the parents of a test's folder: pytest makes them for their owner alone."""
    for parent in (folder, *folder.parents):
        if parent.stat().st_uid == os.geteuid() and parent.stat().st_mode & 0o001 == 0:
            parent.chmod(parent.stat().st_mode | 0o711)
