"""Failure classes of collectives: the first one, mismatched calls, checkpoints, hangs, and effects on other ranks."""

from __future__ import annotations

from allranks.analysis.diagnose.patterns import NETWORK, PROGRAM, FailureClass, Pattern, certain, likely, possible

CLASSES: tuple[FailureClass, ...] = (
    FailureClass(
        id="first_collective_failed",
        emitters=PROGRAM,
        title="the first collective never finished, or returned no data",
        cause="The very first communication between the ranks failed. A report that a rank has 0 parameters is a "
        "consequence of this, not a difference between models. "
        "Usual reasons: GPU peer-to-peer copies that IOMMU or PCIe ACS break, a network path that does not transfer "
        "data, a rank that is still in its setup, or one bad node.",
        fix="Find the broken pair first; then disable ACS/IOMMU on that host, or keep NCCL off that path "
        "(NCCL_P2P_LEVEL or NCCL_P2P_DISABLE=1 for PCIe cards, never on NVLink), or exclude the node.",
        next_test="allranks doctor --collectives copies and all-reduces between all pairs; or run once with "
        "NCCL_P2P_DISABLE=1: if that works, it is P2P",
        reference="https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting.html",
        patterns=certain(
            r"has (0|\d+) params, while rank \d+ has inconsistent 0 params",
            r"has 0 params, while rank \d+ has inconsistent \d+ params",
            r"^\s*(params, )?while rank \d+ has inconsistent 0 params",  # a message that was wrapped
        ),
        example="RuntimeError: DDP expects same model across all ranks, but Rank 5 has 291 params, while rank 4 has "
        "inconsistent 0 params.",
    ),
    FailureClass(
        id="model_differs_between_ranks",
        emitters=PROGRAM,
        title="ranks built different models",
        cause="Number or shapes of parameters differ between ranks, and no rank reports zero parameters: the ranks "
        "built different models.",
        fix="Build the model from one configuration on every rank: same code, files, seed and library versions, and no "
        "code that depends on the rank.",
        next_test="print the number and shapes of the parameters on each rank before wrapping; allranks run checks at "
        "step 0 that the weights are equal",
        reference="https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html",
        patterns=certain(
            r"has [1-9]\d* params, while rank \d+ has inconsistent [1-9]\d* params",
            r"^\s*(params, )?while rank \d+ has inconsistent [1-9]\d* params",  # a message that was wrapped
            r"params?\[\d+\] in this process with (sizes|strides) .* appears not to match",
            r"appears not to match (sizes|strides) of the same param in process",
        )
        + likely(
            r"(weights|parameters) (differ|are not equal|are different) (between|across|on) (all |the )?ranks",
            r"ranks? .{0,40}different (number|count|set)s? of (model )?param",
        ),
        example="RuntimeError: params[2] in this process with sizes [1024, 512] appears not to match sizes of the same "
        "param in process 0.",
    ),
    FailureClass(
        id="replicas_diverged",
        emitters=PROGRAM,
        title="the weights of a rank no longer equal those of its replicas",
        cause="Ranks that must hold the same weights do not: memory, a GPU or a processor has changed a value "
        "without an error, or the program updates the weights of only some ranks.",
        fix="Test the node of the named rank (GPU memory and ECC counters, dcgmi diag -r 3, memory test) and leave "
        "it out if it happens again there. If it happens on any node at the same step, the program is the reason.",
        next_test="start again with observe.verify_every: 1 from the last checkpoint: a fault of hardware does not "
        "come back at the same step",
        reference="https://arxiv.org/abs/2102.11245",
        patterns=certain(r"after step \d+ the weights of ranks? .{1,400} differ from .{1,80}\(observe\.verify_every\)"),
        example="after step 40 the weights of rank 1 on n2 differ from those of their replicas (observe.verify_every); "
        "they last agreed after step 30",
    ),
    FailureClass(
        id="collective_mismatch",
        emitters=PROGRAM,
        title="ranks are in different collectives",
        cause="The ranks do not make the same calls in the same order: a branch on the rank, a call on rank 0 alone, "
        "an early stop on only some ranks, or an uneven number of batches.",
        fix="Make every collective call on every rank: no collective inside `if rank == 0`, stop all ranks at the same "
        "step, equal batches per rank (drop_last, or Join).",
        next_test="run with TORCH_DISTRIBUTED_DEBUG=DETAIL, which prints the two calls; or compare the ranks' "
        "flight-recorder dumps",
        reference="https://docs.pytorch.org/docs/stable/distributed.html#debugging-torch-distributed-applications",
        patterns=certain(
            r"Detected mismatch between collectives on ranks",
            r"Rank \d+ is running \w+.*but Rank \d+ is running",
            r"Ranks? [\d, ]+failed to pass monitoredBarrier",
            r"Mismatched collective detected",
            r"(lagging|dead|mismatched).{0,12}(ranks?|mismatched) (ranks? )?that caused the desync",
            r"op\.preamble\.length <= op\.nbytes",
            r"there may be a mismatch in collective sizes",
            r"exhausted (all )?inputs.{0,40}(ranks|Throwing)",
            r"disagreement (error )?between rank ?\d+ and rank ?\d+",
            r"Cannot apply (the )?desired operation due to shape mismatches",
        )
        + likely(
            r"monitoredBarrier.{0,60}(timed out|received errors while waiting)",
            r"joined but didn'?t finish collective|didn'?t join collective",
            Pattern(r"(collective|rank).{0,40}\bdesync", unless=r"desync_debug|desync debug"),
            r"Collective (sizes?|types?|op|operation)s? mismatch|MatchState|collective type mismatch",
        )
        + possible(
            r"(barrier|broadcast|allreduce|all_reduce|allgather|all_gather|collective).{0,60}(only|just) (by|on|from) (rank ?0|some ranks|the main process)"
        ),
        example="RuntimeError: Detected mismatch between collectives on ranks. Rank 2 is running ALLREDUCE, but Rank 0 "
        "is running ALLGATHER",
    ),
    FailureClass(
        id="checkpoint_collective",
        emitters=PROGRAM,
        title="a collective of a checkpoint never finished",
        cause="Saving or loading a checkpoint is a collective in FSDP and DeepSpeed. Only some ranks called it, or it "
        "gathers the whole model over a path so slow that the timeout was reached.",
        fix="Call it on every rank and let only the write depend on the rank; save adapters or shards instead of the "
        "gathered model; raise the group's timeout only once the calls are known to match.",
        next_test="check whether each rank's stack is inside the save; or save once with sharded state "
        "(torch.distributed.checkpoint) and see whether it passes",
        reference="https://docs.pytorch.org/docs/stable/distributed.checkpoint.html",
        patterns=likely(
            r"(save|load|checkpoint|state_dict)\w*.{0,80}(only by rank ?0|only on rank ?0|only from rank ?0|all ranks must)",
            r"(timed? ?out|hang|hung|stuck).{0,60}(while|during|when|in|at) (the )?(sav|load|writ|gather)\w* (of )?(the )?(\w+ )?(checkpoint|state_?dict|shards)",
            r"checkpoint.{0,60}(timed out|hangs?\b|hung|stuck|deadlock)",
        ),
        example="ERROR gather of the checkpoint: checkpoint save timed out after 1800 s on rank 0",
    ),
    FailureClass(
        id="collective_hang",
        emitters=PROGRAM,
        title="ranks are stuck in communication; the log does not show why",
        cause="The ranks waited in a collective until the timeout. The log does not show whether a rank never reached "
        "the call (diverged, busy, dead) or the network transferred no data.",
        fix="Find the missing rank before raising a timeout: most such failures are caused by the program, and a "
        "longer timeout does not fix them.",
        next_test="run again with TORCH_FR_BUFFER_SIZE=2000 and compare the dumps of all ranks, or take py-spy dumps "
        "of all ranks during the hang",
        reference="https://docs.pytorch.org/tutorials/unstable/flight_recorder_tutorial.html",
        patterns=likely(r"waiting for (the )?remainder of ranks for more than \d+ seconds")
        + possible(
            r"Watchdog caught collective operation timeout",
            r"watchdog got stuck for \d+",
            r"Timed out waiting \d+\s*ms for (recv|send) operation",
            r"collective operation (timeout|timed out)",
            r"Timeout at NCCL work: \d+",
            r"ran for \d+ (ms|milliseconds) before timing out",
            r"(allreduce|allgather|broadcast|barrier|all_reduce|all_gather)\b.{0,60}(timed? ?out(?!\(ms\))|hangs?\b|hung\b|never return)",
            r"(stuck|hangs?|hung|deadlocked|frozen) (in|at|on|during|inside) (the )?(first )?(nccl|gloo|collective|all_?reduce|all_?gather|barrier|broadcast|init_process_group)",
            Pattern(r"heartbeat monitor (timed out|thread)", unless="starts|started|launched|exits? normally"),
        ),
        example="[rank5]:[E204 03:04:05.000001 ProcessGroupNCCL.cpp:632] [Rank 5] Watchdog caught collective operation "
        "timeout: WorkNCCL(SeqNum=3187, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for 600011 "
        "milliseconds before timing out.",
    ),
    FailureClass(
        id="rank_died",
        title="one process crashed",
        cause="A process ended by a crash signal (segmentation fault, abort) or disappeared. The other ranks only "
        "report that it is gone.",
        fix="Take that rank's core dump or run it with PYTHONFAULTHANDLER=1 to see where it crashed; check native "
        "extensions and conflicting versions.",
        next_test="run again with PYTHONFAULTHANDLER=1; if it is always the same host, run once without that host",
        reference="https://docs.python.org/3/library/faulthandler.html",
        patterns=likely(
            r"Signal \d+ \((SIGSEGV|SIGABRT|SIGILL|SIGFPE)\) received by PID",
            r"died with <Signals\.(SIGSEGV|SIGABRT|SIGILL|SIGFPE)",
            r"\bterminated (with|by) signal (SIGSEGV|SIGABRT|SIGILL|SIGFPE|11|6|4|8)\b",
            r"exitcode\W{0,2}\s*:\s*-(11|6|4|8)\b",
            r"Segmentation fault|segfault at ",
            r"Caught signal 11|received signal 11|exited on signal (11|6|4)\b|signal (11|6) \(",
            r"Fatal Python error: (Segmentation fault|Aborted|Illegal instruction|Floating)",
            r"\bAborted\b.{0,20}\(core dumped\)|Illegal instruction|Floating point exception",
            r"task \d+: (Aborted|Segmentation fault|Illegal instruction)",
            r"double free or corruption|stack smashing detected|malloc\(\): |free\(\): invalid|corrupted size vs",
            r"DataLoader worker \(pid.{0,30}is killed by signal: (Segmentation|Aborted)",
            r"exit(ed with)? (exit )?(code|status)[ :]+(139|134)\b",
        )
        + possible(
            r"worker process has died|worker died or was killed|worker unexpectedly exit",
            Pattern(
                r"(rank|worker|process) \d+.{0,30}(crashed|vanished|died unexpectedly|disappeared|terminated unexpectedly)",
                unless=r"exit ?code:? 1\b|status:? 1\b",
            ),
        ),
        example="  traceback : Signal 11 (SIGSEGV) received by PID 40411",
    ),
    FailureClass(
        id="peer_died_first",
        emitters=NETWORK,
        title="a consequence: another rank failed or is busy elsewhere",
        cause="These lines only show that a peer disconnected or did not answer. The reason is in that peer's own log, "
        "most often rank 0's: a Python error before it joined, missing packages, a prompt, or a slow save.",
        fix="Read the log of the peer rank in the message (of rank 0 if there is none) just before the first of these "
        "lines.",
        next_test="give diagnose the logs of all ranks and nodes together; or check where rank 0 is blocked (py-spy "
        "dump)",
        reference="https://docs.pytorch.org/docs/stable/elastic/errors.html",
        echo=True,
        patterns=likely(
            r"store->get\('?[^)]*\) got error",
            r"retrieving ncclUniqueId from",
            r"may indicate a possible application crash on rank \d+",
        )
        + possible(
            r"recvValue failed|recvBytes failed|sendBytes failed|failed to recv, got 0 bytes",
            r"Connection was likely closed|Did the remote server shutdown or crash",
            r"Connection closed by (remote )?peer",
            r"(Read|Write) error \[[^\]]{3,60}\](:\d+)?: ",
            r"remote process (exit(ed|ing) prematurely|has (died|exited|terminated))",
            r"(Received a (dump )?signal|dump signal).{0,40}(from (local )?rank|due to a collective timeout)",
            r"Another rank reported a timeout",
            r"Failed to check the .?should ?dump.? flag",
            r"NCCL communicator was aborted",
            r"RendezvousClosedError|RendezvousGracefulExitError",
            r"(TCPStore|Socket|store).{0,60}Broken pipe",
            r"ncclRemoteError",
            r"\b(RuntimeError|DistStoreError): (Socket Timeout|wait timeout)",
            r"Stop_waiting response is expected|failed to recv.{0,30}from store",
            r"The node .{1,80} has (failed|left|closed).{0,60}rendezvous",
            Pattern(
                r"\bKeepAlive|heartbeat.{0,30}(lost|missed|timeout).{0,30}(rank|agent|worker|node)",
                unless="tcp_keepalive|heartbeat monitor",
            ),
        ),
        example="[4] is setting up NCCL communicator and retrieving ncclUniqueId from [0] via c10d key-value store by "
        "key '0', but store->get('0') got error: Connection reset by peer",
    ),
)
