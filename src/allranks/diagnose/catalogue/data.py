"""Data: caches that ranks share, loaders that wait, hubs that do not answer."""

from __future__ import annotations

from allranks.diagnose.catalogue.entry import FITS, HINTS, SHOWS, Entry, Pattern

DATASET_RACE = Entry(
    id="dataset_race",
    title="ranks create or read the same files at once",
    cause="Several ranks prepare the same cached files at the same time; one reads, renames or deletes what another has not finished.",
    fix="Prepare on one rank, then a barrier, then all ranks read; or give each rank its own cache. allranks locks its cache and publishes it by one rename.",
    next_test="prepare the data once with a single process, then start the ranks on the finished cache: if that works, it was the race",
    reference="https://huggingface.co/docs/datasets/cache",
    patterns=(
        Pattern(r"No such file or directory.{0,200}(\.arrow|cache-|/datasets/|\.incomplete|_indices|_idx\.npy|\.tmp\b|/tmp\w+|torch_extensions|\.lock|index-cache|\.cache/)", "no such file or directory", weight=SHOWS, unless=r"can't open file|/dev/shm|torch_\d+_|cannot open shared object|bash:|ssh"),
        Pattern(r"(\.arrow|cache-\w{6,}|dataset_info\.json|state\.json).{0,120}(No such file|not found|missing|does not exist|corrupt)", ".arrow", "cache-", "dataset_info", "state.json", weight=SHOWS),
        Pattern(r"(not an Arrow file|Invalid flatbuffers|ArrowInvalid|Tried reading schema message|Expected to read \d+ metadata bytes|Unexpected end of stream)", "not an arrow file", "invalid flatbuffers", "arrowinvalid", "tried reading schema", "metadata bytes", "unexpected end of stream", weight=SHOWS),
        Pattern(r"FileExistsError|\[Errno 17\] File exists", "fileexistserror", "file exists", weight=SHOWS),
        Pattern(r"Directory not empty.{0,120}|\[Errno 39\]", "directory not empty", "[errno ", weight=FITS, unless="Errno (?!39)"),
        Pattern(r"(race|racing|concurrent\w*|simultaneous\w*|at the same time).{0,80}(cache|dataset|download|preprocess|tokeniz|write|writing|map\()", "race", "racing", "concurrent", "simultaneous", "at the same time", weight=SHOWS, unless="trace"),
        Pattern(r"(cache|dataset|download|preprocess|tokeniz|index)\w*.{0,60}\b(race condition|race|corrupted by)", "race", "corrupted by", weight=SHOWS, unless="trace"),
        Pattern(r"(filelock|FileLock|lock file|\.lock).{0,60}(timeout|could not be acquired|stale|Timeout)", "lock", weight=FITS),
        Pattern(r"(EOFError: Ran out of input|BadZipFile|zipfile\.BadZipFile)", "ran out of input", "badzipfile", weight=FITS),
        Pattern(r"(UnpicklingError|pickle data was truncated|mmap length is greater than file size)", "unpicklingerror", "pickle data was truncated", "mmap length is greater", weight=FITS),
    ),
    example="FileNotFoundError: [Errno 2] No such file or directory: '/cache/json/default-1a2b/cache-77aa01bc.arrow'",
    near_miss="INFO loading cached processed dataset at /cache/json/default-1a2b/cache-77aa01bc.arrow",
)

STALE_FILE_SYSTEM = Entry(
    id="stale_file_handle",
    title="a network file system lost its server or its handles",
    cause="A file on a network file system went away under the job: it was replaced on the server, or the client lost its connection and was evicted.",
    fix="Wait for the file system and start again from the checkpoint; do not replace files that a running job reads; keep small files on a local disk.",
    next_test="ls of that path on each node; the kernel log for nfs, lustre or gpfs messages at that time",
    reference="https://man7.org/linux/man-pages/man3/errno.3.html",
    patterns=(
        Pattern(r"Stale (NFS )?file handle|ESTALE|\[Errno 116\]", "stale ", "estale", "[errno ", unless=r"Errno (?!116)"),
        Pattern(r"transport endpoint (shutdown|is not connected)", "transport endpoint "),
        Pattern(r"nfs: server \S+ not responding", "nfs: server"),
        Pattern(r"(Lustre|LustreError).{0,120}(evict|lost|timed out|not available)", "lustre", weight=SHOWS),
        Pattern(r"Remote I/O error|\[Errno 121\]", "remote i/o error", weight=SHOWS),
        Pattern(r"\[Errno 5\] Input/output error", "input/output error", weight=FITS),
    ),
    example="OSError: [Errno 116] Stale file handle: '/scratch/run/model.bin'",
    near_miss="INFO handle of file refreshed",
)

OUTPUT_NOT_WRITABLE = Entry(
    id="output_not_writable",
    title="the output folder cannot be written",
    cause="The process may not write where it was told to, or the file system is mounted read-only.",
    fix="Choose a folder that the job's user may write on every node, and check it before the run starts (allranks doctor does).",
    next_test="touch a file in that folder from within a job step on each node",
    reference="https://man7.org/linux/man-pages/man2/open.2.html",
    patterns=(
        Pattern(r"PermissionError|\[Errno 13\] Permission denied", "permissionerror", "permission denied", weight=SHOWS, unless="ssh|publickey|bash:|execve|bind|munge|socket"),
        Pattern(r"Read-only file system", weight=SHOWS),
    ),
    example="PermissionError: [Errno 13] Permission denied: '/results/run7/metrics.json'",
    near_miss="Permission denied (publickey,password).",
)

DATALOADER_HANG = Entry(
    id="dataloader_hang",
    title="one rank waits for its data while the others wait for it",
    cause="A rank stands in its data loader: a worker that hangs or died, a file system that does not answer, or a rank without batches. The others wait in the collective.",
    fix="Look at that rank's workers and paths; set DataLoader(timeout=...) so that it fails with a name; avoid fork with threads (multiprocessing_context='spawn').",
    next_test="py-spy dump --pid of that rank and of its workers: where do they stand?",
    reference="https://docs.pytorch.org/docs/stable/data.html#multi-process-data-loading",
    patterns=(
        Pattern(r"DataLoader timed out after \d+", "dataloader timed out"),
        Pattern(r"(data ?loader|_next_data|_try_get_data|next\(iter|data fetch|data loading|batch fetch).{0,80}(hang|hung|stuck|block(ed|ing|s)?\b|dead ?lock|never return|stall)", "dataloader", "data loader", "_next_data", "_try_get_data", "next(iter", "data fetch", "data loading", "batch fetch", weight=SHOWS, unless="non_?blocking"),
        Pattern(r"(hang|hung|stuck|blocked|dead ?locked|waiting|stall\w*) (in|at|on|for|inside) .{0,40}(data ?loader|_next_data|_try_get_data|data worker|next batch|its data)", "dataloader", "data loader", "_next_data", "_try_get_data", "data worker", "next batch", "its data", weight=SHOWS),
        Pattern(r"DataLoader worker \(pid\(s\) [\d, ]+\) exited unexpectedly", "exited unexpectedly", weight=FITS),
        Pattern(r"(_MultiProcessingDataLoaderIter|torch/utils/data/dataloader\.py).{0,60}(poll|_try_get_data|_get_data|_next_data)", "dataloader", weight=FITS),
        Pattern(r"(poll|get|recv|wait) \(.{0,40}(multiprocessing/(queues|connection)|torch/utils/data)", "multiprocessing/", "torch/utils/data", weight=HINTS),
    ),
    example="RuntimeError: DataLoader timed out after 120 seconds",
    near_miss="INFO DataLoader uses 4 workers, timeout 120 s",
)

HUB_UNREACHABLE = Entry(
    id="hub_unreachable",
    title="a model or data hub refuses or cannot be reached",
    cause="The node has no way to the hub, or the hub refuses: no network on compute nodes, a missing or refused token, a gated model, too many requests.",
    fix="Download on the login node and run offline (HF_HUB_OFFLINE=1; allranks stage does it), or give the token (HF_TOKEN) where the ranks run.",
    next_test="from within the step: curl -sI https://huggingface.co; then the same with the token",
    reference="https://huggingface.co/docs/huggingface_hub/package_reference/environment_variables",
    patterns=(
        Pattern(r"We couldn'?t connect to|couldn'?t reach .{0,80}(hub|hugging|online|server)", "t connect to", "t reach ", passing=True),
        Pattern(r"LocalEntryNotFoundError|OfflineModeIsEnabled|HfHubHTTPError|RepositoryNotFoundError|GatedRepoError|RevisionNotFoundError|EntryNotFoundError", "notfounderror", "offlinemodeisenabled", "hfhubhttperror", "gatedrepoerror", weight=SHOWS, unless="ModuleNotFoundError|FileNotFoundError"),
        Pattern(r"(HTTPS?ConnectionPool|MaxRetryError|Max retries exceeded|ProxyError|NewConnectionError)", "connectionpool", "maxretryerror", "max retries exceeded", "proxyerror", "newconnectionerror", weight=SHOWS, passing=True, unless="wandb|localhost|127\\.0"),
        Pattern(r"(401|403|404|429|50[0234]) (Client|Server) Error", " error", weight=SHOWS),
        Pattern(r"\b(status|HTTP|error|code)[ :=]*(401|403|429|502|503|504)\b.{0,120}(hub|hugging|repo|model|dataset|download|https?://)", "status", "http", "error", "code", weight=SHOWS),
        Pattern(r"(Cannot|can'?t|not) .{0,20}(access|authorized).{0,40}(gated|restricted|private)|gated repo|Access to (model|dataset) .{0,80} is restricted", "gated", "restricted", "private"),
        Pattern(r"(huggingface\.co|hf\.co|modelscope|hf-mirror|cdn-lfs|s3\.amazonaws|storage\.googleapis|github\.com|pypi\.org).{0,160}(timed? ?out|refused|unreachable|Name or service not known|name resolution|reset by peer|SSLError|CERTIFICATE)", "huggingface.co", "hf.co", "modelscope", "hf-mirror", "cdn-lfs", "amazonaws", "googleapis", "github.com", "pypi.org", weight=SHOWS, passing=True),
        Pattern(r"(Too Many Requests|rate limit(ed)?\b)", "too many requests", "rate limit", weight=SHOWS, passing=True, unless="learning"),
        Pattern(r"is not a local folder and is not a valid model identifier|cannot find the requested files in the (disk|local) cache", "not a local folder", "cannot find the requested files", weight=SHOWS),
        Pattern(r"outgoing traffic has been disabled|offline mode is enabled", "outgoing traffic", "offline mode is enabled", weight=SHOWS),
    ),
    example="OSError: We couldn't connect to 'https://huggingface.co' to load this file, couldn't find it in the cached files",
    near_miss="INFO connected to the hub, 14 files in cache",
)
