"""The file through which the agents of a run's nodes tell each other of a silence, and that one has judged.

It is there, empty, from the start: what is there is read anew at each opening, also on NFS; what is not, up to a minute late.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from allranks.hang.records import Alarm

_ALARM, _JUDGED = "alarm", "judged"


class Board:
    """Lines of a word and what it says; appended, never changed."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def hang_up(self) -> None:
        """Make the file."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.touch()

    def alarm(self) -> Alarm | None:
        """The first alarm of any node."""
        for text in self._said(_ALARM):
            try:
                return msgspec.json.decode(text, type=Alarm)
            except msgspec.DecodeError:
                continue
        return None

    def raise_alarm(self, alarm: Alarm) -> None:
        """Tell the other nodes."""
        self._say(_ALARM, msgspec.json.encode(alarm).decode())

    @property
    def judged(self) -> bool:
        """Whether an agent has written the report."""
        return bool(self._said(_JUDGED))

    def tell_judged(self, node: int) -> None:
        """The report is there."""
        self._say(_JUDGED, str(node))

    def _say(self, word: str, text: str) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(f"{word} {text}\n")

    def _said(self, word: str) -> list[str]:
        try:
            lines = self.path.read_text(encoding="utf-8").splitlines()
        except OSError:
            return []
        return [rest for line in lines for first, _, rest in [line.partition(" ")] if first == word]
