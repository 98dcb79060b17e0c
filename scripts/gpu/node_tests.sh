#!/usr/bin/env bash
# Runs ONNX's node tests on a GPU and writes the verdict on each to OUT_DIR/onnx_nodes_cuda.txt.
#   scripts/gpu/node_tests.sh OUT_DIR TEST_BINARY NODE_TESTS [DEVICE]
# TEST_BINARY is the built test `onnx_nodes` of crate cli (`cargo test --release -p cli --test
# onnx_nodes --no-run` prints its path), NODE_TESTS the folder onnx/backend/test/data/node of the
# onnx package (1.22.0), DEVICE the GPU. Commit the list as crates/cli/tests/onnx_nodes_cuda.txt.
# Fails when a test passes on the CPU, or passed before, and does not pass here.
set -euo pipefail
lists=$(cd "$(dirname "$0")/../../crates/cli/tests" && pwd)
out=$1
mkdir -p "$out"
cp "$lists"/onnx_nodes*.txt "$out"
ATOLL_BLESS=1 ATOLL_ONNX_LISTS=$out ATOLL_ONNX_NODE_TESTS=$3 ATOLL_ONNX_DEVICE=${4:-cuda:0} \
    "$2" node_tests_on_a_gpu --exact --nocapture | tee "$out/node_tests.log"
