"""Damaged and invented matrices, logs and node facts, for as long as one likes: nothing but a refusal may come of them.

python -c 'from tests.unit.topo_fuzz import fuzz; print(fuzz(600))'
"""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from xml.etree import ElementTree

import msgspec

from allranks.cli.topo import as_document
from allranks.errors import RequestError
from allranks.nodes.network_verification import NetworkLogParser, compare_with_policy
from allranks.nodes.preflight.network_policy import facts_of_nodes
from allranks.nodes.records import Probe
from allranks.nodes.topology.advice import advise_nccl
from allranks.nodes.topology.drawings import draw_svg, draw_text
from allranks.nodes.topology.nvidia_smi import parse_topology
from allranks.planning.env_vars import ExpectedNetwork, NetworkJob
from allranks.planning.network_policy import decide_network_policy
from tests.conftest import REPO
from tests.unit import topo_texts as texts
from tests.unit.test_fabric_observed import IB_LINES, SOCKET_LINES

WORDS = (  # noqa: SIM905 - shorter than a list
    "X|NV18|NV999|SYS|PIX|N/A|GPU0|GPU7|NIC3|mlx5_0|0-31,64-95|OK|CNS|CPU Affinity|NUMA Affinity|GPU NUMA ID|Legend:|NIC0: mlx5_0|"
    "FOO = bar|-|,|$ nvidia-smi topo -p2p r|<svg>|]]>|\\n"
).split("|")
WORDS += ["\t", " ", "\n", "|", "\x1b[4m", "\0", "é", "\u0663", "GPU\u0663", "9" * 40, "\r", "\u2028"]
GIDS = ["", "zz", "fe80::1", "::ffff:10.0.0.1", "2001:db8::1", "0:0:0:0:0:0:0:0"]
KINDS = ["RoCE v2", "IB/RoCE v1", ""]


def seeds() -> list[str]:
    """Matrices to damage: those of the tests, and real ones where they are at hand."""
    own = [value for name, value in vars(texts).items() if name.isupper()]
    real = REPO.parent / "shared" / "data" / "topo"
    return own + [path.read_text() for path in sorted(real.glob("*"))]


def damaged(random_: random.Random, text: str) -> str:
    """The text after a few changes of bytes, words and lines."""
    for _ in range(random_.randint(1, 8)):
        kind, at = random_.randrange(8), random_.randint(0, len(text))
        if kind == 0:
            text = text[:at]
        elif kind == 1:
            text = text[:at] + random_.choice(WORDS) + text[at:]
        elif kind == 2:
            text = text[:at] + text[at + random_.randint(1, 30) :]
        elif kind == 3:
            text = text[:at] + chr(random_.choice([*range(1, 256), 0x2003, 0xFEFF, 0x10FFFF])) + text[at + 1 :]
        elif kind == 4:
            lines = text.split("\n")
            random_.shuffle(lines)
            text = "\n".join(lines)
        elif kind == 5:
            lines = text.split("\n")
            lines.insert(random_.randint(0, len(lines)), random_.choice(lines))
            text = "\n".join(lines)
        elif kind == 6:
            text = text.replace(
                random_.choice(["\t", " ", "GPU", "NIC", "X", "0"]), random_.choice(WORDS), random_.randint(1, 5)
            )
        else:
            text = " ".join(random_.choice(WORDS) for _ in range(random_.randint(1, 60)))
    return text[:20_000]


def try_matrix(text: str) -> str:
    """What came of one text: read, or refused. Anything else is raised."""
    try:
        found = parse_topology(text)
    except RequestError:
        return "refused"
    names = [device.name for device in (*found.gpus, *found.nics)]
    assert len(set(names)) == len(names), names
    assert all(link.a != link.b and {link.a, link.b} <= set(names) for link in found.links)
    pairs = [frozenset((link.a, link.b)) for link in found.links]
    assert len(set(pairs)) == len(pairs)
    draw_text(found)
    ElementTree.fromstring(draw_svg(found))  # noqa: S314 - our own picture
    json.dumps(as_document(found, advise_nccl(found)))
    return "read"


def try_node(random_: random.Random) -> str:
    """Facts of nodes out of thin air, through the policy."""
    pick = random_.choice
    gids = [[random_.randint(0, 9), pick(GIDS), pick(KINDS), "e"] for _ in range(random_.randint(0, 4))]
    rows = [
        {
            "port": random_.choice(["mlx5_0:1", "efa_0:1", ":", "x"]),
            "state": random_.choice(["4: ACTIVE", "1: DOWN", ""]),
            "rate": random_.choice(["100 Gb/sec", "", "x"]),
            "link_layer": random_.choice(["InfiniBand", "Ethernet", "Unspecified", ""]),
            "gids": gids,
        }
        for _ in range(random_.randint(0, 3))
    ]
    probes = []
    for number in range(random_.randint(1, 3)):
        raw = {
            "host": f"n{number}",
            "node_id": number,
            "infiniband": random_.sample(rows, random_.randint(0, len(rows))),
            "topo": random_.choice([None, "", damaged(random_, random_.choice(seeds()))]),
            "gpus": [{"name": "g"}] * random_.randint(0, 3),
            "gpu_pci": [
                {
                    "bus": "b",
                    "iommu": random_.choice([None, "DMA", "identity"]),
                    "acs": random_.choice([None, [], ["x"]]),
                }
            ],
            "nccl": random_.choice([None, "2.19.3", "2.27.5", "x.y", ""]),
        }
        probes.append(msgspec.convert(raw, Probe))
    job = NetworkJob(nodes=len(probes), device="cuda", backend=random_.choice(["nccl", "gloo"]))
    policy = decide_network_policy(job, facts_of_nodes(probes, None, {"n0": random_.choice([[], ["GPU0-GPU1"]])}))
    for node in policy.nodes:
        assert len({item.name for item in node.environment}) == len(node.environment), "a variable decided twice"
        assert all(item.reason and item.risk for item in node.environment)
    families = {node.expected.transport for node in policy.nodes}
    assert len(families) == 1, "nodes that expect different networks"
    return "decided"


def try_log(random_: random.Random) -> str:
    """Damaged lines of NCCL."""
    collector = NetworkLogParser("n1")
    collector.take(damaged(random_, IB_LINES + SOCKET_LINES).splitlines())
    compare_with_policy(
        {"n1": ExpectedNetwork(transport="RoCE", interface="eth0", devices=["a:1"], inside="NVLink")},
        [collector.observed()],
    )
    return "log"


def fuzz(seconds: float, seed: int = 0) -> dict[str, object]:
    """Goes on for that long; gives how many inputs ended how, and the slowest.

    Raises:
        AssertionError: with the input, if one of them had any other end.
    """
    random_ = random.Random(seed)
    ends: Counter[str] = Counter()
    slowest = (0.0, 0)
    deadline = time.monotonic() + seconds
    base = seeds()
    while time.monotonic() < deadline:
        text = damaged(random_, random_.choice(base))
        began = time.perf_counter()
        try:
            ends[try_matrix(text)] += 1
        except Exception as error:
            raise AssertionError(f"{type(error).__name__}: {error} for {text!r}") from error
        slowest = max(slowest, (time.perf_counter() - began, len(text)))
        if sum(ends.values()) % 5 == 0:
            ends[try_node(random_)] += 1
            ends[try_log(random_)] += 1
    return {"inputs": sum(ends.values()), **ends, "slowest_s": round(slowest[0], 3), "of_characters": slowest[1]}
