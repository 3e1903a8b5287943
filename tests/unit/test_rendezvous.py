"""Where the ranks meet, from the nodes' answers alone."""

from __future__ import annotations

import pytest

from allranks.errors import EnvironmentNotAble
from allranks.launch.ask import Answer, Interface
from allranks.launch.rendezvous import choose, port_of
from allranks.spec.records import RendezvousSpec


def answer(node: int, *interfaces: tuple[str, str], down: str = "", speed: dict[str, int] | None = None) -> Answer:
    found = [
        Interface(name=n, address=a, netmask="255.255.255.0", up=n != down, speed_mbit=(speed or {}).get(n, 0))
        for n, a in (("lo", "127.0.0.1"), *interfaces)
    ]
    return Answer(node=node, host=f"h{9 - node}", interfaces=found, port_free=True, sees_run=True, cpus=2)


def test_node_zero_is_the_address_whatever_the_names_sort_to() -> None:
    place = choose([answer(1, ("eth0", "10.0.0.2")), answer(0, ("eth0", "10.0.0.9"))], RendezvousSpec(), "1.0", 20001)
    assert (place.address, [p.host for p in place.places]) == ("10.0.0.9", ["h9", "h8"])


def test_interface_names_may_differ() -> None:
    place = choose([answer(0, ("eth0", "10.0.0.1")), answer(1, ("eno1", "10.0.0.2"))], RendezvousSpec(), "1.0", 20001)
    assert [p.interface for p in place.places] == ["eth0", "eno1"]


def test_loopback_docker_and_interfaces_that_are_down_do_not_count() -> None:
    one = answer(0, ("docker0", "172.17.0.1"), ("eth0", "10.0.0.1"), ("eth1", "10.0.1.1"), down="eth0")
    two = answer(1, ("docker0", "172.17.0.1"), ("eth0", "10.0.0.2"), ("eth1", "10.0.1.2"))
    assert choose([one, two], RendezvousSpec(), "1.0", 1).network == "10.0.1.0/24"


def test_the_fastest_common_network_wins_and_the_user_beats_it() -> None:
    nodes = [
        answer(i, ("eth0", f"10.0.0.{i + 1}"), ("ib0", f"10.0.1.{i + 1}"), speed={"ib0": 100000, "eth0": 1000})
        for i in range(2)
    ]
    assert choose(nodes, RendezvousSpec(), "1.0", 1).network == "10.0.1.0/24"
    assert choose(nodes, RendezvousSpec(interface="eth0"), "1.0", 1).network == "10.0.0.0/24"


def test_no_common_network_shows_what_each_has() -> None:
    with pytest.raises(EnvironmentNotAble, match=r"h9: eth0 10\.0\.0\.1; h8: eth0 10\.0\.1\.2"):
        choose([answer(0, ("eth0", "10.0.0.1")), answer(1, ("eth0", "10.0.1.2"))], RendezvousSpec(), "1.0", 1)
    with pytest.raises(EnvironmentNotAble, match="ib7"):
        choose(
            [answer(0, ("eth0", "10.0.0.1")), answer(1, ("eth0", "10.0.0.2"))],
            RendezvousSpec(interface="ib7"),
            "1.0",
            1,
        )


def test_ports_stay_below_the_ephemeral_range_and_differ() -> None:
    ports = {port_of(f"{job}.0") for job in range(1000)}
    assert min(ports) >= 20000
    assert max(ports) < 32768
    assert len(ports) > 900
    assert port_of("1.0", 0) != port_of("1.0", 1)
