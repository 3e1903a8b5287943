"""Loading on real gloo ranks: the weights of transformers and PEFT, read by one rank or by each, kept in parts."""

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from allranks.rundir.events import read_events
from allranks.rundir.paths import RunDir
from allranks.spec.records import ModelSpec
from tests.dist.architecture_configs import CONFIGS
from tests.dist.harness import rows_spec, run_ranks, step_events, train, weights_of
from tests.dist.making import CONFIG, build_model, model_of, save_family

PARTS = ["pytorch_zero2", "pytorch_zero3", "zero3", "deepspeed_zero3"]
WHOLE = ["pytorch_ddp", "zero2", "simple_ddp"]


def saved(folder: Path, family: str = "mistral", dtype: str = "float32", **config: Any) -> Path:
    """A model folder in several files, as the hub has them (experts apart)."""
    _, tokenizer = model_of()
    spec = ModelSpec(name=f"tiny:{family}", config={**CONFIG, **config})
    model: Any = build_model(spec, tokenizer, dtype=dtype, labels={}, seed=7)
    model.save_pretrained(folder, max_shard_size="30KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 1
    return folder


def check(found: list[Any], names: list[str], world: int, sent: str = "", *, kept_whole: bool = False) -> None:
    """`sent`: part of the reason why rank 0 has read all; empty if every rank should read."""
    for name in names:
        ranks = [f[name] for f in found]
        assert all("error" not in r for r in ranks), ranks
        good = [r["bad"] == [] and r["same_digest"] and r["trained_as"] and r["published"] for r in ranks]
        assert all(good), (name, ranks)
        if name.partition(":")[0] in PARTS:
            assert [r["how"] for r in ranks] == ["parts"] * world
            share = 2 if name.endswith(":nodes") else world
            assert all(r["kept"] < 1.3 * r["total"] / share + r["whole"] for r in ranks), (name, ranks)
        if ranks[0]["from_config"]:
            continue
        of_deepspeed = "" if not name.startswith("deepspeed") else "DeepSpeed divides full weights"
        if reason := sent or of_deepspeed:
            assert all(r["readers"] == "rank 0" and reason in r["why"] and r["base"] == "" for r in ranks[1:]), ranks
            assert ranks[0]["read"] > 0 and all(r["read"] == 0 for r in ranks[1:]), (name, ranks)
        else:
            assert all(r["readers"] == "every rank" and r["why"].startswith("all ranks see") for r in ranks), ranks
            assert all(("sends 1 tensors, because nodes keep" in r["why"]) == kept_whole for r in ranks), ranks


def loads(world: int, tmp_path: Path, **how: Any) -> list[Any]:
    return run_ranks("loads", world, tmp_path, 240, "loads", **how)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("lora", [False, True])
def test_files_give_what_transformers_gives(world: int, lora: bool, tmp_path: Path) -> None:
    """In both ways: each rank reads its part; or rank 0 reads, because the last rank does not see the files."""
    folder = saved(tmp_path / "model", intermediate_size=61)
    names = [*PARTS, *WHOLE, *(["pytorch_zero3:sharded"] if lora else [])]
    how = {"model": str(folder), "names": names, "lora": lora}
    found = loads(world, tmp_path, **how)
    check(found, names, world)
    assert all(f[n]["how"] == "whole" for f in found for n in WHOLE)
    for name in names:
        ranks = [f[name] for f in found]
        if not name.startswith("deepspeed"):
            share = world if name.partition(":")[0] in PARTS else 1
            assert all(0 < r["read"] <= 1.2 * r["total"] / share + r["whole"] for r in ranks), (name, ranks)
    hidden = loads(world, tmp_path, unseen=world - 1, **how)
    check(hidden, names, world, sent=f"rank {world - 1} on node0 does not see {folder}")
    assert [f[n]["base"] for n in names for f in found] == [f[n]["base"] for n in names for f in hidden]
    assert bool(found[0]["zero3"]["base"]) == lora


NODES = {"ranks_per_node": 2, "ranks_per_host": 2, "pieces": {"PIECE_BYTES": 4096}}


def test_weights_that_several_nodes_keep_have_one_digest(tmp_path: Path) -> None:
    """Two shards with a copy each. On one host both copies are read, also by LoRA."""
    folder = saved(tmp_path / "model", intermediate_size=61)
    names = ["pytorch_zero3", "zero3", "pytorch_ddp", "pytorch_zero3:nodes"]
    bases: set[str] = set()
    for hosts in (1, 2):
        how = {**NODES, "model": str(folder), "names": names, "lora": True, "ranks_per_host": 4 // hosts}
        found = loads(4, tmp_path, **how)
        check(found, names[:1], 4, kept_whole=hosts > 1)
        check(found, names[1:2], 4)
        check(found, names[2:], 4, sent="nodes keep the same weights" if hosts > 1 else "")
        bases |= {found[0][name]["base"] for name in names}
    assert len(bases) == 1 and "" not in bases


def test_rows_that_several_nodes_keep_are_read_by_rank_0_and_go_once_to_each_node(tmp_path: Path) -> None:
    """Rank 0 sends rows to ranks 1 and 2, and rank 1 passes its own on to rank 3."""
    folder, name = saved(tmp_path / "model"), "pytorch_zero3:nodes"
    found = loads(4, tmp_path, model=str(folder), names=[name], **NODES)
    check(found, [name], 4, sent="nodes keep the same weights")
    ranks = [f[name] for f in found]
    half = ranks[0]["kept"]
    assert [r["kept"] for r in ranks] == [half] * 4 and 2 * half == ranks[0]["total"]
    assert [r["read"] for r in ranks] == [2 * half, 0, 0, 0]
    assert [(r["sent"], r["received"]) for r in ranks] == [(2 * half, 0), (half, half), (0, half), (0, half)]


@pytest.mark.parametrize("other", ["size", "time", "first", "last"])
def test_a_rank_that_sees_other_files_gets_those_of_rank_0(other: str, tmp_path: Path) -> None:
    """A copy of the folder, of which one file differs."""
    folder, there = saved(tmp_path / "model"), tmp_path / "there"
    shutil.copytree(folder, there)
    file = sorted(there.glob("*.safetensors"))[1]
    before, content = file.stat(), bytearray(file.read_bytes())
    if other == "size":
        content = content[:-1]
    elif other != "time":
        content[8 + int.from_bytes(content[:8], "little") if other == "first" else -1] ^= 1
    file.write_bytes(content)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns + (other == "time")))
    names = ["zero3", "pytorch_zero3", "pytorch_ddp"]
    found = loads(2, tmp_path, names=names, model=str(folder), unseen=1, there=str(there))
    words = {"size": "bytes in", "time": "another time of change"}.get(other, "other content")
    check(found, names, 2, sent=f"rank 1 on node0 finds {words}" if other != "size" else words)
    assert all(file.name in f["zero3"]["why"] for f in found)


UNEQUAL = "layers.0.mlp.gate_proj.weight and 1 more tensors: .* differ from those that every rank read"


@pytest.mark.parametrize(
    ("bug", "message", "code"),
    [
        ("short", "rank 1: .*: the file was truncated to .* while it was read", 3),
        ("failing", "rank 1: .*: .*weight cannot be read: Input/output error", 3),
        ("unreadable", "cannot be read: .*Errno 5", 3),  # rank 0 reads for all
        ("changed", "rank [01]: .*: was changed while the model was loaded", 3),
        ("unkept", UNEQUAL, 1),
        ("unread", UNEQUAL, 1),
    ],
)
def test_all_ranks_hear_why_one_cannot_read_its_part(bug: str, message: str, code: int, tmp_path: Path) -> None:
    names = ["pytorch_zero3", "zero3", *([] if bug.startswith("un") else ["pytorch_ddp"])]
    sight = {"unseen": 1} if bug == "unreadable" else {}
    for name in names:
        how = {"model": str(saved(tmp_path / name)), "names": [name], "plant": bug, **sight}
        found = [f[name] for f in loads(3, tmp_path, **how)]
        assert all(re.search(message, f["error"]) and f["exit_code"] == code for f in found), (name, found)
        assert len({f["error"] for f in found}) == 1, found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tied_weights_fused_experts_and_other_dtypes(dtype: str, tmp_path: Path) -> None:
    for family, config in (("glm4_moe", {"num_hidden_layers": 3}), ("llama", {"tie_word_embeddings": True})):
        # DeepSpeed trains in one dtype; the routers are in float32
        mixed = family == "glm4_moe" and dtype == "bfloat16"
        names = ["pytorch_zero3", "zero3", "pytorch_ddp", *([] if mixed else ["deepspeed_zero3"])]
        folder = saved(tmp_path / family, family, "bfloat16", **config)
        check(loads(2, tmp_path, model=folder, names=names, dtype=dtype), names, 2)


def with_experts(folder: Path, family: str, **how: Any) -> Path:
    """A model in bfloat16 files, most of it five experts per block, which the files hold separately."""
    sizes = {"n_routed_experts": 5, "num_local_experts": 5, "num_experts": 5, "moe_intermediate_size": 200}
    config = {**CONFIGS[family], "vocab_size": 300, "intermediate_size": 200}
    config |= {k: v for k, v in sizes.items() if k in config}
    return save_family(folder, family, config, torch.bfloat16, **how)


@pytest.mark.parametrize("lora", [False, True])
def test_experts_that_the_files_hold_separately_are_sent_by_rank_0(lora: bool, tmp_path: Path) -> None:
    names = ["pytorch_zero3", "zero3", "pytorch_ddp"]
    for family, one_file in (("glm4_moe", False), ("mixtral", True)):
        folder = with_experts(tmp_path / family, family, max_shard_size="1GB" if one_file else "90KB")
        assert (len(list(folder.glob("*.safetensors"))) == 1) == one_file
        found = loads(2, tmp_path, model=str(folder), names=names, lora=lora)
        check(found, names, 2)
        assert all("because the files hold them in another layout" in f[name]["why"] for f in found for name in names)
        bases = {found[0][name]["base"] for name in names}
        assert len(bases) == 1 and bool(bases.pop()) == lora


def test_a_config_gives_what_one_process_draws(tmp_path: Path) -> None:
    names = [*PARTS, *WHOLE]
    for lora in (False, True):
        check(loads(2, tmp_path, model="tiny:mistral", config=CONFIG, names=names, lora=lora), names, 2)


@pytest.mark.parametrize("bug", ["dropped", "other_rows"])
def test_a_part_that_went_astray_is_seen(bug: str, tmp_path: Path) -> None:
    found = loads(2, tmp_path, model=saved(tmp_path / "model"), names=["pytorch_zero3"], plant=bug, unseen=1)
    assert all("differ from those that rank 0 read" in f["pytorch_zero3"]["error"] for f in found), found
    assert all(f["pytorch_zero3"]["exit_code"] == 1 for f in found)


def test_all_ranks_refuse_damaged_files(tmp_path: Path) -> None:
    folder = saved(tmp_path / "model")
    file = folder / json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]["model.norm.weight"]
    file.write_bytes(file.read_bytes()[:-1])
    for name in ("zero3", "pytorch_ddp"):
        found = run_ranks("refusal", 2, tmp_path, limit_s=240, module="loads", model=folder, name=name)
        assert all(f and f["exit_code"] == 3 for f in found), found
        assert all("is truncated" in f["error"] and file.name in f["error"] for f in found), found


@pytest.mark.parametrize(("plant", "other", "sight"), [("killed", 1, {"unseen": 1}), ("ended", 0, {})])
def test_ranks_end_when_a_reader_is_killed(tmp_path: Path, plant: str, other: int, sight: dict[str, int]) -> None:
    """Rank 0, which reads for all; or rank 1, which reads its own part."""
    how = {"model": saved(tmp_path / "model"), "names": ["pytorch_zero3"], "plant": plant, **sight}
    with pytest.raises(AssertionError, match=f"rank {other}, exit ") as caught:
        loads(3, tmp_path, **how)
    assert "rank 2, exit " in str(caught.value)


def spec_of(tmp_path: Path, folder: Path, strategy: str, lora: bool) -> dict[str, Any]:
    return rows_spec(
        tmp_path, name=strategy, model={"name": str(folder), "config": {}}, strategy={"name": strategy},
        adapter={"type": "lora", "r": 4} if lora else {"type": "none"}, train={"max_steps": 3},
        data={"max_length": 256},  # a token is a byte here
    )  # fmt: skip


@pytest.mark.parametrize("lora", [False, pytest.param(True, marks=pytest.mark.full)])
def test_a_run_in_parts_from_a_folder_equals_a_plain_one(tmp_path: Path, lora: bool) -> None:
    folder = saved(tmp_path / "model")
    model_of()[1].save_pretrained(folder)
    runs: dict[str, RunDir] = {}
    for strategy in ("pytorch_ddp", "pytorch_zero3", "zero3"):
        _, runs[strategy] = train(tmp_path, spec_of(tmp_path, folder, strategy, lora), code=0)
    plain = weights_of(runs["pytorch_ddp"], 3)
    for strategy, how in (("pytorch_ddp", "whole"), ("pytorch_zero3", "parts"), ("zero3", "parts")):
        run = runs[strategy]
        loads = [next(e for e in read_events(run.events_of(rank)) if e["event"] == "load") for rank in range(2)]
        assert [e["how"] for e in loads] == [how, how]
        (log,) = (file.read_text() for file in run.logs_of(1).glob("*.rank0.log"))
        assert all(e["read_bytes"] > 50_000 and e["readers"] == "every rank" for e in loads)
        assert "loading: every rank read the weight files, because all ranks see the same files" in log
        ours = weights_of(run, 3)
        assert ours.keys() == plain.keys()
        assert max(float((ours[k] - plain[k]).abs().max()) for k in ours) < 1e-5
        assert step_events(run)[0]["loss"] == pytest.approx(step_events(runs["pytorch_ddp"])[0]["loss"], rel=1e-5)
