"""How a mixture of experts shared its tokens out. Pure."""

from __future__ import annotations

from allranks.report import text
from allranks.report.gather import RunData
from allranks.report.tables import MOST_ROWS, Row, Table, num, table
from allranks.report.text import count_text, number, record, records, text_or_none


def expert_table(data: RunData) -> Table | None:
    """Least, even and greatest share of a block's experts, over all training steps; the least even blocks first."""
    load = record(data.metrics.get("expert_load"))
    layers = sorted(records(load.get("layers")), key=lambda layer: -(number(layer.get("max")) or 0.0))
    rows: list[Row] = [
        (
            num(text_or_none(layer.get("layer"))),
            num(text.share_text(layer.get("min"))),
            num(text.share_text(layer.get("mean"))),
            num(text.share_text(layer.get("max"))),
            num(count_text(layer.get("most"))),
            num(count_text(layer.get("unused"))),
        )
        for layer in layers[:MOST_ROWS]
    ]
    left = len(layers) - len(rows)
    note = (
        "Shares of the tokens of all training steps, padding left out. Even is what each would get in equal parts; "
        "unused are experts without a token."
    ) + (f" {left:,} more even blocks are left out." if left > 0 else "")
    columns = ["block", "least", "even", "greatest", "by expert", "unused"]
    return table("experts", "Expert load", columns, rows, note)
