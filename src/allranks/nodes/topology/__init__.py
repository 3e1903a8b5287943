"""Read, draw and explain how the GPUs and network cards of one machine are connected (`nvidia-smi topo -m`)."""
