"""Failure classes of data: caches shared between ranks, stalled data loaders, unreachable hubs."""

from __future__ import annotations

from allranks.analysis.diagnose.patterns import PROGRAM, FailureClass, Pattern, certain, likely, possible, weak

CLASSES: tuple[FailureClass, ...] = (
    FailureClass(
        id="dataset_race",
        emitters=PROGRAM,
        title="ranks create or read the same files at once",
        cause="Several ranks prepare the same cached files at the same time; one rank reads, renames or deletes a file "
        "that another has not finished.",
        fix="Prepare on one rank, then a barrier, then all ranks read; or give each rank its own cache. allranks locks "
        "its cache and publishes it by one rename.",
        next_test="prepare the data once with a single process, then start the ranks on the finished cache: if that "
        "works, it was the race condition",
        reference="https://huggingface.co/docs/datasets/cache",
        patterns=likely(
            Pattern(
                r"No such file or directory.{0,200}(\.arrow|cache-|/datasets/|\.incomplete|_indices|_idx\.npy|\.tmp\b|/tmp\w+|torch_extensions|\.lock|index-cache|\.cache/)",
                unless=r"can't open file|/dev/shm|torch_\d+_|cannot open shared object|bash:|ssh|the record of this node",
            ),
            r"(failed|unable|cannot|could not) (to )?open (local )?file .{0,200}(\.arrow|\.incomplete|cache-|\.lock)",
            r"(\.arrow|cache-\w{6,}|dataset_info\.json|state\.json).{0,120}(No such file|not found|missing|does not exist|corrupt)",
            r"(not an Arrow file|Invalid flatbuffers|ArrowInvalid|Tried reading schema message|Expected to read \d+ metadata bytes|Unexpected end of stream)",
            r"FileExistsError|\[Errno 17\] File exists",
            Pattern(
                r"(race|racing|concurrent\w*|simultaneous\w*|at the same time).{0,80}(cache|dataset|download|preprocess|tokeniz|write|writing|map\()",
                unless="trace",
            ),
            Pattern(
                r"(cache|dataset|download|preprocess|tokeniz|index)\w*.{0,60}\b(race condition|race|corrupted by)",
                unless="trace",
            ),
        )
        + possible(
            Pattern(r"Directory not empty.{0,120}|\[Errno 39\]", unless="Errno (?!39)"),
            r"(filelock|FileLock|lock file|\.lock).{0,60}(timeout|could not be acquired|stale|Timeout)",
            r"(EOFError: Ran out of input|BadZipFile|zipfile\.BadZipFile)",
            r"(UnpicklingError|pickle data was truncated|mmap length is greater than file size)",
        ),
        example="FileNotFoundError: [Errno 2] No such file or directory: "
        "'/cache/json/default-1a2b/cache-77aa01bc.arrow'",
    ),
    FailureClass(
        id="stale_file_handle",
        title="a network file system lost its server or its file handles",
        cause="A file on a network file system became unavailable during the job: it was replaced on the server, or "
        "the client lost its connection and was evicted.",
        fix="Wait for the file system and resume from the checkpoint; do not replace files that a running job reads; "
        "keep small files on a local disk.",
        next_test="ls of that path on each node; check the kernel log for nfs, lustre or gpfs messages at that time",
        reference="https://man7.org/linux/man-pages/man3/errno.3.html",
        patterns=certain(
            Pattern(r"Stale (NFS )?file handle|ESTALE|\[Errno 116\]", unless=r"Errno (?!116)"),
            r"transport endpoint (shutdown|is not connected)",
            r"nfs: server \S+ not responding",
        )
        + likely(r"(Lustre|LustreError).{0,120}(evict|lost|timed out|not available)", r"Remote I/O error|\[Errno 121\]")
        + possible(r"\[Errno 5\] Input/output error"),
        example="OSError: [Errno 116] Stale file handle: '/scratch/run/model.bin'",
    ),
    FailureClass(
        id="storage_stalled",
        title="processes wait for a network file system",
        cause="Processes are in uninterruptible sleep (state D) in calls of a network file system, whose server does "
        "not answer.",
        fix="Have the server checked (load, quota, failover; the node's kernel log says 'server not responding'); end "
        "the job and resume from the last complete checkpoint. Save to a local disk first, or fewer ranks at once.",
        next_test="ps -eo pid,stat,wchan:32,cmd | awk '$2 ~ /^D/' on every node; dmesg | grep -i -e nfs -e lustre; "
        "time dd to that folder",
        reference="https://man7.org/linux/man-pages/man1/ps.1.html",
        patterns=certain(
            r"^\s*(?:\S+\s+)?\d+\s.{0,60}?\bD[+<Nls]*\s.{0,60}?\b(?:nfs\d?_\w+|rpc_(?:wait|async)\w*|ldlm_\w+|osc_\w+|ptlrpc_\w+|cl_sync_io\w*|ceph_\w+|fuse_\w+|request_wait_answer|cxiWait\w*|fhgfs\w*)"
        ),
        example=" 8121 D    nfs_start_io_read     python train.py",
    ),
    FailureClass(
        id="package_lock",
        emitters=PROGRAM | {"shell"},
        title="tasks wait for the lock of one package environment",
        cause="Many tasks build or check the same package environment at once, on shared storage: one holds the lock "
        "of its cache, and the others give up.",
        fix="Build the environment once before srun (uv sync, pip install, conda env create), and start the ranks with "
        "its own python, or with uv run --no-sync.",
        next_test="remove the installer from the command that every task runs; ls -l of the lock file shows whether a "
        "dead process left it",
        reference="https://docs.astral.sh/uv/concepts/cache/",
        patterns=certain(
            r"when waiting for lock on\b.{0,300}(?:another uv process|UV_LOCK_TIMEOUT)",
            r"(?:conda|mamba)\b.{0,80}(?:could not|failed to|unable to) (?:acquire|set) (?:a )?lock|LockError: Failed to acquire lock",
        ),
        example="error: Timeout (300s) when waiting for lock on `/shared/.venv` at `/shared/.cache/uv/.lock`, is "
        "another uv process running?",
    ),
    FailureClass(
        id="output_not_writable",
        title="the output folder cannot be written",
        cause="The process has no permission to write to the configured folder, or the file system is mounted "
        "read-only.",
        fix="Choose a folder that the job's user can write to on every node, and check it before the run starts "
        "(allranks doctor does).",
        next_test="touch a file in that folder from within a job step on each node",
        reference="https://man7.org/linux/man-pages/man2/open.2.html",
        patterns=likely(
            Pattern(
                r"PermissionError|\[Errno 13\] Permission denied", unless="ssh|publickey|bash:|execve|bind|munge|socket"
            ),
            r"Read-only file system",
            r"unable to create file\b.{0,200}errno = 13\b|\bcode: 13, kind: PermissionDenied",
            Pattern(
                r"(cannot|can'?t|could not|couldn'?t|unable to|failed to) (open|create|write)( to)? (output |checkpoint |the )*(file|folder|directory)\b.{0,200}\b(for (writing|output|appending)|for write)\b",
                unless="No space|errno = 28",
            ),
        ),
        example="PermissionError: [Errno 13] Permission denied: '/results/run7/metrics.json'",
    ),
    FailureClass(
        id="dataloader_hang",
        emitters=PROGRAM,
        title="one rank waits for its data while the others wait for it",
        cause="A rank is blocked in its data loader: a worker hangs or died, a file system does not answer, or the "
        "rank has no batches. The others wait in the collective.",
        fix="Check that rank's workers and paths; set DataLoader(timeout=...) so that it fails with an error; avoid "
        "fork with threads (multiprocessing_context='spawn').",
        next_test="py-spy dump --pid of that rank and of its workers shows where they are blocked",
        reference="https://docs.pytorch.org/docs/stable/data.html#multi-process-data-loading",
        patterns=certain(r"DataLoader timed out after \d+")
        + likely(
            Pattern(
                r"(data ?loader|_next_data|_try_get_data|next\(iter|data fetch|data loading|batch fetch).{0,80}(hang|hung|stuck|block(ed|ing|s)?\b|dead ?lock|never return|stall)",
                unless="non_?blocking",
            ),
            r"(hang|hung|stuck|blocked|dead ?locked|waiting|stall\w*) (in|at|on|for|inside) .{0,40}(data ?loader|_next_data|_try_get_data|data worker|next batch|its data)",
        )
        + possible(
            r"DataLoader worker \(pid\(s\) [\d, ]+\) exited unexpectedly",
            r"(_MultiProcessingDataLoaderIter|torch/utils/data/dataloader\.py).{0,60}(poll|_try_get_data|_get_data|_next_data)",
        )
        + weak(r"(poll|get|recv|wait) \(.{0,40}(multiprocessing/(queues|connection)|torch/utils/data)"),
        example="RuntimeError: DataLoader timed out after 120 seconds",
    ),
    FailureClass(
        id="hub_unreachable",
        emitters=PROGRAM | {"shell"},
        title="a model or data hub refuses or cannot be reached",
        cause="The node cannot reach the hub, or the hub refuses: no network on compute nodes, a missing or invalid "
        "token, a gated model, or too many requests.",
        fix="Download on the login node and run offline (HF_HUB_OFFLINE=1; allranks stage does it), or set the token "
        "(HF_TOKEN) where the ranks run.",
        next_test="inside the step: curl -sI https://huggingface.co; then the same with the token",
        reference="https://huggingface.co/docs/huggingface_hub/package_reference/environment_variables",
        patterns=certain(
            Pattern(r"We couldn'?t connect to|couldn'?t reach .{0,80}(hub|hugging|online|server)", passing=True),
            r"(Cannot|can'?t|not) .{0,20}(access|authorized).{0,40}(gated|restricted|private)|gated repo|Access to (model|dataset) .{0,80} is restricted",
        )
        + likely(
            Pattern(
                r"(ConnectTimeout|ReadTimeout|ConnectionError)\b.{0,200}(https?://|host=|hub)",
                passing=True,
                unless="localhost|127\\.0|wandb",
            ),
            Pattern(
                r"LocalEntryNotFoundError|OfflineModeIsEnabled|HfHubHTTPError|RepositoryNotFoundError|GatedRepoError|RevisionNotFoundError|EntryNotFoundError",
                "*notfounderror|offlinemodeisenabled|hfhubhttperror|gatedrepoerror",
                unless="ModuleNotFoundError|FileNotFoundError",
            ),
            Pattern(
                r"(HTTPS?ConnectionPool|MaxRetryError|Max retries exceeded|ProxyError|NewConnectionError)",
                passing=True,
                unless="wandb|localhost|127\\.0",
            ),
            r"(401|403|404|429|50[0234]) (Client|Server) Error",
            r"\b(status|HTTP|error|code)[ :=]*(401|403|429|502|503|504)\b.{0,120}(hub|hugging|repo|model|dataset|download|https?://)",
            Pattern(
                r"(huggingface\.co|hf\.co|modelscope|hf-mirror|cdn-lfs|s3\.amazonaws|storage\.googleapis|github\.com|pypi\.org).{0,160}(timed? ?out|refused|unreachable|Name or service not known|name resolution|reset by peer|SSLError|CERTIFICATE)",
                passing=True,
            ),
            Pattern(r"(Too Many Requests|rate limit(ed)?\b)", passing=True, unless="learning"),
            r"is not a local folder and is not a valid model identifier|cannot find the requested files in the (disk|local) cache",
            Pattern(r"check(out)? your internet connection", passing=True),
            r"outgoing traffic has been disabled|offline mode is enabled",
        )
        + possible(r"\b(401 Unauthorized|403 Forbidden)\b"),
        example="OSError: We couldn't connect to 'https://huggingface.co' to load this file, couldn't find it in the "
        "cached files",
    ),
)
