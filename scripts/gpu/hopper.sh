#!/usr/bin/env bash
# Builds, checks and times the wgmma kernels, and PyTorch on the same problems.
#   scripts/gpu/hopper.sh OUT_DIR [filter]
# Needs nvcc (13.0 was used) and a GPU of compute capability 9.0.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
out=$1
shift
kernels=${KERNELS:-$here/../../crates/compiler/kernels}
mkdir -p "$out"
compile() {
    nvcc -std=c++17 -O2 -gencode=arch=compute_90a,code=sm_90a -I"$here" -I"$kernels" "$@"
}
number=0
waits=()
for shape in ${SHAPES:-256,128,2,1,4,1 128,192,2,1,5,1 128,128,1,1,6,1 128,128,2,1,3,2 \
    256,64,2,1,5,1 128,64,2,1,8,1 128,64,2,1,4,2}; do
    for window in false true; do
        number=$((number + 1))
        echo "#define CONFIG $shape,$window" > "$out/config$number.h" # nvcc splits -D at commas
        compile -include "$out/config$number.h" -c "$here/hopper_kernel.cu" \
            -o "$out/kernel$number.o" &
        waits+=($!)
    done
done
compile -c "$here/hopper.cu" -o "$out/main.o" &
waits+=($!)
for one in "${waits[@]}"; do wait "$one"; done
nvcc "$out"/kernel*.o "$out/main.o" -o "$out/hopper" -ldl
"$out/hopper" "$@"
if python3 -c 'import torch' 2>/dev/null; then python3 "$here/hopper.py"; fi
