#!/usr/bin/env bash
# 5 % operator noise, and AQN in the sampler: a decay of its own for each epoch. σ is in units of each weight's RMS; the
# origin study had `unit=absolute`.
NAME=${NAME:-aqn-epoch-aware} exec bash "$(dirname "$0")/operator_noise.sh" \
    "+shaketable.aqn='${AQN:-epoch_aware:0.05-0.01+0.01-0.0005}'" "$@"
