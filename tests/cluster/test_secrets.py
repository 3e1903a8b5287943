"""A secret of ``cluster.env`` reaches the ranks, and stands nowhere that others read."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import psutil
import yaml

from allranks.lab.cluster import Box
from allranks.launch.channel_protocol import CHANNEL_VARIABLE
from allranks.rundir.files import read_json
from allranks.rundir.paths import RunDir
from tests.cluster.runs import Submitted, log_of
from tests.dist.harness import until

SECRETS = {"HF_TOKEN": "hf_abcdefghijklmnop0123456789", "DB_PASSWORD": "correct horse, battery 'staple'"}
ARGUMENTS = ["--lr", "0.1", "--api-key", "Xs3cr3t 'quoted', and, commas", "https://me:Xs3cr3tToo@host"]
PROGRAM = """
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
    (shared / "own.py").write_text(PROGRAM)
    spec = {
        "name": "own",
        "script": {"path": str(shared / "own.py"), "args": ARGUMENTS},
        "run_root": str(shared / "runs"),
        "cluster": {"launcher": "slurm", "nodes": 2, "procs_per_node": 1, "env": {**SECRETS, "PLAIN": "seen"}},
    }
    job = Submitted(shared, spec)
    until(lambda: len(job.run.rank_logs(1)) == 2 or job.process.poll() is not None, limit_s=60)
    number = read_json(job.run.job)["job"]
    (token,) = {channel["token"] for channel in of_processes(job.run, "allranks.launch.agent") if channel}
    ranks = of_processes(job.run, "allranks.launch.rank")
    assert len(ranks) == 2 and not any(ranks), "a program of the user's own cannot join the control channel"
    shown = "".join(
        box.run(["scontrol", *words], cwd=shared).stdout
        for words in (["show", "job", "--details", number], ["write", "batch_script", number, "-"], ["show", "steps"])
    )
    code, out = job.wait()
    assert code == 0, out + log_of(job.run)
    assert f"JobId={number}" in shown and "allranks.launch.driver" in shown and "export PLAIN=seen" in shown
    digests = {name: hashlib.sha256(text.encode()).hexdigest() for name, text in {**SECRETS, "PLAIN": "seen"}.items()}
    digests["ARGS"] = hashlib.sha256(json.dumps(ARGUMENTS).encode()).hexdigest()
    for path in job.run.rank_logs(1).values():
        said = dict(line.split() for line in path.read_text().splitlines() if line.split()[0] in digests)
        assert said == digests
    files = [path for path in job.run.root.rglob("*") if path.is_file()]
    assert len(files) > 10
    assert not [path for path in [job.run.root, *job.run.root.rglob("*")] if path.stat().st_mode & 0o077]
    for name, secret in {**SECRETS, "--api-key": ARGUMENTS[3], "a URL": "Xs3cr3tToo", "channel": token}.items():
        texts = {str(path): path.read_bytes().decode(errors="replace") for path in files} | {
            "scontrol": shown,
            "out": out,
        }
        forms = {secret, yaml.safe_dump(secret).strip(), secret.replace("'", "''"), secret.replace("'", "'\"'\"'")}
        assert not [where for where, text in texts.items() if any(form in text for form in forms)], name
