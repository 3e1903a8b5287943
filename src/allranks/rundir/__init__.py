"""Read and write the run folder: paths, events, manifests and checkpoints."""
