#!/usr/bin/env bash
# A dead zone in one layer of sampler and trainer, and AQN guided by it: the model with the fault is diagnosed, and the layer that
# is found gets the noise (TARGET=fault, the default: Model A of the origin's design), all layers get it (TARGET=all: Model B), or
# all but it (TARGET=healthy). The noise is the design's: 5 % of what a layer returns, in sampler and trainer, the same σ in all
# three. Without a located fault the script stops. AQN replaces the noise, e.g. AQN=aqn.yaml with what `shaketable guide` wrote.
#
# The same channels are dead in every process: they are keyed by the seed and the layer, not by the rank.
set -euo pipefail
export PLAN=${PLAN:-dead_zone:0.01,scope=token@layer.15} TARGET=${TARGET:-fault} MODEL=${MODEL:-Qwen/Qwen2.5-1.5B-Instruct}
export NAME=${NAME:-srdd-guided-$TARGET}
if [ -z "${AQN:-}" ]; then
    layers=
    if [ "$TARGET" != all ]; then
        folder=$PWD/runs/diagnosis-$(printf '%s\n' "$MODEL" "$PLAN" | cksum | cut -d' ' -f1)
        mkdir -p "$folder"
        if [ ! -e "$folder/fault.json" ]; then
            found=0
            python -m shaketable locate "$MODEL" --plan "$PLAN" --json "$folder/diagnosis.json" --force || found=$?
            [ "$found" = 1 ] || { echo "srdd_guided.sh: locate ended with $found; 1, a located fault, is needed" >&2; exit 1; }
            mv "$folder/diagnosis.json" "$folder/fault.json"
        fi
        python -m shaketable guide "$folder/fault.json" --target "$TARGET" -o "$folder/$TARGET.yaml" --force
        layers=$(python -c 'import sys, shaketable as st; print(",layers=" + "+".join(map(str, st.AQN.load(sys.argv[1]).layers)))' \
            "$folder/$TARGET.yaml")
    fi
    export AQN="${SCHEDULE:-epoch_aware:0.05-0.01+0.01-0.0005},form=output$layers,where=both"
fi
exec bash "$(dirname "$0")/aqn_epoch_aware.sh" "$@"
