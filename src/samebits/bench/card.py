"""The paired measurement of vLLM engines on one GPU: arms in one run, alive together, taking turns; and what each said.

An arm is a setting of VLLM_BATCH_INVARIANT in one installed vLLM: ours, the release, or our first commit alone. Weights
are drawn on the card from their names, so every arm has the same. Before it is timed, each arm answers a few fixed
requests; the table of pairs says which arms gave the same bits.
"""

import datetime
import itertools
import json
import os
import pathlib
import shlex
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.table import Table

from samebits.errors import SamebitsError
from samebits.evidence import provenance
from samebits.evidence.measurement import ENGINES
from samebits.sources.tree import NOTE

from .engine import FIXED
from .turns import Child, spread, take_turns

RELEASE = "release"
DETERMINISTIC = "TORCHINDUCTOR_DETERMINISTIC"  # of a person's environment, decides on bits: on record with the command
Say = Callable[[str], None]


class CardError(SamebitsError):
    """A measurement that cannot be made so."""


@dataclass(frozen=True)
class Geometry:
    """The sizes of a Qwen3 (config.json of the released models); head_dim is 128, eps 1e-6, theta 1e6."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    vocabulary: int = 151_936
    tied: bool = False

    @property
    def cache_bytes(self) -> int:
        """Of the KV cache, a token, in bf16."""
        return self.layers * self.kv_heads * 128 * 2 * 2


MODELS = {
    "0.6B": Geometry(28, 1024, 3072, 16, 8, tied=True),
    "1.7B": Geometry(28, 2048, 6144, 16, 8, tied=True),
    "8B": Geometry(36, 4096, 12_288, 32, 8),
    "32B": Geometry(64, 5120, 25_600, 64, 8),
}


@dataclass(frozen=True)
class Arm:
    """name: its column. bi: VLLM_BATCH_INVARIANT. tree: the folder that holds its vllm package; None: the installed."""

    name: str
    bi: int
    tree: pathlib.Path | None = None

    @classmethod
    def parse(cls, text: str) -> "Arm":
        """From NAME=BI or NAME=BI@FOLDER. CardError for anything else."""
        name, _, rest = text.partition("=")
        bi, _, tree = rest.partition("@")
        if not name or bi not in ("0", "1"):
            raise CardError(f"--arm {text}: give NAME=0 or NAME=1, with @FOLDER of another vllm package if need be")
        return cls(name, int(bi), pathlib.Path(tree).resolve() if tree else None)


@dataclass(frozen=True)
class Case:
    """requests that enter together, each of `prompt` tokens, each answered with `answer` tokens."""

    prompt: int
    answer: int
    requests: int

    @classmethod
    def parse(cls, text: str) -> "Case":
        """From PROMPT,ANSWER,REQUESTS. CardError for anything else."""
        try:
            case = cls(*map(int, text.split(",")))
        except (TypeError, ValueError):
            raise CardError(f"--case {text}: give PROMPT,ANSWER,REQUESTS") from None
        if min(case.prompt, case.answer, case.requests) < 1:
            raise CardError(f"--case {text}: each is 1 or more")
        return case

    @property
    def name(self) -> str:
        """Also the workload's. One token an answer: the prompts' tokens are counted."""
        return f"{self.prompt},{self.answer},{self.requests}"


def config(geometry: Geometry, longest: int) -> dict[str, Any]:
    """The config.json of a Qwen3 of these sizes."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "attention_bias": False,
        "hidden_act": "silu",
        "hidden_size": geometry.hidden,
        "intermediate_size": geometry.intermediate,
        "num_hidden_layers": geometry.layers,
        "num_attention_heads": geometry.heads,
        "num_key_value_heads": geometry.kv_heads,
        "head_dim": 128,
        "vocab_size": geometry.vocabulary,
        "tie_word_embeddings": geometry.tied,
        "max_position_embeddings": longest,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "eos_token_id": 151_645,
        "dtype": "bfloat16",
    }


def measure(
    model: str,
    arms: Sequence[Arm],
    cases: Sequence[Case],
    rounds: int,
    eager: bool,
    apart: bool,
    say: Say,
    logs: pathlib.Path,
) -> dict[str, Any]:
    """The measurement as a document of schema engines-1. logs: the folder for the processes' logs.

    apart: an engine's weights and cache are on the card only while it has its turn.

    Raises:
        SamebitsError: a model or an arm that is not there, or a process that ended.
    """
    if model not in MODELS:
        raise CardError(f"--model {model}: give one of {', '.join(MODELS)}")
    if len({arm.name for arm in arms}) < len(arms) or not arms or not cases:
        raise CardError("give at least one --case, and each --arm a name of its own")
    trees = {arm.name: _tree(arm) for arm in arms}
    geometry = MODELS[model]
    longest = max(sum(FIXED[-1]), *(case.prompt + case.answer for case in cases)) + 64
    tokens = max(case.requests * (case.prompt + case.answer + 64) for case in cases)
    logs.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        weights = pathlib.Path(folder) / "model"
        weights.mkdir()
        (weights / "config.json").write_text(json.dumps(config(geometry, longest)))
        engine = {
            "model": str(weights),
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "dtype": "bfloat16",
            "max_model_len": longest,
            "max_num_seqs": max(case.requests for case in cases),
            "enable_prefix_caching": False,
            "enforce_eager": eager,
            "seed": 0,
            "enable_sleep_mode": apart,
            "gpu_memory_utilization": 0.05,  # what is asked for at the start; the cache's size is said
            "kv_cache_memory_bytes": int(max(tokens, longest) * geometry.cache_bytes * 1.05) + (1 << 26),
        }
        if os.environ.get(DETERMINISTIC) == "1":
            # vLLM would have Inductor time whether kernels are better combined, which it refuses then.
            engine["compilation_config"] = {"inductor_compile_config": {"combo_kernels": False}}
        job: dict[str, Any] = {"engine": engine, "cases": [vars(case) for case in cases], "said": True}
        children, ready = {}, {}
        for arm in arms:
            say(f"{arm.name} starts")
            log = logs / f"{arm.name}.log"
            job |= {"tree": arm.tree and str(arm.tree), "patched": trees[arm.name]["wheel"] != RELEASE}
            child = Child(f"the engine {arm.name}", "samebits.bench.engine", job, _environment(arm, logs), log)
            children[arm.name] = stack.enter_context(child)
            if apart:
                ready[arm.name] = child.ready()
        for arm in arms:
            if not apart:
                ready[arm.name] = children[arm.name].ready()
            say(f"{arm.name} is ready")
        rates = take_turns(children, [case.name for case in cases], rounds, say)
    said = {name: one.pop("said") for name, one in ready.items()}
    (card,) = {json.dumps(one.pop("card"), sort_keys=True) for one in ready.values()}
    return ENGINES.build(
        command=shlex.join(_command(model, arms, cases, rounds, eager, apart)),
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        card=json.loads(card),
        model={"name": f"Qwen3-{model}", **vars(geometry)},
        eager=eager,
        rounds=rounds,
        arms={
            arm.name: {
                "bi": arm.bi,
                "tree": trees[arm.name],
                "shared": _differ(said[arm.name]["together"], said[arm.name]["alone"]),
                **ready[arm.name],
            }
            for arm in arms
        },
        rows=[
            {
                "case": vars(case),
                "unit": "tokens/s",
                "values": {name: [float(f"{v:.5g}") for v in values] for name, values in rates[case.name].items()},
            }
            for case in cases
        ],
        said=[_compared(a, said[a], b, said[b]) for a, b in itertools.combinations(said, 2)],
    )


def _environment(arm: Arm, logs: pathlib.Path) -> dict[str, str]:
    environment = {
        **os.environ,
        "VLLM_BATCH_INVARIANT": str(arm.bi),
        "VLLM_CACHE_ROOT": str((logs / f"cache-{arm.name}").resolve()),
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # the function that draws the weights is sent to the engine's process
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "PYTHONUNBUFFERED": "1",
    }
    if arm.tree is not None:
        environment["PYTHONPATH"] = f"{arm.tree}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    return environment


def _tree(arm: Arm) -> dict[str, str]:
    """The wheel that an arm's vllm package was unpacked from, by the note beside it; its files must be as noted."""
    note = arm.tree and arm.tree / NOTE
    if not note or not note.is_file():
        return {"wheel": RELEASE}
    return provenance.wheel_of_tree(note)


def _command(
    model: str, arms: Sequence[Arm], cases: Sequence[Case], rounds: int, eager: bool, apart: bool
) -> list[str]:
    chosen = [f"{DETERMINISTIC}={os.environ[DETERMINISTIC]}"] if DETERMINISTIC in os.environ else []
    words = [*chosen, "samebits", "bench", "engine", "--model", model]
    for arm in arms:
        words += ["--arm", f"{arm.name}={arm.bi}" + (f"@{arm.tree.name}" if arm.tree else "")]
    for case in cases:
        words += ["--case", case.name]
    return [*words, "--rounds", str(rounds), *(["--eager"] if eager else []), *(["--apart"] if apart else [])]


def _compared(a: str, of_a: Mapping[str, Any], b: str, of_b: Mapping[str, Any]) -> dict[str, Any]:
    """How many tokens, and bits of logprobs, of the fixed requests differ between two arms, together and alone."""

    together, alone = (_differ(of_a[how], of_b[how]) for how in ("together", "alone"))
    return {"pair": [a, b], **together, "alone": alone}


def _differ(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, int]:
    """How many tokens, and bits of logprobs, differ between two answers to the fixed requests."""
    tokens = sum(x != y for x, y in zip(one["tokens"], other["tokens"], strict=True))
    pairs = list(zip(one["bits"], other["bits"], strict=True))
    return {"tokens": tokens, "logprobs": sum(x != y for x, y in pairs), "of": len(pairs)}


def ratios(row: Mapping[str, Any], arm: str, base: str) -> list[float]:
    """arm ÷ base of each round."""
    return [x / y for x, y in zip(row["values"][arm], row["values"][base], strict=True)]


def tables(document: Mapping[str, Any]) -> list[Table]:
    """Medians with half their range in percent, each arm's ratio to the first; and what differs between arms."""
    names = list(document["arms"])
    speed = Table(title=f"{document['model']['name']} on {document['card']['name']}, tokens/s", box=box.SIMPLE)
    for column in ("prompt", "answer", "requests", *names, *(f"{name} ÷ {names[0]}" for name in names[1:])):
        speed.add_column(column, justify="right", no_wrap=True)
    for row in document["rows"]:
        case = row["case"]
        speed.add_row(
            *(str(case[key]) for key in ("prompt", "answer", "requests")),
            *(spread(row["values"][name], "{:.0f}") for name in names),
            *(spread(ratios(row, name, names[0]), "{:.3f}") for name in names[1:]),
        )
    same = Table(title="the same fixed requests, bit for bit", box=box.SIMPLE)
    for column in ("arms", "requests", "tokens that differ", "logprobs that differ"):
        same.add_column(column)
    for pair in document["said"]:
        for how, found in (("together", pair), ("each alone", pair.get("alone"))):
            if found:
                colour = "red" if found["logprobs"] or found["tokens"] else "green"
                logprobs = f"[{colour}]{found['logprobs']} of {found['of']}[/]"
                same.add_row(" and ".join(pair["pair"]), how, str(found["tokens"]), logprobs)
    return [speed, same] if document["said"] else [speed]
