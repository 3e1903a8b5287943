"""Programs that run on the nodes, each in a process of its own."""
