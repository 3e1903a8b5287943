"""The environment policy: what follows from what the nodes have, and what does not."""

import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from allranks.nodes.network.choose import choose_network
from allranks.nodes.network.facts import facts_of_nodes, policy_for_nodes
from allranks.nodes.topology.nvidia_smi import parse_topology
from allranks.planning import network_policy
from allranks.planning.env_vars import EnvVar, env_warnings
from allranks.planning.network_policy import NetworkJob, NetworkPolicy, decide_network_policy, provisional_policy
from allranks.planning.planner import make_plan
from allranks.planning.records import NetworkInterface, NodeAddress, NodeFacts, RdmaGid, RdmaPort
from allranks.spec import parse_spec
from allranks.utils.machine import MachineFacts
from tests.conftest import shared
from tests.unit import topo_texts as texts
from tests.unit.preflight_nodes import interface
from tests.unit.preflight_nodes import node as probe

TWO = NetworkJob(nodes=2, device="cuda", backend="nccl")
ONE = NetworkJob(nodes=1, device="cuda", backend="nccl")


def gid4(index: int, address: str, version: int = 2) -> RdmaGid:
    first, second, third, fourth = (int(part) for part in address.split("."))
    text = f"0000:0000:0000:0000:0000:ffff:{first:02x}{second:02x}:{third:02x}{fourth:02x}"
    return RdmaGid(index=index, gid=text, type=f"RoCE v{version}" if version == 2 else "IB/RoCE v1")


def local6(index: int, version: int) -> RdmaGid:
    kind = "RoCE v2" if version == 2 else "IB/RoCE v1"
    return RdmaGid(index=index, gid="fe80:0000:0000:0000:0a3f:7cff:fe12:3456", type=kind)


def port(device: str, layer: str, active: bool = True, **more: Any) -> RdmaPort:
    return RdmaPort(device=device, port=1, active=active, layer=layer, gbit=100.0, **more)


def ib(device: str, active: bool = True) -> RdmaPort:
    return port(device, "InfiniBand", active)


def roce(device: str, *gids: RdmaGid, active: bool = True) -> RdmaPort:
    return port(device, "Ethernet", active, gids=list(gids))


def usual(address: str) -> list[RdmaGid]:
    """The table of a RoCE card with one address: link-local first, then IPv4, each in both versions."""
    return [local6(0, 1), local6(1, 2), gid4(2, address, 1), gid4(3, address, 2)]


def node(number: int, *ports: RdmaPort, interface: str = "eth0", **more: Any) -> NodeFacts:
    address = f"10.0.0.{number}"
    card = NetworkInterface(name=interface, address=address, prefix=24, speed_mbit=100_000)
    seat = NodeAddress(interface=interface, address=address)
    base = NodeFacts(host=f"n{number}", interfaces=[card], ports=list(ports), gpus=8, seat=seat)
    return msgspec.structs.replace(base, **more)


def of(policy: NetworkPolicy, host: str = "n1") -> dict[str, EnvVar]:
    found = policy.of(host)
    assert found is not None
    return {item.name: item for item in found.environment}


def is_set(policy: NetworkPolicy, host: str = "n1") -> dict[str, str]:
    return {name: item.value for name, item in of(policy, host).items() if item.value is not None}


def two(*nodes: NodeFacts, **job: Any) -> NetworkPolicy:
    return decide_network_policy(msgspec.structs.replace(TWO, **job), list(nodes))


def one(**changes: Any) -> NetworkPolicy:
    return decide_network_policy(ONE, [node(1, **changes)])


def test_every_decision_has_reason_source_and_risk() -> None:
    policy = two(node(1, ib("mlx5_0")), node(2))
    for item in [*provisional_policy(TWO), *(item for one in policy.nodes for item in one.environment)]:
        assert item.reason and item.risk and item.documentation.startswith("https://"), item

    def source(job: NetworkJob) -> dict[str, str]:
        return {item.name: item.source for item in provisional_policy(job)}

    assert source(TWO)["GLOO_SOCKET_IFNAME"] == source(TWO)["NCCL_SOCKET_IFNAME"] == "nodes"
    assert source(ONE)["GLOO_SOCKET_IFNAME"] == "policy"
    assert source(msgspec.structs.replace(TWO, interface="eno1"))["GLOO_SOCKET_IFNAME"] == "spec"


def test_interfaces_are_each_nodes_own() -> None:
    found = two(node(1, interface="ibp65s0"), node(2, interface="ibp161s0"))
    assert is_set(found, "n1")["NCCL_SOCKET_IFNAME"] == "=ibp65s0"
    assert is_set(found, "n2")["NCCL_SOCKET_IFNAME"] == "=ibp161s0"
    assert is_set(found, "n2")["GLOO_SOCKET_IFNAME"] == "ibp161s0", "Gloo knows no '='"
    assert is_set(one(seat=None)) == {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=lo", "NCCL_DEBUG": "INFO"}
    before = {item.name: item for item in provisional_policy(ONE)}["NCCL_SOCKET_IFNAME"]
    assert before.value == "=lo" and "external interface" in before.reason, "plan shows it with its reason"
    user = msgspec.structs.replace(ONE, user={"NCCL_SOCKET_IFNAME": "eth1"})
    assert is_set(decide_network_policy(user, [node(1, seat=None)]))["NCCL_SOCKET_IFNAME"] == "eth1"


def test_infiniband_everywhere_needs_nothing() -> None:
    found = two(node(1, ib("mlx5_0"), ib("mlx5_1")), node(2, ib("mlx5_3"), ib("mlx5_4")))
    assert not {"NCCL_NET", "NCCL_IB_HCA", "NCCL_IB_DISABLE", "NCCL_IB_GID_INDEX"} & set(is_set(found))
    expected = found.nodes[1].expected
    assert (expected.transport, expected.devices, found.notes) == ("InfiniBand", ["mlx5_3:1", "mlx5_4:1"], [])


def test_a_node_without_rdma_takes_all_to_sockets_and_is_named() -> None:
    found = two(node(1, ib("mlx5_0")), node(2, ib("mlx5_0", active=False)))
    assert is_set(found, "n1")["NCCL_NET"] == is_set(found, "n2")["NCCL_NET"] == "Socket"
    assert "n2 has no active RDMA port" in of(found)["NCCL_NET"].reason and "cluster.slurm.exclude" in found.notes[0]
    nowhere = two(node(1), node(2))
    assert "NCCL_NET" not in is_set(nowhere) and nowhere.nodes[0].expected.transport == "Socket"


def test_a_port_of_another_kind_is_left_out_on_the_node_that_has_it() -> None:
    found = two(node(1, ib("mlx5_0"), roce("mlx5_bond_0", *usual("10.1.0.1"))), node(2, ib("mlx5_0")))
    assert is_set(found, "n1")["NCCL_IB_HCA"] == "=mlx5_0:1" and "NCCL_IB_HCA" not in is_set(found, "n2")
    assert "mlx5_bond_0:1 (RoCE)" in of(found)["NCCL_IB_HCA"].reason


def test_a_roce_port_without_an_address_is_left_out() -> None:
    ports = [roce("mlx5_0", *usual("10.0.0.1")), roce("mlx5_1", local6(0, 1), local6(1, 2))]
    found = two(node(1, *ports), node(2, roce("mlx5_0", *usual("10.0.0.2"))))
    assert is_set(found)["NCCL_IB_HCA"] == "=mlx5_0:1" and "no routable address" in of(found)["NCCL_IB_HCA"].reason
    assert "have different numbers" not in " ".join(found.notes)
    assert "n1 2, n2 1" in two(node(1, ib("a"), ib("b")), node(2, ib("a"), ib("b", active=False))).notes[0]


def test_the_gid_index_is_ncclss_own_since_2_21() -> None:
    found = two(*(node(n, roce("mlx5_0", *usual(f"10.0.0.{n}")), nccl=(2, 27, 3)) for n in (1, 2)))
    assert "NCCL_IB_GID_INDEX" not in is_set(found) and "mlx5_0:1 3" in of(found)["NCCL_IB_GID_INDEX"].reason
    assert found.nodes[0].expected.transport == "RoCE"
    v1 = two(*(node(n, roce("mlx5_0", local6(0, 1), gid4(1, f"10.0.0.{n}", 1))) for n in (1, 2)))
    assert "NCCL_IB_GID_INDEX" not in is_set(v1) and "no RoCE v2 address over IPv4" in " ".join(v1.notes)


def test_an_old_nccl_is_told_each_nodes_own_index() -> None:
    first = node(1, roce("mlx5_0", *usual("10.0.0.1")), nccl=(2, 19, 3))
    moved = [local6(0, 1), local6(1, 2), gid4(4, "10.0.0.2", 1), gid4(5, "10.0.0.2", 2)]
    found = two(first, node(2, roce("mlx5_0", *moved), nccl=(2, 19, 3)))
    assert (is_set(found, "n1")["NCCL_IB_GID_INDEX"], is_set(found, "n2")["NCCL_IB_GID_INDEX"]) == ("3", "5")
    found = two(first, node(2, roce("mlx5_0", *usual("10.0.0.2")), roce("mlx5_1", *moved), nccl=(2, 19, 3)))
    assert "NCCL_IB_GID_INDEX" not in is_set(found, "n2")
    assert "different indices" in of(found, "n2")["NCCL_IB_GID_INDEX"].reason


def test_sys_is_no_evidence() -> None:
    for text in (texts.SEED_L4, shared("topo", "pcie_8gpu_NODE_SYS_two_numa.txt").read_text()):
        found = of(one(topology=parse_topology(text)))
        assert found["NCCL_P2P_DISABLE"].value is None and "NCCL_P2P_LEVEL" not in found
        assert "not evidence" in found["NCCL_P2P_DISABLE"].reason


def test_peer_to_peer_goes_off_on_evidence() -> None:
    far = parse_topology(texts.SEED_L4)
    off = of(one(topology=far, copies="failed", failed_pairs=["GPU0-GPU1"]))["NCCL_P2P_DISABLE"]
    assert off.value == "1" and "GPU0-GPU1" in off.reason
    both: dict[str, Any] = {"topology": far, "acs": ["0000:00:01.0"], "iommu": True}
    assert is_set(one(**both))["NCCL_P2P_DISABLE"] == "1"
    assert "NCCL_P2P_DISABLE" not in is_set(one(**both, copies="ok")), "a copy that works outweighs a register"
    for doubt in ({"acs": ["0000:00:01.0"], "iommu": False}, {"acs": [], "iommu": True}, {"acs": None, "iommu": True}):
        assert "NCCL_P2P_DISABLE" not in is_set(one(topology=far, **doubt))
    whole = parse_topology(shared("topo", "h100_8gpu_NV18_space_padded.txt").read_text())
    assert not {"NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL"} & set(is_set(one(topology=whole, acs=["x"], iommu=True)))
    part = parse_topology("\tGPU0\tGPU1\tGPU2\nGPU0\tX\tNV4\tSYS\nGPU1\tNV4\tX\tSYS\nGPU2\tSYS\tSYS\tX\n")
    pcie, nvlink = (is_set(one(topology=part, copies="failed", failed_pairs=[f"GPU0-{b}"])) for b in ("GPU2", "GPU1"))
    assert pcie["NCCL_P2P_LEVEL"] == "NVL" and "NCCL_P2P_DISABLE" not in pcie
    assert nvlink["NCCL_P2P_DISABLE"] == "1", "NVLink itself is what failed"


def test_what_the_user_or_the_node_says_wins() -> None:
    nodes = [node(1, ib("mlx5_0")), node(2, ib("mlx5_0"))]
    forced = two(*nodes, user={"NCCL_IB_DISABLE": "1", "NCCL_DEBUG": "WARN"})
    assert forced.nodes[0].expected.transport == "Socket" and is_set(forced)["NCCL_DEBUG"] == "WARN"
    assert of(forced)["NCCL_DEBUG"].source == "user"
    conf = two(nodes[0], node(2, ib("mlx5_0"), conf={"NCCL_NET": "Socket"}))
    assert "/etc/nccl.conf of n2" in conf.nodes[0].expected.why
    assert is_set(two(*nodes, interface="eno1"))["NCCL_SOCKET_IFNAME"] == "=eno1"


def test_gloo_alone_gets_its_interface_and_nothing_of_nccl() -> None:
    found = decide_network_policy(NetworkJob(nodes=2), [node(1, interface="eno1"), node(2)])
    assert is_set(found) == {"GLOO_SOCKET_IFNAME": "eno1"} and found.nodes[0].expected.interface == "eno1"
    line = "network {}: GLOO_SOCKET_IFNAME={}; expected: Socket"
    assert network_policy.policy_lines(found) == [line.format("n1", "eno1"), line.format("n2", "eth0")]


@pytest.mark.parametrize("name", ["NCCL_TIMEOUT", "NCCL_NET_DISABLE", "PYTORCH_DIST_BACKEND", "GLOO_USE_IPV6"])
def test_variables_that_nothing_reads(name: str) -> None:
    (said,) = env_warnings({name: "1"})
    assert said.startswith(f"cluster.env.{name}: ") and "; instead: " in said
    spec: dict[str, Any] = {"model": {"name": "tiny:mistral"}, "data": {"source": "builtin:instructions"}}
    facts = MachineFacts(host="n1", cpus=8, memory_bytes=2**34, gpus=[], cpu_model="x", system="Linux")
    plan = make_plan(parse_spec({**spec, "cluster": {"env": {name: "1"}}}), facts)
    assert any(name in warning for warning in plan.warnings)


def test_variables_that_do_harm() -> None:
    harmless = {"NCCL_P2P_DISABLE": "0", "NCCL_IB_GID_INDEX": "-1", "GLOO_SOCKET_IFNAME": "eth0", "MY_OWN": "1"}
    assert env_warnings(harmless) == []
    for name, value, words in (
        ("NCCL_SOCKET_IFNAMES", "x", "did you mean NCCL_SOCKET_IFNAME?"),
        ("GLOO_SOCKET_IFNAME", "^lo,docker0", "only accepts exact names"),
        ("NCCL_P2P_DISABLE", "1", "is slow on nodes with NVLink"),
        ("NCCL_IB_GID_INDEX", "3", "differs between nodes"),
    ):
        (warning,) = env_warnings({**harmless, name: value})
        assert words in warning


def test_from_the_probes_answers() -> None:
    up, down = roce("mlx5_0", local6(0, 1), gid4(3, "10.0.0.1")), roce("mlx5_0", active=False)
    first = probe(1, infiniband=[up], nccl="2.27.3", topo=texts.SEED_L4, gpus=[{"name": "L4"}] * 2)
    gpu = {"bus": "0000:17:00.0", "iommu": "DMA-FQ", "acs": ["0000:16:00.0"]}
    pci = [gpu, {"bus": "0000:b1:00.0", "iommu": None, "acs": None}]
    second = probe(2, infiniband=[down], gpu_pci=pci, interfaces=[interface("eno1", "10.0.0.2")])
    one, two = facts_of_nodes([second, first], choose_network([first, second]), {"n2": ["GPU0-GPU1"]})
    assert one.host == "n1" and one.nccl == (2, 27, 3) and one.topology is not None and one.active[0].gbit == 100
    assert [str(g.ipv4) for g in one.active[0].routable] == ["10.0.0.1"] and one.iommu is None and one.acs is None
    assert two.active == [] and two.iommu is True and two.acs == ["0000:16:00.0"] and two.copies == "failed"
    assert two.seat is not None and two.seat.interface == "eno1"
    damaged = facts_of_nodes([probe(3, topo="garbage", nccl="weird")], None)[0]
    assert damaged.topology is None and damaged.nccl == ()
    for kinds, translates in ((["identity"], False), (["identity", "DMA-FQ"], True), (["DMA"], True), ([None], None)):
        pci = [{"bus": f"0000:{i}", "iommu": kind, "acs": None} for i, kind in enumerate(kinds)]
        assert facts_of_nodes([probe(1, gpu_pci=pci)], None)[0].iommu is translates, "what passes through does not"


def test_all_nodes_must_have_one_kind_of_rdma_in_common() -> None:
    found = two(node(1, port("rdmap0s6", "Unspecified")), node(2, port("efa_0", "Unspecified")))
    assert found.nodes[0].expected.transport == "EFA" and "aws-ofi-nccl" in found.notes[-1]
    apart = two(node(1, ib("mlx5_0")), node(2, roce("mlx5_0", *usual("10.0.0.2"))))
    assert apart.nodes[0].expected.transport == "Socket" and is_set(apart)["NCCL_NET"] == "Socket"
    assert "no kind of RDMA in common" in of(apart)["NCCL_NET"].reason
    assert "choose nodes with equal hardware" in apart.notes[0]
    deaf = two(*(node(n, roce("mlx5_0", local6(0, 1), local6(1, 2))) for n in (1, 2)))
    assert deaf.nodes[0].expected.transport == "Socket"


def test_what_the_launchers_environment_sets_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for what the plan has set itself; and without what is secret."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("NCCL_", "GLOO_"))}
    given = {"NCCL_NET": "Socket", "NCCL_PSK": "quite secret", "GLOO_SOCKET_IFNAME": "planned"}
    monkeypatch.setattr(os, "environ", {**kept, **given})
    probes = [probe(1), probe(2)]
    found = policy_for_nodes(TWO, probes, choose_network(probes), tmp_path, ["GLOO_SOCKET_IFNAME"])
    assert (of(found)["NCCL_NET"].value, of(found)["NCCL_NET"].source) == ("Socket", "user")
    assert is_set(found)["GLOO_SOCKET_IFNAME"] != "planned"
    notes = " ".join(found.notes)
    assert "NCCL_NET=Socket comes from the environment" in notes and "NCCL_PSK=..." in notes
    assert "quite secret" not in notes
