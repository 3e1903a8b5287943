"""Each check names the node that is wrong, and only that one, with what to do; the network that all nodes are on."""

from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
import pytest

from allranks.errors import EnvironmentNotAble
from allranks.nodes.checks import NodeSurvey, PlanRequirements
from allranks.nodes.checks.registry import CHECKS
from allranks.nodes.network.choose import choose_network
from allranks.nodes.preflight.requirements import node_requirements, port_candidates, rendezvous_port
from allranks.nodes.preflight.runner import STAGEABLE_CHECKS, failure_lines, require_usable_nodes, run_checks
from allranks.nodes.records import BuildLock, Check, ContentDigest, FolderFacts, ImportResult, Package, RequiredFolder
from allranks.planning.records import RdmaPort
from allranks.spec import parse_spec
from tests.unit import preflight_nodes
from tests.unit.preflight_nodes import GIB, REQUIRED, connected, cut, failures, in_folder, interface, node, survey

replace = msgspec.structs.replace
OTHER = ContentDigest(files=3, bytes=300, digest="bbbb")


def third(**changes: Any) -> NodeSurvey:
    """Two nodes that are well, and n3 with these changes."""
    return survey(node(1), node(2), node(3, **changes))


def folder(role: str, **facts: Any) -> NodeSurvey:
    """Two nodes that are well, and n3 that sees one folder so."""
    return survey(node(1), node(2), in_folder(node(3), role, **facts))


def with_packages(number: int, **packages: Package) -> dict[str, Package]:
    return {**node(number).packages, **packages}


def only(found: NodeSurvey, key: str) -> Check:
    bad = failures(found)
    assert list(bad) == [key], bad
    assert bad[key].cure
    assert key.partition(".")[0] in bad[key].cure or bad[key].name in ("py", "port", "gpus"), bad[key].cure
    return bad[key]


def test_nodes_that_are_well_give_the_line_of_the_lab() -> None:
    reports = run_checks(third())
    assert [r.host for r in reports] == ["n1", "n2", "n3"] and all(r.ok for r in reports)
    assert reports[1].line() == (
        "n2 proj=ok pkgs=ok py=3.11.7 torch=2.13.0 data=ok run=rw,12GiB net=eth0/10.0.0.2 reach=2/2 name=ok "
        "clock=+0.00s shm=8GiB files=65536 threads=2x4/8 OK"
    )
    assert "port=21001" in reports[0].line() and failure_lines(reports) == []
    unproved = run_checks(replace(third(), nonces={}))[0].line()
    assert "run=rw,12GiB,sharing-not-proved" in unproved, "the launcher cannot write there"


def test_a_missing_package_and_a_differing_version() -> None:
    gone = third(packages=with_packages(3, torch=Package(version="2.13.0", origin=None)))  # an empty folder
    missing = only(gone, "n3.pkgs")
    assert missing.found == "MISSING(torch)" and "pkgs=MISSING(torch)" in run_checks(gone)[2].line()
    assert missing.cure.startswith("without a GPU first /env/bin/python -m pip install torch --index-url")
    check = only(third(packages=with_packages(3, peft=Package(version="0.18.0", origin="/x"))), "n3.pkgs")
    assert check.found == "VERSION(peft 0.18.0, others 0.19.0)" and "peft==0.19.0" in check.cure


def test_an_engines_package_is_looked_for_and_not_imported(tmp_path: Path) -> None:
    base: dict[str, Any] = {"model": {"name": "tiny:mistral"}, "data": {"source": "builtin:instructions"}}
    for strategy, package in (("deepspeed_zero1", "deepspeed"), ("hf_trainer", "accelerate"), ("pytorch_ddp", None)):
        required = node_requirements(parse_spec({**base, "strategy": {"name": strategy}}), tmp_path)
        assert set(required.packages) - set(required.imports) == ({package} - {None}), strategy
    for version, package in ((2, "flash_attn"), (3, "flash_attn_interface"), (4, "flash_attn")):
        given = {**base, "model": {**base["model"], "attention": f"flash_attention_{version}"}}
        from_hub = find_spec("kernels") is not None
        assert (package in node_requirements(parse_spec(given), tmp_path).packages) != from_hub
    engine = {"deepspeed": Package(version="0.18.0", origin="/env/deepspeed/__init__.py")}
    nodes = [node(n, packages=with_packages(n, **(engine if n < 3 else {}))) for n in (1, 2, 3)]
    check = only(survey(*nodes, required=replace(REQUIRED, packages=["torch", "deepspeed"])), "n3.pkgs")
    assert check.found == "MISSING(deepspeed)" and "'allranks[train,deepspeed]' on n3" in check.cure


def test_another_python_and_the_same_one_elsewhere() -> None:
    assert only(third(python="3.12.1"), "n3.py").found == "VERSION(3.12.1)"
    assert only(third(executable="/usr/bin/python3"), "n3.py").found == "MISSING(/env/bin/python)"
    assert "n3.py" in failures(third(executable="", python=""))


def test_an_import_that_fails() -> None:
    broken = {"torch": ImportResult(seconds=1.0), "peft": ImportResult(seconds=0.1, error="ImportError: no X")}
    check = only(third(imports=broken), "n3.imports")
    assert check.found == "FAILED(peft)" and "no X" in check.cure
    gone = with_packages(3, peft=Package(version=None, origin=None))
    assert only(third(packages=gone, imports=broken), "n3.pkgs").found == "MISSING(peft)", "said once"


def test_project_and_data_missing_or_of_other_content() -> None:
    assert only(folder("project", exists=False), "n3.proj").found == "MISSING(/work/allranks)"
    assert only(folder("data", fingerprint=OTHER), "n3.data").found == "DIFFERS(/work/rows.json)"
    assert only(folder("data", error="no answer within 8 s"), "n3.data").found.startswith("UNREAD")
    for facts in ({"exists": False}, {"fingerprint": OTHER}, {"error": "no answer within 8 s"}):
        assert only(folder("project", **facts), "n3.proj").blocks, facts


def test_a_users_own_program_is_part_of_the_project() -> None:
    own = ContentDigest(files=1, bytes=9, digest="cccc")
    scripts = {n: FolderFacts(exists=n != 2, fingerprint=own) for n in (1, 2, 3)}
    probes = [replace(node(n), folders={**node(n).folders, "script": facts}) for n, facts in scripts.items()]
    script = RequiredFolder(role="script", path="/home/u/own.py")
    required = replace(REQUIRED, folders=[*preflight_nodes.FOLDERS, script])
    assert only(survey(*probes, required=required), "n2.proj").found == "MISSING(/home/u/own.py)"
    bad = failures(survey(*[in_folder(p, "project", exists=p.host != "n1") for p in probes], required=required))
    assert {key: check.found[:8] for key, check in bad.items()} == {"n1.proj": "MISSING(", "n2.proj": "MISSING("}


def test_the_launcher_settles_a_draw_of_two_nodes() -> None:
    two = survey(node(1), in_folder(node(2), "data", fingerprint=OTHER))
    assert list(failures(replace(two, own_folders={"data": FolderFacts(fingerprint=OTHER)}))) == ["n1.data"]
    assert list(failures(two)) == ["n2.data"]


def test_a_run_folder_that_is_not_the_launchers() -> None:
    alone = survey(in_folder(node(1), "run", nonce=None))
    assert not failures(alone), "one node shares with nobody"
    not_shared = "NOT-SHARED(/work/runs)"
    assert only(replace(alone, remote=True), "n1.run").found == not_shared, "but with a launcher elsewhere"
    for facts, found in (
        ({"nonce": None}, not_shared), ({"nonce": "other"}, not_shared),
        ({"write_error": "Permission denied"}, "READ-ONLY"), ({"free_bytes": 2**20}, "FULL"),
        ({"exists": False}, "MISSING"),
    ):  # fmt: skip
        assert only(folder("run", **facts), "n3.run").found.startswith(found), facts


@pytest.mark.parametrize("address", ["127.0.1.1", "127.0.0.1"])
def test_own_name_on_loopback_is_bad_but_does_not_block(address: str) -> None:
    check = only(third(resolves=[address]), "n3.name")
    assert check.found == f"LOOPBACK({address})" and "/etc/hosts" in check.cure and not check.blocks
    assert only(third(resolves=None, resolve_error="gaierror"), "n3.name").found == "UNKNOWN(n3)"
    require_usable_nodes(run_checks(third(resolves=[address])))


def test_the_port_counts_on_the_first_node_only() -> None:
    assert not failures(third(free_ports=[]))
    second = survey(node(1, free_ports=[preflight_nodes.PORTS[1]]), node(2))
    assert not failures(second) and "port=21002" in run_checks(second)[0].line()
    taken = survey(node(1, free_ports=[]), node(2))
    assert only(taken, "n1.port").found == "TAKEN(21001,21002)"
    fixed = only(replace(taken, need=PlanRequirements(port=29500)), "n1.port")
    assert fixed.found == "TAKEN(29500)" and "null" in fixed.cure


def test_a_clock_that_is_90_s_off() -> None:
    assert only(third(clock=1090.0), "n3.clock").found == "WRONG(+90.0s)"
    assert only(survey(node(1), node(2, clock=910.0)), "n2.clock").found == "WRONG(-90.0s)"
    assert not failures(survey(node(1, clock=1001.5), node(2, clock=1001.5), node(3, clock=999.0))), "each within 2 s"
    assert list(failures(survey(node(1, clock=1090.0), node(2, clock=1090.1), node(3, clock=1000.0)))) == ["n3.clock"]


def test_shared_memory_and_open_files() -> None:
    assert only(third(shm_free_bytes=8 * 2**20), "n3.shm").found == "SMALL(8MiB)"
    gpu = PlanRequirements(device="cuda", procs_per_node=0)
    assert "--shm-size" in failures(survey(node(1, shm_free_bytes=64 * 2**20), need=gpu))["n1.shm"].cure
    few = third(open_files=256)
    assert only(few, "n3.files").found == "FEW(256)"
    assert "cluster.setup" in failures(replace(few, remote=True))["n3.files"].cure
    assert failures(replace(few, remote=False))["n3.files"].cure == "ulimit -n 65536 on n3 before the run"


def test_a_lock_that_no_build_holds() -> None:
    left = BuildLock(path="/home/u/.cache/torch_extensions/py311_cu126/fused_adam/lock", age_s=7200.0, held=False)
    check = only(third(build_locks=[left]), "n3.extensions")
    assert (check.found, check.blocks) == ("LOCKED(fused_adam)", False)
    assert "120 min ago" in check.cure and f"rm {left.path}" in check.cure
    assert not failures(third(build_locks=[replace(left, held=True), replace(left, age_s=60.0)]))


def test_more_threads_than_cores() -> None:
    check = only(third(cpus=4), "n3.threads")
    assert check.found == "MANY(2x4/4)" and "OMP_NUM_THREADS=2" in check.cure
    alone = replace(third(), need=PlanRequirements(procs_per_node=16, threads=1))
    assert not failures(alone), "fewer than one thread a rank there cannot be"


def test_unreached_peers_blame_the_one_that_nobody_reaches() -> None:
    def judged(*unreached: str | None, **errors: list[str]) -> NodeSurvey:
        """What the first nodes say: the peers that they did not reach; None: nothing."""
        hosts = [f"n{i}" for i in range(1, len(unreached) + 1)]
        said = {h: cut(h, *peers.split()) for h, peers in zip(hosts, unreached, strict=True) if peers is not None}
        answers = {host: replace(answer, errors=errors.get(host, [])) for host, answer in said.items()}
        return replace(survey(*(node(int(host[1:])) for host in hosts)), reach=connected(hosts, answers))

    check = only(judged("n3", "n3", "n1 n2"), "n3.reach")
    assert check.found == "UNREACHABLE(n1,n2)"
    assert "n3 -> n1 10.0.0.1:21001 timed out (4 of 4 attempts failed)" in check.cure
    assert "2 of 2 nodes not reached from n3, 2 of 2 did not reach it" in check.cure
    assert only(judged("n2", "", ""), "n1.reach").found == "UNREACHABLE(n2)"
    assert only(judged("n2", ""), "n1.reach").found == "UNREACHABLE(n2)", "of two, who does not reach says so"
    assert only(judged("", "", None), "n3.reach").found == "NO-ANSWER"
    assert "cannot listen" in only(judged("", "", n2=["cannot listen on 10.0.0.2:1: in use"]), "n2.reach").cure


def test_no_network_names_the_node_without_one() -> None:
    lonely, two = node(3, interfaces=[interface("eth0", "10.0.0.3", up=False)]), survey(node(1), node(2))
    bad = failures(replace(two, probes=[*two.probes, lonely], network=None, network_error="not n3", reach=None))
    assert {key: check.found for key, check in bad.items()} == {"n3.net": "NONE(eth0-down)"}


def test_gpus_too_few_broken_or_different() -> None:
    h100 = {"index": "0", "name": "NVIDIA H100", "driver": "570.1", "ecc_errors": "0"}
    one = PlanRequirements(device="cuda", procs_per_node=1)
    shared = PlanRequirements(device="cuda", procs_per_node=4, share_gpus=True)

    def second(need: PlanRequirements | None = one, **gpu: Any) -> NodeSurvey:
        two = survey(node(1, gpus=[h100]), node(2, **({"gpus": [{**h100, **gpu}]} if "gpu_error" not in gpu else gpu)))
        return replace(two, need=need) if need else two

    assert not failures(second(shared)), "Gloo ranks share a GPU"
    for need in (shared, one):
        check = only(survey(node(1, gpus=[h100]), node(2), need=need), "n2.gpus")
        assert check.cure.startswith("the ranks need a GPU: ") and (need is shared or check.found == "FEW(0)")
    assert only(second(ecc_errors="2"), "n2.gpus").found == "ECC(0)" and not failures(second(ecc_errors="[N/A]"))
    assert only(second(ecc_errors="2"), "n2.gpus").blocks
    assert not only(second(None, ecc_errors="2"), "n2.gpus").blocks, "ranks on the CPU do not need it"
    assert only(second(driver="550.2"), "n2.gpus").found.startswith("DIFF")
    assert only(second(gpu_error="no answer"), "n2.gpus").found == "DRIVER"


def test_infiniband_ports_memory_that_cannot_be_locked_and_copies_between_gpus() -> None:
    up, down = (RdmaPort(device="mlx5_0", port=1, active=active, layer="InfiniBand") for active in (True, False))
    assert list(failures(survey(node(1, infiniband=[up]), node(2, infiniband=[down])))) == ["n2.ib"]
    assert list(failures(survey(node(1, infiniband=[up], memlock_bytes=2**16)))) == ["n1.memlock"]
    assert not failures(survey(node(1, memlock_bytes=2**16))), "without RDMA nothing is locked"
    text = " \tGPU0\tGPU1\n GPU0\tX\t{}\n GPU1\t{}\tX\n\nLegend:\n  X    = Self\n  OK   = Status Ok\n"
    assert not failures(survey(node(1, p2p=text.format("OK", "OK"))))
    assert failures(survey(node(1, p2p=text.format("OK", "CNS"))))["n1.p2p"].found == "NONE(1/2)"


def test_every_check_passes_over_what_was_not_asked() -> None:
    nothing = replace(REQUIRED, packages=[], folders=[], ports=[])
    assert failures(survey(node(1), required=nothing, need=PlanRequirements(), nonces={}, received={})) == {}
    assert len(CHECKS) == len(set(CHECKS))


@pytest.mark.parametrize(
    ("variables", "missing"),
    [
        ({"GLOO_SOCKET_IFNAME": "eth0"}, ["n2"]), ({"GLOO_SOCKET_IFNAME": "eth0,eno1"}, []),
        ({"GLOO_SOCKET_IFNAME": "eth"}, ["n1", "n2"]), ({"NCCL_SOCKET_IFNAME": "e"}, []),
        ({"NCCL_SOCKET_IFNAME": "=eth"}, ["n1", "n2"]), ({"NCCL_SOCKET_IFNAME": "=eth0,eno1"}, []),
        ({"NCCL_SOCKET_IFNAME": "^docker,lo"}, []), ({"NCCL_SOCKET_IFNAME": "^e"}, ["n1", "n2"]), ({}, []),
    ],
)  # fmt: skip
def test_interfaces_that_the_user_names(variables: dict[str, str], missing: list[str]) -> None:
    nodes = [node(n, interfaces=[interface(name, f"10.0.0.{n}")]) for n, name in ((1, "eth0"), (2, "eno1"))]
    bad = failures(survey(*nodes, need=PlanRequirements(procs_per_node=2, threads=4, named=variables)))
    assert [key.partition(".")[0] for key in bad if key.endswith(".ifname")] == missing
    assert all("remove it from cluster.env" in check.cure and check.blocks for check in bad.values())


def test_a_node_whose_gpu_or_memory_is_too_small_for_a_rank() -> None:
    gpu = {"index": "0", "name": "NVIDIA H100", "driver": "570", "memory_mb": "81920", "ecc_errors": "0"}
    half = {**gpu, "memory_mb": "40960"}
    need = PlanRequirements(procs_per_node=2, threads=4, device="cuda", rank_memory_bytes=60 * GIB)

    def memory(*gpus: list[dict[str, str]], **changes: Any) -> list[Check]:
        nodes = survey(*(node(n, gpus=own) for n, own in enumerate(gpus, 1)), need=replace(need, **changes))
        return [check for report in run_checks(nodes) for check in report.checks if check.name == "memory"]

    large, small = memory([gpu] * 2, [half] * 2)
    assert large.ok and large.found == "60GiB/80GiB"
    assert (small.ok, small.blocks, small.found) == (False, True, "SMALL(60GiB/40GiB)") and "--force" in small.cure
    near = memory([gpu] * 2, [half] * 2, rank_memory_bytes=42 * GIB)[1]  # the estimate may be wrong by so much
    assert (near.found, near.ok, near.blocks) == ("CLOSE(42GiB/40GiB)", False, False)
    shared = memory([gpu] * 2, [half] * 2, procs_per_node=4, rank_memory_bytes=30 * GIB)
    assert not shared[1].ok, "two ranks share a GPU"
    assert memory([gpu, half])[0].found == "SMALL(60GiB/40GiB)", "the smallest counts"
    assert memory([{**gpu, "memory_mb": "[N/A]"}] * 2) == []
    host = PlanRequirements(procs_per_node=2, threads=4, rank_memory_bytes=9 * GIB)
    nodes = survey(node(1, memory_bytes=32 * GIB), node(2, memory_bytes=16 * GIB), need=host)
    assert list(failures(nodes)) == ["n2.memory"]


def test_a_working_directory_that_a_node_lacks_is_not_staged() -> None:
    required = replace(REQUIRED, folders=[*preflight_nodes.FOLDERS, RequiredFolder(role="workdir", path="/work/at")])
    views = {n: {**node(n).folders, "workdir": FolderFacts(exists=n == 1)} for n in (1, 2)}
    bad = failures(survey(*(node(n, folders=folders) for n, folders in views.items()), required=required))
    assert {key: check.found for key, check in bad.items()} == {"n2.workdir": "MISSING(/work/at)"}
    assert "workdir" not in STAGEABLE_CHECKS


def on(number: int, *interfaces):
    return node(number, interfaces=list(interfaces))


def test_interface_names_may_differ() -> None:
    found = choose_network([on(1, interface("eth0", "10.0.0.1")), on(2, interface("eno1", "10.0.0.2"))])
    assert found.network == "10.0.0.0/24"
    assert [(s.interface, s.address) for s in found.seats.values()] == [("eth0", "10.0.0.1"), ("eno1", "10.0.0.2")]
    cloud = choose_network([on(n, interface("ens4", f"10.128.0.{n}", 32)) for n in (1, 2)])
    assert cloud.network == "routed" and cloud.seats["n2"].address == "10.128.0.2"


def test_the_fastest_of_several() -> None:
    slow = [interface("eth0", f"10.0.0.{n}", speed_mbit=1000) for n in (1, 2)]
    fast = [interface("ib0", f"10.9.0.{n}", speed_mbit=100_000) for n in (1, 2)]
    nodes = [on(n, slow[n - 1], fast[n - 1]) for n in (1, 2)]
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
    same = interface("weave", "10.32.0.1", 12, speed_mbit=10000)
    nodes = [on(n, same, interface("eth0", f"10.0.0.{n}")) for n in (1, 2)]
    assert choose_network(nodes).network == "10.0.0.0/24", "the same address on all nodes is no network"
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


def test_the_port_is_stable_spread_and_below_the_ephemeral_range() -> None:
    assert rendezvous_port(4711) == rendezvous_port("4711")
    ports = [rendezvous_port(job) for job in range(10_000, 12_000)]
    assert min(ports) >= 20_000 and max(ports) < 32_768 and max(Counter(ports).values()) <= 4
    assert rendezvous_port(20_001) != rendezvous_port(10_001), "the last digits alone collide"
    assert len(set(port_candidates(4711))) == 4 and port_candidates(4711)[0] == rendezvous_port(4711)
