"""`srun allranks torchrun`, as field notes start torchrun: a rank of another node is named, folder shared or not."""

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


SUM = """
import os, sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
ranks = torch.tensor([dist.get_rank()])
dist.all_reduce(ranks)
if dist.get_rank() == dist.get_world_size() - 1:
    with open(sys.argv[1], "w") as file:
        file.write(f"{dist.get_world_size()} ranks, sum {int(ranks)}, {os.environ['GROUP_RANK']}, {sys.argv[2:]}")
"""
C10D = "--rdzv_backend=c10d --rdzv_id=$SLURM_JOB_ID --rdzv_endpoint=$MASTER_ADDR:$MASTER_PORT"


@pytest.mark.full
@pytest.mark.parametrize(
    ("options", "arguments", "ranks"),
    [
        ("--nproc_per_node=2", "--run_name sft --max_steps 10", 2),  # 000, one node
        (f"--nnodes=$SLURM_JOB_NUM_NODES --nproc_per_node=2 --node_rank=$SLURM_NODEID {C10D}", "--bf16 True", 4),  # 000
        ("--standalone --nproc_per_node=2", "--ddp-choice simple_ddp", 2),  # 002, and 004 on one node
        (f"--nnodes=$SLURM_JOB_NUM_NODES --nproc_per_node=2 {C10D} --node_rank=$SLURM_NODEID", "--epochs 3", 6),  # 003
        (
            "--nnodes=$SLURM_JOB_NUM_NODES --nproc_per_node=2 --node_rank=$SLURM_NODEID --master_addr=$MASTER_ADDR "
            "--master_port=$MASTER_PORT",
            "--deepspeed_config ds.json",
            6,
        ),  # 004
    ],
    ids=["000-one-node", "000-two-nodes", "002", "003", "004"],
)
def test_launch_lines_of_the_field_notes(box: Box, shared: Path, options: str, arguments: str, ranks: int) -> None:
    program, out, nodes = shared / "sum.py", shared / "out", ranks // 2
    program.write_text(SUM)
    line = f"{CLI[0]} -m allranks.cli.main torchrun {options} {program} {out} {arguments}"
    script = f"export MASTER_ADDR=n1 MASTER_PORT=29511; {line}"
    done = box.run(["srun", f"-N{nodes}", "--ntasks-per-node=1", "bash", "-c", script], cwd=shared, timeout_s=240)
    assert done.returncode == 0, done.stderr
    assert out.read_text() == f"{ranks} ranks, sum {sum(range(ranks))}, {nodes - 1}, {arguments.split()}"
