"""What happens to a user's own program at its end, in a process of its own."""

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import os
from allranks.train import user_script

class Lazy:
    @property
    def __class__(self):
        print("asked", flush=True)
        return object

kept, file = Lazy(), open("left.txt", "w")
file.write("text")
user_script._close_files(os.getpid())
os._exit(0)
"""


def test_files_left_open_are_written_and_no_object_is_asked_for_anything(tmp_path: Path) -> None:
    """torch.distributed.reduce_op warns when it is asked for its class; others import modules."""
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert (tmp_path / "left.txt").read_text() == "text"
