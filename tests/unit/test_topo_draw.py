"""The pictures show what is there, whatever stands in the text."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from allranks.nodes.topology.drawings import draw_svg, draw_text, numa_nodes
from allranks.nodes.topology.nvidia_smi import parse_topology
from allranks.planning.records import Topology, TopologyDevice
from tests.conftest import shared
from tests.unit.test_topo_parse import REAL


@pytest.mark.parametrize("row", REAL, ids=lambda row: row[0])
def test_text_and_picture_name_every_device_and_load_nothing(row: tuple) -> None:
    found = parse_topology(shared("topo", row[0]).read_text())
    text, picture = draw_text(found).plain, draw_svg(found)
    root = ElementTree.fromstring(picture)  # noqa: S314 - our own picture
    drawn = "".join(root.itertext())
    assert all(d.name in text and d.name in drawn for d in (*found.gpus, *found.nics))
    assert "url(" not in picture.replace("url(#", ""), "the picture loads a font"


def test_a100_by_switch() -> None:
    found = parse_topology(shared("topo", REAL[1][0]).read_text())
    nodes = numa_nodes(found)
    assert [[[d.name for d in (*g.gpus, *g.nics)] for g in node.groups] for node in nodes] == [
        [["GPU0", "GPU1", "NIC2", "NIC3"], ["GPU2", "GPU3", "NIC0", "NIC1"]],
        [["GPU4", "GPU5", "NIC8", "NIC9"], ["GPU6", "GPU7", "NIC4", "NIC5"]],
        [["NIC6", "NIC7"]],
    ]
    assert "every pair of GPUs, 12 links" in draw_text(found).plain
    assert [g.what for node in nodes for g in node.groups] == ["joined PCIe switches"] * 4 + ["one PCIe switch"]
    assert "GPU6: nearest card NIC4=mlx5_4, NIC5=mlx5_5 (PXB)" in draw_text(found).plain


def test_names_out_of_a_file_cannot_break_the_picture() -> None:
    nasty = TopologyDevice(name="NIC0", device='<script>"&')
    found = Topology(gpus=[TopologyDevice(name="GPU0", cpus="0-7")], nics=[nasty], links=[])
    picture = draw_svg(found)
    ElementTree.fromstring(picture)  # noqa: S314 - our own picture
    assert "<script" not in picture
