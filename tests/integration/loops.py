"""The reduced loop that tests share: every part of the real one, a smaller batch, a shorter warm start."""

from samebits.recipe.warm_start import WarmStart

REDUCED_MODEL = WarmStart(steps=60)
REDUCED: dict[str, object] = {"data.train_batch_size": 8, "actor_rollout_ref.rollout.n": 8}
