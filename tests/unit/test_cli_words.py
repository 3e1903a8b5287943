"""What models and programs wrote, on its way to a terminal: words, and nothing that the terminal would obey."""

from __future__ import annotations

import io

from rich.console import Console

from allranks.cli.run_output import samples_table

WILD = "one \x1b[31mred\x1b[0m \x1b]0;title\x07 two\x00"


def test_answers_of_a_model_move_no_cursor() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, color_system=None, width=120)
    console.print(samples_table([{"prompt": "ask", "expected": "yes", "before": WILD, "after": "\x1b[2J"}]))
    assert "one red" in out.getvalue()
    assert not any(wild in out.getvalue() for wild in ("\x1b[31m", "\x1b[2J", "\x07", "\x00"))
