"""Failure classes of memory and disks: GPU memory, host memory, /dev/shm, file systems."""

from __future__ import annotations

from allranks.analysis.diagnose.patterns import POSSIBLE, PROGRAM, FailureClass, Pattern, certain, likely, possible

CLASSES: tuple[FailureClass, ...] = (
    FailureClass(
        id="cuda_oom",
        emitters=PROGRAM,
        title="GPU memory exhausted",
        cause="The model, its activations or another process on the same GPU need more memory than the GPU has.",
        fix="Use a smaller micro-batch or sequence with more accumulation, gradient checkpointing, sharding (ZeRO, "
        "FSDP) or LoRA; check that no other process uses the GPU.",
        next_test="allranks plan SPEC shows the memory per rank before anything runs; nvidia-smi lists other processes "
        "on the GPU",
        reference="https://docs.pytorch.org/docs/stable/notes/cuda.html#memory-management",
        patterns=certain(
            Pattern(r"(CUDA|HIP|XPU|NPU) out of memory", passing=True),
            Pattern(r"\bOutOfMemoryError\b", unless=r"java|\bray\."),
            r"RESOURCE_EXHAUSTED: Out of memory|Ran out of memory in memory space|Exceeded \w+ capacity by",
        )
        + likely(
            r"(CUDA|HIP) error: out of memory|Cuda failure.{0,12}out of memory",
            r"cudaErrorMemoryAllocation|CUDA_ERROR_OUT_OF_MEMORY|CUBLAS_STATUS_ALLOC_FAILED",
            Pattern(
                r"(GPU|device|VRAM).{0,40}(ran |runs |is )?out of (GPU |device |video )?memory",
                unless="host|cpu memory",
            ),
            r"Free memory on device .{0,60}less than (the )?(desired|requested)|No available memory for the cache blocks",
        )
        + possible(
            r"CUBLAS_STATUS_NOT_INITIALIZED|CUDNN_STATUS_(ALLOC_FAILED|NOT_INITIALIZED)",
            r"\bOOM\b.{0,40}\b(GPU|CUDA|VRAM|cuda:\d)|\b(GPU|CUDA|VRAM)\b.{0,20}\bOOM\b",
        ),
        example="torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.50 GiB. GPU 2 has a total capacity of "
        "79.10 GiB of which 310.00 MiB is free.",
    ),
    FailureClass(
        id="cuda_oom_optimizer_step",
        emitters=PROGRAM,
        title="GPU memory exhausted when the optimizer first steps",
        cause="Forward and backward fit, but the optimizer allocates its state at its first step: AdamW needs two more "
        "values per parameter (and often a float32 copy), which does not fit.",
        fix="Train fewer parameters (LoRA), shard the optimizer's state (ZeRO-1 or FSDP), offload it, or use an "
        "optimizer with less state.",
        next_test="allranks plan SPEC shows weights, gradients and optimizer state separately; if one step with SGD "
        "fits, this is the cause",
        reference="https://docs.pytorch.org/docs/stable/generated/torch.optim.AdamW.html",
        patterns=certain(
            r"out of memory.{0,200}(optimizer\.step|optimizer step|adamw?|_foreach_|exp_avg)",
            r"(optimizer\.step|optimizer step|_multi_tensor_\w+|_foreach_\w+|exp_avg|torch/optim/).{0,200}(out of memory|OutOfMemory|\bOOM\b)",
        ),
        example="torch.OutOfMemoryError: CUDA out of memory in optimizer.step() of AdamW. Tried to allocate 256.00 "
        "MiB.",
    ),
    FailureClass(
        id="host_oom",
        title="host memory exhausted",
        cause="The kernel or Slurm killed a process because host memory ran out: every rank loads the whole model or "
        "data set, there are too many data workers, or the job requested too little memory.",
        fix="Request more (--mem), load weights once per node or directly to the device, use fewer data workers, and "
        "use pinned memory sparingly.",
        next_test="sacct -j <job> -o JobID,State,MaxRSS,ReqMem; dmesg on the node shows the process that was killed "
        "and its size",
        reference="https://slurm.schedmd.com/sacct.html",
        patterns=certain(
            Pattern(
                r"oom[-_ ]?kill",
                unless=r"oom_kill(er)?_?(disable|mode|adj)|oom_kill 0\b|oom-killer: disabled|potential root causes",
            ),
            r"Out of memory: Kill(ed)? process|Memory cgroup out of memory",
            r"invoked oom-killer",
            r"exceeded (job |step |its )?memory (limit|request)|memory limit.{0,20}exceeded|(is )?being killed.{0,40}memory|exceeded .{0,20}virtual memory limit",
            r"killed due to memory pressure|exceeds the memory usage threshold|node (is |was )?running low on memory",
            r"task \d+.{0,4}: Out Of Memory|\bOUT_OF_ME(MORY|\+)",
            r"DefaultCPUAllocator.{0,40}(can'?t|not enough|cannot)",
        )
        + likely(
            r"exited on signal 9\b|signal 9 \(Killed\)",
            Pattern(
                r"(mmap|fork|alloc\w*|os\.fork\(\)|malloc).{0,60}Cannot allocate memory", unless="ibv_|mr_reg|verbs"
            ),
            r"\[Errno 12\] Cannot allocate memory|OSError.{0,10}Cannot allocate memory",
            Pattern(r"^(\w+\.)*\w*MemoryError\b", "*memoryerror", unless="OutOfMemoryError"),
            r"std::bad_alloc",
            r"malloc of size \d+ failed",
            r"Signal 9 \(SIGKILL\) received by PID",
            r"died with <Signals\.SIGKILL",
            r"\bterminated (with|by) signal (SIGKILL|9)\b",
            r"exitcode\W{0,2}\s*:\s*-9\b",
            r"is killed by signal: Killed",
            r"exit(ed with)? (exit )?(code|status)[ :]+137\b",
            r"(host|CPU|system|node) (memory|RAM).{0,40}(exhaust|ran out|out of|full|insufficient)",
            r"MaxRSS.{0,60}exceed",
        )
        + possible(
            Pattern(
                r"(task|process|worker|rank|pid)s? ?\d*.{0,30}: Killed\b|^\s*Killed\s*$|\bline \d+: +\d+ Killed\b",
                unless="killed by|subprocess",
            ),
            Pattern(r"(returned?|failed with|exit) .{0,20}(-9|exit code -9)\b", unless="exitcode"),
        ),
        example="slurmstepd: error: Detected 2 oom_kill events in StepId=4711.0. Some of the step tasks have been OOM "
        "Killed.",
    ),
    FailureClass(
        id="shm_too_small",
        title="/dev/shm is too small or full",
        cause="Data workers and NCCL share memory through /dev/shm. It is full, or the container has the default size "
        "of 64 MB.",
        fix="Start the container with --ipc=host or --shm-size=16g; remove files that dead jobs left in /dev/shm; use "
        "fewer data workers or prefetched batches.",
        next_test="df -h /dev/shm and ls -la /dev/shm on that node while the job runs",
        reference="https://docs.pytorch.org/docs/stable/data.html#multi-process-data-loading",
        patterns=certain(
            r"insufficient shared memory|out of shared memory|raise your shared memory limit",
            r"unable to (write to file|allocate shared memory|mmap \d+ bytes from file) ?(\(shm\))?.{0,20}</?torch",
            r"(No space left on device|ENOSPC|posix_fallocate failed|ftruncate|cannot allocate).{0,160}(/dev/shm|shared memory|nccl-)",
            r"(/dev/shm|shared memory|shm_open).{0,160}(No space left|ENOSPC|is full|too small|100%)",
            r"nccl-\w+.{0,160}(No space left|ENOSPC|is full|too small)",
            r"\bshm\w*\.(h|cc):\d+.{0,80}(No space left|posix_fallocate|ftruncate)",
        )
        + likely(
            r"Error while creating shared memory segment",
            Pattern(r"failed to (extend|attach|allocate|create).{0,20}/dev/shm/", unless="No such file"),
            r"unable to allocate shared memory ?\(shm\)",
            r"Unexpected bus error encountered in worker",
            r"is killed by signal: Bus error",
            r"unable to open shared memory object.{0,80}Too many open files",
        )
        + possible(r"unable to open shared memory object(?!.*No such file)", r"/dev/shm.{0,40}\b64 ?MB?\b|shm-size"),
        example="RuntimeError: DataLoader worker (pid 881) is killed by signal: Bus error. It is possible that "
        "dataloader's workers are out of shared memory.",
    ),
    FailureClass(
        id="shm_removed",
        title="shared-memory files were removed while the job used them",
        cause="Files in /dev/shm that the job used were deleted: systemd removed them when the user's last login "
        "session ended (RemoveIPC), or a clean-up script or another job of the user deleted them.",
        fix="Set RemoveIPC=no in logind.conf or enable lingering for the user; keep clean-up scripts from removing "
        "files of running jobs.",
        next_test="check whether it fails when the user logs out of that node: journalctl -u systemd-logind around "
        "that time",
        reference="https://www.freedesktop.org/software/systemd/man/latest/logind.conf.html",
        patterns=certain(
            r"(unable to open|could not open) shared memory object.{0,120}No such file",
            r"(shm_open|/dev/shm/\S+|shared memory (segment|object|file)).{0,120}(No such file|does not exist|vanished|removed|disappeared|deleted)",
            r"No such file or directory.{0,20}:? ?'?/?(dev/shm/|psm_|torch_\d+_|sem\.|mp-|nccl-\w{6}\b)",
        )
        + likely(r"Error while attaching to shared memory segment", r"RemoveIPC")
        + possible(
            Pattern(r"unable to open shared memory object(?!.*(No such file|Too many))", weight=POSSIBLE - 0.05)
        ),
        example="RuntimeError: unable to open shared memory object </torch_5512_88_3> in read-write mode: No such file "
        "or directory (2)",
    ),
    FailureClass(
        id="sigbus_memory",
        title="a bus error caused by lack of memory",
        cause="SIGBUS: the kernel could not provide memory for a mapped page (host memory or a file system was full, "
        "or a mapped file was truncated). It looks like a driver fault, but is not one.",
        fix="Request more memory for the job; check /dev/shm and the disk that holds memory-mapped files.",
        next_test="dmesg around that time: without an Xid it is not a driver fault; free -g and df -h on the node "
        "under load",
        reference="https://man7.org/linux/man-pages/man2/mmap.2.html",
        patterns=likely(
            r"exited on signal 7\b|signal 7 \(Bus",
            r"Signal 7 \(SIGBUS\)|\(SIGBUS\)|<Signals\.SIGBUS",
            r"exitcode\W{0,2}\s*:\s*-7\b",
            Pattern(
                r"Bus error.{0,30}(core dumped|nonexistent physical address|non-existent)|Caught signal 7|: Bus error\b",
                unless="killed by signal: Bus error|insufficient shared memory",
            ),
            r"^\s*Bus error\b|Fatal Python error: Bus error",
            r"exit(ed with)? (exit )?(code|status)[ :]+135\b",
        )
        + possible(r"\bSIGBUS\b"),
        example="  traceback : Signal 7 (SIGBUS) received by PID 7120",
    ),
    FailureClass(
        id="disk_full",
        title="a file system is full",
        cause="A write failed because the file system or the user's quota is full, most often from checkpoints, caches "
        "and core dumps.",
        fix="Delete old checkpoints and caches (in allranks, checkpoint.keep limits the number of checkpoints), or "
        "write to another file system.",
        next_test="df -h and df -i of the path in the message; quota -s (or lfs quota) for the user",
        reference="https://man7.org/linux/man-pages/man2/write.2.html",
        patterns=certain(
            Pattern(r"No space left on device", unless=r"/dev/shm|shared memory|torch_\d+_|nccl-|\bshm\w*\."),
            r"(Disk )?quota exceeded|\bEDQUOT\b|\[Errno 122\]",
            r"not enough (free )?(disk )?space|(disk|file ?system|volume|partition) (is )?full|out of disk space|insufficient (disk )?space",
        )
        + likely(
            Pattern(
                r"errno = (28|122)\b|\bcode: (28|122), kind: \w+|kind: StorageFull", unless=r"/dev/shm|shared memory"
            ),
            Pattern(r"\[Errno 28\]|\bENOSPC\b", unless=r"/dev/shm|shared memory"),
            r"(file size limit exceeded|No inodes|inode.{0,20}exhaust)",
        )
        + possible(r"PytorchStreamWriter failed writing file|inline_container.{0,60}(write|unexpected pos)"),
        example="OSError: [Errno 28] No space left on device: '/ckpt/step-900/model.safetensors'",
    ),
)
