"""What is refused of weight files before and while they are read, ranges, checksums, and models without memory."""

import copy
import json
import os
import random
import shutil
import zlib
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from allranks.errors import AllranksError
from allranks.train.distributed import SINGLE_PROCESS
from allranks.train.models import weight_loader, weight_sources
from allranks.train.models.build import require_complete
from allranks.train.models.weight_loader import TransferChecksums, is_unmaterialized
from allranks.train.models.weight_sources import DirectReads, WeightFiles, crc_followed_by, difference, facts_of
from allranks.train.sync_proof import add_checksums, checksums
from allranks.utils.safetensors_files import read_header, stored_tensors
from tests.unit.small_models import TOKENIZER, load, tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tiny("mistral").save_pretrained(path, max_shard_size="60KB")
    return path


def file_of(folder: Path, tensor: str) -> Path:
    return folder / json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"][tensor]


def change(folder: Path, tensor: str, make: Callable[[torch.Tensor], torch.Tensor | None]) -> None:
    file = file_of(folder, tensor)
    tensors = load_file(file)
    new = make(tensors.pop(tensor))
    save_file(tensors | ({} if new is None else {tensor: new}), file)


BERT = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
Q = "model.layers.1.self_attn.q_proj.weight"


def content(folder: Path, change: Callable[[bytes], bytes]) -> None:
    file = file_of(folder, Q)
    file.write_bytes(change(file.read_bytes()))


def place(folder: Path, where: str | None) -> None:
    index = folder / "model.safetensors.index.json"
    listed = json.loads(index.read_text())
    if where is None:
        change(folder, Q, lambda t: None)
        del listed["weight_map"][Q]
    else:
        listed["weight_map"][Q] = where
    index.write_text(json.dumps(listed))


def pickled(folder: Path) -> None:
    for file in folder.glob("model*"):
        file.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"x")


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
SHAPE = b'"shape":[32,%d]'


@pytest.mark.parametrize(
    ("spoil", "code", "says"),
    [
        (lambda f: file_of(f, Q).unlink(), 3, ["is missing", "model-0000"]),
        (lambda f: content(f, lambda b: b[:-3]), 3, ["is truncated", "model.norm.weight"]),
        (lambda f: content(f, lambda b: b[:40]), 3, ["is truncated within its header"]),
        (lambda f: content(f, lambda b: b[:12] + b"\xff" + b[13:]), 3, ["header is damaged"]),
        (lambda f: content(f, lambda b: b.replace(SHAPE % 32, SHAPE % 31)), 3, ["the file is damaged"]),
        (lambda f: content(f, lambda b: LFS), 3, ["Git LFS pointer", "git lfs pull"]),
        (lambda f: (f / "model.safetensors.index.json").write_text("{}"), 3, ["is not an index"]),
        (lambda f: place(f, "../elsewhere.safetensors"), 3, ["not a file beside it"]),
        (lambda f: change(f, Q, lambda t: None), 3, ["does not hold", Q]),
        (lambda f: place(f, None), 2, ["has " + Q, "does not match the weight files"]),
        (lambda f: change(f, Q, lambda t: t[:16].clone()), 2, [Q, "(16, 32)", "(32, 32)"]),
        (lambda f: change(f, Q, lambda t: t.to(torch.int8)), 2, [Q, "is I8", "quantised"]),
        (pickled, 2, ["pytorch_model.bin", "is not opened", "save_pretrained"]),
        (lambda f: [p.unlink() for p in f.glob("model*")], 3, ["has neither model.safetensors nor"]),
    ],
)
def test_bad_files_are_refused_by_name(spoil: Any, code: int, says: list[str], folder: Path, tmp_path: Path) -> None:
    spoilt = tmp_path / "spoilt"
    shutil.copytree(folder, spoilt)
    spoil(spoilt)
    with pytest.raises(AllranksError) as caught:
        load(spoilt)
    assert caught.value.exit_code == code, caught.value
    assert all(s in str(caught.value) for s in [*says, str(spoilt)]), caught.value


def test_experts_that_do_not_fit_together_are_named(tmp_path: Path) -> None:
    tiny("glm4_moe").save_pretrained(tmp_path, max_shard_size="60KB")
    change(tmp_path, "model.layers.1.mlp.experts.3.gate_proj.weight", lambda t: t[:-1].clone())
    with pytest.raises(AllranksError, match=r"model\.layers\.1\.mlp\.experts") as caught:
        load(tmp_path)
    assert caught.value.exit_code == 2


def test_tied_weights_that_differ_are_refused(tmp_path: Path) -> None:
    tiny("llama").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    with pytest.raises(AllranksError, match=r"ties .*embed_tokens.weight and lm_head.weight"):
        load(tmp_path)


def test_a_tied_weight_may_lie_under_either_name(tmp_path: Path) -> None:
    model = tiny("llama", tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    save_file({"lm_head.weight" if "embed" in n else n: t for n, t in load_file(file).items()}, file)
    again = load(tmp_path)
    assert again.lm_head.weight is again.model.embed_tokens.weight
    assert torch.equal(again.lm_head.weight, model.lm_head.weight)


def test_a_new_head_is_drawn_as_transformers_draws_it(tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification, BertConfig, BertForMaskedLM

    torch.manual_seed(3)
    BertForMaskedLM(BertConfig(vocab_size=len(TOKENIZER), **BERT)).save_pretrained(tmp_path)
    ours = load(tmp_path, labels={"a": 0, "b": 1, "c": 2})
    torch.manual_seed(1)
    theirs = AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=3, dtype=torch.float32)
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[name], tensor), name
    assert ours.config.id2label == {0: "a", 1: "b", 2: "c"}


def test_only_a_classifiers_head_may_be_drawn(tmp_path: Path) -> None:
    from transformers import BertConfig, BertForMaskedLM, BertForSequenceClassification

    config = BertConfig(vocab_size=len(TOKENIZER), **BERT)
    BertForSequenceClassification(config).save_pretrained(tmp_path)
    stored = stored_tensors(tmp_path, "x")
    with torch.device("meta"):
        model = BertForMaskedLM(config)
    source = weight_sources.FileSource(model, stored, torch.float32, "x")
    with pytest.raises(AllranksError, match=r"has cls\.predictions\..* and \d more"):
        require_complete(source, "x", classifier=False)


def test_a_hub_snapshot_is_found_without_network(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    hub = tmp_path / "hub"
    shutil.copytree(folder, hub / "models--someone--small" / "snapshots" / "abc")
    (hub / "models--someone--small" / "refs").mkdir()
    (hub / "models--someone--small" / "refs" / "main").write_text("abc")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(hub))
    monkeypatch.setattr("transformers.utils.hub.constants.HF_HUB_CACHE", str(hub))
    model, plain = load("someone/small"), load(folder)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


def test_files_that_were_cut_anywhere_never_crash(folder: Path, tmp_path: Path) -> None:
    whole = file_of(folder, Q).read_bytes()
    draw = random.Random(5)
    for _ in range(300):
        body = bytearray(whole[: draw.randrange(1, len(whole))])
        for _ in range(3):
            body[draw.randrange(min(len(body), 600))] ^= 1 << draw.randrange(8)
        (tmp_path / "model.safetensors").write_bytes(body)
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
            with pytest.raises(AllranksError, match="w: the weights held by the ranks differ from those that rank 0"):
                tally.compare(SINGLE_PROCESS, "rank 0")
        else:
            assert tally.compare(SINGLE_PROCESS, "rank 0") == {"w": checksums(part)}


def test_a_hollow_model_and_its_copies_need_no_memory() -> None:
    model = tiny("llama", tie_word_embeddings=True)
    count = sum(p.numel() for p in model.parameters())
    assert all(torch.equal(a, b) for a, b in zip(copy.deepcopy(model).parameters(), model.parameters(), strict=True))
    weight_loader.unmaterialize(model, torch.device("cpu"))
    assert sum(p.numel() for p in model.parameters()) == count
    assert model.lm_head.weight is model.model.embed_tokens.weight
    for module in (model, copy.deepcopy(model)):
        assert all(is_unmaterialized(p) and p.untyped_storage().nbytes() <= 8 for p in module.parameters())
    assert not is_unmaterialized(torch.ones(3, 3)) and not is_unmaterialized(torch.ones(1))
    shape, cpu = torch.Size((1 << 20, 1 << 20)), torch.device("cpu")
    big = weight_loader.unmaterialized_parameter(shape, torch.float32, cpu, "x", True)
    assert copy.deepcopy(big).shape == big.shape


WEIGHTS = {
    "a": torch.arange(3000, dtype=torch.float32).view(30, 100) * 0.37,
    "b": (torch.arange(5000) * 0.11).to(torch.bfloat16).view(50, 10, 10),
    "c": torch.arange(7, dtype=torch.int64),
    "none": torch.empty(0, 4),
    "one": torch.tensor(2.5, dtype=torch.float16),
}


def files(folder: Path, *more: str) -> WeightFiles:
    paths = [folder / name for name in ("x.safetensors", *more)]
    for path in paths:
        save_file(WEIGHTS, path)
    stored = {f"{i}{name}": entry for i, path in enumerate(paths) for name, entry in read_header(path).items()}
    return WeightFiles({path: facts_of(path) for path in paths}, stored)


def reads(known: WeightFiles, dtype: torch.dtype | None = None) -> DirectReads:
    return DirectReads(known, {name: dtype or WEIGHTS[name[1:]].dtype for name in known.stored})


def pieces(direct: DirectReads, name: str, start: int, stop: int) -> list[tuple[int, torch.Tensor]]:
    return [(low, piece.clone()) for low, _, piece in direct.pieces(name, start, stop)]


@pytest.mark.parametrize("dtype", [None, torch.float32, torch.bfloat16])
def test_pieces_are_the_elements(dtype: torch.dtype | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_sources, "PIECE_BYTES", 1000)
    direct, total = reads(files(tmp_path, "y.safetensors"), dtype), 0
    for name, whole in WEIGHTS.items():
        n = whole.numel()
        for start, stop in ((0, n), (0, n // 2), (n // 3, n), (n // 2, n // 2), (max(n - 1, 0), n)):
            for file in "01":
                found, next_one = [torch.empty(0, dtype=dtype or whole.dtype)], start
                for at, piece in pieces(direct, file + name, start, stop):
                    assert at == next_one and piece.numel() * whole.itemsize <= 1000
                    found.append(piece)
                    next_one += piece.numel()
                assert torch.equal(torch.cat(found), whole.flatten()[start:stop].to(dtype or whole.dtype))
                total += (stop - start) * whole.itemsize
    direct.close()
    assert direct.read_bytes == total


def test_a_difference_is_named(tmp_path: Path) -> None:
    (known,) = files(tmp_path).facts.values()
    path, content = known.path, bytearray(known.path.read_bytes())

    def now(data: bytes | bytearray, later_ns: int = 0) -> str:
        path.write_bytes(data)
        os.utime(path, ns=(known.changed_ns, known.changed_ns + later_ns))
        return difference(known)

    assert now(content) == ""
    assert "another time of change" in now(content, 1)
    assert f"finds {len(content) - 1} bytes in {path}, rank 0 {len(content)}" in now(content[:-1])
    for at in (0, 20, -1, -4000):
        other = content.copy()
        other[at] ^= 1
        assert "finds other content" in now(other), at
    now(b"\xff" * 8 + content[8:])  # a header of 2^64 bytes
    path.unlink()
    assert difference(known) == f"does not see {path}"
    os.mkfifo(path)
    assert difference(known) == f"cannot read {path}: it is a named pipe (FIFO), not a regular file"


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path: Path) -> None:
    known = files(tmp_path)
    (path,) = known.facts
    content = path.read_bytes()
    direct = reads(known)
    assert len(pieces(direct, "0a", 0, 10)) == 1
    os.truncate(path, known.stored["0a"].offset + 50)
    with pytest.raises(AllranksError, match=f"{path}: 0a cannot be read: the file was truncated"):
        pieces(direct, "0a", 0, 3000)
    with pytest.raises(AllranksError, match=f"{path}: was changed while the model was loaded"):
        direct.close()
    with pytest.raises(AllranksError, match="was changed"):  # before the first piece
        pieces(reads(known), "0a", 0, 1)
    path.write_bytes(content)
    path.unlink()
    with pytest.raises(AllranksError, match="0a cannot be read: No such file"):
        pieces(reads(known), "0a", 0, 1)


def test_the_crc_of_parts_is_that_of_the_whole() -> None:
    data = bytes(torch.randint(0, 256, (5003,), dtype=torch.uint8).tolist())
    for cuts in ((0, 5003), (0, 0, 1, 4999, 5003), (0, 1000, 1000, 3001, 5003)):
        total = 0
        for low, high in pairwise(cuts):
            total ^= crc_followed_by(zlib.crc32(data[low:high]), len(data) - high)
        assert total == zlib.crc32(data)
    assert crc_followed_by(zlib.crc32(b"a"), 1 << 40) != crc_followed_by(zlib.crc32(b"a"), (1 << 40) + 1)


def test_a_tensor_in_another_layout_is_not_read_as_ranges(tmp_path: Path) -> None:
    direct = DirectReads(files(tmp_path), {})
    assert "0a" in direct and "fused" not in direct
