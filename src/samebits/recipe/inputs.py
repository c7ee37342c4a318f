"""What a run reads: parquet files of the task, and prompts for the probes. Everything comes from seeds."""

import json
import pathlib

import pandas as pd

from samebits.recipe import model, task

SFT_EXAMPLES, SFT_SEED = 4096, 1
RL_SEED, PROBE_SEED, PROBES = 2, 3, 4


def _messages(question: str, answer: str | None = None) -> list[dict[str, str]]:
    turns = [{"role": "user", "content": question}]
    return [*turns, {"role": "assistant", "content": answer}] if answer else turns


def write_sft_data(folder: pathlib.Path) -> None:
    """``sft.parquet``: conversations of one question and its answer."""
    folder.mkdir(parents=True, exist_ok=True)
    pairs = task.examples(SFT_EXAMPLES, SFT_SEED)
    pd.DataFrame({"messages": [_messages(q, a) for q, a in pairs]}).to_parquet(folder / "sft.parquet")


def write_rl_data(folder: pathlib.Path, prompts: int) -> None:
    """``train.parquet`` with ``prompts`` questions, ``val.parquet`` with the first of them, and ``probes.json``."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [
        {
            "data_source": "running_sums",
            "prompt": _messages(question),
            "reward_model": {"style": "rule", "ground_truth": answer},
            "extra_info": {"index": index},
        }
        for index, (question, answer) in enumerate(task.examples(prompts, RL_SEED))
    ]
    pd.DataFrame(rows).to_parquet(folder / "train.parquet")
    pd.DataFrame(rows[:1]).to_parquet(folder / "val.parquet")
    tokenizer = model.tokenizer()
    probes = [
        tokenizer.apply_chat_template(_messages(question), add_generation_prompt=True)["input_ids"]
        for question, _ in task.examples(PROBES, PROBE_SEED)
    ]
    (folder / "probes.json").write_text(json.dumps([list(ids) for ids in probes]) + "\n")
