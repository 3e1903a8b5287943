"""Call Slurm's commands and parse their output."""
