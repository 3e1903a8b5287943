"""The network that all nodes are on, and the port of the rendezvous."""

from __future__ import annotations

from collections import Counter

import pytest

from allranks.errors import EnvironmentNotAble
from allranks.nodes.network.choose import choose_network
from allranks.nodes.preflight.requirements import port_candidates, rendezvous_port
from tests.unit.preflight_nodes import interface, node


def on(number: int, *interfaces):
    """A node with these interfaces."""
    return node(number, interfaces=list(interfaces))


def test_interface_names_may_differ() -> None:
    found = choose_network([on(1, interface("eth0", "10.0.0.1")), on(2, interface("eno1", "10.0.0.2"))])
    assert found.network == "10.0.0.0/24"
    assert [(s.interface, s.address) for s in found.seats.values()] == [("eth0", "10.0.0.1"), ("eno1", "10.0.0.2")]


def test_the_fastest_of_several() -> None:
    nodes = [
        on(n, interface("eth0", f"10.0.0.{n}", speed_mbit=1000), interface("ib0", f"10.9.0.{n}", speed_mbit=100000))
        for n in (1, 2)
    ]
    found = choose_network(nodes)
    assert found.network == "10.9.0.0/24" and "fastest" in found.reason
    assert choose_network(nodes, "eth0").network == "10.0.0.0/24"


def test_container_bridges_loopback_and_link_local_do_not_count() -> None:
    for useless in (
        interface("docker0", "172.17.0.1", 16), interface("virbr0", "192.168.122.1"),
        interface("lo", "127.0.0.1", 8, loopback=True), interface("eth1", "169.254.0.1", 16),
        interface("eth1", "10.5.0.1", up=False),
    ):  # fmt: skip
        nodes = [on(n, useless, interface("eth0", f"10.0.0.{n}")) for n in (1, 2)]
        assert choose_network(nodes).network == "10.0.0.0/24"
        with pytest.raises(EnvironmentNotAble, match="n1, n2: no IPv4 address"):
            choose_network([on(n, useless) for n in (1, 2)])


def test_the_same_address_on_all_nodes_is_no_network() -> None:
    same = interface("weave", "10.32.0.1", 12, speed_mbit=10000)
    nodes = [on(n, same, interface("eth0", f"10.0.0.{n}")) for n in (1, 2)]
    assert choose_network(nodes).network == "10.0.0.0/24"
    with pytest.raises(EnvironmentNotAble, match="same address"):
        choose_network([on(1, same), on(2, same)])


def test_no_common_network_names_the_node_that_is_outside() -> None:
    nodes = [node(1), node(2), on(3, interface("eth0", "192.168.7.3"))]
    with pytest.raises(EnvironmentNotAble, match=r"10.0.0.0/24 has n1, n2, but not n3.*eth0 192.168.7.3.*exclude"):
        choose_network(nodes)


def test_an_interface_that_is_down_or_lacking_is_named() -> None:
    with pytest.raises(EnvironmentNotAble, match=r"n2: .*eth0 10.0.0.2 \(down\)"):
        choose_network([node(1), on(2, interface("eth0", "10.0.0.2", up=False))])
    with pytest.raises(EnvironmentNotAble, match=r"n2: .*named eth0.*eno1 10.0.0.2.*null"):
        choose_network([node(1), on(2, interface("eno1", "10.0.0.2"))], "eth0")
    assert choose_network([node(1), on(2, interface("eno1", "10.0.0.2"))], "eth0,eno1").network == "10.0.0.0/24"


def test_clouds_that_route_single_addresses() -> None:
    nodes = [on(n, interface("ens4", f"10.128.0.{n}", 32)) for n in (1, 2)]
    found = choose_network(nodes)
    assert found.network == "routed" and found.seats["n2"].address == "10.128.0.2"


def test_the_port_is_stable_spread_and_below_the_ephemeral_range() -> None:
    assert rendezvous_port(4711) == rendezvous_port("4711")
    ports = [rendezvous_port(job) for job in range(10_000, 12_000)]
    assert min(ports) >= 20_000 and max(ports) < 32_768 and max(Counter(ports).values()) <= 4
    assert rendezvous_port(20_001) != rendezvous_port(10_001), "the last digits alone collide"
    assert len(set(port_candidates(4711))) == 4 and port_candidates(4711)[0] == rendezvous_port(4711)
