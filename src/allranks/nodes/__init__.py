"""Query nodes, check whether they can run a job, prepare them: preflight, topology, network, staging, Slurm client."""
