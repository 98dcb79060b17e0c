#!/usr/bin/env bash
# Checks and times atoll on a GPU, beside PyTorch in the same run, and writes JSON to OUT_DIR.
#   scripts/gpu.sh OUT_DIR [arguments of scripts/gpu/latency.py]
# Needs a GPU with its driver, NVRTC with its headers, PyTorch, torchvision, transformers and onnx.
# ATOLL names the binary (default: target/release/atoll). scripts/gpu/evidence.py turns OUT_DIR into
# evidence/.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
out=$1
shift
atoll=${ATOLL:-$here/../target/release/atoll}
mkdir -p "$out"
nvidia-smi --query-gpu=name,driver_version --format=csv,noheader | tee "$out/device.txt"
for precision in f32 tf32 f16 bf16; do
    result=$out/conformance_$precision.json
    "$atoll" conformance --device cuda:0 --precision "$precision" --json > "$result" || true
    grep -E '"(passed|failed|skipped)":' "$result" | tr -d '\n'
    echo " $precision"
done
python3 "$here/gpu/latency.py" "$atoll" "$out/latency.json" "$@"
