"""How far bf16 rounding can move this model's logprobs, and how far real mistakes move them.

Two correct implementations in bf16 may differ by the sum of their own distances from the exact value. The bound of
an `observe` claim is calibrated here, before any run is judged: twice the largest distance between a bf16 and an
fp32 forward of the same weights over sampled answers. A mistake in temperature, positions or mask must exceed it,
or the bound would say nothing.
"""

import argparse
import json
import pathlib
from dataclasses import asdict, dataclass

import torch
from transformers import Qwen3ForCausalLM

from samebits.recipe import inputs, model, task

ANSWER_TOKENS, SEED = 24, 11


@dataclass(frozen=True)
class Rounding:
    """Largest |Δ logprob| in nats over the sampled tokens: of rounding, and of three planted mistakes."""

    tokens: int
    rounding: float
    max_abs: float
    temperature: float
    position: float
    mask: float


def _sampled(net: Qwen3ForCausalLM, questions: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Left-padded questions with sampled answers: tokens (n, P+A), attention mask of the same shape, positions."""
    tokenizer = model.tokenizer()
    tokenizer.padding_side = "left"
    chats = [[{"role": "user", "content": q}] for q, _ in task.examples(questions, inputs.PROBE_SEED + 1)]
    encoded = tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        tokens = net.generate(
            **encoded, do_sample=True, top_k=0, min_new_tokens=ANSWER_TOKENS, max_new_tokens=ANSWER_TOKENS
        )
    mask = torch.cat([encoded["attention_mask"], torch.ones(questions, ANSWER_TOKENS, dtype=torch.long)], dim=-1)
    return tokens, mask, (mask.cumsum(-1) - 1).clamp(min=0)


def _log_probs(
    net: Qwen3ForCausalLM, tokens: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor, temperature: float = 1.0
) -> torch.Tensor:
    """fp32 logprobs (n, A) of the answer tokens."""
    logits = net(input_ids=tokens, attention_mask=mask, position_ids=positions).logits.float() / temperature
    picked = logits.log_softmax(-1)[:, :-1].gather(-1, tokens[:, 1:, None]).squeeze(-1)
    return picked[:, -ANSWER_TOKENS:]


@torch.no_grad()
def measure(folder: pathlib.Path, questions: int = 256) -> Rounding:
    """Measures a checkpoint folder; the same folder and software give the same figures."""
    exact = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    rounded = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    tokens, mask, positions = _sampled(exact, questions)
    right = _log_probs(exact, tokens, mask, positions)

    def largest(other: torch.Tensor) -> float:
        return float((other - right).abs().max())

    answer = torch.arange(tokens.shape[1]) >= tokens.shape[1] - ANSWER_TOKENS
    blind = mask.clone()
    blind[:, tokens.shape[1] - ANSWER_TOKENS - 1] = 0  # the last token before the answer cannot be seen
    rounding = largest(_log_probs(rounded, tokens, mask, positions))
    return Rounding(
        tokens=right.numel(),
        rounding=rounding,
        max_abs=2 * rounding,
        temperature=largest(_log_probs(exact, tokens, mask, positions, temperature=1.1)),
        position=largest(_log_probs(exact, tokens, mask, positions + answer)),
        mask=largest(_log_probs(exact, tokens, blind, positions)),
    )


def main() -> None:
    """``python -m samebits.probe.rounding MODEL_FOLDER``"""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("model", type=pathlib.Path)
    print(json.dumps(asdict(measure(parser.parse_args().model)), indent=1))


if __name__ == "__main__":
    main()
