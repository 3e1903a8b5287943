"""The estimate: its arithmetic against formulas and published figures, laws, verdicts, refusals, and its verbs."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from allranks.errors import EnvironmentNotAble, SpecError
from allranks.planning.memory import Fit, fit, make_plan, require
from allranks.planning.memory.estimate import capacity
from allranks.planning.memory.families import FAMILIES
from allranks.planning.memory.model_config import KNOWN, UnknownFamily, known_config, read_model_config
from allranks.planning.memory.weights import shapes_of
from allranks.spec import parse_spec
from allranks.spec.strategies import REGISTRY
from tests.sampling import examples
from tests.unit.fit_specs import GIB, estimated, facts, raw
from tests.warm import allranks

SEVEN_B = {"name": "mistralai/Mistral-7B-v0.1"}
SEVEN_B_FLOAT32 = {**SEVEN_B, "dtype": "float32"}

# The parameter counts that the models' own pages or checkpoints tell.
PUBLISHED = {
    "mistralai/Mistral-7B-v0.1": 7_241_732_096, "mistralai/Mixtral-8x7B-v0.1": 46_702_792_704,
    "meta-llama/Llama-2-7b-hf": 6_738_415_616, "meta-llama/Llama-2-13b-hf": 13_015_864_320,
    "meta-llama/Llama-3.1-8B": 8_030_261_248, "meta-llama/Llama-3.1-70B": 70_553_706_496,
    "meta-llama/Llama-3.1-405B": 405_853_388_800, "meta-llama/Llama-3.2-1B": 1_235_814_400,
    "meta-llama/Llama-3.2-3B": 3_212_749_824, "TinyLlama/TinyLlama-1.1B-Chat-v1.0": 1_100_048_384,
    "HuggingFaceTB/SmolLM2-360M": 361_821_120, "HuggingFaceTB/SmolLM2-135M": 134_515_008,
    "Qwen/Qwen2.5-0.5B": 494_032_768, "Qwen/Qwen2.5-7B": 7_615_616_512, "Qwen/Qwen3-0.6B": 596_049_920,
    "Qwen/Qwen3-8B": 8_190_735_360, "microsoft/Phi-3-mini-4k-instruct": 3_821_079_552, "google/gemma-2b": 2_506_172_416,
    "Qwen/Qwen2.5-0.5B-Instruct": 494_032_768, "meta-llama/Llama-2-7b-chat-hf": 6_738_415_616, "gpt2": 124_439_808,
    "gpt2-xl": 1_557_611_200,
}  # fmt: skip


@pytest.mark.parametrize(("name", "count"), PUBLISHED.items(), ids=list(PUBLISHED))
def test_well_known_models_have_their_published_number_of_parameters(name: str, count: int) -> None:
    config = known_config(name)
    assert config is not None
    assert shapes_of(read_model_config(config, name)).numel == count


def state(spec: dict[str, Any], **there: Any) -> int:
    """Weights, gradients and optimizer state at the update, without gathered weights and buffers."""
    found = estimated(spec, **there)
    assert found.moments[-1].name == "optimizer step"
    return kept(found)


def kept(found: Fit) -> int:
    """What a strategy shares, or does not."""
    return sum(found.moments[-1].parts.get(k, 0) for k in ("weights", "adapters", "gradients", "optimizer_state"))


@pytest.mark.parametrize(
    ("strategy", "per_parameter"),
    [
        ("pytorch_ddp", 16.0),
        ("simple_ddp", 16.0),
        ("bucket_ddp_async", 16.0),
        ("zero1", 8 + 8 / 8),
        ("pytorch_zero1", 8 + 8 / 8),
        ("zero2", 4 + 12 / 8),
        ("zero3", 16 / 8),
        ("pytorch_zero2", 16 / 8),
        ("pytorch_zero3", 16 / 8),
        ("deepspeed_zero3", 24 / 8),  # it keeps master weights, and flattens its gradients for the update
    ],
)
def test_state_follows_the_formula_of_its_stage(strategy: str, per_parameter: float) -> None:
    """Float32 and AdamW: 4 bytes of weight, 4 of gradient, 8 of moments, each shared by 8 ranks or not (ZeRO, 2020)."""
    spec = raw(model=SEVEN_B_FLOAT32, strategy={"name": strategy}, cluster={"procs_per_node": 8})
    assert state(spec) == pytest.approx(per_parameter * PUBLISHED[SEVEN_B["name"]], rel=0.001)


def test_full_fine_tuning_of_7b_in_float32_dies_in_the_optimizer_step_on_80_gb_and_lora_does_not() -> None:
    """The first seed's failure: weights and gradients fit, and then AdamW makes its moments."""
    full = estimated(raw(model=SEVEN_B_FLOAT32), gpus=8)
    assert (full.verdict, full.fails_in) == ("too large", "optimizer step")
    lora = estimated(raw(model=SEVEN_B_FLOAT32, adapter={"type": "lora"}), gpus=8)
    assert lora.verdict == "fits" and lora.needed_bytes < 0.5 * full.needed_bytes


LONG_LORA = {"adapter": {"type": "lora"}, "data": {"source": "builtin:instructions", "max_length": 4096}}
LARGE = {"micro_batch_size": 16, "global_batch_size": 256}
DDP = {"name": "pytorch_ddp", "find_unused_parameters": True}
LONG = {"source": "builtin:instructions", "max_length": 2048}


@pytest.mark.parametrize(
    ("spec", "gpus"),
    [
        (raw(model=SEVEN_B_FLOAT32), 8),
        (raw(model=SEVEN_B, adapter={"type": "lora"}, data=LONG, train=LARGE), 8),
        (raw(model=SEVEN_B_FLOAT32, strategy=DDP), 8),
        (raw(model=SEVEN_B_FLOAT32, adapter={"type": "none", "r": 64}), 1),
    ],
    ids=["plain", "global_batch", "options", "rank_of_an_adapter"],
)  # fmt: skip
def test_what_makes_it_fit_is_told_cheapest_first_and_is_true(spec: dict[str, Any], gpus: int) -> None:
    found = estimated(spec, gpus=gpus)
    assert len(found.remedies) == 3
    assert all(r.fits for r in found.remedies)
    for remedy in found.remedies:
        again = estimated(spec, tuple(remedy.settings), gpus=gpus)
        assert (again.verdict, again.needed_bytes) == ("fits", remedy.needed_bytes), remedy.change
    if gpus > 1:
        assert not any("lora" in s for s in found.remedies[0].settings)  # first what trains the same weights


def test_a_model_that_nothing_makes_fit_is_told_the_nearest_change() -> None:
    spec = raw(model={"name": "meta-llama/Llama-3.1-405B"})
    lean = ("adapter.type=lora", "model.gradient_checkpointing=full")
    found, with_lean = estimated(spec, gpus=1), estimated(spec, lean, gpus=1)
    assert (found.verdict, [r.fits for r in found.remedies]) == ("too large", [False])
    assert found.remedies[0].needed_bytes <= with_lean.needed_bytes < found.needed_bytes
    with pytest.raises(EnvironmentNotAble, match=r"no known change of the spec(.|\n)*still too much"):
        require(found)


def test_auto_recomputes_no_more_than_the_memory_requires() -> None:
    spec = raw(model={**SEVEN_B, "gradient_checkpointing": "auto"}, **LONG_LORA, train={"micro_batch_size": 2})
    modes = {mode: f"model.gradient_checkpointing={mode}" for mode in ("none", "selective", "full")}
    needed = {mode: estimated(spec, (change,), gpus=1).needed_bytes for mode, change in modes.items()}
    assert needed["none"] > needed["selective"] > needed["full"]
    for mode, limit in needed.items():
        parsed, known = parse_spec(spec), facts(gpus=1, gpu_bytes=limit)
        plan = make_plan(parsed, known)
        assert plan.recomputation == mode
        found = fit(parsed, plan, known)
        assert found.verdict == "fits" and f"auto: {mode}, because a rank needs" in found.notes[0]
    least = facts(gpus=1, gpu_bytes=needed["full"] - 1)
    assert make_plan(parse_spec(spec), least).recomputation_reason.startswith("none of the modes fits")
    plan = make_plan(parse_spec(spec, ["cluster.launcher=slurm", "cluster.slurm.gpus_per_node=1"]), facts())
    assert plan.recomputation == "none" and "cluster.device_memory_gib" in plan.recomputation_reason


def test_a_smaller_micro_batch_keeps_the_global_batch() -> None:
    spec = raw(model=SEVEN_B, **LONG_LORA, train={"micro_batch_size": 8, "grad_accum": 2})
    assert estimated(spec, gpus=2).remedies[0].settings == ["train.micro_batch_size=1", "train.grad_accum=16"]


def test_close_to_the_limit_is_told_and_not_refused() -> None:
    needed = estimated(raw()).needed_bytes
    for memory, verdict in ((needed * 2.02, "fits"), (needed * 1.9, "close"), (needed * 1.7, "too large")):
        found = estimated(raw(), memory_bytes=int(memory))
        assert (found.verdict, found.refused) == (verdict, verdict == "too large")


def test_a_model_that_is_not_known_is_told_and_not_refused() -> None:
    found = estimated(raw(model={"name": "nobody/has-this-model"}), memory_bytes=1)
    assert found.verdict == "not known" and "nobody/has-this-model" in str(found.unknown)
    require(found)


def test_gpus_that_are_elsewhere_are_not_known_unless_told() -> None:
    cluster = {"launcher": "slurm", "slurm": {"gpus_per_node": 8}}
    there = estimated(raw(model=SEVEN_B, cluster=cluster), gpus=8)
    assert there.verdict == "not known", "those here are not those there"
    told = estimated(raw(model=SEVEN_B, cluster={**cluster, "device_memory_gib": 40}))
    assert (told.verdict, told.capacity.bytes) == ("too large", 40 * GIB)


def test_the_smallest_gpu_counts_and_ranks_on_one_share_it() -> None:
    found = estimated(raw(cluster={"procs_per_node": 3, "backend": "gloo"}), gpus=2).capacity
    assert (found.bytes, "shared by 2 ranks" in found.source) == (40 * GIB, True)
    spec, uneven = parse_spec(raw()), facts(gpus=2)
    smaller = msgspec.structs.replace(uneven.gpus[1], name="small", memory_bytes=24 * GIB)
    uneven = msgspec.structs.replace(uneven, gpus=[uneven.gpus[0], smaller])
    least = capacity(spec, make_plan(spec, uneven), uneven)
    assert (least.device, least.bytes) == ("small", 24 * GIB)


def test_what_is_kept_on_the_host_is_not_on_the_device() -> None:
    def kept(offload: str, device: str) -> tuple[bool, float]:
        """Whether weights are there at the update, and bytes of state for each trained parameter of this rank."""
        strategy = {"name": "pytorch_zero3", "offload": offload}
        found = estimated(raw(strategy=strategy, cluster={"device": device, "procs_per_node": 2}), gpus=2)
        parts = found.moments[-1].parts
        return "weights" in parts, parts.get("optimizer_state", 0) * 2 / found.parameters_trained / 4

    assert kept("none", "cuda") == (True, pytest.approx(2, rel=1e-3))
    assert kept("optimizer", "cuda") == (True, 0)
    assert kept("all", "cuda") == (False, 0)
    assert kept("all", "cpu") == (True, pytest.approx(2, rel=1e-3))
    assert kept("optimizer", "cpu") == (True, pytest.approx(3, rel=1e-3)), "the optimizer's copy of the weights"


@pytest.mark.parametrize(
    ("mem", "each"), [("64G", 32 * GIB), ("65536", 32 * GIB), ("1T", 512 * GIB), ("0", None), ("all", None)]
)
def test_slurm_memory_is_shared_by_the_ranks_of_a_node(mem: str, each: int | None) -> None:
    spec = raw(cluster={"launcher": "slurm", "device": "cpu", "procs_per_node": 2, "slurm": {"mem": mem}})
    assert estimated(spec).capacity.bytes == each


BROKEN: list[tuple[Any, str]] = [
    ({"hidden_size": -4}, "hidden_size is -4"),
    ({"hidden_size": "4096"}, "hidden_size is '4096'; it must be an integer from 1 to 1000000"),
    ({"num_hidden_layers": 10**12}, "num_hidden_layers is 1000000000000"),
    ({"vocab_size": True}, "vocab_size is True; it must be an integer"),
    ({"vocab_size": None}, "vocab_size is missing"),
    ({"num_key_value_heads": 3}, "not a multiple of num_key_value_heads 3"),
    ({"tie_word_embeddings": "yes"}, "expected true or false"),
    ({"hidden_size": 1.5, "intermediate_size": []}, "intermediate_size is"),
    ({"model_type": 7}, "model_type is 7"),
]


@pytest.mark.parametrize(("change", "says"), BROKEN, ids=[says for _, says in BROKEN])
def test_a_broken_config_is_refused_by_the_key(tmp_path: Path, change: dict[str, Any], says: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**KNOWN["meta-llama/llama-3.2-1b"], **change}))
    with pytest.raises(SpecError, match=r"config\.json") as error:
        estimated(raw(model={"name": str(tmp_path)}))
    assert says in str(error.value)


def test_a_variant_with_other_layers_is_not_known() -> None:
    config = {**KNOWN["tinyllama/tinyllama-1.1b-chat-v1.0"], "model_type": "stablelm"}
    assert read_model_config({**config, "qk_layernorm": False}, "here").family == "stablelm"
    with pytest.raises(UnknownFamily, match=r"stablelm \(qk_layernorm: True\)"):
        read_model_config({**config, "qk_layernorm": True}, "here")


def test_the_config_in_the_cache_comes_before_the_table(tmp_path: Path) -> None:
    config = json.dumps({**KNOWN["openai-community/gpt2"], "n_layer": 1})
    for name, content in (("refs/main", "abc\n"), ("snapshots/abc/config.json", config)):
        path = tmp_path / "hub" / "models--gpt2" / name
        path.parent.mkdir(parents=True)
        path.write_text(content)
    found = estimated(raw(model={"name": "gpt2"}, cluster={"cache": str(tmp_path)}))
    assert found.parameters == PUBLISHED["gpt2"] - 11 * 7_087_872
    assert "cache" in found.model_source


@st.composite
def specs(draw: Any) -> dict[str, Any]:
    """A spec of any size, with any of the choices that change memory."""

    def one(*values: Any) -> Any:
        return draw(st.sampled_from(values))

    def size(low: int, high: int) -> int:
        return draw(st.integers(low, high))

    heads, family = one(1, 2, 4, 8, 12), one("tiny:llama", "tiny:mistral", "tiny:bert", "tiny:glm4_moe")
    config = {
        "hidden_size": heads * size(4, 64), "intermediate_size": size(8, 4000), "num_hidden_layers": size(1, 30),
        "num_attention_heads": heads, "vocab_size": size(300, 60000),
    }  # fmt: skip
    if family != "tiny:bert":
        config["num_key_value_heads"] = heads // one(*(g for g in (1, 2, 4) if heads % g == 0))
    recompute, dtype, packing = one(True, False), one("float32", "bfloat16"), one("isolated", "none", "wrapped")
    return {
        "model": {"name": family, "config": config, "gradient_checkpointing": recompute, "dtype": dtype},
        "data": {"source": "builtin:instructions", "max_length": size(2, 3000), "packing": packing},
        "adapter": {"type": one("none", "lora"), "r": size(1, 64), "dropout": one(0.0, 0.1)},
        "strategy": {"name": one(*sorted(REGISTRY.keys() - {"single"}))},
        "train": {"micro_batch_size": size(1, 16), "grad_accum": one(1, 4)},
        "cluster": {"procs_per_node": one(1, 2, 3, 8), "device": "cpu"},
    }


def changed(spec: dict[str, Any], section: str, **values: Any) -> dict[str, Any]:
    return {**spec, section: {**spec[section], **values}}


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
@given(specs(), st.sampled_from(sorted(name for name in REGISTRY if "zero" in name)))
def test_more_ranks_never_take_more_of_what_is_shared(spec: dict[str, Any], strategy: str) -> None:
    spec = changed(spec, "strategy", name=strategy)
    ranks = spec["cluster"]["procs_per_node"]
    assert kept(estimated(changed(spec, "cluster", procs_per_node=ranks * 2))) <= kept(estimated(spec))


@settings(max_examples=examples(60), deadline=None)
@given(specs())
def test_each_stage_of_zero_keeps_no_more_than_the_one_before(spec: dict[str, Any]) -> None:
    stages = ("bucket_ddp_async", "zero1", "zero2", "zero3")
    ladder = [kept(estimated(changed(spec, "strategy", name=name))) for name in stages]
    assert all(b <= a + 8 * 16 for a, b in pairwise(ladder)), "but for padding"


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
PARTS = ("hidden", "layers", "heads", "intermediate", "positions", "embedding")
KEYS = [
    *sorted({getattr(names, part) for names in FAMILIES.values() for part in PARTS} - {"", None}),
    "vocab_size", "head_dim", "num_key_value_heads", "num_local_experts", "num_experts", "n_routed_experts",
    "moe_intermediate_size", "num_experts_per_tok", "n_shared_experts", "first_k_dense_replace", "tie_word_embeddings",
    "attention_bias", "attention_dropout",
]  # fmt: skip


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


@pytest.fixture
def spec_file(tmp_path: Path) -> Path:
    path = tmp_path / "spec.yaml"
    path.write_text(yaml.safe_dump({**raw(), "name": "small", "run_root": str(tmp_path / "runs")}))
    return path


def ends(*words: str) -> tuple[int, str, str]:
    done = allranks(*words)
    return done.returncode, done.stdout, done.stderr


def test_plan_shows_parts_moments_and_verdict(spec_file: Path) -> None:
    code, out, _ = ends("plan", str(spec_file))
    assert code == 0
    assert all(words in out for words in ("Memory of one rank", "optimizer state", "activations", "together"))
    verdict = next(line for line in out.splitlines() if line.startswith("memory: "))
    assert verdict.endswith("it fits"), "through a pipe a sentence is one line, for grep"


def test_run_refuses_what_cannot_fit_before_anything_is_made(spec_file: Path) -> None:
    code, _, err = ends("run", str(spec_file), "--set", "cluster.device_memory_gib=0.01")
    assert code == 3 and "does not fit" in err and "--force" in err and "Traceback" not in err
    assert not (spec_file.parent / "runs").exists()
