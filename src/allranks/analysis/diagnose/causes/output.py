"""Detect that output cannot be written, from where in the program an exception was raised."""

from __future__ import annotations

import re

from allranks.analysis.diagnose.case import DiagnosisCase
from allranks.analysis.diagnose.patterns import LIKELY

_CANNOT_OPEN = re.compile(
    r"cannot be opened|(?:cannot|can't|could not|unable to|failed to) (?:open|create)\b|Parent directory .{1,300} does not exist",
    re.IGNORECASE,
)
# Functions that write a checkpoint, by file and name.
_WRITERS = re.compile(
    r":(?:_?open_zipfile_writer\w*|_save|save|save_\w+|_save_\w+|write_\w+|dump|to_\w+file)$", re.IGNORECASE
)
_READERS = re.compile(r":(?:_?open_zipfile_reader\w*|_?load|load_\w+|_load_\w+|from_pretrained)$", re.IGNORECASE)
NEAR_FRAMES = 5


def detect_unwritable_output(case: DiagnosisCase) -> None:
    """Propose `output_not_writable` for a file that could not be opened in a function that writes: the message itself does not say it."""
    if {"disk_full", "output_not_writable"} & case.candidates.keys():
        return
    for signal in case.facts("exception"):
        frames = signal.frames[-NEAR_FRAMES:]
        writes = any(map(_WRITERS.search, frames)) and not any(map(_READERS.search, frames))
        if writes and _CANNOT_OPEN.search(signal.groups.get("message", "")) and not case.survived(signal):
            found = case.propose("output_not_writable", LIKELY, [signal])
            found.cause = (
                f"A file could not be opened for writing: {signal.groups['message'][:200].rstrip('. ')}. Its folder does not exist or is not writable on "
                "that node, or the file system or a quota is full."
            )
            found.next_test = (
                "touch a file in that folder from within a job step on each node; df -h, df -i and quota -s of it"
            )
