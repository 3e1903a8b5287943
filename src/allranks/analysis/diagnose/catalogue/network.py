"""Failure classes of the network: rendezvous, ports, interfaces, then broken links, RDMA errors and slow transports."""

from __future__ import annotations

from allranks.analysis.diagnose.patterns import (
    LIKELY,
    MACHINE,
    NETWORK,
    POSSIBLE,
    PROGRAM,
    TIMED_OUT,
    FailureClass,
    Pattern,
    certain,
    likely,
    possible,
    weak,
)

CLASSES: tuple[FailureClass, ...] = (
    FailureClass(
        id="rendezvous_unreachable",
        emitters=PROGRAM,
        title="ranks cannot reach the rendezvous",
        cause="The rendezvous address and port do not answer. Nothing listens there (the agent of the first node never "
        "started, or does not know that it "
        "is the host), the name does not resolve on every node, or a firewall blocks the connection.",
        fix="Use an address of the first node that every node can reach, start the launcher on every node, and with "
        "c10d set is_host=1 on the first node "
        "(--rdzv-conf is_host=1). A name that resolves to 127.0.x.x on its own node does not work.",
        next_test="on another node: getent hosts <address>, then nc -vz <address> <port> while the first node waits; "
        "allranks doctor SPEC runs both checks",
        reference="https://docs.pytorch.org/docs/stable/elastic/run.html",
        patterns=certain(
            r"client socket has timed out after \d+",
            r"(MASTER_ADDR|master|rdzv_endpoint|rendezvous).{0,80}(cannot be resolved|not resolve|Name or service not known|nodename nor servname)",
        )
        + likely(
            Pattern(
                r"client socket has failed to connect to .{0,80}(refused|timed out|No route|unreachable)", passing=True
            ),
            Pattern(r"network addresses of \(.{1,80}\) cannot be retrieved", passing=True),
            r"RendezvousTimeoutError|RendezvousConnectionError",
            r"connection to the C10d store has failed",
            r"Timed out after \d+ seconds waiting for clients",
            rf"(rendezvous|rdzv|init_process_group|dist_init|TCPStore).{{0,80}}({TIMED_OUT}|refused|unreachable|could not be reached|failed to connect)",
            r"(connect|connection) (to|with) .{0,60}\b(master|MASTER_ADDR|rendezvous|rdzv|store)\b.{0,60}(timed out|refused|failed)",
            Pattern(r"failed to connect to .{1,80}\(errno: (111|110|113|101)\b", passing=True),
            r"\d+/\d+ clients joined",
            r"host not found: |connect\(\) timed out\. Original timeout was",
        )
        + possible(
            Pattern(r"DistNetworkError", unless="EADDRINUSE|EACCES|already in use"),
            r"DistStoreError",
            r"(etcd|c10d).{0,40}rendezvous.{0,60}(fail|error)",
            r"The (rendezvous|job) .{0,60}(did not (complete|form)|has not formed|waiting for .{0,20}nodes? to join)",
            Pattern(
                r"(gai|resolve|gaierror).{0,60}(Name or service not known|Temporary failure in name resolution|nodename nor servname|No address associated)",
                unless="huggingface|https?://|HTTPSConnectionPool|hub",
            ),
        ),
        example="torch.distributed.DistNetworkError: The client socket has timed out after 60s while trying to connect "
        "to (node-a, 29400).",
    ),
    FailureClass(
        id="port_in_use",
        emitters=PROGRAM,
        title="the rendezvous port is taken",
        cause="Another process already listens on that port: another job on the node, a left-over process, or a second "
        "launcher of this same job.",
        fix="Use a free port per job (allranks finds one on the first node), or --standalone on one node; start one "
        "torchrun per node (--ntasks-per-node=1).",
        next_test="on that node: ss -ltnp 'sport = :<port>' shows the process that holds it",
        reference="https://docs.pytorch.org/docs/stable/elastic/run.html",
        patterns=certain(
            Pattern(r"EADDRINUSE", unless="tensorboard|jupyter|dashboard"),
            Pattern(r"Address already in use", unless="tensorboard|jupyter|dashboard|wandb"),
            Pattern(r"errno: ?98\b", unless="tensorboard"),
        )
        + likely(
            Pattern(
                r"(bind|listen|rendezvous|master).{0,60}port.{0,30}(is |was )?(already )?(in use|taken|occupied)",
                unless="tensorboard|jupyter|dashboard|wandb",
            ),
            Pattern(
                r"port \d+ (is |was )?already (in use|taken|bound|occupied)",
                unless="tensorboard|jupyter|dashboard|wandb",
            ),
        ),
        example="torch.distributed.DistNetworkError: The server socket has failed to listen on any local network "
        "address. port: 29400, name: EADDRINUSE, message: address already in use",
    ),
    FailureClass(
        id="port_reserved",
        emitters=PROGRAM,
        title="the rendezvous port is reserved for root",
        cause="Only root may listen on a port below 1024 (net.ipv4.ip_unprivileged_port_start).",
        fix="Use a port above 1023 for the rendezvous, the same on all nodes (allranks finds one on the first node).",
        next_test="on that node: sysctl net.ipv4.ip_unprivileged_port_start",
        reference="https://docs.pytorch.org/docs/stable/elastic/run.html",
        patterns=certain(r"server socket has failed to (bind|listen).{0,160}(EACCES|errno: 13\b)"),
        example="torch.distributed.DistNetworkError: The server socket has failed to bind. port: 80, useIpv6: 0, "
        "code: -13, name: EACCES, message: permission denied",
    ),
    FailureClass(
        id="wrong_interface",
        emitters=NETWORK,
        title="NCCL or Gloo uses a network interface that is missing or cannot reach the peers",
        cause="The interface that was chosen or configured does not exist on this node, has no address, or connects "
        "only to networks inside this host (loopback, a container bridge).",
        fix="Do not set one name for all nodes. Unset NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME, or exclude "
        "(NCCL_SOCKET_IFNAME=^lo,docker0), or resolve the name "
        "on each node, as allranks does. In containers use the host's network.",
        next_test="on each node: ip -4 -br addr; the interface must be up and have an address in the network of the "
        "other nodes",
        reference="https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html#nccl-socket-ifname",
        patterns=certain(
            r"no socket interface found",
            r"connecting to address .{0,60}with family \d+ is neither AF_INET",
            r"SO_ERROR: .{0,60}remote=\[(127|169\.254)\.",
            r"(NET/Socket|Bootstrap) ?: ?no interface found",
            r"Unable to find (interface|address) for",
            r"connect.{0,60}\b(172\.(1[6-9]|2\d|3[01])\.\d+\.1|169\.254\.\d+\.\d+|192\.168\.122\.\d+)\b.{0,80}(fail|refused|timed out|unreachable|abort|No route)",
            r"No such device.{0,60}SO_BINDTODEVICE|SO_BINDTODEVICE.{0,60}No such device",
        )
        + likely(
            r"ss_family == \S*ss_family",
            r"connectFullMesh failed",
            r"Unable to resolve hostname to a \(local\) address",
            r"No (usable )?(network |socket )?interface (was )?(found|matche)",
            r"unsupported gloo device|makeDeviceFor(Interface|Hostname)",
            r"(NCCL|GLOO|TP)_SOCKET_IFNAME.{0,80}(not exist|not found|no such|missing|invalid|wrong)",
            Pattern(r"Connect to [\w.:\[\]-]+<\d+> failed", passing=True),
            Pattern(
                r"Call to connect (to .{0,60})?(returned|failed).{0,40}(refused|timed out|No route|unreachable|abort)",
                passing=True,
            ),
            r"socketPollConnect.{0,80}(refused|timed out|No route|unreachable|exceeded)",
            Pattern(r"gloo.{0,120}connect.{0,80}(refused|timed out|No route|unreachable)", unless="connectFullMesh"),
        )
        + possible(
            Pattern(
                r"(interface|device) '?[\w.@-]+'? (does not exist|not found|has no (IP|address))",
                unless="ModuleNotFound|cuda|hca|import",
            ),
            r"connect.{0,80}\b127\.\d+\.\d+\.\d+.{0,60}(refused|timed out|unreachable)",
        ),
        example="node-b:511:511 [0] misc/socket.cc:501 NCCL WARN Bootstrap : no socket interface found",
    ),
    FailureClass(
        id="broken_node_network",
        emitters=MACHINE | NETWORK,
        title="a node's network is down or flapping",
        cause="The node itself reports that a link or port went down. Connections over it break, whatever the job "
        "does.",
        fix="Exclude the node (--exclude=<node>) and report the port: cable, transceiver, switch port or adapter.",
        next_test="on the node: ip -br link, ibstat, and the kernel log for more of the same; compare the port's error "
        "counters before and after a run",
        reference="https://docs.nvidia.com/networking/display/mlnxofedv590560/troubleshooting",
        patterns=certain(
            r"Lost carrier",
            r"(NIC )?Link is Down",
            r"link flap",
            r"NETDEV WATCHDOG",
            r"transmit queue \d+ timed out",
            r"Got (fatal )?async(hronous)? event.{0,60}(port error|port err|device fatal|fatal error|link)",
            r"async(hronous)? (fatal )?event.{0,40}(port error|device fatal|port_err)",
        )
        + likely(
            Pattern(
                r"\b(link|port) (status )?(is |went |has gone |changed to |state )?\bdown\b",
                unless="shut(ting)? down|count ?down|link is down|broken down",
            ),
            r"\bTX timeout on queue",
            r"mlx\d_core.{0,120}(health compromised|reached miss count|Link down|fatal error|internal error|firmware|command .{0,20}timeout)",
            r"multicast join failed for .{0,80}status -\d+",
            r"Port module event.{0,60}(error|unplugged|bus stuck|power budget|temperature)",
            Pattern(r"\b(Network is down|no carrier)\b", passing=True),
        )
        + possible(
            Pattern(
                r"(State|state): (Down|Polling|Disabled).{0,40}|phys(ical)? state:? (Disabled|Polling|LinkErrorRecovery)",
                unless="cpu|power|node",
            ),
            Pattern(r"link becomes not ready", passing=True),
            Pattern(
                r"\b(InfiniBand|IB|HCA|NIC|ethernet|link|port)\b .{0,40}(flapp|is faulty|unhealthy|missing|error count)",
                unless="default|segmentation|page fault|segfault",
            ),
            r"symbol_?error|link_?downed|LinkDownedCounter",
        ),
        example="Jan 11 02:17:44 node-c kernel: mlx5_core 0000:9f:00.0 ens7np0: Link is Down",
    ),
    FailureClass(
        id="rdma_unreachable",
        emitters=NETWORK,
        title="an RDMA connection between two nodes fails",
        cause="A queue pair to the peer could not be set up, or its retries were exhausted: the two ports are on "
        "separate fabrics (or one is InfiniBand and the other "
        "Ethernet), the subnet has no route, or the peer's port or process is gone.",
        fix="Restrict NCCL_IB_HCA to ports of one fabric, the same on every node; exclude the node whose port fails; "
        "check whether the peer process died before.",
        next_test="ib_write_bw between the two nodes over the two named ports; ibstat on both (state Active, same "
        "link layer)",
        reference="https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting.html",
        patterns=certain(
            r"(transport|RNR) retry (count(er)? )?exceeded",
            r"ibv_modify_qp failed with (error )?.{0,12}(No route|Connection timed out|unreachable|timed out|110\b|113\b|101\b)",
        )
        + likely(
            r"Got completion (from peer .{0,80})?with (error|status[= ])",
            r"IBV_WC_(RETRY_EXC_ERR|RNR_RETRY_EXC_ERR|REM_\w+|WR_FLUSH_ERR)",
            r"(failed to|unable to|could not|cannot) (modify|move|transition|change) (the )?QP\b.{0,40}\b(RTR|RTS|INIT)\b.{0,20}(timed out|No route|unreachable|110\b|113\b|101\b)",
            r"\b(RDMA|IB|InfiniBand|RoCE|verbs|EFA|libfabric|OFI|UCX)\b.{0,100}\b(No route to host|unreachable|not reachable|unresponsive receiver|handshake.{0,30}(fail|tim|error|refus))",
            r"\bOFI\b.{0,120}(completed with error|Request .{0,30}error|CQ .{0,30}error|cq_readerr|fi_\w+ .{0,40}failed)",
            Pattern(
                r"(different|unlike|mixed|mismatched) (link layers?|fabrics?|subnets?)|link.?layer mismatch",
                unless="fabric ?manager",
            ),
            r"rdma_(connect|resolve_(addr|route)|create_\w+).{0,60}(fail|error|timed out)",
        )
        + possible(
            r"ibv_modify_qp failed with (error )?.{0,6}(22\b|Invalid argument)",
            Pattern(r"NCCL WARN.{0,80}ibv_modify_qp failed", weight=POSSIBLE - 0.05),
            r"NCCL WARN.{0,200}\bNCCL_IB_HCA\b",
            r"(vendor err(or)?|vendor_err) (129|0x81)\b",
            r"ibv_poll_cq.{0,60}(fail|error)|ibv_post_send.{0,40}fail",
        )
        + weak(r"ibv_modify_qp failed"),
        example="node-d:77:99 [2] transport/net_ib.cc:1302 NCCL WARN NET/IB : Got completion from peer 10.9.0.3<47011> "
        "with error 12, opcode 0, len 0, vendor err 129 (Recv)",
    ),
    FailureClass(
        id="roce_gid_index",
        emitters=NETWORK,
        title="wrong RoCE GID index",
        cause="The configured GID index for RoCE is empty or has another type on this port: indices differ between "
        "nodes and change when an interface restarts.",
        fix="Leave NCCL_IB_GID_INDEX unset: NCCL 2.21 and newer choose a RoCE v2 entry with an IPv4 address on each "
        "port. For older ones, look it up per node.",
        next_test="show_gids (or /sys/class/infiniband/<dev>/ports/1/gids) on every node: which index is RoCE v2 with "
        "an IPv4 address?",
        reference="https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html#nccl-ib-gid-index",
        patterns=certain(
            r"ibv_modify_qp failed with (error )?.{0,6}(61\b|No data available)",
            r"(ibv_query_gid|ibv_create_ah|query_gid)\w*.{0,60}fail",
            r"GID.?index.{0,60}(invalid|out of range|not valid|wrong|empty|not found|does not exist|unavailable|stale|no longer)",
            r"(invalid|wrong|bad|no (valid|usable|suitable)|unable to (find|open|query)|could not (find|read|get)).{0,24}\bGID\b",
        )
        + likely(
            r"local GID ::\s*(/|,|$)|GID (is )?(all )?(zero|0000:0000:0000:0000:0000:0000:0000:0000)",
            r"ibv_modify_qp failed with (error )?.{0,6}(22\b|Invalid argument).{0,200}(GID index|RoCE)",
        ),
        example="node-e:12:40 [1] misc/ibvwrap.cc:200 NCCL WARN Call to ibv_modify_qp failed with error No data "
        "available",
    ),
    FailureClass(
        id="memlock_limit",
        emitters=NETWORK | {"shell", "slurm_daemon"},
        title="the limit of locked memory is too low for RDMA",
        cause="RDMA pins memory; the process may not lock enough of it (ulimit -l), so registering buffers or queues "
        "fails.",
        fix="Raise it to unlimited where the job starts: limits.conf for login shells, LimitMEMLOCK=infinity for "
        "slurmd, --ulimit memlock=-1 for containers.",
        next_test="inside the job: ulimit -l must print unlimited; a login shell may show another value",
        reference="https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting.html",
        patterns=certain(
            r"(Failed|Unable) to register (mr|memory|address)\b.{0,120}(-12\b|Cannot allocate|ENOMEM|errno:? 12\b)",
            r"ibv_(\w*reg_\w*mr\w*|create_cq|create_qp|create_srq|alloc_pd)\b.{0,80}(Cannot allocate memory|ENOMEM)",
            r"RLIMIT_MEMLOCK|memlock.{0,40}(limit|too (low|small))",
            r"(fi_mr_reg|MR registration|memory registration|register memory|reg_mr).{0,80}Cannot allocate memory",
        )
        + likely(
            r"\b(Libfabric|EFA|OFI|efa_\w+|prov_errno)\b.{0,120}(-12\)|Cannot allocate memory)",
            Pattern(r"max locked memory.{0,40}\b(\d+)\b", unless="unlimited"),
            Pattern(
                r"(locked|pinned|registered) memory.{0,40}(limit|too (low|small)|insufficient|exceed)",
                unless="unlimited",
            ),
            r"ibv_(reg_mr\w*|create_cq|create_qp).{0,30}(failed|error).{0,20}\b12\b",
            r"ibv_(reg_mr\w*|create_cq|create_qp|alloc_pd) failed(?!.*(No such|Invalid arg|Bad address|not supp|Operation|Device))",
            Pattern(
                r"ibv_\w*reg_\w*mr\w*\b.{0,40}(?P<address>Bad address|EFAULT)|(Failed|Unable) to register (mr|memory)\b.{0,80}(?P<address2>Bad address|EFAULT)",
                weight=LIKELY - 0.1,
            ),
        )
        + possible(Pattern(r"ulimit -l", unless="unlimited")),
        example="node-f:5:9 [0] misc/ibvwrap.cc:262 NCCL WARN Call to ibv_reg_mr failed with error Cannot allocate "
        "memory",
    ),
    FailureClass(
        id="silent_socket_fallback",
        emitters=NETWORK,
        ends_job=False,
        title="NCCL fell back from RDMA to TCP sockets",
        cause="RDMA is available or was expected, but NCCL could not use it and used sockets without an error: a "
        "driver library in the container that does not match the "
        "host's, a plugin that did not load, or devices that are not visible.",
        fix="Make the RDMA devices and the matching user-space driver (libmlx5, libbnxt_re, libfabric with "
        "aws-ofi-nccl) visible where the ranks run; set NCCL_NET=IB (or "
        "the plugin's name) so that it fails with an error instead of falling back.",
        next_test="ibv_devices and ibv_devinfo inside the container; then NCCL_DEBUG=INFO must show NET/IB or the "
        "plugin in `via NET/...`",
        reference="https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html#nccl-net",
        patterns=likely(
            r"Driver \w+ does not support the kernel ABI", r"(fall(ing|s)?|fell) ?back to (NET/)?(TCP|sockets?)\b"
        )
        + possible(
            Pattern(
                r"(NET/OFI|OFI plugin|aws-ofi|NET/Plugin|NET plugin).{0,120}(fail|unable|could not|not found|no (eligible|suitable|valid) provider|error)",
                unless=r"No plugin found|Could not find:? ?(libnccl-net|libnccl-tuner|libnccl-profiler|none)|tuner|profiler|Using internal|completed with error|Failed to find \w+ symbol|dlerror",
            )
        ),
        example="libibverbs: Warning: Driver hns_roce does not support the kernel ABI of 4 (supports 1 to 2) for "
        "device /sys/class/infiniband/hns_0",
    ),
    FailureClass(
        id="slow_transport",
        emitters=NETWORK,
        ends_job=False,
        title="communication works, but over a slow path",
        cause="Ranks exchange data over a path that is slower than the hardware allows: peer-to-peer is disabled, "
        "copies go through host memory, or there are too few channels.",
        fix="Unset NCCL_P2P_DISABLE, NCCL_SHM_DISABLE and channel limits where P2P works; otherwise check IOMMU/ACS "
        "and the placement of the GPUs.",
        next_test="compare all_reduce_perf with and without the setting; nvidia-smi topo -m (allranks topo) shows "
        "which links the machine has",
        reference="https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html",
        patterns=likely(
            Pattern(r"Avg bus bandwidth\s*:\s*0\.0*[1-9]", weight=LIKELY - 0.1),
            r"P2P is disabled between",
            r"NCCL_P2P_DISABLE set by environment to 1",
        )
        + possible(
            r"NCCL_SHM_DISABLE set by environment to 1",
            r"NCCL_P2P_LEVEL set by environment to (LOC|0)\b",
            r"NCCL_MAX_N(CHANNELS|RINGS) set by environment to [12]\b",
            r"GPU ?Direct RDMA Disabled|GDRDMA (is )?(not (enabled|available)|disabled)|nv_?peer_?mem.{0,20}(not loaded|missing)",
            r"(busbw|bandwidth|throughput).{0,60}(slower|lower|below|only|dropp?(ed|s)?|far under) ",
        ),
        example="node-g:61:61 [0] NCCL INFO P2P is disabled between connected GPUs 2 and 3. You can repress this "
        "message with NCCL_IGNORE_DISABLED_P2P=1.",
    ),
)
