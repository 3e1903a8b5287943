"""Every form of the matrix is read and drawn; a damaged one is refused with its line; the verb and bad input."""

import json
import os
import re
import stat
import subprocess
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from allranks.errors import RequestError
from allranks.nodes.topology.advice import advise_nccl, machine_notes
from allranks.nodes.topology.drawings import draw_svg, draw_text, numa_nodes
from allranks.nodes.topology.nvidia_smi import parse_topology
from allranks.planning.records import Topology, TopologyDevice
from tests.conftest import shared, without_stdin
from tests.sampling import examples
from tests.unit import topo_texts as texts
from tests.warm import allranks

# file, GPUs, cards, links, type between GPU0 and GPU1, NUMA and cores of the last GPU
REAL = [
    ("2gpu_NV2.txt", 2, 0, 1, "NV2", None, "0-23"),
    ("a100_8gpu_10nic_with_legend_litgpt.txt", 8, 10, 153, "NV12", 1, "64-127,192-254"),
    ("aws_2gpu_PIX.txt", 2, 0, 1, "PIX", 0, "0-47"),
    ("gb10_dgx_spark_1gpu_4nic.txt", 1, 4, 4, None, 0, "0-19"),
    ("h100_8gpu_NV18_space_padded.txt", 8, 0, 28, "NV18", 1, "52-103,156-207"),
    ("pcie_8gpu_NODE_SYS_two_numa.txt", 8, 0, 28, "NODE", 1, "32-63,96-123"),
    ("rtx5060ti_4gpu_PHB_with_p2p.txt", 4, 0, 6, "PHB", 0, "0-7"),
]


def real(name: str) -> Topology:
    return parse_topology(shared("topo", name).read_text())


@pytest.mark.parametrize(("name", "gpus", "nics", "links", "kind", "numa", "cpus"), REAL)
def test_real_machines(name: str, gpus: int, nics: int, links: int, kind: Any, numa: Any, cpus: str) -> None:
    found = real(name)
    assert (len(found.gpus), len(found.nics), len(found.links)) == (gpus, nics, links)
    assert (found.gpus[-1].numa, found.gpus[-1].cpus, found.unread) == (numa, cpus, [])
    link = found.between("GPU0", "GPU1")
    assert (link.type if link else None) == kind
    assert [g.name for g in found.gpus] == [f"GPU{i}" for i in range(gpus)]
    text, picture = draw_text(found).plain, draw_svg(found)
    drawn = "".join(ElementTree.fromstring(picture).itertext())  # noqa: S314 - our own picture
    assert all(d.name in text and d.name in drawn for d in (*found.gpus, *found.nics))
    assert "url(" not in picture.replace("url(#", ""), "the picture loads a font"


def test_what_stands_in_the_real_ones_beside_the_matrix() -> None:
    a100 = real(REAL[1][0])
    assert a100.nics[9] == TopologyDevice(name="NIC9", device="mlx5_9") and a100.unread == []
    assert [link.type for link in a100.links if link.a == "GPU6" and link.b == "NIC4"] == ["PXB"]
    assert a100.nearest_nics("GPU6") == ("PXB", [a100.nics[4], a100.nics[5]])
    assert [link.type for link in real(REAL[6][0]).p2p] == ["OK"] * 6
    nodes, text = numa_nodes(a100), draw_text(a100).plain
    assert [[[d.name for d in (*g.gpus, *g.nics)] for g in node.groups] for node in nodes] == [
        [["GPU0", "GPU1", "NIC2", "NIC3"], ["GPU2", "GPU3", "NIC0", "NIC1"]],
        [["GPU4", "GPU5", "NIC8", "NIC9"], ["GPU6", "GPU7", "NIC4", "NIC5"]],
        [["NIC6", "NIC7"]],
    ]
    assert [g.what for node in nodes for g in node.groups] == ["joined PCIe switches"] * 4 + ["one PCIe switch"]
    assert "every pair of GPUs, 12 links" in text and "GPU6: nearest card NIC4=mlx5_4, NIC5=mlx5_5 (PXB)" in text


def test_names_out_of_a_file_cannot_break_the_picture() -> None:
    nasty = TopologyDevice(name="NIC0", device='<script>"&')
    picture = draw_svg(Topology(gpus=[TopologyDevice(name="GPU0", cpus="0-7")], nics=[nasty], links=[]))
    ElementTree.fromstring(picture)  # noqa: S314 - our own picture
    assert "<script" not in picture


def types(found: Topology) -> list[tuple[str, str, str]]:
    return [(link.a, link.b, link.type) for link in found.links]


def test_a_card_has_the_name_of_the_legend_or_its_own() -> None:
    seed = parse_topology(texts.SEED_L4)
    assert [nic.device for nic in seed.nics] == ["mlx5_2", "mlx5_3", "mlx5_bond_0"] and seed.unread == []
    assert seed.nearest_nics("GPU0") == ("NODE", [seed.nics[2]])
    old = parse_topology(texts.OLD_NAMED)
    assert [(n.name, n.device) for n in old.nics] == [("mlx5_0", "mlx5_0"), ("mlx5_1", "mlx5_1")]
    assert ("GPU0", "mlx5_1", "SOC") in types(old) and old.gpus[1].cpus == "20-39,60-79" and old.unread == []


def test_numa_of_the_cpu_side_is_not_that_of_the_gpus_own_memory_and_no_value_is_none() -> None:
    for text, numa, cpus in (
        (texts.GRACE, [0, 1], ["0-71", "72-143"]), (texts.COLOURED, [None] * 2, ["0-15"] * 2),
        (texts.CONTAINER, [None] * 2, [None] * 2),
    ):  # fmt: skip
        found = parse_topology(text)
        assert [g.numa for g in found.gpus] == numa and [g.cpus for g in found.gpus] == cpus
        assert found.between("GPU0", "GPU1") is not None and found.unread == []


@pytest.mark.parametrize(
    "text",
    [
        texts.BARE, texts.BARE.replace(" ", "\t"), "some-host:~$ nvidia-smi topo -m\n" + texts.BARE,
        "\x1b[4m" + texts.BARE,
        "[4m" + texts.BARE.replace("GPU1\n", "GPU1\tCPU Affinity[0m\n", 1),
        texts.BARE + "\nLegend:\n  X    = Self\n  NV#  = Connection traversing a bonded set of # NVLinks\n",
        "\tGPU0\tGPU1\nGPU0\tX\tOK\nGPU1\tOK\tX\n" + texts.BARE,
    ],
    ids=["bare", "tabs", "prompt", "coloured", "colour-without-escape", "legend", "after-p2p"],
)  # fmt: skip
def test_forms(text: str) -> None:
    found = parse_topology(text)
    assert types(found) == [("GPU0", "GPU1", "NV1")] and found.unread == []


def test_a_new_type_is_kept_and_other_lines_are_listed() -> None:
    found = parse_topology("Sat Nov 1 host7\n" + texts.BARE.replace("NV1", "FAB"))
    assert types(found) == [("GPU0", "GPU1", "FAB")]
    assert [(item.line, item.text) for item in found.unread] == [(1, "Sat Nov 1 host7")]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (texts.ROCM, "no header"), ("hello\nworld\n", "no header"), ("", "no header"),
        ("\tGPU0\tGPU1\nGPU0\tX\tOK\nGPU1\tOK\tX\n", "only the table of `nvidia-smi topo -p2p`"),
        ("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\n", "no header"),
        ("GPU0\t X \tNV3\nGPU1\tNV3\t X \n", "is missing above line 1"),
        ("GPU0 GPU1 ... NIC5\nGPU0 X NV18 ... SYS\n", "is missing above line 2"),
        (texts.BARE + texts.OLD_NAMED, "a second matrix begins in line 4"),
        (texts.BARE + "GPU0 X NV1\n", "line 4: GPU0 is not a column of the header, or has a row already"),
        (texts.BARE + "GPU2 X NV1\n", "line 4: GPU2 is not a column"),
        ("GPU0 GPU1\nGPU0 X NV1\nGPU1 SYS X\n", "line 3: GPU1-GPU0 is SYS, but GPU0-GPU1 is NV1"),
        ("GPU0 GPU1\nGPU0 X X\nGPU1 NV1 X\n", "line 2: the X of GPU0 is not in its own column"),
        ("GPU0 GPU1\nGPU0 NV1 X\n", "line 2: the X of GPU0 is not in its own column"),
        ("GPU0 GPU1 GPU2\nGPU0 X N/A SYS\n", "line 2: 'N/A' is not a link type"),
        ("GPU0 GPU1\nGPU0 X NV1 SYS\n", "line 2: the row of GPU0 has more cells"),
        ("GPU0 GPU1 GPU2\nGPU0 X NV1\n", "line 2: the row of GPU0 ends after 2 of 3 columns"),
        ("GPU0 GPU1\nGPU0 X NV1\n", "begins in line 1 has no row of GPU1"),
        ("\tGPU0\tGPU0\n" + texts.BARE, "same device twice"),
    ],
)  # fmt: skip
def test_what_is_no_whole_matrix_is_refused(text: str, said: str) -> None:
    with pytest.raises(RequestError, match=re.escape(said)):
        parse_topology(text)


def test_the_nearest_card_whatever_its_place_in_the_list() -> None:
    row = "GPU0\tX\tNV4\tSYS\tPIX\tNODE\nGPU1\tNV4\tX\tPHB\tSYS\tNODE\n"
    found = parse_topology("\tGPU0\tGPU1\tNIC0\tNIC1\tNIC2\n" + row)
    assert found.nearest_nics("GPU0") == ("PIX", [found.nics[1]])
    assert found.nearest_nics("GPU1") == ("PHB", [found.nics[0]])
    advice = {item.name: item.reason for item in advise_nccl(found)}
    assert "GPU0: NIC1 (PIX); GPU1: NIC0 (PHB)" in advice["NCCL_IB_HCA"]
    assert "NVLink is used first" in advice["NCCL_P2P_LEVEL"]
    plain = {item.name: item.reason for item in advise_nccl(parse_topology(texts.BARE.replace("NV1", "PIX")))}
    assert "there is no NVLink" in plain["NCCL_P2P_LEVEL"] and "NCCL_IB_GID_INDEX" not in plain


LINKS = st.sampled_from(["NV1", "NV18", "PIX", "PXB", "PHB", "NODE", "SYS", "C2C"])


@st.composite
def machines(draw: st.DrawFn) -> tuple[list[str], dict[tuple[int, int], str], list[tuple[str, str]], int]:
    gpus, nics = draw(st.integers(1, 10)), draw(st.integers(0, 6))
    names = [f"GPU{i}" for i in range(gpus)] + [f"NIC{i}" for i in range(nics)]
    links = {(a, b): draw(LINKS) for a in range(len(names)) for b in range(a + 1, len(names))}
    sides = [(f"{i * 8}-{i * 8 + 7},{i * 8 + 100}-{i * 8 + 107}", str(i % 2)) for i in range(gpus)]
    return names, links, sides, draw(st.integers(0, 2))


def printed(machine: tuple, tabs: bool, nic_rows: bool) -> str:
    """As nvidia-smi would print it, with 0 to 2 of the affinity columns."""
    names, links, sides, columns = machine
    rows = [["", *names, *["CPU Affinity", "NUMA Affinity"][:columns]]]
    for a, name in enumerate(names):
        if name.startswith("NIC") and not nic_rows:
            continue
        cells = [" X " if a == b else links[min(a, b), max(a, b)] for b in range(len(names))]
        rows.append([name, *cells, *(sides[a][:columns] if a < len(sides) else [""] * columns)])
    return "\n".join("\t".join(row) if tabs else "".join(f"{cell:<22}" for cell in row) for row in rows) + "\n"


@given(machines(), st.booleans(), st.booleans())
@settings(max_examples=examples(80), deadline=None)
def test_any_machine_comes_back_as_it_was_printed(machine: tuple, tabs: bool, nic_rows: bool) -> None:
    names, links, sides, columns = machine
    found = parse_topology(printed(machine, tabs, nic_rows))
    gpus = len(sides)
    assert [d.name for d in (*found.gpus, *found.nics)] == names
    want = {(names[a], names[b]): kind for (a, b), kind in links.items() if nic_rows or a < gpus}
    assert {(link.a, link.b): link.type for link in found.links} == want
    if columns > 0:
        assert [g.cpus for g in found.gpus] == [cpus for cpus, _ in sides]
    if columns > 1:
        assert [g.numa for g in found.gpus] == [int(numa) for _, numa in sides]
    assert found.unread == []


@given(machines(), st.data())
@settings(max_examples=examples(60), deadline=None)
def test_a_cut_machine_is_never_read_as_another(machine: tuple, data: st.DataObject) -> None:
    names, links, _, _ = machine
    text = printed(machine, True, True)
    cut = text[: data.draw(st.integers(0, len(text)))]
    try:
        found = parse_topology(cut)
    except RequestError:
        return
    whole = {frozenset((names[a], names[b])): kind for (a, b), kind in links.items()}
    for link in found.links:
        real = whole[frozenset((link.a, link.b))]
        assert link.type == real or real.startswith(link.type), "only the last cell may be cut itself"
    gpus = sum(name.startswith("GPU") for name in names)
    assert len(found.gpu_pairs()) == gpus * (gpus - 1) // 2


def test_advice_begins_with_what_matters_on_this_machine() -> None:
    def notes(found: Topology) -> list[str]:
        return machine_notes(found, advise_nccl(found))

    pcie = notes(real("pcie_8gpu_NODE_SYS_two_numa.txt"))
    assert "GPU0-3; GPU4-7" in pcie[0] and "GPU4-7: 32-63,96-123" in pcie[1]
    assert notes(real("2gpu_NV2.txt")) == [], "all GPUs alike, and one set of cores"
    assert "GPU0-1: no network card behind the same PCIe switch" in " ".join(notes(parse_topology(texts.SEED_L4)))
    three = "\tGPU0\tGPU1\tGPU2\nGPU0\tX\tNV4\tSYS\nGPU1\tNV4\tX\t{0}\nGPU2\tSYS\t{0}\tX\n"
    assert "GPU0-1; GPU2" in notes(parse_topology(three.format("SYS")))[0]
    assert "does not connect all pairs" in notes(parse_topology(three.format("NV4")))[0]


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
    done = topo("-", data="".join(f"step {i} done\n" for i in range(9)) + texts.SEED_L4)
    assert done.returncode == 0, done.stderr
    assert "line 3: step 2 done" in done.stdout and "6 more lines, up to line 9" in done.stdout
    closed = without_stdin("topo")
    assert closed.returncode == 2 and "standard input is closed" in closed.stderr and "Traceback" not in closed.stderr
