"""The variants: what each is, how its rows are packed, and the program that runs it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Variant:
    """``program`` is a module of this package for torchrun; without one, `allranks run` trains."""

    what: str
    packing: str
    program: str = ""
    extra: tuple[str, ...] = ()


VARIANTS = {
    "c": Variant("bare DDP loop", "wrapped", "peer_bare_ddp"),
    "k": Variant("bare DDP loop, compiled blocks", "wrapped", "peer_bare_ddp", ("--compile",)),
    "t": Variant("TRL, no checkpointing", "wrapped", "peer_trl"),
    "p": Variant("HF Trainer", "wrapped", "peer_hf_trainer"),
    "x": Variant("Accelerate, plain loop", "wrapped", "peer_accelerate"),
    "d": Variant("allranks", "wrapped"),
    "ci": Variant("bare DDP loop", "isolated", "peer_bare_ddp"),
    "ki": Variant("bare DDP loop, compiled blocks", "isolated", "peer_bare_ddp", ("--compile",)),
    "ti": Variant("TRL, no checkpointing", "isolated", "peer_trl"),
    "pi": Variant("HF Trainer", "isolated", "peer_hf_trainer"),
    "xi": Variant("Accelerate, plain loop", "isolated", "peer_accelerate"),
    "e": Variant("allranks", "isolated"),
}
OURS = tuple(name for name, variant in VARIANTS.items() if not variant.program)
FLOOR = "floor"  # the matrix products and the attention of a step alone, on all ranks at a time


def peers_of(ours: str) -> list[str]:
    """Return the peers whose rows are packed as those of this variant of allranks."""
    same = VARIANTS[ours].packing
    return [name for name, variant in VARIANTS.items() if variant.program and variant.packing == same]


def rotated(names: list[str], repeat: int, repeats: int) -> list[str]:
    """Return the order of a repeat: each begins elsewhere, so that no variant is always first, or always late."""
    at = repeat * max(1, round(len(names) / max(repeats, 1))) % len(names)
    return names[at:] + names[:at]
