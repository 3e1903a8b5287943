"""Compute a launch plan from a spec and machine facts: ranks, batch, device, environment. No torch, no Slurm calls."""
