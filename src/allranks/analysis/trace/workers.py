"""Ranks read in processes of their own: ``python -m allranks.analysis.trace.workers`` takes paths on standard input, a line each, and answers each with one
message. Not `multiprocessing`: that would run the caller's script again, and a reader that is killed must cost its own file only."""

from __future__ import annotations

import struct
import sys
from collections import deque
from pathlib import Path
from typing import IO, TYPE_CHECKING

import msgspec

from allranks.analysis.trace.rank import RankResult, UnreadableTrace, read_rank

if TYPE_CHECKING:
    import subprocess

Result = RankResult | UnreadableTrace
_LENGTH = struct.Struct("<Q")


def read_all(files: list[Path], workers: int) -> dict[Path, Result]:
    """Reads each file in one of `workers` processes; a process takes the next file when it is done with one."""
    if workers <= 1:
        return {path: read_rank(path) for path in files}
    import threading

    todo = deque(files)
    results: dict[Path, Result] = {}
    threads = [threading.Thread(target=_run_worker, args=(todo, results), daemon=True) for _ in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def _run_worker(todo: deque[Path], results: dict[Path, Result]) -> None:
    process = None
    try:
        while True:
            try:
                path = todo.popleft()
            except IndexError:
                return
            process = process or _start()
            answer = _request(process, path)
            if answer is None:
                code = process.wait()
                text = f"was not read: its reader {f'was killed by signal {-code}; is there memory?' if code < 0 else f'ended with code {code}'}"
                answer, process = UnreadableTrace(str(path), "unreadable", text), None
            results[path] = answer
    finally:
        if process is not None:
            assert process.stdin is not None
            process.stdin.close()
            process.wait()


def _start() -> subprocess.Popen[bytes]:
    import subprocess

    # the same packages as in this process, but none from where the user happens to be
    path = [str(Path(__file__).resolve().parents[3]), *(p for p in sys.path if p)]
    code = f"import sys; sys.path[:] = {path!r}; from allranks.analysis.trace.workers import serve; serve()"
    return subprocess.Popen([sys.executable, "-P", "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def _request(process: subprocess.Popen[bytes], path: Path) -> Result | None:
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.write(msgspec.json.encode(str(path)) + b"\n")
        process.stdin.flush()
        head = _read_exactly(process.stdout, _LENGTH.size)
        body = _read_exactly(process.stdout, _LENGTH.unpack(head)[0]) if head else None
    except OSError:
        return None
    return msgspec.msgpack.decode(body, type=Result) if body is not None else None


def _read_exactly(stream: IO[bytes], size: int) -> bytes | None:
    data = stream.read(size)
    return data if len(data) == size else None


def serve() -> None:
    """The other side: reads until standard input ends."""
    for line in sys.stdin.buffer:
        body = msgspec.msgpack.encode(read_rank(Path(msgspec.json.decode(line, type=str))))
        sys.stdout.buffer.write(_LENGTH.pack(len(body)))
        sys.stdout.buffer.write(body)
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    serve()
