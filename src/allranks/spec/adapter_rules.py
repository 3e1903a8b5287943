"""What cannot be together in a spec with adapters, or with parts of the model on the host. Pure."""

from __future__ import annotations

from allranks.spec.records import RunSpec


def adapter_problems(spec: RunSpec) -> list[str]:
    """A sentence for each contradiction."""
    options, lora = spec.strategy.options, spec.adapter.type == "lora"
    problems = []
    if lora and spec.adapter.target_parameters and spec.adapter.dropout:
        problems.append(
            f"adapter.dropout is {spec.adapter.dropout:g}, but there is no dropout for adapter.target_parameters: what is added to a weight "
            "does not know the input that it would drop; set adapter.dropout: 0"
        )
    if options.get("adapters") == "ignored" and not lora:
        problems.append("strategy.adapters: ignored keeps adapters on every rank, and adapter.type is none")
    elif options.get("adapters") == "ignored" and options.get("offload") == "optimizer":
        problems.append(
            "strategy.offload: optimizer has nothing to keep on the host with strategy.adapters: ignored, which leaves adapters and "
            "their moments on every rank's device; set adapters: sharded, or offload: all for the frozen weights"
        )
    return problems
