"""Read the hosts and GPUs that LSF, Cobalt, Fujitsu's PJM and NEC's NQSV are asked for."""

from __future__ import annotations

import re
from collections.abc import Iterator

import msgspec

from allranks.analysis.lint.shell_tokens import MappedText

LARGEST = 6  # digits of a count
# https://www.ibm.com/docs/en/spectrum-lsf (bsub -n, -R, -gpu, and -nnodes of its extension CSM), https://www.alcf.anl.gov (qsub of Cobalt),
# https://software.fujitsu.com (pjsub -L), https://sxauroratsubasa.sakura.ne.jp (qsub -b of NQSV, whose lines begin with #PBS)
NODES = (
    re.compile(r"#BSUB\s.*?-nnodes[ \t=]+(\d{1,6})\b"),
    re.compile(r"#COBALT\s.*?(?:-n|--nodecount)[ \t=]*(\d{1,6})\b"),
    re.compile(r"#PJM\s.*?-L\s*\"?(?:\S*,)?node=(\d{1,6})\b"),
    re.compile(r"#PBS\s(?:.*\s)?-b\s*(\d{1,6})\s*(?:#.*)?$"),
)
SLOTS = re.compile(r"#BSUB\s.*?-n[ \t]+(\d{1,6})\b")
PER_HOST = re.compile(r"#BSUB\s.*?span\[\s*(ptile|hosts)\s*=\s*(\d{1,6})\s*\]")
GPUS = (
    re.compile(r"#BSUB\s.*?-gpu\s+[\"']?(?:[^\"'\s]*:)?num=(\d{1,6})(?!\d|/task)"),
    re.compile(r"#BSUB\s.*?rusage\[[^\]]*ngpus(?:_excl_p|_physical|_shared)?=(\d{1,6})"),
    re.compile(r"#PBS\s.*?gpunum_job\s*=\s*(\d{1,6})"),
)
KNOWN = re.compile(r"#(?:BSUB|COBALT|PJM|PBS)\s")


class HostRequest(msgspec.Struct, frozen=True):
    """Hosts of the job and GPUs of each; None if the file does not show it. `place` is the position of the request in the file."""

    nodes: int | None = None
    gpus: int | None = None
    place: int = 0


def read_hosts(source: MappedText, comments: set[int]) -> HostRequest | None:
    """Return what these batch systems are asked for; None without their lines. `comments` are the offsets where comments start."""
    nodes = gpus = slots = None
    span: tuple[str, int] | None = None
    place, systems = 0, set[str]()
    for offset, line in _lines(source, comments):
        systems.add(line[:5])
        for pattern in NODES:
            if found := pattern.match(line):
                nodes, place = int(found[1]), offset
        for pattern in GPUS:
            if found := pattern.match(line):
                gpus = int(found[1])
        if found := SLOTS.match(line):
            slots, place = int(found[1]), place or offset
        if found := PER_HOST.match(line):
            span = (found[1], int(found[2]))
    if not systems or (systems == {"#PBS "} and nodes is None):
        return None
    if nodes is None and "#BSUB" in systems:
        nodes = _hosts_of_slots(slots, span)
    return HostRequest(nodes, gpus, place)


def _lines(source: MappedText, comments: set[int]) -> Iterator[tuple[int, str]]:
    offset = 0
    for line in source.text.split("\n"):
        if KNOWN.match(line) and source.where(offset) in comments:
            yield source.where(offset), line.rstrip()
        offset += len(line) + 1


def _hosts_of_slots(slots: int | None, span: tuple[str, int] | None) -> int | None:
    """Return the hosts on which LSF places the slots; without ``span`` it may spread them."""
    if (slots or 1) == 1 or span == ("hosts", 1):
        return 1
    if span and span[0] == "ptile" and span[1] and slots:
        return -(-slots // span[1])
    return None
