"""A request to stop that arrives while another one is handled: in the same thread, at any line of the handler."""

import subprocess
import sys

import pytest

NESTED = """
import signal, sys
from allranks.train.step_metrics import StopRequest
stop = StopRequest()
seen = set()

def nested(number, frame):
    stop.ask("SIGTERM")

def tracer(frame, event, argument):
    if event == "line" and (frame.f_code.co_name, frame.f_lineno) not in seen:
        seen.add((frame.f_code.co_name, frame.f_lineno))
        sys.settrace(None)
        signal.raise_signal(signal.SIGTERM)
        sys.settrace(tracer)
    return tracer

def handler(number, frame):
    sys.settrace(tracer)
    stop.ask("SIGUSR1")
    sys.settrace(None)

signal.signal(signal.SIGTERM, nested)
signal.signal(signal.SIGUSR1, handler)
for _ in range(50):  # each time the other signal comes at a line where it has not come yet
    signal.raise_signal(signal.SIGUSR1)
print(stop.asked, stop.reason in ("SIGUSR1", "SIGTERM"), len(seen) > 1)
"""


@pytest.mark.full
def test_a_signal_within_the_handler_of_another_does_not_block() -> None:
    done = subprocess.run([sys.executable, "-c", NESTED], capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.stderr) == ("True True True\n", "")
