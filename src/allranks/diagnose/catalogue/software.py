"""Libraries that are missing or do not fit together."""

from __future__ import annotations

from allranks.diagnose.catalogue.entry import FITS, SHOWS, Entry, Pattern

NUMPY_CLASH = Entry(
    id="numpy_clash",
    title="a package was built for another NumPy major version",
    cause="NumPy 2 changed its binary interface and removed names; a package that was built for or written against NumPy 1 meets NumPy 2, or the other way round.",
    fix="Pin numpy<2, or upgrade the package that is named to a version for NumPy 2; the same on every node.",
    next_test="python -c 'import numpy; print(numpy.__version__, numpy.__file__)' on each node, then import the package that failed",
    reference="https://numpy.org/doc/stable/numpy_2_0_migration_guide.html",
    patterns=(
        Pattern(r"compiled using NumPy 1\.x cannot be run in|compiled (using|with|against) NumPy 1", "compiled "),
        Pattern(r"numpy\.(dtype|ndarray|ufunc) size changed", " size changed"),
        Pattern(r"_ARRAY_API not found"),
        Pattern(r"numpy\.core\.multiarray failed to import|numpy\._core\.multiarray failed", "multiarray failed"),
        Pattern(
            r"module 'numpy' has no attribute|No module named 'numpy\.(_core|core)|cannot import name .{1,40} from 'numpy",
            "'numpy",
        ),
        Pattern(r"was removed in the NumPy 2\.0|removed in NumPy 2", "numpy "),
        Pattern(r"Unable to avoid copy while creating an array", weight=SHOWS),
        Pattern(r"Numpy is not available", weight=SHOWS),
        Pattern(
            r"NumPy 2.{0,80}(incompatible|not support|break|clash|require)|(requires?|needs?) numpy ?<\s?2",
            "numpy",
            weight=SHOWS,
        ),
    ),
    example="ValueError: numpy.dtype size changed, may indicate binary incompatibility. Expected 96 from C header, got 88 from PyObject",
    near_miss="INFO numpy 2.1.3, pandas 2.2.3",
)

NCCL_LIBRARY_MISMATCH = Entry(
    id="nccl_library_mismatch",
    title="the NCCL that was loaded is not the one torch was built with",
    cause="Another libnccl.so came first (a module, LD_LIBRARY_PATH, a second pip package that overwrote it), or nodes have different versions.",
    fix="Keep one NCCL: remove the other package or module, unset LD_LIBRARY_PATH, reinstall the one that torch names (pip show nvidia-nccl-cu12 or -cu13).",
    next_test="LD_DEBUG=libs python -c 'import torch' 2>&1 | grep nccl names the file; torch.cuda.nccl.version() on every node",
    reference="https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting.html",
    patterns=(
        Pattern(r"undefined symbol: ?_?p?(nccl\w+)", "undefined symbol"),
        Pattern(
            r"(mismatch(ed|ing)?|different|incompatible|inconsistent).{0,30}NCCL.{0,20}versions?|NCCL version.{0,40}(mismatch|differ|incompatible|!=)",
            "nccl",
            "libnccl",
        ),
        Pattern(r"libnccl\.so[.\d]*: (version|undefined)", "libnccl.so"),
        Pattern(
            r"NCCL.{0,40}(built|compiled) with.{0,60}(but|loaded|found|running|using)", "nccl", "libnccl", weight=SHOWS
        ),
        Pattern(r"(libnccl|nvidia-nccl-cu\d+).{0,80}(overwr|conflict|shadow|wrong)", "nccl", "libnccl", weight=SHOWS),
    ),
    example="ImportError: /opt/env/lib/libtorch_cuda.so: undefined symbol: ncclGroupSimulateEnd",
    near_miss="node-a:1:1 [0] NCCL INFO NCCL version 2.27.3+cuda12.9",
)

LIBRARY_MISSING = Entry(
    id="library_missing",
    title="a library or import is missing",
    cause="A package, a shared library or a name in it is not there: not installed in this environment, another environment is active on this node, or versions that clash.",
    fix="Activate the same environment on every node (within the step, not only in the login shell), install what is named, or load the module that brings it.",
    next_test="srun --ntasks-per-node=1 python -c 'import <name>; print(<name>.__file__)' on all nodes; allranks doctor SPEC does it",
    reference="https://docs.python.org/3/library/exceptions.html#ModuleNotFoundError",
    patterns=(
        Pattern(
            r"ModuleNotFoundError|No module named ['\"]?\w",
            "modulenotfounderror",
            "no module named",
            weight=SHOWS,
            unless=r"/python[\d.]*: No module named|^python[\d.]*: |numpy\._?core",
        ),
        Pattern(r"cannot open shared object file", weight=SHOWS, unless="libnccl-|dlerror|falling back"),
        Pattern(r"undefined symbol:", weight=SHOWS, unless=r"undefined symbol: ?_?p?nccl"),
        Pattern(r"ImportError\b", "importerror", weight=SHOWS, unless="nccl|numpy"),
        Pattern(r"cannot import name", weight=SHOWS, unless="from 'numpy"),
        Pattern(r"version `(GLIBC|GLIBCXX|CXXABI|CUDA)\w*[\d.]*' not found", "' not found"),
        Pattern(
            r"^(\S+: )?(line \d+: )?(bash: )?\S+: command not found|command not found",
            "command not found",
            weight=SHOWS,
        ),
        Pattern(
            r"(Lmod has detected the following error|module\(s\).{0,60}(unknown|cannot be loaded)|Unable to locate a modulefile)",
            "lmod has detected",
            "module(s)",
            "modulefile",
            weight=SHOWS - 0.1,  # the script goes on: what was asked for may be there without the module
        ),
        Pattern(
            r"CUDA_HOME (environment variable is not set|does not exist)|Ninja is required to load|nvcc.{0,20}not found",
            "cuda_home",
            "ninja is required",
            "nvcc",
            weight=SHOWS,
        ),
        Pattern(
            r"module 'torch\.cpu' has no attribute|AttributeError: module '(torch|transformers|datasets|accelerate|deepspeed|peft)[\w.]*' has no attribute",
            "' has no attribute",
            weight=SHOWS,
        ),
        Pattern(
            r"(unable|failed) to (link|load).{0,60}librar|/ld: cannot find -l|not linked (with|against)",
            "librar",
            "cannot find -l",
            "not linked",
            weight=FITS,
        ),
        Pattern(
            r"(library|package|plugin|libfabric|libcuda\w*) .{0,40}(is )?(not installed|not found|missing|could not be (found|loaded))|DistributionNotFound|PackageNotFoundError",
            "not installed",
            "not found",
            "missing",
            "could not be ",
            "distributionnotfound",
            "packagenotfounderror",
            weight=FITS,
            unless="NET/|tuner|libnccl-net|Missing ranks|file",
        ),
        Pattern(r"error while loading shared libraries"),
        Pattern(r"built without libuv support|use_libuv was requested", "without libuv", "use_libuv was"),
        Pattern(r"Distributed package doesn't have \w+ (\W{0,3})?built ?in", "distributed package doesn't have"),
    ),
    example="ModuleNotFoundError: No module named 'sentencepiece'",
    near_miss="INFO all modules found",
)
