"""Every strategy on one GPU, and on two Gloo ranks that share it, against one process of plain torch."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import REPO
from tests.dist.harness import free_port, shared_strategies
from tests.dist.variants import GPU_VARIANTS

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400)]
STRATEGIES = ["single", *shared_strategies()]
# Gloo has an all-reduce and a broadcast for tensors of a GPU, and nothing else that these strategies need.
SHARING = ["simple_ddp", "simple_ddp_ga", "simple_ddp_hook", "simple_ddp_async", "bucket_ddp_async", "pytorch_ddp"]
# of what the training has changed; 1 is as wrong as untrained
TOLERANCE = {"plain": 2e-3, "mixed": 0.2, "lora_on_bf16": 0.2}
NORM_TOLERANCE = {"plain": 1e-3, "mixed": 0.05, "lora_on_bf16": 0.05}
Found = dict[tuple[str, str], dict[str, Any]]
PAIR_LIMIT_S = 60
START_LIMIT_S = 120


def run_pairs(folder: Path, names: list[str], world: int, device: str, backend: str) -> Found:
    """The result of every pair. Ranks that die or stall are started again behind the pair that did it."""
    left = [(name, variant) for name in names for variant in GPU_VARIANTS]
    found: Found = {}
    while left:
        results = folder / f"results{len(left)}.jsonl"
        said = attempt(results, left, world, device, backend)
        for line in results.read_text().splitlines() if results.exists() else []:
            one = json.loads(line)
            found[one["strategy"], one["variant"]] = one
        left = [pair for pair in left if pair not in found]
        if left:
            found[left[0]] = {"failed": f"the ranks died or stalled: {said}"}
            left = left[1:] if "before the first pair" not in said else []
    return found


def attempt(results: Path, pairs: list[tuple[str, str]], world: int, device: str, backend: str) -> str:
    """Run ranks until all pairs are done, or one takes too long; return what they said last."""
    port = str(free_port())
    args = json.dumps({"pairs": pairs, "device": device, "backend": backend})
    ranks = []
    for rank in range(world):
        env = {
            **os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        output = results.with_suffix(f".rank{rank}.out").open("w")
        command = [sys.executable, "-m", "tests.gpu.ranks", str(results), args]
        ranks.append(subprocess.Popen(command, cwd=REPO, env=env, stdout=output, stderr=subprocess.STDOUT))
    done, since, started = 0, time.monotonic(), False
    try:
        while any(r.poll() is None for r in ranks):
            time.sleep(0.2)
            now = len(results.read_text().splitlines()) if results.exists() else 0
            if now > done:
                done, since, started = now, time.monotonic(), True
            late = time.monotonic() - since > (PAIR_LIMIT_S if started else START_LIMIT_S)
            if late or any(r.poll() not in (None, 0) for r in ranks):
                break
    finally:
        for r in ranks:
            r.kill()
            r.wait()
    where = "" if started else "before the first pair: "
    return where + " | ".join([results.with_suffix(f".rank{r}.out").read_text()[-600:] for r in range(world)])


@pytest.fixture(scope="module")
def one_rank(device: str, tmp_path_factory: pytest.TempPathFactory) -> Found:
    return run_pairs(tmp_path_factory.mktemp("one"), STRATEGIES, 1, device, "nccl" if device == "cuda" else "gloo")


@pytest.fixture(scope="module")
def two_ranks(device: str, tmp_path_factory: pytest.TempPathFactory) -> Found:
    return run_pairs(tmp_path_factory.mktemp("two"), SHARING, 2, device, "gloo")


def check(found: Found, name: str) -> None:
    """Judge all variants of a strategy; skip if the libraries here cannot do one of them, and the others are right."""
    unable = ""
    for variant in GPU_VARIANTS:
        one = found.get((name, variant), {"failed": "it was not reached"})
        if "unable" in one:
            unable = f"{variant}: {one['unable']}"
            continue
        assert "failed" not in one, f"{variant}: {one['failed']}"
        assert one["error"] is not None and one["error"] < TOLERANCE[variant], one
        assert one["norm_error"] < NORM_TOLERANCE[variant], one
        assert one["dtypes"] == ["torch.float32"], one
    if unable:
        pytest.skip(unable)


@pytest.mark.parametrize("name", STRATEGIES)
def test_one_rank_equals_plain_torch(name: str, one_rank: Found) -> None:
    check(one_rank, name)


@pytest.mark.parametrize("name", SHARING)
def test_two_ranks_on_one_device_equal_one_process(name: str, two_ranks: Found) -> None:
    check(two_ranks, name)
