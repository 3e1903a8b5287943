"""Read the nodes, hosts and GPUs that jobs of PBS, Torque, LSF, Cobalt, Fujitsu's PJM and NEC's NQSV request."""

from __future__ import annotations

import re
from collections.abc import Iterator

import msgspec

from allranks.analysis.lint.shell_tokens import MappedText
from allranks.utils.text import lazy_regex

# ----------------------------------------------------------------------------------- PBS and Torque

LARGEST = 6  # digits of a count
SEVERAL_GPUS = 4
"""Chunks with so many GPUs do not share a node on common clusters."""
SEVERAL_CPUS, CPUS_OF_NODE = 16, 256
"""Chunks of so many CPUs that together have more than a node cannot all share one."""


class PbsRequest(msgspec.Struct, frozen=True):
    """Resources of one chunk (or node), the number of chunks, and the lines that come after the first command.

    `nodes` is None if the chunks may share a node. `lines` are those that $PBS_NODEFILE has of each chunk. `place` is the position of the
    request in the file.
    """

    chunks: int | None = None
    nodes: int | None = None
    cpus: int | None = None
    gpus: int | None = None
    lines: int | None = None
    place: int = 0
    late: tuple[int, ...] = ()

    @property
    def requests_gpus(self) -> bool:
        return bool(self.gpus)


def read_pbs(source: MappedText, comments: set[int]) -> PbsRequest | None:
    """Return what the ``#PBS`` lines request; None without such lines. `comments` are the offsets where comments start."""
    resources: dict[str, str] = {}
    place, late, commands, offset, found = 0, [], False, 0, False
    for line in source.text.split("\n"):
        where = source.where(offset)
        if re.match(r"#PBS\s", line) and where in comments:
            found = True
            if commands and re.match(r"#PBS\s+-", line):
                late.append(where)
            for text in re.findall(r"-l\s*(\S+)", line) if not commands else ():
                place = place if "select" in resources or "nodes" in resources else where
                resources.update(_resources(text))
        elif line.strip() and not line.lstrip().startswith("#"):
            commands = True
        offset += len(line) + 1
    if not found:
        return None
    return _pbs_request(resources, place, tuple(late))


def _resources(text: str) -> dict[str, str]:
    """Return the resources of ``walltime=1:00,select=2:ncpus=8``."""
    pairs = (part.partition("=") for part in re.split(r",(?=\w+=)", text))
    return {name: value for name, equals, value in pairs if equals}


def _pbs_request(resources: dict[str, str], place: int, late: tuple[int, ...]) -> PbsRequest:
    text = resources.get("select") or resources.get("nodes") or ""
    if "+" in text:  # chunks of several kinds
        return PbsRequest(place=place, late=late)
    first, *rest = text.split(":")
    # nodes=03 names the host 03.
    chunks = 1 if not text or re.fullmatch(r"0\d+", first) else _count(first)
    own = {name: value for name, _, value in (part.partition("=") for part in rest)}
    cpus = _count(own.get("ncpus") or own.get("ppn") or resources.get("ncpus") or "")
    gpus = _count(own.get("ngpus") or own.get("gpus") or resources.get("ngpus") or "")
    spread = "nodes" in resources or "scatter" in resources.get("place", "") or (gpus or 0) >= SEVERAL_GPUS
    large = (cpus or 0) >= SEVERAL_CPUS and (chunks or 0) * (cpus or 0) > CPUS_OF_NODE
    whole = "system" in own or "filesystems" in resources  # ALCF gives whole nodes only
    nodes = chunks if chunks == 1 or spread or large or whole else None
    lines = _count(own.get("mpiprocs") or own.get("ppn") or "1")
    return PbsRequest(chunks, nodes, cpus, gpus, lines, place, late)


def _count(text: str) -> int | None:
    return int(text) if text.isdecimal() and len(text) <= LARGEST else None


# ------------------------------------------------------------------------ LSF, Cobalt, PJM, NQSV and whole nodes of Grid Engine

# https://www.ibm.com/docs/en/spectrum-lsf (bsub -n, -R, -gpu, and -nnodes of its extension CSM), https://www.alcf.anl.gov (qsub of Cobalt),
# https://software.fujitsu.com (pjsub -L), https://sxauroratsubasa.sakura.ne.jp (qsub -b of NQSV, whose lines begin with #PBS),
# https://www.t4.cii.isct.ac.jp, https://abci.ai (-l f_node, node_f and rt_F of TSUBAME and ABCI)
NODE_COUNTS = (
    lazy_regex(r"#BSUB\s.*?-nnodes[ \t=]+(\d{1,6})\b"),
    lazy_regex(r"#COBALT\s.*?(?:-n|--nodecount)[ \t=]*(\d{1,6})\b"),
    lazy_regex(r"#PJM\s.*?-L\s*\"?(?:\S*,)?node=(\d{1,6})\b"),
    lazy_regex(r"#\$\s.*?-l\s*(?:\S*,)?(?:f_node|node_f|rt_F)=(\d{1,6})\b"),
    lazy_regex(r"#PBS\s(?:.*\s)?-b\s*(\d{1,6})\s*(?:#.*)?$"),
)
SLOTS = lazy_regex(r"#BSUB\s.*?-n[ \t]+(\d{1,6})\b")
SLOTS_PER_HOST = lazy_regex(r"#BSUB\s.*?span\[\s*(ptile|hosts)\s*=\s*(\d{1,6})\s*\]")
GPU_COUNTS = (
    lazy_regex(r"#BSUB\s.*?-gpu\s+[\"']?(?:[^\"'\s]*:)?num=(\d{1,6})(?!\d|/task)"),
    lazy_regex(r"#BSUB\s.*?rusage\[[^\]]*ngpus(?:_excl_p|_physical|_shared)?=(\d{1,6})"),
    lazy_regex(r"#PBS\s.*?gpunum_job\s*=\s*(\d{1,6})"),
)
OTHER_DIRECTIVE = lazy_regex(r"#(?:BSUB|COBALT|PJM|PBS|\$)\s")


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
    for offset, line in _other_directives(source, comments):
        if line.startswith("#$") and not NODE_COUNTS[3].match(line):
            continue  # other requests of Grid Engine name resources of a site
        systems.add(line[:5])
        for pattern in NODE_COUNTS:
            if found := pattern.match(line):
                nodes, place = int(found[1]), offset
        for pattern in GPU_COUNTS:
            if found := pattern.match(line):
                gpus = int(found[1])
        if found := SLOTS.match(line):
            slots, place = int(found[1]), place or offset
        if found := SLOTS_PER_HOST.match(line):
            span = (found[1], int(found[2]))
    if not systems or (systems <= {"#PBS ", "#$ -l"} and nodes is None):
        return None
    if nodes is None and "#BSUB" in systems:
        nodes = _hosts_of_slots(slots, span)
    return HostRequest(nodes, gpus, place)


def _other_directives(source: MappedText, comments: set[int]) -> Iterator[tuple[int, str]]:
    offset = 0
    for line in source.text.split("\n"):
        if OTHER_DIRECTIVE.match(line) and source.where(offset) in comments:
            yield source.where(offset), line.rstrip()
        offset += len(line) + 1


def _hosts_of_slots(slots: int | None, span: tuple[str, int] | None) -> int | None:
    """Return the hosts on which LSF places the slots; without ``span`` it may spread them."""
    if (slots or 1) == 1 or span == ("hosts", 1):
        return 1
    if span and span[0] == "ptile" and span[1] and slots:
        return -(-slots // span[1])
    return None
