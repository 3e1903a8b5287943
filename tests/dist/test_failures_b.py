"""Failures 21 to 40 on two real ranks: what is said, that diagnose names it, and that allranks does otherwise."""

import json
from pathlib import Path
from typing import Any

import pytest

from allranks.analysis.diagnose import diagnose
from allranks.rundir.files import read_json
from tests.dist.harness import allranks, rows_spec, run_ranks, step_events, train
from tests.dist.plants import HAVE_DEEPSPEED, needs_deepspeed

ENGINES = ["pytorch_ddp", "pytorch_zero3", "hf_trainer", *(["deepspeed_zero2"] if HAVE_DEEPSPEED else [])]


@pytest.fixture(scope="module")
def happened(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    folder = tmp_path_factory.mktemp("failures")
    return folder, run_ranks("happened", 2, folder, module="failures_b", folder=folder, names=ENGINES)


def named(folder: Path, texts: list[str]) -> Any:
    """The first finding in logs that hold these tracebacks, one a rank."""
    folder.mkdir()
    for rank, text in enumerate(texts):
        (folder / f"n1.rank{rank}.log").write_text(text)
    return diagnose([folder]).findings[0]


def test_float32_inputs_are_named_and_token_ids_need_no_cast(happened: Any, tmp_path: Path) -> None:
    texts = [rank["dtype"] for rank in happened[1]]
    assert all("must have the same dtype" in text for text in texts)
    assert named(tmp_path / "x", texts).id == "dtype_mismatch"
    assert [rank["dtype_ours"] for rank in happened[1]] == ["", ""]


def test_ranks_with_other_models_are_named_and_refused_at_step_0(happened: Any, tmp_path: Path) -> None:
    texts = [rank["models"] for rank in happened[1]]
    assert all("params, while rank" in text or "appears not to match" in text for text in texts), texts
    assert named(tmp_path / "x", texts).id == "model_differs_between_ranks"
    ours = [rank["models_ours"] for rank in happened[1]]  # of two ranks nobody knows which is the odd one
    for words in ("the weights are not equal on all ranks: rank", "of 30 tensors, first"):
        assert all(words in text for text in ours), ours
    assert named(tmp_path / "y", ours).id == "model_differs_between_ranks"


def test_a_checkpoint_by_rank_0_alone_is_named(happened: Any, tmp_path: Path) -> None:
    text = happened[1][0]["checkpoint"]
    assert "save_checkpoint" in text and "all_gather" in text
    log = "step 2 loss 2.1\nsaving the checkpoint of step 2\n" + text
    assert named(tmp_path / "x", [log]).id == "checkpoint_collective"


def test_nothing_of_allranks_sets_a_device_on_cpus(happened: Any, tmp_path: Path) -> None:
    texts = [rank["set_device"] for rank in happened[1]]
    assert all("module 'torch.cpu' has no attribute 'set_device'" in text for text in texts)
    assert named(tmp_path / "x", texts).id == "library_missing"
    for rank in happened[1]:
        assert len(rank["set_device_ours"]) == len(ENGINES)
        assert all(norm > 0 for norms in rank["set_device_ours"] for norm in norms)


@needs_deepspeed
def test_what_deepspeed_says_of_its_configuration_is_named(tmp_path: Path) -> None:
    found = run_ranks("of_deepspeed", 2, tmp_path, module="failures_b", stage=2)
    assert named(tmp_path / "x", [rank["optimizer"] for rank in found]).id == "deepspeed_needs_optimizer"
    assert named(tmp_path / "y", [rank["batch"] for rank in found]).id == "deepspeed_batch_mismatch"
    assert all(rank["hostfile"] == "" and all(norm > 0 for norm in rank["ours"]) for rank in found)
    harmless = diagnose(sorted(tmp_path.glob("of_deepspeed.*.out")))
    assert "deepspeed_hostfile" in {b.id for b in harmless.benign} and harmless.findings == []


OWN = """
import ctypes, os, pathlib, signal, struct, sys, time
folder = pathlib.Path(sys.argv[1])

def stale(path):
    # A file's handle, as a server of NFS keeps it; the file is then removed, and the kernel asked for it.
    path.write_text("x")
    libc = ctypes.CDLL(None, use_errno=True)
    handle = ctypes.create_string_buffer(struct.pack("Ii", 128, 0) + bytes(128))
    libc.name_to_handle_at(-100, bytes(path), handle, ctypes.byref(ctypes.c_int()), 0)
    mount = os.open(folder, os.O_RDONLY)
    path.unlink()
    if libc.open_by_handle_at(mount, handle, os.O_RDONLY) < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(path))

if os.environ["RANK"] == "1":
    while not (folder / "written").exists():  # or rank 0 might be ended before it has begun
        time.sleep(0.05)
    stale(folder / "rows.arrow")
else:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.stdout.write("the last line, without its end and never flushed")
    (folder / "written").touch()
    while '"error"' not in "".join(p.read_text() for p in folder.glob("runs/*/events/rank1.jsonl")):
        time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_stale_handle_is_named_and_a_killed_rank_loses_no_word(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    spec = {
        "name": "own",
        "script": {"path": str(tmp_path / "own.py"), "args": [str(tmp_path)]},
        "run_root": str(tmp_path / "runs"),
        # nobody's environment does what the agent must do
        "cluster": {"procs_per_node": 2, "env": {"PYTHONUNBUFFERED": ""}},
    }
    done, run = train(tmp_path, spec)
    if "Operation not permitted" in done.stderr:
        pytest.skip("opening a file by its handle needs root")
    assert done.returncode == 1
    assert "rank 1" in done.stderr and "[Errno 116] Stale file handle" in done.stderr, done.stderr
    finding = diagnose([run.root]).findings[0]
    assert (finding.id, finding.rank) == ("stale_file_handle", 1)
    assert run.rank_logs(1)[0].read_text().endswith("the last line, without its end and never flushed")
    told = json.loads(allranks("diagnose", run.name, "--json", cwd=tmp_path).stdout)
    assert told["findings"][0]["id"] == "stale_file_handle"


@pytest.mark.full
def test_compiling_is_no_training_time(tmp_path: Path) -> None:
    """torch.compile: one of the first steps waits for the compiler, and the rate knows nothing of it."""
    spec = rows_spec(
        tmp_path, train={"max_steps": 12}, data={"packing": "isolated", "max_length": 100}, eval={"samples": 0},
        checkpoint={"mode": "none"}, model={"compile": True},
    )  # fmt: skip
    _, run = train(tmp_path, spec, code=0)
    times = [e["step_time_s"] for e in step_events(run)]
    metrics = read_json(run.metrics)
    assert max(times[:5]) > 10 * metrics["step_time_s"]["median"], times
    assert metrics["warmup_s"] >= times[0]
    assert (metrics["compiled"], metrics["compile_reason"]) == (True, "model.compile: true")
    # one shape: packed rows are padded to the maximum length on CPUs, too
    assert metrics["tokens_real"] + metrics["tokens_padded"] == 12 * 2 * spec["train"]["micro_batch_size"] * 100
