"""Run the function that `allranks.launch` was given, as the program of a rank: ``python -m
allranks.train.user_function``.

Its value or exception is written to the run folder, where the caller reads it (`allranks.rundir.function_files`).
"""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

from allranks.errors import RunFailed
from allranks.rundir import function_files
from allranks.rundir.paths import RUN_FOLDER_VARIABLE, RunDir


def main() -> None:
    """Call the function; what it raises ends this program, as it would end any other."""
    run, rank = RunDir(Path(os.environ[RUN_FOLDER_VARIABLE])), int(os.environ["RANK"])
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"]) + 1
    try:
        function_files.write_value(run, attempt, rank, _call(run, rank))
    except SystemExit as end:
        if end.code in (None, 0):
            function_files.write_value(run, attempt, rank, None)
        raise
    except BaseException as error:
        function_files.write_error(run, attempt, rank, error, skip=2)
        raise


def _call(run: RunDir, rank: int) -> Any:
    try:
        function, args, kwargs, header = function_files.read_call(run)
    except (ImportError, AttributeError) as error:
        raise RunFailed(
            f"the function cannot be loaded on rank {rank}: {type(error).__name__}: {error}; its module and those of "
            "its arguments must be importable on every node"
        ) from error
    if header.init is None:
        return function(*args, **kwargs)
    import torch
    import torch.distributed as dist

    device = None
    if header.init == "nccl":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group(header.init, timeout=timedelta(seconds=header.timeout_s), device_id=device)
    value = function(*args, **kwargs)
    if dist.is_initialized():  # the function may have left it
        dist.destroy_process_group()
    return value


if __name__ == "__main__":
    main()
