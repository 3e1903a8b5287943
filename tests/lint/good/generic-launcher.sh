#!/usr/bin/env bash
# usage: run.sh NODES SCRIPT [ARGS...]; started by srun on each node, or by hand on one
set -euo pipefail
nodes=${1:?how many nodes}; shift
case "${MODE:-train}" in
    train|resume) extra=(--resume auto) ;;
    eval) extra=(--eval-only) ;;
    *) echo "unknown mode ${MODE}" >&2; exit 2 ;;
esac
gpus=$(nvidia-smi -L | wc -l)
for pair in "lr 1e-4" "wd 0.1"; do
    read -r name value <<<"$pair"
    extra+=("--$name=$value")
done
if (( nodes > 1 )); then
    exec torchrun --nnodes="$nodes" --nproc_per_node="$gpus" --node_rank="$SLURM_NODEID" \
        --master_addr="$MASTER_ADDR" --master_port="$MASTER_PORT" "$@" "${extra[@]}"
fi
exec torchrun --standalone --nproc_per_node="$gpus" "$@" "${extra[@]}"
