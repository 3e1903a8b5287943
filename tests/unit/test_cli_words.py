"""What models and programs wrote, on its way to a terminal: words, and nothing that the terminal would obey."""

from __future__ import annotations

import io

from rich.console import Console

from allranks.analysis.metrics import before_and_after
from allranks.cli.console import SafeConsole
from allranks.cli.options import error_line
from allranks.cli.run import ProgressView
from allranks.cli.run_output import samples_table

WILD = "one \x1b[31mred\x1b[0m \x1b]0;title\x07 two\x00"


def test_answers_of_a_model_move_no_cursor() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, color_system=None, width=120)
    console.print(samples_table([{"prompt": "ask", "expected": "yes", "before": WILD, "after": "\x1b[2J"}]))
    assert "one red" in out.getvalue()
    assert not any(wild in out.getvalue() for wild in ("\x1b[31m", "\x1b[2J", "\x07", "\x00"))


def test_answers_of_an_earlier_step_are_not_called_before() -> None:
    evals = [
        {"event": "eval", "step": step, "samples": [{"prompt": "ask", "expected": "yes", "reply": "no"}]}
        for step in (30, 60)
    ]
    for events, titles in ((evals, ["after step 30", "after"]), (evals[1:], ["after"])):
        table = samples_table(before_and_after(events))
        assert [str(column.header) for column in table.columns] == ["question", "correct answer", *titles]


def test_errors_of_a_program_move_no_cursor() -> None:
    line = error_line({"rank": 1, "type": "ValueError", "message": f"{WILD}\nsecond line"})
    assert line.startswith("rank 1: ValueError: one red ") and "second" not in line
    assert not any(ord(c) < 32 for c in line)
    assert error_line({"rank": 0, "type": "KeyError", "message": ""}) == "rank 0: KeyError: "


def test_an_evaluation_whose_loss_is_not_finite_is_shown() -> None:
    out = io.StringIO()
    live = ProgressView(SafeConsole(file=out, width=200))
    live.event({"event": "eval", "rank": 0, "step": 20, "loss": None, "perplexity": None})
    assert out.getvalue() == "held out loss nan (after step 20)\n"
