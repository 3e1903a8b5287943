"""What other runs and other users of the nodes can do to a run under Slurm or by hand, and what they can read of it.

Another user writes to and deletes from the TCPStore of a live run, which cannot refuse it (SECURITY.md): nothing that
he writes is executed, a run whose ranks are connected goes on, and one that is disturbed while its ranks connect ends
within its limits with a message.
"""

import hashlib
import json
import stat
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import psutil
import yaml

from allranks.lab.cluster import Box
from allranks.launch.channel_protocol import CHANNEL_VARIABLE, Endpoint
from allranks.nodes.preflight.requirements import PORT_CANDIDATES, rendezvous_port
from allranks.rundir.files import read_json, write_json
from allranks.rundir.paths import RunDir
from tests.cluster.runs import ByHand, Submitted, log_of, program_in, spec_in
from tests.dist.harness import until
from tests.other_users import OTHER_USER, needs_other_user

REDUCES = """
import sys, time, torch, torch.distributed as dist
dist.init_process_group('gloo')
x = torch.ones(1)
until = time.time() + float(sys.argv[1])
while time.time() < until:
    dist.all_reduce(x)
    time.sleep(0.1)
dist.barrier()
"""


def started(box: Box, shared: Path, name: str, port: int, seconds: float, on: str | None = None) -> ByHand:
    """A run on n1 and n2 with `launcher: hosts`, whose launcher is on the login side or on a node."""
    hosts = {"launcher": "hosts", "hosts": [node.address for node in box.plan.nodes[:2]]}
    spec = program_in(shared, REDUCES, {"args": [str(seconds)]}, **hosts, rendezvous={"port": port})
    return ByHand(box, shared, {**spec, "name": name, "run_root": str(shared / name)}, on=on)


PORT = 23456


def test_a_second_run_at_the_same_port_is_refused_and_the_first_goes_on(box: Box, shared: Path) -> None:
    address = box.plan.nodes[0].address
    with ExitStack() as ends:
        first = started(box, shared, "first", PORT, 20)
        ends.callback(first.end)
        first.start(0)
        first.start(1)
        until(lambda: len(first.run.rank_logs(1)) == 2, limit_s=30)

        here = started(box, shared, "here", PORT, 1)  # on the machine of the first one's launcher
        ends.callback(here.end)
        assert here.wait() == 3, here.out.read_text()
        assert f":{PORT + 1} for the control channel" in " ".join(here.out.read_text().split()), here.out.read_text()

        second = started(box, shared, "second", PORT, 1, on="n3")
        ends.callback(second.end)
        second.start(1)  # its ranks would find the first one's store
        until(lambda: "1 of 2 nodes have joined" in second.out.read_text(), limit_s=30)
        second.start(0)
        assert second.wait() == 3, second.out.read_text()
        assert second.agents[0].wait(timeout=30) == 1  # told to end; no rank was started
        assert second.agents[1].wait(timeout=30) == 3
        assert first.process.poll() is None, first.out.read_text()
        assert first.wait() == 0, first.out.read_text()
    words = f"cannot listen on {address}:{PORT} for the store of the ranks: Address already in use"
    said = " ".join(second.out.read_text().split())
    assert words in said, said
    assert "cluster.rendezvous.port" in said
    assert words in read_json(second.run.agent_exit(1, "n1"))["refused"]
    assert not second.run.rank_logs(1)


def test_an_agent_of_one_run_never_joins_another(box: Box, shared: Path) -> None:
    """Even where it is sent to the other's control channel: the token of its own run opens nothing there."""
    with ExitStack() as ends:
        first = started(box, shared, "first", 23456, 3)
        ends.callback(first.end)
        second = started(box, shared, "second", 23466, 1)
        ends.callback(second.end)
        there, own = read_json(first.run.channel(1)), read_json(second.run.channel(1))
        assert there["token"] != own["token"] and there["port"] != own["port"]
        write_json(second.run.channel(1), {**there, "token": own["token"]}, private=True)
        second.start(1)
        until(lambda: "refused: " in first.out.read_text(), limit_s=30)
        first.start(0)
        until(lambda: "1 of 2 nodes have joined" in first.out.read_text(), limit_s=30)
        time.sleep(3)  # the stranger tries again every second
        assert "2 of 2" not in first.out.read_text(), first.out.read_text()
        assert not first.run.rank_logs(1)
        first.start(1)
        assert first.wait() == 0, first.out.read_text()
        assert sorted(first.run.rank_logs(1)) == [0, 1]
        assert not second.run.rank_logs(1)
        assert second.process.poll() is None


# On a node: addresses and ports that processes of allranks listen on, their command lines, and the rendezvous variables
# of the ranks.
LOOK = """
import json, os, socket, struct
found = {"listen": [], "words": "", "stores": []}
inodes = set()
for pid in filter(str.isdigit, os.listdir("/proc")):
    try:
        words = open(f"/proc/{pid}/cmdline").read()
        found["words"] += words
        if "allranks.launch" not in words.replace("/", ".") or "python" not in words.split("\\0")[0]:
            continue  # srun has ports of its own
        inodes |= {os.readlink(f"/proc/{pid}/fd/{n}") for n in os.listdir(f"/proc/{pid}/fd")}
        environ = dict(v.split("=", 1) for v in open(f"/proc/{pid}/environ").read().split("\\0") if "=" in v)
        found["stores"].append(environ.get("ALLRANKS_STORE", ""))
    except OSError:
        continue
for name, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
    for line in open(f"/proc/net/{name}").read().splitlines()[1:]:
        fields = line.split()
        if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
            address, port = fields[1].split(":")
            raw = b"".join(struct.pack("=I", int(address[i : i + 8], 16)) for i in range(0, len(address), 8))
            found["listen"].append([socket.inet_ntop(family, raw), int(port, 16)])
print(json.dumps(found))
"""


def test_a_run_on_two_nodes_listens_on_its_network_alone_and_keeps_its_token(box: Box, shared: Path) -> None:
    spec = spec_in(shared, cluster={"nodes": 2}, train={"max_steps": 2000}, checkpoint={"mode": "full"})
    job = Submitted(shared, spec)
    job.until_step(3)
    seen = {}
    for node in box.plan.nodes[:2]:
        done = box.run(["python3", "-c", LOOK], node=node.name, cwd="/")
        assert done.returncode == 0, done.stderr
        seen[node.name] = json.loads(done.stdout)
    number = job.job()
    shown = box.run(["scontrol", "show", "job", "--details", number], cwd="/").stdout
    shown += box.run(["scontrol", "write", "batch_script", number, "-"], cwd="/").stdout
    place = read_json(job.run.rendezvous(1))
    files = {path: path.read_bytes() for path in job.run.root.rglob("*") if path.is_file()}
    channel = "cat /proc/[0-9]*/environ 2>/dev/null | tr '\\0' '\\n' | grep -a ^ALLRANKS_CHANNEL= | head -1"
    environment = box.run(["bash", "-c", channel], node="n1", cwd="/").stdout
    box.run(["scancel", number], cwd="/")
    job.wait()
    addresses = {node.name: node.address for node in box.plan.nodes}
    for name, found in seen.items():
        assert found["listen"], f"the rank of {name} listens"
        assert {address for address, _ in found["listen"]} <= {addresses[name], "127.0.0.1"}, found["listen"]
    assert place["port"] in {port for address, port in seen["n1"]["listen"] if address == addresses["n1"]}, "the store"
    guessed = {rendezvous_port(number + end, attempt=n) for end in ("", ".0") for n in range(PORT_CANDIDATES)}
    assert place["port"] not in guessed
    (store,) = {text for found in seen.values() for text in found["stores"] if text}
    kind, address, port, nonce = store.split(":")
    assert (kind, address, int(port)) == ("tcp", addresses["n1"], place["port"]) and len(nonce) == 32
    token = msgspec.json.decode(environment.partition("=")[2], type=Endpoint).token
    assert len(token) == 64
    for secret in (token, nonce):
        assert secret not in shown + "".join(found["words"] for found in seen.values()) + log_of(job.run)
        assert not [str(p) for p, data in files.items() if secret.encode() in data and readable(p)]


def readable(path: Path) -> bool:
    """Whether its mode lets others than the owner read a file, whatever its folders do."""
    return path.exists() and bool(path.stat().st_mode & (stat.S_IRGRP | stat.S_IROTH))


SECRETS = {"HF_TOKEN": "hf_abcdefghijklmnop0123456789", "DB_PASSWORD": "correct horse, battery 'staple'"}
ARGUMENTS = ["--lr", "0.1", "--api-key", "Xs3cr3t 'quoted', and, commas", "https://me:Xs3cr3tToo@host"]
TELLS = """
import hashlib, json, os, sys, time
print("ARGS", hashlib.sha256(json.dumps(sys.argv[1:]).encode()).hexdigest(), flush=True)
for name in ("HF_TOKEN", "DB_PASSWORD", "PLAIN"):
    print(name, hashlib.sha256(os.environ[name].encode()).hexdigest(), flush=True)
print(os.environ["HF_TOKEN"], file=open(os.devnull, "w"))
time.sleep(4)
"""


def of_processes(run: RunDir, module: str) -> list[dict[str, Any] | None]:
    """The control channel that each process of a module was given, by its environment; None where it was given none."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if module in words and str(run.root) in words and "python" in words[0]:
            found.append(process.environ().get(CHANNEL_VARIABLE))
    return [json.loads(text) if text else None for text in found]


def test_a_secret_reaches_the_ranks_and_no_file(box: Box, shared: Path) -> None:
    job = Submitted(shared, program_in(shared, TELLS, {"args": ARGUMENTS}, env={**SECRETS, "PLAIN": "seen"}))
    job.until_ready("ARGS")
    number = read_json(job.run.job)["job"]
    (token,) = {channel["token"] for channel in of_processes(job.run, "allranks.launch.agent") if channel}
    ranks = of_processes(job.run, "allranks.launch.rank")
    assert len(ranks) == 2 and not any(ranks), "a program of the user's own cannot join the control channel"
    records = (["show", "job", "--details", number], ["write", "batch_script", number, "-"], ["show", "steps"])
    shown = "".join(box.run(["scontrol", *words], cwd=shared).stdout for words in records)
    out = job.ends(0)
    assert f"JobId={number}" in shown and "allranks.launch.driver" in shown and "export PLAIN=seen" in shown
    digests = {name: hashlib.sha256(text.encode()).hexdigest() for name, text in {**SECRETS, "PLAIN": "seen"}.items()}
    digests["ARGS"] = hashlib.sha256(json.dumps(ARGUMENTS).encode()).hexdigest()
    for path in job.run.rank_logs(1).values():
        assert dict(line.split() for line in path.read_text().splitlines() if line.split()[0] in digests) == digests
    files = [path for path in job.run.root.rglob("*") if path.is_file()]
    assert len(files) > 10
    assert not [path for path in [job.run.root, *job.run.root.rglob("*")] if path.stat().st_mode & 0o077]
    for name, secret in {**SECRETS, "--api-key": ARGUMENTS[3], "a URL": "Xs3cr3tToo", "channel": token}.items():
        texts = {str(path): path.read_bytes().decode(errors="replace") for path in files}
        texts |= {"scontrol": shown, "out": out}
        forms = {secret, yaml.safe_dump(secret).strip(), secret.replace("'", "''"), secret.replace("'", "'\"'\"'")}
        assert not [where for where, text in texts.items() if any(form in text for form in forms)], name


# Loads torch, gives up the rights of root, then writes a pickle under every key of the store, for `seconds`; deletes
# them last.
ATTACK = r"""
import json, os, pickle, sys, time
from datetime import timedelta
from torch.distributed import TCPStore
asked = json.loads(sys.argv[1])
os.setgroups([]), os.setgid(asked["uid"]), os.setuid(asked["uid"])

class Payload:
    def __reduce__(self):
        return os.system, ("id > " + asked["marker"],)

payload = pickle.dumps(Payload())
store = TCPStore(asked["address"], asked["port"], None, False, timedelta(seconds=5), False)
found = {"uid": os.getuid(), "keys": [], "set": 0, "deleted": 0}
print("CONNECTED", flush=True)
until = time.monotonic() + asked["seconds"]
try:
    while time.monotonic() < until:
        keys = store.list_keys()
        found["keys"] = sorted({*found["keys"], *keys})
        for key in keys:
            store.set(key, payload)
            found["set"] += 1
        time.sleep(0.002)
    for key in found["keys"] if asked["delete"] else ():
        found["deleted"] += store.delete_key(key)
except Exception as error:  # the run has ended
    found["error"] = type(error).__name__
print(json.dumps(found))
"""


class Attacker:
    """The attack on the store of a run, as a process on one of the nodes."""

    def __init__(self, box: Box, shared: Path, job: Submitted, *, node: str, seconds: float, delete: bool) -> None:
        until(lambda: job.run.rendezvous(1).exists() or job.process.poll() is not None, limit_s=60)
        assert job.process.poll() is None, job.out.read_text() + log_of(job.run)
        folder = shared / "attacker"
        folder.mkdir()
        folder.chmod(0o777)
        shared.chmod(0o711)
        self.marker = folder / "executed"
        place = {"address": box.plan.nodes[0].address, "port": read_json(job.run.rendezvous(1))["port"]}
        asked = {**place, "uid": OTHER_USER, "marker": str(self.marker), "seconds": seconds, "delete": delete}
        command = [*box.node_prefix(node, "/"), sys.executable, "-c", ATTACK, json.dumps(asked)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def result(self) -> dict[str, Any]:
        out, err = self.process.communicate(timeout=90)
        assert self.process.returncode == 0, err
        found = json.loads(out.splitlines()[-1])
        assert found["uid"] == OTHER_USER
        return found


@needs_other_user
def test_a_run_goes_on_when_another_user_overwrites_and_deletes_the_keys_of_its_store(box: Box, shared: Path) -> None:
    spec = spec_in(shared, cluster={"nodes": 2}, train={"max_steps": 400}, checkpoint={"at_end": False})
    job = Submitted(shared, spec)
    job.until_step(3)
    attacker = Attacker(box, shared, job, node="n2", seconds=2, delete=True)
    found = attacker.result()
    assert job.process.poll() is None, "the attack was over before the run was"
    job.ends(0)
    assert found["keys"] and found["set"] > 50 and found["deleted"] >= len(found["keys"]) // 2, found
    assert read_json(job.run.metrics)["status"] == "succeeded"
    assert not attacker.marker.exists()


@needs_other_user
def test_a_run_that_is_disturbed_while_its_ranks_connect_ends_with_a_message(box: Box, shared: Path) -> None:
    spec = spec_in(shared, cluster={"nodes": 2, "timeout_s": 30}, train={"max_steps": 20}, checkpoint={"at_end": False})
    job = Submitted(shared, spec)
    attacker = Attacker(box, shared, job, node="n1", seconds=20, delete=False)
    code, out = job.wait()
    found = attacker.result()
    assert found["set"] > 0, found
    assert not attacker.marker.exists()
    assert code in (0, 1) and "Traceback" not in out, out
    assert code == 0 or "failed before the first step" in out, out
