"""Numbers of metrics.json from events whose answer is known, and who is blamed for a failure."""

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from allranks.analysis.metrics import expert_load, mfu, summarize, wall_time, without_repeated_steps
from allranks.launch.monitor.telemetry import _Rates
from allranks.planning.cost import cost_line, cost_row, run_cost
from allranks.planning.planner import make_plan
from allranks.spec import parse_spec
from allranks.spec.records import TrainSpec
from allranks.train.loop import learning_rate
from tests.unit.test_plan import facts

SPEC = parse_spec({"model": {"name": "tiny:mistral"}, "data": {"source": "builtin:instructions"}})
PLAN = make_plan(SPEC, facts())


def step(n: int, seconds: float, tokens: int, **more: Any) -> dict[str, Any]:
    base = {"event": "step", "step": n, "steps": 1, "loss": 10.0 - n}
    base |= {"tokens": tokens, "tokens_trained": tokens // 2, "tokens_padded": 1}
    return {**base, "step_time_s": seconds, "peak_memory_bytes": 100 + n, "time": float(n), "rank": 0, **more}


def test_warm_up_is_told_apart() -> None:
    ranks = {r: [step(n, 10.0 if n <= 5 else 1.0, 100) for n in range(1, 11)] for r in (0, 1)}
    m = summarize("x", SPEC, PLAN, ranks, "succeeded")
    assert m["tokens_per_s"] == pytest.approx(200.0)
    assert m["tokens_per_s_per_rank"] == pytest.approx(100.0)
    assert m["warmup_s"] == pytest.approx(50.0)
    assert (m["tokens_real"], m["tokens_trained"], m["tokens_padded"]) == (2000, 1000, 20)
    assert (m["train_loss_first"], m["train_loss_last"], m["steps"]) == (9.0, 0.0, 10)
    assert m["peak_memory_bytes"] == 110


def test_time_of_an_epoch_is_the_mean_step_times_its_steps() -> None:
    events = [step(n, t, 100) for n, t in enumerate([10.0] * 5 + [1.0, 1.0, 4.0], 1)]
    data = {"event": "data", "time": 0.0, "rank": 0, "sequences": 30 * PLAN.batch.global_batch_size}
    warned = {"event": "warning", "time": 1.0, "rank": 1, "message": "slow disk HF_TOKEN=hf_abcdefghijklmnop"}
    ranks = {0: [{**data, "warnings": ["few rows"]}, *events], 1: [warned, warned]}
    plan = msgspec.structs.replace(PLAN, warnings=["high lr"])
    warnings = summarize("x", SPEC, plan, ranks, "succeeded")["warnings"]
    assert warnings == ["high lr", "few rows", "rank 1: slow disk HF_TOKEN=***"]
    assert summarize("x", SPEC, PLAN, {0: [data, *events]}, "succeeded")["epoch_s"] == pytest.approx(60.0)
    assert summarize("x", SPEC, PLAN, {0: events}, "succeeded")["epoch_s"] is None
    assert summarize("x", SPEC, PLAN, {0: [data, *events[:5]]}, "succeeded")["epoch_s"] is None


def test_logging_seldom_changes_no_total() -> None:
    each = [step(n, 1.0 + n, 100) for n in range(1, 21)]
    five = {"steps": 5, "tokens_trained": 250, "tokens_padded": 5}
    times = {n: [1.0 + k for k in range(n - 4, n + 1)] for n in range(5, 21, 5)}
    seldom = [step(n, 0.0, 500, step_times_s=times_s, **five) for n, times_s in times.items()]
    a, b = (summarize("x", SPEC, PLAN, {0: events}, "succeeded") for events in (each, seldom))
    for key in ("tokens_per_s", "tokens_real", "warmup_s", "step_time_s", "tokens_trained"):
        assert a[key] == pytest.approx(b[key]), key


def test_short_runs_have_no_speed() -> None:
    m = summarize("x", SPEC, PLAN, {0: [step(n, 1.0, 10) for n in range(1, 6)]}, "succeeded")
    assert m["tokens_per_s"] is None
    assert m["step_time_s"] is None


def test_steps_done_twice_count_once() -> None:
    resumed = {"event": "resume", "from_step": 4, "time": 8.0}
    events = [*(step(n, 1.0, 10) for n in range(1, 8)), resumed, *(step(n, 1.0, 10) for n in range(5, 10))]
    assert [e["step"] for e in without_repeated_steps(events) if e["event"] == "step"] == list(range(1, 10))


def used(device: str, all_: float, trained: float) -> dict[str, Any]:
    return {"device": device, "parameters_active": all_, "parameters_trained_active": trained}


def test_mfu_counts_lora_at_four_flops() -> None:
    plan = make_plan(SPEC, facts(gpus=8))
    model = used("NVIDIA H100 80GB HBM3", 7e9, 0)
    assert mfu(8 * 24824, model, plan) == pytest.approx(24824 * 4 * 7e9 / 989e12)
    assert mfu(1.0, {**model, "device": "cpu"}, plan) is None


@pytest.mark.parametrize(
    ("device", "peak"),
    [
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 NVL", 835e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA H200 NVL", 835e12),
        ("NVIDIA H20", 148e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA L40", 181e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA A10", 125e12),
        ("NVIDIA A10G", 70e12),
        ("NVIDIA B200", 2250e12),
        ("NVIDIA B300 SXM6 AC", 2250e12),
        ("AMD Instinct MI300X", 1307.4e12),
        ("NVIDIA RTX A1000", None),
        ("NVIDIA A100-SXM4-80GB MIG 3g.40gb", None),
        ("NVIDIA H100", None),  # no driver says so
        ("", None),
    ],
)
def test_the_peak_is_that_of_the_very_gpu(device: str, peak: float | None) -> None:
    found = mfu(8 * 1000, used(device, 7e9, 7e9), make_plan(SPEC, facts(gpus=8)))
    assert found == (None if peak is None else pytest.approx(1000 * 6 * 7e9 / peak))


def test_mfu_of_a_mixture_of_experts_counts_what_a_token_uses() -> None:
    plan = make_plan(SPEC, facts(gpus=8))
    glm_air = {"event": "model", "device": "NVIDIA H200", "parameters": 106e9, "parameters_trained": 0.0, "time": 0.0}
    told = {**glm_air, "parameters_active": 12e9, "parameters_trained_active": 0.0}

    def mfu_of(*events: dict[str, Any]) -> float | None:
        steps = [step(n, 1.0, 1000) for n in range(1, 9)]
        return summarize("r", SPEC, plan, {0: [*events, *steps]}, "succeeded")["mfu"]

    assert mfu_of(told) == pytest.approx(1000 * 4 * 12e9 / 8 / 989e12)
    assert mfu_of({**told, "parameters_active": None}) is None
    assert mfu_of(glm_air) is None  # a run from before: unknown


def test_attention_is_counted_beside_the_parameters() -> None:
    """By hand: 32 layers, 32 heads of 128: 12 * 32 * 32 * 128 per pair; per step 4 rows of 250 * 251 / 2 pairs."""
    plan = make_plan(SPEC, facts(gpus=8))
    model = {"event": "model", "time": 0.0, **used("NVIDIA H200", 7e9, 0), "attention_flops_per_pair": 1_572_864}
    steps = [step(n, 1.0, 1000, attention_pairs=1 if n <= 5 else 125_500) for n in range(1, 9)]
    found = summarize("r", SPEC, plan, {0: [model, *steps]}, "succeeded")
    assert found["attention_flops_per_token"] == pytest.approx(197_394_432)
    assert found["mfu"] == pytest.approx(1000 * 28e9 / 8 / 989e12)
    assert found["mfu_with_attention"] == pytest.approx(1000 * (28e9 + 197_394_432) / 8 / 989e12)

    def with_model(**more: Any) -> dict[str, Any]:
        return summarize("r", SPEC, plan, {0: [{**model, **more}, *steps]}, "succeeded")

    on_cpu = with_model(device="cpu")
    assert on_cpu["attention_flops_per_token"] == pytest.approx(197_394_432)
    assert on_cpu["mfu"] is on_cpu["mfu_with_attention"] is None
    assert SPEC.data is not None
    for unknown in ({"attention_flops_per_pair": None}, {"attention_window": SPEC.data.max_length - 1}):
        found = with_model(**unknown)
        assert found["mfu"] is not None and found["mfu_with_attention"] is found["attention_flops_per_token"] is None
    assert with_model(attention_window=SPEC.data.max_length)["mfu_with_attention"] is not None


@pytest.mark.parametrize("first", [0, 1], ids=["rank 0 starts first", "rank 1 starts first"])
@pytest.mark.parametrize("resumed_from", [5, None], ids=["resumed", "from the beginning"])
def test_wall_time_leaves_out_what_lies_between_attempts(first: int, resumed_from: int | None) -> None:
    def story(rank: int) -> list[dict[str, Any]]:
        told: list[dict[str, Any]] = []
        for number, begun, resumed in ((1, 0.0, None), (2, 1000.0, resumed_from)):
            start = {"event": "start", "attempt": number, "resumed_from": resumed}
            told += [{**start, "time": begun + (rank != first)}, {"event": "phase", "time": begun + 10}]
        return [{"rank": rank, **e} for e in told]

    assert wall_time({rank: story(rank) for rank in (0, 1)}) == 20.0
    assert wall_time({}) is None


def test_loads_of_experts_are_added_up_over_the_steps() -> None:
    load = expert_load([{"event": "experts", "step": s, "layers": {"1": c}} for s, c in enumerate(([6, 0], [0, 2]))])
    assert load is not None
    assert (load["min"], load["max"], load["layers"][0]["unused"]) == (0.25, 0.75, 0)
    assert expert_load([]) is None


def test_loopback_is_no_traffic_of_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    nic = SimpleNamespace(bytes_recv=5, bytes_sent=7)
    monkeypatch.setattr("psutil.net_io_counters", lambda pernic: {"lo": nic, "eth0": nic, "eth1": nic})
    found = _Rates._counters()
    names = ("net_received_bytes_per_s", "net_sent_bytes_per_s", "loopback_bytes_per_s")
    assert [found[name] for name in names] == [10, 14, 7]


def test_schedules() -> None:
    linear = TrainSpec(lr=1.0, warmup_steps=2)
    assert [learning_rate(linear, s, 4) for s in range(5)] == [0.5, 1.0, 1.0, 0.5, 0.0]
    cosine = TrainSpec(lr=1.0, schedule="cosine")
    assert [learning_rate(cosine, s, 2) for s in range(3)] == pytest.approx([1.0, 0.5, 0.0])
    assert learning_rate(TrainSpec(lr=1.0, schedule="constant"), 99, 10) == 1.0


def test_costs_are_those_of_all_ranks_and_spare_nodes_and_absent_without_a_price() -> None:
    slurm = {"launcher": "slurm", "slurm": {"time": "90"}, "device": "cpu"}
    slurm |= {"nodes": 2, "spares": 1, "procs_per_node": 4}
    spec = {"model": {"name": "tiny:mistral"}, "data": {"source": "builtin:instructions"}, "cluster": slurm}
    free = parse_spec(spec)
    priced = parse_spec({**spec, "cluster": {**slurm, "price_per_gpu_hour": 2.5}})
    plan = make_plan(priced, facts())
    assert (cost_line(free, plan), run_cost(free, plan, 60.0), run_cost(priced, plan, None)) == (None, None, None)
    spent = run_cost(priced, plan, 1800.0)
    assert spent == {"amount": 15.0, "currency": "USD", "gpu_hours": 6.0, "price_per_gpu_hour": 2.5}
    assert cost_row(spent) == "15.00 USD, 6 GPU-hours at 2.5" and cost_row({"amount": "x"}) == cost_row(None) == ""
    assert "30.00 USD an hour: 12 ranks" in str(line := cost_line(priced, plan)) and "at most 45.00 USD" in str(line)
