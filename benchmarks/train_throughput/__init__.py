"""Training throughput of allranks beside the HF Trainer, TRL and a bare DDP loop, on one shared workload."""
