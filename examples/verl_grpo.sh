#!/usr/bin/env bash
# GRPO with verl 0.9.1, rollouts by longtail: unfinished responses are cut at each weight update and go on after it.
#
#     pip install torch==2.13.0 verl==0.9.1 TransferQueue pyzmq msgspec cachetools fastapi uvicorn
#     pip install --no-deps longtail && pip install numba safetensors     # verl excludes longtail's transformers; see docs
#     examples/verl_grpo.sh MODEL TRAIN.parquet VAL.parquet [any of verl's settings]
#
# The files are verl's: rows with prompt (chat messages), data_source, reward_model (ground_truth). verl's trainer needs
# GPUs. longtail's native engine runs on the CPU cores of the node of each replica: `threads` says how many each takes.
# What was run of this: the same settings with a tiny model and verl's trainer on a CPU (tests/verl). Nothing on a GPU.
set -eu
model=$1 train=$2 val=$3
shift 3

export VERL_USE_EXTERNAL_MODULES=${VERL_USE_EXTERNAL_MODULES:-longtail.trainer_adapter.plugins.verl}

# The ones that matter here:
#   trainer_mode=colocate_async  aborts and resumes; with `sync` each response is waited for
#   rollout_is=token             importance weights from the recorded log-probabilities: tokens of older weights need them
#   max_off_policy_threshold     steps from feeding a prompt to training on it; beyond, drop its group or wait for it
#   kv_on_update=recompute       tokens after an update stand on KV of the new weights; keep is cheaper, and drifts
exec python -m verl.trainer.main_ppo \
    data.train_files="$train" data.val_files="$val" data.train_batch_size=64 \
    data.max_prompt_length=1024 data.max_response_length=4096 \
    actor_rollout_ref.model.path="$model" \
    actor_rollout_ref.actor.strategy=fsdp2 actor_rollout_ref.actor.ppo_mini_batch_size=64 \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 actor_rollout_ref.actor.use_kl_loss=False \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.rollout.name=longtail actor_rollout_ref.rollout.n=8 \
    actor_rollout_ref.rollout.tensor_model_parallel_size=1 actor_rollout_ref.rollout.max_num_seqs=64 \
    actor_rollout_ref.rollout.max_num_batched_tokens=512 \
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4 \
    +actor_rollout_ref.rollout.engine_kwargs.longtail.threads=8 \
    +actor_rollout_ref.rollout.engine_kwargs.longtail.kv_on_update=recompute \
    +actor_rollout_ref.rollout.engine_kwargs.longtail.drafter=group \
    algorithm.adv_estimator=grpo algorithm.rollout_correction.rollout_is=token \
    trainer.v1.trainer_mode=colocate_async trainer.v1.colocate_async.num_warmup_batches=1 \
    trainer.v1.sampler.max_off_policy_threshold=4 trainer.v1.sampler.max_off_policy_strategy=wait \
    trainer.n_gpus_per_node=8 trainer.nnodes=1 trainer.total_training_steps=100 trainer.logger='[console]' \
    "$@"
