"""A reduced run that tests share: every part of the real one, fewer samples."""

REDUCED: dict[str, object] = {
    "data.train_batch_size": 8,
    "actor_rollout_ref.rollout.n": 8,
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 32,
}
