#!/usr/bin/env bash
# Run the tests N times beside two processes that compute, every second time in another order; stop at the first failure.
# Called by `make test-repeat N=10`, which says in PYTEST what to run.
set -euo pipefail
times=${1:?how often}
mkdir -p build

busy() { while :; do :; done; }
busy & one=$!
busy & two=$!
trap 'kill $one $two' EXIT

for ((run = 1; run <= times; run++)); do
    order=()
    ((run % 2)) || order=(--random-order --random-order-seed="$run")
    started=$SECONDS
    if ! bash -c "$PYTEST ${order[*]}" >build/test-repeat.log 2>&1; then
        tail -n 60 build/test-repeat.log
        echo "run $run of $times failed (${order[*]:-in order}); all of it is in build/test-repeat.log" >&2
        exit 1
    fi
    echo "run $run of $times, ${order[*]:-in order}: $(tail -n 1 build/test-repeat.log), $((SECONDS - started)) s in all"
done
