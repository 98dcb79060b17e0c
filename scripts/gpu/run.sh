#!/usr/bin/env bash
# Builds the kernel harness, checks and times every kernel apart from the product, and writes
# bench.json.
#   scripts/gpu/run.sh OUT_DIR [bench arguments]
# Needs nvcc (13.0 was used) and a GPU of compute capability 9.0. BIN names a folder with binaries built before; without it they
# are built here.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
out=$1
shift
kernels=${KERNELS:-$here/../../crates/compiler/kernels}
bin=${BIN:-$out/bin}
mkdir -p "$out" "$bin"
for name in check bench; do
    [ -x "$bin/$name" ] || nvcc -std=c++17 -O2 -arch=sm_90 -I"$here" -I"$kernels" "$here/$name.cu" -o "$bin/$name" &
done
wait
nvidia-smi --query-gpu=name,driver_version,clocks.sm,clocks.mem,power.limit --format=csv,noheader | tee "$out/device.txt"
"$bin/check" | tail -1
"$bin/bench" "$out/bench.json" "$@"
