"""Failure classes of GPUs: device selection, hardware health, and faults of programs on the GPU."""

from __future__ import annotations

from allranks.analysis.diagnose.patterns import LIKELY, MACHINE, POSSIBLE, PROGRAM, WEAK, FailureClass, Pattern

P2P_UNSUPPORTED = FailureClass(
    id="p2p_unsupported",
    emitters=MACHINE,
    title="GPU peer access fails between GPUs",
    cause="The driver refuses direct access from one GPU to the memory of another: a GPU model that does not support it, a virtual machine, or two containers.",
    fix="Set NCCL_P2P_DISABLE=1 for such GPUs; for CUDA failure 217 with NCCL's cuMem, set NCCL_CUMEM_HOST_ENABLE=0 or NCCL_CUMEM_ENABLE=0.",
    next_test="torch.cuda.can_device_access_peer(0, 1), or p2pBandwidthLatencyTest; nvidia-smi topo -p2p r",
    reference="https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html#nccl-p2p-disable",
    patterns=(
        Pattern(
            r"peer access is not supported between these two devices|peer access (is )?not supported", "peer access "
        ),
        Pattern(
            r"cudaErrorPeerAccessUnsupported|peer mapping resources exhausted|cudaErrorTooManyPeers",
            "cudaerrorpeeraccess",
            "peer mapping resources",
            "cudaerrortoomanypeers",
        ),
        Pattern(r"Cuda failure '?217\b", "cuda failure"),
        Pattern(r"doesn'?t support faster communication.{0,30}(P2P|IB)", "support faster communication"),
        Pattern(r"Could not enable P2P between", weight=LIKELY),
        Pattern(r"peer.to.peer.{0,60}(not supported|unsupported|unavailable|fail)", "peer", weight=LIKELY),
        Pattern(
            r"cuMemImportFromShareableHandle.{0,80}|cudaIpcOpenMemHandle.{0,60}(fail|error|invalid)",
            "cumemimportfromshareablehandle",
            "cudaipcopenmemhandle",
            weight=POSSIBLE,
        ),
        Pattern(r"p2p\.cc:\d+.{0,40}(Cuda failure|WARN)", "cc:", weight=POSSIBLE),
    ),
    example="node-a:3:8 [1] transport/p2p.cc:275 NCCL WARN Cuda failure 217 'peer access is not supported between these two devices'",
    near_miss="node-a:3:8 [1] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/IPC",
)

DUPLICATE_GPU = FailureClass(
    id="duplicate_gpu",
    emitters=PROGRAM,
    title="two ranks on one GPU",
    cause="Two ranks of a group use the same GPU: the program does not select it by local rank, or each process sees only the same device.",
    fix="Call torch.cuda.set_device(int(os.environ['LOCAL_RANK'])) before any GPU work; start one launcher per node, and no more ranks than GPUs.",
    next_test="print rank, host, CUDA_VISIBLE_DEVICES and the device's UUID on each rank",
    reference="https://docs.pytorch.org/docs/stable/elastic/run.html",
    patterns=(
        Pattern(r"Duplicate GPU detected"),
        Pattern(r"ranks? \d+ and (rank )?\d+ both on (CUDA )?device", " both on "),
        Pattern(r"(two|multiple|several) (ranks|processes) .{0,40}(same|one) GPU", " gpu", weight=LIKELY),
    ),
    example="node-b:6:9 [0] init.cc:940 NCCL WARN Duplicate GPU detected : rank 6 and rank 2 both on CUDA device 4f000",
    near_miss="INFO rank 6 on CUDA device 4f000, rank 2 on CUDA device 52000",
)

INVALID_DEVICE = FailureClass(
    id="invalid_device",
    emitters=PROGRAM,
    title="a rank selects a GPU that does not exist",
    cause="The device index is not below the number of GPUs that the process sees: more ranks than GPUs, a global rank used as device, or Slurm binding one GPU to each task.",
    fix="Use the local rank as device, and start as many ranks per node as it has visible GPUs; with --gpus-per-task=1 every rank's device is 0.",
    next_test="on that node: echo $CUDA_VISIBLE_DEVICES; python -c 'import torch; print(torch.cuda.device_count())' inside the same step",
    reference="https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__TYPES.html",
    patterns=(
        Pattern(
            r"invalid device ordinal|cudaErrorInvalidDevice\b|CUDA_ERROR_INVALID_DEVICE\b",
            "invalid device ordinal",
            "cudaerrorinvaliddevice",
            "cuda_error_invalid_device",
            unless="cuMemImport|cudaIpc",
        ),
        Pattern(r"(CUDA|HIP) error[: ]+101\b", " error", weight=LIKELY),
        Pattern(
            r"Invalid device (id|index|string)|device (index|id) .{0,20}out of range",
            "invalid device ",
            "out of range",
            weight=LIKELY,
        ),
        Pattern(r"torch\.cuda\.device_count\(\) is \d+", "torch.cuda.device_count() is ", weight=LIKELY),
        Pattern(
            r"(device|GPU) \d+ .{0,30}(not (available|present|visible)|does not exist).{0,30}(only|device_count|visible)",
            "not available",
            "not present",
            "not visible",
            "does not exist",
            weight=LIKELY,
        ),
    ),
    example="RuntimeError: CUDA error: invalid device ordinal",
    near_miss="RuntimeError: CUDA error: invalid configuration argument",
)

NO_GPU = FailureClass(
    id="no_gpu",
    emitters=MACHINE | {"shell"},
    title="no GPU is visible to the process",
    cause="The process sees no usable GPU: none was requested from the scheduler, the container was started without GPUs, the driver is missing or incompatible, or torch is a CPU build.",
    fix="Request GPUs (--gpus-per-node), start the container with them (--nv, --gpus all), install a torch build that matches the driver.",
    next_test="inside the same step: nvidia-smi -L; echo $CUDA_VISIBLE_DEVICES; python -c 'import torch; print(torch.version.cuda, torch.cuda.is_available())'",
    reference="https://docs.pytorch.org/get-started/locally/",
    patterns=(
        Pattern(
            r"No CUDA GPUs are available|no (CUDA|NVIDIA|HIP) (GPUs?|devices?) (are |were )?(found|available|detected|visible)",
            " gpu",
            " device",
        ),
        Pattern(r"No HIP GPUs are available"),
        Pattern(r"could not select device driver .{0,80}gpu", "could not select device driver"),
        Pattern(r"nvidia-container-cli: (initialization|device|mount) error", "nvidia-container-cli", weight=LIKELY),
        Pattern(
            r"ProcessGroupNCCL is only supported with GPUs|no GPUs found",
            "processgroupnccl is only supported",
            "no gpus found",
        ),
        Pattern(r"no CUDA-capable device|cudaErrorNoDevice", "cuda-capable device", "cudaerrornodevice"),
        Pattern(r"Found no NVIDIA driver"),
        Pattern(
            r"NVIDIA-SMI has failed|couldn'?t communicate with the NVIDIA driver",
            "nvidia-smi has failed",
            "communicate with the nvidia driver",
            weight=LIKELY,
        ),
        Pattern(r"No devices were found", weight=LIKELY),
        Pattern(r"Torch not compiled with CUDA enabled"),
        Pattern(
            r"(NVIDIA |CUDA )?driver .{0,30}(too old|insufficient)|CUDA driver version is insufficient",
            "driver",
            weight=LIKELY,
        ),
        Pattern(
            r"Driver/library version mismatch|forward compatibility was attempted",
            "driver/library version mismatch",
            "forward compatibility was attempted",
            weight=LIKELY,
        ),
        Pattern(
            r"CUDA initialization: |CUDA driver initialization failed|CUDA unknown error",
            "cuda initialization:",
            "cuda driver initialization failed",
            "cuda unknown error",
            weight=POSSIBLE,
            unless="802|system not yet initialized|out of memory",
        ),
        Pattern(r"torch\.cuda\.is_available\(\).{0,30}(False|must be True)", "is_available()", weight=POSSIBLE),
        Pattern(
            r"nvml.{0,40}(not found|Unknown Error|not initialized|NVML_ERROR_(LIBRARY_NOT_FOUND|NOT_FOUND))|Failed to initialize NVML",
            "nvml",
            weight=POSSIBLE,
            unless="gpu is lost",
        ),
    ),
    example="RuntimeError: No CUDA GPUs are available",
    near_miss="INFO 8 CUDA GPUs are available on node-b",
)

FABRIC_MANAGER = FailureClass(
    id="fabric_manager",
    emitters=MACHINE,
    title="the NVSwitch fabric manager is not ready",
    cause="On machines with NVSwitch the GPUs cannot be used until nvidia-fabricmanager runs, in exactly the driver's version. nvidia-smi works without it.",
    fix="systemctl restart nvidia-fabricmanager on that node (same version as the driver); exclude the node until then.",
    next_test="on the node: systemctl status nvidia-fabricmanager; nvidia-smi -q | grep -A2 Fabric must say State: Completed",
    reference="https://docs.nvidia.com/datacenter/tesla/fabric-manager-user-guide/index.html",
    patterns=(
        Pattern(
            r"system not yet initialized|cudaErrorSystemNotReady|CUDA_ERROR_SYSTEM_NOT_READY",
            "system not yet initialized",
            "cudaerrorsystemnotready",
            "system_not_ready",
        ),
        Pattern(r"(CUDA|cudaGetDeviceCount|Error|error)[^\n]{0,30}\b802\b", "cuda", "error", weight=LIKELY),
        Pattern(
            r"(nvidia-)?fabric ?manager.{0,120}(fail|not (running|active|ready|started|installed|found)|error|inactive|dead|mismatch|version|exited)",
            "fabricmanager",
            "fabric manager",
            weight=LIKELY,
            unless="version [\\d.]+ (started|running)|successfully",
        ),
        Pattern(
            r"Failed to (bind|create|import) NVLink SHARP|NVLS.{0,40}Multicast.{0,80}(fail|error)",
            "nvlink sharp",
            "nvls",
            weight=LIKELY,
        ),
        Pattern(r"fabric (manager )?state.{0,20}(In Progress|Not Started|Not Supported)", "fabric", weight=POSSIBLE),
        Pattern(
            r"NVSwitch.{0,80}(fail|fatal|error|not initialized)|NV_WARN_NVSWITCH",
            "nvswitch",
            weight=LIKELY,
            unless="non.?fatal",
        ),
    ),
    example="RuntimeError: Unexpected error from cudaGetDeviceCount(). Error 802: system not yet initialized",
    near_miss="systemd[1]: Started NVIDIA fabric manager service.",
)

GPU_HARDWARE_FAULT = FailureClass(
    id="gpu_hardware_fault",
    emitters=MACHINE,
    ends_job=False,
    title="the GPU or its link is faulty",
    cause="The driver reports an error of the device itself: uncorrectable ECC errors, NVLink or PCIe errors, a GPU that fell off the bus, or firmware (GSP) that does not respond.",
    fix="Exclude the node (--exclude=<node>), reset the GPU or reboot, and replace the GPU if the error returns. Code and batch size are not the cause.",
    next_test="on that node: dmesg | grep -i xid; nvidia-smi -q -d ECC,ROW_REMAPPER; dcgmi diag -r 3; the same job on other nodes",
    reference="https://docs.nvidia.com/deploy/xid-errors/index.html",
    patterns=(
        Pattern(
            r"(uncorrectable|double.?bit|\bDBE\b).{0,30}(\bECC\b|error|NVLink)|cudaErrorECCUncorrectable|\bECC\b.{0,30}uncorrect",
            "uncorrect",
            "cudaerroreccuncorrect",
            "double",
            "dbe",
            unless=r"(count|errors?|total|aggregate|volatile)\s*[:=]\s*0\b|0 uncorrect",
        ),
        Pattern(
            r"fallen off the bus|GPU is lost|GPU (has )?disappeared|lost (contact|communication) with (the )?GPU",
            "fallen off the bus",
            "gpu is lost",
            "disappeared",
            " with the gpu",
            " with gpu",
        ),
        Pattern(r"Unable to determine the device handle"),
        Pattern(
            r"NVLink.{0,60}(error|fatal|down|fail|uncorrect)",
            "nvlink",
            weight=LIKELY,
            unless="error (count|counters?)[^0-9]*0\\b|non.?fatal",
        ),
        Pattern(r"NVLink.{0,60}inactive", "nvlink", weight=WEAK),  # also printed for a GPU without an NVLink bridge
        Pattern(
            r"\b(GSP|RPC)\b.{0,80}(timeout|timed out|time.?out waiting)|Timeout (after|waiting).{0,60}\b(GSP|RPC)\b",
            "gsp",
            "rpc",
        ),
        Pattern(
            r"row.?remap.{0,40}(fail|pending)|remapping fail|retired pages? pending",
            "remap",
            "retired page",
            unless=r"(pending|occurred|failed?)\s*:\s*(no|0|none|n/a)\b",
        ),
        Pattern(r"RmInitAdapter failed|rm_init_adapter failed", "rminitadapter", "rm_init_adapter"),
        Pattern(
            r"\b(PCIe|AER)\b.{0,80}(uncorrect|fatal)", "pcie", "aer", unless=r"non.?fatal|(?<!un)correct", weight=LIKELY
        ),
        Pattern(
            r"GPU.{0,60}(needs? (a )?reset|requires? (a )?reset|reset required|hardware (fault|error|failure)|is (bad|faulty|broken))",
            "reset",
            "hardware ",
            "is bad",
            "faulty",
            "broken",
            weight=LIKELY,
        ),
        Pattern(
            r"cudaErrorNvlinkUncorrectable|cudaErrorHardwareStackError|CUDA_ERROR_HARDWARE",
            "cudaerrornvlinkuncorrectable",
            "cudaerrorhardwarestackerror",
            "cuda_error_hardware",
            weight=LIKELY,
        ),
        Pattern(r"dcgm.{0,80}(diag|health|level).{0,40}(fail|error)", "dcgm", weight=LIKELY),
        Pattern(
            r"unspecified launch failure|cudaErrorLaunchFailure",
            "unspecified launch failure",
            "cudaerrorlaunchfailure",
            weight=WEAK,
        ),
        Pattern(r"\b(GPU|NVRM)\b.{0,40}\b(ECC|memory) (error|page retire)", "ecc", "memory ", weight=POSSIBLE),
    ),
    example="[ 7211.440102] NVRM: Xid (PCI:0000:c1:00): 79, pid=2201, name=python, GPU has fallen off the bus.",
    near_miss="Volatile uncorrectable ECC errors: 0",
)

GPU_APPLICATION_FAULT = FailureClass(
    id="gpu_application_fault",
    emitters=MACHINE,
    title="illegal memory access of the program on the GPU",
    cause="A kernel read or wrote outside of its memory, or an assertion on the device failed (most often an index out of range, such as a label or token ID beyond the table size).",
    fix="Run with CUDA_LAUNCH_BLOCKING=1 to see the operation, check indices against vocabulary and label sizes, and check custom kernels.",
    next_test="the same batch on CPU shows the bad index; compute-sanitizer shows the kernel. If the same host fails with other programs, it is the GPU",
    reference="https://docs.nvidia.com/deploy/xid-errors/index.html",
    patterns=(
        Pattern(
            r"illegal memory access|cudaErrorIllegalAddress|CUDA_ERROR_ILLEGAL_ADDRESS",
            "illegal memory access",
            "cudaerrorillegaladdress",
            "illegal_address",
        ),
        Pattern(r"device-side assert|cudaErrorAssert\b", "device-side assert", "cudaerrorassert"),
        Pattern(
            r"misaligned address|illegal instruction was encountered|cudaErrorMisalignedAddress",
            "misaligned address",
            "illegal instruction was",
            "cudaerrormisaligned",
        ),
        Pattern(
            r"(Assertion `.{0,80}(idx|index|src|target|t >= 0|n_classes|out of bounds).{0,80} failed)", "assertion `"
        ),
        Pattern(
            r"unspecified launch failure|cudaErrorLaunchFailure",
            "unspecified launch failure",
            "cudaerrorlaunchfailure",
            weight=POSSIBLE,
        ),
        Pattern(
            r"CUBLAS_STATUS_(EXECUTION_FAILED|INTERNAL_ERROR|INVALID_VALUE)|CUDNN_STATUS_(EXECUTION_FAILED|INTERNAL_ERROR|MAPPING_ERROR)",
            "cublas_status_",
            "cudnn_status_",
            weight=POSSIBLE,
        ),
        Pattern(r"MMU Fault", weight=LIKELY),
    ),
    example="torch.AcceleratorError: CUDA error: an illegal memory access was encountered",
    near_miss="INFO memory access pattern: coalesced",
)

GPU_THROTTLED = FailureClass(
    id="gpu_throttled",
    emitters=MACHINE,
    ends_job=False,
    title="GPU clocks are throttled by power or temperature",
    cause="The GPU runs far below its clock because it is too hot, the power supply signals a power brake, or a power limit was set.",
    fix="Exclude the node and report it: fans, inlet temperature, power supplies; reset a power limit that was set by hand.",
    next_test="compare nvidia-smi -q -d PERFORMANCE,CLOCK,POWER,TEMPERATURE under load with a healthy node",
    reference="https://docs.nvidia.com/deploy/nvidia-smi/index.html",
    patterns=(
        Pattern(
            r"(HW|hw_)[ _]?(Slowdown|Thermal|Power.?Brake)[\w ]*\s*[:=]\s*(Active|1|true)\b",
            "slowdown",
            "thermal",
            "brake",
        ),
        Pattern(
            r"(power brake|thermal slowdown|hw slowdown|thermal (throttl|violation))",
            "power brake",
            "thermal slowdown",
            "hw slowdown",
            "thermal throttl",
            "thermal violation",
            unless=r"[:=]\s*(not active|0|inactive|false|n/a)|no (thermal|power)",
        ),
        Pattern(
            r"throttle.?reasons?\b.{0,60}\b(hw_(slowdown|thermal\w*|power_brake\w*)|sw_thermal\w*|power.?brake|thermal)",
            "throttle",
            weight=LIKELY,
            unless=r"throttle_reasons\.|not active",
        ),
        Pattern(
            r"temperature above threshold|clock throttled",
            "temperature above threshold",
            "clock throttled",
            weight=LIKELY,
        ),
        Pattern(
            r"(GPU|clock|SM).{0,60}throttl(ed|ing)", "throttl", weight=LIKELY, unless="not throttl|no throttl|none"
        ),
        Pattern(r"(SM|graphics|gpu) ?clocks?.{0,30}(stuck|capped|limited|locked|dropped|only)", "clock", weight=LIKELY),
        Pattern(r"(overheat|too hot|over.?temperature)", "overheat", "too hot", "temperature", weight=LIKELY),
        Pattern(r"SW Power Cap\s*:\s*Active", "sw power cap", weight=WEAK),
    ),
    example="        HW Power Brake Slowdown                          : Active",
    near_miss="        HW Thermal Slowdown                              : Not Active",
)

STRAGGLER = FailureClass(
    id="straggler",
    emitters=PROGRAM,
    ends_job=False,
    title="one rank is slower than its peers",
    cause="Every step waits for the slowest rank. One rank or host is always slower: a throttled or slow GPU, a slow path to data, or a busy CPU.",
    fix="Exclude that host, or find what is slow there (clocks, data loading, other processes); the other ranks are not the cause.",
    next_test="compare step times without waiting (compute only) per rank; swap the ranks between hosts and check whether the slowness stays with the host",
    reference="https://nvidia.github.io/nvidia-resiliency-ext/straggler_det/index.html",
    patterns=(
        Pattern(r"\bRank=\d+ Node=\S+ Score=0\.[0-6]", "score=", weight=LIKELY),
        Pattern(
            r"(rank|node|host|gpu|worker)\W{0,3}[\w.-]*\d\W{0,2} (is|was|looks like) an? (straggl|slow)",
            "straggl",
            "slow",
            weight=LIKELY,
        ),
        Pattern(r"STRAGGLER DETECTION WARNING", "straggler detection warning"),
        Pattern(
            r"straggl(er|ing)s?\b.{0,40}\b(detected|found|identified)\b",
            "straggl",
            unless=r"\b(no|0|zero|without|not|any|if)\b.{0,30}straggl|straggl.{0,40}\b(not|no|none)\b",
        ),
        Pattern(
            r"straggl(er|ing)\w*.{0,40}\b(rank|node|host|gpu|worker)s?\b.{0,3}[\s\[#=:][\s\[]?[\w-]*\d",
            "straggl",
            unless=r"\b(no|0|zero|without|not|any|if)\b.{0,30}straggl|straggl.{0,40}\b(not|no|none|detection|report)\b",
        ),
        Pattern(
            r"(rank|node|host|gpu) ?\[?[\w.-]+\]?.{0,40}(slower than|slowest|times slower|x slower|lagging)",
            "slower",
            "slowest",
            "lagging",
            weight=LIKELY,
            unless="ranks that caused the desync",
        ),
        Pattern(r"(slow(est)?|lagging) (rank|node|host|gpu|worker)s?\b.{0,40}\d", "slow", "lagging", weight=LIKELY),
        Pattern(r"relative perf(ormance)?.{0,40}(below|under|<|0\.[0-6])", "relative perf", weight=LIKELY),
    ),
    example="WARNING straggler detected: rank 11 on node-k, relative speed 0.62",
    near_miss="INFO straggler detection: enabled, interval 300 s",
)
