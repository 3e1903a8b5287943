"""Run tests in several processes that are forked once all tests have been collected: ``pytest --forks 5``.

Collecting imports torch, transformers and all test modules, which takes longer than a fifth of the usual tests; workers
that are started anew, as pytest-xdist's are, do it each for themselves. Tests that share one real run or one cluster (a
fixture) go to one worker, and so do the tests of a quick file; all others go one by one to workers as these become
free, the longest first.
"""

import gc
import os
import random
import selectors
import signal
import sys
from collections import deque
from collections.abc import Iterator
from multiprocessing.connection import Connection, Pipe
from typing import Any

import pytest

from tests import sampling

DIST = ("best", "failures_a", "failures_b", "run")
SHARE_A_RUN = {"tests/cluster/test_preemption.py", "tests/chaos/test_chaos.py::test_a_fault_under_slurm"}
SHARE_A_RUN |= {f"tests/dist/test_{name}.py" for name in DIST}
QUICK = ("tests/unit/", "tests/lint/", "tests/golden/", "tests/security/")
CLUSTER, SLURM_RUNS = "tests/cluster/", "tests/cluster/test_slurm_runs.py"
OWN_CLUSTER = f"{SLURM_RUNS}::test_a_killed_node_sends_the_job_back_to_the_queue_and_it_goes_on"
APART = (SLURM_RUNS, "tests/cluster/test_programs.py")  # each in a cluster of its worker; else one chain lasts longest
LONGEST = (
    CLUSTER, "tests/dist/test_compare.py", "tests/dist/test_best.py", *APART,
    *(f"tests/dist/test_{name}.py" for name in ("stops", "run", "ranks", "qlora", "loading")),
)  # fmt: skip
"""Tests that begin first, by the beginning of their names."""
WORKER = "ALLRANKS_TEST_WORKER"


def scope_of(item: pytest.Item) -> str:
    """Return the name that tests for one worker share."""
    path, _, name = item.nodeid.partition("::")
    test = f"{path}::{name.partition('[')[0]}"
    if path.startswith(CLUSTER) and path not in SHARE_A_RUN and test != OWN_CLUSTER and not sampling.ALL:
        return path if path in APART else CLUSTER
    return path if path in SHARE_A_RUN or path.startswith(QUICK) else test if test in SHARE_A_RUN else item.nodeid


def turn_of(item: pytest.Item) -> int:
    """Return the place of a test among those that begin first; all others have the same one, behind them."""
    begins = [i for i, begin in enumerate(LONGEST) if item.nodeid.startswith(begin)]
    return begins[-1] if begins else len(LONGEST)


class Worker:
    """A forked process, seen from the one that has forked it."""

    def __init__(self, session: pytest.Session, number: int) -> None:
        self.link, theirs = Pipe()
        self.tests: deque[int] = deque()  # that it has been given and has not finished
        self.done = False
        sys.stdout.flush()
        self.pid = os.fork()
        if not self.pid:
            self.link.close()
            _work(session, number, theirs)
        theirs.close()

    def give(self, tests: list[int]) -> None:
        self.tests.extend(tests)
        self.link.send(tests)


class Forks:
    """In place of pytest's own loop over the tests."""

    def __init__(self, count: int) -> None:
        self._count = count

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        config = session.config
        if config.option.collectonly or (session.testsfailed and not config.option.continue_on_collection_errors):
            return None
        config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined] - all workers have folders in it
        together: dict[str, list[int]] = {}
        for at, item in enumerate(session.items):
            together.setdefault(scope_of(item), []).append(at)
        scopes = deque(sorted(together.values(), key=lambda tests: turn_of(session.items[tests[0]])))
        select, workers = selectors.DefaultSelector(), []
        gc.freeze()  # else each worker's garbage collector walks through all that has been collected, and copies it

        def start() -> None:
            worker = Worker(session, len(workers))
            workers.append(worker)
            select.register(worker.link, selectors.EVENT_READ, worker)

        try:
            for _ in range(min(self._count, len(scopes))):
                start()
            while any(not worker.done for worker in workers):
                for key, _ in select.select():
                    worker = key.data
                    if not self._hear(session, worker, scopes):
                        select.unregister(worker.link)
                        os.waitpid(worker.pid, 0)
                        if worker.tests:  # it has died
                            self._report_death(session, worker)
                            scopes.appendleft(list(worker.tests))
                            start()
                        worker.done = True
                if session.shouldfail:
                    raise session.Failed(session.shouldfail)
                if session.shouldstop:
                    raise session.Interrupted(session.shouldstop)
        finally:
            for worker in workers:
                if not worker.done:
                    os.kill(worker.pid, signal.SIGTERM)
        return True

    def _hear(self, session: pytest.Session, worker: Worker, scopes: deque[list[int]]) -> bool:
        """Do what a message of a worker asks for; return whether the worker is still there."""
        try:
            kind, *data = worker.link.recv()
        except (EOFError, ConnectionResetError):
            return False
        hook = session.config.hook
        if kind == "next":
            worker.give(scopes.popleft() if scopes else [])
        elif kind == "start":
            item = session.items[data[0]]
            hook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        elif kind == "finish":
            worker.tests.remove(data[0])
            item = session.items[data[0]]
            hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        elif kind == "report":
            report = hook.pytest_report_from_serializable(config=session.config, data=data[0])
            hook.pytest_runtest_logreport(report=report)
        return True

    def _report_death(self, session: pytest.Session, worker: Worker) -> None:
        item = session.items[worker.tests.popleft()]
        died = f"the process that ran {item.nodeid} has died"
        report: Any = pytest.TestReport(item.nodeid, item.location, {}, "failed", died, "call")
        session.config.hook.pytest_runtest_logreport(report=report)


class Teller:
    """Passes what happens in a worker to the process that reports it."""

    def __init__(self, config: pytest.Config, link: Connection) -> None:
        self._config, self._link = config, link

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._link.send(("report", self._config.hook.pytest_report_to_serializable(config=self._config, report=report)))


def _work(session: pytest.Session, number: int, link: Connection) -> None:
    """Be a worker: run what is given, one test ahead, because pytest tears down what the next does not need."""
    code = 1
    try:
        os.environ[WORKER] = str(number)
        random.seed()
        config = session.config
        manager: Any = config.pluginmanager
        manager.getplugin("terminalreporter")._tw._file = open(os.devnull, "w")  # noqa: PTH123, SIM115
        capture = manager.getplugin("capturemanager")
        capture.stop_global_capturing()
        capture.start_global_capturing()  # with files of its own
        factory: Any = config._tmp_path_factory  # type: ignore[attr-defined]
        factory._basetemp = factory.getbasetemp() / f"worker{number}"
        factory._basetemp.mkdir(0o700)
        manager.register(Teller(config, link))
        for at, after in _with_next(_given(link)):
            link.send(("start", at))
            item, following = session.items[at], None if after is None else session.items[after]
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            link.send(("finish", at))
        code = 0
    finally:
        link.close()
        os._exit(code)


def _given(link: Connection) -> Iterator[int]:
    while True:
        link.send(("next",))
        if not (tests := link.recv()):
            return
        yield from tests


def _with_next(tests: Iterator[int]) -> Iterator[tuple[int, int | None]]:
    at = next(tests, None)
    while at is not None:
        after = next(tests, None)
        yield at, after
        at = after
