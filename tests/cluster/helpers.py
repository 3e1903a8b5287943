"""What the tests of the box share: running the command line, waiting for jobs, looking at the machine."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from allranks.lab.cluster import Box, processes
from allranks.nodes.slurm.endpoints import state_root

SRC = Path(__file__).resolve().parents[2] / "src"
CLI = [sys.executable, "-m", "allranks.cli.cluster"]


def cli_environment(**values: str) -> dict[str, str]:
    """This environment, with the package of this checkout on the path."""
    path = os.pathsep.join([str(SRC), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path, **values}


def cli(*words: str, text: str | None = None, timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*CLI, *words], env=cli_environment(), input=text, capture_output=True, text=True, timeout=timeout_s
    )


def wait_for(condition: Callable[[], object], timeout_s: float = 30, what: str = "it") -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen within {timeout_s} s"
        time.sleep(0.1)


def submit(box: Box, folder: Path, script: str, *options: str) -> str:
    """Submits a batch script; its output goes to out-JOBID in ``folder``."""
    path = folder / f"job-{time.monotonic_ns()}.sbatch"
    path.write_text("#!/bin/bash\n" + script)
    done = box.run(["sbatch", "--parsable", f"--output={folder}/out-%j", *options, str(path)], cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def job_state(box: Box, job: str) -> str:
    return records_of(box, job).get("JobState", "")


def wait_state(box: Box, job: str, *states: str, timeout_s: float = 60) -> None:
    wait_for(lambda: job_state(box, job) in states, timeout_s, f"{states} of job {job} (it is {job_state(box, job)})")


def on(box: Box, node: str, *command: str) -> str:
    """Output of a command that must succeed on a node."""
    done = box.run(list(command), node=node, cwd="/")
    assert done.returncode == 0, f"{command} on {node}: {done.stderr}"
    return done.stdout.strip()


def connects(box: Box, source: str, target: str, timeout_s: float = 1.0) -> bool:
    """Whether a node reaches another one's slurmd, by name."""
    code = f"import socket; socket.create_connection(({target!r}, 6818), {timeout_s})"
    return box.run(["python3", "-c", code], node=source, cwd="/").returncode == 0


def records_of(box: Box, job: str) -> dict[str, str]:
    """What Slurm shows of a job."""
    shown = box.run(["scontrol", "--oneliner", "show", "job", job], cwd="/").stdout
    return dict(word.split("=", 1) for word in shown.split() if "=" in word)


def queue(box: Box) -> str:
    return box.run(["squeue", "--noheader", "--format=%i"], cwd="/").stdout.strip()


def machine(name: str) -> dict[str, list[str]]:
    """What a box of that name must not leave: interfaces, mounts, files.

    Other boxes, and the small disks of other tests, may come and go meanwhile.
    """
    state = state_root()
    others = [path for path in state.glob("*") if path.name != name]
    others += [*Path("/tmp").glob("pytest-of-*"), *Path("/var/tmp").glob("allranks-chaos-*")]  # noqa: S108
    links = subprocess.run(["ip", "-br", "link"], capture_output=True, text=True, timeout=10, check=True).stdout
    return {
        "interfaces": sorted(line.split()[0] for line in links.splitlines()),
        "mounts": sorted(
            mount.target
            for mount in processes.mounts("self")
            if not any(Path(mount.target).is_relative_to(other) for other in others)
        ),
        "files": sorted(str(path) for path in (*state.parent.glob("allranks*"), *state.glob(name))),
    }


def box_spaces(box: Box) -> list[str]:
    """The network namespaces of a box: who is in one of them belongs to it."""
    return [space for pid in box.inits().values() if (space := processes.namespace(pid, "net"))]
