"""Signs of a failure that do not depend on any class, and messages that show that a job completed.

A log with a sign that no class explains has the verdict `unexplained`, never `healthy`.
"""

from __future__ import annotations

from msgspec import Struct

from allranks.analysis.diagnose.patterns import Pattern, certain, possible

_RANK_LOG = (
    "the output (stderr) of the rank that is named here, or of every rank: with torchrun --log-dir=DIR --redirects=3 "
    "--tee=3 each rank has a file; `@record` of torch.distributed.elastic saves the traceback of the main function"
)
_KERNEL_LOG = (
    "the kernel log of that host at that time (dmesg -T, journalctl -k), and sacct -j <job> -o "
    "JobID,State,ExitCode,MaxRSS for who ended it"
)
_NCCL_LOG = "the same run with NCCL_DEBUG=INFO on all ranks, and the first of these lines on each rank"
_SCHEDULER_LOG = (
    "sacct -j <job> -o JobID,State,ExitCode,Reason, then the log of slurmd on that host (or of slurmctld) at that time"
)
_PROGRAM_LOG = "the lines just before these, and the program's own log files"


# An interrupt at the terminal, or SIGINT by another way. Nothing that follows, such as a last checkpoint, makes it a
# success.
INTERRUPT_PATTERNS = certain(
    Pattern(
        r"(?P<interrupt>\bKeyboardInterrupt\b)",
        unless=r"except\b.{0,20}KeyboardInterrupt|KeyboardInterrupt handler|handles? KeyboardInterrupt|\bif\b",
    ),
    Pattern(
        r"(?P<interrupt>\b(?:received|got|caught|by|due to|signal|with)\b(?: a| the)?(?: signal)?:?\s{0,2}(?:<?Signals\.)?\bSIGINT\b|\(SIGINT\)|\bsignal:? 2\b(?! of)|\b2 death signal\b)",
        unless=r"\bhandlers?\b|will be|\bwhen |\bif |\bon signal from",
    ),
    Pattern(
        r"(?P<interrupt>interrupted (?:by|from) (?:the )?(?:user|keyboard)|\buser (?:has )?interrupted\b|\] Interrupt\s*$|(?:received|detected|caught|pressed|sending|by|with|via) ctrl[-+ ]c\b|ctrl[-+ ]c (?:was )?(?:pressed|received|detected|caught)|^\s*\^CTraceback|srun: error: \S+ tasks? [\d,\-\[\]]+: Interrupt\b|Job has been cancelled)",
        unless=r"\b(?:press|use|hit|type)\b|to (?:quit|stop|exit|abort|cancel)",
    ),
)


# the line says how it went on
_STATED_FALLBACK = r"\b(?:going to|using) \S+ instead\b|\bignor(?:ing|ed)\b|: \[(?:WARN|INFO)"


class FailureSign(Struct, frozen=True, kw_only=True):
    """A message that shows a failure but not its cause.

    ``strong`` signs end a process; the others are lines that a logger marks as errors, which jobs often survive.
    """

    id: str
    says: str
    read_next: str
    patterns: tuple[Pattern, ...]
    strong: bool = True


_SIGNS = (
    FailureSign(
        id="traceback",
        says="an uncaught exception",
        read_next=_PROGRAM_LOG,
        patterns=certain(
            r"^\W*Traceback \(most recent call last\)",
            r"(?:^|[^\w\s]\s*)(?:(?:Uncaught|Unhandled) exception\b|terminate called after throwing|Fatal Python error)",
            r"\bterminating (?:due to|with) uncaught exception|\bAssertion [`'\"].{1,300} failed\b",
            r"^\W*what\(\): +\S|\bException raised from .{1,80}? at \S+\.(?:c|cc|cpp|cxx|cu|h|hpp):\d+",
        ),
    ),
    FailureSign(
        id="launcher_report",
        says="a launcher's report that a process failed",
        read_next=_RANK_LOG,
        patterns=certain(
            Pattern(r"Root Cause \(first observed failure\)|ChildFailedError\b", "root cause (first|*childfailederror"),
            r"(?:returned|with) non-?zero (?:exit )?(?:status|code)|non-?zero (?:exit|status|return) ",
            Pattern(
                r"\bexit(?:ed|s|ing)?(?: (?:abnormally|unexpectedly))?(?: with)?(?: the)?(?: (?:exit|return|error))?[ _]?(?:code|status)?s?\)?\s{0,3}[:=(]?\s{0,3}(?:-\d|[1-9])\d*\b",
                unless=r"exit(?:ed|s|ing)? (?:on|at|after|in|from) |\b(?:step|epoch|iter\w*|rank|worker|process|node)s? \d+ exit(?:ed|s|ing)? [1-9]|on_?exit|restarts?_exit|exit ?codes? 0\b",
            ),
            Pattern(
                r"\b(?:return|returncode|return_code|ret(?:urn)? code|error code|exit_?code|exitcode|rc)\b\W{1,4}(?:-\d|[1-9])\d*\b",
                "return|exit|error code|rc=",
            ),
            Pattern(
                r"(?:worker|process|task|child|job|command|rank|step)s?\b.{0,60}\b(?:failed|crashed|died|was killed|terminated abnormally|terminated unexpectedly|exited unexpectedly)\b",
                unless=r"\b(?:0|no|none|zero) \w* ?failed|failed[:= ]+0\b|if .{0,30}failed|was not killed",
            ),
        ),
    ),
    FailureSign(
        id="interrupt", says="an interrupt by the user (SIGINT)", read_next=_PROGRAM_LOG, patterns=INTERRUPT_PATTERNS
    ),
    FailureSign(
        id="signal",
        says="a process that a signal ended",
        read_next=_KERNEL_LOG,
        patterns=certain(
            r"(?:^\W*(?:\S+: (?:line \d+: )?(?:\d+ )?)?|(?:it/s|s/it)\]\s*)(?:Killed|Terminated|Aborted|Segmentation fault|Bus error|Hangup|Illegal instruction|Floating point exception)\b\s*(?:\(core dumped\)|\(signal|$|\W)",
            Pattern(
                r"\b(?:received|caught|got|killed by|died (?:with|from|by)|terminated by|exited (?:on|with)|on|by|due to|unhandled|fatal) (?:a )?(?:fatal )?(?:signal\W{0,3}(?:\d+|SIG\w+|\w+)|<?(?:Signals\.)?SIG(?:KILL|SEGV|ABRT|BUS|TERM|ILL|FPE|INT|HUP|PIPE)\b)",
                unless=r"\bhandlers?\b|regist|will be|\bwhen |\bif |on signal from",
            ),
            r"\(core dumped\)|segfault at |general protection fault|\bkernel panic\b",
        ),
    ),
    FailureSign(
        id="abort_block",
        says="an abort by MPI or PMIx",
        read_next="the output of the rank that is named in this block, just before it",
        patterns=certain(
            r"\bMPI_ABORT\b|BAD TERMINATION|Primary job +terminated|mpirun (?:noticed|detected|has exited)|process(?:es)? (?:exited|returned) .{0,30}non-zero|^\W*Abort\(\d+\)|\*\*\* An error occurred in MPI|MPI_ERRORS_ARE_FATAL|PMIX ERROR|PMIx_Abort"
        ),
    ),
    FailureSign(
        id="batch_exit_code",
        says="the exit code of the batch script",
        read_next="the end of the job's output; with `set -x` in the script, it shows the last command",
        patterns=certain(r"\|FAILED\|[1-9]\d*:0"),
    ),
    FailureSign(
        id="scheduler_error",
        says="an error of the scheduler",
        read_next=_SCHEDULER_LOG,
        patterns=certain(
            Pattern(
                r"^\W*(?:\[[^\]]{0,40}\] ?){0,2}(?:srun|sbatch|salloc|scancel|squeue|sacct|sacctmgr|scontrol|sinfo|sbcast|slurm\w+)(?:-[\w.-]+)?(?:\[\d+\])?: (?:error|fatal): ",
                unless=_STATED_FALLBACK,
            ),
            Pattern(r"^\[\d{4}-\d\d-\d\dT[\d:.]+\] (?:\[[\w.]+\] )?(?:error|fatal): ", "] error: |] fatal: "),
            r"(?:\||\s|=|^)(?:FAILED(?!\|[1-9]\d*:0)|TIMEOUT|OUT_OF_ME\w*|NODE_FAIL|BOOT_FAIL|DEADLINE|PREEMPTED|CANCELLED)\+?(?: by \d+)?(?:\||\s+-?\d+:\d+|\s+Reason=|\s*$)",
            r"\*\*\* (?:JOB|STEP|REBOOT) .{0,80}\bCANCELLED AT ",
        ),
    ),
    FailureSign(
        id="nccl_warning",
        says="a warning of NCCL, with which it reports its errors",
        read_next=_NCCL_LOG,
        strong=False,
        patterns=certain(
            Pattern(
                r"(?-i:\b(?:NCCL|RCCL) (?:WARN|ERROR)\b)|\b(?:NCCL|RCCL) error(?: in\b|\s?[:\d])",
                "nccl warn|nccl error",
                unless=r"NCCL WARN (?:NET/Plugin|TUNER/|PROFILER/|Plugin|MSCCL|NCCL_\w+ .{0,30}(?:deprecat|set))|NCCL WARN .{0,60}(?:deprecated|Missing \"|numa_balancing|NUMA auto|No socket interface for|performance may|No plugin|Failed to (?:open|find|load) .{0,30}\blib\w+\.so)|\b(?:can|could|may|might) (?:be )?(?:lead|caus|result|degrad|reduc|slow|affect)|\bignor(?:ing|ed)\b",
            ),
            Pattern(
                r"\bnccl(?:UnhandledCudaError|SystemError|InternalError|InvalidArgument|InvalidUsage|RemoteError)\b|unhandled (?:cuda|system) error",
                "ncclunhandled|ncclsystem|ncclinternal|ncclinvalid|ncclremote|unhandled cuda error|"
                "unhandled system error",
            ),
            r"\bCuda failure (?:\d+ )?'",
            r"\[ERROR\] ?(?:HCCL|HCCP|RUNTIME|GE|TDT|DRV)\b|\bERR\d{5}\b.{0,60}error",
        ),
    ),
    FailureSign(
        id="error_line",
        says="a line that a logger marks as an error",
        read_next=_PROGRAM_LOG,
        strong=False,
        patterns=certain(
            Pattern(
                r"(?-i:(?<![\w.'\"=/-])(?:ERROR|FATAL|CRITICAL|SEVERE)(?![\w'\"=/-]))",
                unless=r"ERRORS?\s*[:=]\s*0\b|\b0 ERRORS?\b|NO ERRORS?\b|LOG_?LEVEL|log level|FOR ERROR",
            ),
            Pattern(
                r"^\W{0,3}[EF]\d{0,4} ?[\d:.]* ?\d* ?[\w./-]+\.(?:cpp|cc|h|hpp|py|cu):\d+\]|^\[[\d ,:.-]+ [EF] \d+ \d+\] ",
                " e | f |.cpp:|.py:|.hpp:|.cc:|.cu:",
            ),
            Pattern(
                r"\b(?:backend|engine|allocation|initiali[sz]ation|connection|launch|handshake|registration|operation|request|mount|import|download|compilation|build|transfer)s? (?:has |have )?failed\b",
                unless=r"\b(?:0|no|none|zero) \w* ?failed|\bif\b|\bwhen\b|retry|falling back|ignor|optional|using default|using .{1,30} instead",
            ),
            Pattern(
                r"\b(?:CUDA|HIP|ROCm|NPU|XPU|MUSA|MLU|HPU|TPU|Level.?Zero|SYCL|NCCL|RCCL|HCCL|HCL|CCL|cuBLAS|cuDNN|hipBLAS|MIOpen|driver|device) (?:runtime )?error\b(?: code| \d|\s?[:(]\s?\w)"
                r"|(?-i:\b(?:cu|cuda|hip|acl|syn|ze|rt|musa|cn)[A-Z]\w{2,40}) (?:call )?(?:failed|returned (?:an )?error)\b|\b(?:collective|kernel|library|driver|runtime|API|system|nccl\w*|hccl\w*|hcl\w*) (?:call )?(?:returned (?:an )?error|failed with (?:status|error|code))\b",
                unless=r"\b(?:0|no) (?:device|driver) error|retry|falling back|\bif\b|\bwhen\b",
            ),
            Pattern(r"^\W*(?:\S+: )?(?:fatal error|fatal|error)(?: \w{1,12}\d*)?: \S", unless=_STATED_FALLBACK),
            Pattern(
                r"\b(?:timed|timing) ?out\b|\bconnection (?:was )?(?:closed|reset|refused|lost|aborted)\b|\b(?:hung|deadlock(?:ed)?)\b|No route to host",
                unless=r"\bif\b|\bwhen\b|may |can |0 timed out",
            ),
            Pattern(r"^\W*(?:UCX +ERROR|libfabric:.{0,80}(?:error|fail))", unless=r"<(?:warn|info|debug)>"),
            Pattern(
                r"^\W{0,3}(?:error|failed|failure|unable|cannot|could not|can't|invalid|unrecognized)\b(?!\"\s*:).{3,}",
                unless=r"(?:error|failed|failures?)\s*[:=]\s*(?:0|none|\[\])\b|falling back|will be ignored|using default",
            ),
        ),
    ),
)
FAILURE_SIGNS: dict[str, FailureSign] = {sign.id: sign for sign in _SIGNS}

# A job that ended well. An exception before it was caught; the exit of a process before it was not.
COMPLETION_PATTERNS: tuple[Pattern, ...] = certain(
    Pattern(
        r"train_runtime|\b(?:training|fine-?tuning|pre-?training|benchmark|evaluation|inference|experiment)\b(?: \w+){0,2} (?:has |is |was )?(?:been )?(?:complete[d]?|finished|succeeded|done|ended well)\b|all \d+ ranks (?:ended well|succeeded)|stopped: `max_(?:steps|epochs)=",
        unless="not (?:been )?(?:complete|finish|done)|before|until|when|once|has not|to be",
    ),
    Pattern(
        r"\b(?:finished|completed|done)(?: with)? (?:the )?(?:\w+ )?(?:training|fine-?tuning|pre-?training)\b|all done\b"
        r"|\breached (?:the )?(?:max(?:imum)?|final|last)[ _](?:\w+ )?(?:steps?|epochs?|iterations?)\b|\bmax_?(?:steps|epochs|iters?)\b.{0,20}\breached\b|early stopping (?:triggered|activated|condition met|at epoch)|\bstopping early\b",
        unless=r"not (?:been )?(?:complete|finish|done)|before|until|when|once|has not|to be|un(?:finished|completed)|\bif\b",
    ),
    r"Avg bus bandwidth|Out of bounds values\s*:\s*0 OK|collective test concluded|All tests passed|tests? passed\b|\b\d+ passed in ",
    r"run_stop.{0,80}success|Application startup complete|Uvicorn running on",
) + possible(
    Pattern(
        r"\b(?:saved|saving|wrote) (?:the )?(?:final )?(?:\w+ ){0,2}(?:model|weights|adapter|checkpoint|results)\b|\b(?:model|weights|adapter|checkpoint|results)(?: \w+){0,3} (?:saved|written|is ready)(?: now| to| in| at| as| under| out)\b|\bcheckpoint successfully (?:created|saved|written)\b|final (?:train|val|eval|test)?\w* ?(?:loss|accuracy|perplexity)",
        unless=r"\bwill be\b|\bto be\b|\bevery\b",
        weight=0.5,
    )
)

# A process that ended without an error. It ends a log well, but says nothing about an earlier failure of another
# process.
ENDED_PATTERNS: tuple[Pattern, ...] = certain(
    Pattern(
        r"\b(?:run|job|test)s? (?:has |is |was )?(?:complete[d]?|finished|succeeded|done|ended well)\b|^[^a-z]{0,60}\[(?:finished|done)\]",
        unless="not (?:been )?(?:complete|finish|done)|before|until|when|once|has not|to be",
    ),
    r"\bexit(?:ed)?(?: with)?(?: (?:code|status))?\W{1,3}0\b(?!:)|\bexitcode\W{1,4}0\b|exit(?:s|ed) successfully|finished successfully|completed successfully|Successfully (?:finished|completed|ran|saved)",
    r"exiting program at iteration \d+|\bstate: SUCCEEDED\b|worker group successfully finished|\b(?:training|run|job|script|program)(?: run)? (?:has )?(?:ended|finished|completed)\b(?: normally| successfully| at\b| in\b| on\b|\W*$)|\bfinished (?:run|job|script|program)\b|^\W*(?:end time|finished at|ended at|end date)\s*:|\bexiting,? (?:success|normally)|^wandb: (?:Run summary:|Synced \d|Synced \S+: http|.{0,12}View run \S+ at: )|\bOptimizer stripped from\b",
    Pattern(
        r"\b(?:total|overall|training|train) (?:\w+ )?(?:time|runtime|duration)(?: \w+)?\s*[:=]\s*\d|\b(?:training|run) took \d|\b\d+ epochs completed in \d",
        unless=r"per iteration|limit|timeout|estimate|remaining|\beta\b",
    ),
    Pattern(
        r"\b(?:test|eval|val|valid|validation|evaluation|best)[ _/]?(?:set )?(?:acc(?:uracy)?|f\d|loss|perplexity|ppl|bleu|rouge\w*|em|score|reward|auc|iou|miou|map|wer)\b['\"]?\s*[:=|]?\s*\d"
        r"|\*{3,} (?:eval|test|predict|evaluation) metrics \*{3,}|\bm?AP(?:@\S+)?\s*[:=]\s*\d",
        "test|eval|val|valid|validation|evaluation|best|map",
        unless=r"\b(?:every|target|threshold|goal|step size)\b",
    ),
    r"(?:\||\s|=|^)COMPLETED(?:\||\s+0:0|\s+Reason=|\s*$)",
)
