"""List the field notes' forty known failures (known_failures.json), and how each is prevented, refused or diagnosed."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct

Handling = Literal["P", "R", "D"]
HANDLING_WORDS: dict[Handling, str] = {"P": "prevented", "R": "refused", "D": "diagnosed"}


class KnownFailure(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One failure, and how allranks deals with it.

    ``how`` is P (prevented by construction), R (refused before the ranks start) or D (named by `diagnose`).
    ``where`` says how it is prevented or found.
    ``evidence``: whether the tests that `page` lists reproduce the failure, or replay logs and facts of it because it
    needs GPUs or a fabric.
    ``classes`` are the failure classes by which `diagnose` reports it outside of allranks.
    """

    number: int
    title: str
    how: Handling
    where: str
    evidence: Literal["injected", "replayed"] = "injected"
    classes: tuple[str, ...] = ()

    @property
    def page(self) -> str:
        """Return the section of the documentation."""
        return f"docs/failures.md#failure-{self.number}"

    @property
    def text(self) -> str:
        """Return that section without its tests, as Markdown: symptom, cause, what allranks does, fix."""
        _, _, rest = Path(__file__).with_suffix(".md").read_text("utf-8").partition(f'id="failure-{self.number}"></a>')
        return rest.partition("\n### Tests")[0].strip()


KNOWN_FAILURES: tuple[KnownFailure, ...] = msgspec.json.decode(
    Path(__file__).with_suffix(".json").read_bytes(), type=tuple[KnownFailure, ...]
)
