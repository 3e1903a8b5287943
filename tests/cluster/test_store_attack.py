"""Another user of the nodes writes to and deletes from the TCPStore of a live Slurm run, which cannot refuse it
(SECURITY.md).

What must hold: nothing that he writes is executed, a run whose ranks are connected goes on, and one that is disturbed
while its ranks connect ends within its limits with a message.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from allranks.lab.cluster import Box
from allranks.rundir.files import read_json
from tests.cluster.runs import Submitted, log_of, spec_in
from tests.dist.harness import until
from tests.security.users import OTHER_USER, needs_other_user

pytestmark = needs_other_user
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
        asked = {
            "uid": OTHER_USER,
            "address": box.plan.nodes[0].address,
            "port": read_json(job.run.rendezvous(1))["port"],
            "marker": str(self.marker),
            "seconds": seconds,
            "delete": delete,
        }
        self.process = subprocess.Popen(
            [*box.node_prefix(node, "/"), sys.executable, "-c", ATTACK, json.dumps(asked)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def result(self) -> dict[str, Any]:
        out, err = self.process.communicate(timeout=90)
        assert self.process.returncode == 0, err
        found = json.loads(out.splitlines()[-1])
        assert found["uid"] == OTHER_USER
        return found


def test_a_run_goes_on_when_another_user_overwrites_and_deletes_the_keys_of_its_store(box: Box, shared: Path) -> None:
    spec = spec_in(shared, cluster={"nodes": 2}, train={"max_steps": 400}, checkpoint={"at_end": False})
    job = Submitted(shared, spec)
    job.until_step(3)
    attacker = Attacker(box, shared, job, node="n2", seconds=2, delete=True)
    found = attacker.result()
    assert job.process.poll() is None, "the attack was over before the run was"
    code, out = job.wait()
    assert found["keys"] and found["set"] > 50 and found["deleted"] >= len(found["keys"]) // 2, found
    assert code == 0, out + log_of(job.run)
    assert read_json(job.run.metrics)["status"] == "succeeded"
    assert not attacker.marker.exists()


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
