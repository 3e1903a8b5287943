"""What is refused before a weight is read, checksums that add up, and models that have shapes but no memory."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from allranks.errors import AllranksError
from allranks.spec.records import ModelSpec
from allranks.train.data.tokenization import train_tokenizer
from allranks.train.distributed import SINGLE_PROCESS
from allranks.train.models.build import require_complete
from allranks.train.models.weight_loader import (
    TransferChecksums,
    is_unmaterialized,
    unmaterialize,
    unmaterialized_parameter,
)
from allranks.train.models.weight_sources import FileSource
from allranks.train.sync_proof import add_checksums, checksums
from allranks.utils.safetensors_files import stored_tensors
from tests.dist.making import build_model

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return train_tokenizer(["hello world 123"], 300, classifier=False)


@pytest.fixture(scope="module")
def folder(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    load("tiny:mistral", tokenizer, config=SMALL).save_pretrained(path, max_shard_size="60KB")
    return path


def load(name: str | Path, tokenizer: Any, labels: dict[str, int] | None = None, **more: Any) -> Any:
    return build_model(ModelSpec(name=str(name), **more), tokenizer, dtype="float32", labels=labels or {}, seed=1)


def file_of(folder: Path, tensor: str) -> Path:
    return folder / json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"][tensor]


def change(folder: Path, tensor: str, make: Callable[[torch.Tensor], torch.Tensor | None]) -> None:
    file = file_of(folder, tensor)
    tensors = load_file(file)
    new = make(tensors.pop(tensor))
    save_file(tensors | ({} if new is None else {tensor: new}), file)


Q = "model.layers.1.self_attn.q_proj.weight"


def cut(folder: Path) -> None:
    file = file_of(folder, Q)
    file.write_bytes(file.read_bytes()[:-3])


def cut_in_header(folder: Path) -> None:
    file = file_of(folder, Q)
    file.write_bytes(file.read_bytes()[:40])


def not_listed(folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    listed = json.loads(index.read_text())
    change(folder, Q, lambda t: None)
    del listed["weight_map"][Q]
    index.write_text(json.dumps(listed))


def outside(folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    listed = json.loads(index.read_text())
    listed["weight_map"][Q] = "../elsewhere.safetensors"
    index.write_text(json.dumps(listed))


def pickled(folder: Path) -> None:
    for file in folder.glob("model*"):
        file.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"x")


def pointer(folder: Path) -> None:
    file_of(folder, Q).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")


def wrong_index(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text("{}")


def damaged_header(folder: Path) -> None:
    file = file_of(folder, Q)
    body = bytearray(file.read_bytes())
    body[12] ^= 0xFF
    file.write_bytes(body)


def other_offsets(folder: Path) -> None:
    file = file_of(folder, Q)
    file.write_bytes(file.read_bytes().replace(b'"shape":[32,32]', b'"shape":[32,31]'))


@pytest.mark.parametrize(
    ("spoil", "code", "says"),
    [
        (lambda f: file_of(f, Q).unlink(), 3, ["is missing", "model-0000"]),
        (cut, 3, ["is truncated", "model.norm.weight"]),
        (cut_in_header, 3, ["is truncated within its header"]),
        (damaged_header, 3, ["header is damaged"]),
        (other_offsets, 3, ["the file is damaged"]),
        (pointer, 3, ["Git LFS pointer", "git lfs pull"]),
        (wrong_index, 3, ["is not an index"]),
        (outside, 3, ["not a file beside it"]),
        (lambda f: change(f, Q, lambda t: None), 3, ["does not hold", Q]),
        (not_listed, 2, ["has " + Q, "does not match the weight files"]),
        (lambda f: change(f, Q, lambda t: t[:16].clone()), 2, [Q, "(16, 32)", "(32, 32)"]),
        (lambda f: change(f, Q, lambda t: t.to(torch.int8)), 2, [Q, "is I8", "quantised"]),
        (pickled, 2, ["pytorch_model.bin", "is not opened", "save_pretrained"]),
        (lambda f: [p.unlink() for p in f.glob("model*")], 3, ["has neither model.safetensors nor"]),
    ],
)
def test_bad_files_are_refused_by_name(
    spoil: Callable[[Path], Any], code: int, says: list[str], folder: Path, tokenizer: Any, tmp_path: Path
) -> None:
    spoilt = tmp_path / "spoilt"
    shutil.copytree(folder, spoilt)
    spoil(spoilt)
    with pytest.raises(AllranksError) as caught:
        load(spoilt, tokenizer)
    assert caught.value.exit_code == code, caught.value
    assert all(s in str(caught.value) for s in [*says, str(spoilt)]), caught.value


def test_experts_that_do_not_fit_together_are_named(tokenizer: Any, tmp_path: Path) -> None:
    load("tiny:glm4_moe", tokenizer, config=SMALL).save_pretrained(tmp_path, max_shard_size="60KB")
    name = "model.layers.1.mlp.experts.3.gate_proj.weight"
    change(tmp_path, name, lambda t: t[:-1].clone())
    with pytest.raises(AllranksError, match=r"model\.layers\.1\.mlp\.experts") as caught:
        load(tmp_path, tokenizer)
    assert caught.value.exit_code == 2


def test_tied_weights_that_differ_are_refused(tokenizer: Any, tmp_path: Path) -> None:
    load("tiny:llama", tokenizer, config=SMALL).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    with pytest.raises(AllranksError, match=r"ties .*embed_tokens.weight and lm_head.weight"):
        load(tmp_path, tokenizer)


def test_a_tied_weight_may_lie_under_either_name(tokenizer: Any, tmp_path: Path) -> None:
    model = load("tiny:llama", tokenizer, config={**SMALL, "tie_word_embeddings": True})
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    save_file({"lm_head.weight" if "embed" in n else n: t for n, t in tensors.items()}, file)
    again = load(tmp_path, tokenizer)
    assert again.lm_head.weight is again.model.embed_tokens.weight
    assert torch.equal(again.lm_head.weight, model.lm_head.weight)


def test_a_new_head_is_drawn_as_transformers_draws_it(tokenizer: Any, tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification, BertConfig, BertForMaskedLM

    torch.manual_seed(3)
    size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    BertForMaskedLM(BertConfig(vocab_size=len(tokenizer), **size)).save_pretrained(tmp_path)
    ours = load(tmp_path, tokenizer, {"a": 0, "b": 1, "c": 2})
    torch.manual_seed(1)
    theirs = AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=3, dtype=torch.float32)
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[name], tensor), name
    assert ours.config.id2label == {0: "a", 1: "b", 2: "c"}


def test_only_a_classifiers_head_may_be_drawn(tokenizer: Any, tmp_path: Path) -> None:
    from transformers import BertConfig, BertForMaskedLM, BertForSequenceClassification

    config = BertConfig(
        vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64
    )
    BertForSequenceClassification(config).save_pretrained(tmp_path)
    stored = stored_tensors(tmp_path, "x")
    with torch.device("meta"):
        model = BertForMaskedLM(config)
    source = FileSource(model, stored, torch.float32, "x")
    with pytest.raises(AllranksError, match=r"has cls\.predictions\..* and \d more"):
        require_complete(source, "x", classifier=False)


def test_a_hub_snapshot_is_found_without_network(
    folder: Path, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    hub = tmp_path / "hub"
    snapshot = hub / "models--someone--small" / "snapshots" / "abc"
    shutil.copytree(folder, snapshot)
    (hub / "models--someone--small" / "refs").mkdir()
    (hub / "models--someone--small" / "refs" / "main").write_text("abc")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(hub))
    monkeypatch.setattr("transformers.utils.hub.constants.HF_HUB_CACHE", str(hub))
    model, plain = load("someone/small", tokenizer), load(folder, tokenizer)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


def test_files_that_were_cut_anywhere_never_crash(folder: Path, tokenizer: Any, tmp_path: Path) -> None:
    whole = file_of(folder, Q).read_bytes()
    rng = torch.Generator().manual_seed(5)
    target = tmp_path / "model.safetensors"
    for _ in range(300):
        body = bytearray(whole[: int(torch.randint(0, len(whole), (1,), generator=rng))])
        for _ in range(3):
            if body:
                body[int(torch.randint(0, min(len(body), 600), (1,), generator=rng))] ^= 1 << int(
                    torch.randint(0, 8, (1,), generator=rng)
                )
        target.write_bytes(body)
        with pytest.raises(AllranksError):
            stored_tensors(tmp_path, "x")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.bool])
def test_checksums_of_parts_add_up(dtype: torch.dtype) -> None:
    whole = (torch.randn(200_003) * 50).to(dtype)
    total = (0, 0, 0)
    for low, high in ((0, 7), (7, 70_000), (70_000, 70_001), (70_001, 200_003)):
        total = add_checksums(total, checksums(whole[low:high], low))
    assert total == checksums(whole) == checksums(whole.view(1, -1))
    moved = whole.clone()
    moved[3], moved[100_000] = whole[100_000], whole[3]
    assert torch.equal(moved, whole) or checksums(moved) != total
    assert add_checksums(checksums(whole[:100]), checksums(whole[101:], 101)) != total


def test_elements_that_nobody_read_are_seen() -> None:
    part = torch.arange(9.0)
    for known, seen in ((9, False), (10, True)):
        tally = TransferChecksums({"w": known})
        tally.send("w", part)
        tally.keep("w", part)
        if seen:
            with pytest.raises(
                AllranksError, match="w: the weights held by the ranks differ from those that rank 0 read"
            ):
                tally.compare(SINGLE_PROCESS, "rank 0")
        else:
            assert tally.compare(SINGLE_PROCESS, "rank 0") == {"w": checksums(part)}


def test_a_hollow_model_and_its_copies_need_no_memory(tokenizer: Any) -> None:
    model = load("tiny:llama", tokenizer, config={**SMALL, "tie_word_embeddings": True})
    count = sum(p.numel() for p in model.parameters())
    assert all(torch.equal(a, b) for a, b in zip(copy.deepcopy(model).parameters(), model.parameters(), strict=True))
    unmaterialize(model, torch.device("cpu"))
    assert sum(p.numel() for p in model.parameters()) == count
    assert model.lm_head.weight is model.model.embed_tokens.weight
    twin = copy.deepcopy(model)
    for module in (model, twin):
        assert all(is_unmaterialized(p) and p.untyped_storage().nbytes() <= 8 for p in module.parameters())
    assert not is_unmaterialized(torch.ones(3, 3)) and not is_unmaterialized(torch.ones(1))
    big = unmaterialized_parameter(torch.Size((1 << 20, 1 << 20)), torch.float32, torch.device("cpu"), "x", True)
    assert copy.deepcopy(big).shape == big.shape
