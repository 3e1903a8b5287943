"""Launch with Slurm: render and submit the batch script, follow the job, detect a dead driver."""
