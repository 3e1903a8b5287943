"""A user's own program: a hang is ended and its rank named, a slow one is not; progress and output are shown live."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from allranks.rundir.events import WRITTEN_AT_ONCE, read_events
from allranks.rundir.files import read_json
from tests.dist.harness import allranks, free_port, stall_ranks, train

PROGRAM = """
import os, socket, sys, threading, time
import torch
import torch.distributed as dist

def fetch():
    time.sleep(3600)

def evaluate_alone(seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        torch.ones(64, 64) @ torch.ones(64, 64)

def answer_as_ras(server, pid):
    connection, _ = server.accept()
    connection.recv(1000)
    text = f"INCOMPLETE\\n  Missing communicator data from 1 job process\\n  \
Process {pid} on node 10.0.0.1 managing GPU 1\\n"
    connection.sendall(f"OK\\nCommunicators... (2.05s)\\n\\nErrors\\n======\\n\\n{text}".encode())
    connection.close()

if sys.argv[1] == "lock":
    from torch.utils.file_baton import FileBaton
    FileBaton(__file__).wait()
dist.init_process_group("gloo")
rank, what = dist.get_rank(), sys.argv[1]
pids = [torch.zeros(1, dtype=torch.long) for _ in range(dist.get_world_size())]
dist.all_gather(pids, torch.tensor([os.getpid()]))
if rank == 0 and what == "sleep":
    server = socket.create_server(("127.0.0.1", int(os.environ["NCCL_RAS_ADDR"].partition(":")[2])))
    threading.Thread(target=answer_as_ras, args=(server, int(pids[1])), daemon=True).start()
for i in range(6):
    dist.all_reduce(torch.ones(4))
    time.sleep(0.1)
if what == "sleep" and rank == 1:
    fetch()
if what == "works" and rank == 0:
    evaluate_alone(6)
if what == "speaks" and rank == 0:
    for i in range(7):
        time.sleep(1)
        print("still downloading", i, flush=True)
if what != "skip" or rank != 1:
    dist.all_reduce(torch.ones(4))
dist.all_gather([torch.ones(4) for _ in range(dist.get_world_size())], torch.ones(4))
dist.destroy_process_group()
"""
GROUP_OF_DDP = """
import faulthandler, os, sys
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from allranks.train import rank_hooks

faulthandler.dump_traceback_later(60, exit=True)
rank_hooks._sequences()
for _ in range(40):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = DistributedDataParallel(torch.nn.Linear(2, 2))
    dist.all_gather([torch.ones(1 << 16)], torch.ones(1 << 16), async_op=True)
    dist.destroy_process_group()
    del model
print("freed", flush=True)
os._exit(0)
"""


def end_of(tmp_path: Path, what: str, hang_s: float = 6, ranks: int = 2, code: int = 1) -> tuple[Any, Any]:
    (tmp_path / "program.py").write_text(PROGRAM)
    script = {"path": str(tmp_path / "program.py"), "args": [what]}
    more = {"observe": {"hang_s": hang_s}, "cluster": {"procs_per_node": ranks}, "run_root": str(tmp_path / "runs")}
    return train(tmp_path, {"name": "s", "script": script, **more}, code=code)


@pytest.mark.parametrize(
    ("what", "ranks", "reason", "where"),
    [
        ("sleep", 2, "never joined collective", "program.py:7 in fetch"),
        pytest.param("skip", 3, "other ranks called all_reduce", "program.py:43 in <module>", marks=pytest.mark.full),
    ],
)
def test_the_rank_that_hangs_is_named_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, ranks: int, reason: str, where: str
) -> None:
    stall_ranks(monkeypatch, "")
    monkeypatch.setenv("NCCL_RAS_ADDR", f"localhost:{free_port()}")
    done, run = end_of(tmp_path, what, ranks=ranks)
    report = read_json(run.hang_report(1))
    (stalled,) = report["stalled"]
    assert (stalled["rank"], reason in stalled["why"]) == (1, True), report["sentence"]
    assert where in report["sentence"] and report["sentence"] in done.stderr
    assert report["alarm"]["phase"] == "script"
    assert ("NCCL RAS names it, too" in report["sentence"]) == run.hang_ras(1, 0).exists() == (what == "sleep")
    missing = [note for note in report["notes"] if note.startswith("NCCL RAS: Missing communicat")]
    assert len(missing) == (what == "sleep")  # a busy machine has notes of its own


@pytest.mark.full
def test_ranks_that_wait_for_the_lock_of_a_killed_build_are_told_to_delete_it(tmp_path: Path) -> None:
    done, run = end_of(tmp_path, "lock", hang_s=3)
    assert "delete the files named lock below TORCH_EXTENSIONS_DIR" in done.stderr
    told = json.loads(allranks("diagnose", "--json", str(run.root), cwd=tmp_path).stdout)
    assert [f["id"] for f in told["findings"]] == ["extension_build_lock"]


@pytest.mark.full
@pytest.mark.parametrize("what", ["works", "speaks"])
def test_a_program_that_is_only_slow_is_not_blamed(tmp_path: Path, what: str) -> None:
    _, run = end_of(tmp_path, what, code=0)
    assert not run.hang(1).exists()


def test_a_group_that_ddp_frees_does_not_hang(tmp_path: Path) -> None:
    """torch frees it with the GIL held, while a thread of gloo needs the GIL (1 of 10 runs of accelerate's example)."""
    done = subprocess.run([sys.executable, "-c", GROUP_OF_DDP], capture_output=True, text=True, timeout=120)
    assert done.stdout == "freed\n", done.stderr


REPORTS = """
import os, sys, time, warnings
import allranks
rank = int(os.environ["RANK"])
print("token hf_" + "aB3dE5fG7hJ9kL1mN2pQ4rS6tU8vW0xY2z", flush=True)
print("iter 900: loss 9.0000, time 1.0ms", flush=True)
for step in range(1, 41):
    allranks.report(step=step, loss=4.0 / step, tokens=100)
    time.sleep(0.06)
allranks.report(step="many", loss=object())
sys.stdout.buffer.write(b"\\x1b[31moverwritten\\x1b[0m \\xff\\xfe bytes\\rwhat stays\\n")
print("is torch imported:", "torch" in sys.modules)
"""


def test_reports_reach_terminal_summary_metrics_and_page(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(REPORTS)
    spec = {"name": "s", "script": {"path": str(tmp_path / "program.py")}, "run_root": str(tmp_path / "runs")}
    done, run = train(tmp_path, spec, code=0)
    metrics = read_json(run.metrics)
    assert (metrics["progress_source"], metrics["steps"], metrics["tokens_reported"]) == ("report", 40, 2 * 40 * 100)
    assert (metrics["train_loss_first"], metrics["train_loss_last"]) == (4.0, 0.1)
    assert 500 < metrics["tokens_per_s"] < 2 * 100 / 0.06
    assert re.search(r"^steps +40 *$", done.stdout, re.MULTILINE), done.stdout
    for words in ("4.0000 -> 0.1000", "tokens/s", "what stays", "is torch imported: False", "iter 900"):
        assert words in done.stdout, done.stdout
    for words in ("hf_aB3d", "\x1b", "overwritten", "[rank"):
        assert words not in done.stdout
    assert "loss=<object object" in done.stdout  # one warning for each kind of value that is none
    written = sum(e["event"] == "progress" for e in read_events(run.events_of(1)))
    assert WRITTEN_AT_ONCE < written <= WRITTEN_AT_ONCE + 5  # of 40 reports
    assert "tokens / s" in run.report.read_text()
