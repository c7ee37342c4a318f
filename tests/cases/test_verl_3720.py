"""verl#3720: what the rollout sampled is turned into text and into tokens again, and these are others.

Token ids in, token ids out: the four letters of "user" and the one token "user" are the same text. The seeded agent
loop must hand on the ids that were sampled, each beside its own logprob.
"""

import asyncio
import os
from typing import Any

from omegaconf import OmegaConf

from samebits.recipe import inputs, model

os.environ["VERL_PLATFORM"] = "cpu"

from verl.experimental.agent_loop.agent_loop import DictConfigWrap
from verl.experimental.agent_loop.seeded_single_turn_agent_loop import SeededSingleTurnAgentLoop
from verl.workers.rollout.replica import TokenOutput

del os.environ["VERL_PLATFORM"]

SAMPLED = [model.VOCABULARY.index(word) for word in ("u", "s", "e", "r", "3", "<|im_end|>")]
LOG_PROBS = [-0.5, -1.5, -2.5, -3.5, -4.5, -5.5]


class Server:
    """Stands in for vLLM's server: says the same tokens whatever is asked, and keeps what was asked."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []

    async def generate(self, **asked: Any) -> TokenOutput:
        self.asked.append(asked)
        return TokenOutput(token_ids=list(SAMPLED), log_probs=list(LOG_PROBS))


async def run(server: Server) -> Any:
    rollout = {"prompt_length": 64, "response_length": 16, "seed": 0}
    config = OmegaConf.create({"actor_rollout_ref": {"rollout": rollout}, "data": {}})
    loop = SeededSingleTurnAgentLoop(
        DictConfigWrap(config), server, model.tokenizer(), None, None, DictConfigWrap(config.data), "qwen3"
    )
    said = {"raw_prompt": inputs._messages("1 2"), "global_steps": 1, "index": 0, "session_id": 0}
    return await loop.run({"temperature": 1.0}, **said)


def test_the_text_of_the_sample_is_other_tokens() -> None:
    """The control: encoding the text again would have lost three tokens."""
    words = model.tokenizer()
    again = words.encode(words.decode(SAMPLED[:-1]), add_special_tokens=False)
    assert len(again) == 2 and again != SAMPLED[:-1]


def test_sampled_ids_are_handed_on_each_beside_its_logprob() -> None:
    server = Server()
    output = asyncio.run(run(server))
    assert output.response_ids[: len(SAMPLED)] == SAMPLED
    assert output.response_logprobs[: len(SAMPLED)] == LOG_PROBS
    # What the model's template adds behind an answer was not sampled, and no token of it is compared or learnt from.
    assert output.response_mask[: len(SAMPLED)] == [1] * len(SAMPLED) and not any(output.response_mask[len(SAMPLED) :])


def test_the_prompt_is_sent_as_ids_and_kept_as_they_were_sent() -> None:
    server = Server()
    output = asyncio.run(run(server))
    (asked,) = server.asked
    assert output.prompt_ids == asked["prompt_ids"]
    want = model.tokenizer().apply_chat_template(inputs._messages("1 2"), add_generation_prompt=True)["input_ids"]
    assert output.prompt_ids == list(want)
