#!/usr/bin/env bash
# Planning on a GPU without MIG: measures a profile under MPS, plans with it, applies the plan,
# probes a server and undoes the plan. Writes profile.csv, plan.json and apply.json to OUT_DIR, in
# about 90 seconds.
#   scripts/gpu/mps.sh OUT_DIR MODEL.onnx [GPU_KIND]
# GPU_KIND is one that `atoll plan` knows (default: h200-141gb). ATOLL names the binary (default:
# target/release/atoll).
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
out=$1
model=$2
kind=${3:-h200-141gb}
atoll=${ATOLL:-$here/../../target/release/atoll}
name=$(basename "$model" .onnx)
state=$(mktemp -d /tmp/mps.XXXX)
mkdir -p "$out" "$state/repository/$name/1"
cp "$model" "$state/repository/$name/1/model.onnx"
export CUDA_MPS_PIPE_DIRECTORY=$state/pipe CUDA_MPS_LOG_DIRECTORY=$state/log
mkdir -p "$CUDA_MPS_PIPE_DIRECTORY" "$CUDA_MPS_LOG_DIRECTORY"
nvidia-cuda-mps-control -d
trap 'echo quit | nvidia-cuda-mps-control >/dev/null 2>&1 || true; rm -rf "$state"' EXIT
"$atoll" profile "$model" --grid --device cuda:0 --batches 1,8 --processes 1,2 --slices 1,3,7 \
    --seconds 1 --output "$out/profile.csv"
cat "$out/profile.csv"
echo quit | nvidia-cuda-mps-control
unset CUDA_MPS_PIPE_DIRECTORY CUDA_MPS_LOG_DIRECTORY
cat > "$state/services.toml" <<TOML
[[service]]
name = "$name"
model = "$name"
rate = 400
slo_ms = 50
TOML
plan=("$atoll" plan --services "$state/services.toml" --profiles "$out/profile.csv" --gpu "$kind")
"${plan[@]}" --json > "$out/plan.json"
"${plan[@]}"
apply() { "$atoll" apply "$@" --state "$state/a"; }
apply "$out/plan.json" --model-repository "$state/repository" --partition mps --dry-run
apply "$out/plan.json" --model-repository "$state/repository" --partition mps --json \
    > "$out/apply.json"
cat "$out/apply.json"
python3 - <<PYTHON
import json, urllib.request
ready = urllib.request.urlopen("http://127.0.0.1:9000/v2/models/$name/ready", timeout=10)
print("the first server is ready:", ready.status)
PYTHON
nvidia-smi --query-compute-apps=pid,used_memory --format=csv,noheader || true
apply --undo
daemons=$(pgrep -fc 'nvidia-cuda-mps-(control|server)' || true)
servers=$(pgrep -fc 'atoll serve' || true)
echo "still running: $daemons daemons, $servers servers"
