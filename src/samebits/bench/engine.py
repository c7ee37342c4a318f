"""One vLLM engine that is timed: ``python -m samebits.bench.engine JOB``, JOB {"engine": arguments of LLM}.

The arm is its environment's ``VLLM_BATCH_INVARIANT``. A decode counts the tokens that it generated from a prompt of
PROMPT tokens, a prefill those of its prompt.
"""

from typing import Any

from .turns import Workload, serve

PROMPT, ANSWER, PREFILL = 8, 32, 512
WORKLOADS = ("decode, 1 request", "decode, 16 requests", "prefill, 512 tokens")


def _make(job: dict[str, Any]) -> tuple[dict[str, Workload], dict[str, Any]]:
    import vllm

    engine = vllm.LLM(**job["engine"])

    def generate(requests: int, prompt: int, answer: int) -> int:
        greedy = vllm.SamplingParams(
            temperature=0.0, max_tokens=answer, min_tokens=answer, ignore_eos=True, detokenize=False
        )
        prompts = [{"prompt_token_ids": [(7 * n + 3 * i) % 61 + 3 for i in range(prompt)]} for n in range(requests)]
        outputs = engine.generate(prompts, greedy, use_tqdm=False)
        tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
        assert tokens == requests * answer, f"{tokens} tokens came, {requests * answer} were asked for"
        return tokens

    def prefill() -> int:
        generate(1, PREFILL, 1)
        return PREFILL

    work = (lambda: generate(1, PROMPT, ANSWER), lambda: generate(16, PROMPT, ANSWER), prefill)
    return dict(zip(WORKLOADS, work, strict=True)), {"vllm": vllm.__version__}


if __name__ == "__main__":
    serve(_make)
