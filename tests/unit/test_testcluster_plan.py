# ruff: noqa: S108 - a folder name, nothing is made in it
"""Planning a box: addresses, names, and refusals that say what to do."""

from ipaddress import IPv4Network
from typing import Any

import pytest

from allranks.errors import EnvironmentNotAble, RequestError
from allranks.lab.cluster import plan as plans
from allranks.lab.cluster.plan import BoxOptions, BoxPlan, HiddenFolder, Machine, make_box_plan


def plan(folder: str = "/run/allranks/box", **options: Any) -> BoxPlan:
    network, machine = IPv4Network("10.77.0.0/24"), Machine("root", 0, 0, 2, 16000)
    return make_box_plan(BoxOptions(**options), folder=folder, network=network, machine=machine, slurm_version=(22, 5))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"nodes": 0}, "1 to 16"), ({"nodes": 17}, "1 to 16"), ({"name": "My Box"}, "--name My Box"),
        ({"name": "x" * 21}, "1 to 20"),
        ({"cpus": {"n4": 2}}, "--cpus: no node 'n4'; the nodes are n1, n2, n3"),
        ({"cpus": {"": 0}}, "--cpus 0: give a number from 1"), ({"memory_mb": {"": 1}}, "--memory 1"),
        ({"gpus": {"n1": -1}}, "--gpus -1"), ({"tmp_mb": 0}, "--tmp-mb 0"),
        ({"interfaces": {"": "a/b"}}, "--interface a/b"), ({"interfaces": {"": "lo"}}, "--interface lo"),
        ({"interfaces": {"": "sixteen-letters-"}}, "1 to 15"), ({"partitions": ()}, "--partition"),
        ({"partitions": ("a b",)}, "--partition a b"), ({"partitions": ("DEFAULT",)}, "--partition DEFAULT"),
        ({"conf": ("KillWait",)}, "--conf 'KillWait'"), ({"conf": ("KillWait=1\nSlurmUser=x",)}, "--conf"),
        ({"hidden": (HiddenFolder("data"),)}, "absolute path"),
        ({"hidden": (HiddenFolder("/a/../b"),)}, "absolute path"),
        ({"hidden": (HiddenFolder("/run"),)}, "the node itself needs"),
        ({"hidden": (HiddenFolder("/"),)}, "the node itself needs"),
        ({"hidden": (HiddenFolder("/run/allranks"),)}, "the node itself needs"),
        ({"hidden": (HiddenFolder("/data", ("n7",)),)}, "no node 'n7'"),
    ],
)  # fmt: skip
def test_wrong_options_are_refused_with_the_option_and_the_way_out(options: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError) as raised:
        plan(**options)
    assert words in str(raised.value)


def test_state_under_tmp_would_vanish_behind_a_private_tmp() -> None:
    with pytest.raises(RequestError, match="XDG_RUNTIME_DIR"):
        plan(folder="/tmp/state/box")
    assert plan(folder="/tmp/state/box", shared_tmp=True).shared_tmp


def free(used: str, network: str | None = None) -> str:
    return str(plans.free_network([IPv4Network(text) for text in used.split()], network))


def test_the_first_range_that_nothing_overlaps_is_taken() -> None:
    assert free("") == "10.77.0.0/24" and free("10.0.0.0/8") == "172.20.77.0/24"
    assert free("0.0.0.0/0 10.77.0.5/32 10.78.0.0/16") == "10.79.0.0/24"
    with pytest.raises(EnvironmentNotAble, match="--network"):
        free("10.0.0.0/8 172.16.0.0/12 192.168.0.0/16")
    assert all(IPv4Network(text).is_private for text in plans.CANDIDATES)


@pytest.mark.parametrize(
    ("network", "words"),
    [
        ("10.1.0.0/33", "Give a range"), ("10.1.0.7/24", "Give a range"), ("8.8.8.0/24", "private range"),
        ("10.1.0.0/28", "/27 or larger"), ("192.0.0.0/8", "private range"), ("10.9.0.0/16", "already uses 10.9.3.0/24"),
    ],
)  # fmt: skip
def test_a_range_of_the_user_is_checked(network: str, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        free("10.9.3.0/24", network)
    assert free("10.9.3.0/24", "10.8.0.0/16") == "10.8.0.0/16"
