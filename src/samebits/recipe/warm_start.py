"""A warm start: a seeded model, taught the task for a minute by verl's SFT trainer on the recipe's own engine.

Kept under ``build/cache`` by the hash of all that it depends on, and taught before either arm runs, so that both start
from the same weights. A model that guesses earns nothing anywhere, and a group whose rewards are all equal has no
advantage.
"""

import fcntl
import hashlib
import json
import pathlib
import re
import shutil
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass

from transformers import Qwen3Config

from samebits.errors import SamebitsError
from samebits.evidence import provenance
from samebits.recipe import arms, inputs, model, process
from samebits.sources.pins import ROOT

LOCKS = {
    device: ROOT / "manifests" / "locks" / f"{profile}.txt" for device, profile in (("cpu", "cpu"), ("cuda", "gpu"))
}
_SOURCES = ("warm_start.py", "model.py", "task.py", "inputs.py", "config/sft.yaml")
SAY_EVERY = 20  # steps


class WarmStartError(SamebitsError):
    """A warm start that cannot be described so."""


@dataclass(frozen=True)
class WarmStart:
    """Which model: its seed, its size, and for how many steps it was taught.

    head: values of a head. ffn: the width of the MLP, 0 for twice the hidden size. vocabulary: tokens.
    """

    seed: int = 0
    layers: int = 2
    hidden: int = 1024
    steps: int = 80
    head: int = 64
    ffn: int = 0
    vocabulary: int = len(model.VOCABULARY)

    @classmethod
    def described(cls, settings: Mapping[str, str], standard: "WarmStart | None" = None) -> "WarmStart":
        """``standard`` but for ``settings``, field name to number.

        Raises:
            WarmStartError: another name, not a number, or a size that no such model has.
        """
        known = asdict(standard or cls())
        for name, value in settings.items():
            if name not in known or not value.isdecimal():
                raise WarmStartError(
                    f"--warm-start {name}={value}: give one of {', '.join(known)} and a whole number, such as steps=60"
                )
        made = cls(**known | {name: int(value) for name, value in settings.items()})
        if 0 in (made.layers, made.hidden, made.steps) or made.head not in (64, 128) or made.hidden % (2 * made.head):
            raise WarmStartError(
                f"--warm-start: {made}: give layers and steps of 1 or more, head 64 or 128, hidden a multiple of "
                "two heads"
            )
        if made.vocabulary < len(model.VOCABULARY) or made.vocabulary % 64:
            # The engine pads its vocabulary to a multiple of 64, and adds no logit then.
            raise WarmStartError(f"--warm-start: {made}: give a vocabulary of 64 or more, a multiple of 64")
        return made

    def settings(self) -> Qwen3Config:
        """The model's configuration."""
        return model.config(self.layers, self.hidden, self.head, self.ffn, self.vocabulary)

    @property
    def name(self) -> str:
        """What a calibrated bound is kept under: rounding moves a taught model's logprobs by other amounts."""
        other = "".join(
            f"-{field}{value}" for field, value in asdict(self).items() if field in _WIDTHS and value != _WIDTHS[field]
        )
        return f"qwen3-{self.layers}x{self.hidden}{other}-seed{self.seed}-sft{self.steps}"

    def key(self, wheels: Mapping[str, str], environment: Mapping[str, str], device: str = "cpu") -> str:
        """The hash of all that decides the weights: this description, our sources, the packages, the arithmetic."""
        here, lock = pathlib.Path(__file__).parent, LOCKS[device]
        files = {name: here / name for name in _SOURCES} | {lock.name: lock}
        sources = {name: hashlib.sha256(file.read_bytes()).hexdigest() for name, file in files.items()}
        # Both arms start from the same weights: which of them runs is no part of the key, which of them taught is.
        switches = {
            name: environment[name]
            for name in provenance.SWITCHES
            if name in environment and not name.startswith("VLLM_")
        }
        taught = {"arm": teacher(device), "instruction_set": provenance.instruction_set()}
        if device != "cpu":
            taught["device"] = device
        facts = [asdict(self), sources, dict(wheels), switches, taught]
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


# Fields of which a name says nothing where they are the standard's, and their standard.
_WIDTHS = {field: value for field, value in asdict(WarmStart()).items() if field in ("head", "ffn", "vocabulary")}

# The model of a device where nobody describes another. On CUDA the contract has heads of 128.
STANDARD = {"cpu": WarmStart(), "cuda": WarmStart(head=128)}

# Geometries of real models, by name.
MODELS = {"qwen3-1.7b": WarmStart(layers=28, hidden=2048, head=128, ffn=6144, vocabulary=151936)}


def teacher(device: str = "cpu") -> int:
    """The arm that teaches: the one whose arithmetic is fast here.

    Without bf16 instructions torch multiplies bf16 matrices one element after another, a hundred times slower than
    the operators of arm 1 do.
    """
    return 0 if device == "cuda" or "avx512_bf16" in provenance.instruction_set() else 1


def obtain(
    what: WarmStart,
    wheels: Mapping[str, str],
    cache: pathlib.Path,
    environment: Mapping[str, str],
    say: Callable[[str], None] = lambda _: None,
    device: str = "cpu",
) -> pathlib.Path:
    """The folder of the taught model in Hugging Face form; taught first if the cache lacks it.

    Runs that want the same one at the same time wait for the first of them to teach it.

    Raises:
        RunFailed: the SFT trainer failed.
    """
    kept = cache / "warm-start" / what.key(wheels, environment, device)
    kept.parent.mkdir(parents=True, exist_ok=True)
    with _alone(kept.with_name(f"{kept.name}.lock"), say):
        if not kept.is_dir():
            _teach(what, kept, environment, say, device)
    return kept


def _teach(
    what: WarmStart, kept: pathlib.Path, environment: Mapping[str, str], say: Callable[[str], None], device: str
) -> None:
    work = kept.with_name(f".{kept.name}")
    shutil.rmtree(work, ignore_errors=True)
    model.write_model(work / "seed", what.seed, what.settings())
    inputs.write_sft_data(work / "data")
    # Taught alike, whichever arm asks first.
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": _free_port()}
    command = process.python_module(
        "verl.trainer.sft_trainer",
        "sft",
        {
            "recipe.model": work / "seed",
            "recipe.data": work / "data",
            "recipe.out": work / "out",
            "recipe.steps": what.steps,
            "trainer.device": device,
            "hydra.run.dir": work / "hydra",
        },
    )
    log = work / "sft.log"
    watch = _progress(log, what.steps, say)
    process.run(command, {**environment, **rank, arms.SWITCH: str(teacher(device))}, log, watch, "the warm start")
    taught = work / "out" / f"global_step_{what.steps}" / "model" / "huggingface"
    shutil.copy(log, taught / "sft.log")
    # Renamed last: a half-made warm start never stands under its key.
    taught.rename(kept)
    shutil.rmtree(work)


def _progress(log: pathlib.Path, steps: int, say: Callable[[str], None]) -> Callable[[], None]:
    """Says every twentieth step that the trainer's log counts."""
    said = 0

    def watch() -> None:
        nonlocal said
        done = [int(step) for step in re.findall(rb"\bstep:(\d+) - ", log.read_bytes())]
        if done and done[-1] // SAY_EVERY > said // SAY_EVERY:
            said = done[-1]
            say(f"warm start: step {said} of {steps}")

    return watch


@contextmanager
def _alone(lock: pathlib.Path, say: Callable[[str], None]) -> Iterator[None]:
    """Holds a lock that ends with this process; waits for it if another run holds it."""
    with lock.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("warm start: another run teaches it; waiting")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])
