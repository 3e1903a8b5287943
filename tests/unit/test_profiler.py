"""The profiler's window: what it records, what it costs outside, and that its failures harm nobody."""

import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.modules.module as hooks

from allranks.planning.planner import make_plan
from allranks.rundir.events import EventLog, read_events
from allranks.rundir.paths import RunDir
from allranks.spec import parse_spec
from allranks.spec.records import ProfileSpec
from allranks.spec.validation import window_warning
from allranks.train.profiler import Profiler, TraceMetadata, TraceNotWritten, publish_trace
from allranks.utils.machine import MachineFacts
from tests.conftest import REPO


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(8, 8), torch.nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


def profiler(folder: Path, net: Net, attempt: int = 1, first_step: int = 0, **window: Any) -> tuple[Profiler, EventLog]:
    events = EventLog(RunDir(folder).events_of(3), 3)
    known = {"run": "r", "backend": "gloo", "device": "cpu", "strategy": "single", "grad_accum": 1}
    facts = TraceMetadata(attempt=attempt, rank=3, world_size=4, **known)
    return Profiler(ProfileSpec(**window), facts, RunDir(folder), net, events, first_step), events


def steps(watcher: Profiler, net: Net, first: int, last: int) -> list[bool]:
    took = []
    for step in range(first, last):
        watcher.step_begins(step)
        with watcher.part("forward"):
            loss = net(torch.ones(4, 8)).sum()
        with watcher.part("backward"):
            loss.backward()
        took.append(watcher.step_ends(step))
    watcher.close()
    return took


def trace(path: Path) -> dict[str, Any]:
    return json.loads(gzip.decompress(path.read_bytes()))


def annotations(document: dict[str, Any]) -> list[str]:
    return [e["name"] for e in document["traceEvents"] if e.get("cat") == "user_annotation"]


def test_the_window_holds_its_steps_their_parts_and_the_modules(tmp_path: Path) -> None:
    net = Net()
    watcher, _ = profiler(tmp_path, net, wait=2, warmup=1, active=2)
    took = steps(watcher, net, 0, 8)
    document = trace(RunDir(tmp_path).trace_of(3))
    names = annotations(document)
    assert [n for n in names if n.startswith("ProfilerStep")] == ["ProfilerStep#4", "ProfilerStep#5"]
    assert names.count("allranks.forward") == names.count("allranks.backward") == 2
    assert names.count("allranks.module:first") == names.count("allranks.module:second") == 2
    assert document["allranks"]["rank"] == 3 and document["allranks"]["strategy"] == "single"
    assert took == [False] * 4 + [True] + [False] * 3
    assert [p.name for p in RunDir(tmp_path).traces.iterdir()] == ["rank3.json.gz"]


def test_nothing_stays_attached_outside_the_window_or_after_an_error(tmp_path: Path) -> None:
    net = Net()
    watcher, _ = profiler(tmp_path, net, wait=1, warmup=0, active=1)
    assert watcher.part("forward") is watcher.part("backward")  # one object that does nothing
    steps(watcher, net, 0, 4)
    assert not hooks._global_forward_hooks and not hooks._global_forward_pre_hooks
    assert not torch.autograd.profiler._is_profiler_enabled  # pyright: ignore
    watcher, _ = profiler(tmp_path / "error", net, wait=0, warmup=0, active=3)
    watcher.step_begins(0)
    with pytest.raises(RuntimeError):
        net(torch.ones(4, 9))
    watcher.close()
    assert "ProfilerStep#1" in annotations(trace(RunDir(tmp_path / "error").trace_of(3)))
    assert not hooks._global_forward_hooks


def test_a_window_that_the_run_ends_in_is_written_as_far_as_it_got(tmp_path: Path) -> None:
    net = Net()
    watcher, _ = profiler(tmp_path, net, wait=1, warmup=0, active=5)
    steps(watcher, net, 0, 3)
    names = annotations(trace(RunDir(tmp_path).trace_of(3)))
    assert [n for n in names if n.startswith("Prof")] == ["ProfilerStep#2", "ProfilerStep#3"]
    watcher, events = profiler(tmp_path / "short", net, wait=9, active=1)
    steps(watcher, net, 0, 3)
    events.close()
    assert not RunDir(tmp_path / "short").traces.exists()


def test_a_later_attempt_takes_the_name_and_keeps_the_earlier_trace(tmp_path: Path) -> None:
    net, run = Net(), RunDir(tmp_path)
    for attempt, first in ((1, 0), (2, 5), (4, 9)):  # attempt 3 did not reach its window
        watcher, events = profiler(tmp_path, net, attempt=attempt, first_step=first, wait=0, warmup=0, active=1)
        steps(watcher, net, first, first + 2)
        events.close()
    found = {p: trace(p)["allranks"]["attempt"] for p in run.traces.rglob("*.gz")}
    assert found == {run.trace_of(3): 4, run.trace_of(3, attempt=1): 1, run.trace_of(3, attempt=2): 2}
    assert run.traced_ranks() == [3]
    assert "ProfilerStep#10" in annotations(trace(run.trace_of(3)))


FULL_DISK = """
import resource, sys, pathlib
sys.path.insert(0, sys.argv[2])
from tests.unit.test_profiler import Net, profiler, steps
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[3]), int(sys.argv[3])))  # writes beyond fail, as on a full disk
net = Net()
watcher, events = profiler(pathlib.Path(sys.argv[1]), net, wait=0, warmup=0, active=3)
steps(watcher, net, 0, 5)
print("went on")
"""


@pytest.mark.parametrize("limit", [8192, pytest.param(40_000, marks=pytest.mark.full)])
def test_a_full_disk_is_a_warning_and_training_goes_on(tmp_path: Path, limit: int) -> None:
    command = [sys.executable, "-c", FULL_DISK, str(tmp_path), str(REPO), str(limit)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "went on" in done.stdout, done.stderr
    (event,) = [e for e in read_events(RunDir(tmp_path).events_of(3)) if e["event"] != "step"]
    assert event["event"] == "warning"
    assert "no trace of rank 3" in event["message"] and "is the disk full?" in event["message"]
    assert list(RunDir(tmp_path).traces.iterdir()) == []  # no halves, hidden or not


def test_a_trace_that_breaks_off_does_not_replace_a_whole_one(tmp_path: Path) -> None:
    target = tmp_path / "rank0.json.gz"
    publish_trace(lambda path: Path(path).write_text('{"traceEvents": []}\n'), target)
    with pytest.raises(TraceNotWritten, match="no complete file"):
        publish_trace(lambda path: Path(path).write_text('{"traceEvents": [{"ph": "X"'), target)
    assert trace(target) == {"traceEvents": []} and list(tmp_path.iterdir()) == [target]


def planned(**profile: Any) -> list[str]:
    facts = MachineFacts(host="h", cpus=8, memory_bytes=2**34, gpus=[], cpu_model="", system="Linux")
    spec = {"model": {"name": "tiny:mistral"}, "data": {"source": "builtin:news"}, "train": {"max_steps": 10}}
    return make_plan(parse_spec({**spec, "observe": {"profile": profile}}), facts).warnings


def test_plan_says_where_the_window_does_not_fit() -> None:
    assert planned() == []  # 5 + 2 + 3 is just 10
    assert "will have 2 of 3 steps" in planned(wait=6)[0]
    assert "records steps 11 to 13" in planned(wait=8)[0] and "will have 0 of 3 steps" in planned(wait=8)[0]
    assert "names 2, 7, but the ranks are 0 to 1" in planned(ranks=[0, 2, 7])[0]
    assert window_warning(ProfileSpec(wait=0, warmup=0, active=1), 1) is None
