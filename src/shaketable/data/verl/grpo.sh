#!/usr/bin/env bash
# GRPO on GSM8K with verl on one node, in the sizes of the origin study: 7473 problems in batches of 128 are 58 steps an epoch,
# 116 in two. The other scripts add one thing each. Arguments go to verl as further overrides, and win.
#
#   MODEL   a folder or hub id                        DATA    folder with train.parquet and test.parquet (verl's own format)
#   GPUS    of this node                              BATCH   prompts per step, GROUP answers to each
#   EPOCHS  passes through the data, or STEPS in all  SEED    of the data's order, the sampler and all noise
#   MINI    prompts per update: MINI × GROUP / GPUS answers of each GPU, in micro-batches of MICRO, which must divide that
#   DTYPE   bfloat16, or float32 in sampler and trainer, which noise below 2e-3 needs: bfloat16 rounds it away
#   SAVE_EVERY, TEST_EVERY  steps; the last one is saved and scored too. `shaketable sweep $OUT/global_step_116/actor` loads what is saved
#   OUT     checkpoints, ledgers, validation/STEP.jsonl and metrics-DATE.jsonl, as `shaketable study add` reads them
#   RUN     what the job runs under; scripts with a fault set it to `shaketable run`, which stops a job that would train without it
#
# verl resumes from the newest checkpoint in OUT. By default OUT has a checksum of all settings and the seed in its name, so the
# same command resumes its own run and no other.
set -euo pipefail
MODEL=${MODEL:-Qwen/Qwen2.5-1.5B-Instruct} DATA=${DATA:-$HOME/data/gsm8k} GPUS=${GPUS:-8} SEED=${SEED:-0} DTYPE=${DTYPE:-bfloat16}
BATCH=${BATCH:-128} GROUP=${GROUP:-5} EPOCHS=${EPOCHS:-2} STEPS=${STEPS:-null} PROMPT=${PROMPT:-512} ANSWER=${ANSWER:-1024}
NAME=${NAME:-baseline}
case $DTYPE in
    bfloat16) set -- actor_rollout_ref.rollout.dtype=bfloat16 "$@" ;;
    float32)
        full='{param_dtype:fp32,reduce_dtype:fp32,buffer_dtype:fp32}'
        set -- actor_rollout_ref.rollout.dtype=float32 "++actor_rollout_ref.actor.fsdp_config.mixed_precision=$full" \
            "++actor_rollout_ref.ref.fsdp_config.mixed_precision=$full" "$@" ;;
    *) echo "grpo.sh: DTYPE is bfloat16 or float32, not $DTYPE" >&2; exit 2 ;;
esac
set -- algorithm.adv_estimator=grpo algorithm.use_kl_in_reward=False \
    data.train_files="$DATA/train.parquet" data.val_files="$DATA/test.parquet" data.seed="$SEED" \
    data.train_batch_size="$BATCH" data.max_prompt_length="$PROMPT" data.max_response_length="$ANSWER" \
    actor_rollout_ref.model.path="$MODEL" actor_rollout_ref.model.use_remove_padding=True \
    actor_rollout_ref.model.enable_gradient_checkpointing=True \
    actor_rollout_ref.actor.strategy=fsdp2 actor_rollout_ref.ref.strategy=fsdp2 \
    actor_rollout_ref.actor.optim.lr="${LR:-5e-7}" actor_rollout_ref.actor.ppo_mini_batch_size="${MINI:-32}" \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu="${MICRO:-4}" \
    actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_coef=0.001 \
    actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.n="$GROUP" actor_rollout_ref.rollout.seed="$SEED" \
    actor_rollout_ref.rollout.tensor_model_parallel_size=1 actor_rollout_ref.rollout.gpu_memory_utilization=0.6 \
    actor_rollout_ref.rollout.calculate_log_probs=True \
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu="${MICRO:-4}" \
    actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu="${MICRO:-4}" \
    trainer.n_gpus_per_node="$GPUS" trainer.nnodes=1 trainer.total_epochs="$EPOCHS" trainer.total_training_steps="$STEPS" \
    trainer.val_before_train=True trainer.test_freq="${TEST_EVERY:-20}" trainer.save_freq="${SAVE_EVERY:-58}" \
    trainer.project_name=shaketable trainer.experiment_name="$NAME" 'trainer.logger=["console","file"]' "$@"
OUT=${OUT:-$PWD/runs/verl-$NAME-$(printf '%s\n' "$@" | cksum | cut -d' ' -f1)-seed$SEED}
mkdir -p "$OUT"
export VERL_FILE_LOGGER_PATH=${VERL_FILE_LOGGER_PATH:-$OUT/metrics-$(date +%Y%m%d-%H%M%S).jsonl}

exec ${RUN-} python -m verl.trainer.main_ppo \
    trainer.default_local_dir="$OUT" trainer.validation_data_dir="$OUT/validation" "$@"
