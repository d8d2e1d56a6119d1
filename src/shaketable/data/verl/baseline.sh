#!/usr/bin/env bash
# verl alone: no fault, no noise.
NAME=${NAME:-baseline} exec bash "$(dirname "$0")/grpo.sh" "$@"
