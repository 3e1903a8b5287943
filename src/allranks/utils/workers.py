"""Apply a function to many inputs in worker processes. A process that is killed, for example for lack of memory, loses
only its own input.

`multiprocessing` is not used because it would run the caller's script again, or copy its threads.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from allranks.utils.filesystem import PACKAGE_FOLDER

if TYPE_CHECKING:
    import subprocess

Input = TypeVar("Input")
Result = TypeVar("Result")


def map_in_processes(
    function: Callable[[Input], Result], inputs: Sequence[Input], workers: int
) -> list[Result | ChildProcessError]:
    """Return the result for each input, in order; an error for one during which its process ended.

    Args:
        function: a function of a module.
        inputs: given out one by one, in this order.
    """
    import threading

    results: dict[int, Result | ChildProcessError] = {}
    queue = deque(enumerate(inputs))
    threads = [threading.Thread(target=_feed, args=(function, queue, results), daemon=True) for _ in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [results[i] for i in range(len(inputs))]


def _feed(function: Callable, queue: deque, results: dict) -> None:
    """Have a process do what is in the queue; start another one if it ended."""
    import pickle  # only where processes are used

    process: subprocess.Popen[bytes] | None = None
    while True:
        try:
            number, item = queue.popleft()
        except IndexError:
            break
        process = process or _start()
        assert process.stdin is not None and process.stdout is not None
        try:
            pickle.dump((function, item), process.stdin)
            process.stdin.flush()
            results[number] = pickle.load(process.stdout)  # noqa: S301 - from this program
        except (EOFError, OSError, pickle.UnpicklingError):
            code = process.wait()
            manner = f"was killed by signal {-code}, possibly out of memory" if code < 0 else f"exited with code {code}"
            results[number], process = ChildProcessError(f"the process that read it {manner}"), None
    if process is not None and process.stdin is not None:
        process.stdin.close()
        process.wait()


def _start() -> subprocess.Popen[bytes]:
    import subprocess

    # use the same packages as this process, but none from the user's current folder
    path = [str(PACKAGE_FOLDER.parent), *(p for p in sys.path if p)]
    code = f"import sys; sys.path[:] = {path!r}; from allranks.utils.workers import serve; serve()"
    return subprocess.Popen([sys.executable, "-P", "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def serve() -> None:
    """Answer requests until standard input ends."""
    import pickle

    while True:
        try:
            function, item = pickle.load(sys.stdin.buffer)  # noqa: S301 - from the program that started this one
        except EOFError:
            return
        pickle.dump(function(item), sys.stdout.buffer)
        sys.stdout.buffer.flush()
