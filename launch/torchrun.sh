#!/usr/bin/env bash
# Train on the GPUs of this machine:
#   launch/torchrun.sh run.toml outputs/run [--set optim.lr=1e-6 ...]
# On several machines, start it on each one (with the output folder on storage that all of them share):
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=node-0 launch/torchrun.sh run.toml outputs/run
#   NNODES=2 NODE_RANK=1 MASTER_ADDR=node-0 launch/torchrun.sh run.toml outputs/run
# Run it again after an interruption: it continues from the newest complete checkpoint.
set -euo pipefail

if [[ $# -lt 2 ]]; then
  echo "usage: $0 CONFIG OUTPUT_DIR [options of dsreason sft]" >&2
  exit 2
fi
config=$1 output_dir=$2
shift 2

# Prevents imports of Python files in the current folder, also by the launcher. The value shows dsreason that its own code,
# not a person, set the variable.
export PYTHONSAFEPATH=${PYTHONSAFEPATH:-dsreason}
command=(-m dsreason "${COMMAND:-sft}" --config "$config" --output-dir "$output_dir" --resume auto "$@")
nnodes=${NNODES:-1}
# Set NPROC, such as NPROC=2, if the machine has no GPU, or to start fewer ranks than GPUs.
if [[ $nnodes -eq 1 ]]; then # without torchrun, whose stores would listen on all interfaces
  exec python "${command[@]}" ${NPROC:+--nproc "$NPROC"}
fi

# Seconds after SIGTERM or Ctrl-C for the ranks to finish their step and save a checkpoint.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-600}
exec torchrun --nnodes "$nnodes" --nproc_per_node "${NPROC:-gpu}" \
  --node_rank "${NODE_RANK:?set it to 0 on the first machine, to 1 on the next}" \
  --master_addr "${MASTER_ADDR:?set it to the host name or IP address of the first machine}" \
  --master_port "${MASTER_PORT:-29500}" "${command[@]}"
