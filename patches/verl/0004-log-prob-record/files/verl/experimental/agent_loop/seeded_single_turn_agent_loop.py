"""A single-turn agent loop whose every request carries a sampling seed of its own.

With one seed for a whole replica the members of a GRPO group are one sample n times, and the advantage is zero.
Without a seed a request's sample depends on which requests ran beside it.
"""

from typing import Any

from verl.utils.log_prob_record import sampling_seed

from .agent_loop import AgentLoopOutput, register
from .single_turn_agent_loop import SingleTurnAgentLoop


@register("seeded_single_turn_agent")
class SeededSingleTurnAgentLoop(SingleTurnAgentLoop):
    """`SingleTurnAgentLoop` with a seed from (rollout.seed, global step, dataset index, session)."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        seed = sampling_seed(
            self.rollout_config.seed, int(kwargs["global_steps"]), int(kwargs["index"]), int(kwargs["session_id"])
        )
        output = await super().run({**sampling_params, "seed": seed}, **kwargs)
        output.extra_fields["sampling_seed"] = seed
        return output
