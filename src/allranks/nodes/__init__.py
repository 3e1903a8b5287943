"""Query nodes, check whether they can run a job, and prepare them: preflight, topology, network, staging, Slurm
client."""
