"""Laws that every estimate obeys, whatever the numbers; and that no config, however absurd, ends in a traceback."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from allranks.errors import SpecError
from allranks.planning.memory import Fit
from allranks.planning.memory.families import FAMILIES
from allranks.planning.memory.model_config import UnknownFamily, read_model_config
from allranks.planning.memory.weights import shapes_of
from allranks.spec.strategies import REGISTRY
from tests.sampling import examples
from tests.unit.fit_specs import estimated

SHARDED = sorted(n for n in REGISTRY if "zero" in n)
NAMES = sorted(REGISTRY)


@st.composite
def specs(draw: Any) -> dict[str, Any]:
    """A spec of any size, with any of the choices that change memory."""
    heads = draw(st.sampled_from([1, 2, 4, 8, 12]))
    groups = draw(st.sampled_from([g for g in (1, 2, 4) if heads % g == 0]))
    family = draw(st.sampled_from(["tiny:llama", "tiny:mistral", "tiny:bert", "tiny:glm4_moe"]))
    config = {
        "hidden_size": heads * draw(st.integers(4, 64)), "intermediate_size": draw(st.integers(8, 4000)),
        "num_hidden_layers": draw(st.integers(1, 30)), "num_attention_heads": heads,
        "vocab_size": draw(st.integers(300, 60000)),
    }  # fmt: skip
    if family != "tiny:bert":
        config["num_key_value_heads"] = heads // groups
    return {
        "model": {
            "name": family, "config": config, "gradient_checkpointing": draw(st.booleans()),
            "dtype": draw(st.sampled_from(["float32", "bfloat16"])),
        },
        "data": {
            "source": "builtin:instructions", "max_length": draw(st.integers(2, 3000)),
            "packing": draw(st.sampled_from(["isolated", "none", "wrapped"])),
        },
        "adapter": {
            "type": draw(st.sampled_from(["none", "lora"])), "r": draw(st.integers(1, 64)),
            "dropout": draw(st.sampled_from([0.0, 0.1])),
        },
        "strategy": {"name": draw(st.sampled_from([n for n in NAMES if n != "single"]))},
        "train": {"micro_batch_size": draw(st.integers(1, 16)), "grad_accum": draw(st.sampled_from([1, 4]))},
        "cluster": {"procs_per_node": draw(st.sampled_from([1, 2, 3, 8])), "device": "cpu"},
    }  # fmt: skip


def changed(spec: dict[str, Any], section: str, **values: Any) -> dict[str, Any]:
    return {**spec, section: {**spec[section], **values}}


def kept(found: Fit) -> int:
    """Weights, adapters, gradients and state at the update: what a strategy shares, or does not."""
    return sum(found.moments[-1].parts.get(k, 0) for k in ("weights", "adapters", "gradients", "optimizer_state"))


def solid(found: Any) -> int:
    """The most at any moment, without the allocator's slack: that falls where tensors reach 32 MiB."""
    return max(m.total_bytes - m.parts.get("slack", 0) for m in found.moments)


@settings(max_examples=examples(60), deadline=None)
@given(specs(), st.integers(1, 8))
def test_a_larger_batch_or_a_longer_sequence_never_takes_less(spec: dict[str, Any], more: int) -> None:
    before = solid(estimated(spec))
    assert solid(estimated(changed(spec, "train", micro_batch_size=spec["train"]["micro_batch_size"] + more))) >= before
    assert solid(estimated(changed(spec, "data", max_length=spec["data"]["max_length"] + more))) >= before


@settings(max_examples=examples(60), deadline=None)
@given(specs(), st.sampled_from(SHARDED))
def test_more_ranks_never_take_more_of_what_is_shared(spec: dict[str, Any], strategy: str) -> None:
    spec = changed(spec, "strategy", name=strategy)
    ranks = spec["cluster"]["procs_per_node"]
    before = kept(estimated(spec))
    assert kept(estimated(changed(spec, "cluster", procs_per_node=ranks * 2))) <= before


@settings(max_examples=examples(60), deadline=None)
@given(specs())
def test_each_stage_of_zero_keeps_no_more_than_the_one_before(spec: dict[str, Any]) -> None:
    ladder = [
        kept(estimated(changed(spec, "strategy", name=n))) for n in ("bucket_ddp_async", "zero1", "zero2", "zero3")
    ]
    padding = 8 * 16
    assert all(b <= a + padding for a, b in pairwise(ladder))


@settings(max_examples=examples(60), deadline=None)
@given(specs())
def test_checkpointing_never_keeps_more_for_backward(spec: dict[str, Any]) -> None:
    def at_loss(on: bool) -> int:
        moments = estimated(changed(spec, "model", gradient_checkpointing=on)).moments
        return next(m for m in moments if m.name == "loss").parts["activations"]

    assert at_loss(True) <= at_loss(False)


junk = st.one_of(
    st.none(), st.booleans(), st.integers(-(10**30), 10**30), st.floats(allow_nan=True), st.text(max_size=8),
    st.lists(st.integers(), max_size=2),
)  # fmt: skip
KEYS = sorted(
    {
        n
        for names in FAMILIES.values()
        for n in (names.hidden, names.layers, names.heads, names.intermediate, names.positions, names.embedding)
        if n
    }
    | {
        "vocab_size", "head_dim", "num_key_value_heads", "num_local_experts", "num_experts", "n_routed_experts",
        "moe_intermediate_size",
    }
    | {
        "num_experts_per_tok", "n_shared_experts", "first_k_dense_replace", "tie_word_embeddings", "attention_bias",
        "attention_dropout",
    }
)  # fmt: skip


@settings(max_examples=examples(100), deadline=None)
@given(
    st.sampled_from([*FAMILIES, "unheard", 3]),
    st.dictionaries(st.sampled_from(KEYS), st.one_of(junk, st.integers(1, 4096))),
)
def test_a_config_is_read_or_refused_in_words(family: Any, values: dict[str, Any]) -> None:
    try:
        config = read_model_config({"model_type": family, **values}, "here", labels=0)
    except (SpecError, UnknownFamily):
        return
    assert shapes_of(config).numel > 0
