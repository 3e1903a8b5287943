"""Failure classes of the scheduler: refused requests, ended jobs, and failures of Slurm itself."""

from __future__ import annotations

from allranks.analysis.diagnose.catalogue.signs import INTERRUPT_PATTERNS
from allranks.analysis.diagnose.patterns import SCHEDULER, FailureClass, Pattern, certain, likely, possible, weak

REFUSED = 0.72  # the request failed; the reason follows the colon


CLASSES: tuple[FailureClass, ...] = (
    FailureClass(
        id="slurm_time_limit",
        emitters=SCHEDULER,
        title="ended by the time limit",
        cause="The job ran into its wall-time limit and the scheduler ended it.",
        fix="Request more time, or save before the limit and resume afterwards (allranks does both: a checkpoint at "
        "the signal, then resume).",
        next_test="sacct -j <job> -o State,Elapsed,Timelimit",
        reference="https://slurm.schedmd.com/sbatch.html#OPT_time",
        patterns=certain(
            r"DUE TO TIME LIMIT",
            r"(reached|exceeded|hit|over|exhausted).{0,30}(time ?limit|wall ?time|wall.?clock)",
            r"walltime \d+ exceeded|TERM_RUNLIMIT|Job .{0,40}time limit (reached|exceeded|exhausted)",
        )
        + likely(r"\|TIMEOUT\b|\bTIMEOUT\|| TIMEOUT +\d+:\d+| State=TIMEOUT|JobState=TIMEOUT|Reason=TimeLimit"),
        example="slurmstepd: error: *** JOB 88102 ON node-a CANCELLED AT 2025-04-02T10:00:12 DUE TO TIME LIMIT ***",
    ),
    FailureClass(
        id="slurm_preempted",
        emitters=SCHEDULER,
        title="preempted or requeued by the scheduler",
        cause="A job of higher priority took the nodes, or the job was requeued.",
        fix="Let it be requeued and resume from its checkpoint (--requeue, allranks resume), or use a partition or QOS "
        "without preemption.",
        next_test="sacct -j <job> --duplicates -o State,Start,End,QOS",
        reference="https://slurm.schedmd.com/preempt.html",
        patterns=certain(r"DUE TO (JOB )?PREEMPT|DUE TO JOB REQUEUE|DUE TO REQUEUE")
        + likely(
            r"\bPREEMPTED\b|JobState=PREEMPTED",
            r"(job|step).{0,60}(was |been |being |is )(preempted|requeued)|preempt(ed|ion) (of|by|for) (job|higher)|Reason=Preempt",
            r"(spot|instance|node).{0,40}(interruption|reclaimed|preempted|will be terminated)",
        ),
        example="slurmstepd: error: *** JOB 88103 ON node-a CANCELLED AT 2025-04-02T11:00:12 DUE TO PREEMPTION ***",
    ),
    FailureClass(
        id="slurm_cancelled",
        title="cancelled, or stopped by a signal",
        cause="The job was cancelled (scancel, or an interrupt at the terminal); nothing else had failed before.",
        fix="Nothing to fix; find out who cancelled it. The run can be resumed from the newest checkpoint.",
        next_test="the line names the signal, and who sent it where that is known; under Slurm, sacct -j <job> -o "
        "State%40 shows the user (CANCELLED by <uid>)",
        reference="https://slurm.schedmd.com/scancel.html",
        patterns=possible(*(Pattern(p.regex, unless=p.unless) for p in INTERRUPT_PATTERNS))
        + likely(r"CANCELLED by \d+")
        + possible(
            r"\*\*\* (JOB|STEP) \S+ ON \S+ CANCELLED AT \S+ \*\*\*",
            r"CANCELLED AT (?!.*DUE TO)",
            # sacct's row of a whole job. Its steps are also cancelled if the job reached the time limit or a node
            # failed.
            r"^\s*\d+(?:[_+]\d+)?\s.*\sCANCELLED\+?\s+\d+:\d+",
            r"scancel\b.{0,60}(by|user|uid|job)|cancelled by (the )?(user|admin|operator)|job (was )?cancelled\b",
            r"srun: interrupt",
        )
        + weak(r"Force Terminated (job|StepId)|forcing job termination"),
        example="slurmstepd: error: *** JOB 88104 ON node-a CANCELLED AT 2025-04-02T12:00:12 ***",
    ),
    FailureClass(
        id="slurm_submit_rejected",
        emitters=SCHEDULER,
        title="the scheduler refuses the request",
        cause="Account, partition, QOS or the requested resources (nodes, tasks, memory, GPUs, array) are not valid on "
        "this cluster.",
        fix="Correct the value in the message; sinfo, sacctmgr show assoc user=$USER and scontrol show partition list "
        "what is allowed.",
        next_test="sbatch --test-only checks the request without submitting it (it can pass although the real "
        "submission is refused)",
        reference="https://slurm.schedmd.com/sbatch.html",
        patterns=certain(
            r"Requested (node configuration|partition configuration|nodes?|time limit|GRES).{0,40}(not available|is invalid|invalid|missing|not support)",
            r"Node count specification invalid|More processors requested than permitted|CPU count per node can ?not be satisfied|Memory (specification can not be satisfied|required by task is not available)",
        )
        + likely(
            Pattern(r"(Batch job submission|Job submit/allocate|allocation) fail(ed|ure)", weight=REFUSED),
            Pattern(r"(sbatch|srun|salloc): error: (Unable to allocate resources|Batch job)", weight=REFUSED),
            Pattern(
                r"Unable to allocate resources",
                unless="Unable to contact|connect|Socket timed out|temporarily",
                weight=REFUSED,
            ),
            Pattern(
                r"Invalid (account|partition|qos|generic resource|feature|wckey|job array|node name|--\w+|feature specification|GRES|reservation)",
                unless="Invalid partition table",
            ),
            r"invalid (partition|account|qos) specif|(partition|account|qos).{0,40}(is )?(invalid|not (permitted|allowed|valid|available|authorized))",
            Pattern(
                r"(violates|exceeds).{0,30}(accounting|QOS|policy|limit)|QOS(Max|Grp)\w*|Assoc(Grp|Max)\w+Limit|MaxSubmitJobs?|PartitionTimeLimit|PartitionNodeLimit|BadConstraints",
                unless="memory limit|time limit exceeded",
            ),
            r"(not permitted|denied|not allowed|not authorized|does not have (access|permission)|no access).{0,60}(partition|account|qos|reservation|queue)",
            r"Unable to create step for job \d+: (More|Requested|Memory|Invalid generic|Task|CPU)",
            r"(job|request).{0,40}(rejected|refused|denied) by|job_submit.{0,40}(reject|error|denied)",
        )
        + possible(
            Pattern(
                r"(sbatch|srun|salloc|qsub|bsub): .{0,12}(unrecognized|invalid|ambiguous|unknown) (option|argument|choice)|(sbatch|srun|salloc): error: (Invalid|Unable to parse|bad) ",
                unless="credential|ELF|device|cuda|traceback|checksum|GID",
            ),
            Pattern(
                r"\b(array|ntasks|nodes|gres|gpus?|mem|cpus)\b.{0,30}(exceeds?|larger than|greater than|too (many|large|big)).{0,40}(max|limit|allowed|partition|available)",
                unless="memory limit|files",
            ),
            r"ReqNodeNotAvail|launch failed requeued held|JobHeld(Admin|User)",
        ),
        example="sbatch: error: Batch job submission failed: Invalid account or account/partition combination "
        "specified",
    ),
    FailureClass(
        id="slurm_allocation_gone",
        emitters=SCHEDULER,
        title="the allocation had ended",
        cause="A step was started for a job that had ended: it reached its time limit, it was cancelled, or the shell "
        "still has the variables of an old allocation.",
        fix="Start a new allocation; unset SLURM_JOB_ID in shells that outlived their allocation; sacct shows why the "
        "old one ended.",
        next_test="squeue -j $SLURM_JOB_ID; sacct -j $SLURM_JOB_ID -o State,End",
        reference="https://slurm.schedmd.com/srun.html",
        patterns=certain(
            r"Job/step already completing or completed",
            r"Unable to confirm allocation for job",
            Pattern(
                r"(Job )?allocation \d+ has been revoked|allocation.{0,30}(revoked|expired|ended|gone|relinquished before)",
                unless=r"^\W*salloc: ",  # salloc also says it of an allocation that its user gave back
            ),
        )
        + likely(
            r"(Invalid|Expired or invalid) job ?(id|\d+)",
            r"Check SLURM_JOB_ID environment variable",
            r"(Slurm )?job \d* ?has expired|job .{0,20}(no longer|not) (exists|active|running)",
        )
        + weak(r"salloc: Job allocation \d+ has been revoked"),
        example="srun: error: Unable to create step for job 501: Job/step already completing or completed",
    ),
    FailureClass(
        id="slurm_credential",
        emitters=SCHEDULER,
        title="a munge or job credential was refused",
        cause="Slurm's daemons cannot authenticate each other: munge keys, clocks, user IDs or slurm.conf differ "
        "between nodes, or munged does not run.",
        fix="Use the same munge.key, synchronised clocks, same user IDs and the same slurm.conf on all hosts; restart "
        "munged and slurmd there.",
        next_test="munge -n | ssh <node> unmunge (or pipe it through srun); compare date and slurm.conf's hash on both",
        reference="https://slurm.schedmd.com/authentication.html",
        patterns=certain(
            r"Task launch for .{0,60}: (Invalid job credential|.{0,20}credential)",
            r"[Cc]redential data mismatch|Job credential (expired|revoked|replayed)|Error generating job credential|has authentication error",
            Pattern(r"\b(un)?munge: error|MUNGE.{0,40}(error|fail|refused)", unless="running normally"),
            r"Munge (decode|encode) failed",
            r"(munge_(decode|encode)|auth_p_\w+|(auth|crypto|cred)[/_]munge).{0,120}(fail|error|refuse|cannot|unable|invalid|denied)",
            r"(error|fatal): .{0,80}(auth|crypto|cred)/munge",
            r"(Unauthorized|Rewound|Expired|Replayed|Invalid|Bad) (job |munge |step )?credential",
        )
        + likely(
            Pattern(
                r"(credential|cred).{0,60}(revoked|signature|invalid|expired|rejected|replay)",
                unless="aws|google|git|http",
            ),
            r"Protocol authentication error|authentication (error|failure).{0,60}(slurm|munge|RPC|uid)|Security violation",
            Pattern(
                r"(munged|munge\.socket|munge socket|munge\.key).{0,80}(error|fail|refus|denied|not |no such|missing|differ|insecure|cannot)",
                unless="started|running normally",
            ),
        )
        + possible(r"different slurm\.conf than the slurmctld", r"Zero Bytes were transmitted or received"),
        example="slurmd: error: Munge decode failed: Rewound credential",
    ),
    FailureClass(
        id="slurm_controller_error",
        emitters=SCHEDULER,
        title="the scheduler's controller does not work",
        cause="slurmctld or slurmdbd does not answer, cannot start, has another protocol version than this client, or "
        "this host cannot resolve the name of a node that it was given.",
        fix="The job is not the cause: try again later, or send these lines to the administrators; a submission that "
        "timed out may still have been accepted (squeue).",
        next_test="scontrol ping; sdiag; on the controller: systemctl status slurmctld and its log",
        reference="https://slurm.schedmd.com/troubleshoot.html",
        patterns=certain(
            r"Unable to contact slurm controller",
            r"slurm_load_(jobs|node|partitions?|ctl_conf)\w*.{0,10}error|slurm_\w+ error: (Unable|Socket|Zero)",
        )
        + likely(
            r"not a valid controller",
            r"Slurmctld\(\w+\) at \S+ is DOWN",
            Pattern(r"^\[[\dT:.-]+\] fatal: ", unless="munge|credential"),
            r"can'?t find (?:an )?address\b|slurm_set_addr: Unable to resolve|xgetaddrinfo: getaddrinfo\(\S+ failed|\bcheck slurm\.conf",
            r"(slurm|fetch_c|_establish_conf).{0,60}(DNS SRV lookup failed|failed to (load|fetch) (remote )?configs?|initialization failed)",
            r"slurm(ctl|db)?d\.service:? (failed\b|Failed with|Start operation timed out)|[\u00d7\u2717]\s*slurm(ctl|db)?d\.service",
            r"(Socket|Message|connection) timed out on send/recv|Transport endpoint.{0,20}slurm",
            Pattern(
                r"(slurmctld|slurmdbd|slurmd)\b.{0,80}(fatal|refused|down|not respond|unreachable|failed to start|abort|crash|segfault|core dump)",
                unless="slurmd.{0,40}Node|munge|credential|node .{0,20}not respond",
            ),
            Pattern(
                r"fatal: .{0,80}(slurm|cluster|StateSaveLocation|plugin|association|state|CLUSTER NAME)",
                unless="git|repository",
            ),
            r"Incompatible versions of client and server|protocol version.{0,30}(mismatch|not support|incompatible)",
            r"temporarily unable to accept job",
            r"slurm_persist_conn_open|persist.{0,20}conn.{0,40}(fail|error)",
            r"(StateSaveLocation|job_state|state file|assoc_mgr|DBD).{0,60}(error|fail|corrupt|incompatible|No such|refused|could not)",
            r"accounting storage.{0,40}(error|fail|unavailable|down)|Unable to contact (the )?(database|slurmdbd)",
        )
        + possible(r"Could not open \w+ state file|Incomplete \w+ data checkpoint file"),
        example="sbatch: error: Batch job submission failed: Unable to contact slurm controller (connect failure)",
    ),
    FailureClass(
        id="node_unhealthy",
        emitters=SCHEDULER | {"kernel"} | {"allranks"},
        ends_job=False,
        title="a node failed or is unhealthy",
        cause="A node no longer answers, or a health check or Slurm found it unhealthy.",
        fix="Exclude that node (--exclude; in allranks cluster.slurm.exclude) and tell its administrators; then "
        "continue from the newest checkpoint.",
        next_test="scontrol show node <node> (State, Reason); run the failed health check again on that node alone",
        reference="https://slurm.schedmd.com/scontrol.html",
        patterns=certain(
            r"Node Health Check failed|Found XID errors: \d",
            r"Node failure on (?P<host>[\w.-]*\w)",
            r"\b(?P<host>[A-Za-z][\w.-]*) (fell|went) silent\b",
            r"allranks: preflight: the job ends before its first command because of (?P<host>[\w.-]*\w)",
            r"The run folder is no longer visible on (?P<host>[\w.-]*\w)",
            r"DUE TO NODE FAILURE|\bNODE_FAIL\b|JobState=NODE_FAIL",
            r"\b(?P<host>[A-Za-z][\w.-]*), the job's first node, .{0,300}\((it does not answer on the network|its slurmd is not running)",
            r"(ERROR|FATAL).{0,8}\bnhc\b|\bnhc\b.{0,80}(failed|failure)|Health ?check (failed|failure|error)",
            Pattern(
                r"\bunhealthy\b.{0,40}(node|host|gpu)|(node|host|gpu)s?\b.{0,60}\bunhealthy\b",
                unless="0 unhealthy|no unhealthy|unhealthy[^0-9]*0\\b",
            ),
        )
        + likely(
            r"(State|state)=(DOWN|DRAIN\w*|FAIL\w*|NOT_RESPONDING)\S*|\bDOWN\*|\bdrain(ed|ing)?\*?\b.{0,80}(reason|node|fail|error)",
            Pattern(
                r"(set|setting|mark\w*|put\w*) .{0,60}(node\w* )?.{0,40}(to )?(?-i:DOWN|DRAIN)\b|(?-i:Reason=)(?!\[).{0,80}(fail|error|not responding|Kill task|unhealthy|check)",
                unless="shut down",
            ),
            Pattern(
                r"(nodes?|hosts?) (?P<host>[\w.-]*\w) (is |are )?not respond(ing)?|not responding, setting DOWN",
                unless="nfs",
            ),
            r"Machine Check|mce: \[Hardware Error\]|EDAC .{0,60}(UE|uncorrect)",
        )
        + possible(
            r"^\s*\S+\s+(up|down|inact)\s+\S+\s+\d+\s+(drain|drng|down|fail|failing)[*@$~#]?\s+\S+",
            Pattern(
                r"(?<![\w./-])(health|nic|ib|hca|check|diag|burn)\w*.{0,80}\b(?-i:FAIL(ED)?|CRITICAL|UNHEALTHY|NOT OK)\b",
                unless=r"Error|error:|exception|CUDA|NCCL|c10|failed to|0 fail|fail(ed)?[:=] ?0|tests? passed|socket|connect",
            ),
            r"Kill task failed|Prolog error|Epilog error|prolog.{0,30}(fail|exit)",
            Pattern(
                r"(failing|failed|bad|faulty|broken|unreachable|excluded?|blacklist\w*) (nodes?|hosts?)\b.{0,10}[:=]? ?\S",
                unless=r"nodes?\s*[:=]\s*(0|none|\[\])|to (node|host)|failed host",
            ),
        ),
        example="nhc[2113]: ERROR: nhc: Health check failed: check_hw_ib: No IB port is ACTIVE on node-q",
    ),
)
