"""Shared by all tests: no network, one thread a process, and one line that says what was skipped and why."""

import gc
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from allranks.nodes.probes.probe import build_locks
from tests import usual
from tests.forks import Forks
from tests.warm import Warm

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"

REPO = Path(__file__).resolve().parent.parent

# Not the user's own folder: a test that is killed while DeepSpeed builds leaves a lock, for which every later build
# waits.
os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(REPO / ".venv" / "torch_extensions"))


def remove_build_locks() -> None:
    """Remove the locks of builds of torch extensions that were killed, not those of other sessions of tests."""
    for lock in build_locks(os.environ["TORCH_EXTENSIONS_DIR"]):
        if not lock["held"]:
            Path(lock["path"]).unlink(missing_ok=True)


remove_build_locks()
_skips: Counter[str] = Counter()
_left = {"n": 0}  # tests that this run leaves to another
_ahead: list[Warm] = []  # makes its imports while this process collects tests


def shared(*parts: str) -> Path:
    """A file of the field's real data, which lies beside the project; the test skips where it is not there."""
    path = REPO.parent.joinpath("shared", "data", *parts)
    if not path.exists():
        pytest.skip("the folder with real data (../shared/data) is not here")
    return path


@pytest.fixture
def rows_file(tmp_path: Path) -> Path:
    path = tmp_path / "rows.json"
    write_rows(path, 40)
    return path


def write_rows(path: Path, n: int) -> None:
    """`n` instruction rows of uneven length."""
    words = [(f"Say the number {i}" + " please" * (i % 7), "again" * (i % 3), "yes " * (i % 5)) for i in range(n)]
    rows = [{"instruction": a, "input": b, "output": f"number {i} {c}"} for i, (a, b, c) in enumerate(words)]
    path.write_text(json.dumps(rows))


def without_stdin(verb: str) -> subprocess.CompletedProcess[str]:
    """`allranks VERB -` where the caller has closed standard input."""
    command = ["bash", "-c", '"$0" -m allranks.cli.main "$1" - <&-', sys.executable, verb]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def tiny_spec(source: str | Path, tmp_path: Path, **sections: dict[str, Any]) -> dict[str, Any]:
    """A spec that trains in a second or two."""
    layers = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    spec: dict[str, Any] = {
        "name": "t",
        "model": {
            "name": "tiny:mistral",
            "config": {"hidden_size": 32, "intermediate_size": 64, "vocab_size": 320, **layers},
        },
        "data": {"source": str(source), "max_length": 64, "eval_fraction": 0.2},
        "adapter": {"type": "lora", "r": 4, "dropout": 0.1, "targets": ["q_proj", "v_proj"]},
        "train": {"max_steps": 6, "micro_batch_size": 2, "lr": 1e-2},
        "cluster": {"cache": str(tmp_path / "cache"), "restarts": {"max": 0}},
        "run_root": str(tmp_path / "runs"),
    }
    for name, values in sections.items():
        spec[name] = {**spec.get(name, {}), **values} if isinstance(values, dict) else values
    return spec


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.skipped and isinstance(report.longrepr, tuple):
        _skips[report.longrepr[2].removeprefix("Skipped: ")] += 1


def pytest_terminal_summary(terminalreporter: Any) -> None:
    reasons = "; ".join(f"{n} x {why}" for why, n in _skips.items()) or "nothing"
    terminalreporter.write_line(f"skipped: {reasons}")
    if _left["n"]:
        left = f"{_left['n']} tests, and {sum(not names for names in usual.FILES.values())} files (tests/usual.py)"
        terminalreporter.write_line(f"left for make test-all or make lint: {left}")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Without the garbage collector, which would look at all tests and modules again and again, and free nothing."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_deselected(items: list[pytest.Item]) -> None:
    _left["n"] += len(items)


def _how_late(item: pytest.Item) -> int:
    """The cluster's tests, which go one by one, and whole runs begin early, or they would be left over at the end."""
    folders = ("cluster", "chaos", "dist", "reference")
    return min((i for i, name in enumerate(folders) if name in item.path.relative_to(REPO).parts), default=4)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--forks", type=int, default=0, help="processes that run tests; 0: none besides this one")


def pytest_configure(config: pytest.Config) -> None:
    if config.option.forks:
        config.pluginmanager.register(Forks(config.option.forks), "forks")
        if not config.option.collectonly:
            _ahead.append(Warm("heavy"))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """`-m docs` and `make test` read the files that have such tests, and do not import what the others need."""
    if not collection_path.name.startswith("test_"):
        return None
    file = _below_tests(collection_path)
    if config.option.markexpr == "docs":
        return None if usual.DOCS.get(file) else True
    return True if "not full" in config.option.markexpr and usual.FILES.get(file) == set() else None


def _below_tests(path: Path) -> str:
    return path.relative_to(REPO / "tests").as_posix()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    items.sort(key=_how_late)
    collected: dict[str, set[str]] = {}
    for item in items:
        file = _below_tests(item.path)
        name = getattr(item, "originalname", item.name)
        case = item.callspec.id if hasattr(item, "callspec") else ""
        collected.setdefault(file, set()).update((name, f"{name}[{case}]"))
        if not usual.is_usual(file, name, case):
            item.add_marker(pytest.mark.full)
        if usual.is_docs(file, name):
            item.add_marker(pytest.mark.docs)
        if file.startswith("dist/"):
            item.add_marker(pytest.mark.dist)
    whole = not any("::" in word for word in config.args) and not getattr(config.option, "lf", False)
    if whole and (lost := usual.unknown(collected)):
        raise pytest.UsageError(f"tests/usual.py names tests that are not there: {', '.join(lost)}")
