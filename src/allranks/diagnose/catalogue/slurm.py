"""The scheduler: requests that it refuses, jobs that it ends, and its own troubles."""

from __future__ import annotations

from allranks.diagnose.catalogue.entry import FITS, HINTS, SAYS, SHOWS, Entry, Pattern

SLURM_TIME_LIMIT = Entry(
    id="slurm_time_limit",
    title="ended by the time limit",
    cause="The job ran into its wall-time limit and the scheduler ended it.",
    fix="Ask for more time, or save before the limit and go on afterwards (allranks does both halves: a checkpoint at the signal, then resume).",
    next_test="sacct -j <job> -o State,Elapsed,Timelimit",
    reference="https://slurm.schedmd.com/sbatch.html#OPT_time",
    patterns=(
        Pattern(r"DUE TO TIME LIMIT"),
        Pattern(r"\|TIMEOUT\b|\bTIMEOUT\|| TIMEOUT +\d+:\d+| State=TIMEOUT|JobState=TIMEOUT|Reason=TimeLimit", "timeout", "timelimit", weight=SHOWS),
        Pattern(r"(reached|exceeded|hit|over|exhausted).{0,30}(time ?limit|wall ?time|wall.?clock)", " limit", "timelimit", "walltime", "wall"),
        Pattern(r"walltime \d+ exceeded|TERM_RUNLIMIT|Job .{0,40}time limit (reached|exceeded|exhausted)", "walltime", "term_runlimit", "time limit"),
    ),
    example="slurmstepd: error: *** JOB 88102 ON node-a CANCELLED AT 2025-04-02T10:00:12 DUE TO TIME LIMIT ***",
    near_miss="INFO time limit of the job: 04:00:00",
)

SLURM_PREEMPTED = Entry(
    id="slurm_preempted",
    title="preempted or requeued by the scheduler",
    cause="A job of higher priority took the nodes, or the job was put back into the queue.",
    fix="Let it be requeued and go on from its checkpoint (--requeue, allranks resume), or take a partition or QOS that is not preempted.",
    next_test="sacct -j <job> --duplicates -o State,Start,End,QOS",
    reference="https://slurm.schedmd.com/preempt.html",
    patterns=(
        Pattern(r"DUE TO (JOB )?PREEMPT|DUE TO JOB REQUEUE|DUE TO REQUEUE", "due to "),
        Pattern(r"\bPREEMPTED\b|JobState=PREEMPTED", "preempted", weight=SHOWS),
        Pattern(r"(job|step).{0,60}(was |been |being |is )(preempted|requeued)|preempt(ed|ion) (of|by|for) (job|higher)|Reason=Preempt", "preempt", "requeued", weight=SHOWS),
        Pattern(r"(spot|instance|node).{0,40}(interruption|reclaimed|preempted|will be terminated)", "interruption", "reclaimed", "preempted", "will be terminated", weight=SHOWS),
    ),
    example="slurmstepd: error: *** JOB 88103 ON node-a CANCELLED AT 2025-04-02T11:00:12 DUE TO PREEMPTION ***",
    near_miss="INFO partition low can be used by all; its jobs may wait",
)

SLURM_CANCELLED = Entry(
    id="slurm_cancelled",
    title="cancelled by somebody",
    cause="The job was cancelled (scancel, or an interrupt at the terminal) while nothing else had failed.",
    fix="Nothing to mend; ask who cancelled it. Going on is possible from the newest checkpoint.",
    next_test="sacct -j <job> -o State%40 shows the user (CANCELLED by <uid>)",
    reference="https://slurm.schedmd.com/scancel.html",
    patterns=(
        Pattern(r"CANCELLED by \d+", "cancelled by ", weight=SHOWS),
        Pattern(r"\*\*\* (JOB|STEP) \S+ ON \S+ CANCELLED AT \S+ \*\*\*", " cancelled at ", weight=FITS),
        Pattern(r"CANCELLED AT (?!.*DUE TO)", " cancelled at ", weight=FITS),
        Pattern(r"scancel\b.{0,60}(by|user|uid|job)|cancelled by (the )?(user|admin|operator)|job (was )?cancelled\b", "scancel", "cancelled", weight=FITS),
        Pattern(r"srun: interrupt|sending Ctrl-C|Job has been cancelled|\bKeyboardInterrupt\b|signal SIGINT|\(SIGINT\)", "srun: interrupt", "ctrl-c", "has been cancelled", "keyboardinterrupt", "sigint", weight=FITS),
        Pattern(r"Force Terminated (job|StepId)|forcing job termination", "force terminated", "forcing job termination", weight=HINTS),
    ),
    example="slurmstepd: error: *** JOB 88104 ON node-a CANCELLED AT 2025-04-02T12:00:12 ***",
    near_miss="INFO the signal handler for SIGTERM is set",
)

SLURM_SUBMIT_REJECTED = Entry(
    id="slurm_submit_rejected",
    title="the scheduler refuses the request",
    cause="Account, partition, QOS or the shape of the request (nodes, tasks, memory, GPUs, array) is not one that this cluster grants.",
    fix="Correct what the message names; sinfo, sacctmgr show assoc user=$USER and scontrol show partition tell what is allowed.",
    next_test="sbatch --test-only says whether the request would be taken, without submitting (it can pass and the real one still be refused)",
    reference="https://slurm.schedmd.com/sbatch.html",
    patterns=(
        Pattern(r"(Batch job submission|Job submit/allocate|allocation) fail(ed|ure)", " failed", " failure"),
        Pattern(r"(sbatch|srun|salloc): error: (Unable to allocate resources|Batch job)", "unable to allocate", "batch job"),
        Pattern(r"Unable to allocate resources", unless="Unable to contact|connect|Socket timed out|temporarily"),
        Pattern(r"Invalid (account|partition|qos|generic resource|feature|wckey|job array|node name|--\w+|feature specification|GRES|reservation)", "invalid ", weight=SHOWS, unless="Invalid partition table"),
        Pattern(r"invalid (partition|account|qos) specif|(partition|account|qos).{0,40}(is )?(invalid|not (permitted|allowed|valid|available|authorized))", "invalid", "not permitted", "not allowed", "not valid", "not available", "not authorized", weight=SHOWS),
        Pattern(r"Requested (node configuration|partition configuration|nodes?|time limit|GRES).{0,40}(not available|is invalid|invalid|missing|not support)", "requested "),
        Pattern(r"Node count specification invalid|More processors requested than permitted|CPU count per node can ?not be satisfied|Memory (specification can not be satisfied|required by task is not available)", "node count specification", "more processors requested", "cpu count per node", "memory specification", "memory required by task"),
        Pattern(r"(violates|exceeds).{0,30}(accounting|QOS|policy|limit)|QOS\w*(Max|Grp|Limit)\w*|Assoc(Grp|Max)\w+Limit|MaxSubmitJobs?|PartitionTimeLimit|PartitionNodeLimit|BadConstraints", "violates", "exceeds", "qosmax", "qosgrp", "limit", "assocgrp", "assocmax", "maxsubmit", "badconstraints", weight=SHOWS, unless="memory limit|time limit exceeded"),
        Pattern(r"(not permitted|denied|not allowed|not authorized|does not have (access|permission)|no access).{0,60}(partition|account|qos|reservation|queue)", "not permitted", "denied", "not allowed", "not authorized", "does not have ", "no access", weight=SHOWS),
        Pattern(r"Unable to create step for job \d+: (More|Requested|Memory|Invalid generic|Task|CPU)", "unable to create step", weight=SHOWS),
        Pattern(r"(sbatch|srun|salloc|qsub|bsub): .{0,12}(unrecognized|invalid|ambiguous|unknown) (option|argument|choice)|error: (Invalid|Unable to parse|invalid number|bad) .{0,60}", "unrecognized", "invalid", "ambiguous", "unknown option", "unable to parse", weight=FITS, unless="credential|ELF|device|cuda|traceback|checksum|GID"),
        Pattern(r"(job|request).{0,40}(rejected|refused|denied) by|job_submit.{0,40}(reject|error|denied)", "rejected", "refused", "denied", "job_submit", weight=SHOWS),
        Pattern(r"(array|ntasks|nodes|gres|gpus?|mem|cpus).{0,30}(exceeds?|larger than|greater than|too (many|large|big)).{0,40}(max|limit|allowed|partition|available)", "exceed", "larger than", "greater than", "too many", "too large", "too big", weight=FITS, unless="memory limit|files"),
        Pattern(r"ReqNodeNotAvail|launch failed requeued held|JobHeld(Admin|User)", "reqnodenotavail", "requeued held", "jobheld", weight=FITS),
    ),
    example="sbatch: error: Batch job submission failed: Invalid account or account/partition combination specified",
    near_miss="sbatch: Job 4711 to start at 2025-04-02T13:00:00 using 64 processors on nodes node-[1-2] in partition gpu",
)

SLURM_ALLOCATION_GONE = Entry(
    id="slurm_allocation_gone",
    title="the allocation had ended",
    cause="A step was started for a job that was already over: its time had passed, it was cancelled, or the shell still holds the variables of an old allocation.",
    fix="Start a new allocation; unset SLURM_JOB_ID in shells that outlived theirs; find in sacct why the old one ended.",
    next_test="squeue -j $SLURM_JOB_ID; sacct -j $SLURM_JOB_ID -o State,End",
    reference="https://slurm.schedmd.com/srun.html",
    patterns=(
        Pattern(r"Job/step already completing or completed"),
        Pattern(r"Unable to confirm allocation for job"),
        Pattern(r"(Invalid|Expired or invalid) job ?(id|\d+)", "invalid job", weight=SHOWS),
        Pattern(r"(Job )?allocation \d+ has been revoked|allocation.{0,30}(revoked|expired|ended|gone|relinquished before)", "allocation"),
        Pattern(r"Check SLURM_JOB_ID environment variable", weight=SHOWS),
        Pattern(r"(Slurm )?job \d* ?has expired|job .{0,20}(no longer|not) (exists|active|running)", " has expired", " no longer ", " not active", " not running", weight=SHOWS),
    ),
    example="srun: error: Unable to create step for job 501: Job/step already completing or completed",
    near_miss="salloc: Granted job allocation 501",
)

SLURM_CREDENTIAL = Entry(
    id="slurm_credential",
    title="a munge or job credential was refused",
    cause="Slurm's parts do not trust each other: munge keys differ, clocks are apart, user ids or slurm.conf differ between nodes, or munged does not run.",
    fix="Same munge.key, synchronised clocks, same user ids and the same slurm.conf on all hosts; restart munged and slurmd there.",
    next_test="munge -n | ssh <node> unmunge (or pipe it through srun); compare date and slurm.conf's hash on both",
    reference="https://slurm.schedmd.com/authentication.html",
    patterns=(
        Pattern(r"Munge (decode|encode) failed|munge_(decode|encode)|auth/munge|auth_munge|auth_p_\w+", "munge", weight=SAYS),
        Pattern(r"(Unauthorized|Rewound|Expired|Replayed|Invalid|Bad) (job |munge |step )?credential", "credential"),
        Pattern(r"(credential|cred).{0,60}(revoked|signature|invalid|expired|rejected|replay)", " cred", "cred_", weight=SHOWS, unless="aws|google|git|http"),
        Pattern(r"Protocol authentication error|authentication (error|failure).{0,60}(slurm|munge|RPC|uid)|Security violation", "authentication ", "security violation", weight=SHOWS),
        Pattern(r"(munged|munge\.socket|munge socket|munge\.key).{0,80}", "munged", "munge.socket", "munge socket", "munge.key", weight=SHOWS, unless="started|running normally"),
        Pattern(r"different slurm\.conf than the slurmctld", weight=SHOWS),
        Pattern(r"Zero Bytes were transmitted or received", weight=FITS),
    ),
    example="slurmd: error: Munge decode failed: Rewound credential",
    near_miss="munged[812]: Notice: Running on node-a",
)

SLURM_CONTROLLER_ERROR = Entry(
    id="slurm_controller_error",
    title="the scheduler's controller cannot work",
    cause="slurmctld or slurmdbd does not answer, cannot start, or speaks another version than this side.",
    fix="Nothing in the job is at fault: try again later, or tell the administrators with these lines; a submission that timed out may still have been taken (squeue).",
    next_test="scontrol ping; sdiag; on the controller: systemctl status slurmctld and its log",
    reference="https://slurm.schedmd.com/troubleshoot.html",
    patterns=(
        Pattern(r"Unable to contact slurm controller"),
        Pattern(r"slurm_load_(jobs|node|partitions?|ctl_conf)\w*.{0,10}error|slurm_\w+ error: (Unable|Socket|Zero)", "slurm_"),
        Pattern(r"(Socket|Message|connection) timed out on send/recv|Transport endpoint.{0,20}slurm", "timed out on send/recv", weight=SHOWS),
        Pattern(r"(slurmctld|slurmdbd|slurmd)\b.{0,80}(fatal|refused|down|not respond|unreachable|failed to start|abort|crash|segfault|core dump)", "slurmctld", "slurmdbd", "slurmd", weight=SHOWS, unless="slurmd.{0,40}Node|munge|credential|node .{0,20}not respond"),
        Pattern(r"fatal: .{0,80}(slurm|cluster|StateSaveLocation|plugin|association|state|CLUSTER NAME)", "fatal: ", weight=SHOWS, unless="git|repository"),
        Pattern(r"Incompatible versions of client and server|protocol version.{0,30}(mismatch|not support|incompatible)", "incompatible versions", "protocol version", weight=SHOWS),
        Pattern(r"temporarily unable to accept job", weight=SHOWS),
        Pattern(r"slurm_persist_conn_open|persist.{0,20}conn.{0,40}(fail|error)", "persist", weight=SHOWS),
        Pattern(r"(StateSaveLocation|job_state|state file|assoc_mgr|DBD).{0,60}(error|fail|corrupt|incompatible|No such|refused|could not)", "statesavelocation", "job_state", "state file", "assoc_mgr", " dbd", weight=SHOWS),
        Pattern(r"accounting storage.{0,40}(error|fail|unavailable|down)|Unable to contact (the )?(database|slurmdbd)", "accounting storage", "unable to contact", weight=SHOWS),
    ),
    example="sbatch: error: Batch job submission failed: Unable to contact slurm controller (connect failure)",
    near_miss="Slurmctld(primary) at ctl1 is UP",
)

NODE_UNHEALTHY = Entry(
    id="node_unhealthy",
    title="a health report names failing nodes",
    cause="A health check, or Slurm itself, has found a node that is not well and took it out or lost it.",
    fix="Leave the nodes that are named out (--exclude), and give the report to the administrators.",
    next_test="scontrol show node <node> (State, Reason); run the health check that failed once more on that node alone",
    reference="https://slurm.schedmd.com/scontrol.html",
    patterns=(
        Pattern(r"DUE TO NODE FAILURE|\bNODE_FAIL\b|JobState=NODE_FAIL|Node failure on", "node failure", "node_fail"),
        Pattern(r"\bnhc\b.{0,80}(fail|error)|Health ?check (failed|failure|error)", "nhc", "healthcheck fail", "health check fail", "healthcheck error", "health check error"),
        Pattern(r"(health|node|gpu|nic|ib|check|test|diag)\w*.{0,80}\b(FAIL(ED)?|CRITICAL|UNHEALTHY|NOT OK)\b", "fail", "critical", "unhealthy", "not ok", weight=FITS, unless=r"Error|error:|exception|CUDA|NCCL|c10|failed to|0 fail|fail(ed)?[:=] ?0|tests? passed|socket|connect"),
        Pattern(r"\bunhealthy\b.{0,40}(node|host|gpu)|(node|host|gpu)s?\b.{0,60}\bunhealthy\b", "unhealthy", unless="0 unhealthy|no unhealthy|unhealthy[^0-9]*0\\b"),
        Pattern(r"(State|state)=(DOWN|DRAIN\w*|FAIL\w*|NOT_RESPONDING)\S*|\bDOWN\*|\bdrain(ed|ing)?\*?\b.{0,80}(reason|node|fail|error)", "=down", "=drain", "=fail", "not_responding", "down*", "drain", weight=SHOWS),
        Pattern(r"(set|setting|mark\w*|put\w*) .{0,60}(node\w* )?.{0,40}(to )?(DOWN|DRAIN)\b|Reason=.{0,80}(fail|error|not responding|Kill task|unhealthy|check)", " down", "drain", "reason=", weight=SHOWS, unless="shut down"),
        Pattern(r"(nodes?|hosts?) \S+ (is |are )?not respond(ing)?|not responding, setting DOWN", "not respond", weight=SHOWS, unless="nfs"),
        Pattern(r"Kill task failed|Prolog error|Epilog error|prolog.{0,30}(fail|exit)", "kill task failed", "prolog", "epilog", weight=FITS),
        Pattern(r"(failing|failed|bad|faulty|broken|unreachable|excluded?|blacklist\w*) (nodes?|hosts?)\b.{0,10}[:=]? ?\S", " node", " host", weight=FITS, unless=r"nodes?\s*[:=]\s*(0|none|\[\])|to (node|host)|failed host"),
        Pattern(r"Machine Check|mce: \[Hardware Error\]|EDAC .{0,60}(UE|uncorrect)", "machine check", "hardware error", "edac ", weight=SHOWS),
    ),
    example="nhc[2113]: ERROR: nhc: Health check failed: check_hw_ib: No IB port is ACTIVE on node-q",
    near_miss="nhc[2113]: Health check passed on node-q",
)
