"""Programs that run on the nodes in separate processes."""
