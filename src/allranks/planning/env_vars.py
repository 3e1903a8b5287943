"""Record the environment variables of the ranks; warn about variables without effect.

A variable that no library reads raises no error: the run continues as if it were not set. Therefore `env_warnings` and
`allranks lint` compare names with tables of known, renamed and unread variables. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from allranks.utils.text import nearest_name, suggest

NCCL_DOCS = "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html"
NCCL_TROUBLESHOOTING_DOCS = "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting.html"
MULTI_RANK_GPU = "NCCL_MULTI_RANK_GPU_ENABLE"
"""Lets NCCL place several ranks on one GPU, or on its MIG instances. Source: https://github.com/NVIDIA/nccl/issues/1716"""
TORCH_DISTRIBUTED_DOCS = "https://docs.pytorch.org/docs/stable/distributed.html"


class EnvVar(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=False):
    """One decided variable. ``value`` None means: considered, and deliberately not set.

    `source` says who decided (policy, spec, user; nodes: each node will decide at run time), `documentation` is a link, `risk`
    says what can go wrong.
    """

    name: str
    value: str | None
    reason: str
    source: str = "policy"
    documentation: str = ""
    risk: str = ""

    def advice(self) -> dict[str, str | None]:
        """Return the form that ``--json`` prints."""
        return {
            "variable": self.name,
            "value": self.value,
            "reason": self.reason,
            "source": self.documentation or self.source,
            "risk": self.risk,
        }


def nccl_var(name: str, value: str | None, reason: str, risk: str) -> EnvVar:
    """Return a NCCL variable with the link to its documentation."""
    return EnvVar(
        name=name, value=value, reason=reason, documentation=f"{NCCL_DOCS}#{name.lower().replace('_', '-')}", risk=risk
    )


def env_warnings(env: Mapping[str, str], where: str = "cluster.env.") -> list[str]:
    """Return one sentence per variable: what is wrong with it, and what works instead."""
    found = []
    for name in env:
        mistake = UNREAD_VARIABLES.get(name)
        if mistake:
            found.append(f"{where}{name}: {mistake.why}; instead: {mistake.instead}")
        elif name.startswith("NCCL_") and not is_known_variable(name) and (near := nearest_variable(name)):
            found.append(f"{where}{name}: NCCL is not known to read this name{suggest(near)}")
    return [*found, *_value_warnings(env, where)]


def _value_warnings(env: Mapping[str, str], where: str) -> list[str]:
    """Return warnings for correct names with harmful values."""
    found = []
    gloo = env.get("GLOO_SOCKET_IFNAME", "")
    if gloo.startswith(("^", "=")):
        found.append(
            f"{where}GLOO_SOCKET_IFNAME is {gloo!r}, but Gloo only accepts exact names ('^' and '=' are NCCL's syntax): "
            "remove the line; allranks then determines the interface on each node"
        )
    if env.get("NCCL_P2P_DISABLE") == "1":
        found.append(
            f"{where}NCCL_P2P_DISABLE=1 is slow on nodes with NVLink; "
            "`allranks doctor SPEC --collectives` tests whether peer-to-peer works"
        )
    if env.get("NCCL_IB_GID_INDEX", "-1") not in ("-1", ""):
        found.append(f"{where}NCCL_IB_GID_INDEX: the right index differs between nodes; NCCL chooses it since 2.21")
    return found


class UnreadVariable(msgspec.Struct, frozen=True, kw_only=True):
    """A variable that does not do what its name suggests. ``instead`` says what works."""

    name: str
    why: str
    instead: str
    removed: bool = False
    """No supported version reads it any more."""


def _by_name(*entries: tuple[str, str, str]) -> dict[str, UnreadVariable]:
    return {
        name: UnreadVariable(
            name=name, why=why, instead=instead, removed=why.startswith(("removed", "renamed in", "not a"))
        )
        for name, why, instead in entries
    }


_TIMEOUT = (
    "set the timeout where the group is created: init_process_group(timeout=timedelta(minutes=10)), ddp_timeout of "
    "TrainingArguments, timeout_s in an allranks spec. NCCL_IB_TIMEOUT has another purpose: it controls retries of InfiniBand packets"
)

# No release of the library reads these variables.
UNREAD_VARIABLES: dict[str, UnreadVariable] = _by_name(
    ("NCCL_TIMEOUT", "neither NCCL nor torch reads this variable; the default of 10 minutes applies", _TIMEOUT),
    ("NCCL_COLLECTIVE_TIMEOUT", "NCCL does not read this variable", _TIMEOUT),
    ("TORCH_NCCL_TIMEOUT", "torch does not read this variable", _TIMEOUT),
    ("TORCH_DISTRIBUTED_TIMEOUT", "torch does not read this variable", _TIMEOUT),
    ("GLOO_TIMEOUT", "Gloo does not read this variable; the default of 30 minutes applies", _TIMEOUT),
    ("GLOO_TIMEOUT_SECONDS", "Gloo does not read this variable; the default of 30 minutes applies", _TIMEOUT),
    (
        "NCCL_NET_DISABLE",
        "NCCL does not read this variable; the network stays enabled. Only NCCL_NET_DISABLE_INTRA exists",
        "remove it: inside one node NCCL prefers P2P and shared memory to the network. To force sockets between nodes: NCCL_NET=Socket",
    ),
    (
        "NCCL_SOCKET_DISABLE",
        "NCCL does not read this variable",
        "select a transport by name: NCCL_NET=IB or NCCL_NET=Socket",
    ),
    (
        "NCCL_IB_ENABLE",
        "NCCL does not read this variable",
        "InfiniBand is used if available; NCCL_IB_DISABLE=1 disables it",
    ),
    (
        "NCCL_P2P_ENABLE",
        "NCCL does not read this variable",
        "P2P is enabled unless NCCL_P2P_DISABLE=1 or NCCL_P2P_LEVEL disables it",
    ),
    ("NCCL_SHM_ENABLE", "NCCL does not read this variable", "shared memory is enabled unless NCCL_SHM_DISABLE=1"),
    ("NCCL_IFNAME", "NCCL does not read this variable", "NCCL_SOCKET_IFNAME, and only if NCCL chose a wrong interface"),
    (
        "NCCL_SOCKET_INTERFACE",
        "NCCL does not read this variable",
        "NCCL_SOCKET_IFNAME, and only if NCCL chose a wrong interface",
    ),
    (
        "NCCL_NET_INTERFACE",
        "NCCL does not read this variable",
        "NCCL_SOCKET_IFNAME, and only if NCCL chose a wrong interface",
    ),
    ("NCCL_LOG_LEVEL", "NCCL does not read this variable", "NCCL_DEBUG=INFO"),
    ("NCCL_BACKEND", "NCCL does not read this variable", 'init_process_group(backend="nccl")'),
    (
        "PYTORCH_DIST_BACKEND",
        "torch does not read this variable; the program selects the backend",
        'init_process_group(backend="gloo"), ddp_backend of TrainingArguments, --ddp_backend on the command line',
    ),
    ("TORCH_DISTRIBUTED_BACKEND", "torch does not read this variable", 'init_process_group(backend="gloo") or "nccl"'),
    ("TORCH_DIST_BACKEND", "torch does not read this variable", 'init_process_group(backend="gloo") or "nccl"'),
    (
        "DIST_BACKEND",
        "torch does not read this variable; it only has an effect in programs that read it themselves",
        "init_process_group(backend=...)",
    ),
    (
        "GLOO_USE_IPV6",
        "neither Gloo nor torch reads it",
        "GLOO_SOCKET_IFNAME with the exact name of an interface that has an IPv4 address",
    ),
    ("GLOO_IFNAME", "neither Gloo nor torch reads it", "GLOO_SOCKET_IFNAME"),
    ("GLOO_INTERFACE", "neither Gloo nor torch reads it", "GLOO_SOCKET_IFNAME"),
    ("GLOO_DEBUG", "neither Gloo nor torch reads it", "GLOO_LOG_LEVEL=DEBUG, TORCH_DISTRIBUTED_DEBUG=DETAIL"),
    ("TORCH_NCCL_DEBUG", "torch does not read this variable", "NCCL_DEBUG=INFO, TORCH_DISTRIBUTED_DEBUG=DETAIL"),
    ("TORCH_NUM_THREADS", "torch does not read this variable", "OMP_NUM_THREADS"),
    ("PYTORCH_NUM_THREADS", "torch does not read this variable", "OMP_NUM_THREADS"),
    ("OMP_NUM_THREAD", "no library reads it", "OMP_NUM_THREADS"),
    ("CUDA_VISIBLE_DEVICE", "CUDA does not read this variable", "CUDA_VISIBLE_DEVICES"),
    ("HUGGINGFACE_TOKEN", "huggingface_hub does not read this variable", "HF_TOKEN"),
    ("HUGGINGFACE_HOME", "huggingface_hub does not read this variable", "HF_HOME"),
    ("HF_CACHE", "huggingface_hub does not read this variable", "HF_HOME, or HF_HUB_CACHE for models only"),
    ("HF_CACHE_DIR", "huggingface_hub does not read this variable", "HF_HOME, or HF_HUB_CACHE for models only"),
    ("HF_OFFLINE", "huggingface_hub does not read this variable", "HF_HUB_OFFLINE=1"),
)

_PREFIX = "torch 2.2 renamed it; where the old name is still read, it causes a warning"

# Names that worked in the past, or that still work with a warning.
DEPRECATED_VARIABLES: dict[str, UnreadVariable] = _by_name(
    ("NCCL_ASYNC_ERROR_HANDLING", _PREFIX, "TORCH_NCCL_ASYNC_ERROR_HANDLING; or remove it: on by default"),
    ("NCCL_BLOCKING_WAIT", _PREFIX, "TORCH_NCCL_BLOCKING_WAIT"),
    ("NCCL_DESYNC_DEBUG", _PREFIX, "TORCH_NCCL_DESYNC_DEBUG"),
    ("NCCL_ENABLE_TIMING", _PREFIX, "TORCH_NCCL_ENABLE_TIMING"),
    ("NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK", _PREFIX, "TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK"),
    ("NCCL_IB_CUDA_SUPPORT", "removed in NCCL 2.4", "NCCL_NET_GDR_LEVEL"),
    ("NCCL_IB_GDR_LEVEL", "renamed in NCCL 2.4", "NCCL_NET_GDR_LEVEL"),
    ("NCCL_RINGS", "removed in NCCL 2.4", "NCCL_GRAPH_FILE; preferably nothing"),
    ("NCCL_LL_THRESHOLD", "removed in NCCL 2.5", "NCCL_PROTO; preferably nothing"),
    ("NCCL_TREE_THRESHOLD", "removed in NCCL 2.5", "NCCL_ALGO; preferably nothing"),
    ("NCCL_SINGLE_RING_THRESHOLD", "removed in NCCL 2.1", "nothing"),
    ("NCCL_MAX_NRINGS", "old name", "NCCL_MAX_CTAS (before NCCL 2.17: NCCL_MAX_NCHANNELS)"),
    ("NCCL_MIN_NRINGS", "old name", "NCCL_MIN_CTAS (before NCCL 2.17: NCCL_MIN_NCHANNELS)"),
    ("NCCL_CHECKS_DISABLE", "removed in NCCL 2.2", "NCCL_CHECK_POINTERS"),
    ("TRANSFORMERS_CACHE", "transformers 5 does not read it", "HF_HOME, or HF_HUB_CACHE for models only"),
    ("PYTORCH_TRANSFORMERS_CACHE", "transformers 5 does not read it", "HF_HOME, or HF_HUB_CACHE for models only"),
    ("PYTORCH_PRETRAINED_BERT_CACHE", "transformers 5 does not read it", "HF_HOME, or HF_HUB_CACHE for models only"),
    ("HUGGINGFACE_HUB_CACHE", "old name", "HF_HUB_CACHE"),
    ("HUGGING_FACE_HUB_TOKEN", "old name", "HF_TOKEN"),
    (
        "TORCH_NCCL_TRACE_BUFFER_SIZE",
        "renamed when the flight recorder was extended to all backends",
        "TORCH_FR_BUFFER_SIZE",
    ),
    (
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE",
        "renamed when the flight recorder was extended to all backends",
        "TORCH_FR_DUMP_TEMP_FILE",
    ),
    ("TORCH_DISTRIBUTED_DETAIL", "not a torch variable", "TORCH_DISTRIBUTED_DEBUG=DETAIL"),
)

# Variables, without NCCL_, that libnccl 2.21.5 or 2.32.3 contains as strings.
_NCCL = """
RUN_DIAGNOSTICS RUN_RAS_DIAGNOSTICS
ALGO ALLGATHERV_ENABLE ALLOC_P2P_NET_LL_BUFFERS BUFFSIZE CE_CHUNK_SIZE CE_COLL_AG_MULTICAST_THRESHOLD
CE_INTRA_GPU_MEMCPY_ENABLE CGA_CLUSTER_SIZE CHECK_MODE CHECK_POINTERS COLLNET_ENABLE COLLNET_NODE_THRESHOLD
COLLNET_REG_BUFFER COMM_BLOCKING COMM_ID COMM_SHRINK_SHARE_RESOURCES COMM_SPLIT_SHARE_RESOURCES CONF_FILE
CONNECT_ROUND_MAX_PEERS CREATE_THREAD_CONTEXT CROSS_NIC CTA_POLICY CUMEM_ENABLE CUMEM_HOST_ENABLE DEBUG
DEBUG_FILE DEBUG_SUBSYS DEBUG_TIMESTAMP_FORMAT DEBUG_TIMESTAMP_LEVELS DEVICE_UNPACK DIAGNOSTICS_ECC_THRESHOLD
DIAGNOSTICS_IB_BW_TIMEOUT DISABLE_MEM_MANAGER DMABUF_ENABLE ELASTIC_BUFFER_REGISTER ENABLE_VERSION_CHECK
ENQUEUE_REARCH_ENABLE ENV_PLUGIN GDAKI_FORCE_MCST GDAKI_USE_RELIABLE_DB GDRCOPY_ENABLE GDRCOPY_FIFO_ENABLE
GDRCOPY_FLUSH_ENABLE GDRCOPY_SYNC_ENABLE GDRCOPY_USE_INTERNAL_DMABUF GDR_FLUSH_DISABLE GIN_ENABLE
GIN_ERROR_QUERY_SEC GIN_GDAKI_LAG_AWARE_DISABLE GIN_GDAKI_MAX_DEST_RD_ATOMIC GIN_GDAKI_MAX_QP_RD_ATOMIC
GIN_GDAKI_NIC_HANDLER GIN_GDAKI_QP_DEPTH GIN_IB_OOO_OPT GIN_IB_TC GIN_NCONNECTIONS GIN_PLUGIN
GIN_PROXY_NTHREADS GIN_PROXY_POLL_BATCH GIN_PROXY_QUEUE_SIZE GIN_TYPE GRAPH_DUMP_FILE GRAPH_DUMP_FILE_RANK
GRAPH_FILE GRAPH_HELPER_DISABLE GRAPH_MIXING_SUPPORT GRAPH_REGISTER GRAPH_STREAM_ORDERING
HIER_CE_COLL_AG_RAIL_RING_ENABLE HIER_CE_COLL_NUM_CTX HOSTID IBVERBS_LIB IB_ADAPTIVE_ROUTING IB_ADDR_FAMILY
IB_ADDR_RANGE IB_AR_THRESHOLD IB_DATA_DIRECT IB_DEVICE_PCI_ORDER IB_DISABLE IB_ECE_ENABLE IB_EVENT_BASED_LB
IB_EVENT_BASED_LB_REMOTE IB_FIFO_TC IB_GID_INDEX IB_HCA IB_MERGE_NICS IB_MERGE_VFS IB_MLX_VENDOR_ID
IB_MQP_RETRY_ALL IB_MQP_RETRY_CNT IB_MQP_RETRY_SLEEP_MSEC IB_OOO_RQ IB_PCI_RELAXED_ORDERING IB_PKEY
IB_PKEY_VALUE IB_PREPOST_RECEIVE_WORK_REQUESTS IB_QPS_PER_CONNECTION IB_QUERY_PORT_SPEED IB_RAIL_POLICY
IB_RECEIVER_SIDE_MATCHING_SCHEME IB_RESILIENCY_PORT_FAILOVER IB_RESILIENCY_PORT_FAILOVER_MAX_ATTEMPTS
IB_RESILIENCY_PORT_FAILOVER_PROBE_DELAY IB_RESILIENCY_PORT_RECOVERY IB_RESILIENCY_PORT_RECOVERY_ACK_TIMEOUT
IB_RESILIENCY_PORT_RECOVERY_ALIVE_MSG_BATCH_INTERVAL IB_RESILIENCY_PORT_RECOVERY_ALIVE_MSG_BATCH_SIZE
IB_RESILIENCY_PORT_RECOVERY_ALIVE_MSG_SEQUENCE_SIZE IB_RESILIENCY_PORT_RECOVERY_ALIVE_MSG_TIMEOUT
IB_RESILIENCY_PORT_RECOVERY_ATTEMPTS_MAX IB_RESILIENCY_PORT_RECOVERY_START_DELAY IB_RETRY_CNT
IB_RETURN_ASYNC_EVENTS IB_ROCE_VERSION_NUM IB_ROUTABLE_FLID_GID_INDEX IB_SL IB_SORT_MERGE_NICS
IB_SPLIT_DATA_ON_QPS IB_SUBNET_AWARE_ROUTING IB_SUBNET_PREFIX_LEN IB_TC IB_TIMEOUT IB_USE_INLINE
IB_VR_RAILS_PER_SOCKET IB_VR_SOCKET_COUNT IB_WARN_RAIL_LOCAL IB_WQE_LATENCY_REPORT IB_WQE_LATENCY_THRESHOLD_NS
IGNORE_COLLNET_MISMATCH IGNORE_CPU_AFFINITY IGNORE_DISABLED_P2P IGNORE_NET_MISMATCH IPC_REG_BUFFER
IPC_USE_ABSTRACT_SOCKET L1_SHARED_MEMORY_CARVEOUT LAUNCH_MODE LAUNCH_ORDER_IMPLICIT LAUNCH_RACE_FATAL
LEGACY_CUDA_REGISTER LL128_BUFFSIZE LL128_C2C LL128_NTHREADS LL_BUFFSIZE LOCAL_REGISTER LSA_TEAM_SIZE
MAX_CGA_CLUSTER_SIZE MAX_CTAS MAX_NCHANNELS MAX_NRINGS MAX_P2P_NCHANNELS MEM_SYNC_DOMAIN MIN_CTAS
MIN_NCHANNELS MIN_NRINGS MIN_P2P_NCHANNELS MNNVL_CLIQUE_ID MNNVL_CROSS_CLIQUE MNNVL_ENABLE MNNVL_RAIL_PER_HOST
MNNVL_SCATTER_NETS_ENABLE MNNVL_UUID MULTI_RANK_GPU_ENABLE MULTI_SEGMENT_REGISTER NCHANNELS_PER_NET_PEER NET
NETDEVS_POLICY NET_DISABLE_INTRA NET_FORCE_FLUSH NET_FORCE_MERGE NET_GDR_C2C NET_GDR_LEVEL NET_GDR_READ
NET_MERGE_LEVEL NET_MERGE_POLICY NET_OPTIONAL_RECV_COMPLETION NET_OVERHEAD NET_PLUGIN NET_SHARED_BUFFERS
NET_SHARED_COMMS NSOCKS_PERTHREAD NTHREADS NUM_RMA_CTX NUM_RMA_INT_CTX NUM_RMA_INT_CTX_DEFAULT NVB_DISABLE
NVB_PRECONNECT NVLINK_UTIL_CENTRIC_SCHED_ENABLE NVLSTREE_MAX_CHUNKSIZE NVLS_CHUNKSIZE NVLS_ENABLE
NVLS_NCHANNELS NVLS_REG_BUFFER NVLS_UB_SIZE NVTX_DISABLE OOB_NET_ENABLE OOB_NET_IFNAME P2P_DIRECT_DISABLE
P2P_DISABLE P2P_EPOCH_ENABLE P2P_LEVEL P2P_LL_THRESHOLD P2P_MAX_PEERS P2P_NET_CHUNKSIZE P2P_NVL_CHUNKSIZE
P2P_PCI_CHUNKSIZE P2P_PER_CHANNEL_NET_BW P2P_PER_CHANNEL_REG_NET_BW P2P_PXN_LEVEL P2P_READ_ENABLE
P2P_SCHEDULE_GROUP_SIZE P2P_USE_CUDA_MEMCPY PARAM_DUMP_ALL PAT_ENABLE PAT_NDIMS PROFILER_PLUGIN
PROGRESS_APPENDOP_FREQ PROGRESS_COUNTERS PROGRESS_COUNTER_MONITOR_POLL_MS PROGRESS_COUNTER_MONITOR_STALE_MS
PROGRESS_COUNTER_MONITOR_STALE_WARN_SEC PROTO PROXY_APPEND_BATCH_SIZE PROXY_CPUSET PROXY_DUMP_SIGNAL PXN_C2C
PXN_DISABLE RAS_ADDR RAS_ENABLE RAS_TIMEOUT_FACTOR REGULAR_BUFFER REPORT_CONNECT_PROGRESS RMA_DISABLE
RMA_EAGER_INIT RMA_IB_WR_BATCHSIZE RMA_MULTI_CTX_THRESHOLD RMA_PLUGIN RMA_PROXY_DUMP_SIGNAL
RMA_PROXY_QUEUE_SIZE RUNTIME_CONNECT RUN_DIAGNOSTICS SET_CPU_STACK_SIZE SET_STACK_SIZE SET_THREAD_NAME
SHADOW_MEMPOOL_MAX_SIZE SHM_DISABLE SHM_LOCALITY SHM_MEMCPY_MODE SHM_USE_CUDA_MEMCPY
SINGLE_PROC_MEM_REG_ENABLE SOCKET_FAMILY SOCKET_IFNAME SOCKET_INLINE SOCKET_MAGIC SOCKET_MIN_TASKSIZE
SOCKET_NTHREADS SOCKET_POLL_TIMEOUT_MSEC SOCKET_RCVBUF SOCKET_RETRY_CNT SOCKET_RETRY_SLEEP_MSEC SOCKET_SNDBUF
SYM_CE_THRESHOLD SYM_CTAS SYM_GIN_KERNELS_ENABLE SYM_NOWIN_ENABLE SYM_REUSE_SYSMEM_HANDLES
SYM_RS_GIN_CHUNK_SIZE SYM_TMA_ENABLE THREAD_THRESHOLDS TOPO_DUMP_FILE TOPO_DUMP_FILE_RANK TOPO_FILE
TOPO_SPLIT_MLOPART TUNER_PLUGIN UID_STAGGER_RATE UID_STAGGER_THRESHOLD UNPACK_DOUBLE_NCHANNELS
WARN_ENABLE_DEBUG_INFO WIN_COLL_SYMMETRIC WIN_ENABLE WORK_ARGS_BYTES WORK_FIFO_BYTES WORK_FIFO_DEPTH
CHECKS_DISABLE UCX_TLS UCX_RNDV_SCHEME TESTS_DEVICE TESTS_SPLIT TESTS_SPLIT_MASK VERSION ROOT HOME INCLUDE_DIR LIB_DIR
"""
NCCL_NAMES = frozenset(_NCCL.split())
# Plugins (AWS OFI, Google's FasTrak and TCPX, UCX, MSCCL, RCCL) have their own names.
PLUGINS = (
    "NCCL_OFI_", "NCCL_FASTRAK_", "NCCL_GPUDIRECTTCPX_", "NCCL_GPUDIRECT", "NCCL_TUNER_", "NCCL_PROFILER_", "NCCL_PLUGIN_", "NCCL_UCX_",
    "NCCL_SHARP_", "NCCL_RAS_", "NCCL_GIN_", "NCCL_DIAGNOSTICS_", "NCCL_NETSTAT", "NCCL_INSPECTOR_", "NCCL_TCPX", "NCCL_SHIMNET", "NCCL_FLAGCX",
    "NCCL_TESTS_", "NCCL_DYNAMIC_CHUNK_SIZE", "NCCL_MSCCL", "NCCL_CTRAN_", "NCCL_HPCX_", "NCCL_BASE_", "NCCL_IBEXT_",
)  # fmt: skip


# Variables of torch 2.13 and Gloo.
OTHER_NAMES = frozenset(
    f"{prefix}{name}"
    for prefix, names in {
        "TORCH_NCCL_": "ASYNC_ERROR_HANDLING AVOID_RECORD_STREAMS BCAST_UNIQUEID BLOCKING_WAIT COORD_CHECK_MILSEC CUDA_EVENT_CACHE "
        "DESYNC_DEBUG DUMP_ON_TIMEOUT ENABLE_MONITORING ENABLE_TIMING EXTRA_DUMP_ON_EXEC HEARTBEAT_TIMEOUT_SEC HIGH_PRIORITY "
        "LOG_CPP_STACK_ON_UNCLEAN_SHUTDOWN NAN_CHECK PROPAGATE_ERROR RANKS_PER_ROOT RETHROW_CUDA_ERRORS TRACE_BUFFER_SIZE "
        "TRACE_CPP_STACK DEBUG_INFO_TEMP_FILE DEBUG_INFO_PIPE_FILE USE_TENSOR_REGISTER_ALLOCATOR_HOOK WAIT_TIMEOUT_DUMP_MILSEC "
        "USE_COMM_NONBLOCKING NONBLOCKING_TIMEOUT SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING CUDA_EVENT_CACHE",
        "TORCH_FR_": "BUFFER_SIZE CPP_STACK DUMP_TEMP_FILE DUMP_DYNAMIC_FILE_NAME",
        "GLOO_": "SOCKET_IFNAME DEVICE_TRANSPORT LOG_LEVEL DISABLE_CONNECTION_RETRIES ENABLE_RANK_AS_SEQUENCE_NUMBER ENABLE_STORE_V2_API",
    }.items()
    for name in names.split()
)


def is_known_variable(name: str) -> bool:
    """Return whether a library or an NCCL plugin reads this ``NCCL_...``, ``TORCH_NCCL_...``, ``TORCH_FR_...`` or ``GLOO_...``."""
    return name.removeprefix("NCCL_") in NCCL_NAMES or name.startswith(PLUGINS) or name in OTHER_NAMES


def nearest_variable(name: str) -> str | None:
    """Return the most similar known variable, or None if no name is close."""
    names = [f"NCCL_{n}" for n in NCCL_NAMES] if name.startswith("NCCL_") else list(OTHER_NAMES)
    return nearest_name(name, sorted(names), 0.87)
