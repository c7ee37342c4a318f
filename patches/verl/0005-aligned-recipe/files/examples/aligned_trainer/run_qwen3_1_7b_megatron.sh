#!/usr/bin/env bash
# GRPO, trainer aligned with its rollout | text | vLLM rollout | Megatron training | NVIDIA Hopper
#   ALIGNED=1 one arithmetic on both sides; ALIGNED=0 the same recipe without it
#   VERIFY=strict ends the run at the first logprob whose bits differ; observe logs how many do
#   DRY_RUN=1 composes the configuration and starts nothing

set -euo pipefail

# ---- user-adjustable ----
MODEL_PATH=${MODEL_PATH:-Qwen/Qwen3-1.7B}
ALIGNED=${ALIGNED:-1}
VERIFY=${VERIFY:-observe}
NNODES=${NNODES:-1}
NGPUS_PER_NODE=${NGPUS_PER_NODE:-1}
TRAIN_FILES=${TRAIN_FILES:-$HOME/data/gsm8k/train.parquet}
VAL_FILES=${VAL_FILES:-$HOME/data/gsm8k/test.parquet}
TRAIN_BATCH_SIZE=${TRAIN_BATCH_SIZE:-64}
MAX_PROMPT_LENGTH=${MAX_PROMPT_LENGTH:-512}
MAX_RESPONSE_LENGTH=${MAX_RESPONSE_LENGTH:-1024}
MICRO_BATCH_SIZE=${MICRO_BATCH_SIZE:-8}
ROLLOUT_N=${ROLLOUT_N:-8}
ROLLOUT_GPU_MEM_UTIL=${ROLLOUT_GPU_MEM_UTIL:-0.35}
ACTOR_LR=${ACTOR_LR:-1e-6}
TOTAL_EPOCHS=${TOTAL_EPOCHS:-1}
SAVE_FREQ=${SAVE_FREQ:-20}
PROJECT_NAME=${PROJECT_NAME:-verl_aligned_gsm8k}
EXPERIMENT_NAME=${EXPERIMENT_NAME:-qwen3_1_7b_aligned${ALIGNED}_vllm_megatron}
DRY_RUN=${DRY_RUN:-0}
# ---- end user-adjustable ----

# The one switch: vLLM's operators and the trainer's layers follow it.
export VLLM_BATCH_INVARIANT=$ALIGNED
# The engine of both arms.
export VERL_ENGINE_VENDOR=aligned
export CUDA_DEVICE_MAX_CONNECTIONS=1

DATA=(
    data.train_files="$TRAIN_FILES"
    data.val_files="$VAL_FILES"
    data.train_batch_size="$TRAIN_BATCH_SIZE"
    data.max_prompt_length="$MAX_PROMPT_LENGTH"
    data.max_response_length="$MAX_RESPONSE_LENGTH"
    data.filter_overlong_prompts=True
    data.truncation=error
    algorithm.adv_estimator=grpo
    algorithm.rollout_correction.bypass_mode=False
)

ACTOR=(
    actor_rollout_ref.model.path="$MODEL_PATH"
    actor_rollout_ref.model.use_remove_padding=False
    actor_rollout_ref.actor.optim.lr="$ACTOR_LR"
    # One version of the weights a step: the rollout's.
    actor_rollout_ref.actor.ppo_mini_batch_size="$TRAIN_BATCH_SIZE"
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu="$MICRO_BATCH_SIZE"
    actor_rollout_ref.actor.megatron.sequence_parallel=False
    actor_rollout_ref.actor.megatron.use_distributed_optimizer=False
    actor_rollout_ref.actor.megatron.use_remove_padding=False
)

ROLLOUT=(
    actor_rollout_ref.rollout.name=vllm
    actor_rollout_ref.rollout.n="$ROLLOUT_N"
    actor_rollout_ref.rollout.temperature=1.0
    actor_rollout_ref.rollout.tensor_model_parallel_size=1
    actor_rollout_ref.rollout.gpu_memory_utilization="$ROLLOUT_GPU_MEM_UTIL"
    actor_rollout_ref.rollout.calculate_log_probs=True
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu="$MICRO_BATCH_SIZE"
    actor_rollout_ref.rollout.agent.default_agent_loop=seeded_single_turn_agent
)

TRAINER=(
    model_engine=megatron
    trainer.v1.trainer_mode=sync_recorded
    +trainer.verify="$VERIFY"
    trainer.logger='["console","wandb"]'
    trainer.project_name="$PROJECT_NAME"
    trainer.experiment_name="$EXPERIMENT_NAME"
    trainer.n_gpus_per_node="$NGPUS_PER_NODE"
    trainer.nnodes="$NNODES"
    trainer.total_epochs="$TOTAL_EPOCHS"
    trainer.save_freq="$SAVE_FREQ"
    trainer.val_before_train=False
    trainer.test_freq=-1
)

COMPOSE=()
[ "$DRY_RUN" = 0 ] || COMPOSE=(--cfg job --resolve)
exec python3 -m verl.trainer.main_ppo "${DATA[@]}" "${ACTOR[@]}" "${ROLLOUT[@]}" "${TRAINER[@]}" "${COMPOSE[@]}" "$@"
