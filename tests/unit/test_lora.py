"""LoRA computed for all layers of one input, and for the tokens of each expert: equal to PEFT, nothing wide is kept."""

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from transformers import AutoConfig, AutoModelForCausalLM

from allranks.spec.records import AdapterSpec
from allranks.train.models import lora_experts
from allranks.train.models.adapter_dropout import replace_dropout
from allranks.train.models.adapters import adapter_remarks
from allranks.train.models.block_forward import Compilation, set_block_forward
from allranks.train.models.lora import InputGroup, LoRALinears, fuse_lora
from allranks.train.models.lora_experts import GpuGroups, fuse_expert_lora
from tests.unit.small_models import EXPERTS, Largest, kept_in

HIDDEN, INNER = 32, 48

Result = list[torch.Tensor]
LORA = AdapterSpec(type="lora")


def adapted(kind: str = "mistral", dtype: Any = torch.float32, config: Any = None, seed: int = 0, **lora: Any) -> Any:
    """A model with PEFT's own forward, and adapters in float32 whose B is not zero."""
    torch.manual_seed(seed)
    sizes = {"hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": 2, "vocab_size": 61}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    config = AutoConfig.for_model(kind, **{**sizes, **heads, **(config or {})})
    base = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model: Any = get_peft_model(base, LoraConfig(**{"r": 4, "lora_alpha": 6, "target_modules": "all-linear", **lora}))
    replace_dropout(model)
    for name, p in model.named_parameters():
        if p.requires_grad:
            p.data = p.data.float()
        if "lora_B" in name:
            torch.nn.init.normal_(p, std=0.3)
    return model.train()


def results(model: Any, ids: torch.Tensor | None = None, autocast: bool = False) -> Result:
    """Logits, the gradient of the embeddings' output, and of each adapter."""
    ids = torch.arange(5, 41).reshape(2, 18) if ids is None else ids
    inputs = model.get_input_embeddings()(ids).detach().requires_grad_()
    torch.manual_seed(3)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        logits = model(inputs_embeds=inputs).logits
    model.zero_grad()
    logits.double().square().mean().backward()
    return [logits.detach(), inputs.grad, *(p.grad for p in model.parameters() if p.requires_grad)]


def assert_close(ours: Any, theirs: Any) -> None:
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many layers each call of the fused function computes."""
    counts: list[int] = []
    original = LoRALinears.apply

    def apply(x: Any, scales: Any, *rest: Any) -> Any:
        counts.append(len(scales))
        return original(x, scales, *rest)

    monkeypatch.setattr(LoRALinears, "apply", apply)
    return counts


@pytest.mark.parametrize(
    "lora", [{}, {"lora_dropout": 0.3}, {"use_rslora": True, "target_modules": ["q_proj", "v_proj", "down_proj"]}]
)
def test_layers_of_one_input_equal_peft(lora: dict[str, Any], counts: list[int]) -> None:
    """Also with dropout: masks are drawn in PEFT's order."""
    model = adapted(**lora)
    theirs = results(model)
    fuse_lora(model)
    ours = results(model)
    assert counts == 2 * ([2, 1] if "use_rslora" in lora else [3, 1, 2, 1])
    assert_close(ours, theirs)


@pytest.mark.parametrize("autocast", [False, True])
def test_in_bfloat16_it_is_as_close_to_float64_as_peft_under_autocast(autocast: bool, counts: list[int]) -> None:
    """On the mean over models; kernels of different processors round differently."""
    ratios = []
    for seed in range(4):
        exact = adapted(seed=seed)
        plain, ours = (adapted(dtype=torch.bfloat16, seed=seed) for _ in range(2))
        for p, q in zip(exact.parameters(), plain.parameters(), strict=True):
            p.data = q.data.double()
        fuse_lora(ours)
        counts.clear()
        found = results(ours, autocast=autocast)
        assert counts == 2 * [3, 1, 2, 1]
        assert all(p.dtype == torch.float32 for p in ours.parameters() if p.requires_grad)
        wanted = results(exact.double())
        pairs = zip(found, results(plain, autocast=True), wanted, strict=True)
        ratios += [float((a.double() - right).norm() / (b.double() - right).norm()) for a, b, right in pairs]
    assert torch.tensor(ratios).log().mean().exp() < 1.1


def test_backward_keeps_the_input_once_and_nothing_of_the_outputs_width() -> None:
    model = adapted(dtype=torch.bfloat16)
    fuse_lora(model)
    attention = model.base_model.model.model.layers[0].self_attn
    x = torch.randn(2, 9, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t), t)[1], lambda t: t):
        outputs = [attention.q_proj(x), attention.k_proj(x), attention.v_proj(x)]
    weights = {p.data_ptr() for p in model.parameters()}
    own = {t.data_ptr(): t.shape for t in kept if t.data_ptr() not in weights}
    assert set(own) >= {x.data_ptr()} and sorted(map(tuple, own.values())) == [(2, 9, HIDDEN), (12, 18)]
    assert len({id(y.grad_fn) for y in outputs}) == 1


def test_layers_that_turn_out_to_have_other_inputs_are_computed_one_by_one(counts: list[int]) -> None:
    model = adapted()
    attention = model.base_model.model.model.layers[0].self_attn
    x, y = torch.randn(2, 1, 6, HIDDEN)
    wanted = [attention.q_proj(x), attention.k_proj(y), attention.v_proj(x)]
    fuse_lora(model)
    for computed in ([3, 1, 1], [1, 1, 1]):  # in the second pass it is known
        counts.clear()
        found = [attention.q_proj(x), attention.k_proj(y), attention.v_proj(x)]
        assert counts == computed
        torch.testing.assert_close(found, wanted)
    group: InputGroup = vars(attention.q_proj)["lora_input_group"][0]
    assert not group.shared and group.source is None and not group.results


@pytest.mark.full
def test_blocks_with_adapters_share_compiled_programs() -> None:
    """As many programs as blocks would take minutes to compile for a model of 32 layers."""

    def programs(layers: int) -> int:
        compiled: list[Any] = []

        torch._dynamo.reset()
        model = adapted(config={"num_hidden_layers": layers, "use_cache": False})
        fuse_lora(model)
        set_block_forward(model, "none", Compilation(static=True, report=pytest.fail, backend=kept_in(compiled)))
        results(model)
        return len(compiled)

    assert programs(2) == programs(4)


def test_a_hook_that_gathers_the_weights_of_a_layer_runs_before_they_are_read() -> None:
    """As of a strategy that shards each layer by itself."""
    model = adapted()
    theirs = results(model)
    fuse_lora(model)
    layer = model.base_model.model.model.layers[1].self_attn.k_proj
    whole = layer.lora_A["default"].weight.data.clone()
    layer.lora_A["default"].weight.data.zero_()

    def gather(module: Any, args: Any) -> None:
        module.lora_A["default"].weight.data.copy_(whole)

    layer.register_forward_pre_hook(gather)
    assert_close(results(model), theirs)


def test_variants_use_pefts_forward_and_it_is_said() -> None:
    model = adapted(use_dora=True)
    theirs = results(model)
    fuse_lora(model)
    assert all(torch.equal(one, other) for one, other in zip(results(model), theirs, strict=True))
    (said,) = adapter_remarks(model, LORA)
    assert "14 layers use PEFT's forward, first model.layers.0.self_attn.q_proj: a variant of LoRA" in said


def test_layers_of_another_class_use_pefts_forward_and_it_is_said(counts: list[int]) -> None:
    """Those of GPT-2 have their weight transposed; quantized layers have a class of their own, too."""
    model = adapted("gpt2", fan_in_fan_out=True)
    fuse_lora(model)
    results(model)
    assert not counts
    (said,) = adapter_remarks(model, LORA)
    assert "8 layers use PEFT's forward, first transformer.h.0.attn.c_attn: layers of class Conv1D" in said
    plain = adapted()
    fuse_lora(plain)
    assert adapter_remarks(plain, LORA) == ()


@pytest.mark.parametrize("selective", [False, True])
def test_recomputation_gives_the_same_gradients(selective: bool) -> None:
    """Selective recomputation keeps results of products, which must not change afterwards."""
    model = adapted(lora_dropout=0.3)
    fuse_lora(model)
    block = model.base_model.model.model.layers[0].mlp
    x = torch.randn(2, 6, HIDDEN, requires_grad=True)
    products = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]
    more: dict[str, Any] = {"context_fn": lambda: create_selective_checkpoint_contexts(products)} if selective else {}
    found = []
    for recompute in (False, True):
        torch.manual_seed(2)
        out = checkpoint(block, x, use_reentrant=False, **more) if recompute else block(x)
        found.append([out, *torch.autograd.grad(out.square().sum(), [x, *_adapters(block)])])
    torch.testing.assert_close(found[1], found[0])


def _adapters(module: torch.nn.Module) -> list[torch.nn.Parameter]:
    return [p for p in module.parameters() if p.requires_grad]


MOE: dict[str, dict[str, Any]] = {
    "glm4_moe": {
        "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "first_k_dense_replace": 0,
    },
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2},
}  # fmt: skip


def moe(kind: str, dtype: torch.dtype = torch.float32, **lora: Any) -> Any:
    return adapted(kind, dtype, MOE[kind], target_modules=["q_proj"], **{"r": 3, "target_parameters": EXPERTS, **lora})


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("kind", MOE)
def test_adapters_of_experts_equal_peft(kind: str, grouped: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also by the grouped products that GPUs use, which torch emulates on CPUs, and with experts without tokens."""
    model = moe(kind, target_parameters=EXPERTS[kind == "mixtral" :])
    ids = torch.arange(5, 9)[None]
    theirs = results(model, ids)
    assert fuse_expert_lora(model) == (2, 0)
    if grouped:
        monkeypatch.setattr(GpuGroups, "fits", lambda *_: True)
    calls: list[int] = []
    apply = lora_experts.GroupedLoRA.apply
    monkeypatch.setattr(lora_experts.GroupedLoRA, "apply", lambda *a: (calls.append(1), apply(*a))[1])
    assert_close(results(model, ids), theirs)
    assert len(calls) == 4
    with torch.no_grad(), model.disable_adapter():
        assert not torch.allclose(model(ids).logits, theirs[0])


def test_experts_of_an_unknown_class_use_pefts_forward_and_it_is_said() -> None:
    model = moe("mixtral")
    for layer in model.base_model.model.model.layers:
        del layer.mlp.experts.get_base_layer().has_gate
    fuse_lora(model)
    assert fuse_expert_lora(model) == (0, 2)
    said = adapter_remarks(model, AdapterSpec(type="lora", targets=["q_proj"], target_parameters=EXPERTS))
    assert len(said) == 1 and "the adapters of 4 parameters to a full copy" in said[0] and "MixtralExperts" in said[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("forward", ["ours", "peft"])
def test_no_tensor_of_the_size_of_all_experts_is_made(dtype: torch.dtype, forward: str) -> None:
    model = moe("glm4_moe", dtype)
    assert forward == "peft" or fuse_expert_lora(model) == (2, 0)
    experts = model.base_model.model.model.layers[0].mlp.experts
    x = torch.randn(10, HIDDEN, dtype=dtype, requires_grad=True)
    chosen = torch.arange(20).reshape(10, 2) % 8
    with Largest(model.parameters()) as seen:
        experts(x, chosen, torch.rand(10, 2)).sum().backward()
    smallest = 8 * 24 * HIDDEN  # the down projections
    assert (seen.elements < smallest / 3) is (forward == "ours")


def test_adapters_of_experts_in_bfloat16_are_as_close_to_float32_as_pefts() -> None:
    def run(model: Any, x: torch.Tensor) -> Result:
        experts = model.base_model.model.model.layers[0].mlp.experts
        x = x.detach().requires_grad_()
        out = experts(x, torch.arange(80).reshape(40, 2) % 8, torch.linspace(0.2, 0.8, 80).reshape(40, 2).to(x.dtype))
        slope = torch.linspace(-1, 1, out.numel()).reshape(out.shape)
        return [out, *torch.autograd.grad(out, [x, *_adapters(experts)], slope.to(out.dtype))]

    x = torch.randn(40, HIDDEN).bfloat16()
    exact, plain, ours = (moe("glm4_moe", torch.bfloat16) for _ in range(3))
    for model in (exact, plain, ours):
        torch.manual_seed(5)
        for name, p in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(p, std=0.02)  # as large as the base's weights
    wanted = run(exact.float(), x.float())
    fuse_expert_lora(ours)
    pairs = zip(run(ours, x), run(plain, x), wanted, strict=True)
    ratios = torch.stack([(a.float() - right).norm() / (b.float() - right).norm() for a, b, right in pairs])
    assert ratios.log().mean().exp() < 1.1 and ratios.max() < 1.3
