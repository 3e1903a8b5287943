"""Tools for testing on one machine: the smoke tests, and a Slurm cluster in namespaces."""
