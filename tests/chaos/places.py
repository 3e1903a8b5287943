"""Where cases run, and what is left there: this machine with a private /tmp and /dev/shm, or the cluster in a box."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from allranks.lab.cluster import Box, BoxOptions, down, up
from allranks.lab.cluster.box import box_names
from allranks.nodes.slurm.endpoints import NAME_VARIABLE
from tests.conftest import REPO

OURS = ("allranks.launch.", "allranks.cli.")
TEMPORARY = ("tmp", "dev/shm")
NOT_OURS = ("torchinductor_", "munge", "slurm")
BLOCKER = "blocker"


class Place:
    """What the command's words are prefixed with, and which temporary files a run has left."""

    box: Box | None = None

    def prefix(self, folder: Path) -> list[str]:
        """Words before the command."""
        return []

    def environment(self) -> dict[str, str]:
        return {}

    def roots(self) -> list[Path]:
        """Root folders in which /tmp and /dev/shm are looked at."""
        return []

    def temporary(self) -> set[str]:
        """All entries of the temporary folders."""
        found = set()
        for root in self.roots():
            for folder in TEMPORARY:
                if (root / folder).is_dir():
                    names = (entry.name for entry in (root / folder).iterdir())
                    found |= {f"/{folder}/{name} in {root}" for name in names if not name.startswith(NOT_OURS)}
        return found

    def jobs(self) -> list[str]:
        """Jobs in the queue, but for the one that only keeps the nodes busy."""
        return []


class Machine(Place):
    """This machine. As root, commands run in a mount namespace whose /tmp and /dev/shm are their own."""

    def __init__(self) -> None:
        self._holder: subprocess.Popen[str] | None = None
        needed = (sys.prefix, sys.base_prefix, str(REPO))
        if os.geteuid() or any(Path(p).resolve().is_relative_to("/tmp") for p in needed):  # noqa: S108 - hidden
            return
        mounts = "mount -t tmpfs none /tmp && mount -t tmpfs none /dev/shm && echo ready && exec sleep 3600"
        self._holder = subprocess.Popen(
            ["unshare", "--mount", "--propagation", "private", "sh", "-c", mounts], stdout=subprocess.PIPE, text=True
        )
        assert self._holder.stdout is not None
        if self._holder.stdout.readline().strip() != "ready":
            self._holder.kill()
            self._holder = None

    def prefix(self, folder: Path) -> list[str]:
        if self._holder is None:
            return []
        return ["nsenter", f"--mount=/proc/{self._holder.pid}/ns/mnt", "env", "--chdir", str(folder)]

    def roots(self) -> list[Path]:
        return [Path(f"/proc/{self._holder.pid}/root")] if self._holder else []

    def close(self) -> None:
        if self._holder:
            self._holder.kill()
            self._holder.wait(timeout=10)


class Cluster(Place):
    """A box of three nodes."""

    def __init__(self, box: Box) -> None:
        self.box = box

    def environment(self) -> dict[str, str]:
        assert self.box is not None
        return {NAME_VARIABLE: self.box.name}

    def roots(self) -> list[Path]:
        assert self.box is not None
        return [Path(f"/proc/{pid}/root") for name, pid in self.box.inits().items() if name != self.box.plan.login]

    def temporary(self) -> set[str]:
        # /dev/shm is this machine's, where others work meanwhile
        return {name for name in super().temporary() if name.startswith("/tmp/") or "allranks" in name}  # noqa: S108

    def jobs(self) -> list[str]:
        assert self.box is not None
        shown = self.box.run(["squeue", "--noheader", "--format=%i %j %T"], cwd="/").stdout.splitlines()
        return [line.strip() for line in shown if line.strip() and line.split()[1] != BLOCKER]

    def block(self) -> None:
        """Keep all nodes busy."""
        assert self.box is not None
        words = ["sbatch", "--parsable", f"--job-name={BLOCKER}", "--nodes=3", "--exclusive", "--output=/dev/null"]
        done = self.box.run([*words, "--wrap", "sleep 600"], cwd="/")
        assert done.returncode == 0, done.stderr

    def job_record(self, job: str) -> dict[str, str]:
        """What scontrol says of a job."""
        assert self.box is not None
        shown = self.box.run(["scontrol", "--oneliner", "show", "job", job], cwd="/").stdout
        return dict(word.split("=", 1) for word in shown.split() if "=" in word)

    def clear(self, limit_s: float = 40.0) -> None:
        """Kill all jobs, also those that would go back to the queue, and wait until they have gone."""
        assert self.box is not None
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            jobs = self.box.run(["squeue", "--noheader", "--format=%i"], cwd="/").stdout.split()
            if not jobs:
                return
            for job in jobs:
                self.box.run(["scontrol", "update", f"JobId={job}", "Requeue=0"], cwd="/")
                self.box.run(["scancel", "--signal=KILL", "--full", job], cwd="/")
                self.box.run(["scancel", job], cwd="/")
            time.sleep(1.0)


@contextmanager
def machine() -> Iterator[Machine]:
    """This machine, for one case."""
    place = Machine()
    try:
        yield place
    finally:
        place.close()


@contextmanager
def cluster() -> Iterator[Cluster]:
    """A box of its own, for many cases."""
    for name in box_names():
        word, _, pid = name.partition("-")
        if word == "chaos" and pid.isdigit() and not psutil.pid_exists(int(pid)):
            down(name)
    box = up(BoxOptions(name=f"chaos-{os.getpid()}", nodes=3, conf=("KillWait=15",)))
    try:
        yield Cluster(box)
    finally:
        down(box.name)


@contextmanager
def case_folder(*, small_disk: bool) -> Iterator[Path]:
    """A folder that every node sees; with `small_disk` its ``runs`` is a file system of 128 MiB."""
    folder = Path(tempfile.mkdtemp(prefix="allranks-chaos-", dir="/var/tmp"))
    folder.chmod(0o755)
    runs = folder / "runs"
    runs.mkdir()
    try:
        if small_disk:
            words = ["mount", "-t", "tmpfs", "-o", "size=128m", "none", str(runs)]
            subprocess.run(words, check=True, capture_output=True, timeout=10)
        yield folder
    finally:
        end_processes(folder)
        if small_disk:
            subprocess.run(["umount", "--lazy", str(runs)], timeout=10, check=False)
        shutil.rmtree(folder, ignore_errors=True)


def processes(folder: Path, module: str = "") -> list[psutil.Process]:
    """Python processes that were started with a path in `folder`, in order of their start; `module` narrows them."""
    found = []
    for process in psutil.process_iter(["cmdline", "create_time"]):
        words = process.info["cmdline"] or []
        wanted = not module or (module in words and "python" in Path(words[0]).name)  # srun has these words, too
        if wanted and any(word.startswith(str(folder)) for word in words):
            found.append(process)
    return sorted(found, key=lambda p: p.info["create_time"])


def end_processes(folder: Path) -> None:
    """Kill what is left of a case."""
    for process in processes(folder):
        try:
            process.send_signal(signal.SIGKILL)
        except psutil.NoSuchProcess:
            continue
