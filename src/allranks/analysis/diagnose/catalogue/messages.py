"""Patterns of messages other than failures: job facts (ranks, transports), progress, harmless warnings with reasons."""

from __future__ import annotations

from msgspec import Struct

from allranks.analysis.diagnose.catalogue.signs import COMPLETION_PATTERNS, ENDED_PATTERNS
from allranks.analysis.diagnose.patterns import Pattern, certain
from allranks.analysis.stacks import FILE_LINE, THREAD_LINE

# name: patterns; the groups of a match are kept by name
_FACTS: dict[str, str | tuple[Pattern, ...]] = {
    "watchdog": r"(?:Watchdog caught collective operation timeout|collective operation timeout)(?:: (?P<work>.*))?",
    "work": r"^\W*(?:WorkNCCL\(|Operation: )(?P<work>.*)",
    "told_to_dump": r"(?:dump signal|signal to dump|Another rank reported).{0,80}",
    "dump_path": r"(?:debug info|flight recorder|trace buffer|dump(?:ed|ing)?)\b[^/]{0,80}?(?P<path>/[\w./-]{3,})",
    "pg_status": r"last enqueued (?:NCCL )?work: (?P<enqueued>-?\d+), (?:last started (?:NCCL )?work: -?\d+, )?last completed (?:NCCL )?work: (?P<completed>-?\d+)",
    "frame": FILE_LINE,
    "stack": certain(
        Pattern(
            r"^\s+(?P<function>[\w<>.:]+) \((?P<path>[^()\s]+\.(?:pyx?|so[.\d]*|cpp)):?\d*\)\s*$",
            ".py:|.py)|.pyx:|.pyx)|.so.|.so:|.so)|.cpp:|.cpp)",
        )
    ),
    "fr_frame": r"^#\d+ (?P<function>\S+) from (?P<path>\S+):\d+",
    "stack_head": THREAD_LINE,
    "dump_head": r"^=== Rank (?P<rank>\d{1,6}): https?://(?P<host>[\w.-]+):\d+/handler/dump_traceback",
    "exception": certain(
        Pattern(
            r"^\s*(?:[\w.-]+(?:\[\d+\])?: )?(?:[\w<>]+\.)*(?P<type>(?:\w+(?:Error|Exception|Interrupt|Exit|Failure|Timeout|Expired|NotFound|Refused|Abort)|Exception|(?<=\.exc\.)[A-Z]\w+|(?<=\.errors\.)[A-Z]\w+|(?<=\.exceptions\.)[A-Z]\w+))(?:\((?P<inner>\w+)\))?(?:: (?P<message>.*))?\s*$",
            "*error|*exception|*interrupt|*exit|*failure|*timeout|*expired|*notfound|*refused|*abort|exc.|errors.|"
            "exceptions.",
        )
    ),
    # Python prints exceptions that it ignores, most often while an interpreter ends
    "ignored": r"^\s*Exception ignored in\b",
    "event_start": r'^\{"event": ?"start"',
    "event_error": r'^\{"event": ?"error"(?=.*?"type": ?"(?P<type>\w+)")(?=(?:.*"known": ?(?P<known>true))?)'
    r'.*?"message": ?"(?P<message>(?:[^"\\]|\\.)*)"',  # in any order
    "event_hang": r'^\{"event": ?"hang".*?"kind": ?"(?P<kind>\w+)","host":(?:null|"(?P<host>[^"]*)"),"ranks":\[(?P<ranks>[\d,]*)\].*?"message": ?"(?P<message>(?:[^"\\]|\\.)*)',
    "agent_field": r"^\s*(?P<field>time|host|rank|exitcode|error_file|traceback)\s+: (?P<value>.+?)\s*$",
    "agent_failed": r"failed \(exitcode: (?P<code>-?\d+)\)",
    "agent_root": r"Root Cause \(first observed failure\)",
    "srun_exit": r"srun: error: (?P<host>[\w.-]+): tasks? (?P<tasks>[\d,\-\[\]]+): (?P<how>.+)",
    "step_over": r"srun: (?:Job step aborted|Terminating|got SIGCONT|forcing)|Killing subprocess|sending process \d+ closing signal|closing signal SIG",
    "comm_init": certain(
        r"ncclCommInitRank\w* comm \S+ rank (?P<rank>\d+) nranks (?P<nranks>\d+)",
        r"comm \S+ rank (?P<rank>\d+) nranks (?P<nranks>\d+)",
    ),
    "comm_ready": r"- Init COMPLETE",
    "channel": r"(?:Channel|Ring) \S+(?: ?: | : )?\s*\d+\[\w+\] -> \d+\[\w+\](?: \[(?:send|receive)\])? via (?P<via>[\w/]+)",
    "network": certain(r"Using network (?P<net>[\w/-]+)", r"(?:Initialized|Assigned) NET plugin (?P<net>[\w-]+)"),
    "net_device": r"NET/(?P<net>\w+)\s*: Using (?P<devices>.+)",
    "bootstrap": r"Bootstrap ?: Using (?:\[\d+\])?(?P<interface>[\w.@-]+):(?P<address>[^<\s]+)",
    "address": certain(
        r"\b(?P<host>[A-Za-z][\w.-]*) proj=.{0,200} net=[\w.@:-]+/(?P<address>[\d.]+|[\da-f:]+)",
        r"\bnode \d+ = (?P<host>\S+) \S+ (?P<address>[\d.]+|[\da-f:]+): ranks",
    ),
    "no_ib": certain(r"NET/IB ?: No device found", r"Failed to open libibverbs"),
    "ib_failed": r"(?:ibv_open_device failed|NET/IB ?: Unable to open device|Call to ibv_\w+ failed|Failed to initialize NET plugin IB)",
    "nccl_env": r"(?P<name>NCCL_\w+) set (?:by environment )?to (?P<value>.+?)\.?\s*$",
    "nccl_version": r"NCCL version (?P<version>[\d.]+\+?[\w.]*)",
    "torch_version": r"\b(?:torch|pytorch)(?: version)?[\"']?\s*[:=]+\s*[\"']?(?P<version>\d+\.\d+[\w.+]*)",
    "driver_version": r"(?:cudaDriverVersion|Driver Version:) ?(?P<version>[\d.]+)",
    "channels": r"(?P<channels>\d+) coll channels",
    "nodes": r"\bnNodes (?P<nodes>\d+)|nnodes[= ](?P<nodes2>\d+)",
    "world": r"\bworld[_ ]?size['\"]?\s*[:=]+\s*(?P<world>\d+)",
    "saving": certain(
        Pattern(
            r"(?:saving|writing|storing) (?:\w+ ){0,4}(?:checkpoint|state|model|shard|optimizer|weights)|save_checkpoint|\bcheckpoint(?:ing)? (?:to|at|started|begin)|(?:loading|restoring) (?:\w+ ){0,3}checkpoint(?! shards)",
            unless="initialized from",
        )
    ),
    "saved": r"(?:checkpoint|model|state|weights)\b.{0,60}\b(?:saved|complete|finished|done|took)|(?:saved|finished saving|wrote) .{0,40}(?:checkpoint|model|state)",
    "optimizer": r"\boptimizer\.step\b|_multi_tensor_\w+|torch/optim/|_foreach_\w+|exp_avg|optim(?:izer)?\.py|initialize_optimizer_states|_optimizer_step|accelerate/optimizer",
    "done": COMPLETION_PATTERNS,
    "ended": ENDED_PATTERNS,
    "oom_sizes": r"Tried to allocate (?P<want>[\d.]+ \w+).*?(?:capacity of (?P<capacity>[\d.]+ \w+).*?)?(?P<free>[\d.]+ \w+) (?:is )?free",
    "oom_process": certain(
        r"Killed process \d+ .{0,80}\banon-rss:\s?(?P<rss>\d+ ?kB)",
        r"\bMaxRSS\b.{0,40}\d+ ?[KMG]|\bmemory: usage \d+ ?kB, limit (?P<limit>\d+ ?kB)",
    ),
    "verified": r"Verification: \*\*\*PASSED|Job \d+ to start at|Granted job allocation|Submitted batch job",
}
FACT_PATTERNS = {name: certain(pattern) if isinstance(pattern, str) else pattern for name, pattern in _FACTS.items()}
# Facts that occur thousands of times: they are counted, and only the first line is parsed.
COUNTED_FACTS = frozenset({"channel", "comm_ready"})
# A line that shows training progress.
PROGRESS_PATTERN = Pattern(
    r"(?:\b(?:steps?|iter(?:ation)?s?|epoch|batch(?:es)?)\b[^a-z]{0,12}\d.{0,200}?(?:loss|it/s|s/it|tokens|samples|throughput|grad|lr\b|ms\b|elapsed)"
    r"|\bloss\b[^a-z]{0,6}\d|\d ?(?:it/s|s/it|samples/s|tokens/s|tok/s|ima?ge?s?/s|steps/s)|'loss': '?\d|iteration +\d+/ *\d+ *\||\bEpoch:? \[?\d+\]?[ /\[]|\b(?:train|val|eval|test)\w*[_ ]loss\W{1,4}\d|^\s*\d{1,12}\s+\d{1,12}\s+(?:u?int\d+|float|half|bfloat\d+|double|fp\d\w*|f\d\w*)\s+\w+\s+-?\d+\s+[\d.]+\s+[\d.]+)",
    "loss|*_loss|it/s|s/it|samples|tokens|tok/s|float|half|bfloat|double|img/s|imgs/s|images/s|steps/s|throughput|"
    "elapsed|grad|lr=|iteration|epoch",
    unless=r"(?:Loading|Fetching|Download\w*|Map\b|Filter\w*|Generating \w+ split|Tokeniz\w*|Resolving|Extract\w*|Casting|Converting|Packing|Preprocess\w*|Materializ\w*|Captur\w*|Encod\w*|Embedd\w*|Scann\w*|Reading|Pars\w*|Build\w*|Creat\w*|Copying|Upload\w*|Index\w*|Verify\w*|Check\w*|Quantiz\w*|Compil\w*|Cach\w*|Group\w*|Shuffl\w*|Format\w*|Shard\w*|(?:Process|Prepar|Initializ|Comput)\w*(?![^|]{0,80}(?:train|epoch|step|iter))|Running tokenizer)\b[^|]{0,80}:? +\d+%",
)


class BenignMessage(Struct, frozen=True, kw_only=True):
    """A harmless message. A failure class takes precedence over a ``general`` message on the same line."""

    id: str
    why: str
    patterns: tuple[Pattern, ...]
    general: bool = False


_MESSAGES = (
    BenignMessage(
        id="deprecation_warning",
        why="A notice about a future version; there is no error now.",
        patterns=certain(
            Pattern(r"(Future|Deprecation|PendingDeprecation|User)Warning\b", "*warning"),
            r"\b(is|are|being) deprecated\b",
        ),
        general=True,
    ),
    BenignMessage(
        id="deepspeed_hostfile",
        why="DeepSpeed found no host file and uses this node alone; this is normal under torchrun.",
        patterns=certain(r"Unable to find hostfile"),
    ),
    BenignMessage(
        id="omp_threads",
        why="torchrun sets one thread per rank by default.",
        patterns=certain(r"Setting OMP_NUM_THREADS environment variable for each process"),
    ),
    BenignMessage(
        id="unused_parameters_search",
        why="DDP searched for unused parameters and found none; this only costs time.",
        patterns=certain(r"did not find any unused parameters"),
    ),
    BenignMessage(
        id="nccl_plugin_absent",
        why="An optional plugin is not installed; NCCL uses its internal one.",
        patterns=certain(
            r"(No plugin found|Could not find:? .{0,80}(net|tuner|profiler|env)|Using internal (network|tuner|net) plugin|using internal implementation)"
        ),
    ),
    BenignMessage(
        id="group_not_destroyed",
        why="The program ended without destroy_process_group(): a resource leak at exit, not a failure.",
        patterns=certain(r"destroy_process_group\(\) was not called|process group has NOT been destroyed"),
    ),
    BenignMessage(
        id="nccl_abort_complete",
        why="A communicator was destroyed; this is normal after destroy_process_group.",
        patterns=certain(r"- (Abort|Destroy) COMPLETE"),
    ),
    BenignMessage(
        id="barrier_device_guess",
        why="A barrier without device_ids uses a device guessed from the rank; it hangs only if the guess is wrong.",
        patterns=certain(
            r"using GPU \d+ (to perform barrier|as device used by this process is currently unknown)|barrier\(\): using the device under current context"
        ),
    ),
    BenignMessage(
        id="xid_cleanup",
        why="The driver reports Xid 45 when it cleans up after an ended process; Xid 43 alone is caused by a program.",
        patterns=certain(Pattern(r"\bXid\b\s*(?:\([^)]*\))?\s*:?\s*45\b", unless="previous Xid")),
    ),
    BenignMessage(
        id="sxid_nonfatal", why="A non-fatal NVSwitch event.", patterns=certain(r"\bSXid\b.{0,80}non.?fatal")
    ),
    BenignMessage(
        id="clone_fallback",
        why="FSDP could not copy one entry of a state dict and uses the entry itself: training is not affected, but "
        "the saved tensor may contain data of another tensor. Load that checkpoint and compare it before you use it.",
        patterns=certain(r"Failed to clone\(\)? (the )?tensor"),
    ),
    BenignMessage(
        id="tokenizers_fork",
        why="The tokenizers library uses one thread after a fork.",
        patterns=certain(r"huggingface/tokenizers: The current process just got forked"),
    ),
    BenignMessage(
        id="uninitialised_head",
        why="A new head on a pretrained model starts with random weights; this is expected.",
        patterns=certain(
            Pattern(
                r"Some weights of .{0,120} were not (initialized|used)",
                unless="ForCausalLM|LMHead|ForConditionalGeneration",
            )
        ),
    ),
    BenignMessage(
        id="factory_registered_twice",
        why="TensorFlow or JAX registers the CUDA libraries that torch has registered; this has no effect on training.",
        patterns=certain(r"Unable to register cu(DNN|FFT|BLAS|SOLVER) factory"),
    ),
    BenignMessage(
        id="login_environment",
        why="A note about the environment of a login session, which a batch job does not need.",
        patterns=certain(
            r"XDG_RUNTIME_DIR (is )?(not set|invalid)|not a git repository \(or any|from LD_PRELOAD cannot be preloaded .{0,120}\bignored\b"
        ),
    ),
    BenignMessage(
        id="ras_mismatch",
        why="NCCL's RAS reports ranks that are one operation apart; a snapshot of a running job nearly always does.",
        patterns=certain(r"(RAS|MISMATCH).{0,120}(operation|collective) counts?"),
    ),
)
BENIGN_MESSAGES: dict[str, BenignMessage] = {entry.id: entry for entry in _MESSAGES}
