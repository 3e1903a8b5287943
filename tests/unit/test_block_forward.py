"""Recomputation and compilation of blocks: gradients, kept bytes, names, evaluation, and the compiler's failure."""

import gc
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch._dynamo.backends.common import aot_autograd
from torch.profiler import ProfilerActivity, profile, record_function
from transformers import AutoConfig, AutoModelForCausalLM

from allranks.planning.memory.activations import BlockActivations, MicroBatch
from allranks.planning.memory.model_config import read_model_config
from allranks.planning.memory.weights import shapes_of, trained_weights_of
from allranks.spec.records import AdapterSpec
from allranks.train.models.adapters import add_adapter
from allranks.train.models.block_forward import Compilation, set_block_forward, transformer_blocks
from tests.sampling import first_of

CONFIG = {
    "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 120,
}  # fmt: skip
IDS = torch.arange(48).view(2, 24)


def config_of(kind: str) -> Any:
    experts = {"num_experts": 6, "num_experts_per_tok": 2} if kind == "olmoe" else {}
    return AutoConfig.for_model(kind, **CONFIG, **experts)


def model_of(kind: str = "llama", *, lora: bool, dropout: float = 0.2) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_of(kind), attn_implementation="sdpa")
    model.config.use_cache = False
    if lora:
        spec = AdapterSpec(type="lora", r=2, dropout=dropout)
        model = add_adapter(model, spec, classifier=False, base="base", seed=1)
    return model.train()


def loss_of(model: Any) -> Any:
    torch.manual_seed(3)
    return model(input_ids=IDS, labels=IDS).loss


def gradients(model: Any) -> list[Any]:
    loss_of(model).backward()
    return [p.grad for p in model.parameters() if p.requires_grad]


@pytest.mark.parametrize("lora", [False, True])
def test_each_mode_gives_bitwise_the_same_gradients(lora: bool) -> None:
    expected = gradients(model_of(lora=lora))
    assert any(g.abs().max() > 0 for g in expected)
    for mode in ("selective", "full"):
        model = model_of(lora=lora)
        assert set_block_forward(model, mode) == CONFIG["num_hidden_layers"]
        assert all_equal(gradients(model), expected), mode


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("kind", first_of(["llama", "olmoe", "gpt_neox", "olmo2", "starcoder2", "phi"], 2))
def test_a_block_keeps_what_the_estimate_says(kind: str, lora: bool) -> None:
    spec = AdapterSpec(type="lora", r=2) if lora else AdapterSpec()
    shapes = shapes_of(read_model_config(config_of(kind).to_dict(), "here"))
    batch = MicroBatch(sequences=2, length=24, element=4, device="cpu")
    of = BlockActivations(shapes.config, shapes.blocks[-1], trained_weights_of(spec, shapes), batch)
    hidden = batch.tokens * shapes.config.hidden * batch.stream
    for mode, expected in (("none", of.kept()), ("selective", hidden + of.products()), ("full", hidden)):
        model = model_of(kind, lora=lora, dropout=0.0)
        set_block_forward(model, mode)
        block, made = transformer_blocks(model)[-1], []
        block.register_forward_pre_hook(lambda *_, made=made: made.append(record_function("block").__enter__()))
        block.register_forward_hook(lambda *_, made=made: made[0].__exit__(None, None, None))
        gc.collect()  # what a collection within the block frees would count
        gc.disable()
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
            kept = loss_of(model)
        gc.enable()
        measured = next(e for e in found.events() if e.name == "block").cpu_memory_usage
        random_state = 0 if mode == "none" else torch.get_rng_state().numel()
        assert measured - random_state == pytest.approx(expected, rel=0.02), (mode, kept)


def failing(graph: Any, inputs: Any) -> Any:
    raise RuntimeError("no C++ compiler\nmore of the message")


def all_equal(found: list[Any], expected: list[Any]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("mode", ["none", "full"])
def test_a_compiler_that_fails_is_reported_once_and_the_step_is_that_of_a_model_without(mode: str) -> None:
    expected, model, said = gradients(model_of(lora=False)), model_of(lora=False), []
    set_block_forward(model, mode, Compilation(static=True, report=said.append, backend=failing))
    for _ in range(2):
        model.zero_grad()
        assert all_equal(gradients(model), expected)
    assert len(said) == 1 and "no C++ compiler" in said[0] and "\n" not in said[0], said


def test_a_backward_that_cannot_be_compiled_fails_in_the_first_forward() -> None:
    calls: list[Any] = []

    def backward(graph: Any, inputs: Any) -> Any:
        calls.append(graph)
        raise RuntimeError("unsupported operation")

    expected, model, said = gradients(model_of(lora=False)), model_of(lora=False), []
    backend = aot_autograd(fw_compiler=lambda graph, inputs: graph.forward, bw_compiler=backward)
    set_block_forward(model, "none", Compilation(static=True, report=said.append, backend=backend))
    loss = loss_of(model)
    assert calls and len(said) == 1, "before backward"
    loss.backward()
    assert all_equal([p.grad for p in model.parameters()], expected)


def test_compiled_blocks_keep_names_share_one_program_and_do_not_evaluate() -> None:
    graphs: list[Any] = []

    def count(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    model, names = model_of(lora=False), list(model_of(lora=False).state_dict())
    expected = gradients(model_of(lora=False))
    backend = aot_autograd(fw_compiler=count)
    set_block_forward(model, "none", Compilation(static=True, report=pytest.fail, backend=backend))
    loss_of(model.eval())
    with torch.no_grad():
        loss_of(model.train())
    assert not graphs
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(gradients(model), expected, strict=True))
    assert len(graphs) == 2, "forward and backward of one block"
    assert list(model.state_dict()) == names == [n for n, _ in model.named_parameters()]
