#!/usr/bin/env bash
# Runs the conformance tests and ONNX's node tests on a GPU under compute-sanitizer's memcheck,
# which finds accesses outside of allocated memory and misaligned ones.
#   scripts/gpu/memcheck.sh OUT_DIR TEST_BINARY NODE_TESTS [DEVICE] [SECONDS]
# The arguments are those of node_tests.sh. ATOLL_ONNX_ONLY takes the node tests with that text in
# their names, ATOLL_PRECISIONS some of the precisions. Fails when a case fails, or when memcheck
# finds anything. Both kinds of tests run at the same time. Node tests that did not run in SECONDS
# are counted, not failed: memcheck makes kernels and their loading many times slower.
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd)
out=$1 binary=$2 tests=$3 device=${4:-cuda:0} seconds=${5:-600}
mkdir -p "$out"
sanitizer=$(command -v compute-sanitizer || ls /usr/local/cuda/bin/compute-sanitizer) || {
    echo "compute-sanitizer is not installed"
    exit 2
}
# Errors of the driver's functions are results that the program handles.
memcheck="$sanitizer --tool memcheck --target-processes all --report-api-errors no"
export ATOLL_KERNEL_CACHE=${ATOLL_KERNEL_CACHE:-$(mktemp -d)}

conformance() {
    ATOLL_PRECISIONS=$1 ATOLL_ONNX_DEVICE=$device timeout "$seconds" $memcheck \
        "$binary" a_gpu_conforms_in_every_precision --exact --nocapture \
        >"$out/conformance_$1.log" 2>&1
    echo "$?" >"$out/conformance_$1.status"
}

precisions=${ATOLL_PRECISIONS:-f16 bf16 f32 tf32}
for precision in $precisions; do conformance "$precision" & done
ATOLL_RUN_WITH=$memcheck ATOLL_PARTS=${ATOLL_PARTS:-$(nproc)} \
    "$here/node_tests.sh" "$out/nodes" "$binary" "$tests" "$device" "$seconds" \
    >"$out/nodes.log" 2>&1
wait

status=0
for precision in $precisions; do
    code=$(cat "$out/conformance_$precision.status")
    echo "conformance in $precision: exit status $code"
    [[ $code == 0 ]] || status=1
done
judged=$(wc -l <"$out/nodes/onnx_nodes_cuda.txt")
bad=$(grep -cE ' (failed|error)$' "$out/nodes/onnx_nodes_cuda.txt")
echo "$judged node tests, $bad with wrong outputs or errors"
[[ $bad == 0 ]] || status=1
# A process that the limit of time stopped has no summary; what it found is printed before.
logs=$(cat "$out"/conformance_*.log "$out"/nodes/part*/log)
grep -o 'ERROR SUMMARY.*' <<<"$logs" | sort | uniq -c
kinds='Invalid|Misaligned|Out-of-range|Unknown|Program hit'
findings=$(grep -A3 -E "^========= ($kinds)" <<<"$logs")
if [[ -n $findings ]]; then
    head -80 <<<"$findings"
    status=1
fi
exit $status
