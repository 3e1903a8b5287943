"""Where a run on several nodes listens, and who can read the token of its control channel."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import msgspec

from allranks.lab.cluster import Box
from allranks.launch.channel_protocol import Endpoint
from allranks.nodes.preflight.requirements import PORT_CANDIDATES, rendezvous_port
from allranks.rundir.files import read_json
from tests.cluster.runs import Submitted, log_of, spec_in

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
        if "allranks.launch" not in words or "python" not in words.split("\\0")[0]:  # srun has ports of its own
            continue
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
    job = Submitted(
        shared, spec_in(shared, cluster={"nodes": 2}, train={"max_steps": 2000}, checkpoint={"mode": "full"})
    )
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
    environment = box.run(
        ["bash", "-c", "cat /proc/[0-9]*/environ 2>/dev/null | tr '\\0' '\\n' | grep -a ^ALLRANKS_CHANNEL= | head -1"],
        node="n1",
        cwd="/",
    ).stdout
    box.run(["scancel", number], cwd="/")
    job.wait()
    addresses = {node.name: node.address for node in box.plan.nodes}
    for name, found in seen.items():
        assert found["listen"], f"the rank of {name} listens"
        assert {address for address, _ in found["listen"]} <= {addresses[name], "127.0.0.1"}, found["listen"]
    ports = {port for address, port in seen["n1"]["listen"] if address == addresses["n1"]}
    assert place["port"] in ports, "the store"
    assert place["port"] not in {
        rendezvous_port(f"{number}{restart}", attempt=n) for restart in ("", ".0") for n in range(PORT_CANDIDATES)
    }
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
