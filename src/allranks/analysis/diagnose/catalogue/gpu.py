"""Failure classes of GPUs: device selection, hardware health, and faults of programs on the GPU."""

from __future__ import annotations

from allranks.analysis.diagnose.patterns import MACHINE, PROGRAM, FailureClass, Pattern, certain, likely, possible, weak

CLASSES: tuple[FailureClass, ...] = (
    FailureClass(
        id="p2p_unsupported",
        emitters=MACHINE,
        title="GPU peer access fails between GPUs",
        cause="The driver refuses direct access from one GPU to the memory of another: a GPU model that does not "
        "support it, a virtual machine, or two containers.",
        fix="Set NCCL_P2P_DISABLE=1 for such GPUs; for CUDA failure 217 with NCCL's cuMem, set "
        "NCCL_CUMEM_HOST_ENABLE=0 or NCCL_CUMEM_ENABLE=0.",
        next_test="torch.cuda.can_device_access_peer(0, 1), or p2pBandwidthLatencyTest; nvidia-smi topo -p2p r",
        reference="https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html#nccl-p2p-disable",
        patterns=certain(
            r"peer access is not supported between these two devices|peer access (is )?not supported",
            r"cudaErrorPeerAccessUnsupported|peer mapping resources exhausted|cudaErrorTooManyPeers",
            r"Cuda failure '?217\b",
            r"doesn'?t support faster communication.{0,30}(P2P|IB)",
        )
        + likely(r"Could not enable P2P between", r"peer.to.peer.{0,60}(not supported|unsupported|unavailable|fail)")
        + possible(
            r"cuMemImportFromShareableHandle.{0,80}|cudaIpcOpenMemHandle.{0,60}(fail|error|invalid)",
            r"p2p\.cc:\d+.{0,40}(Cuda failure|WARN)",
        ),
        example="node-a:3:8 [1] transport/p2p.cc:275 NCCL WARN Cuda failure 217 'peer access is not supported between "
        "these two devices'",
    ),
    FailureClass(
        id="duplicate_gpu",
        emitters=PROGRAM,
        title="two ranks on one GPU",
        cause="Two ranks of a group use the same GPU: the program does not select it by local rank, or each process "
        "sees only the same device.",
        fix="Call torch.cuda.set_device(int(os.environ['LOCAL_RANK'])) before any GPU work; start one launcher per "
        "node, and no more ranks than GPUs.",
        next_test="print rank, host, CUDA_VISIBLE_DEVICES and the device's UUID on each rank",
        reference="https://docs.pytorch.org/docs/stable/elastic/run.html",
        patterns=certain(r"Duplicate GPU detected", r"ranks? \d+ and (rank )?\d+ both on (CUDA )?device")
        + likely(r"(two|multiple|several) (ranks|processes) .{0,40}(same|one) GPU"),
        example="node-b:6:9 [0] init.cc:940 NCCL WARN Duplicate GPU detected : rank 6 and rank 2 both on CUDA device "
        "4f000",
    ),
    FailureClass(
        id="invalid_device",
        emitters=PROGRAM,
        title="a rank selects a GPU that does not exist",
        cause="The device index is not below the number of GPUs that the process sees: more ranks than GPUs, a global "
        "rank used as device, or Slurm binding one GPU to each task.",
        fix="Use the local rank as device, and start as many ranks per node as it has visible GPUs; with "
        "--gpus-per-task=1 every rank's device is 0.",
        next_test="on that node: echo $CUDA_VISIBLE_DEVICES; python -c 'import torch; "
        "print(torch.cuda.device_count())' inside the same step",
        reference="https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__TYPES.html",
        patterns=certain(
            Pattern(
                r"invalid device ordinal|cudaErrorInvalidDevice\b|CUDA_ERROR_INVALID_DEVICE\b",
                unless="cuMemImport|cudaIpc",
            )
        )
        + likely(
            r"(CUDA|HIP) error[: ]+101\b",
            r"Invalid device (id|index|string)|device (index|id) .{0,20}out of range",
            r"torch\.cuda\.device_count\(\) is \d+",
            r"(device|GPU) \d+ .{0,30}(not (available|present|visible)|does not exist).{0,30}(only|device_count|visible)",
        ),
        example="RuntimeError: CUDA error: invalid device ordinal",
    ),
    FailureClass(
        id="no_gpu",
        emitters=MACHINE | {"shell"},
        title="no GPU is visible to the process",
        cause="The process sees no usable GPU: none was requested from the scheduler, the container was started "
        "without GPUs, the driver is missing or incompatible, or torch is a CPU build.",
        fix="Request GPUs (--gpus-per-node), start the container with them (--nv, --gpus all), install a torch build "
        "that matches the driver.",
        next_test="inside the same step: nvidia-smi -L; echo $CUDA_VISIBLE_DEVICES; python -c 'import torch; "
        "print(torch.version.cuda, torch.cuda.is_available())'",
        reference="https://docs.pytorch.org/get-started/locally/",
        patterns=certain(
            r"No CUDA GPUs are available|no (CUDA|NVIDIA|HIP) (GPUs?|devices?) (are |were )?(found|available|detected|visible)",
            r"No HIP GPUs are available",
            r"could not select device driver .{0,80}gpu",
            r"ProcessGroupNCCL is only supported with GPUs|no GPUs found",
            r"no CUDA-capable device|cudaErrorNoDevice",
            r"Found no NVIDIA driver",
            r"Torch not compiled with CUDA enabled",
        )
        + likely(
            r"nvidia-container-cli: (initialization|device|mount) error",
            r"NVIDIA-SMI has failed|couldn'?t communicate with the NVIDIA driver",
            r"No devices were found",
            r"(NVIDIA |CUDA )?driver .{0,30}(too old|insufficient)|CUDA driver version is insufficient",
            r"Driver/library version mismatch|forward compatibility was attempted",
        )
        + possible(
            Pattern(
                r"CUDA initialization: |CUDA driver initialization failed|CUDA unknown error",
                unless="802|system not yet initialized|out of memory",
            ),
            r"torch\.cuda\.is_available\(\).{0,30}(False|must be True)",
            Pattern(
                r"nvml.{0,40}(not found|Unknown Error|not initialized|NVML_ERROR_(LIBRARY_NOT_FOUND|NOT_FOUND))|Failed to initialize NVML",
                unless="gpu is lost",
            ),
        ),
        example="RuntimeError: No CUDA GPUs are available",
    ),
    FailureClass(
        id="fabric_manager",
        emitters=MACHINE,
        title="the NVSwitch fabric manager is not ready",
        cause="On machines with NVSwitch the GPUs cannot be used until nvidia-fabricmanager runs, in exactly the "
        "driver's version. nvidia-smi works without it.",
        fix="systemctl restart nvidia-fabricmanager on that node (same version as the driver); exclude the node until "
        "then.",
        next_test="on the node: systemctl status nvidia-fabricmanager; nvidia-smi -q | grep -A2 Fabric must say State: "
        "Completed",
        reference="https://docs.nvidia.com/datacenter/tesla/fabric-manager-user-guide/index.html",
        patterns=certain(r"system not yet initialized|cudaErrorSystemNotReady|CUDA_ERROR_SYSTEM_NOT_READY")
        + likely(
            r"(CUDA|cudaGetDeviceCount|Error|error)[^\n]{0,30}\b802\b",
            Pattern(
                r"(nvidia-)?fabric ?manager.{0,120}(fail|not (running|active|ready|started|installed|found)|error|inactive|dead|mismatch|version|exited)",
                unless="version [\\d.]+ (started|running)|successfully",
            ),
            r"Failed to (bind|create|import) NVLink SHARP|NVLS.{0,40}Multicast.{0,80}(fail|error)",
            Pattern(r"NVSwitch.{0,80}(fail|fatal|error|not initialized)|NV_WARN_NVSWITCH", unless="non.?fatal"),
        )
        + possible(r"fabric (manager )?state.{0,20}(In Progress|Not Started|Not Supported)"),
        example="RuntimeError: Unexpected error from cudaGetDeviceCount(). Error 802: system not yet initialized",
    ),
    FailureClass(
        id="gpu_hardware_fault",
        emitters=MACHINE,
        ends_job=False,
        title="the GPU or its link is faulty",
        cause="The driver reports an error of the device itself: uncorrectable ECC errors, NVLink or PCIe errors, a "
        "GPU that fell off the bus, or firmware (GSP) that does not respond.",
        fix="Exclude the node (--exclude=<node>), reset the GPU or reboot, and replace the GPU if the error returns. "
        "Code and batch size are not the cause.",
        next_test="on that node: dmesg | grep -i xid; nvidia-smi -q -d ECC,ROW_REMAPPER; dcgmi diag -r 3; the same job "
        "on other nodes",
        reference="https://docs.nvidia.com/deploy/xid-errors/index.html",
        patterns=certain(
            Pattern(
                r"(uncorrectable|double.?bit|\bDBE\b).{0,30}(\bECC\b|error|NVLink)|cudaErrorECCUncorrectable|\bECC\b.{0,30}uncorrect",
                unless=r"(count|errors?|total|aggregate|volatile)\s*[:=]\s*0\b|0 uncorrect",
            ),
            r"fallen off the bus|GPU is lost|GPU (has )?disappeared|lost (contact|communication) with (the )?GPU",
            r"Unable to determine the device handle",
            r"\b(GSP|RPC)\b.{0,80}(timeout|timed out|time.?out waiting)|Timeout (after|waiting).{0,60}\b(GSP|RPC)\b",
            Pattern(
                r"row.?remap.{0,40}(fail|pending)|remapping fail|retired pages? pending",
                unless=r"(pending|occurred|failed?)\s*:\s*(no|0|none|n/a)\b",
            ),
            r"RmInitAdapter failed|rm_init_adapter failed",
        )
        + likely(
            Pattern(
                r"NVLink.{0,60}(error|fatal|down|fail|uncorrect)",
                unless="error (count|counters?)[^0-9]*0\\b|non.?fatal",
            ),
            Pattern(r"\b(PCIe|AER)\b.{0,80}(uncorrect|fatal)", unless=r"non.?fatal|(?<!un)correct"),
            r"GPU.{0,60}(needs? (a )?reset|requires? (a )?reset|reset required|hardware (fault|error|failure)|is (bad|faulty|broken))",
            r"cudaErrorNvlinkUncorrectable|cudaErrorHardwareStackError|CUDA_ERROR_HARDWARE",
            r"dcgm.{0,80}(diag|health|level).{0,40}(fail|error)",
        )
        + possible(r"\b(GPU|NVRM)\b.{0,40}\b(ECC|memory) (error|page retire)")
        + weak(
            r"NVLink.{0,60}inactive",  # also printed for a GPU without an NVLink bridge
            r"unspecified launch failure|cudaErrorLaunchFailure",
        ),
        example="[ 7211.440102] NVRM: Xid (PCI:0000:c1:00): 79, pid=2201, name=python, GPU has fallen off the bus.",
    ),
    FailureClass(
        id="gpu_application_fault",
        emitters=MACHINE,
        title="illegal memory access of the program on the GPU",
        cause="A kernel read or wrote outside of its memory, or an assertion on the device failed (most often an index "
        "out of range, such as a label or token ID beyond the table size).",
        fix="Run with CUDA_LAUNCH_BLOCKING=1 to see the operation, check indices against vocabulary and label sizes, "
        "and check custom kernels.",
        next_test="the same batch on CPU shows the bad index; compute-sanitizer shows the kernel. If the same host "
        "fails with other programs, it is the GPU",
        reference="https://docs.nvidia.com/deploy/xid-errors/index.html",
        patterns=certain(
            r"illegal memory access|cudaErrorIllegalAddress|CUDA_ERROR_ILLEGAL_ADDRESS",
            # torch adds the hint to every error of CUDA
            Pattern(r"device-side assert|cudaErrorAssert\b", unless="to enable device-side assert"),
            r"misaligned address|illegal instruction was encountered|cudaErrorMisalignedAddress",
            r"(Assertion `.{0,80}(idx|index|src|target|t >= 0|n_classes|out of bounds).{0,80} failed)",
        )
        + likely(r"MMU Fault")
        + possible(
            r"unspecified launch failure|cudaErrorLaunchFailure",
            r"CUBLAS_STATUS_(EXECUTION_FAILED|INTERNAL_ERROR|INVALID_VALUE)|CUDNN_STATUS_(EXECUTION_FAILED|INTERNAL_ERROR|MAPPING_ERROR)",
        ),
        example="torch.AcceleratorError: CUDA error: an illegal memory access was encountered",
    ),
    FailureClass(
        id="gpu_throttled",
        emitters=MACHINE,
        ends_job=False,
        title="GPU clocks are throttled by power or temperature",
        cause="The GPU runs far below its clock because it is too hot, the power supply signals a power brake, or a "
        "power limit was set.",
        fix="Exclude the node and report it: fans, inlet temperature, power supplies; reset a power limit that was set "
        "by hand.",
        next_test="compare nvidia-smi -q -d PERFORMANCE,CLOCK,POWER,TEMPERATURE under load with a healthy node",
        reference="https://docs.nvidia.com/deploy/nvidia-smi/index.html",
        patterns=certain(
            Pattern(
                r"(HW|hw_)[ _]?(Slowdown|Thermal|Power.?Brake)[\w ]*\s*[:=]\s*(Active|1|true)\b",
                "slowdown|thermal|brake",
            ),
            Pattern(
                r"(power brake|thermal slowdown|hw slowdown|thermal (throttl|violation))",
                unless=r"[:=]\s*(not active|0|inactive|false|n/a)|no (thermal|power)",
            ),
        )
        + likely(
            Pattern(
                r"throttle.?reasons?\b.{0,60}\b(hw_(slowdown|thermal\w*|power_brake\w*)|sw_thermal\w*|power.?brake|thermal)",
                unless=r"throttle_reasons\.|not active",
            ),
            r"temperature above threshold|clock throttled",
            Pattern(r"(GPU|clock|SM).{0,60}throttl(ed|ing)", unless="not throttl|no throttl|none"),
            r"(SM|graphics|gpu) ?clocks?.{0,30}(stuck|capped|limited|locked|dropped|only)",
            r"(overheat|too hot|over.?temperature)",
        )
        + weak(r"SW Power Cap\s*:\s*Active"),
        example="        HW Power Brake Slowdown                          : Active",
    ),
    FailureClass(
        id="straggler",
        emitters=PROGRAM,
        ends_job=False,
        title="one rank is slower than its peers",
        cause="Every step waits for the slowest rank. One rank or host is always slower: a throttled or slow GPU, a "
        "slow path to data, or a busy CPU.",
        fix="Exclude that host, or find what is slow there (clocks, data loading, other processes); the other ranks "
        "are not the cause.",
        next_test="compare step times without waiting (compute only) per rank; swap the ranks between hosts and check "
        "whether the slowness stays with the host",
        reference="https://nvidia.github.io/nvidia-resiliency-ext/straggler_det/index.html",
        patterns=certain(
            r"STRAGGLER DETECTION WARNING",
            Pattern(
                r"straggl(er|ing)s?\b.{0,40}\b(detected|found|identified)\b",
                unless=r"\b(no|0|zero|without|not|any|if)\b.{0,30}straggl|straggl.{0,40}\b(not|no|none)\b",
            ),
            Pattern(
                r"straggl(er|ing)\w*.{0,40}\b(rank|node|host|gpu|worker)s?\b.{0,3}[\s\[#=:][\s\[]?[\w-]*\d",
                unless=r"\b(no|0|zero|without|not|any|if)\b.{0,30}straggl|straggl.{0,40}\b(not|no|none|detection|report)\b",
            ),
        )
        + likely(
            r"\bRank=\d+ Node=\S+ Score=0\.[0-6]",
            r"(rank|node|host|gpu|worker)\W{0,3}[\w.-]*\d\W{0,2} (is|was|looks like) an? (straggl|slow)",
            Pattern(
                r"(rank|node|host|gpu) ?\[?[\w.-]+\]?.{0,40}(slower than|slowest|times slower|x slower|lagging)",
                unless="ranks that caused the desync",
            ),
            r"(slow(est)?|lagging) (rank|node|host|gpu|worker)s?\b.{0,40}\d",
            r"relative perf(ormance)?.{0,40}(below|under|<|0\.[0-6])",
        ),
        example="WARNING straggler detected: rank 11 on node-k, relative speed 0.62",
    ),
)
