"""Read ranks in separate processes: ``python -m allranks.analysis.trace.workers`` reads paths from standard input, one per line.

It answers each with one message. `multiprocessing` is not used because it would run the caller's script again, and a killed
reader must only lose its own file.
"""

from __future__ import annotations

import struct
import sys
from collections import deque
from pathlib import Path
from typing import IO, TYPE_CHECKING

import msgspec

from allranks.analysis.trace.rank import RankResult, UnreadableTrace, read_rank
from allranks.utils.filesystem import PACKAGE_FOLDER

if TYPE_CHECKING:
    import subprocess

Result = RankResult | UnreadableTrace
_LENGTH = struct.Struct("<Q")


def read_all(files: list[Path], workers: int) -> dict[Path, Result]:
    """Read each file in one of `workers` processes; a process takes the next file when it has finished one."""
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
                text = f"was not read: the reader process {f'was killed by signal {-code}, possibly out of memory' if code < 0 else f'exited with code {code}'}"
                answer, process = UnreadableTrace(str(path), "unreadable", text), None
            results[path] = answer
    finally:
        if process is not None:
            assert process.stdin is not None
            process.stdin.close()
            process.wait()


def _start() -> subprocess.Popen[bytes]:
    import subprocess

    # use the same packages as this process, but none from the user's current folder
    path = [str(PACKAGE_FOLDER.parent), *(p for p in sys.path if p)]
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
    """Answer requests until standard input ends."""
    for line in sys.stdin.buffer:
        body = msgspec.msgpack.encode(read_rank(Path(msgspec.json.decode(line, type=str))))
        sys.stdout.buffer.write(_LENGTH.pack(len(body)))
        sys.stdout.buffer.write(body)
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    serve()
