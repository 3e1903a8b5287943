"""One pass over one file: lines that tell something become signals; memory does not grow with the file.

Lines repeat, but for their numbers. A line whose form (digits blanked) was seen before costs one look into a table; only new
forms are tried against the patterns, and of those only the ones whose words occur in the line.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator
from itertools import islice
from operator import itemgetter

from allranks.diagnose.benign import BENIGN
from allranks.diagnose.facts import COUNTED
from allranks.diagnose.gate import Gate, Rule, all_rules
from allranks.diagnose.lines import ANSI, MAX_TEXT, Line, decode, is_labelled, take_apart, time_of
from allranks.diagnose.signals import FileScan, Signal, Stack, Tally

MAX_FORMS = 100_000
MANY = 64  # new forms in a block from which on they are searched together
MAX_FORM = 512  # longer lines are looked at each time
LONG = 4096
WINDOWS = 16
KEPT_PER_SOURCE = 3  # signals of one rule from one rank, task or host
KEPT_PER_RULE = 96
KEPT_FRAMES = 40  # of a stack that torch's watchdog prints
ROOT_LINES = 9  # of the launcher's table, from its words `Root Cause` on
FRAMES, FRAME_REACH, STREAMS, STACKS = 48, 200, 512, 512
LOOSE, LOOSE_FRAMES = 32, 12
NEAR = 40  # lines within which a time stamp still dates a line without one
_BLANK = bytes(48 if 48 <= c <= 57 else c for c in range(256))

_STEP = re.compile(r"\b(?:global_?)?(?:step|iter(?:ation)?)\b\W{0,6}(\d{1,9})\b", re.IGNORECASE)

Verdict = tuple[Rule, ...]


class Scanner:
    """Scans files one after another; what it learned about forms of lines serves all of them."""

    def __init__(self) -> None:
        self.rules = all_rules()
        self.gate = Gate(self.rules)
        self._forms: dict[bytes, Verdict] = {}

    def scan(self, number: int, blocks: Iterator[tuple[bytes, bool]]) -> FileScan:
        """Scan one file.

        Args:
            number: the file's index in the whole diagnosis.
            blocks: pieces of the file as `sources.blocks` yields them, with whether each ends at the end of a line.
        """
        state = _State(number)
        for block, whole in blocks:
            self._block(state, block, whole)
        return state.result()

    def _block(self, state: _State, block: bytes, whole: bool) -> None:
        state.out.bytes_read += len(block)
        if b"\x1b" in block:
            block = ANSI.sub(b"", block)
        if b"\r" in block:
            lines, numbers = _split_returns(block, state.line)
            forms = [line.translate(_BLANK) for line in lines]
        else:
            forms, lines, numbers = block.translate(_BLANK).split(b"\n"), None, None
        if state.labelled is None:
            state.labelled = is_labelled((lines or block.split(b"\n"))[:400])
        said: list[tuple[int, Verdict]] = []
        new: list[int] = []
        known = self._forms.get
        for i, form in enumerate(forms):
            verdict = known(form)
            if verdict is None:
                new.append(i)
            elif verdict:
                said.append((i, verdict))
        if said or new:
            lines = lines if lines is not None else block.split(b"\n")
            if new:
                said = sorted([*said, *self._learn(state, lines, forms, new)], key=itemgetter(0))
            for i, verdict in said:
                self._take(state, lines, i, numbers[i] if numbers else state.line + i, verdict)
        ended = block.count(b"\n")
        state.line += ended + (1 if whole and not block.endswith(b"\n") else 0)

    def _learn(
        self, state: _State, lines: list[bytes], forms: list[bytes], new: list[int]
    ) -> Iterator[tuple[int, Verdict]]:
        """Lines of new forms that tell something, and their verdicts. Many forms are searched together first."""
        table = self._forms
        unlike = list(dict.fromkeys(forms[i] for i in new))
        if len(table) + len(unlike) > MAX_FORMS:
            table.clear()
        if len(unlike) >= MANY:
            telling = self.gate.telling(unlike)
            if len(unlike) == len(new):  # no two alike: there is no use in remembering the silent ones
                new = [new[i] for i in sorted(telling)]
            else:
                table.update((f, ()) for i, f in enumerate(unlike) if i not in telling and len(f) <= MAX_FORM)
        for i in new:
            verdict = table.get(forms[i])
            if verdict is None:
                verdict = self._classify(state, lines[i], forms[i])
            if verdict:
                yield i, verdict

    def _classify(self, state: _State, line: bytes, form: bytes) -> Verdict:
        """The rules that may match lines of this form: those that match this one, and those that depend on its digits."""
        if len(line) > LONG:
            return tuple(self.gate.candidates(line))
        candidates = self.gate.candidates(line)
        verdict: Verdict = ()
        if candidates:
            text = take_apart(decode(line), bool(state.labelled)).text
            verdict = tuple(r for r in candidates if not r.exact or r.pattern.search(text))
        if len(form) <= MAX_FORM:
            self._forms[form] = verdict
        return verdict

    def _take(self, state: _State, lines: list[bytes], i: int, number: int, verdict: Verdict) -> None:
        if len(verdict) == 1 and verdict[0].owner in COUNTED and verdict[0].index in state.out.tallies:
            state.count_again(verdict[0], lines[i])
            return
        if len(verdict) == 1 and verdict[0].kind == "progress":
            state.progress(number, lines[i])
            return
        for text in _windows(lines[i], verdict):
            self._line(state, take_apart(text, bool(state.labelled)), text, (lines, i), number, verdict)

    def _line(
        self, state: _State, line: Line, raw: str, where: tuple[list[bytes], int], number: int, verdict: Verdict
    ) -> None:
        matched = [(rule, match) for rule in verdict if (match := rule.pattern.search(line.text))]
        if not matched:
            return
        state.note(line)
        harmless = {r.owner for r, _ in matched if r.kind == "benign"}
        firm = any(not BENIGN[name].general for name in harmless)
        failing = any(r.kind == "class" for r, _ in matched) and not firm
        for rule, match in matched:
            if (
                (rule.kind == "class" and firm)
                or (rule.kind == "benign" and failing)
                or (rule.owner == "exception" and firm)
            ):
                continue
            if rule.kind == "progress":
                if not failing:
                    state.progress(number, where[0][where[1]])
            elif rule.owner == "event_start":
                state.start_again()
            elif rule.owner in ("frame", "stack"):
                state.frame(line, number, match.groupdict())
            elif rule.owner == "stack_head":
                state.stack(line, number)
            else:
                state.keep(
                    rule, line, raw, where, number, {k: v for k, v in match.groupdict().items() if v is not None}
                )


class _State:
    """What is known while a file is read."""

    def __init__(self, number: int) -> None:
        self.out = FileScan(file=number)
        self.line = 1
        self.labelled: bool | None = None
        self._frames: dict[object, deque[tuple[int, str]]] = {}
        self._kept: dict[object, int] = {}
        self._hosts: set[str] = set()
        self._ranks: set[int] = set()
        self._pids: dict[int, int] = {}
        self._in_stack = 0
        self._root_at = -ROOT_LINES - 1
        self._steps, self._last_step = 0, b""

    def result(self) -> FileScan:
        self._mark(self._last_step)
        self.out.lines = self.line - 1
        self.out.hosts, self.out.ranks = sorted(self._hosts), sorted(self._ranks)
        ended = (tuple(f for _, f in frames)[-LOOSE_FRAMES:] for frames in self._frames.values())
        self.out.loose = list(islice((frames for frames in ended if frames), LOOSE))
        return self.out

    def start_again(self) -> None:
        """A new attempt of a run begins in its file of events: what stood before is another story."""
        kept = FileScan(file=self.out.file, bytes_read=self.out.bytes_read, hosts=self.out.hosts, ranks=self.out.ranks)
        self.out = kept
        self._kept.clear()
        self._frames.clear()
        self._steps, self._last_step = 0, b""

    def progress(self, number: int, line: bytes) -> None:
        if self.out.first_progress is None:
            self.out.first_progress = number
        self.out.last_progress = number
        if not self.out.last_progress_text:
            self.out.last_progress_text = decode(line[:300])
        self._steps += 1
        if self._steps & (self._steps - 1) == 0:  # the 1st, 2nd, 4th ... of them: enough to compare clocks by
            self._mark(line)
        self._last_step = line

    def _mark(self, line: bytes) -> None:
        text = decode(line[:400])
        step, time = _STEP.search(text), time_of(text)
        if step and time is not None:
            self.out.marks.setdefault(int(step.group(1)), time)

    def count_again(self, rule: Rule, line: bytes) -> None:
        tally = self.out.tallies[rule.index]
        tally.count += 1
        if rule.owner == "comm_ready":
            self.out.ready += 1
        else:
            at = line.rfind(b" via ")
            self._transport(line[at + 5 :].split(None, 1)[0].decode("ascii", "replace") if at >= 0 else "?")

    def _transport(self, via: str) -> None:
        name = "/".join(part for part in via.split("/")[:2] if not part.isdigit())
        if len(self.out.transports) < 64 or name in self.out.transports:
            self.out.transports[name] = self.out.transports.get(name, 0) + 1

    def note(self, line: Line) -> None:
        """Remember who is who."""
        if line.host and len(self._hosts) < 4096:
            self._hosts.add(line.host)
        rank = line.rank
        if rank is not None and len(self._ranks) < 65536:
            self._ranks.add(rank)
            if line.host:
                self.out.rank_hosts.setdefault(rank, line.host)

    def frame(self, line: Line, number: int, groups: dict[str, str | None]) -> None:
        stream = (line.rank, line.local, line.task, line.host)
        if stream not in self._frames:
            if len(self._frames) >= STREAMS:
                self._frames.clear()
            self._frames[stream] = deque(maxlen=FRAMES)
        frame = f"{groups.get('path') or ''}:{groups.get('function') or ''}"[:300]
        self._frames[stream].append((number, frame))
        if self.out.stacks and self._in_stack == number - 1 and len(self.out.stacks[-1].frames) < FRAMES:
            self.out.stacks[-1].frames.append(frame)
            self._in_stack = number

    def stack(self, line: Line, number: int) -> None:
        """A thread of a stack dump begins; the frames on the lines that follow are its."""
        if len(self.out.stacks) < STACKS:
            self.out.stacks.append(Stack(number, line.text[:200], line.rank, line.host))
            self._in_stack = number

    def keep(
        self, rule: Rule, line: Line, raw: str, where: tuple[list[bytes], int], number: int, groups: dict[str, str]
    ) -> None:
        tally = self.out.tallies.setdefault(rule.index, Tally())
        tally.count += 1
        tally.last_line = number
        rank = line.rank
        if rule.owner == "comm_init":
            rank = self._introduce(line, int(groups["rank"]))
        elif rank is None and line.pid is not None:
            rank = self._pids.get(line.pid)
        if rule.owner == "channel":
            self._transport(groups["via"])
        if rule.owner == "comm_ready":
            self.out.ready += 1
        if rule.owner == "agent_root":
            self._root_at = number
        of_root = rule.owner == "agent_field" and number - self._root_at <= ROOT_LINES  # it comes after all the others
        source = (rule.index, rank, line.local, line.task, line.host)
        own, all_of_rule = self._kept.get(source, 0), self._kept.get(rule.index, 0)
        most = KEPT_FRAMES if rule.owner == "fr_frame" else KEPT_PER_SOURCE
        if not of_root and (own >= most or all_of_rule >= KEPT_PER_RULE):
            return
        self._kept[source], self._kept[rule.index] = own + 1, all_of_rule + 1
        stream = (line.rank, line.local, line.task, line.host)
        frames = self._frames.get(stream, ())
        self.out.signals.append(
            Signal(
                kind=rule.kind, owner=rule.owner, rule=rule.index, weight=rule.pattern.weight, passing=rule.pattern.passing,
                file=self.out.file, line=number, time=_time_near(raw, *where), rank=rank, local=line.local, task=line.task,
                host=line.host, text=raw.strip()[:MAX_TEXT], groups={k: v[:MAX_TEXT] for k, v in groups.items()},
                frames=tuple(f for at, f in frames if number - at <= FRAME_REACH),
            )
        )  # fmt: skip
        if rule.owner == "exception":
            self._frames.pop(stream, None)

    def _introduce(self, line: Line, rank: int) -> int:
        """NCCL's line that says which process is which rank."""
        if len(self._ranks) < 65536:
            self._ranks.add(rank)
            if line.host:
                self.out.rank_hosts.setdefault(rank, line.host)
            if line.pid is not None:
                self._pids.setdefault(line.pid, rank)
        return rank


def _time_near(raw: str, lines: list[bytes], i: int) -> float | None:
    """The line's own time stamp, or that of the nearest line before or after; what srun says of an end is dated by what follows."""
    found = time_of(raw)
    if found is not None:
        return found
    before, after = range(i - 1, max(-1, i - NEAR), -1), range(i + 1, min(len(lines), i + NEAR // 2))
    for j in (*after, *before) if raw.startswith("srun:") else (*before, *after):
        found = time_of(lines[j][:240].decode("ascii", "replace"))
        if found is not None:
            return found
    return None


def _split_returns(block: bytes, first: int) -> tuple[list[bytes], list[int]]:
    """Lines cut at carriage returns too (progress bars), each with the number of the line it belongs to."""
    pieces: list[bytes] = []
    numbers: list[int] = []
    for i, line in enumerate(block.split(b"\n")):
        parts = line.rstrip(b"\r").split(b"\r")
        pieces += parts
        numbers += [first + i] * len(parts)
    return pieces, numbers


def _windows(line: bytes, verdict: Verdict) -> list[str]:
    """The text of a line, of a very long one only the surroundings of what may match."""
    if len(line) <= LONG:
        return [decode(line)]
    low, spans = line.lower(), []
    for rule in verdict:
        for anchor in rule.anchors:
            at = low.find(anchor)
            if at >= 0 and not any(a <= at < b - 200 for a, b in spans) and len(spans) < WINDOWS:
                spans.append((max(0, at - 300), at + 700))
    return [decode(_from_whole_word(line, a, b)) for a, b in spans]


def _from_whole_word(line: bytes, start: int, end: int) -> bytes:
    """A piece of a line from its third word on: a secret that is cut, or cut off from its name, could not be hidden."""
    piece = line[start:end]
    return piece.split(None, 2)[-1] if start else piece
