"""`srun allranks torchrun`, as field notes start torchrun: a rank of another node is named, with and without a shared
run folder."""

from pathlib import Path

import pytest

from allranks.lab.cluster import Box
from tests.cluster.helpers import CLI

BOOM = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
if dist.get_rank() == 2:
    raise KeyError("tokens_17")
dist.all_reduce(torch.ones(1))
"""


@pytest.mark.full
@pytest.mark.parametrize(
    ("place", "says"),
    [("runs", "KeyError: 'tokens_17', in {}:5 in <module>"), ("/tmp/own", "KeyError: 'tokens_17'")],  # noqa: S108
)
def test_a_failed_rank_of_another_node_is_named(box: Box, shared: Path, place: str, says: str) -> None:
    program = shared / "boom.py"
    program.write_text(BOOM)
    line = [CLI[0], "-m", "allranks.cli.main", "torchrun", "--nnodes=3", "--rdzv-backend=c10d", "--rdzv-id=7"]
    line += ["--rdzv-endpoint=n1:29500", f"--log-dir={place}", str(program)]
    done = box.run(["srun", "-N3", "--ntasks-per-node=1", *line], cwd=shared, timeout_s=240)
    assert done.returncode == 1
    assert f"allranks: rank 2 on n3 failed: {says.format(program)}" in done.stderr, done.stderr
    assert done.stderr.count("run folder") == 1
