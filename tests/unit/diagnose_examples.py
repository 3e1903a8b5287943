"""Lines of diagnose_examples.tsv (near misses of classes, harmless messages), and what the tests of diagnose share."""

from pathlib import Path

from allranks.analysis.diagnose import Diagnosis, diagnose

_LINES = dict(line.split("\t") for line in Path(__file__).with_suffix(".tsv").read_text().splitlines()[1:])
HARMLESS = {name.removeprefix("harmless "): line for name, line in _LINES.items() if name.startswith("harmless ")}
NEAR_MISSES = {name: line for name, line in _LINES.items() if " " not in name}

DEVICE = "RuntimeError: CUDA error: invalid device ordinal"
DISK = "OSError: [Errno 28] No space left on device: 'x'"
STEPS = "\n".join(f"step {n}/900 loss 1.{n}" for n in range(20, 30))


def of(folder: Path, files: dict[str, str] | str) -> Diagnosis:
    """What is made of a folder with these files, or with one of this text."""
    for name, text in (files if isinstance(files, dict) else {"a.log": files}).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text + "\n")
    return diagnose([folder])


def ids(found: Diagnosis) -> list[str]:
    return [f.id for f in found.findings]


def answer(found: Diagnosis) -> tuple[str, list[str]]:
    return found.verdict, ids(found)


def oom(more: str = "", *, want: str = "1.00 GiB", free: str = "") -> str:
    tail = f" GPU 0 has a total capacity of 79.10 GiB of which {free} is free." if free else ""
    return f"{more}torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {want}.{tail}"
