"""Write the model card (README.md) of an export: data, settings, results and versions, from the records of the run."""

from __future__ import annotations

from typing import Any

from allranks.rundir.events import read_events
from allranks.rundir.files import read_record
from allranks.rundir.paths import RunDir
from allranks.spec import load_spec
from allranks.utils.formatting import format_count
from allranks.utils.redaction import redact
from allranks.utils.text import format_value
from allranks.version import __version__

RESULTS = (
    ("steps", "optimizer steps"),
    ("tokens_trained", "trained tokens"),
    ("train_loss_first", "training loss, first"),
    ("train_loss_last", "training loss, last"),
    ("eval_loss_first", "held-out loss, first"),
    ("eval_loss", "held-out loss, last"),
    ("perplexity", "held-out perplexity"),
    ("accuracy", "held-out accuracy"),
    ("exact_match", "exact match"),
)


def model_card(run: RunDir, *, step: int, kind: str, base: str | None) -> str:
    """Return the card as Markdown with the YAML header that the Hugging Face hub reads. What is unknown is left out.

    Args:
        step: of the exported checkpoint.
        kind: ``adapter``, ``merged`` or ``model``.
        base: what an adapter needs to be loaded.
    """
    spec, metrics = load_spec(run.spec), read_record(run.metrics)
    data = next((e for e in read_events(run.events_of(0)) if e.get("event") == "data"), {})
    header = {
        "base_model": base or (spec.model.name if spec.model else None),
        "library_name": "peft" if kind == "adapter" else "transformers",
        "tags": "[allranks]",
    }
    lines = ["---", *(f"{key}: {value}" for key, value in header.items() if value), "---", "", f"# {run.name}", ""]
    what = {
        "adapter": "A LoRA adapter",
        "merged": "A model with its LoRA adapter merged",
        "model": "A fine-tuned model",
    }
    lines += [f"{what[kind]}, trained by allranks {__version__}; the checkpoint of step {step}.", ""]
    lines += ["## Results", "", "| | |", "|---|---|"]
    if metrics.get("eval_loss_first") == metrics.get("eval_loss"):  # evaluated once, at the end
        metrics = {key: value for key, value in metrics.items() if key != "eval_loss_first"}
    lines += [f"| {name} | {_number(metrics[key])} |" for key, name in RESULTS if metrics.get(key) is not None]
    if metrics.get("steps") != step:
        lines += ["", f"The figures are those of the whole run, the weights those of step {step}."]
    lines += ["", "## Data", "", "| | |", "|---|---|"]
    known = ("source", "template", "rows_train", "rows_eval", "rows_empty", "rows_truncated", "rows_without_target")
    lines += [f"| {key} | {format_value(data[key])} |" for key in known if data.get(key) not in (None, 0)]
    lines += ["", "## Versions", "", "| | |", "|---|---|"]
    versions = {
        "torch": metrics.get("torch"),
        "python": read_record(run.run_args).get("python"),
        "allranks": __version__,
    }
    lines += [f"| {key} | {format_value(value)} |" for key, value in versions.items() if value]
    lines += ["", "## Settings", "", "```yaml", run.spec.read_text(encoding="utf-8").rstrip(), "```", ""]
    return redact("\n".join(lines))


def _number(value: Any) -> str:
    return format_count(value) if isinstance(value, int) else f"{value:.4f}" if isinstance(value, float) else str(value)
