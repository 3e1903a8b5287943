"""Rules for loops that start a launcher on one node after another: the port, the address and the ranks that they give."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from allranks.analysis.lint.command_options import Option
from allranks.analysis.lint.job import JobDescription, LauncherCall
from allranks.analysis.lint.records import Violation
from allranks.analysis.lint.rules.blocks import LOOPS, open_blocks
from allranks.utils.text import lazy_regex

PORT_WHY = "All nodes of one group meet at one port of the first node: those that have another one wait there until the timeout."
ADDRESS_WHY = "Each launcher takes its own node for the one at which all meet, and waits there for the others."
FROM_ONE_WHY = (
    "Ranks of nodes count from 0, and the node of rank 0 listens: without it all others wait until the timeout."
)
PASSES_WHY = (
    "The launchers wait until as many nodes have come as --nnodes says, and refuse ranks that are not below it."
)

NAMED = lazy_regex(r"--?[\w-]+(?:=|[ \t]+)[\"'\\]*(?:\$\{(\w+)\}|\$(\w+)|\$(\(\([^()\n]*\)\))|(\$\{\w+\[[^]\n]*\]\}))")
DRAWN = lazy_regex(r"RANDOM|\bshuf\b|free.?port|\.bind\(", re.IGNORECASE)
COUNTS_UP = lazy_regex(
    r"\b(\w+)(?:\+\+|[ \t]*\+=[ \t]*1)|\b(\w+)=\$?[\[(]{1,2}[ \t]*\$?\{?\2\}?[ \t]*\+[ \t]*1\b|\+\+(\w+)"
)
HEADER = lazy_regex(
    r"for[ \t]+(?P<n>\w+)[ \t]+in[ \t]+(?:\{(?P<a>\d{1,3})\.\.(?P<b>\d{1,3})\}|(?:\$\(|`)[ \t]*seq[ \t]+(?P<c>\d{1,3})[ \t]+(?P<d>\d{1,3})[ \t]*[)`]"
    r"|(?P<words>\d{1,3}(?:[ \t]+\d{1,3})*))[ \t]*(?:;|\n|\Z)"
    r"|for[ \t]*\(\([ \t]*(?P<m>\w+)[ \t]*=[ \t]*(?P<e>\d{1,3})[ \t]*;[ \t]*(?P=m)[ \t]*(?P<sign><=?)[ \t]*(?P<f>\d{1,3})[ \t]*;"
    r"[ \t]*(?:(?P=m)\+\+|\+\+(?P=m))[ \t]*\)\)"
)


class NodeLoop(NamedTuple):
    """A launcher for several nodes that a loop starts, and the text of the loop up to it."""

    launch: LauncherCall
    start: int
    before: str

    @property
    def counted(self) -> set[str]:
        """Return the names that have another value in each pass, as far as the text before the launcher shows."""
        head = re.match(r"for[ \t]+(\w+)[ \t]+in\b|for[ \t]*\(\([ \t]*(\w+)", self.before)
        found = {name for match in COUNTS_UP.findall(self.before) for name in match if name}
        return found | ({head[1] or head[2]} if head else set())


def _node_loops(job: JobDescription) -> Iterator[NodeLoop]:
    for launch in job.launches:
        outer, nodes = launch.call.starter, launch.option("nnodes", "num_machines")
        if outer.program not in ("srun", "ssh") or not outer.in_loop or outer.in_function or nodes is None:
            continue
        count = job.number(nodes.value)
        loops = [start for word, start in open_blocks(job.code, outer.offset) if word in LOOPS]
        if (count is None or count > 1) and len(loops) == 1 and not launch.open_ended:
            yield NodeLoop(launch, loops[0], job.code[loops[0] : outer.offset])


def _written(job: JobDescription, option: Option) -> re.Match[str] | None:
    """Return the variable or the calculation that is written as the value of an option."""
    return NAMED.match(job.text, option.arg.offset)


def ports_of_loop(job: JobDescription) -> Iterator[Violation]:
    """Report a port of the rendezvous that differs from pass to pass of a loop over the nodes."""
    for loop in _node_loops(job):
        option = loop.launch.option("master_port", "main_process_port")
        written = _written(job, option) if option else None
        if option is None or written is None:
            continue
        name = written[1] or written[2]
        own = [a for a in job.by_name.get(name, ()) if loop.start < a.offset < loop.launch.call.offset] if name else []
        texts = [job.line_of(a.offset).partition("=")[2] for a in own] + [written[3] or ""]
        words = {word for text in texts for word in re.findall(r"\w+", text)}
        later = {n for match in COUNTS_UP.findall(job.code[loop.start :].partition("\ndone")[0]) for n in match if n}
        if words & (loop.counted | later) or name in loop.counted | later or any(DRAWN.search(text) for text in texts):
            text = f"{option.written} is another port in each pass of the loop over the nodes"
            yield Violation(
                option.arg.offset, text, why=PORT_WHY, cure="one port for all nodes, chosen in front of the loop"
            )


def addresses_of_loop(job: JobDescription) -> Iterator[Violation]:
    """Report the address of a rendezvous that is the node on which each pass of a loop starts the launcher."""
    for loop in _node_loops(job):
        option = loop.launch.option("master_addr", "main_process_ip", "rdzv_endpoint")
        written = _written(job, option) if option else None
        name = written and (written[1] or written[2])
        outer = loop.launch.call.starter
        if option is None or not name:
            continue
        target = re.match(
            r"ssh\b(?:[ \t]+-\S+(?:[ \t]+\w+=\S+)?)*[ \t]+[\"']?(?:\w+@)?\$\{?(\w+)\}?|"
            r"[^\n;&|]*?(?:[ \t]-w[ \t]*|--nodelist[= ][ \t]*)[\"']?\$\{?(\w+)\}?(?!\[)",
            job.text[outer.offset : loop.launch.call.offset],
        )
        own = name in loop.counted or re.search(rf"(?m)^[ \t]*{name}=", loop.before)
        if target and name in (target[1], target[2]) and own:
            text = f"{option.written} is ${name}, the node of each pass itself"
            yield Violation(option.arg.offset, text, why=ADDRESS_WHY, cure="the first node of the job for all")


def _only_start(job: JobDescription, loop: NodeLoop) -> bool:
    """Return whether nothing else in the script gives a node a rank."""
    others = [la for la in job.launches if la is not loop.launch and la.option("node_rank", "machine_rank")]
    places = re.findall(r"(?i)(?:node|machine|group)_rank(?![\w]*[\"']?:)[ \t]*[= ][ \t]*[\"']?[\d$]", job.code)
    return not others and len(places) == 1


def first_rank_of_loop(job: JobDescription) -> Iterator[Violation]:
    """Report ranks of nodes that a loop counts from 1, and loops with fewer or more passes than nodes."""
    for loop in _node_loops(job):
        option, nodes = (
            loop.launch.option("node_rank", "machine_rank"),
            loop.launch.option("nnodes", "num_machines"),
        )
        written = _written(job, option) if option else None
        name = written and (written[1] or written[2])
        if option is None or nodes is None or not name or not _only_start(job, loop):
            continue
        count, ranks = job.number(nodes.value), _passes(job, loop, name)
        if ranks is not None and ranks[0] > 0:
            text = f"{option.written} begins with {ranks[0]}: no node has rank 0"
            yield Violation(option.arg.offset, text, why=FROM_ONE_WHY, cure="a loop that counts from 0")
        elif ranks is not None and ranks[1] is not None and count and count != ranks[1] + 1:
            text = f"the loop starts {ranks[1] + 1} node{'s' * (ranks[1] > 0)}, but {nodes.written} is {count}"
            yield Violation(option.arg.offset, text, why=PASSES_WHY, cure=f"as many passes as nodes: 0 to {count - 1}")


def _passes(job: JobDescription, loop: NodeLoop, name: str) -> tuple[int, int | None] | None:
    """Return the first and the last value of a number in a loop; the last one is None where the text does not show it."""
    head = HEADER.match(loop.before)
    if head and name in (head["n"], head["m"]):
        if words := head["words"]:
            numbers = [int(word) for word in words.split()]
            return (numbers[0], numbers[-1]) if numbers == list(range(numbers[0], numbers[-1] + 1)) else None
        first = next(int(head[key]) for key in "ace" if head[key])
        last = next(int(head[key]) for key in "bdf" if head[key]) - (head["sign"] == "<")
        return first, last
    if name in loop.counted or re.search(rf"\b{name}=", loop.before):
        return None  # set or counted in front of the launcher
    before = [a for a in job.by_name.get(name, ()) if a.offset < loop.start]
    rest = job.code[loop.launch.call.offset :].partition("\ndone")[0]
    counted = any(name in match for match in COUNTS_UP.findall(rest))
    value = before[-1].value if before and not before[-1].under else ""
    return (int(value), None) if counted and re.fullmatch(r"\d{1,2}", value) else None
