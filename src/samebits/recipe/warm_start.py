"""A warm start: a seeded model, taught the task for a minute by verl's SFT trainer on the recipe's own engine.

Kept under ``build/cache`` by the hash of all that it depends on. A model that guesses earns nothing anywhere, and
a group whose rewards are all equal has no advantage.
"""

import hashlib
import json
import pathlib
import shutil
import socket
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass

from samebits.recipe import inputs, model, process

_SOURCES = ("model.py", "task.py", "inputs.py", "config/sft.yaml")


@dataclass(frozen=True)
class WarmStart:
    """Which model: its seed, its size, and for how many steps it was taught."""

    seed: int = 0
    layers: int = 2
    hidden: int = 1024
    steps: int = 60

    def key(self, wheels: Mapping[str, str]) -> str:
        """The hash of everything that decides the weights: this description, our sources, the wheels."""
        here = pathlib.Path(__file__).parent
        sources = {name: hashlib.sha256((here / name).read_bytes()).hexdigest() for name in _SOURCES}
        facts = json.dumps([asdict(self), sources, dict(wheels)], sort_keys=True)
        return hashlib.sha256(facts.encode()).hexdigest()[:16]


def obtain(
    what: WarmStart,
    wheels: Mapping[str, str],
    cache: pathlib.Path,
    environment: Mapping[str, str],
    watch: Callable[[], None] = lambda: None,
) -> pathlib.Path:
    """The folder of the taught model in Hugging Face form; taught first if the cache lacks it.

    Raises:
        RunFailed: the SFT trainer failed.
    """
    kept = cache / "warm-start" / what.key(wheels)
    if kept.is_dir():
        return kept
    work = kept.with_name(f".{kept.name}")
    shutil.rmtree(work, ignore_errors=True)
    model.write_model(work / "seed", what.seed, what.layers, what.hidden)
    inputs.write_sft_data(work / "data")
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": _free_port()}
    command = process.python_module(
        "verl.trainer.sft_trainer",
        "sft",
        {
            "recipe.model": work / "seed",
            "recipe.data": work / "data",
            "recipe.out": work / "out",
            "recipe.steps": what.steps,
            "hydra.run.dir": work / "hydra",
        },
    )
    process.run(command, {**environment, **rank}, work / "sft.log", watch, "the warm start")
    taught = work / "out" / f"global_step_{what.steps}" / "model" / "huggingface"
    shutil.copy(work / "sft.log", taught / "sft.log")
    # Renamed last: a half-made warm start never stands under its key.
    taught.rename(kept)
    shutil.rmtree(work)
    return kept


def _free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])
