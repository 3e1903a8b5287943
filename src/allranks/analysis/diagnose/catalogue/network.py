"""Failure classes of the network: rendezvous, ports and interfaces (ranks that cannot find each other), then broken links, RDMA errors and slow transports."""

from __future__ import annotations

from allranks.analysis.diagnose.patterns import (
    CERTAIN,
    LIKELY,
    MACHINE,
    NETWORK,
    POSSIBLE,
    PROGRAM,
    TIMED_OUT,
    WEAK,
    FailureClass,
    Pattern,
)

RENDEZVOUS_UNREACHABLE = FailureClass(
    id="rendezvous_unreachable",
    emitters=PROGRAM,
    title="ranks cannot reach the rendezvous",
    cause=(
        "The rendezvous address and port do not answer. Nothing listens there (the agent of the first node never started, or does not know that it "
        "is the host), the name does not resolve on every node, or a firewall blocks the connection."
    ),
    fix=(
        "Use an address of the first node that every node can reach, start the launcher on every node, and with c10d set is_host=1 on the first node "
        "(--rdzv-conf is_host=1). A name that resolves to 127.0.x.x on its own node does not work."
    ),
    next_test="on another node: getent hosts <address>, then nc -vz <address> <port> while the first node waits; allranks doctor SPEC runs both checks",
    reference="https://docs.pytorch.org/docs/stable/elastic/run.html",
    patterns=(
        Pattern(r"client socket has timed out after \d+", "client socket has timed out"),
        Pattern(
            r"client socket has failed to connect to .{0,80}(refused|timed out|No route|unreachable)",
            "client socket has failed to connect",
            weight=LIKELY,
            passing=True,
        ),
        Pattern(
            r"network addresses of \(.{1,80}\) cannot be retrieved", "network addresses of", weight=LIKELY, passing=True
        ),
        Pattern(
            r"RendezvousTimeoutError|RendezvousConnectionError",
            "rendezvoustimeouterror",
            "rendezvousconnectionerror",
            weight=LIKELY,
        ),
        Pattern(r"connection to the C10d store has failed", weight=LIKELY),
        Pattern(r"Timed out after \d+ seconds waiting for clients", "seconds waiting for clients", weight=LIKELY),
        Pattern(r"DistNetworkError", weight=POSSIBLE, unless="EADDRINUSE|already in use"),
        Pattern(r"DistStoreError", weight=POSSIBLE),
        Pattern(
            rf"(rendezvous|rdzv|init_process_group|dist_init|TCPStore).{{0,80}}({TIMED_OUT}|refused|unreachable|could not be reached|failed to connect)",
            "rendezvous",
            "rdzv",
            "init_process_group",
            "dist_init",
            "tcpstore",
            weight=LIKELY,
        ),
        Pattern(
            r"(connect|connection) (to|with) .{0,60}\b(master|MASTER_ADDR|rendezvous|rdzv|store)\b.{0,60}(timed out|refused|failed)",
            "master",
            "rendezvous",
            "rdzv",
            "store",
            weight=LIKELY,
        ),
        Pattern(
            r"(MASTER_ADDR|master|rdzv_endpoint|rendezvous).{0,80}(cannot be resolved|not resolve|Name or service not known|nodename nor servname)",
            "master",
            "rdzv_endpoint",
            "rendezvous",
        ),
        Pattern(
            r"failed to connect to .{1,80}\(errno: (111|110|113|101)\b",
            "failed to connect to ",
            weight=LIKELY,
            passing=True,
        ),
        Pattern(r"\d+/\d+ clients joined", " clients joined", weight=LIKELY),
        Pattern(
            r"host not found: |connect\(\) timed out\. Original timeout was",
            "host not found: ",
            "original timeout was",
            weight=LIKELY,
        ),
        Pattern(r"(etcd|c10d).{0,40}rendezvous.{0,60}(fail|error)", "rendezvous", weight=POSSIBLE),
        Pattern(
            r"The (rendezvous|job) .{0,60}(did not (complete|form)|has not formed|waiting for .{0,20}nodes? to join)",
            "did not complete",
            "did not form",
            "has not formed",
            "to join",
            weight=POSSIBLE,
        ),
        Pattern(
            r"(gai|resolve|gaierror).{0,60}(Name or service not known|Temporary failure in name resolution|nodename nor servname|No address associated)",
            "name or service not known",
            "temporary failure in name",
            "nodename nor servname",
            "no address associated",
            weight=POSSIBLE,
            unless="huggingface|https?://|HTTPSConnectionPool|hub",
        ),
    ),
    example="torch.distributed.DistNetworkError: The client socket has timed out after 60s while trying to connect to (node-a, 29400).",
    near_miss="INFO client socket connected to (node-a, 29400)",
)

PORT_IN_USE = FailureClass(
    id="port_in_use",
    emitters=PROGRAM,
    title="the rendezvous port is taken",
    cause="Another process already listens on that port: another job on the node, a left-over process, or a second launcher of this same job.",
    fix="Use a free port per job (allranks finds one on the first node), or --standalone on one node; start one torchrun per node (--ntasks-per-node=1).",
    next_test="on that node: ss -ltnp 'sport = :<port>' shows the process that holds it",
    reference="https://docs.pytorch.org/docs/stable/elastic/run.html",
    patterns=(
        Pattern(r"EADDRINUSE", unless="tensorboard|jupyter|dashboard"),
        Pattern(r"Address already in use", unless="tensorboard|jupyter|dashboard|wandb"),
        Pattern(r"errno: ?98\b", "errno", unless="tensorboard"),
        Pattern(
            r"(bind|listen|rendezvous|master).{0,60}port.{0,30}(is |was )?(already )?(in use|taken|occupied)",
            "in use",
            "taken",
            "occupied",
            weight=LIKELY,
            unless="tensorboard|jupyter|dashboard|wandb",
        ),
        Pattern(
            r"port \d+ (is |was )?already (in use|taken|bound|occupied)",
            "already in use",
            "already taken",
            "already bound",
            "already occupied",
            weight=LIKELY,
            unless="tensorboard|jupyter|dashboard|wandb",
        ),
    ),
    example="torch.distributed.DistNetworkError: The server socket has failed to listen on any local network address. port: 29400, name: EADDRINUSE, message: address already in use",
    near_miss="TensorBoard could not bind to port 6006, it was already in use; using 6007",
)

WRONG_INTERFACE = FailureClass(
    id="wrong_interface",
    emitters=NETWORK,
    title="NCCL or Gloo uses a network interface that is missing or cannot reach the peers",
    cause=(
        "The interface that was chosen or configured does not exist on this node, has no address, or connects only to networks inside this host "
        "(loopback, a container bridge)."
    ),
    fix=(
        "Do not set one name for all nodes. Unset NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME, or exclude (NCCL_SOCKET_IFNAME=^lo,docker0), or resolve the name "
        "on each node, as allranks does. In containers use the host's network."
    ),
    next_test="on each node: ip -4 -br addr; the interface must be up and have an address in the network of the other nodes",
    reference="https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html#nccl-socket-ifname",
    patterns=(
        Pattern(r"no socket interface found"),
        Pattern(r"ss_family == \S*ss_family", "ss_family", weight=LIKELY),
        Pattern(r"connecting to address .{0,60}with family \d+ is neither AF_INET", "is neither af_inet"),
        Pattern(r"connectFullMesh failed", weight=LIKELY),
        Pattern(r"Unable to resolve hostname to a \(local\) address", weight=LIKELY),
        Pattern(r"SO_ERROR: .{0,60}remote=\[(127|169\.254)\.", "so_error: "),
        Pattern(r"(NET/Socket|Bootstrap) ?: ?no interface found", "no interface found"),
        Pattern(r"No (usable )?(network |socket )?interface (was )?(found|matche)", "interface", weight=LIKELY),
        Pattern(r"Unable to find (interface|address) for", "unable to find interface", "unable to find address"),
        Pattern(
            r"unsupported gloo device|makeDeviceFor(Interface|Hostname)",
            "unsupported gloo device",
            "makedevicefor",
            weight=LIKELY,
        ),
        Pattern(
            r"(NCCL|GLOO|TP)_SOCKET_IFNAME.{0,80}(not exist|not found|no such|missing|invalid|wrong)",
            "_socket_ifname",
            weight=LIKELY,
        ),
        Pattern(
            r"(interface|device) '?[\w.@-]+'? (does not exist|not found|has no (IP|address))",
            "does not exist",
            "not found",
            "has no ip",
            "has no address",
            weight=POSSIBLE,
            unless="ModuleNotFound|cuda|hca|import",
        ),
        Pattern(
            r"connect.{0,60}\b(172\.(1[6-9]|2\d|3[01])\.\d+\.1|169\.254\.\d+\.\d+|192\.168\.122\.\d+)\b.{0,80}(fail|refused|timed out|unreachable|abort|No route)",
            "connect",
            weight=CERTAIN,
        ),
        Pattern(
            r"connect.{0,80}\b127\.\d+\.\d+\.\d+.{0,60}(refused|timed out|unreachable)", "connect", weight=POSSIBLE
        ),
        Pattern(r"Connect to [\w.:\[\]-]+<\d+> failed", "connect to ", weight=LIKELY, passing=True),
        Pattern(
            r"Call to connect (to .{0,60})?(returned|failed).{0,40}(refused|timed out|No route|unreachable|abort)",
            "call to connect ",
            weight=LIKELY,
            passing=True,
        ),
        Pattern(
            r"socketPollConnect.{0,80}(refused|timed out|No route|unreachable|exceeded)",
            "socketpollconnect",
            weight=LIKELY,
        ),
        Pattern(
            r"gloo.{0,120}connect.{0,80}(refused|timed out|No route|unreachable)",
            "gloo",
            weight=LIKELY,
            unless="connectFullMesh",
        ),
        Pattern(r"No such device.{0,60}SO_BINDTODEVICE|SO_BINDTODEVICE.{0,60}No such device", "so_bindtodevice"),
    ),
    example="node-b:511:511 [0] misc/socket.cc:501 NCCL WARN Bootstrap : no socket interface found",
    near_miss="node-b:511:511 [0] NCCL INFO Bootstrap : Using eno1:10.4.0.12<0>",
)


BROKEN_NODE_NETWORK = FailureClass(
    id="broken_node_network",
    emitters=MACHINE | NETWORK,
    title="a node's network is down or flapping",
    cause="The node itself reports that a link or port went down. Connections over it break, whatever the job does.",
    fix="Exclude the node (--exclude=<node>) and report the port: cable, transceiver, switch port or adapter.",
    next_test="on the node: ip -br link, ibstat, and the kernel log for more of the same; compare the port's error counters before and after a run",
    reference="https://docs.nvidia.com/networking/display/mlnxofedv590560/troubleshooting",
    patterns=(
        Pattern(r"Lost carrier"),
        Pattern(r"(NIC )?Link is Down", "link is down"),
        Pattern(
            r"\b(link|port) (status )?(is |went |has gone |changed to |state )?\bdown\b",
            "down",
            weight=LIKELY,
            unless="shut(ting)? down|count ?down|link is down|broken down",
        ),
        Pattern(r"link flap", "flap"),
        Pattern(r"NETDEV WATCHDOG"),
        Pattern(r"transmit queue \d+ timed out", "transmit queue"),
        Pattern(r"\bTX timeout on queue", weight=LIKELY),
        Pattern(
            r"mlx\d_core.{0,120}(health compromised|reached miss count|Link down|fatal error|internal error|firmware|command .{0,20}timeout)",
            "_core",
            weight=LIKELY,
        ),
        Pattern(
            r"Got (fatal )?async(hronous)? event.{0,60}(port error|port err|device fatal|fatal error|link)",
            "async",
            weight=CERTAIN,
        ),
        Pattern(r"async(hronous)? (fatal )?event.{0,40}(port error|device fatal|port_err)", "async", weight=CERTAIN),
        Pattern(
            r"(State|state): (Down|Polling|Disabled).{0,40}|phys(ical)? state:? (Disabled|Polling|LinkErrorRecovery)",
            "state",
            weight=POSSIBLE,
            unless="cpu|power|node",
        ),
        Pattern(r"multicast join failed for .{0,80}status -\d+", "multicast join failed", weight=LIKELY),
        Pattern(
            r"Port module event.{0,60}(error|unplugged|bus stuck|power budget|temperature)",
            "port module event",
            weight=LIKELY,
        ),
        Pattern(r"link becomes not ready", weight=POSSIBLE, passing=True),
        Pattern(r"\b(Network is down|no carrier)\b", "network is down", "no carrier", weight=LIKELY, passing=True),
        Pattern(
            r"\b(InfiniBand|IB|HCA|NIC|ethernet|link|port)\b .{0,40}(flapp|is faulty|unhealthy|missing|error count)",
            "flapp",
            "fault",
            "unhealthy",
            "missing",
            "error count",
            weight=POSSIBLE,
            unless="default|segmentation|page fault|segfault",
        ),
        Pattern(r"symbol_?error|link_?downed|LinkDownedCounter", "symbol", "downed", weight=POSSIBLE),
    ),
    example="Jan 11 02:17:44 node-c kernel: mlx5_core 0000:9f:00.0 ens7np0: Link is Down",
    near_miss="Jan 11 02:17:49 node-c kernel: mlx5_core 0000:9f:00.0 ens7np0: Link is Up, 200 Gbps",
)

RDMA_UNREACHABLE = FailureClass(
    id="rdma_unreachable",
    emitters=NETWORK,
    title="an RDMA connection between two nodes fails",
    cause=(
        "A queue pair to the peer could not be set up, or its retries were exhausted: the two ports are on separate fabrics (or one is InfiniBand and the other "
        "Ethernet), the subnet has no route, or the peer's port or process is gone."
    ),
    fix="Restrict NCCL_IB_HCA to ports of one fabric, the same on every node; exclude the node whose port fails; check whether the peer process died before.",
    next_test="ib_write_bw between the two nodes over the two named ports; ibstat on both (state Active, same link layer)",
    reference="https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting.html",
    patterns=(
        Pattern(r"Got completion (from peer .{0,80})?with (error|status[= ])", "got completion ", weight=LIKELY),
        Pattern(r"IBV_WC_(RETRY_EXC_ERR|RNR_RETRY_EXC_ERR|REM_\w+|WR_FLUSH_ERR)", "ibv_wc_", weight=LIKELY),
        Pattern(r"(transport|RNR) retry (count(er)? )?exceeded", "retry "),
        Pattern(
            r"ibv_modify_qp failed with (error )?.{0,12}(No route|Connection timed out|unreachable|timed out|110\b|113\b|101\b)",
            "ibv_modify_qp failed",
        ),
        Pattern(
            r"ibv_modify_qp failed with (error )?.{0,6}(22\b|Invalid argument)", "ibv_modify_qp failed", weight=POSSIBLE
        ),
        Pattern(
            r"(failed to|unable to|could not|cannot) (modify|move|transition|change) (the )?QP\b.{0,40}\b(RTR|RTS|INIT)\b.{0,20}(timed out|No route|unreachable|110\b|113\b|101\b)",
            "rtr",
            "rts",
            weight=LIKELY,
        ),
        Pattern(r"NCCL WARN.{0,80}ibv_modify_qp failed", "ibv_modify_qp failed", weight=POSSIBLE - 0.05),
        Pattern(r"ibv_modify_qp failed", weight=WEAK),
        Pattern(r"NCCL WARN.{0,200}\bNCCL_IB_HCA\b", "nccl_ib_hca", weight=POSSIBLE),
        Pattern(r"(vendor err(or)?|vendor_err) (129|0x81)\b", "vendor", weight=POSSIBLE),
        Pattern(
            r"\b(RDMA|IB|InfiniBand|RoCE|verbs|EFA|libfabric|OFI|UCX)\b.{0,100}\b(No route to host|unreachable|not reachable|unresponsive receiver|handshake.{0,30}(fail|tim|error|refus))",
            "no route to host",
            "unreachable",
            "not reachable",
            "unresponsive receiver",
            "handshake",
            weight=LIKELY,
        ),
        Pattern(
            r"\bOFI\b.{0,120}(completed with error|Request .{0,30}error|CQ .{0,30}error|cq_readerr|fi_\w+ .{0,40}failed)",
            "ofi",
            weight=LIKELY,
        ),
        Pattern(
            r"(different|unlike|mixed|mismatched) (link layers?|fabrics?|subnets?)|link.?layer mismatch",
            "link layer",
            "fabric",
            "subnet",
            "mismatch",
            weight=LIKELY,
            unless="fabric ?manager",
        ),
        Pattern(r"rdma_(connect|resolve_(addr|route)|create_\w+).{0,60}(fail|error|timed out)", "rdma_", weight=LIKELY),
        Pattern(
            r"ibv_poll_cq.{0,60}(fail|error)|ibv_post_send.{0,40}fail", "ibv_poll_cq", "ibv_post_send", weight=POSSIBLE
        ),
    ),
    example="node-d:77:99 [2] transport/net_ib.cc:1302 NCCL WARN NET/IB : Got completion from peer 10.9.0.3<47011> with error 12, opcode 0, len 0, vendor err 129 (Recv)",
    near_miss="node-d:77:99 [2] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [RO]; OOB eno1:10.9.0.4<0>",
)

ROCE_GID_INDEX = FailureClass(
    id="roce_gid_index",
    emitters=NETWORK,
    title="wrong RoCE GID index",
    cause="The configured GID index for RoCE is empty or has another type on this port: indices differ between nodes and change when an interface restarts.",
    fix="Leave NCCL_IB_GID_INDEX unset: NCCL 2.21 and newer choose a RoCE v2 entry with an IPv4 address on each port. For older ones, look it up per node.",
    next_test="show_gids (or /sys/class/infiniband/<dev>/ports/1/gids) on every node: which index is RoCE v2 with an IPv4 address?",
    reference="https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html#nccl-ib-gid-index",
    patterns=(
        Pattern(r"ibv_modify_qp failed with (error )?.{0,6}(61\b|No data available)", "ibv_modify_qp failed"),
        Pattern(r"(ibv_query_gid|ibv_create_ah|query_gid)\w*.{0,60}fail", "query_gid", "ibv_create_ah"),
        Pattern(
            r"GID.?index.{0,60}(invalid|out of range|not valid|wrong|empty|not found|does not exist|unavailable|stale|no longer)",
            "gid",
        ),
        Pattern(
            r"(invalid|wrong|bad|no (valid|usable|suitable)|unable to (find|open|query)|could not (find|read|get)).{0,24}\bGID\b",
            "gid",
        ),
        Pattern(
            r"local GID ::\s*(/|,|$)|GID (is )?(all )?(zero|0000:0000:0000:0000:0000:0000:0000:0000)",
            "gid",
            weight=LIKELY,
        ),
        Pattern(
            r"ibv_modify_qp failed with (error )?.{0,6}(22\b|Invalid argument).{0,200}(GID index|RoCE)",
            "ibv_modify_qp failed",
            weight=LIKELY,
        ),
    ),
    example="node-e:12:40 [1] misc/ibvwrap.cc:200 NCCL WARN Call to ibv_modify_qp failed with error No data available",
    near_miss="node-e:12:40 [1] NCCL INFO NCCL_IB_GID_INDEX set by environment to 3.",
)

MEMLOCK_LIMIT = FailureClass(
    id="memlock_limit",
    emitters=NETWORK | {"shell", "slurm_daemon"},
    title="the limit of locked memory is too low for RDMA",
    cause="RDMA pins memory; the process may not lock enough of it (ulimit -l), so registering buffers or queues fails.",
    fix="Raise it to unlimited where the job starts: limits.conf for login shells, LimitMEMLOCK=infinity for slurmd, --ulimit memlock=-1 for containers.",
    next_test="inside the job: ulimit -l must print unlimited; a login shell may show another value",
    reference="https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting.html",
    patterns=(
        Pattern(
            r"(Failed|Unable) to register (mr|memory|address)\b.{0,120}(-12\b|Cannot allocate|ENOMEM|errno:? 12\b)",
            " to register m",
            " to register address",
        ),
        Pattern(
            r"\b(Libfabric|EFA|OFI|efa_\w+|prov_errno)\b.{0,120}(-12\)|Cannot allocate memory)",
            "libfabric",
            "efa",
            "ofi",
            "prov_errno",
            weight=LIKELY,
        ),
        Pattern(
            r"ibv_(\w*reg_\w*mr\w*|create_cq|create_qp|create_srq|alloc_pd)\b.{0,80}(Cannot allocate memory|ENOMEM)",
            "cannot allocate memory",
            "enomem",
        ),
        Pattern(r"RLIMIT_MEMLOCK|memlock.{0,40}(limit|too (low|small))", "rlimit_memlock", "memlock"),
        Pattern(r"max locked memory.{0,40}\b(\d+)\b", "max locked memory", weight=LIKELY, unless="unlimited"),
        Pattern(
            r"(locked|pinned|registered) memory.{0,40}(limit|too (low|small)|insufficient|exceed)",
            "memory",
            weight=LIKELY,
            unless="unlimited",
        ),
        Pattern(
            r"(fi_mr_reg|MR registration|memory registration|register memory|reg_mr).{0,80}Cannot allocate memory",
            "cannot allocate memory",
        ),
        Pattern(r"ibv_(reg_mr\w*|create_cq|create_qp).{0,30}(failed|error).{0,20}\b12\b", "ibv_", weight=LIKELY),
        Pattern(
            r"ibv_(reg_mr\w*|create_cq|create_qp|alloc_pd) failed(?!.*(No such|Invalid arg|Bad address|not supp|Operation|Device))",
            "ibv_",
            weight=LIKELY,
        ),
        Pattern(r"ulimit -l", weight=POSSIBLE, unless="unlimited"),
        Pattern(
            r"ibv_\w*reg_\w*mr\w*\b.{0,40}(?P<address>Bad address|EFAULT)|(Failed|Unable) to register (mr|memory)\b.{0,80}(?P<address2>Bad address|EFAULT)",
            "bad address",
            "efault",
            weight=LIKELY - 0.1,
        ),
    ),
    example="node-f:5:9 [0] misc/ibvwrap.cc:262 NCCL WARN Call to ibv_reg_mr failed with error Cannot allocate memory",
    near_miss="max locked memory (kbytes, -l) unlimited",
)

SILENT_SOCKET_FALLBACK = FailureClass(
    id="silent_socket_fallback",
    emitters=NETWORK,
    ends_job=False,
    title="NCCL fell back from RDMA to TCP sockets",
    cause=(
        "RDMA is available or was expected, but NCCL could not use it and used sockets without an error: a driver library in the container that does not match the "
        "host's, a plugin that did not load, or devices that are not visible."
    ),
    fix=(
        "Make the RDMA devices and the matching user-space driver (libmlx5, libbnxt_re, libfabric with aws-ofi-nccl) visible where the ranks run; set NCCL_NET=IB (or "
        "the plugin's name) so that it fails with an error instead of falling back."
    ),
    next_test="ibv_devices and ibv_devinfo inside the container; then NCCL_DEBUG=INFO must show NET/IB or the plugin in `via NET/...`",
    reference="https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html#nccl-net",
    patterns=(
        Pattern(r"Driver \w+ does not support the kernel ABI", "does not support the kernel abi", weight=LIKELY),
        Pattern(r"(fall(ing|s)?|fell) ?back to (NET/)?(TCP|sockets?)\b", "back to ", weight=LIKELY),
        Pattern(
            r"(NET/OFI|OFI plugin|aws-ofi|NET/Plugin|NET plugin).{0,120}(fail|unable|could not|not found|no (eligible|suitable|valid) provider|error)",
            "ofi",
            "plugin",
            weight=POSSIBLE,
            unless=r"No plugin found|Could not find:? ?(libnccl-net|libnccl-tuner|libnccl-profiler|none)|tuner|profiler|Using internal|completed with error|Failed to find \w+ symbol|dlerror",
        ),
    ),
    example="libibverbs: Warning: Driver hns_roce does not support the kernel ABI of 4 (supports 1 to 2) for device /sys/class/infiniband/hns_0",
    near_miss="NCCL INFO NET/Plugin: Could not find: libnccl-net.so. Using internal network plugin.",
)

SLOW_TRANSPORT = FailureClass(
    id="slow_transport",
    emitters=NETWORK,
    ends_job=False,
    title="communication works, but over a slow path",
    cause="Ranks exchange data over a path that is slower than the hardware allows: peer-to-peer is disabled, copies go through host memory, or there are too few channels.",
    fix="Unset NCCL_P2P_DISABLE, NCCL_SHM_DISABLE and channel limits where P2P works; otherwise check IOMMU/ACS and the placement of the GPUs.",
    next_test="compare all_reduce_perf with and without the setting; nvidia-smi topo -m (allranks topo) shows which links the machine has",
    reference="https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html",
    patterns=(
        Pattern(r"Avg bus bandwidth\s*:\s*0\.0*[1-9]", "avg bus bandwidth", weight=LIKELY - 0.1),
        Pattern(r"P2P is disabled between", weight=LIKELY),
        Pattern(r"NCCL_P2P_DISABLE set by environment to 1", "nccl_p", weight=LIKELY),
        Pattern(r"NCCL_SHM_DISABLE set by environment to 1", "nccl_shm_disable", weight=POSSIBLE),
        Pattern(r"NCCL_P2P_LEVEL set by environment to (LOC|0)\b", "p_level set by environment", weight=POSSIBLE),
        Pattern(r"NCCL_MAX_N(CHANNELS|RINGS) set by environment to [12]\b", "nccl_max_n", weight=POSSIBLE),
        Pattern(
            r"GPU ?Direct RDMA Disabled|GDRDMA (is )?(not (enabled|available)|disabled)|nv_?peer_?mem.{0,20}(not loaded|missing)",
            "gpu direct rdma disabled",
            "gpudirect rdma disabled",
            "gdrdma",
            "peer_mem",
            "peermem",
            weight=POSSIBLE,
        ),
        Pattern(
            r"(busbw|bandwidth|throughput).{0,60}(slower|lower|below|only|dropp?(ed|s)?|far under) ",
            "busbw",
            "bandwidth",
            "throughput",
            weight=POSSIBLE,
        ),
    ),
    example="node-g:61:61 [0] NCCL INFO P2P is disabled between connected GPUs 2 and 3. You can repress this message with NCCL_IGNORE_DISABLED_P2P=1.",
    near_miss="node-g:61:61 [0] NCCL INFO Check P2P Type isAllDirectP2p 1 directMode 0",
)
