"""The display of a run: whatever events hold, it shows what it can, and it never ends the run."""

import io
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console

from allranks.analysis.metrics import before_and_after
from allranks.analysis.stragglers import StragglerDetector
from allranks.cli.console import SafeConsole
from allranks.cli.options import error_line
from allranks.cli.run import ProgressView
from allranks.cli.run_output import samples_table, summary_rows, summary_table
from allranks.launch.runs import GuardedObserver
from allranks.planning.planner import make_plan
from allranks.rundir.events import decode_line
from allranks.rundir.paths import RunDir
from allranks.spec.loader import parse_spec
from allranks.utils.machine import machine_facts
from tests.sampling import examples

KINDS = [
    "start", "phase", "data", "remark", "model", "proof", "eval", "checkpoint", "step", "error", "hang", "warning",
    "stop", "exit", "trace", "batch", "other",
]  # fmt: skip
FIELDS = [
    "name", "total_steps", "first_step", "rows_truncated", "tokens_cut", "rows_without_target", "rows_train",
    "rows_eval", "sequences", "fill", "how", "seconds", "message", "type", "parameters", "parameters_trained", "device",
    "torch", "threads", "world_size", "rows_checked", "weights_hash", "loss", "perplexity", "accuracy", "exact_match",
    "checked", "step", "mode", "tokens", "time", "ranks", "host", "echo", "samples", "own_s", "own_backward_s",
    "step_time_s", "steps", "warnings",
]  # fmt: skip
METRICS = [
    "run_name", "status", "strategy", "world_size", "nodes", "device", "dtype", "model", "steps", "wall_time_s",
    "attempts", "train_loss_first", "train_loss_last", "eval_loss", "eval_loss_first", "perplexity", "accuracy",
    "exact_match", "exact_match_first", "tokens_real", "tokens_trained", "tokens_padded", "tokens_per_s",
    "tokens_per_s_per_rank", "step_time_s", "epoch_s", "network", "mfu", "mfu_with_attention", "peak_memory_bytes",
    "sync_proof", "eval_s",
]  # fmt: skip
anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=4,
)
events = st.builds(
    lambda kind, rank, fields: {"event": kind, "rank": rank, **fields}, st.sampled_from(KINDS),
    st.sampled_from([0, 0, 0, 1, None, "0"]), st.dictionaries(st.sampled_from(FIELDS), anything),
)  # fmt: skip
usual = settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def live(*, terminal: bool = False) -> tuple[ProgressView, io.StringIO]:
    raw = {"model": {"name": "tiny:llama"}, "data": {"source": "builtin:instructions"}}
    plan, out = make_plan(parse_spec(raw, ["cluster.procs_per_node=2"]), machine_facts()), io.StringIO()
    view = ProgressView(SafeConsole(file=out, force_terminal=terminal, width=200))
    view.start(RunDir(Path("runs/x")), plan)
    out.truncate(out.seek(0))
    return view, out


@usual
@given(told=st.lists(events, max_size=6), terminal=st.booleans())
def test_any_event_can_be_shown(told: list[dict[str, Any]], terminal: bool) -> None:
    shown, _ = live(terminal=terminal)
    slow = StragglerDetector()
    with shown:
        for event in told:
            shown.event(event)
            slow.take(event)
    before_and_after(told)
    for event in told:
        error_line(event)


def test_the_speed_is_that_of_the_steps_whenever_their_events_arrive() -> None:
    shown, out = live()
    step = {"event": "step", "rank": 0, "loss": 1.0}
    with shown:
        shown.event({"event": "phase", "rank": 0, "name": "train", "total_steps": 12, "first_step": 0})
        shown.event({**step, "step": 10, "steps": 10, "time": 5.0, "step_time_s": 0.1, "tokens": 300})
        shown.event({**step, "step": 12, "steps": 2, "time": 5.001, "step_time_s": 0.5, "tokens": 100})
    first, last = (line for line in out.getvalue().splitlines() if line.startswith("step"))
    assert "600 tokens/s" in first and "400 tokens/s" in last, "300 tokens of each of 2 ranks in 10 steps of 0.1 s"


def test_no_remaining_time_is_shown_before_it_is_known() -> None:
    shown, out = live(terminal=True)
    with shown:
        shown.event({"event": "phase", "rank": 0, "name": "prepare"})
    assert " left" not in out.getvalue()


@usual
@given(metrics=st.dictionaries(st.sampled_from(METRICS), anything))
def test_any_metrics_can_be_summarised(metrics: dict[str, Any]) -> None:
    SafeConsole(file=io.StringIO(), width=120).print(summary_table(metrics))


@usual
@given(rows=st.lists(st.dictionaries(st.sampled_from(["prompt", "expected", "before", "after"]), anything), max_size=3))
def test_any_samples_can_be_shown(rows: list[dict[str, Any]]) -> None:
    SafeConsole(file=io.StringIO(), width=120).print(samples_table(rows))


def test_answers_of_a_model_move_no_cursor() -> None:
    out = io.StringIO()
    wild = "one \x1b[31mred\x1b[0m \x1b]0;title\x07 two\x00"
    console = Console(file=out, force_terminal=True, color_system=None, width=120)
    console.print(samples_table([{"prompt": "ask", "expected": "yes", "before": wild, "after": "\x1b[2J"}]))
    assert "one red" in out.getvalue()
    assert not any(code in out.getvalue() for code in ("\x1b[31m", "\x1b[2J", "\x07", "\x00"))


def test_an_evaluation_that_is_not_finite_is_said_plainly() -> None:
    shown, out = live()
    event = decode_line(b'{"event":"eval","time":1.0,"rank":0,"step":6,"loss":null,"perplexity":null,"accuracy":null}')
    assert event is not None
    shown.event(event)
    shown.event({"event": "step", "rank": 0, "step": 1, "loss": None, "time": 1.0, "tokens": 3})
    assert "held out loss nan (after step 6)" in out.getvalue() and "loss nan" in out.getvalue().splitlines()[-1]
    ended = {"model": "m", "steps": 3, "train_loss_first": 2.0, "train_loss_last": None, "eval_loss": None}
    rows = dict(summary_rows({**ended, "eval_s": 0.1}))
    assert (rows["held-out loss"], rows["train loss"]) == ("nan (not finite)", "2.0000 -> nan (not finite)")
    assert "held-out loss" not in dict(summary_rows({**ended, "eval_s": 0})), "not measured"


class Fails:
    """Shows once, then its terminal is closed."""

    def __init__(self, error: Exception) -> None:
        self.error, self.shown = error, 0

    def event(self, event: dict[str, Any]) -> None:
        self.say("")

    def say(self, text: str) -> None:
        self.shown += 1
        if self.shown > 1:
            raise self.error


@pytest.mark.parametrize("error", [TypeError("null"), BrokenPipeError(), UnicodeEncodeError("a", "b", 0, 1, "c")])
def test_a_display_that_fails_is_switched_off_and_told_once(error: Exception) -> None:
    said: list[str] = []
    shown = Fails(error)
    guarded = GuardedObserver(shown, said.append)
    for _ in range(3):
        guarded.event({"event": "step"})
        guarded.say("a line")
    assert (shown.shown, said) == (2, [guarded.failure]) and type(error).__name__ in said[0]

    def full(text: str) -> None:
        raise OSError(28, "No space left on device")

    twice = GuardedObserver(Fails(error), full)
    twice.say("one")
    twice.say("two")  # neither the display nor the log can be written
