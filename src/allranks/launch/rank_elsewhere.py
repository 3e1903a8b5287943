"""Start a rank in a Python without allranks: ``python rank_elsewhere.py allranks.launch.rank RUN ATTEMPT``.

Of allranks, only what a rank needs is imported, from the folder of this file; no other package of that environment
becomes visible. The program's environment need not have msgspec, nor this version of Python: classes of msgspec, of
which a rank needs no more than attributes with defaults, are replaced, and `msgspec` is removed again before the
program starts. If this Python cannot import allranks (older than 3.9, say), the rank runs without being monitored.
"""

import importlib.util
import os
import sys
from pathlib import Path

NEEDED = (
    "allranks.launch.rank", "allranks.launch.failure_attribution", "allranks.train.user_script",
    "allranks.utils.redaction", "allranks.rundir.events",
)  # fmt: skip


class Struct:
    """A class whose annotations are its fields, as with msgspec."""

    def __init_subclass__(cls, **options):
        pass

    def __init__(self, *values, **named):
        classes = reversed(type(self).__mro__)
        fields = dict.fromkeys(name for one in classes for name in getattr(one, "__annotations__", ()))
        self.__dict__.update(zip(fields, values))  # noqa: B905 - an older Python has no strict
        self.__dict__.update(named)


def _import_allranks():
    """Import what a rank needs, and hide what the program's environment does not have."""
    place = Path(__file__).absolute().parents[1]
    if "allranks" not in sys.modules:
        spec = importlib.util.spec_from_file_location(
            "allranks", str(place / "__init__.py"), submodule_search_locations=[str(place)]
        )
        assert spec is not None and spec.loader is not None
        sys.modules["allranks"] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    replaced = importlib.util.find_spec("msgspec") is None
    if replaced:
        import json
        import types

        encoder = lambda: types.SimpleNamespace(encode=lambda value: json.dumps(value).encode())  # noqa: E731
        decoder = lambda: types.SimpleNamespace(decode=json.loads)  # noqa: E731
        text = types.SimpleNamespace(Encoder=encoder, Decoder=decoder)
        stub = types.ModuleType("msgspec")
        stub.__dict__.update(Struct=Struct, json=text, DecodeError=ValueError)
        sys.modules["msgspec"] = stub
    try:
        for name in NEEDED:
            importlib.import_module(name)
    finally:
        if replaced:
            del sys.modules["msgspec"]


def main():
    sys.path.pop(0)  # this folder, whose names are no modules of the program
    del sys.argv[1]
    try:
        _import_allranks()
    except Exception as error:  # noqa: BLE001 - whatever an older Python does not know
        _run_unmonitored(error)
    sys.modules["allranks.launch.rank"].main()


def _run_unmonitored(error):
    import json

    run, attempt, rank = sys.argv[1], sys.argv[2], os.environ["RANK"]
    host = os.uname().nodename.split(".")[0]
    log = os.open(f"{run}/logs/attempt-{attempt}/{host}.rank{rank}.log", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    print(f"[RANK {rank}] not monitored: {type(error).__name__}: {error}", flush=True)  # noqa: T201
    program = json.loads(os.environ.pop("ALLRANKS_PROGRAM"))
    words = ["-m", program["module"]] if program["module"] else [program["path"]]
    os.execv(sys.executable, [sys.executable, "-u", *words, *program["args"]])  # noqa: S606


if __name__ == "__main__":
    main()
