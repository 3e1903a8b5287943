"""Stack dumps of faulthandler and py-spy as records: the main thread, and the line that tells where it stands. Pure."""

from __future__ import annotations

import re
import sysconfig

from allranks.hang.records import Frame

MOST_FRAMES = 64
_FAULTHANDLER = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+)(?: in (?P<function>.+))?$')
_PY_SPY = re.compile(r"^\s+(?P<function>\S.*?) \((?P<file>[^()]+):(?P<line>\d+)\)$")
_HEAD = re.compile(r"^(?:Current thread|Thread) \S+")
_STDLIB = sysconfig.get_paths()["stdlib"]
_LIBRARY = re.compile(r"site-packages|dist-packages|^<|/torch/|/lib/python3[^/]*/(?!site-packages)|^/usr/lib/python")
_OURS = re.compile(r"/allranks/(train|hang|launch|observe)/")
_METER = re.compile(r"allranks/train/waits\.py$")  # stands around each wait, and tells nothing
_START = re.compile(r"allranks/launch/rank\.py$")


def main_thread(text: str) -> list[Frame]:
    """Frames of the main thread, innermost first; empty where the text holds none."""
    blocks: list[tuple[str, list[Frame]]] = []
    for line in text.splitlines():
        if _HEAD.match(line):
            blocks.append((line, []))
            continue
        match = _FAULTHANDLER.match(line) or _PY_SPY.match(line)
        if match and _METER.search(match["file"]):
            continue
        if match and blocks and len(blocks[-1][1]) < MOST_FRAMES:
            function = (match["function"] or "?").strip()
            blocks[-1][1].append(Frame(file=match["file"], line=int(match["line"]), function=function))
    found = [frames for head, frames in blocks if frames and ("MainThread" in head or _is_main(frames))]
    if found:
        return found[-1]
    return next((frames for _, frames in reversed(blocks) if frames), [])  # faulthandler tells the oldest thread last


def _is_main(frames: list[Frame]) -> bool:
    return any(_START.search(f.file) or f.function == "<module>" for f in frames)


def standing(frames: list[Frame]) -> str:
    """Where a thread stands: the innermost line of a program, and the library call within which it does."""
    if not frames:
        return ""
    own = next((f for f in frames if not is_library(f.file) and not _OURS.search(f.file)), None)
    own = own or next((f for f in frames if not is_library(f.file)), frames[0])
    text = f"{own.file}:{own.line} in {own.function}"
    inner = frames[0]
    return text if inner is own else f"{text} (within {inner.file}:{inner.line} {inner.function})"


def is_library(path: str) -> bool:
    """Whether a file belongs to Python or an installed package."""
    return path.startswith(_STDLIB) or bool(_LIBRARY.search(path))
