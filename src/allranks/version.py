"""The version of the package. Importing this module loads nothing else."""

__version__ = "0.1.0"
