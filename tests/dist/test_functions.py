"""`allranks.launch`: values and exceptions of functions on real ranks, what is refused, and that it always ends."""

import linecache
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import allranks
from allranks import errors
from allranks.rundir import function_files
from allranks.rundir.paths import RunDir


class Rebuildable(Exception):
    pass


class WithArguments(ValueError):
    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)
        self.code = code


def value_of(factor: int, *, add: int) -> dict[str, Any]:
    rank = int(os.environ["RANK"])
    print(f"rank {rank} says hello")
    return {"value": factor * rank + add, "torch": "torch" in sys.modules, "folder": os.environ["ALLRANKS_RUN_FOLDER"]}


def fail(how: str) -> Any:
    if os.environ["RANK"] == "1":
        if how == "own type":
            raise Rebuildable("of rank 1")
        if how == "other arguments":
            raise WithArguments("of rank 1", 3)
        if how == "exit code":
            sys.exit(3)
        if how == "value":
            return (i for i in range(3))
    time.sleep(120)


def test_values_are_those_of_the_ranks_and_nothing_else_is_set_up(tmp_path: Path, capsys: Any) -> None:
    result = allranks.launch(value_of, (10,), {"add": 1}, procs_per_node=2, run_root=tmp_path)
    assert [one["value"] for one in result] == [1, 11]
    assert (len(result), result[1]["torch"], result[1]["folder"]) == (2, False, str(result.folder))
    assert result.metrics["status"] == "succeeded"
    assert "rank 0 says hello" in capsys.readouterr().out
    call = RunDir(result.folder).function_call
    assert call.stat().st_mode & 0o777 == 0o600
    call.chmod(0o622)  # whoever can write it could make this user's processes execute anything
    with pytest.raises(errors.RunFailed, match="mode 622; it is not read"):
        function_files.read_call(RunDir(result.folder))


@pytest.mark.parametrize(
    ("how", "kind", "text", "note"),
    [
        ("own type", Rebuildable, "^of rank 1\n", 'raise Rebuildable("of rank 1")'),
        pytest.param(
            "other arguments", errors.FunctionFailed, "rank 1 on .* failed: WithArguments: of rank 1", "in fail",
            marks=pytest.mark.full,
        ),
        pytest.param("exit code", errors.FunctionFailed, "ended with exit code 3", None, marks=pytest.mark.full),
        pytest.param("value", errors.FunctionFailed, "type generator, cannot be sent back", "", marks=pytest.mark.full),
        ("time", errors.FunctionTimedOut, r"did not end within timeout_s=1: stopped \(allranks cancel\)", None),
        ("Ctrl-C", KeyboardInterrupt, r"stopped \(interrupted\): the ranks received SIGTERM", None),
    ],
)  # fmt: skip
def test_a_failure_is_raised_as_the_first_rank_had_it(
    tmp_path: Path, how: str, kind: type[BaseException], text: str, note: str | None
) -> None:
    def interrupt() -> None:
        while not list(tmp_path.glob("*/events/rank1.jsonl")):
            time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGINT)

    if how == "Ctrl-C":
        threading.Thread(target=interrupt, daemon=True).start()
    limit_s = 1.0 if how == "time" else None
    began = time.monotonic()
    with pytest.raises(kind, match=text) as caught:
        allranks.launch(fail, [how], procs_per_node=2, run_root=tmp_path, output="none", timeout_s=limit_s)
    assert time.monotonic() - began < 100  # the ranks sleep longer
    notes = getattr(caught.value, "__notes__", [])
    if note is None:
        assert notes == []
    else:
        assert notes[0].startswith("rank 1 on ") and note in notes[0] and "train/user_function.py" not in notes[0]


def test_a_function_of_a_notebook_keeps_its_classes_and_its_lines(tmp_path: Path) -> None:
    pytest.importorskip("cloudpickle", reason="without cloudpickle such functions are refused")
    text, file = "class Own(Exception): pass\ndef cell():\n    raise Own('in a cell')\n", "<cell 7>"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    cell: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(text, file, "exec"), cell)  # noqa: S102 - as a notebook does
    with pytest.raises(cell["Own"], match="in a cell") as caught:
        allranks.launch(cell["cell"], procs_per_node=1, run_root=tmp_path, output="none")
    assert f'File "{file}", line 3, in cell\n    raise Own(' in caught.value.__notes__[0]


def test_what_cannot_run_is_refused_before_anything_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(function_files, "has_cloudpickle", lambda: False)
    local, main = lambda: 1, type("Main", (), {"__module__": "__main__"})
    monkeypatch.setattr(sys.modules["__main__"], "Main", main, raising=False)
    for fn, args, text in ((local, (), "cannot be sent"), (fail, (main(),), "is defined in a notebook")):
        with pytest.raises(errors.RequestError, match=f"{text}.*install cloudpickle"):
            allranks.launch(fn, args, run_root=tmp_path)
    monkeypatch.setenv("ALLRANKS_AGENT_PID", "1")
    with pytest.raises(errors.RequestError, match=r"called by a rank.*__main__"):
        allranks.launch(fail, ["x"], run_root=tmp_path)
    assert list(tmp_path.iterdir()) == []
