"""Slurm through its own commands: finding one, the batch script, what became of a job."""
