"""What the ranks got: read from NCCL's lines and from real connections, and held against what was expected."""

import json
import os
import socket
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from allranks.nodes.network import copy_results, traffic
from allranks.nodes.probes.links_probe import supervise
from allranks.nodes.records import Probe
from allranks.planning import network_policy
from allranks.planning.network_policy import ExpectedNetwork, NetworkPolicy, NodeNetworkPolicy
from allranks.rundir.paths import RunDir
from allranks.utils.kernel_counters import connection_addresses, count_by_interface
from tests.conftest import shared
from tests.unit.preflight_nodes import node as probe

# Lines as NCCL of several years writes them; hosts and numbers are made up.
IB_LINES = """\
n1:924:924 [5] NCCL INFO Bootstrap : Using ibp12s0:10.149.0.32<0>
n1:924:1152 [5] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/IB [RO]; OOB ibp12s0:10.149.0.32<0>
n1:924:1152 [5] NCCL INFO Using network IB
n1:924:1152 [5] NCCL INFO Channel 00/0 : 0[0] -> 8[0] [send] via NET/IB/0/GDRDMA
n1:924:1152 [5] NCCL INFO Channel 01/0 : 0[0] -> 8[0] [send] via NET/IB/1(2)/GDRDMA
n1:924:1152 [5] NCCL INFO Channel 02/0 : 0[0] -> 1[1] via P2P/CUMEM
"""
SOCKET_LINES = """\
n2:10:10 [0] NCCL INFO Bootstrap: Using eth0:10.0.0.2<0>
n2:10:11 [0] NCCL INFO Failed to open libibverbs.so[.1]
n2:10:11 [0] NCCL INFO NET/Socket : Using [0]eth0:10.0.0.2<0> [1]eno2:10.1.0.2<0>
n2:10:11 [0] NCCL INFO Initialized NET plugin Socket
n2:10:11 [0] NCCL INFO Assigned NET plugin Socket to comm
n2:10:11 [0] NCCL INFO Using network Socket
n2:10:11 [0] NCCL INFO Channel 00/0 : 1[0] -> 0[0] [receive] via NET/Socket/0
n2:10:11 [0] NCCL INFO Channel 00 : 0[0] -> 1[1] via SHM/direct/direct
"""
OLD_LINES = """\
n3:5:5 [0] NCCL INFO Bootstrap : Using [0]lo:127.0.0.1<0>
n3:5:5 [0] NCCL INFO NET/IB : No device found.
n3:5:5 [0] NCCL INFO NET/Socket : Using [0]lo:127.0.0.1<0>
n3:5:5 [0] NCCL INFO Using network Socket
"""


def seen(host: str, text: str, **connections: int) -> traffic.ObservedNetwork:
    collector = traffic.NetworkLogParser(host)
    collector.take(text.splitlines())
    return collector.observed(connections)


def compared(expected: ExpectedNetwork, *logs: str, host: str = "n1", **observed: Any) -> traffic.NetworkOutcome:
    """One host's logs, or what was observed otherwise, against what is expected of it."""
    found = seen(host, "".join(logs)) if logs else traffic.ObservedNetwork(host=host, **observed)
    return traffic.compare_with_policy({host: expected}, [found])


def test_rdma() -> None:
    found = seen("n1", IB_LINES)
    assert found.networks == ["IB"] and found.rdma is True and found.bootstrap == ["ibp12s0"]
    assert found.devices == ["mlx5_0:1", "mlx5_1:1"] and found.layers == ["IB"]
    assert found.ways == {"NET/IB/GDRDMA": 2, "P2P": 1}
    ib = ExpectedNetwork(transport="InfiniBand", interface="ibp12s0", devices=found.devices, inside="NVLink")
    assert compared(ib, IB_LINES).findings == []
    both = seen("n1", IB_LINES + "n1:10:11 [0] NCCL INFO Using network Socket\n")
    assert both.networks == ["IB", "Socket"] and both.rdma is False, "one rank on sockets holds up all"
    line = "n1:10:11 [0] NCCL INFO"
    tried = f"{line} Initialized NET plugin IB\n{line} Assigned NET plugin Socket to comm\n"
    assert seen("n1", tried).networks == ["Socket"], "what is initialised need not be used"


def test_rdma_that_became_sockets_is_named_with_its_cause() -> None:
    expected = ExpectedNetwork(transport="RoCE", interface="eth0", devices=["mlx5_0:1"], why="all have RoCE")
    found = compared(expected, SOCKET_LINES, host="n2")
    became, interface = found.findings
    assert not found.ok and became.text.startswith("RoCE was replaced by sockets: expected mlx5_0:1 (all have RoCE)")
    assert "NCCL used Socket" in became.text
    assert "libibverbs is not installed" in became.text and "eno2, expected eth0" in interface.text
    silent = compared(msgspec.structs.replace(expected, interface="lo"), OLD_LINES, host="n3")
    assert "found no RDMA device" in silent.findings[0].text


def test_what_the_ranks_were_not_meant_to_use() -> None:
    found = compared(ExpectedNetwork(transport="Socket", why="n2 has none"), IB_LINES)
    assert found.ok and "RDMA is used (IB), although sockets were expected" in found.findings[0].text
    some = compared(ExpectedNetwork(transport="InfiniBand", devices=["mlx5_0:1", "mlx5_7:1"]), IB_LINES)
    assert "does not use mlx5_7:1, which is up" in some.findings[0].text
    nvlink = ExpectedNetwork(transport="Socket", interface="eth0", inside="NVLink")
    inside = compared(nvlink, SOCKET_LINES.replace("eno2", "eth0"), host="n2")
    assert "connected by NVLink, but NCCL uses host memory" in inside.findings[0].text
    assert compared(ExpectedNetwork(inside="NVLink"), ways={"P2P": 3, "SHM": 1}).ok, "a channel of several may"


def test_nothing_seen_is_no_finding() -> None:
    expected = ExpectedNetwork(transport="InfiniBand", interface="ib0", devices=["mlx5_0:1"])
    found = compared(expected, "step 1 loss 2.0\nNCCL is fine\n")
    assert found.findings == [] and found.line() == ""
    assert compared(expected, networks=["IB"]).findings == [], "NCCL did not name its ports"
    half = IB_LINES.replace("NET/IB/1(2)/GDRDMA", "NET/IB/1(2)")
    assert compared(ExpectedNetwork(transport="InfiniBand"), half).findings == []


def test_real_logs_one_of_them_without_the_beginning_of_its_lines() -> None:
    fallback = seen("x", shared("logs", "dev038.log").read_text())
    assert fallback.ways == {"NET/Socket": 1} and "NCCL found no RDMA device" in fallback.reasons[0]
    peer = shared("logs", "dev019.log").read_text()
    assert seen("x", peer).ways["P2P"] >= 1 and traffic.host_of_line(peer.splitlines()[0]) == "8a9faed5c3c4"


@contextmanager
def connection(address: str) -> Iterator[int]:
    """A connection of this process to itself, both ends at this address; the port of the listener."""
    with (
        socket.create_server((address, 0)) as server,
        socket.create_connection(server.getsockname()),
        server.accept()[0],
    ):
        yield server.getsockname()[1]


def test_connections_of_a_process_by_interface() -> None:
    with connection("127.0.0.1"), connection("127.0.0.5") as port:
        found = connection_addresses([os.getpid()])
        assert found["127.0.0.1"] >= 2 and found["127.0.0.5"] == 1
        without = connection_addresses([os.getpid()], without_ports=[port])
        assert "127.0.0.5" not in without
        assert found.total() - without.total() == 2, "the store's port at the other end counts as well"
        assert connection_addresses([999_999_999]) == Counter()
    by_interface = count_by_interface(Counter({"127.0.0.1": 2, "10.0.0.1": 3, "10.9.9.9": 1}), {"10.0.0.1": "eth0"})
    assert by_interface == {"10.9.9.9": 1, "eth0": 3, "lo": 2}


def test_connections_over_another_interface_are_named() -> None:
    expected = ExpectedNetwork(transport="Socket", interface="eth0")
    assert compared(expected, connections={"eth0": 3, "lo": 1}).ok
    assert "go over eno2 (3), expected eth0" in compared(expected, connections={"eno2": 3, "eth0": 1}).findings[0].text


def test_only_what_is_connected_counts_and_only_to_nodes_of_the_job() -> None:
    with socket.create_server(("127.0.0.7", 0)):
        assert "127.0.0.7" not in connection_addresses([os.getpid()]), "it listens, and nobody is connected"
    own = [a.address for items in psutil.net_if_addrs().values() for a in items if a.family == socket.AF_INET]
    outside = [a for a in own if not a.startswith("127.")]
    if not outside:
        pytest.skip("this machine has no address but loopback")
    with connection(outside[0]):
        assert connection_addresses([os.getpid()], peers=[outside[0]])[outside[0]] == 2
        assert outside[0] not in connection_addresses([os.getpid()], peers=["192.0.2.1"])


def test_after_a_run(tmp_path: Path) -> None:
    expected = ExpectedNetwork(transport="InfiniBand", interface="eth0", devices=["mlx5_0:1"], why="all have it")
    run = RunDir(tmp_path / "r")
    run.logs_of(1).mkdir(parents=True)
    for rank, text in enumerate(("x\n" + SOCKET_LINES, "\0\xff")):
        (run.logs_of(1) / f"n2-ext.rank{rank}.log").write_text(text)
    policy = NetworkPolicy(nodes=[NodeNetworkPolicy(host="n2", environment=[], expected=expected)])
    network_policy.save_policy(run.network(1), policy)
    connections = {"node": 0, "names": ["n2", "", "n2-ext"], "interfaces": {"eth0": 4}}
    run.connections(1, "n2-ext").write_text(json.dumps(connections))
    found = traffic.verify_network(run, 1)
    assert found is not None and "InfiniBand was replaced by sockets" in found.findings[0].text
    metrics = traffic.outcome_metrics(found)
    assert metrics is not None and metrics["ok"] is False and "interface eno2" not in metrics["line"]
    assert metrics["line"] == "NCCL over Socket; transports NET/Socket, SHM; interface eth0"
    run.network(1).write_text("{damaged")
    assert traffic.verify_network(run, 1) is None and traffic.verify_network(RunDir(tmp_path / "none"), 1) is None


def test_copy_tests_are_kept_for_the_same_gpus_and_driver(tmp_path: Path) -> None:
    def gpus(name: str, driver: str) -> Probe:
        return probe(1, gpus=[{"name": name, "driver": driver}] * 2)

    node = gpus("L4", "550")
    assert copy_results.load_copy_tests(tmp_path, [node]) == {}
    copy_results.save_copy_test(tmp_path, node, ["GPU0-GPU1"], 2)
    assert copy_results.load_copy_tests(tmp_path, [node, probe(2)]) == {"n1": ["GPU0-GPU1"]}
    for changed in (gpus("L4", "560"), gpus("L40", "550")):
        assert copy_results.load_copy_tests(tmp_path, [changed]) == {}
    copy_results.save_copy_test(tmp_path, probe(2), [], 0)
    assert "n2" not in copy_results.load_copy_tests(tmp_path, [probe(2)]), "nothing was tested"
    path = tmp_path / copy_results.COPY_TESTS_FOLDER / "n1.json"
    old = json.loads(path.read_text())
    for text in (json.dumps({**old, "time": old["time"] - 2 * copy_results.COPY_TEST_VALID_S}), "damaged"):
        path.write_text(text)
        assert copy_results.load_copy_tests(tmp_path, [node]) == {}


CHILD = """
import json, sys, time
request = json.loads(sys.argv[sys.argv.index("--json-args") + 1])
ends = {"GPU0-GPU1": "ok", "GPU0-GPU2": "hang", "GPU1-GPU0": "ok", "GPU3-GPU0": "wrong", "GPU1-GPU2": "die"}
for pair, end in ends.items():
    if pair in request["skip"]:
        continue
    print("begin", pair, flush=True)
    if end == "hang":
        time.sleep(60)
    if end == "die":
        sys.exit(7)
    print(end, pair, flush=True)
"""


def test_copies_that_hang_come_out_wrong_or_kill(tmp_path: Path) -> None:
    child = tmp_path / "child.py"
    broken = "print('no torch here')\nraise SystemExit(3)\n"
    for code, tested, failed, error in (
        (CHILD, 5, ["GPU0-GPU2", "GPU0-GPU3", "GPU1-GPU2"], ""), (broken, 0, [], "no torch here"),
    ):  # fmt: skip
        child.write_text(code)
        found = supervise([sys.executable, str(child)], None, 1.0)
        assert found == {"tested": tested, "failed": failed, "error": error}


@pytest.mark.full
def test_real_copies_in_memory_come_out_right() -> None:
    pytest.importorskip("torch")
    found = supervise([sys.executable, "-m", "allranks.nodes.probes.links_probe", "copies"], ["cpu"] * 3, 30.0)
    assert found == {"tested": 6, "failed": [], "error": ""}


def test_the_page_of_a_run_names_what_differs() -> None:
    from allranks.analysis.report.run_data import RunData
    from allranks.analysis.report.tables import findings_table, network_table

    expected = ExpectedNetwork(transport="RoCE", interface="eth0", why="all have it")
    metrics = traffic.outcome_metrics(traffic.compare_with_policy({"n2": expected}, [seen("n2", SOCKET_LINES, eth0=4)]))
    data = RunData.__new__(RunData)
    object.__setattr__(data, "metrics", {"network": metrics})
    made, found = network_table(data), findings_table(data)
    assert made is not None and found is not None
    assert [cell.text for cell in made.rows[0]][:3] == ["n2", "Socket", "eth0 (4)"]
    assert found.rows[0][0].tone == "bad" and found.rows[0][2].text.startswith("RoCE was replaced by sockets")
    object.__setattr__(data, "metrics", {"network": None})
    assert network_table(data) is None and findings_table(data) is None
