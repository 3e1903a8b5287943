"""A secret of ``cluster.env`` reaches the ranks, and stands nowhere that others read."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import yaml

from allranks.rundir import read_json
from allranks.testcluster import Box
from tests.cluster.runs import Submitted, log_of
from tests.dist.harness import until

pytestmark = pytest.mark.python_on_nodes
SECRETS = {"HF_TOKEN": "hf_abcdefghijklmnop0123456789", "DB_PASSWORD": "correct horse, battery 'staple'"}
PROGRAM = """
import hashlib, os, time
for name in ("HF_TOKEN", "DB_PASSWORD", "PLAIN"):
    print(name, hashlib.sha256(os.environ[name].encode()).hexdigest(), flush=True)
print(os.environ["HF_TOKEN"], file=open(os.devnull, "w"))
time.sleep(4)
"""


def test_a_secret_reaches_the_ranks_and_no_file(box: Box, shared: Path) -> None:
    (shared / "own.py").write_text(PROGRAM)
    spec = {
        "name": "own",
        "script": {"path": str(shared / "own.py")},
        "run_root": str(shared / "runs"),
        "cluster": {"launcher": "slurm", "nodes": 2, "procs_per_node": 1, "env": {**SECRETS, "PLAIN": "seen"}},
    }
    job = Submitted(shared, spec)
    until(lambda: len(job.run.rank_logs(1)) == 2 or job.process.poll() is not None, limit_s=60)
    number = read_json(job.run.job)["job"]
    shown = "".join(
        box.run(["scontrol", *words], cwd=shared).stdout
        for words in (["show", "job", "--details", number], ["write", "batch_script", number, "-"], ["show", "steps"])
    )
    code, out = job.wait()
    assert code == 0, out + log_of(job.run)
    assert f"JobId={number}" in shown and "allranks.launch.driver" in shown and "export PLAIN=seen" in shown
    digests = {name: hashlib.sha256(text.encode()).hexdigest() for name, text in {**SECRETS, "PLAIN": "seen"}.items()}
    for path in job.run.rank_logs(1).values():
        said = dict(line.split() for line in path.read_text().splitlines() if line.split()[0] in digests)
        assert said == digests
    files = [path for path in job.run.root.rglob("*") if path.is_file()]
    assert len(files) > 10
    for name, secret in SECRETS.items():
        texts = {str(path): path.read_bytes().decode(errors="replace") for path in files} | {
            "scontrol": shown,
            "out": out,
        }
        forms = {secret, yaml.safe_dump(secret).strip(), secret.replace("'", "''"), secret.replace("'", "'\"'\"'")}
        assert not [where for where, text in texts.items() if any(form in text for form in forms)], name
