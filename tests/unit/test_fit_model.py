"""The estimate's shapes and activations against transformers' models, PEFT's adapters and autograd's saved tensors."""

import dataclasses
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("peft")

from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from allranks.planning.memory.activations import BlockActivations, kept_after_blocks
from allranks.planning.memory.activations import MicroBatch as FitBatch
from allranks.planning.memory.estimate import batch_of as fit_batch_of
from allranks.planning.memory.estimate import model_of
from allranks.planning.memory.families import ENCODERS, FAMILIES
from allranks.planning.memory.model_config import find_config, read_model_config
from allranks.planning.memory.weights import Shapes, UnitSizes, output_projection, shapes_of, trained_weights_of
from allranks.planning.planner import make_plan
from allranks.spec import parse_spec
from allranks.spec.models import packs_rows
from allranks.spec.records import AdapterSpec
from allranks.train.data.batches import Batch, packed_rows
from allranks.train.models import precision
from allranks.train.models.adapters import add_adapter
from allranks.train.models.losses import LossModel
from allranks.train.models.packed_attention import use_packed_attention
from allranks.train.tasks import Mlp, MlpConfig
from allranks.utils.machine import machine_facts
from tests.sampling import ALL, first_of

SMALL: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 3, "num_attention_heads": 8,
    "num_key_value_heads": 2, "vocab_size": 500, "max_position_embeddings": 512, "pad_token_id": 0,
}  # fmt: skip
MHA = {k: v for k, v in SMALL.items() if k != "num_key_value_heads"}
EXPERTS = {**SMALL, "moe_intermediate_size": 40, "num_experts": 8, "num_experts_per_tok": 2}
ROUTED = {"n_routed_experts": 8, "num_experts_per_tok": 2, "head_dim": 8, "attention_bias": True}
OWN: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 64, "n_layer": 3, "n_head": 8, "n_positions": 512, "vocab_size": 500, "pad_token_id": 0},
    "distilbert": {
        "dim": 64, "hidden_dim": 176, "n_layers": 3, "n_heads": 8, "vocab_size": 500, "max_position_embeddings": 512,
    },
    **dict.fromkeys(("bert", "roberta", "xlm-roberta", "gpt_neox"), MHA), "electra": {**MHA, "embedding_size": 32},
    "opt": {**MHA, "ffn_dim": 176, "word_embed_proj_dim": 64}, "mixtral": {**SMALL, "num_local_experts": 4},
    "qwen3_moe": {**EXPERTS, "head_dim": 8}, "glm4_moe": {**SMALL, "moe_intermediate_size": 40, **ROUTED},
    "olmoe": {**SMALL, "num_experts": 8, "num_experts_per_tok": 2},
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 72},
    **{name: {**SMALL, "head_dim": 16} for name in ("gemma", "gemma3_text", "glm4", "qwen3")},
}  # fmt: skip
FIRST = ["llama", "gpt2", "bert", "qwen3_moe", "gemma3_text"]
SOME = first_of(sorted(FAMILIES, key=FIRST.__contains__, reverse=True), 5)
B, S = 2, 48
MASKED = 192  # tokens of a row where two are packed: the mask must be seen among the rest


def config_of(family: str) -> Any:
    return AutoConfig.for_model(family, **OWN.get(family, SMALL))


def built(family: str, dtype: Any = torch.float32, device: str = "meta") -> Any:
    torch.manual_seed(0)
    kind = AutoModelForSequenceClassification if family in ENCODERS else AutoModelForCausalLM
    with torch.device(device):
        model = kind.from_config(config_of(family), dtype=dtype, attn_implementation="sdpa")
    model.config.use_cache = False  # as model.py does: with a cache, rows of one sequence see each other
    return model


def ours(family: str) -> Shapes:
    return shapes_of(read_model_config(config_of(family).to_dict(), family, labels=2 if family in ENCODERS else 0))


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_are_counted_as_transformers_makes_them(family: str) -> None:
    assert sorted(w.numel for w in ours(family).weights()) == sorted(p.numel() for p in built(family).parameters())


def sizes_of(shapes: Shapes, spec: AdapterSpec) -> list[UnitSizes]:
    trained = trained_weights_of(spec, shapes)
    return [trained.unit(unit) for unit in (*shapes.blocks, shapes.rest)]


@pytest.mark.parametrize("family", SOME)
@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "v_proj"]], ids=["all", "q, v"])
def test_adapters_are_counted_as_peft_makes_them(family: str, targets: Any) -> None:
    spec = AdapterSpec(type="lora", r=3) if targets == "all-linear" else AdapterSpec(type="lora", r=3, targets=targets)
    if family == "distilbert":
        pytest.skip("PEFT cannot adapt every linear layer of it: its pre_classifier counts as the classifier, too")
    if spec.targets and not any("q_proj" in n for n, _ in built(family).named_modules()):
        pytest.skip(f"{family} names its layers otherwise")
    model = add_adapter(built(family, device="cpu"), spec, classifier=family in ENCODERS, base="b", seed=1)
    wanted = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert sum(unit.trained for unit in sizes_of(ours(family), spec)) == wanted


def content(storage: Any) -> bytes:
    return torch.empty(0, dtype=torch.uint8).set_(storage).numpy().tobytes()


def saved_bytes(model: Any, batch: Batch, *, classifier: bool, cast: Any = None) -> tuple[int, int]:
    """Bytes of the storages that autograd keeps of one forward, without weights and the loss's own; and bytes of those
    that are weights in the dtype `cast`."""
    whole = LossModel(model, classifier=classifier).train()
    own = {t.untyped_storage().data_ptr() for t in (*whole.parameters(), *whole.buffers())}
    kept: dict[int, Any] = {}

    def keep(tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        whole(batch)
    trained = [p for p in whole.parameters() if p.requires_grad and cast]
    casts = {content(p.detach().to(cast).untyped_storage()) for p in trained}
    copies = {at for at, t in kept.items() if content(t.untyped_storage()) in casts}
    of_loss = {at for at, t in kept.items() if t.shape[-1:] == (SMALL["vocab_size"],)} - copies
    sizes = {at: t.untyped_storage().nbytes() for at, t in kept.items()}
    return sum(sizes[at] for at in sizes.keys() - copies - of_loss), sum(sizes[at] for at in copies)


def batch_of(length: int, *, packed: bool, classifier: bool) -> Batch:
    ids = torch.randint(3, 500, (B, length))
    positions = torch.arange(MASKED).repeat(2).expand(B, length).contiguous() if packed else None
    return Batch(
        ids, torch.zeros(B, dtype=torch.long) if classifier else ids, positions,
        torch.ones_like(ids) if classifier else None, ids.numel(), ids.numel(),
        rows=packed_rows([[MASKED, MASKED]] * B, length) if packed else None,
        scored=None if classifier else torch.arange(ids.numel()),
    )  # fmt: skip


CASES = [
    (family, dtype, adapter, dropout, packed)
    for family in SOME
    for dtype in ("float32", "bfloat16")
    for adapter, dropout in (("none", 0.0), ("lora", 0.0), ("lora", 0.1))
    for packed in ("no", "masked", "within rows")
    if not (packed != "no" and (family in ENCODERS or adapter == "lora" or not packs_rows(family)))
    and not (packed == "within rows" and family == "gpt2")  # its dropout needs matrices of each row's length squared
    and not (adapter == "lora" and family == "distilbert")
    and not (dropout and FAMILIES[family].experts)  # PEFT has no dropout for fused experts
]


@pytest.mark.parametrize(("family", "dtype", "adapter", "dropout", "packed"), CASES if ALL else CASES[::3])
def test_activations_as_autograd_saves(family: str, dtype: str, adapter: str, dropout: float, packed: str) -> None:
    kind = torch.float32 if dtype == "float32" else torch.bfloat16
    spec = AdapterSpec(type=adapter, r=4, dropout=dropout)  # type: ignore[arg-type]
    classifier = family in ENCODERS
    model = add_adapter(built(family, kind, "cpu"), spec, classifier=classifier, base="b", seed=1)
    length = S if packed == "no" else 2 * MASKED
    batch = batch_of(length, packed=packed != "no", classifier=classifier)
    if packed == "within rows":
        use_packed_attention(model, torch.device("cpu"), kind)
    else:
        batch = dataclasses.replace(batch, rows=None)
    measured, _ = saved_bytes(model, batch, classifier=classifier)
    shapes = ours(family)
    what = trained_weights_of(spec, shapes)
    how = {"packed": packed == "masked", "within_rows": packed == "within rows"}
    seen = FitBatch(sequences=B, length=length, element=kind.itemsize, device="cpu", **how)
    expected = sum(BlockActivations(shapes.config, block, what, seen).kept() for block in shapes.blocks)
    expected += kept_after_blocks(shapes, what, seen)
    assert expected == pytest.approx(measured, rel=0.065), f"{expected / measured - 1:+.1%}"


MIXED = [
    *((family, "none", 0.0, False, ()) for family in SOME),
    *((family, "none", 0.0, True, ()) for family in SOME if family not in ENCODERS and packs_rows(family)),
    *(("llama", "lora", dropout, False, ("embed_tokens", "lm_head")) for dropout in (0.0, 0.1)),
    ("llama", "lora", 0.1, False, ("lm_head",)),
    ("bert", "lora", 0.1, False, ()),  # its classifier is trained as a whole
]


@pytest.mark.parametrize(("family", "adapter", "dropout", "packed", "whole"), MIXED if ALL else MIXED[::3])
def test_activations_and_copies_of_weights_are_what_autograd_saves_under_autocast(
    family: str, adapter: str, dropout: float, packed: bool, whole: tuple[str, ...]
) -> None:
    classifier = family in ENCODERS
    length = 2 * MASKED if packed else S
    packing = {"max_length": length, "packing": "isolated" if packed else "none"}
    raw = {
        "model": {"name": f"tiny:{family}", "dtype": "bfloat16"}, "data": {"source": "builtin:instructions", **packing},
        "adapter": {"type": adapter, "r": 4, "dropout": dropout, "modules_to_save": list(whole)},
        "train": {"micro_batch_size": B}, "cluster": {"device": "cpu"},
    }  # fmt: skip
    spec = parse_spec(raw)
    plan = make_plan(spec, machine_facts())
    stored = torch.float32 if adapter == "none" else torch.bfloat16
    model = add_adapter(built(family, stored, "cpu"), spec.adapter, classifier=classifier, base="b", seed=1)
    for name, p in model.named_parameters():
        if "lora_B" in name:  # not zeros, which are all alike
            torch.nn.init.normal_(p)
    precision.cast_trained_weights(model, torch.float32)
    assert precision.use_autocast(model, torch.bfloat16, torch.device("cpu"))
    batch = batch_of(length, packed=packed, classifier=classifier)
    if packed and family == "gpt2":  # its dropout needs matrices of each row's length squared
        batch = dataclasses.replace(batch, rows=None)
    elif packed:
        use_packed_attention(model, torch.device("cpu"), torch.bfloat16)
    activations, copies = saved_bytes(model, batch, classifier=classifier, cast=torch.bfloat16)

    memory = model_of(spec, plan, read_model_config(config_of(family).to_dict(), family, labels=2 if classifier else 0))
    seen, shapes = fit_batch_of(spec, plan, memory), memory.shapes
    expected = sum(BlockActivations(shapes.config, b, memory.what, seen).kept() for b in shapes.blocks)
    expected += kept_after_blocks(shapes, memory.what, seen)
    assert expected == pytest.approx(activations, rel=0.065), f"{expected / activations - 1:+.1%}"
    blocks = sum(memory.weight_copies_of(at) for at in range(len(shapes.blocks)))
    # below a frozen embedding, the first layer's inputs need no gradient, so some adapters are not kept
    exact = adapter == "none"
    head = output_projection(memory.shapes)  # its copy exists during the loss only
    of_head = 2 * head.numel if head is not None and memory.what.is_trained(head) else 0
    outside = memory.weight_copies_outside_blocks() - of_head
    assert blocks + outside == pytest.approx(copies, rel=0.001 if exact else 0.07)


@pytest.mark.parametrize("shape", ["blocks", "wide"])
def test_what_a_perceptron_keeps_under_autocast(shape: str) -> None:
    model_spec = {"name": "mlp:64x3", "dtype": "bfloat16", "config": {"shape": shape}}
    spec = parse_spec({"model": model_spec, "data": {"source": "builtin:noise"}, "cluster": {"device": "cpu"}})
    mlp_config = find_config(spec).config
    assert mlp_config is not None
    memory = model_of(spec, make_plan(spec, machine_facts()), mlp_config)
    model: Any = Mlp(MlpConfig(64, 3, shape))
    assert precision.use_autocast(model, torch.bfloat16, torch.device("cpu"))
    kept: dict[int, Any] = {}

    def keep(tensor: Any) -> Any:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    casts = {content(p.detach().bfloat16().untyped_storage()) for p in model.parameters()}
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        model(torch.randn(B, 64, dtype=torch.bfloat16))
    storages = [t.untyped_storage() for at, t in kept.items() if at not in own]
    copies = sum(s.nbytes() for s in storages if content(s) in casts)
    assert sum(memory.weight_copies_of(at) for at in range(len(memory.shapes.blocks))) == copies
