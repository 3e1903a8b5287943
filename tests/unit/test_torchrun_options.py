"""The command line of `allranks torchrun`: torchrun's spellings and variables, and what is refused with a reason."""

import os
import tempfile
from pathlib import Path
from typing import Any

import pytest

from allranks.errors import RequestError
from allranks.launch.torchrun import request
from allranks.launch.torchrun.options import parse, shown_ranks
from allranks.spec.records import RunSpec
from allranks.utils.machine import Gpu, MachineFacts


@pytest.mark.parametrize(
    ("words", "environ", "expected"),
    [
        ("--standalone --rdzv-endpoint=h:1 --nproc-per-node=2 p.py", {},
         {"max_nodes": 1, "procs": "2", "address": "", "port": None}),
        ("--nproc_per_node 4 -m pkg.train --lr 1", {}, {"procs": "4", "module": True, "args": ["--lr", "1"]}),
        ("p.py x -- --nnodes=3 -m", {}, {"max_nodes": 1, "module": False, "args": ["x", "--", "--nnodes=3", "-m"]}),
        ("--nnodes 2 --node_rank=1 --master_addr=a --master-port 7 p.py", {},
         {"backend": "static", "node_rank": 1, "address": "a", "port": 7}),
        ("--nnodes=1:4 --rdzv_backend=c10d --rdzv_endpoint=[::1]:99 --rdzv_id=5 p.py", {},
         {"min_nodes": 1, "max_nodes": 4, "address": "::1", "port": 99, "run_id": "5", "node_rank": None}),
        ("p.py", {"PET_NPROC_PER_NODE": "3", "PET_MAX_RESTARTS": "2", "PET_NO_PYTHON": "1", "PET_RDZV_ID": "x"},
         {"procs": "3", "max_restarts": 2, "direct": True, "run_id": "x"}),
        ("--nproc-per-node 2 p.py", {"PET_NPROC_PER_NODE": "3"}, {"procs": "2"}),
        ("--rdzv-conf 'join_timeout=9,close_timeout=3,last_call_timeout=1.5' --shutdown-timeout 4 p.py", {},
         {"join_timeout_s": 9.0, "last_call_s": 1.5, "grace_s": 4}),
        ("--rdzv-backend etcd --rdzv-endpoint e:1 p.py", {}, {"max_nodes": 1}),  # one node meets nobody
    ],
)  # fmt: skip
def test_it_reads_torchruns_line(words: str, environ: dict[str, str], expected: dict[str, Any]) -> None:
    options = parse(words.split(), environ)
    assert {name: getattr(options, name) for name in expected} == expected
    assert options.program in ("p.py", "pkg.train")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("", "PROGRAM"),
        ("--nope p.py", "unrecognized arguments: --nope"),
        ("--nnodes 2 p.py", "must name the first node"),
        ("--nnodes 2:1 p.py", "--nnodes: expected N, or MIN:MAX"),
        ("--nnodes 2 --rdzv-backend etcd --rdzv-endpoint h:1 p.py", "Use --rdzv-backend c10d"),
        ("--tee 4 p.py", "--tee: expected 0 to 3"),
        ("--max-restarts=-1 p.py", "expected a number that is not negative"),
        ("--numa-binding node p.py", "--numa-binding is not supported; start the program with numactl"),
        ("-m --no-python p", "exclude each other"),
        ("--master-port 80000 p.py", "port 80000: the largest is 65535"),
        ("PET_STANDALONE=no p.py", "PET_STANDALONE=no: expected 0 or 1"),
        ("TORCH_ELASTIC_SHUTDOWN_TIMEOUT=abc p.py", "shutdown_timeout: expected a number"),
    ],
)
def test_it_refuses_with_a_reason(words: str, says: str) -> None:
    variables = dict(word.split("=") for word in words.split() if word[:1].isupper())
    with pytest.raises(RequestError) as refused:
        parse([word for word in words.split() if not word[:1].isupper()], variables)
    assert says in str(refused.value)


@pytest.mark.parametrize(
    ("words", "first", "second"),
    [
        ("", {0: False}, {}),
        ("--tee 3", {0: True, 1: True}, {0: True, 1: True}),
        ("-t 1:3", {0: False, 1: True}, {1: True}),
        ("--redirects 3", {}, {}),
        ("-r 0:3", {}, {}),
        ("--local-ranks-filter 1", {1: False}, {1: False}),
        ("--tee 3 --local_ranks_filter=1", {1: True}, {1: True}),
    ],
)
def test_which_ranks_are_shown(words: str, first: dict[int, bool], second: dict[int, bool]) -> None:
    options = parse([*words.split(), "p.py"], {})
    assert shown_ranks(options, 2, first_node=True) == first
    assert shown_ranks(options, 2, first_node=False) == second


def test_a_blank_behind_the_backslash_of_a_cut_line_is_named() -> None:
    with pytest.raises(RequestError, match="a backslash that continues a line"):
        request.read_node(parse(("--standalone", " "), {}))


def test_ranks_python_store_and_folder_are_those_of_torchrun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = [Gpu(index=i, name="H100", memory_bytes=1) for i in range(3)]
    facts = [MachineFacts(host="n", cpus=9, memory_bytes=1, gpus=g, cpu_model="", system="") for g in (gpus, [])]
    cpus = len(os.sched_getaffinity(0))
    assert [request.count_procs(word, facts[0]) for word in ("auto", "gpu", "cpu", "7")] == [3, 3, cpus, 7]
    assert request.count_procs("auto", facts[1]) == cpus
    words = ("--master-port 7", "--rdzv-backend c10d", "")
    places = [request.store_place(parse([*w.split(), "p.py"], {})) for w in words]
    assert [fixed for *_, fixed in places] == [True, False, False]  # else two jobs on one machine could not run
    monkeypatch.setenv("PYTHON_EXEC", "/opt/python")
    assert request.program_python() == "/opt/python"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    Path("runs").write_text("a file, as in a folder that cannot be written")
    assert request.create_folder(RunSpec(name="p"))[1].root.is_relative_to(tmp_path / "tmp")
