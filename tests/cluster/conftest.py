"""A real Slurm of three nodes, shared by all tests of a session, and put right again after each of them.

`box` is three nodes (n1 to n3) with two announced GPUs each; the interface of n2 is called eno1. `shared` is a folder
that every node sees; pytest's own tmp_path lies in /tmp, of which each node has its own. `make_box` starts others.
"""

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from allranks.errors import EnvironmentNotAble
from allranks.lab.cluster import Box, BoxOptions, down, requirements, up
from allranks.lab.cluster.box import box_names
from allranks.lab.cluster.faults import heal
from allranks.nodes.slurm.endpoints import NAME_VARIABLE
from tests.cluster.helpers import queue


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything in this folder is marked; without root or Slurm it is skipped in one line."""
    here = [item for item in items if Path(__file__).parent in item.path.parents]
    reason = unable() if here else None
    for item in here:
        item.add_marker(pytest.mark.cluster)
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))


def unable() -> str | None:
    """Why there can be no box on this machine."""
    try:
        requirements.check_requirements()
    except EnvironmentNotAble as error:
        return f"no cluster in a box: {error}"
    return None


def left_by_a_dead_session(name: str) -> bool:
    """A session that was killed could not take its box down."""
    word, _, pid = name.partition("-")
    return word == "test" and pid.isdigit() and not psutil.pid_exists(int(pid))


@contextmanager
def selected(options: BoxOptions) -> Iterator[Box]:
    """A box that the verbs of this process find."""
    box = up(options)
    try:
        with pytest.MonkeyPatch.context() as environment:
            environment.setenv(NAME_VARIABLE, box.name)
            yield box
    finally:
        down(box.name)


@pytest.fixture(scope="session")
def session_box() -> Iterator[Box]:
    """The box itself; tests take `box`, which heals it after them."""
    for name in box_names():
        if left_by_a_dead_session(name):
            down(name)
    # of this process: tests are imported in the one that its workers are forked from
    name, interfaces = f"test-{os.getpid()}", {"n2": "eno1"}
    with selected(BoxOptions(name=name, gpus={"": 2}, interfaces=interfaces, partitions=("main", "gpu"))) as box:
        yield box


@pytest.fixture
def box(session_box: Box) -> Iterator[Box]:
    """Three idle nodes; afterwards all faults are healed and all jobs are gone."""
    yield session_box
    tidy(session_box)


def tidy(box: Box, timeout_s: float = 30) -> None:
    """Heal all faults, cancel all jobs, and wait until the queue is empty."""
    heal(box)
    box.run(["scancel", "--full", f"--user={box.plan.user}"], cwd="/")
    deadline = time.monotonic() + timeout_s
    while queue(box):
        assert time.monotonic() < deadline, "jobs do not end"
        time.sleep(0.1)


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder that the login side and every node see."""
    path = Path(tempfile.mkdtemp(prefix="allranks-test-", dir="/var/tmp"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


@pytest.fixture
def make_box() -> Iterator[Callable[..., Box]]:
    """Starts further boxes; they are ended after the test."""
    names: list[str] = []

    def make(name: str, **options: object) -> Box:
        box = up(BoxOptions(name=name, **options))  # type: ignore[arg-type]
        names.append(name)
        return box

    yield make
    for name in names:
        down(name)


@pytest.fixture
def use_box(make_box: Callable[..., Box], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Box]:
    """Starts a box that the test's verbs use instead of the session's."""

    def use(name: str, **options: object) -> Box:
        box = make_box(f"{name}-{os.getpid()}", **options)
        monkeypatch.setenv(NAME_VARIABLE, box.name)
        return box

    return use
