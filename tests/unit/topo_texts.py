"""Matrices as drivers of several years print them. What machines these are does not matter; the forms do."""

SEED_L4 = """\
        GPU0    GPU1    NIC0    NIC1    NIC2    CPU Affinity    NUMA Affinity
GPU0     X      SYS     SYS     SYS     NODE    0-31,64-95      0
GPU1    SYS      X      NODE    NODE    SYS     32-63,96-127    1
NIC0    SYS     NODE     X      PIX     SYS
NIC1    SYS     NODE    PIX      X      SYS
NIC2    NODE    SYS     SYS     SYS      X

NIC Legend:
  NIC0: mlx5_2
  NIC1: mlx5_3
  NIC2: mlx5_bond_0
"""
OLD_NAMED = """\
\tGPU0\tGPU1\tmlx5_0\tmlx5_1\tCPU Affinity
GPU0\t X \tNV2\tPIX\tSOC\t0-19,40-59
GPU1\tNV2\t X \tSOC\tPIX\t20-39,60-79
mlx5_0\tPIX\tSOC\t X \tSOC\t
mlx5_1\tSOC\tPIX\tSOC\t X \t

Legend:

  X   = Self
  SOC  = Connection traversing PCIe as well as the SMP link between CPU sockets(e.g. QPI)
"""
GRACE = """\
\tGPU0\tGPU1\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID
GPU0\t X \tNV18\tNODE\t0-71\t0\t\t4
GPU1\tNV18\t X \tSYS\t72-143\t1\t\t12
NIC0\tNODE\tSYS\t X \t\t\t\t
"""
COLOURED = (
    "\x1b[4m\tGPU0\tGPU1\tCPU Affinity\tNUMA Affinity\x1b[0m\nGPU0\t X \tNV4\t0-15\tN/A\nGPU1\tNV4\t X \t0-15\tN/A\n"
)
CONTAINER = """\
\tGPU0\tGPU1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID
GPU0\t X \tPHB\t\tN/A\t\tN/A
GPU1\tPHB\t X \t\tN/A\t\tN/A
"""
BARE = "GPU0 GPU1\nGPU0 X NV1\nGPU1 NV1 X\n"
ROCM = """\
========================= ROCm System Management Interface =========================
=============================== Link Type between two GPUs ===============================
       GPU0         GPU1
GPU0   0            XGMI
GPU1   XGMI         0
"""
