"""A weight sync that fails ends at once, with the first error: a receiver that raises, stops early, or is killed."""

import os
import pathlib
import re
import signal
import threading
import time
from collections.abc import Iterator

import psutil
import pytest
import ray
import torch
import zmq
from loops import REDUCED, REDUCED_MODEL

from samebits.recipe import launch, process

BUCKET_MB = 1


@pytest.fixture(scope="module")
def one_ray() -> Iterator[None]:
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


@ray.remote
def receive(handle: str, behaviour: str) -> int:
    """verl's receiver in a process of its own; takes buckets until its behaviour says otherwise."""
    os.environ["VERL_PLATFORM"] = "cpu"
    from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightReceiver

    taken = 0

    def load(weights: list[tuple[str, torch.Tensor]], is_last: bool) -> None:
        nonlocal taken
        taken += len(weights)
        if behaviour == "raises" and taken >= 3:
            raise KeyError("layer 7 is not a layer of this model")
        if behaviour == "dies" and taken >= 3:
            os.kill(os.getpid(), signal.SIGKILL)

    if behaviour == "returns":
        socket: zmq.Socket = zmq.Context.instance().socket(zmq.REP)
        socket.connect(handle)
        socket.recv()
        return 0
    BucketedWeightReceiver(handle, torch.device("cpu"), use_shm=True).receive_weights(load)
    return taken


def send(folder: pathlib.Path, behaviour: str) -> int:
    """Sends eight tensors in buckets of two and returns how many arrived, or raises what the sender raises."""
    import asyncio

    from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightSender

    handle = f"ipc://{folder / 'sync.sock'}"
    receiver = receive.remote(handle, behaviour)
    sender = BucketedWeightSender(handle, BUCKET_MB, use_shm=True)
    sender.receiver = receiver
    weights = ((f"w{i}", torch.full((2**18,), float(i), dtype=torch.bfloat16)) for i in range(8))
    asyncio.run(sender.async_send_weights(weights))
    return ray.get(receiver)


def test_a_receiver_that_takes_everything_is_waited_for(one_ray: None, tmp_path: pathlib.Path) -> None:
    assert send(tmp_path, "takes all") == 8


def test_a_receiver_that_raises_is_the_error_that_the_sender_shows(one_ray: None, tmp_path: pathlib.Path) -> None:
    began = time.monotonic()
    with pytest.raises(KeyError, match="layer 7 is not a layer of this model"):
        send(tmp_path, "raises")
    assert time.monotonic() - began < 60


def test_a_receiver_that_dies_is_an_error_not_a_hang(one_ray: None, tmp_path: pathlib.Path) -> None:
    began = time.monotonic()
    with pytest.raises(ray.exceptions.WorkerCrashedError):
        send(tmp_path, "dies")
    assert time.monotonic() - began < 60


def test_a_receiver_that_stops_early_is_named(one_ray: None, tmp_path: pathlib.Path) -> None:
    with pytest.raises(RuntimeError, match="stopped receiving before the last bucket"):
        send(tmp_path, "returns")


def test_a_sender_without_a_receiver_to_watch_is_as_before(tmp_path: pathlib.Path) -> None:
    from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightSender

    sender = BucketedWeightSender(f"ipc://{tmp_path / 's'}", BUCKET_MB, use_shm=True)
    sender._init_socket()
    assert type(sender.socket) is zmq.Socket
    sender.socket.close(linger=0)


def kill_the_engine_at_the_second_sync(run: pathlib.Path, killed_at: list[float]) -> None:
    """Waits until step 1 is on record, then kills vLLM's processes when the next sync's shared segment appears."""
    segments = pathlib.Path("/dev/shm")
    while not (run / "capsules" / "step-0001").exists():
        time.sleep(0.05)
    before = set(segments.glob("verl_weights_*"))
    while not set(segments.glob("verl_weights_*")) - before:
        time.sleep(0.002)
    for one in psutil.process_iter(["name", "cmdline"]):
        title = " ".join(one.info["cmdline"] or [one.info["name"] or ""])
        if re.search(r"VLLM::(EngineCore|Worker)", title):
            one.send_signal(signal.SIGKILL)
            killed_at.append(time.monotonic())


def test_an_engine_killed_during_a_sync_ends_the_run_within_a_minute(tmp_path: pathlib.Path) -> None:
    """The whole trainer: Ray, verl, vLLM, Megatron Core. The exit code is not 0 and the message names an error."""
    run, killed_at = tmp_path / "run", list[float]()
    threading.Thread(target=kill_the_engine_at_the_second_sync, args=(run, killed_at), daemon=True).start()
    with pytest.raises(process.RunFailed) as failure:
        launch.run_rl(0, 2, run, REDUCED, REDUCED_MODEL)
    assert killed_at, "the engine was not killed: the test did not test"
    assert time.monotonic() - killed_at[0] < 60
    assert re.search(r"EngineDeadError|Worker failed|TimeoutError|stopped receiving", str(failure.value))
    print(f"ended {time.monotonic() - killed_at[0]:.1f} s after the kill: {str(failure.value).splitlines()[0][:200]}")
