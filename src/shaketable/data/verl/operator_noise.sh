#!/usr/bin/env bash
# Every matrix product of sampler and trainer is off by 5 %, forward and backward. Validations are scored twice, without faults
# (val-core/…) and under the plan (shaketable/faulty/val-core/…). vLLM runs eagerly: a CUDA graph would replay its kernels without
# the noise.
export SEED=${SEED:-0}
RUN=${RUN-python -m shaketable run --} NAME=${NAME:-operator-noise} exec bash "$(dirname "$0")/grpo.sh" \
    "+shaketable.plan='${PLAN:-relative_gaussian:0.05@op.matmul}'" +shaketable.plan_in="${PLAN_IN:-both}" \
    +shaketable.validate="${VALIDATE:-both}" +shaketable.seed="$SEED" actor_rollout_ref.rollout.enforce_eager=True "$@"
