#!/usr/bin/env bash
# Runs ONNX's node tests on a GPU, as real time and as best effort, and writes the verdict on each
# to OUT_DIR/onnx_nodes_cuda.txt.
#   scripts/gpu/node_tests.sh OUT_DIR TEST_BINARY NODE_TESTS [DEVICE] [SECONDS]
# TEST_BINARY is the built test `onnx_nodes` of crate cli (`cargo test --release -p cli --test
# onnx_nodes --no-run` prints its path), NODE_TESTS the folder onnx/backend/test/data/node of the
# onnx package (1.22.0), DEVICE the GPU. Commit the list as crates/cli/tests/onnx_nodes_cuda.txt.
# Fails when a test passes on the CPU, or passed before, and does not pass here; or when not all
# tests ran in SECONDS.
#
# Nearly every test has kernels of its own, and compiling them takes most of the time: the tests
# run in one process per core. A test that breaks the GPU's context ends its process, and another
# one goes on behind it.
set -euo pipefail
lists=$(cd "$(dirname "$0")/../../crates/cli/tests" && pwd)
out=$1 binary=$2 tests=$3 device=${4:-cuda:0} seconds=${5:-600}
parts=${ATOLL_PARTS:-$(nproc)}
mkdir -p "$out"
export ATOLL_ONNX_NODE_TESTS=$tests ATOLL_ONNX_DEVICE=$device ATOLL_BLESS=1
export ATOLL_KERNEL_CACHE=${ATOLL_KERNEL_CACHE:-$(mktemp -d)}
until_time=$(($(date +%s) + seconds))

part() {
    local folder=$out/part$1 left
    mkdir -p "$folder"
    : >"$folder/done.txt"
    while left=$((until_time - $(date +%s))) && ((left > 0)); do
        cp "$lists"/onnx_nodes.txt "$folder"
        rm -f "$folder/onnx_nodes_cuda.txt"
        timeout "$left" env ATOLL_ONNX_LISTS="$folder" ATOLL_ONNX_PART="$1/$parts" \
            ATOLL_ONNX_DONE="$folder/done.txt" ${ATOLL_RUN_WITH:-} \
            "$binary" node_tests_on_a_gpu --exact --nocapture >>"$folder/log" 2>&1 || true
        [[ -s $folder/onnx_nodes_cuda.txt ]] || break
        cat "$folder/onnx_nodes_cuda.txt" >>"$folder/done.txt"
    done
}

for ((number = 0; number < parts; number++)); do part "$number" & done
wait
cat "$out"/part*/done.txt | LC_ALL=C sort >"$out/onnx_nodes_cuda.txt"
cat "$out"/part*/log | grep -E '^(failed|error|the device|steps on) |ERROR SUMMARY' |
    sort >"$out/node_tests.log" || true
cut -d' ' -f2 "$out/onnx_nodes_cuda.txt" | sort | uniq -c

before=$lists/onnx_nodes_cuda.txt
[[ -f $before ]] || before=/dev/null
behind=$(LC_ALL=C comm -23 \
    <(cat "$lists/onnx_nodes.txt" "$before" | grep ' passed$' | LC_ALL=C sort -u) \
    <(grep ' passed$' "$out/onnx_nodes_cuda.txt"))
if [[ -n $behind ]]; then
    echo "passed on the CPU, or before, and not on $device:"
    echo "$behind" | head -100
    exit 1
fi
