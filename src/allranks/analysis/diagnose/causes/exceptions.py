"""Detect exceptions of the program that no failure class explains, with a remedy by family of exceptions.

A family says what such an exception means, what to change, and what to test. It is one `ExceptionFamily`; the first
whose pattern matches ``Type: message`` applies.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from allranks.analysis.diagnose.causes.process_exits import first_exit
from allranks.analysis.diagnose.patterns import LIKELY, POSSIBLE
from allranks.analysis.diagnose.records import CandidateCause, DiagnosisCase, LogSignal, sort_by_time
from allranks.analysis.stacks import is_library_file

# Raised because another process, or the launcher, ended.
_CONSEQUENCES = re.compile(
    r"ChildFailedError|SignalException|CalledProcessError|Process(?:Exited|Raised)Exception|BrokenPipeError"
    r"|Connection(?:Reset|Aborted|Refused)Error|EOFError|KeyboardInterrupt|SystemExit|Dist(?:Backend|Network|Store)?Error"
    r"|Rendezvous(?:Connection|Timeout|Closed|State)Error|TimeoutExpired|Ray(?:Task|Actor)Error|Actor(?:Died|Unavailable)Error"
    r"|WorkerCrashedError|(?:Node|LocalRaylet)DiedError|RuntimeEnvSetupError|BrokenExecutor|BrokenProcessPool|WorkerError"
    r"|GeneratorExit|StopIteration"
)
_COMMUNICATION = re.compile(
    r"\b(NCCL|nccl\w*|HCCL|Hccl\w*|RCCL|gloo|TCPStore|c10d|ProcessGroup\w*|collective|unhandled (system|cuda) error)\b"
)
_GENERAL = frozenset({"an error", "Error", "Exception", "Failure", "Timeout", "Exit", "Interrupt", "ERROR"})


def detect_exceptions(case: DiagnosisCase) -> None:
    """Propose `application_error` for exceptions that no class explains, but not for bare communication errors."""
    explained = {(s.file, s.line) for s in case.signals if s.kind in ("class", "benign")}
    if "output_not_writable" in case.candidates:
        explained |= {(s.file, s.line) for s in case.candidates["output_not_writable"].signals}
    own = [
        s
        for s in (*case.facts("exception"), *case.facts("event_error"))
        if (s.file, s.line) not in explained and is_own_exception(s) and not _of_launcher(s) and not case.survived(s)
    ]
    communication = [s for s in own if _COMMUNICATION.search(s.text)]
    plain = [s for s in own if s not in communication]
    plain = [s for s in plain if not _after_lost_peer(case, s)] or plain
    if communication and not case.candidates:
        candidate = case.propose("collective_hang", POSSIBLE, communication)
        candidate.cause = (
            "An operation between the ranks failed, and the log does not say why: it contains only a general message "
            "of NCCL or Gloo."
        )
        candidate.next_test = (
            "run again with NCCL_DEBUG=INFO (or TORCH_CPP_LOG_LEVEL=INFO) and give diagnose all ranks' logs"
        )
    if not plain and not communication and not case.candidates:
        plain = _quoted_exceptions(case) or _untyped_errors(case)
    if plain:
        ended = first_exit(case).rank
        first = sort_by_time([s for s in plain if ended is not None and s.rank == ended] or plain)[0]
        named = first.groups["type"] not in _GENERAL
        candidate = case.propose(
            "application_error", 0.74 if named else POSSIBLE - 0.05, [first, *[s for s in plain if s is not first]]
        )
        _explain(case, candidate, first)


_LAUNCHER = re.compile(
    r"torch/distributed/(elastic|launcher)/|torch/distributed/run\.py|deepspeed/launcher/|accelerate/commands/launch\.py"
)


def _of_launcher(signal: LogSignal) -> bool:
    """Return whether an exception was raised in the launcher, such as torchrun's agent, and so is not the program's."""
    return bool(signal.frames) and _LAUNCHER.search(signal.frames[-1]) is not None


_TERMINATED = re.compile(r"killed by signal: (Terminated|Interrupt|Hangup)")
_BUILD_TOOL = re.compile(r"\b(ninja|nvcc|hipcc|gcc|g\+\+|cc|c\+\+|clang|cmake|make|ptxas|pip)\b")
_QUOTED = re.compile(r"\b(?:\w+\.)*(?P<type>[A-Z]\w*(?:Error|Exception))\b(?:\([\"'])?:? ?(?P<message>.{0,300})")


def _quoted_exceptions(case: DiagnosisCase) -> list[LogSignal]:
    """Return lines marked as errors that quote an exception, which the program caught to log it."""
    quoted: list[LogSignal] = []
    for signal in case.signals:
        match = _QUOTED.search(signal.text) if signal.kind == "sign" and signal.owner == "error_line" else None
        if match and not _CONSEQUENCES.fullmatch(match["type"]) and not case.went_on_after(signal):
            signal.groups.update(type=match["type"], message=match["message"].strip("\"'() "))
            quoted.append(signal)
    return quoted


def _untyped_errors(case: DiagnosisCase) -> list[LogSignal]:
    """Return messages below a stack of calls, without an exception's type, if a launcher reports a failure later."""
    reports = [s for s in case.signals if s.kind == "sign" and s.owner == "launcher_report" and not case.survived(s)]
    return [s for s in case.facts("untyped_error") if any(r.file == s.file and r.line > s.line for r in reports)]


def _explain(case: DiagnosisCase, candidate: CandidateCause, first: LogSignal) -> None:
    """Set cause, remedy and test of an exception, by its family; say what follows it only if something does."""
    what = _what(first)
    ours = first.emitter == "allranks" or first.groups.get("known") == "true"
    family = None if ours else family_of(what)
    where, own = "", own_place(first)
    if first.frames:
        raised = first.places[-1] if first.places else first.frames[-1].replace(":", ", ", 1)
        where = f" It was raised in {raised}" + (f", called from {own}." if own and own != raised else ".")
    after = " What follows it is the shutdown of the other processes." if _is_followed(case, first) else ""
    means = f" {family.means}" if family else ""
    candidate.cause = f"The program raised {what[:200].rstrip('. ')}.{where}{means}{after}"
    if family is not None:
        candidate.title = f"an exception of the program: {family.title}"
        candidate.fix, candidate.next_test = family.fix, family.next_test


def own_place(signal: LogSignal) -> str:
    """Return the program's own innermost line in a traceback, ``file:line in function``; empty if there is none."""
    own = (p for p in reversed(signal.places) if not is_library_file(p) and "/allranks/" not in p)
    return next(own, "")


def _is_followed(case: DiagnosisCase, first: LogSignal) -> bool:
    """Return whether reports of other processes' ends follow an exception."""
    return any(
        s.line > first.line
        for name in ("step_over", "srun_exit", "agent_failed", "agent_root")
        for s in case.facts(name)
        if s.file == first.file
    ) or any(s.file != first.file for s in case.signals if s.kind == "sign")


def is_own_exception(signal: LogSignal) -> bool:
    """Return whether the process raised this exception itself, and not because another process ended."""
    name = signal.groups.get("inner") or signal.groups.get("type", "")
    builds = name == "CalledProcessError" and _BUILD_TOOL.search(signal.text) is not None
    return (
        bool(name)
        and name[0].isupper()
        and (builds or not _CONSEQUENCES.fullmatch(name))
        and not name.endswith("Warning")
        and signal.text.count(" ") < 80
        and '"echo":true' not in signal.text
        and not _TERMINATED.search(signal.text)
    )


def _after_lost_peer(case: DiagnosisCase, signal: LogSignal) -> bool:
    """Return whether the same rank had already reported a lost peer in the same file, so that this is a consequence."""
    echo = case.candidates.get("peer_died_first")
    return echo is not None and any(
        (e.file, e.rank) == (signal.file, signal.rank) and e.line <= signal.line for e in echo.signals
    )


def _what(signal: LogSignal) -> str:
    name = signal.groups.get("inner") or signal.groups["type"]
    return name + (f": {signal.groups['message']}" if signal.groups.get("message") else "")


_CANNOT_OPEN = re.compile(
    r"cannot be opened|(?:cannot|can't|could not|unable to|failed to) (?:open|create)\b|Parent directory .{1,300} does not exist",
    re.IGNORECASE,
)
# Functions that write a checkpoint, by file and name.
_WRITERS = re.compile(
    r":(?:_?open_zipfile_writer\w*|_save|save|save_\w+|_save_\w+|write_\w+|dump|to_\w+file)$", re.IGNORECASE
)
_READERS = re.compile(r":(?:_?open_zipfile_reader\w*|_?load|load_\w+|_load_\w+|from_pretrained)$", re.IGNORECASE)
NEAR_FRAMES = 5


def detect_unwritable_output(case: DiagnosisCase) -> None:
    """Propose `output_not_writable` if a function that writes could not open a file; the message does not say so."""
    if {"disk_full", "output_not_writable"} & case.candidates.keys():
        return
    for signal in case.facts("exception"):
        frames = signal.frames[-NEAR_FRAMES:]
        writes = any(map(_WRITERS.search, frames)) and not any(map(_READERS.search, frames))
        if writes and _CANNOT_OPEN.search(signal.groups.get("message", "")) and not case.survived(signal):
            candidate = case.propose("output_not_writable", LIKELY, [signal])
            candidate.cause = (
                f"A file could not be opened for writing: {signal.groups['message'][:200].rstrip('. ')}. Its folder "
                "does not exist or is not writable on that node, or the file system or a quota is full."
            )
            candidate.next_test = (
                "touch a file in that folder from within a job step on each node; df -h, df -i and quota -s of it"
            )


class ExceptionFamily(NamedTuple):
    """Exceptions with one kind of remedy, by a pattern of ``Type: message``."""

    title: str
    pattern: str
    means: str
    fix: str
    next_test: str


FAMILIES: tuple[ExceptionFamily, ...] = (
    ExceptionFamily(
        "too many open files",
        r"too many open files|\bEMFILE\b|\bENFILE\b|\[Errno 2[34]\]|received 0 items of ancdata",
        "The process reached its limit of open file descriptors (sockets of the ranks, data workers, shards).",
        (
            "Raise the limit where the job starts (ulimit -n 65536), use fewer data workers, or "
            "torch.multiprocessing.set_sharing_strategy('file_system')."
        ),
        "inside the step: ulimit -n; ls /proc/<pid>/fd | wc -l while it runs",
    ),
    ExceptionFamily(
        "a checkpoint does not fit the model",
        r"size mismatch for|Error\(s\) in loading state_dict|(missing|unexpected) key\(s\)|Missing key in checkpoint"
        r"|shape mismatch.{0,40}(checkpoint|param|weight)|checkpoint.{0,80}(shape|size|world.?size|mismatch"
        r"|parallel)|loaded state dict|mismatched_sizes|Unexpected key\(s\)",
        "Names or shapes in the checkpoint differ from those of the model that was built: another configuration, "
        "vocabulary, adapter rank, library version or number of shards.",
        "Build the model from the configuration that is saved with the checkpoint; resize embeddings as in the "
        "training run; convert sharded checkpoints before loading them on another number of ranks.",
        (
            "compare the keys and shapes of both: {k: v.shape for k, v in torch.load(path, "
            "map_location='meta').items()} and model.state_dict()"
        ),
    ),
    ExceptionFamily(
        "a checkpoint cannot be read",
        r"Weights only load failed|invalid header or archive is corrupted|failed finding central directory"
        r"|PytorchStreamReader|UnpicklingError|HeaderTooLarge|MetadataIncompleteBuffer|safetensors.{0,60}(error"
        r"|invalid|corrupt|rust)|incomplete metadata",
        (
            "The file is truncated or damaged, is a Git LFS pointer, holds objects that torch does not load by "
            "default, or was written by another version."
        ),
        (
            "Check size and hash against the source, download or copy it again; for trusted files with Python objects "
            "pass weights_only=False."
        ),
        "ls -l and sha256sum of the file on each node; head -c 200 of it shows an LFS pointer",
    ),
    ExceptionFamily(
        "the GPU or the build does not support an operation",
        r"no kernel image is available|hipErrorNoBinaryForGpu|compute capability|CUDA capability|sm_\d+|only supports? (Ampere"
        r"|Hopper|A100|H100)|bfloat16.{0,60}(not supported|support)|bf16.{0,40}(not|require|support)|fp8.{0,60}(not"
        r"|require|support)|not implemented for '|FlashAttention.{0,60}(only|support|require)|device kernel image is invalid"
        r"|PTX.{0,40}(unsupported|toolchain)",
        "This build, kernel or data type does not run on this GPU generation or device.",
        "Install a build for this architecture (TORCH_CUDA_ARCH_LIST when compiling), or choose another data type or "
        "attention implementation (fp16, sdpa).",
        "python -c 'import torch; print(torch.cuda.get_device_capability(), torch.cuda.get_arch_list())' on that node",
    ),
    ExceptionFamily(
        "a value is not finite",
        r"\b(nan|inf|non-?finite|not finite|overflow)\b.{0,60}(loss|grad|norm|value|found|detected|scale|probab"
        r"|logit)?|(loss|grad\w*|norm|value|scale|probability tensor).{0,60}\b(nan|inf|infinite|non-?finite)\b"
        r"|FloatingPointError|minimum loss scale|Current loss scale already at minimum",
        "The loss, a gradient or a probability became NaN or infinite, and the program stops on it.",
        "Go back to a checkpoint before that step; lower the learning rate, clip gradients, use bfloat16 instead of "
        "float16, and check the data of that step.",
        "run the steps before it again with torch.autograd.set_detect_anomaly(True), and print the loss of each rank",
    ),
    ExceptionFamily(
        "an extension or a kernel could not be built",
        r"Error (building|compiling)|Failed to (build|compile)|ninja|nvcc|hipcc|\bgcc\b|\bg\+\+|CUDA_HOME|CalledProcessError.{0,120}(ninja"
        r"|nvcc|gcc|cmake|make)|CppCompileError|Unsupported (gcc|compiler|gpu arch)|CompilationError|InductorError"
        r"|BackendCompilerFailed|CompilerError|PTXAS|triton.{0,40}(compil|error)|lower(ing)? (error|exception)"
        r"|LoweringException",
        "A C++/CUDA extension or a generated kernel did not compile: no compiler or headers in this environment, "
        "versions that do not fit, or two ranks that build in one folder.",
        "Load a compiler and the CUDA toolkit of torch's version (torch.version.cuda), build once before the run, set "
        "TORCH_EXTENSIONS_DIR or TRITON_CACHE_DIR to a local folder; or disable the fused kernel or torch.compile.",
        "inside the step: which gcc nvcc ninja; nvcc --version; python -c 'import torch; print(torch.version.cuda)'",
    ),
    ExceptionFamily(
        "versions of libraries do not fit",
        r"unexpected keyword argument|got multiple values for|takes \d+ positional|missing \d+ required (positional"
        r"|keyword)|has no attribute|cannot import name|undefined symbol|requires .{0,40}(version|>=|<=|==)"
        r"|version.{0,40}(mismatch|required|not support|incompatible|conflict)|VersionConflict|ABI|deprecated"
        r"|removed in|is not available in this version|was not found.{0,20}version|circular import",
        (
            "The code calls a name or an argument that this version of a library does not have, or binary interfaces "
            "differ."
        ),
        (
            "Install the versions that the program was written for (its lock or requirements file), the same on every "
            "node."
        ),
        (
            "pip list on each node, compared with the requirements; python -c 'import <library>; "
            "print(<library>.__version__, <library>.__file__)'"
        ),
    ),
    ExceptionFamily(
        "a parallel layout does not fit the number of ranks",
        r"(world.?size|ranks?|tensor.{0,10}parallel|pipeline.{0,10}parallel|\btp\b|\bpp\b|\bdp\b|\bcp\b|expert).{0,80}(divisib"
        r"|must|equal|mismatch|not match|greater|less|does not|invalid|exceed)|mesh.{0,40}(size|shape|dim)"
        r"|not enough (ranks|gpus|devices)",
        "The product of the parallel sizes, or a size of the model, does not fit the number of ranks.",
        (
            "Choose data, tensor and pipeline sizes whose product is the number of ranks, and that divide heads, "
            "layers and batch."
        ),
        "allranks plan SPEC shows the layout; print WORLD_SIZE at the start of the program",
    ),
    ExceptionFamily(
        "a file or folder is not there",
        r"FileNotFoundError|\[Errno 2\]|No such file|does not exist|NotADirectoryError|IsADirectoryError|\[Errno 2[01]\]",
        "A path does not exist where this rank runs.",
        "Check the path on that node: a shared file system that is not mounted, a relative path with another working "
        "directory, or a file that another rank has not written yet.",
        "srun --ntasks-per-node=1 ls -ld <path> on all nodes of the job",
    ),
)


def family_of(text: str) -> ExceptionFamily | None:
    """Return the family of ``Type: message``, or None."""
    return next((family for family in FAMILIES if re.search(family.pattern, text, re.IGNORECASE)), None)
