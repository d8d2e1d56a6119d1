#!/usr/bin/env bash
# A dead zone in one layer of sampler and trainer, and AQN guided by it: the model that has the fault is diagnosed, and the layer
# that is found gets the noise (TARGET=fault, the default), or all layers get it (TARGET=all, the arm to compare with), or all but it
# (TARGET=healthy). AQN names the file; where there is none it is made, which stops the script when no fault is found.
#
# The same channels are dead in every process: they are keyed by the seed and the layer, not by the rank.
set -euo pipefail
export PLAN=${PLAN:-dead_zone:0.01,scope=token@layer.15} TARGET=${TARGET:-fault} MODEL=${MODEL:-Qwen/Qwen2.5-1.5B-Instruct}
export NAME=${NAME:-srdd-guided-$TARGET}
export OUT=${OUT:-$PWD/runs/verl-$NAME}
export AQN=${AQN:-$OUT/aqn.yaml}
if [ ! -e "$AQN" ]; then
    mkdir -p "$OUT"
    found=0
    python -m shaketable locate "$MODEL" --plan "$PLAN" --json "$OUT/diagnosis.json" || found=$?
    [ "$found" = 1 ] || { echo "srdd_guided.sh: locate ended with $found; 1, a located fault, is needed" >&2; exit 1; }
    python -m shaketable guide "$OUT/diagnosis.json" --target "$TARGET" -o "$AQN"
fi
exec bash "$(dirname "$0")/aqn_epoch_aware.sh" "$@"
