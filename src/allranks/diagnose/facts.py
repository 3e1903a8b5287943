"""What the logs tell beside failures: who is who, which path the data takes, what was running. Patterns without a class."""

from __future__ import annotations

from allranks.diagnose.catalogue.entry import Pattern

# name: patterns; the groups of a match are kept by name
FACTS: dict[str, tuple[Pattern, ...]] = {
    "watchdog": (
        Pattern(
            r"(?:Watchdog caught collective operation timeout|collective operation timeout)(?:: (?P<work>.*))?",
            "operation timeout",
        ),
    ),
    "work": (Pattern(r"^\W*(?:WorkNCCL\(|Operation: )(?P<work>.*)", "worknccl", "operation: "),),
    "told_to_dump": (
        Pattern(
            r"(?:dump signal|signal to dump|Another rank reported).{0,80}",
            "dump signal",
            "signal to dump",
            "another rank reported",
        ),
    ),
    "pg_status": (
        Pattern(
            r"last enqueued (?:NCCL )?work: (?P<enqueued>-?\d+), (?:last started (?:NCCL )?work: -?\d+, )?last completed (?:NCCL )?work: (?P<completed>-?\d+)",
            "last completed",
        ),
    ),
    "frame": (Pattern(r'^\s*File "(?P<path>[^"]+)", line \d+(?:,? in (?P<function>\S+))?', 'file "'),),
    "stack": (
        Pattern(
            r"^\s+(?P<function>[\w<>.:]+) \((?P<path>[^()\s]+\.(?:pyx?|so[.\d]*|cpp)):?\d*\)\s*$",
            ".py:",
            ".py)",
            ".pyx:",
            ".pyx)",
            ".so.",
            ".so:",
            ".so)",
            ".cpp:",
            ".cpp)",
        ),
    ),
    "fr_frame": (Pattern(r"^#\d+ (?P<function>\S+) from (?P<path>\S+):\d+", " from "),),
    "stack_head": (
        Pattern(
            r"^\s*(?:Current thread|Thread) (?:0x)?[0-9A-Fa-f]+\b.*(?:active|idle|most recent call first|MainThread)",
            "thread ",
        ),
    ),
    "exception": (
        Pattern(
            r"^\s*(?:[\w.-]+(?:\[\d+\])?: )?(?:[\w<>]+\.)*(?P<type>(?:\w+(?:Error|Exception|Interrupt|Exit|Failure|Timeout|Expired|NotFound|Refused)|Exception))(?:: (?P<message>.*))?\s*$",
            "*error",
            "*exception",
            "*interrupt",
            "*exit",
            "*failure",
            "*timeout",
            "*expired",
            "*notfound",
            "*refused",
        ),
    ),
    "event_start": (Pattern(r'^\{"event": ?"start"', '"event"'),),
    "event_error": (
        Pattern(
            r'^\{"event": ?"*error".*?"type": ?"(?P<type>\w+)".*?"message": ?"(?P<message>(?:[^"\\]|\\.)*)', '"event"'
        ),
    ),
    "event_hang": (
        Pattern(
            r'^\{"event": ?"hang".*?"kind": ?"(?P<kind>\w+)","host":(?:null|"(?P<host>[^"]*)"),"ranks":\[(?P<ranks>[\d,]*)\].*?"message": ?"(?P<message>(?:[^"\\]|\\.)*)',
            '"event"',
        ),
    ),
    "agent_field": (
        Pattern(
            r"^\s*(?P<field>time|host|rank|exitcode|error_file|traceback)\s+: (?P<value>.+?)\s*$",
            "time ",
            "host ",
            "rank ",
            "exitcode ",
            "error_file ",
            "traceback ",
        ),
    ),
    "agent_failed": (Pattern(r"failed \(exitcode: (?P<code>-?\d+)\)", "exitcode"),),
    "agent_root": (Pattern(r"Root Cause \(first observed failure\)", "root cause"),),
    "srun_exit": (
        Pattern(r"srun: error: (?P<host>[\w.-]+): tasks? (?P<tasks>[\d,\-\[\]]+): (?P<how>.+)", "srun: error"),
    ),
    "step_over": (
        Pattern(
            r"srun: (?:Job step aborted|Terminating|got SIGCONT|forcing)|Killing subprocess|sending process \d+ closing signal|closing signal SIG",
            "step aborted",
            "terminating",
            "sigcont",
            "forcing",
            "killing subprocess",
            "closing signal",
        ),
    ),
    "comm_init": (
        Pattern(r"ncclCommInitRank\w* comm \S+ rank (?P<rank>\d+) nranks (?P<nranks>\d+)", "ncclcomminit"),
        Pattern(r"comm \S+ rank (?P<rank>\d+) nranks (?P<nranks>\d+)", "nranks"),
    ),
    "comm_ready": (Pattern(r"- Init COMPLETE", "init complete"),),
    "channel": (
        Pattern(
            r"(?:Channel|Ring) \S+(?: ?: | : )?\s*\d+\[\w+\] -> \d+\[\w+\](?: \[(?:send|receive)\])? via (?P<via>[\w/]+)",
            " via ",
        ),
    ),
    "network": (
        Pattern(r"Using network (?P<net>[\w/-]+)", "using network"),
        Pattern(r"(?:Initialized|Assigned) NET plugin (?P<net>[\w-]+)", "net plugin"),
    ),
    "net_device": (Pattern(r"NET/(?P<net>\w+)\s*: Using (?P<devices>.+)", " using"),),
    "bootstrap": (
        Pattern(r"Bootstrap ?: Using (?:\[\d+\])?(?P<interface>[\w.@-]+):(?P<address>[^<\s]+)", "bootstrap"),
    ),
    "address": (
        Pattern(r"\b(?P<host>[A-Za-z][\w.-]*) proj=.{0,200} net=[\w.@:-]+/(?P<address>[\d.]+|[\da-f:]+)", "proj="),
        Pattern(r"\bnode \d+ = (?P<host>\S+) \S+ (?P<address>[\d.]+|[\da-f:]+): ranks", ": ranks"),
    ),
    "no_ib": (
        Pattern(r"NET/IB ?: No device found", "no device found"),
        Pattern(r"Failed to open libibverbs", "failed to open libibverbs"),
    ),
    "ib_failed": (
        Pattern(
            r"(?:ibv_open_device failed|NET/IB ?: Unable to open device|Call to ibv_\w+ failed|Failed to initialize NET plugin IB)",
            "ibv_open_device",
            "unable to open device",
            "call to ibv_",
            "failed to initialize",
        ),
    ),
    "nccl_env": (Pattern(r"(?P<name>NCCL_\w+) set (?:by environment )?to (?P<value>.+?)\.?\s*$", "nccl_"),),
    "nccl_version": (Pattern(r"NCCL version (?P<version>[\d.]+\+?[\w.]*)", "nccl version"),),
    "torch_version": (
        Pattern(r"\b(?:torch|pytorch)(?: version)?[\"']?\s*[:=]+\s*[\"']?(?P<version>\d+\.\d+[\w.+]*)", "torch"),
    ),
    "driver_version": (
        Pattern(r"(?:cudaDriverVersion|Driver Version:) ?(?P<version>[\d.]+)", "cudadriverversion", "driver version"),
    ),
    "channels": (Pattern(r"(?P<channels>\d+) coll channels", "coll channels"),),
    "nodes": (Pattern(r"\bnNodes (?P<nodes>\d+)|nnodes[= ](?P<nnodes>\d+)", "nnodes"),),
    "peer_to_peer": (Pattern(r"isAllDirectP2p (?P<direct>\d)", "isalldirectp"),),
    "world": (Pattern(r"\bworld[_ ]?size['\"]?\s*[:=]+\s*(?P<world>\d+)", "world_size", "world size", "worldsize"),),
    "saving": (
        Pattern(
            r"(?:saving|writing|storing) (?:\w+ ){0,4}(?:checkpoint|state|model|shard|optimizer|weights)|save_checkpoint|\bcheckpoint(?:ing)? (?:to|at|started|begin)|(?:loading|restoring) (?:\w+ ){0,3}checkpoint",
            "saving",
            "writing",
            "storing",
            "save_checkpoint",
            "checkpoint",
            "loading",
            "restoring",
        ),
    ),
    "saved": (
        Pattern(
            r"(?:checkpoint|model|state|weights)\b.{0,60}\b(?:saved|complete|finished|done|took)|(?:saved|finished saving|wrote) .{0,40}(?:checkpoint|model|state)",
            "saved",
            "complete",
            "finished",
            "done",
            "took",
            "wrote",
        ),
    ),
    "optimizer": (
        Pattern(
            r"\boptimizer\.step\b|_multi_tensor_\w+|torch/optim/|_foreach_\w+|exp_avg|optim(?:izer)?\.py|initialize_optimizer_states|_optimizer_step|accelerate/optimizer",
            "optimizer",
            "_multi_tensor",
            "torch/optim",
            "_foreach_",
            "exp_avg",
            "optim",
        ),
    ),
    "loading": (Pattern(r"Loading checkpoint shards|loading (?:the )?(?:model|weights)", "loading"),),
    "done": (
        Pattern(
            r"train_runtime|(?:training|run|job|test|benchmark) (?:has )?(?:complete[d]?|finished|succeeded|done|ended well)\b|all \d+ ranks ended well|Avg bus bandwidth",
            "train_runtime",
            "complete",
            "finished",
            "succeeded",
            "done",
            "ended well",
            "avg bus bandwidth",
        ),
    ),
    "oom_sizes": (
        Pattern(r"Tried to allocate (?P<want>[\d.]+ \w+).*?(?P<free>[\d.]+ \w+) (?:is )?free", "tried to allocate"),
    ),
    "verified": (
        Pattern(
            r"Verification: \*\*\*PASSED|Job \d+ to start at|Granted job allocation|Submitted batch job",
            "passed",
            "to start at",
            "granted job",
            "submitted batch",
        ),
    ),
}
# Facts that come by the thousand: counted by their form, only the first line is looked at.
COUNTED = frozenset({"channel", "comm_ready"})
# A line that shows that the training goes on.
PROGRESS = Pattern(
    r"(?:\b(?:step|iter(?:ation)?|epoch|batch)\b[^a-z]{0,12}\d.{0,200}?(?:loss|it/s|s/it|tokens|samples|throughput|grad|lr\b|ms\b|elapsed)|\bloss\b[^a-z]{0,6}\d|\d(?:it/s|s/it|samples/s)|'loss': \d)",
    "loss",
    "it/s",
    "s/it",
    "samples",
    "tokens",
    "throughput",
    "elapsed",
    "grad",
    "lr=",
)
