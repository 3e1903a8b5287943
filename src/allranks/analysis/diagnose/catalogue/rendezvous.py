"""Failure classes of rendezvous, ports and network interfaces: ranks that cannot find each other."""

from __future__ import annotations

from allranks.analysis.diagnose.patterns import (
    CERTAIN,
    LIKELY,
    NETWORK,
    POSSIBLE,
    PROGRAM,
    TIMED_OUT,
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
