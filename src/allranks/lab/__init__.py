"""Tools to try allranks on one machine: the smoke tests, and a Slurm cluster in namespaces."""
