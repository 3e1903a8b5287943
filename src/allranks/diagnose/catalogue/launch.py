"""Getting the program to every node: scripts, paths, SSH launchers, the program's own errors."""

from __future__ import annotations

from allranks.diagnose.catalogue.entry import FITS, SAYS, SHOWS, Entry, Pattern

SCRIPT_NOT_FOUND = Entry(
    id="script_not_found",
    title="script, module or project folder is not visible on a node",
    cause="The path exists where the job was submitted but not on the node: it lies in a node's own /tmp, on a file system that is not mounted there, or the name is wrong.",
    fix="Put script and project on a file system that every node sees, or send them (allranks stage does it, and run does so by itself for /tmp).",
    next_test="srun --ntasks-per-node=1 ls -ld <path> on all nodes of the job",
    reference="https://slurm.schedmd.com/sbcast.html",
    patterns=(
        Pattern(r"can'?t open file .{1,200}(No such file|Errno 2)", "open file ", weight=SAYS),
        Pattern(
            r"python[\d.]*: No module named|can'?t find '__main__' module|Error while finding module specification",
            ": no module named",
            "__main__",
            "finding module spec",
            weight=SHOWS,
        ),
        Pattern(
            r"couldn'?t chdir to|could not (chdir|change (to )?directory)",
            " chdir",
            "change directory",
            "change to directory",
            weight=SHOWS,
        ),
        Pattern(
            r"execve\(\).{0,200}No such file|error: (Unable to open|cannot open) (file|script|batch)",
            "execve()",
            "unable to open",
            "cannot open",
            weight=SAYS,
        ),
        Pattern(
            r"\b(bash|sh|zsh|env|srun|sbatch|exec|mpirun)\b.{0,12}: .{1,160}\.?(sh|py|sbatch|slurm|bash)\S*: No such file or directory",
            "no such file or directory",
            weight=SAYS,
        ),
        Pattern(
            r"\b(bash|sh|zsh|env|line \d+|slurm_script)\b.{0,20}: .{1,160}: No such file or directory",
            "no such file or directory",
            weight=SHOWS,
        ),
        Pattern(r"No such file or directory: '?[^']{0,200}\.(py|sh)\b", "no such file or directory", weight=SHOWS),
        Pattern(
            r"(project|script|workdir|working directory|code|folder).{0,80}(not (visible|found|there|mounted|present|exist)|does not exist|missing)( on)?",
            "not visible",
            "not found",
            "not mounted",
            "not present",
            "does not exist",
            "not exist",
            "missing",
            weight=FITS,
            unless="checkpoint|module named|vscode|error code|exit code",
        ),
        Pattern(r"proj(ect)?=missing|pkgs=missing", "=missing", weight=SHOWS),
        Pattern(r"Unable to (open|find) .{1,100}\.(py|sh|sbatch)\b", "unable to ", weight=SHOWS),
    ),
    example="/usr/bin/python3: can't open file '/tmp/train_job.py': [Errno 2] No such file or directory",
    near_miss="INFO opened /shared/train_job.py on 4 nodes",
)

SSH_LAUNCHER = Entry(
    id="ssh_launcher",
    title="the launcher needs SSH, or its remote side failed",
    cause="The launcher starts its remote side by SSH (DeepSpeed's pdsh, mpirun's rsh): the cluster forbids it, keys or host keys are missing, or the command is not there on the other node.",
    fix="Start with srun and torchrun, one a node, which need no SSH (allranks run does); or set up keys, and install the command on every node.",
    next_test="ssh -o BatchMode=yes <node> true from the first node of the job",
    reference="https://www.deepspeed.ai/getting-started/#launching-deepspeed-training",
    patterns=(
        Pattern(r"pdsh@\S+: ", "pdsh@", weight=SAYS),
        Pattern(r"ssh exited with exit code"),
        Pattern(
            r"(Permission denied|Authentication failed).{0,10}\((publickey|password|gssapi|keyboard)",
            "permission denied",
            "authentication failed",
        ),
        Pattern(
            r"Host key verification failed|REMOTE HOST IDENTIFICATION HAS CHANGED",
            "host key verification",
            "remote host identification",
        ),
        Pattern(
            r"ssh: (connect to host|Could not resolve)|(ssh|kex)_exchange_identification",
            "ssh: ",
            "exchange_identification",
        ),
        Pattern(
            r"\bport 22\b.{0,30}(refused|timed out|No route)|connect to host \S+ port \d+",
            "port ",
            weight=SHOWS,
            unless="rdzv|master",
        ),
        Pattern(
            r"pdsh.{0,60}(not found|not installed|No such file)|launcher '?pdsh'? (is )?not installed|backend 'pdsh'",
            "pdsh",
        ),
        Pattern(
            r"(ORTE|PRTE|orted|prted|mpirun|mpiexec|hydra).{0,160}(unable to (reliably )?(start|launch)|failed to start|unexpectedly failed|not able to launch|daemon)",
            "orte",
            "prte",
            "mpirun",
            "mpiexec",
            "hydra",
            weight=SHOWS,
            unless="noticed that",
        ),
        Pattern(
            r"SSH keys? (is|are) required|requires? (passwordless )?ssh|passwordless ssh",
            " ssh",
            "ssh key",
            weight=SHOWS,
        ),
        Pattern(r"Use of .{0,60}SSH keys", "ssh keys", weight=SHOWS),
        Pattern(
            r"/etc/ssh/|ssh_askpass|Pseudo-terminal will not be allocated",
            "/etc/ssh/",
            "ssh_askpass",
            "pseudo-terminal",
            weight=FITS,
        ),
    ),
    example="pdsh@login1: node-b: ssh exited with exit code 255",
    near_miss="INFO sshd is running on node-b",
)

APPLICATION_ERROR = Entry(
    id="application_error",
    title="the program's own exception",
    cause="The program raised an error of its own; everything after it is tear-down of the other ranks.",
    fix="Mend what the exception names; the line of the program is the last frame of its traceback.",
    next_test="run the same command on one rank: if it fails there too, distribution has no part in it",
    reference="https://docs.pytorch.org/docs/stable/elastic/errors.html",
    patterns=(Pattern(r"^\S+\.py: error: (unrecognized|the following|argument|invalid)", ".py: error: ", weight=0.74),),
    example="KeyError: 'labels'",
    near_miss="torch.distributed.elastic.multiprocessing.errors.ChildFailedError:",
)
