#!/usr/bin/env bash
# A dead zone in one layer of sampler and trainer, and AQN guided by a diagnosis of the model that has it:
#
#   shaketable locate MODEL --plan 'dead_zone:0.01,scope=token@layer.15' --json diagnosis.json
#   shaketable guide diagnosis.json -o aqn.yaml
#
# AQN names the file. The same channels are dead in every process: they are keyed by the seed and the layer, not by the rank.
PLAN=${PLAN:-dead_zone:0.01,scope=token@layer.15} AQN=${AQN:-aqn.yaml} NAME=${NAME:-srdd-guided} \
    exec bash "$(dirname "$0")/aqn_epoch_aware.sh" "$@"
