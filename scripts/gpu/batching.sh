#!/usr/bin/env bash
# Batching policies on a GPU: Ebird's networks under a low and a high load, and the highest rate
# within the SLO. Writes batching.json, batching.svg and device.txt to OUT_DIR.
#   scripts/gpu/batching.sh OUT_DIR MODELS_DIR [SECONDS_PER_LOAD]
# The default of 0.3 seconds per load takes less than 100 s. MODELS_DIR holds resnet50, resnet101,
# resnet152, inception_v3, vgg16 and vgg19 as scripts/gpu/models.py writes them; missing networks
# are skipped. ATOLL names the binary (default: target/release/atoll), ATOLL_DEVICE the device
# (default: cuda:0), NETWORKS the networks, LANES how many batches may run at the same time
# (default: 2).
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
out=$1
models=$2
seconds=${3:-0.3}
atoll=${ATOLL:-$here/../../target/release/atoll}
device=${ATOLL_DEVICE:-cuda:0}
mkdir -p "$out"
if command -v nvidia-smi >/dev/null; then
    nvidia-smi --query-gpu=name,driver_version,pcie.link.gen.current --format=csv,noheader |
        tee "$out/device.txt"
fi
found=()
for name in ${NETWORKS:-resnet50 resnet101 resnet152 inception_v3 vgg16 vgg19}; do
    [ ! -f "$models/$name.onnx" ] || found+=("$name")
done
[ ${#found[@]} -gt 0 ] || { echo "no network in $models" >&2; exit 2; }
"$atoll" bench batching --device "$device" --models "$models" \
    --network "$(IFS=,; echo "${found[*]}")" --policy window,elastic,auto --waits 0,1000,2000 \
    --seconds "$seconds" --probes 5 --concurrent-batches "${LANES:-2}" --seed 1 \
    --json "$out/batching.json" --svg "$out/batching.svg"
