"""Tables of what the run worked with: data, model, versions. Pure."""

from __future__ import annotations

from typing import Any

from allranks.report import text
from allranks.report.gather import RunData
from allranks.report.story import versions_of
from allranks.report.tables import Table, facts
from allranks.report.text import count_text, number, record, text_or_none

HOW = {"found": "found in the cache", "built": "built now", "waited": "built by another rank"}


def data_facts(data: RunData) -> Table | None:
    """What the data came to."""
    d = data.zero.last("data")
    if not d:
        return None
    rows, cut = number(d.get("rows")), number(d.get("rows_truncated"))
    share = f" ({cut / rows:.0%} of the rows)" if rows and cut else ""
    labels = record(d.get("labels"))
    names = ", ".join(text.plain(k, 40) for k in list(labels)[:12]) + (" …" if len(labels) > 12 else "")
    how = HOW.get(str(d.get("how")), text_or_none(d.get("how"))) + f", {text.seconds_text(d.get('seconds'))}"
    return facts(
        "data",
        "Data",
        [
            ("source", text_or_none(d.get("source"))),
            ("template", text_or_none(d.get("template"))),
            (
                "rows",
                f"{count_text(rows)}: {count_text(d.get('rows_train'))} to train on, {count_text(d.get('rows_eval'))} held out",
            ),
            ("rows cut to fit", f"{count_text(cut)}{share}, {count_text(d.get('tokens_cut'))} tokens lost"),
            ("rows left out", f"{count_text(d.get('rows_without_target'))} whose prompt alone is too long"),
            ("sequences", f"{count_text(d.get('sequences'))}, {text.share_text(d.get('fill'))} full"),
            (
                "tokens",
                f"{count_text(d.get('tokens_real'))} real, {count_text(d.get('tokens_trained'))} of them trained, in one epoch",
            ),
            ("vocabulary", count_text(d.get("vocab_size"))),
            ("labels", f"{len(labels)}: {names}" if labels else ""),
            ("prepared", how),
            ("seen in this run", _seen(data)),
        ],
    )


def _seen(data: RunData) -> str:
    m = data.metrics
    if not number(m.get("tokens_real")):
        return ""
    counts = (m.get("tokens_real"), m.get("tokens_trained"), m.get("tokens_padded"))
    real, trained, padded = map(count_text, counts)
    return f"{real} real tokens, {trained} trained; {padded} padding on top"


def version_facts(data: RunData) -> Table | None:
    """Versions of what the numbers depend on, and whether all ranks have the same."""
    found = {rank: versions for rank, story in data.stories.items() if (versions := versions_of(story))}
    mine = next(iter(found.values()), {})
    odd = [rank for rank, versions in found.items() if versions != mine]
    note = f"Rank {text.ranks_text(odd)} has other versions than rank {next(iter(found))}." if odd else ""
    if not odd and len(found) > 1:
        note = f"The same on all {len(found)} ranks."
    model = data.zero.last("model")
    known = {
        "python": text_or_none(data.run_args.get("python")),
        "allranks": text_or_none(data.run_args.get("allranks")),
        **mine,
    }
    pairs = [
        *known.items(),
        ("device", text_or_none(model.get("device"))),
        ("threads a rank", count_text(model.get("threads"))),
    ]
    return facts("versions", "Versions", pairs, note)


def _engine(engine: dict[str, Any]) -> str:
    if not engine:
        return ""
    name, version = text_or_none(engine.get("name")), text_or_none(engine.get("version"))
    took = [
        f"{word} {text.seconds_text(engine[k])}"
        for k, word in (("import_s", "import"), ("initialize_s", "start"))
        if engine.get(k) is not None
    ]
    return f"{name} {version}: {', '.join(took)}"


def model_facts(data: RunData) -> Table | None:
    """Name and size of the model."""
    model, m = data.zero.last("model"), data.metrics
    total, trained = number(model.get("parameters")), number(model.get("parameters_trained"))
    share = f" ({trained / total:.2%})" if total and trained is not None else ""
    checkpointing = m.get("gradient_checkpointing")
    return facts(
        "model",
        "Model",
        [
            ("name", text_or_none(m.get("model"))),
            ("parameters", f"{count_text(total)} ({text.short_count(total)})" if total else ""),
            ("trained", f"{count_text(trained)}{share}" if trained is not None else ""),
            ("LoRA", text_or_none(m.get("use_lora"))),
            ("gradient checkpointing", text_or_none(checkpointing)),
            ("time to build", text.seconds_text(model.get("seconds"))),
            ("of it, engine", _engine(record(m.get("engine")))),
        ],
    )
