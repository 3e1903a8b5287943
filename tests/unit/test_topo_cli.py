"""The verb: its document, its exit codes, and input that is bad in every way."""

from __future__ import annotations

import json
import os
import stat
import subprocess
from pathlib import Path

import pytest

from tests.conftest import without_stdin
from tests.unit import topo_texts as texts
from tests.warm import allranks


def topo(*words: str | Path, data: str | bytes = "", path: str | None = None) -> subprocess.CompletedProcess[str]:
    return allranks("topo", *words, stdin=data, env={"PATH": path} if path else {})


def test_the_document(tmp_path: Path) -> None:
    (tmp_path / "m.txt").write_text(texts.SEED_L4)
    done = topo(tmp_path / "m.txt", "--json", "--svg", tmp_path / "m.svg")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["gpus"][1]["name"] == "GPU1" and document["gpus"][1]["numa"] == 1
    assert document["gpus"][0]["cpus"] == "0-31,64-95" and document["nics"][2]["device"] == "mlx5_bond_0"
    assert {"a": "GPU0", "b": "GPU1", "type": "SYS"} in document["links"] and document["unread"] == []
    for item in document["advice"]:
        assert set(item) == {"variable", "value", "reason", "source", "risk"}
        assert item["reason"] and item["risk"] and item["source"].startswith("https://")
        assert item["value"] is None, "a matrix alone speaks for nothing"
    p2p = next(item for item in document["advice"] if item["variable"] == "NCCL_P2P_DISABLE")
    assert "not evidence" in p2p["reason"] and "doctor SPEC --collectives" in p2p["reason"]
    assert (tmp_path / "m.svg").read_text().startswith("<svg")


def test_the_picture_on_a_terminal_and_through_a_pipe() -> None:
    done = topo("-", data=texts.SEED_L4)
    text = done.stdout
    assert done.returncode == 0 and "NUMA node 1  cores 32-63,96-127" in text and "NIC2=mlx5_bond_0" in text
    assert "\x1b" not in text and "NCCL_IB_GID_INDEX" in text


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "there is no matrix"), (bytes(range(256)) * 20, "is not UTF-8 text (byte 128)"),
        ("Gerät\n".encode("latin-1") + texts.BARE.encode(), "is not UTF-8 text (byte 3)"),
        (bytes(4 * 2**20 + 1), "larger than 4 MiB"),
        (texts.SEED_L4[:150].encode(), "begins in line 1 has no row of GPU1"),
        ("folder", "Is a directory"), (None, "No such file"),
    ],
    ids=["empty", "binary", "latin1", "huge", "cut", "folder", "none"],
)  # fmt: skip
def test_bad_input_is_said(tmp_path: Path, content: bytes | str | None, said: str) -> None:
    path = tmp_path if content == "folder" else tmp_path / "m.txt"
    if isinstance(content, bytes):
        path.write_bytes(content)
    done = topo(path)
    assert done.returncode == 2 and said in done.stderr
    assert "Traceback" not in done.stderr and done.stderr.count("\n") == 1 and done.stdout == ""


def test_without_a_driver_and_with_one(tmp_path: Path) -> None:
    done = topo(path=str(tmp_path))
    assert done.returncode == 3 and "no nvidia-smi" in done.stderr
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n[ \"$*\" = 'topo -m' ] || exit 9\nprintf '%s' '{texts.BARE}'\n")
    program.chmod(program.stat().st_mode | stat.S_IEXEC)
    done = topo("--json", path=f"{tmp_path}:{os.environ['PATH']}")
    assert done.returncode == 0 and len(json.loads(done.stdout)["gpus"]) == 2
    assert "NCCL_P2P_DISABLE" in done.stdout
    program.write_text("#!/bin/sh\necho NVIDIA-SMI has failed; exit 9\n")
    done = topo(path=f"{tmp_path}:{os.environ['PATH']}")
    assert done.returncode == 3 and "has failed" in done.stderr


def test_a_matrix_from_standard_input_behind_a_log() -> None:
    log = "".join(f"step {i} done\n" for i in range(9))
    done = topo("-", data=log + texts.SEED_L4)
    assert done.returncode == 0, done.stderr
    assert "line 3: step 2 done" in done.stdout and "6 more lines, up to line 9" in done.stdout
    closed = without_stdin("topo")
    assert closed.returncode == 2 and "standard input is closed" in closed.stderr and "Traceback" not in closed.stderr
