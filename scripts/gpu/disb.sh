#!/usr/bin/env bash
# DISB on a GPU: every policy of the device, on real models in real time. Writes disb.json, disb.svg
# and device.txt to OUT_DIR.
#   scripts/gpu/disb.sh OUT_DIR MODELS_DIR [SECONDS_PER_CELL]
# The default of 4 seconds per cell takes less than four minutes. MODELS_DIR holds resnet152.onnx,
# densenet201.onnx, vgg19.onnx, inception_v3.onnx and distilbert.onnx as scripts/models.py writes
# them. ATOLL names the binary (default: target/release/atoll), ATOLL_DISB_REAL the REAL.json of
# DISB (without it REAL is skipped), ATOLL_DEVICE the device (default: cuda:0).
# scripts/gpu/evidence.py turns OUT_DIR into evidence/disb.json.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
out=$1
models=$2
seconds=${3:-4}
atoll=${ATOLL:-$here/../../target/release/atoll}
device=${ATOLL_DEVICE:-cuda:0}
policies=atoll,free_streams,priority_streams,sequential,reef_n
mkdir -p "$out"
if command -v nvidia-smi >/dev/null; then
    nvidia-smi --query-gpu=name,driver_version --format=csv,noheader | tee "$out/device.txt"
fi
run() { # RATES WORKLOADS
    "$atoll" bench disb --device "$device" --models "$models" --workload "$2" \
        --policy "$policies" --rates "$1" --seconds "$seconds" --seed 1 \
        --json "$out/disb_$1.json" --svg "$out/disb_$1.svg"
}
real=
[ -z "${ATOLL_DISB_REAL:-}" ] || real=,REAL
run scaled "A,B,C,D,E$real"
run literal A,D
python3 - "$out" <<'PYTHON'
import json, sys
from pathlib import Path
out = Path(sys.argv[1])
scaled = json.loads((out / "disb_scaled.json").read_text())
literal = json.loads((out / "disb_literal.json").read_text())
commands = [scaled["command"], literal["command"]]
whole = {**scaled, "command": commands, "cells": scaled["cells"] + literal["cells"]}
(out / "disb.json").write_text(json.dumps(whole, indent=1) + "\n")
PYTHON
