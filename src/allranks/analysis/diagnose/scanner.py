"""Scan one log file in one pass; memory use does not grow with the file.

A trie of the patterns' literal anchors selects the patterns to try, with one search per line or block. Lines that
differ only in digits are looked up in a table: only new forms are matched against patterns.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

from msgspec import structs

from allranks.analysis.diagnose.catalogue import CATALOGUE, all_rules
from allranks.analysis.diagnose.catalogue.messages import BENIGN_MESSAGES, COUNTED_FACTS
from allranks.analysis.diagnose.catalogue.structured import STRUCTURED
from allranks.analysis.diagnose.lines import (
    MAX_LINE_TEXT,
    REMARKING_EMITTERS,
    LogLine,
    UnknownPrefixes,
    continuation,
    decode_line,
    has_task_labels,
    parse_line,
    strip_escapes,
    timestamp_of,
    unwrap_json,
)
from allranks.analysis.diagnose.patterns import CERTAIN, POSSIBLE, LiteralPrefilter, ScanRule, normalized
from allranks.analysis.diagnose.records import FileScan, LogSignal, RuleCount, ThreadStack

MAX_FORMS = 100_000
BULK_FORMS = 64  # with this many new forms in a block, they are searched together
MAX_FORM = 512  # longer lines are not cached
LONG_LINE = 4096
WINDOWS = 16
MAX_SIGNALS_PER_SOURCE = 3  # signals of one rule from one rank, task or host
MAX_SIGNALS_PER_RULE = 96
LATE_PROGRESS = 4  # the last lines of progress that are kept
MAX_WATCHDOG_FRAMES = 40  # frames of a stack that torch's watchdog prints
ROOT_CAUSE_LINES = 9  # lines of the launcher's table, from `Root Cause` on
FRAMES, FRAME_REACH, STREAMS, STACKS = 48, 200, 512, 512
LOOSE, LOOSE_FRAMES = 32, 12
MAX_RANKS = 1 << 16  # of one file
TIME_STAMP_REACH = 40  # maximum distance of a time stamp that dates a line without one
_LABEL_LINES, _LABEL_BYTES = 400, 1 << 18  # the start of a file that shows whether srun labels its lines
_BLANK = bytes(48 if 48 <= c <= 57 else c for c in range(256))

# A line that quotes a traceback with its line ends written out; events of a run are read as they are.
_QUOTED = re.compile(rb'^(?!\{"event").*\bTraceback \(most recent call last\):?\\n.*$', re.MULTILINE)
_STEP = re.compile(r"\b(?:global_?)?(?:step|iter(?:ation)?)\b\W{0,6}(\d{1,9})\b", re.IGNORECASE)

# A sentence, and neither an exception nor the line before the next traceback.
_SENTENCE = re.compile(
    rb"(?!During handling |The above exception |Traceback |Stack |Exception |Call )[A-Z][\w']* (?:\S+ +){2}"
)
MAX_UNTYPED = 4
IGNORED_LINES = 40  # longest traceback of an exception that is ignored
MAX_JOINED = 256  # messages of a file whose next lines are tried with them
_JOINED_KINDS = frozenset({"sign", "class", "structured"})
_LOGICAL_KINDS = frozenset({"class", "benign", "structured"})

MatchingRules = tuple[ScanRule, ...]


class Scanner:
    """Scan files one after another; the cache of line forms is shared between files."""

    def __init__(self) -> None:
        self.rules = all_rules()
        self.gate = LiteralPrefilter(self.rules)
        self._forms: dict[bytes, MatchingRules] = {}
        self._progress: MatchingRules = tuple(r for r in self.rules if r.kind == "progress")

    def scan(self, number: int, blocks: Iterator[tuple[bytes, bool]]) -> FileScan:
        """Scan one file.

        Args:
            number: the file's index in the whole diagnosis.
            blocks: pieces of the file from `logs.read_blocks`, each with whether it ends at a line end.
        """
        state = _FileState(number)
        for block, whole in blocks:
            self._block(state, block, whole)
        return state.result()

    def _block(self, state: _FileState, block: bytes, whole: bool) -> None:
        state.out.bytes_read += len(block)
        block = strip_escapes(unwrap_json(block))
        if b"\\n" in block and b"Traceback" in block:
            block = _QUOTED.sub(lambda match: match.group().replace(b"\\n", b"\r"), block)
        if state.labelled is None:
            start = block[:_LABEL_BYTES].replace(b"\r", b"\n")
            state.labelled = has_task_labels(start.split(b"\n", _LABEL_LINES)[:_LABEL_LINES])
        block = state.prefixes.strip(block, state.labelled)
        self._lines(state, block)
        ended = block.count(b"\n")
        state.line += ended + (1 if whole and not block.endswith(b"\n") else 0)

    def _lines(self, state: _FileState, block: bytes) -> None:
        """Look up the form of each line, and learn the new ones."""
        if b"\r" in block:
            lines, numbers = _split_returns(block, state.line)
            forms = [line.translate(_BLANK) for line in lines]
        else:
            forms, lines, numbers = block.translate(_BLANK).split(b"\n"), None, None
        verdicts = list(map(self._forms.get, forms))
        new = [i for i, verdict in enumerate(verdicts) if verdict is None] if None in verdicts else []
        if new:
            lines = lines if lines is not None else block.split(b"\n")
            for i, verdict in self._learn(state, lines, forms, new):
                verdicts[i] = verdict
        said = [i for i, verdict in enumerate(verdicts) if verdict]
        if not said:
            return
        lines = lines if lines is not None else block.split(b"\n")
        progress: list[int] = []  # lines that only show progress, and were not counted yet
        for i in said:
            verdict = verdicts[i] or ()
            if verdict is self._progress:
                progress.append(i)
                continue
            if progress:
                state.progress_lines(progress, lines, numbers)
                progress = []
            self._take(state, lines, i, numbers[i] if numbers else state.line + i, verdict)
        if progress:
            state.progress_lines(progress, lines, numbers)

    def _learn(
        self, state: _FileState, lines: list[bytes], forms: list[bytes], new: list[int]
    ) -> Iterator[tuple[int, MatchingRules]]:
        """Return lines of new forms that match rules, and their verdicts. Many forms are searched together first."""
        table = self._forms
        unlike = list(dict.fromkeys(forms[i] for i in new))
        if len(table) + len(unlike) > MAX_FORMS:
            table.clear()
        if len(unlike) >= BULK_FORMS:
            telling = self.gate.telling(b"\n".join(unlike))
            if len(unlike) == len(new):  # all different: caching lines without a match is useless
                new = [new[i] for i in sorted(telling)]
            else:
                table.update((f, ()) for i, f in enumerate(unlike) if i not in telling and len(f) <= MAX_FORM)
        for i in new:
            verdict = table.get(forms[i])
            if verdict is None:
                verdict = self._classify(state, lines[i], forms[i])
            if verdict:
                yield i, verdict

    def _classify(self, state: _FileState, line: bytes, form: bytes) -> MatchingRules:
        """Return the rules that may match lines of this form: those that match this one or depend on its digits."""
        if len(line) > LONG_LINE:
            return tuple(self.gate.candidates(line))
        candidates = self.gate.candidates(line)
        verdict: MatchingRules = ()
        if candidates:
            text = parse_line(decode_line(line), bool(state.labelled)).text
            verdict = tuple(r for r in candidates if not r.exact or r.pattern.search(text))
            if len(verdict) == 1 and verdict[0].kind == "progress":
                verdict = self._progress
        if len(form) <= MAX_FORM:
            self._forms[form] = verdict
        return verdict

    def _take(self, state: _FileState, lines: list[bytes], i: int, number: int, verdict: MatchingRules) -> None:
        if len(verdict) == 1 and verdict[0].owner in COUNTED_FACTS and verdict[0].index in state.out.tallies:
            state.count_again(verdict[0], lines[i])
            return
        if verdict is self._progress:
            state.progress(number, lines[i])
            return
        for text in _windows(lines[i], verdict):
            self._line(state, parse_line(text, bool(state.labelled)), text, (lines, i), number, verdict)
        if len(lines[i]) < MAX_LINE_TEXT and (
            any(r.kind in _JOINED_KINDS or r.owner == "exception" for r in verdict) and b'File "' not in lines[i][:80]
        ):
            self._logical_line(state, lines, i, number)

    def _logical_line(self, state: _FileState, lines: list[bytes], i: int, number: int) -> None:
        """Try the rules that match only across the end of a line: a message may be wrapped, or follow its header."""
        if state.joined >= MAX_JOINED or not (parts := continuation(lines, i, bool(state.labelled))):
            return
        state.joined += 1
        raw = decode_line(lines[i]).rstrip()
        line = parse_line(raw, bool(state.labelled))
        end = len(line.text)
        for glue in (" ", ""):
            text = glue.join([line.text, *parts])
            across: list[ScanRule] = []
            for rule in self.gate.candidates(text.encode()):
                match = rule.pattern.search(text) if rule.kind in _LOGICAL_KINDS else None
                if match and match.start() < end < match.end() and not rule.pattern.search(line.text):
                    across.append(rule)
            if across:
                whole = structs.replace(line, text=text)
                self._line(state, whole, glue.join([raw, *parts]), (lines, i), number, tuple(across))
                return
        state.complete_exception(number, parts)

    def _line(
        self,
        state: _FileState,
        line: LogLine,
        raw: str,
        where: tuple[list[bytes], int],
        number: int,
        verdict: MatchingRules,
    ) -> None:
        matches = [(rule, match) for rule in verdict if (match := rule.pattern.search(line.text))]
        if not matches:
            return
        line = line.identified()
        state.note(line)
        matched = [m for rule, match in matches for m in _meanings(rule, match, line)]
        harmless = {m.owner for m in matched if m.kind == "benign"}
        firm = any(not BENIGN_MESSAGES[name].general for name in harmless)
        failing = any(m.kind == "class" for m in matched) and not firm
        for meaning in matched:
            if (
                (meaning.kind == "class" and firm)
                or (meaning.kind == "benign" and failing)
                or (meaning.owner == "exception" and firm)
                or (meaning.kind == "sign" and harmless)
            ):
                continue
            if meaning.kind == "progress":
                if not failing:
                    state.progress(number, where[0][where[1]])
            elif meaning.owner == "ignored":
                state.ignored_from = number
            elif state.ignores(meaning, number):
                continue
            elif meaning.owner == "event_start":
                state.start_again()
            elif meaning.owner in ("frame", "stack"):
                state.frame(line, number, meaning.groups, where)
            elif meaning.owner == "dump_head":  # of torch's debug server
                state.dump_of = int(meaning.groups["rank"]), meaning.groups["host"]
            elif meaning.owner == "stack_head":
                state.stack(line, number)
            else:
                state.keep(meaning, line, raw, where, number)


class Meaning(NamedTuple):
    """What a matched line means: a rule's own kind, owner and weight, or what a parser read from its fields."""

    rule: ScanRule
    kind: str
    owner: str
    weight: float
    groups: dict[str, str]
    rank: int | None


def _meanings(rule: ScanRule, match: re.Match[str], line: LogLine) -> list[Meaning]:
    """Return what a match means, if the class accepts the line's emitter."""
    # of alternatives, a field has several groups: code, code2, ...
    groups = {k.rstrip("123"): v for k, v in match.groupdict().items() if v is not None}
    if rule.kind in _JOINED_KINDS and line.text.lstrip().startswith('File "'):
        return []  # a path or a name in a traceback is no message
    if rule.kind == "structured":
        read = STRUCTURED[rule.owner].read(groups)
        if read is None or (read.kind == "class" and not CATALOGUE[read.owner].accepts(line.emitter)):
            return []
        groups |= {"told": read.sentence} | ({"interrupt": "yes"} if read.interrupt else {})
        return [Meaning(rule, read.kind, read.owner, read.weight, groups, read.rank)]
    if rule.kind == "class" and not CATALOGUE[rule.owner].accepts(line.emitter):
        return []
    weight = rule.pattern.weight
    if (
        rule.kind == "class"
        and weight < CERTAIN
        and not CATALOGUE[rule.owner].measured
        and line.severity in ("info", "warning")
        and line.emitter in REMARKING_EMITTERS
    ):
        weight = min(weight, POSSIBLE)
    return [Meaning(rule, rule.kind, rule.owner, weight, groups, None)]


class _FileState:
    """The state of scanning one file."""

    def __init__(self, number: int) -> None:
        self.out = FileScan(file=number)
        self.line = 1
        self.labelled: bool | None = None
        self.prefixes = UnknownPrefixes()
        self._frames: dict[object, deque[tuple[int, str, str]]] = {}
        self._kept: dict[object, int] = {}
        self._hosts: set[str] = set()
        self._ranks: set[int] = set()
        self._pids: dict[int, int] = {}
        self._in_stack = 0
        self.dump_of: tuple[int | None, str | None] = None, None
        self.joined = 0
        self.ignored_from = -IGNORED_LINES - 1
        self._untyped = 0
        self._root_at = -ROOT_CAUSE_LINES - 1
        self._steps, self._last_step = 0, b""
        self._late: deque[int] = deque(maxlen=LATE_PROGRESS)

    def result(self) -> FileScan:
        self._mark(self._last_step)
        self.out.lines = self.line - 1
        self.out.late_progress = list(self._late)
        self.out.hosts, self.out.ranks = sorted(self._hosts), sorted(self._ranks)
        ended = (tuple(f for _, f, _ in frames)[-LOOSE_FRAMES:] for frames in self._frames.values())
        self.out.loose = list(islice((frames for frames in ended if frames), LOOSE))
        return self.out

    def ignores(self, meaning: Meaning, number: int) -> bool:
        """Return whether a message is of an exception that Python said it ignores; the exception ends its block."""
        if number - self.ignored_from > IGNORED_LINES:
            return False
        if meaning.owner == "exception":
            self.ignored_from = number - IGNORED_LINES  # other rules of this line still belong to it
        return meaning.owner in ("exception", "traceback", "interrupt") or meaning.kind == "class"

    def start_again(self) -> None:
        """Discard the previous attempt when a new attempt starts in the event file of a run."""
        self.out = FileScan(file=self.out.file, bytes_read=self.out.bytes_read)
        self._kept.clear()
        self._frames.clear()
        self._late.clear()
        self._steps, self._last_step = 0, b""

    def progress(self, number: int, line: bytes) -> None:
        if self.out.first_progress is None:
            self.out.first_progress = number
        self.out.last_progress = number
        self._late.append(number)
        if not self.out.last_progress_text:
            self.out.last_progress_text = decode_line(line[:300])
        self._steps += 1
        if self._steps & (self._steps - 1) == 0:  # the 1st, 2nd, 4th ... of them: enough to compare clocks by
            self._mark(line)
        self._last_step = line

    def progress_lines(self, at: list[int], lines: list[bytes], numbers: list[int] | None) -> None:
        """Count lines of progress together, with the result of `progress` for each of them."""
        first, *rest = at
        self.progress(numbers[first] if numbers else self.line + first, lines[first])
        if not rest:
            return
        before, self._steps = self._steps, self._steps + len(rest)
        step = 1 << before.bit_length()  # the next power of two
        while step <= self._steps:
            self._mark(lines[at[step - before]])
            step <<= 1
        late = [numbers[i] if numbers else self.line + i for i in rest[-LATE_PROGRESS:]]
        self._late.extend(late)
        self.out.last_progress = late[-1]
        self._last_step = lines[rest[-1]]

    def _mark(self, line: bytes) -> None:
        text = decode_line(line[:400])
        step, time = _STEP.search(text), timestamp_of(text)
        if step and time is not None:
            self.out.marks.setdefault(int(step.group(1)), time)

    def count_again(self, rule: ScanRule, line: bytes) -> None:
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

    def note(self, line: LogLine) -> None:
        """Record which process is which rank and host."""
        if line.host and len(self._hosts) < 4096:
            self._hosts.add(line.host)
        if line.rank is not None:
            self._note_rank(line.rank, line.host)

    def _note_rank(self, rank: int, host: str | None) -> None:
        if len(self._ranks) < MAX_RANKS:
            self._ranks.add(rank)
            if host:
                self.out.rank_hosts.setdefault(rank, host)

    def frame(self, line: LogLine, number: int, groups: dict[str, str], where: tuple[list[bytes], int]) -> None:
        stream = (line.rank, line.local, line.task, line.host)
        if stream not in self._frames:
            if len(self._frames) >= STREAMS:
                self._frames.clear()
            self._frames[stream] = deque(maxlen=FRAMES)
        frame = f"{groups.get('path') or ''}:{groups.get('function') or ''}"[:300]
        place = (
            f"{groups.get('path') or ''}:{groups['line']} in {groups.get('function') or '?'}"
            if "line" in groups
            else frame
        )
        self._frames[stream].append((number, frame, place[:300]))
        if self._untyped < MAX_UNTYPED:
            self._note_untyped(line, number, self._frames[stream], *where)
        if self.out.stacks and self._in_stack == number - 1 and len(self.out.stacks[-1].frames) < FRAMES:
            self.out.stacks[-1].frames.append(frame)
            self._in_stack = number

    def _note_untyped(
        self, line: LogLine, number: int, stack: deque[tuple[int, str, str]], lines: list[bytes], i: int
    ) -> None:
        """Keep what follows the last frame if it is a sentence: programs print an exception without its type."""
        after = next((j for j in range(i + 1, min(i + 4, len(lines))) if lines[j][:1] not in (b" ", b"\t")), None)
        if after is None or len(stack) < 2 or not _SENTENCE.match(lines[after]):
            return
        text = decode_line(lines[after][:MAX_LINE_TEXT]).strip()
        self._untyped += 1
        self.out.signals.append(
            LogSignal(
                kind="fact", owner="untyped_error", weight=POSSIBLE, file=self.out.file, line=number + after - i,
                text=text, time=_time_near(text, lines, after), rank=line.rank, host=line.host,
                groups={"type": "an error", "message": text}, frames=tuple(f for _, f, _ in stack),
                places=tuple(place for _, _, place in stack), emitter="python", dated=False,
            )
        )  # fmt: skip

    def stack(self, line: LogLine, number: int) -> None:
        """Start a thread of a stack dump; the following lines are its frames."""
        if len(self.out.stacks) < STACKS:
            rank, host = self.dump_of if line.rank is None else (line.rank, line.host)
            self.out.stacks.append(ThreadStack(number, line.text[:200], rank, host or line.host))
            self._in_stack = number

    def keep(self, meaning: Meaning, line: LogLine, raw: str, where: tuple[list[bytes], int], number: int) -> None:
        rule, groups = meaning.rule, meaning.groups
        tally = self.out.tallies.setdefault(rule.index, RuleCount())
        tally.count += 1
        tally.last_line = number
        rank = meaning.rank if meaning.rank is not None else line.rank
        if meaning.owner == "comm_init":  # NCCL's line that maps a process to a rank
            rank = int(groups["rank"])
            self._note_rank(rank, line.host)
            if line.pid is not None and len(self._pids) < MAX_RANKS:
                self._pids.setdefault(line.pid, rank)
        elif rank is None and line.pid is not None:
            rank = self._pids.get(line.pid)
        if meaning.owner == "channel":
            self._transport(groups["via"])
        if meaning.owner == "done" and line.emitter not in ("slurm_daemon", "kernel"):
            self.out.last_done = number
            if meaning.weight > POSSIBLE:
                self.out.last_completed = number
        if meaning.owner in ("ended", "verified"):
            self.out.last_ended = number
        if meaning.owner == "comm_ready":
            self.out.ready += 1
        if meaning.owner == "agent_root":
            self._root_at = number
        # it is written after all the others
        of_root = meaning.owner == "agent_field" and number - self._root_at <= ROOT_CAUSE_LINES
        source = (rule.index, rank, line.local, line.task, line.host)
        own, all_of_rule = self._kept.get(source, 0), self._kept.get(rule.index, 0)
        most = MAX_WATCHDOG_FRAMES if meaning.owner == "fr_frame" else MAX_SIGNALS_PER_SOURCE
        if not of_root and (own >= most or all_of_rule >= MAX_SIGNALS_PER_RULE):
            return
        self._kept[source], self._kept[rule.index] = own + 1, all_of_rule + 1
        stream = (line.rank, line.local, line.task, line.host)
        frames = [frame for frame in self._frames.get(stream, ()) if number - frame[0] <= FRAME_REACH]
        self.out.signals.append(
            LogSignal(
                kind=meaning.kind, owner=meaning.owner, rule=rule.index, weight=meaning.weight,
                passing=rule.pattern.passing, file=self.out.file, line=number, time=_time_near(raw, *where), rank=rank,
                local=line.local, task=line.task, host=line.host, text=raw.strip()[:MAX_LINE_TEXT],
                groups={k: v[:MAX_LINE_TEXT] for k, v in groups.items()}, frames=tuple(f for _, f, _ in frames),
                places=tuple(place for _, _, place in frames), emitter=line.emitter, severity=line.severity,
                dated=timestamp_of(raw) is not None,
            )
        )  # fmt: skip
        if meaning.owner == "exception":
            self._frames.pop(stream, None)

    def complete_exception(self, number: int, parts: list[str]) -> None:
        """Add the next lines to the message of the exception in this line, if it announces them."""
        last = self.out.signals[-1] if self.out.signals else None
        if last is not None and last.owner == "exception" and last.line == number:
            message = last.groups.get("message", "")
            if not message or message.endswith(":"):
                last.groups["message"] = f"{message} {' '.join(parts)}".strip()[:MAX_LINE_TEXT]


def _time_near(raw: str, lines: list[bytes], i: int) -> float | None:
    """Return the line's time stamp, or the nearest one before or after; the next one dates srun's exit messages."""
    time = timestamp_of(raw)
    if time is not None:
        return time
    before, after = (
        range(i - 1, max(-1, i - TIME_STAMP_REACH), -1),
        range(i + 1, min(len(lines), i + TIME_STAMP_REACH // 2)),
    )
    for j in (*after, *before) if raw.startswith("srun:") else (*before, *after):
        time = timestamp_of(lines[j][:240].decode("ascii", "replace"))
        if time is not None:
            # the first line of a rank of allranks: when it started, which says nothing of when this line was written
            return None if b"] WORLD_SIZE=" in lines[j][:60] else time
    return None


def _split_returns(block: bytes, first: int) -> tuple[list[bytes], list[int]]:
    """Split lines at carriage returns too (progress bars), each with its line number."""
    pieces: list[bytes] = []
    numbers: list[int] = []
    for i, line in enumerate(block.split(b"\n")):
        parts = line.rstrip(b"\r").split(b"\r")
        pieces += parts
        numbers += [first + i] * len(parts)
    return pieces, numbers


def _windows(line: bytes, verdict: MatchingRules) -> list[str]:
    """Return the text of a line; of a very long one only the parts around possible matches."""
    if len(line) <= LONG_LINE:
        return [decode_line(line)]
    words, spans = normalized(line), []
    for rule in verdict:
        for anchor in rule.anchors:
            at = words.find(anchor)
            if at >= 0 and not any(a <= at < b - 200 for a, b in spans) and len(spans) < WINDOWS:
                spans.append((max(0, at - 300), at + 700))
    return [decode_line(_from_whole_word(line, a, b)) for a, b in spans]


def _from_whole_word(line: bytes, start: int, end: int) -> bytes:
    """Return a piece of a line from its third word on: a truncated secret could not be recognised and redacted."""
    piece = line[start:end]
    return piece.split(None, 2)[-1] if start else piece
