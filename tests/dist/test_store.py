"""The store at which ranks meet: where it listens, who can use it, and that it ends with its run."""

import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import torch
from torch.distributed import TCPStore

from allranks.errors import EnvironmentNotAble
from allranks.lab.cluster.processes import wait_gone
from allranks.launch.channel import ChannelServer
from allranks.launch.channel_protocol import CHANNEL_VARIABLE
from allranks.launch.rendezvous import FileStoreFolder, NodeAddress, Rendezvous, TcpStoreServer, remove_leftover_stores
from allranks.launch.store_server import VERIFIED, WHOLE
from allranks.launch.supervisor import Supervisor
from allranks.planning.planner import make_plan
from allranks.rundir.files import read_json, write_json
from allranks.rundir.heartbeat import STORE_VARIABLE
from allranks.rundir.paths import RunDir
from allranks.spec import parse_spec
from allranks.train.distributed import open_store
from allranks.utils.machine import machine_facts
from tests.conftest import tiny_spec
from tests.dist.harness import until

SHORT = timedelta(seconds=20)


def listens(port: int) -> set[str]:
    found = [c.laddr for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN]
    return {place[0] for place in found if place and place[1] == port}


@pytest.fixture
def server() -> Iterator[TcpStoreServer]:
    with closing(TcpStoreServer("127.0.0.1", 0)) as made:
        yield made


def client(server: TcpStoreServer, address: str = "127.0.0.1") -> TCPStore:
    return TCPStore(address, server.port, None, False, SHORT)


def keeps_a_word(store: Any) -> bool:
    store.set("word", "said")
    return store.get("word") == b"said"


def test_the_store_listens_on_its_address_only() -> None:
    with closing(TcpStoreServer("127.0.0.2", 0)) as server:
        assert listens(server.port) == {"127.0.0.2"}
        assert keeps_a_word(client(server, "127.0.0.2"))
        assert listens(server.port) == {"127.0.0.2"}, "torch opens no socket of its own"
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", server.port), timeout=5).close()
        assert (server.note, server.exit_code()) == ("", None)
    assert listens(server.port) == set() and server.exit_code() == -signal.SIGKILL


def test_the_store_loads_the_compiled_part_of_torch_alone_or_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import sys; from allranks.launch.store_server import *; print(store_class(), 'torch.nn' in sys.modules)"
    monkeypatch.delenv(WHOLE, raising=False)
    for whole in (False, True):
        if whole:
            monkeypatch.setenv(WHOLE, "1")
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
        expected = whole or not torch.__version__.startswith(VERIFIED)
        assert done.stdout == f"{TCPStore} {expected}\n", done.stderr


def test_keys_of_one_training_are_not_those_of_another(monkeypatch: pytest.MonkeyPatch, server: TcpStoreServer) -> None:
    stores: list[Any] = []
    for nonce in ("aa", "bb"):
        monkeypatch.setenv(STORE_VARIABLE, f"tcp:127.0.0.1:{server.port}:{nonce}")
        stores.append(open_store(1, SHORT))
    assert keeps_a_word(stores[0])
    assert not stores[1].check(["word"]) and not client(server).check(["word"])


HOLDER = """
import sys, time
from allranks.launch.rendezvous import TcpStoreServer
server = TcpStoreServer("127.0.0.1", 0)
print(server.port, server._process.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize("when", ["at once", "in use"])
def test_the_store_ends_with_its_parent(number: signal.Signals, when: str) -> None:
    parent = subprocess.Popen([sys.executable, "-c", HOLDER], stdout=subprocess.PIPE, text=True)
    try:
        assert parent.stdout is not None
        port, pid = map(int, parent.stdout.readline().split())
        if when == "in use":
            TCPStore("127.0.0.1", port, None, False, SHORT).set("word", "said")
        os.kill(parent.pid, number)
        parent.wait(timeout=20)
        until(lambda: not listens(port), limit_s=30)
        assert wait_gone([pid], 10) == []
    finally:
        parent.kill()
        parent.wait()


def test_signals_to_the_whole_node_do_not_end_the_store(server: TcpStoreServer) -> None:
    """Ranks that save after such a signal still need it."""
    store = client(server)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        os.kill(server._process.pid, number)
    time.sleep(1.5)  # its own look at its parent comes every second
    assert keeps_a_word(store) and server.exit_code() is None


def test_the_folder_of_a_file_store_is_private_and_removed() -> None:
    before = os.umask(0)
    try:
        place, other = FileStoreFolder(), FileStoreFolder()
    finally:
        os.umask(before)
    kind, _, path = place.environment[STORE_VARIABLE].partition(":")
    folder = Path(path).parent
    assert kind == "file" and place.environment != other.environment
    assert (stat.S_IMODE(folder.stat().st_mode), folder.stat().st_uid) == (0o700, os.getuid())
    Path(path).touch()
    place.close()
    other.close()
    assert not folder.exists()
    place.close()  # a second time does no harm


def test_what_a_killed_agent_left_is_removed_and_nothing_of_others() -> None:
    pid = os.getpid()
    folder = Path(FileStoreFolder().environment[STORE_VARIABLE].partition(":")[2]).parent
    for other in (int(f"{pid}0"), int(str(pid)[:-1] or "0")):  # other processes, whose numbers begin alike
        remove_leftover_stores(other)
        assert folder.exists()
    remove_leftover_stores(pid)
    assert not folder.exists()


@pytest.mark.parametrize("text", ["etcd:127.0.0.1:1:x", "tcp:127.0.0.1:port:x", "tcp:", "tcp:127.0.0.1:1"])
def test_a_store_that_is_not_known_is_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(STORE_VARIABLE, text)
    with pytest.raises(EnvironmentNotAble, match=STORE_VARIABLE):
        open_store(2, SHORT)


class FirstAgent:
    def __init__(self, folder: Path, port: int, *, fixed: bool) -> None:
        cluster = {"launcher": "hosts", "nodes": 2, "procs_per_node": 1, "hosts": ["127.0.0.1", "127.0.0.1"]}
        spec = parse_spec(tiny_spec("builtin:instructions", folder, cluster=cluster))
        self.run = RunDir(folder / "run")
        self.run.logs_of(1).mkdir(parents=True)
        write_json(self.run.plan, msgspec.to_builtins(make_plan(spec, machine_facts())))
        places = [NodeAddress(node=n, host=f"n{n}", address="127.0.0.1", interface="lo") for n in (0, 1)]
        meeting = Rendezvous(address="127.0.0.1", port=port, port_fixed=fixed, network="", reason="", places=places)
        write_json(self.run.rendezvous(1), msgspec.to_builtins(meeting))
        self.supervisor = Supervisor(2)
        self.hub = ChannelServer(self.supervisor, 2, keep_s=60.0)
        self.hub.start()
        words = [str(self.run.root), "--attempt", "1", "--node", "0", "--telemetry-s", "0"]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "allranks.launch.agent", *words],
            env={**os.environ, CHANNEL_VARIABLE: msgspec.json.encode(self.hub.endpoint).decode()},
            stderr=subprocess.PIPE,
            text=True,
        )

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.hub.close()


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as other:
        yield other.getsockname()[1]


def test_a_taken_fixed_port_is_refused_by_the_agent_of_node_0(tmp_path: Path, taken: int) -> None:
    with closing(FirstAgent(tmp_path, taken, fixed=True)) as agent:
        _, said = agent.process.communicate(timeout=60)
        words = f"node 0 cannot listen on 127.0.0.1:{taken} for the store of the ranks: Address already in use"
        assert agent.process.returncode == 3
        assert words in said and "cluster.rendezvous.port" in said
        agent.hub.close()  # as the driver does before it asks for the result
        assert words in agent.supervisor.result().refused
        assert words in read_json(next(agent.run.logs_of(1).glob("*.exit.json")))["refused"]
        assert agent.supervisor.orders.end, "the other nodes are told"
        assert not agent.run.rank_logs(1)


def test_a_port_that_was_only_found_free_may_have_been_taken_since(tmp_path: Path, taken: int) -> None:
    with closing(FirstAgent(tmp_path, taken, fixed=False)) as agent:
        until(lambda: 0 in agent.hub.links and agent.hub.links[0].report.store is not None, limit_s=60)
        address, used = agent.hub.links[0].report.store or ("", 0)
        assert address == "127.0.0.1" and used not in (0, taken)
        assert listens(used) == {"127.0.0.1"}


def test_a_taken_port_of_the_control_channel_is_an_explained_refusal(taken: int) -> None:
    words = rf"127\.0\.0\.1:{taken} for the control channel.*Address already in use"
    with pytest.raises(EnvironmentNotAble, match=words):
        ChannelServer(Supervisor(1), 1, "127.0.0.1", taken)
    with pytest.raises(EnvironmentNotAble, match=r"203\.0\.113\.7 for the control channel: Cannot assign"):
        ChannelServer(Supervisor(1), 1, "203.0.113.7", 0)
    assert "channel" not in {thread.name for thread in threading.enumerate()}
