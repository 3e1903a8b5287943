# node0
cd /shared && PYTHONUNBUFFERED=1 PYTHONFAULTHANDLER=1 TOKENIZERS_PARALLELISM=false PYTORCH_ALLOC_CONF=expandable_segments:True ALLRANKS_NUMA_BINDING=1 NCCL_DEBUG=INFO /env/bin/python -m allranks.launch.agent /shared/runs/glm-fsdp-lora-1 --attempt 1 --node 0
# node1
cd /shared && PYTHONUNBUFFERED=1 PYTHONFAULTHANDLER=1 TOKENIZERS_PARALLELISM=false PYTORCH_ALLOC_CONF=expandable_segments:True ALLRANKS_NUMA_BINDING=1 NCCL_DEBUG=INFO /env/bin/python -m allranks.launch.agent /shared/runs/glm-fsdp-lora-1 --attempt 1 --node 1
