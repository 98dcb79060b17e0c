#!/usr/bin/env bash
# More models than memory on a GPU: cold and warm requests by access pattern, a real-time model
# beside models that are loaded and evicted and beside a large load, and random commands to a
# server. Writes swap.json, big.json, load.json and soak.json to OUT_DIR, within 180 seconds.
#   scripts/gpu/swap.sh OUT_DIR MODELS_DIR
# MODELS_DIR holds resnet50.onnx, mobilenet_v2.onnx and optionally bert_large.onnx (the large load)
# as scripts/gpu/models.py writes them. ATOLL names the binary (default: target/release/atoll),
# ATOLL_DEVICE the device (default: cuda:0).
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd)
out=$1
models=$2
atoll=${ATOLL:-$here/../../target/release/atoll}
device=${ATOLL_DEVICE:-cuda:0}
failed=0
mkdir -p "$out"
run() { # MAX_SECONDS NAME ARGUMENTS...
    local limit=$1 name=$2
    shift 2
    echo "== $name"
    timeout "$limit" "$atoll" --log warn bench swap --device "$device" --models "$models" \
        --json "$out/$name.json" "$@" || failed=1
}
run 45 swap --network resnet50 --count 5,50 --resident 4,20 --concurrency 1,64 --seconds 1 \
    --co-located
if [ -f "$models/bert_large.onnx" ]; then
    run 35 load --network resnet50 --count 2 --resident 2 --access sequential --concurrency 1 \
        --seconds 2 --co-located --large-model "$models/bert_large.onnx"
fi
run 60 big --network resnet50 --large-model --seconds 4
run 60 soak --network resnet50,mobilenet_v2 --resident 1 --soak 2000
[ ! -f "$out/soak.json" ] || cat "$out/soak.json"
exit $failed
