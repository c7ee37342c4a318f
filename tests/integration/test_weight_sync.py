"""A weight sync that fails ends with the first error and leaves nothing: a receiver that raises, stops, is killed."""

import asyncio
import os
import pathlib
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.shared_memory import SharedMemory
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import ray
import torch
import zmq
from loops import REDUCED

BUCKET_MB = 1
SEGMENTS = pathlib.Path("/dev/shm")
ENDS_WITHIN_S = 60


@pytest.fixture(autouse=True)
def cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VERL_PLATFORM", "cpu")
    monkeypatch.delenv("VERL_WEIGHT_SYNC_TIMEOUT_S", raising=False)


# --- the whole trainer; first, because it starts a Ray of its own -----------------------------------------------------


def holds(process: psutil.Process, file: pathlib.Path) -> bool:
    """Whether the process has the file open."""
    try:
        return any(os.readlink(fd) == str(file) for fd in pathlib.Path(f"/proc/{process.pid}/fd").iterdir())
    except OSError:  # the process, or one of its files, has gone meanwhile
        return False


def is_engine(process: psutil.Process) -> bool:
    """Whether the process is vLLM's engine core or one of its workers, by the title that vLLM gives it."""
    try:
        return "VLLM::" in " ".join(process.cmdline())
    except psutil.Error:
        return False


def kill_the_engine_at_the_second_sync(cli: "subprocess.Popen[bytes]", run: pathlib.Path) -> pathlib.Path:
    """Waits for step 1, then kills vLLM's processes when this run opens a segment. Returns the segment.

    A sync lasts a tenth of a second. So the processes are listed long before it, and the engine is stopped as soon as
    any segment is seen: whose it is can then be looked up in peace.
    """

    def wait_for(capsule: str) -> None:
        while not (run / "capsules" / capsule).exists():
            assert cli.poll() is None, f"the run ended before its {capsule}: see {run.parent}"
            time.sleep(0.002)

    wait_for("sync-0000")
    ours = psutil.Process(cli.pid).children(recursive=True)
    engine = [one for one in ours if is_engine(one)]
    assert engine, "no process has vLLM's title"
    wait_for("step-0001")
    foreign: set[pathlib.Path] = set()
    while True:
        for segment in set(SEGMENTS.glob("verl_weights_*")) - foreign:
            for one in engine:
                one.suspend()
            if any(holds(one, segment) for one in ours):
                for one in engine:
                    one.kill()
                assert segment.exists(), "the sync was over: the test did not test"
                return segment
            foreign.add(segment)
            for one in engine:
                one.resume()
        assert cli.poll() is None, f"the run ended without a second sync: see {run.parent}"
        time.sleep(0.002)


def test_an_engine_killed_during_a_sync_ends_the_command_within_a_minute(tmp_path: pathlib.Path) -> None:
    """Ray, verl, vLLM, Megatron Core: the exit code is not 0, and the first error is the engine's, not a time limit."""
    run, said = tmp_path / "run", tmp_path / "said"
    settings = [f"--set={key}={value}" for key, value in REDUCED.items()]
    samebits = pathlib.Path(sys.executable).with_name("samebits")
    command = [str(samebits), "run", "rl", "--arm", "1", "--steps", "2", "--out", str(run), *settings]
    with said.open("wb") as file:
        cli = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
        try:
            segment = kill_the_engine_at_the_second_sync(cli, run)
            killed = time.monotonic()
            code = cli.wait(timeout=ENDS_WITHIN_S)
            seconds = time.monotonic() - killed
        finally:
            if cli.poll() is None:
                for one in [*psutil.Process(cli.pid).children(recursive=True), cli]:
                    one.kill()
    message = said.read_text()
    print(f"ended {seconds:.1f} s after the kill with code {code}: {message[-400:]}")
    assert code == 1, message
    assert re.search(r"First error: .*(EngineDeadError|Worker failed|RayActorError|ActorDiedError)", message)
    assert "has not taken a bucket" not in (run / "trainer.log").read_text(errors="replace")
    assert not segment.exists()


# --- a sender and a receiver without a model --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def one_ray() -> Iterator[None]:
    environment = {"env_vars": {"VERL_PLATFORM": "cpu"}}
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, runtime_env=environment)
    yield
    ray.shutdown()


@pytest.fixture
def segments(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The names of the segments that the test's senders make; none may be left."""
    from verl.workers.rollout.vllm_rollout import bucketed_weight_transfer as transfer

    names: list[str] = []
    create = transfer.create_shared_memory

    def named(size: int, name: str) -> SharedMemory:
        names.append(name)
        segment: SharedMemory = create(size, name)
        return segment

    monkeypatch.setattr(transfer, "create_shared_memory", named)
    yield names
    assert names and not [name for name in names if (SEGMENTS / name).exists()]


@ray.remote(max_retries=0)  # as a method of verl's server: the call that failed is not made again
def receive(handle: str, behaviour: str) -> int:
    """verl's receiver in a process of its own; takes buckets until its behaviour says otherwise."""
    from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightReceiver

    taken = 0

    def load(weights: list[tuple[str, torch.Tensor]], is_last: bool) -> None:
        nonlocal taken
        taken += len(weights)
        if behaviour == "raises" and taken >= 3:
            raise KeyError("layer 7 is not a layer of this model")
        if behaviour == "dies" and taken >= 3:
            os.kill(os.getpid(), signal.SIGKILL)

    if behaviour == "raises at once":
        raise KeyError("there is no such method")
    if behaviour == "hangs":
        time.sleep(3600)
    if behaviour == "returns":
        socket: zmq.Socket = zmq.Context.instance().socket(zmq.REP)
        socket.connect(handle)
        socket.recv()
        return 0
    BucketedWeightReceiver(handle, torch.device("cpu"), use_shm=True).receive_weights(load)
    return taken


def send(folder: pathlib.Path, behaviour: str = "", receiver: Any = None) -> int:
    """Sends eight tensors in buckets of two and returns how many arrived, or raises what the sender raises."""
    from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightSender

    handle = f"ipc://{folder / 'sync.sock'}"
    sender = BucketedWeightSender(handle, BUCKET_MB, use_shm=True)
    sender.receiver = receiver or receive.remote(handle, behaviour)
    weights = ((f"w{i}", torch.full((2**18,), float(i), dtype=torch.bfloat16)) for i in range(8))
    try:
        asyncio.run(sender.async_send_weights(weights))
        taken: int = ray.get(sender.receiver)
    except BaseException:
        if receiver is None:
            ray.cancel(sender.receiver, force=True)
        raise
    return taken


Send = Callable[..., int]


@pytest.fixture
def timed_send(one_ray: None, segments: list[str], tmp_path: pathlib.Path) -> Iterator[Send]:
    began = time.monotonic()
    yield lambda *args: send(tmp_path, *args)
    assert time.monotonic() - began < ENDS_WITHIN_S


def test_a_receiver_that_takes_everything_is_waited_for(timed_send: Send) -> None:
    assert timed_send("takes all") == 8


def test_a_receiver_that_raises_is_the_error_that_the_sender_shows(timed_send: Send) -> None:
    with pytest.raises(KeyError, match="layer 7 is not a layer of this model"):
        timed_send("raises")


def test_a_receiver_that_dies_is_an_error_not_a_hang(timed_send: Send) -> None:
    with pytest.raises(ray.exceptions.WorkerCrashedError):
        timed_send("dies")


def test_a_receiver_that_fails_before_it_connects_is_an_error_not_a_hang(timed_send: Send) -> None:
    with pytest.raises(KeyError, match="there is no such method"):
        timed_send("raises at once")


def test_a_receiver_that_is_dead_already_is_an_error_not_a_hang(timed_send: Send) -> None:
    class Engine:
        def receive(self) -> int:
            return 0

    engine = ray.remote(Engine).remote()
    ray.get(engine.receive.remote())
    ray.kill(engine)
    with pytest.raises(ray.exceptions.RayActorError):
        timed_send("", engine.receive.remote())


def test_a_receiver_that_stops_early_is_named(timed_send: Send) -> None:
    with pytest.raises(RuntimeError, match="stopped receiving before the last bucket"):
        timed_send("returns")


def test_a_silent_receiver_is_given_up_where_a_limit_is_set(timed_send: Send, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VERL_WEIGHT_SYNC_TIMEOUT_S", "2")
    with pytest.raises(TimeoutError, match="has not taken a bucket for 2 s"):
        timed_send("hangs")


def test_without_a_limit_a_silent_receiver_is_waited_for(one_ray: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from verl.workers.rollout.vllm_rollout import watched_socket

    class Silent:
        """A socket that becomes ready after a thousand looks; each look takes a minute of a made-up clock."""

        looks = 0

        def poll(self, timeout: int, event: int) -> int:
            self.looks += 1
            return event if self.looks > 1000 else 0

        def recv(self) -> bytes:
            return b"taken"

    socket = Silent()
    monkeypatch.setattr(watched_socket, "time", SimpleNamespace(monotonic=lambda: 60.0 * socket.looks))
    pending = receive.remote("", "hangs")
    try:
        assert watched_socket.WatchedSocket(socket, pending).recv() == b"taken"
    finally:
        ray.cancel(pending, force=True)


def test_the_last_reply_of_a_receiver_that_has_returned_is_waited_for(one_ray: None, tmp_path: pathlib.Path) -> None:
    from verl.workers.rollout.vllm_rollout.watched_socket import WatchedSocket

    context, handle = zmq.Context(), f"ipc://{tmp_path / 's'}"
    asking, answering = context.socket(zmq.REQ), context.socket(zmq.REP)

    def answer_late() -> None:
        answering.recv()
        time.sleep(1.5)
        answering.send(b"taken")

    asking.bind(handle)
    answering.connect(handle)
    thread = threading.Thread(target=answer_late)
    thread.start()
    socket = WatchedSocket(asking, ray.put("returned"))
    socket.send_pyobj("the last bucket")
    assert socket.recv() == b"taken"
    thread.join()
    context.destroy(linger=0)


def test_a_sender_without_a_receiver_to_watch_is_as_before(tmp_path: pathlib.Path) -> None:
    from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightSender

    sender = BucketedWeightSender(f"ipc://{tmp_path / 's'}", BUCKET_MB, use_shm=True)
    sender._init_socket()
    assert type(sender.socket) is zmq.Socket
    sender.socket.close(linger=0)


# --- the cleanup ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("end", "own_error"), [("Sender", FileNotFoundError), ("Receiver", BufferError)])
def test_the_cleanup_hides_its_own_error_only_behind_another(end: str, own_error: type[Exception]) -> None:
    from verl.workers.rollout.vllm_rollout import bucketed_weight_transfer as transfer

    def broken() -> tuple[Any, SharedMemory, torch.Tensor | None]:
        """One end whose segment cannot be cleaned up, the segment, and what reads it."""
        segment = SharedMemory(create=True, size=64)
        assert segment.buf is not None
        one: Any
        if end == "Sender":
            one = transfer.BucketedWeightSender("inproc://none", BUCKET_MB, use_shm=True)
            reader = None
            segment.unlink()
        else:
            one = transfer.BucketedWeightReceiver("inproc://none", torch.device("cpu"), use_shm=True)
            reader = torch.frombuffer(segment.buf[:64], dtype=torch.uint8)
        one.shm = segment
        return one, segment, reader

    one, segment, reader = broken()
    with pytest.raises(own_error):
        one._cleanup()
    del reader  # the segment can be closed now
    free(segment)

    one, segment, reader = broken()
    with pytest.raises(KeyError, match="the first error"):
        try:
            raise KeyError("the first error")
        finally:
            one._cleanup()
    assert one.shm is None
    del reader  # the segment can be closed now
    free(segment)


def free(segment: SharedMemory) -> None:
    segment.close()
    if (SEGMENTS / segment.name).exists():
        segment.unlink()


# --- a call to an engine ----------------------------------------------------------------------------------------------


def test_a_call_to_an_engine_ends_with_the_answer_or_with_the_engine() -> None:
    from verl.workers.rollout.vllm_rollout.engine_death import unless_engine_dies
    from vllm.v1.engine.exceptions import EngineDeadError

    engine = SimpleNamespace(errored=False, dead_error=EngineDeadError())

    async def answer(value: object, after: float = 0.0, then_dead: bool = False) -> object:
        await asyncio.sleep(after)
        engine.errored = then_dead
        if isinstance(value, Exception):
            raise value
        return value

    async def never() -> None:
        asyncio.get_running_loop().call_later(0.1, setattr, engine, "errored", True)
        await asyncio.get_running_loop().create_future()

    def call(coroutine: Any) -> object:
        engine.errored = False
        return asyncio.run(asyncio.wait_for(unless_engine_dies(engine, coroutine), ENDS_WITHIN_S))

    assert call(answer("weights taken")) == "weights taken"
    assert call(answer("slow", after=2.5)) == "slow"
    assert call(answer("just in time", then_dead=True)) == "just in time"
    with pytest.raises(KeyError, match="layer 7"):
        call(answer(KeyError("layer 7")))
    with pytest.raises(EngineDeadError):
        call(never())


def test_the_server_calls_its_engine_with_what_it_was_given() -> None:
    from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer

    asked: list[tuple[Any, ...]] = []

    class Engine:
        errored = False

        async def collective_rpc(
            self, method: str, timeout: float | None = None, args: tuple[Any, ...] = (), kwargs: Any = None
        ) -> None:
            asked.append((method, timeout, args, kwargs))

    server = SimpleNamespace(engine=Engine())
    asyncio.run(vLLMHttpServer.collective_rpc(server, "load", 3.0, (1,), {"use_shm": True}))
    assert asked == [("load", 3.0, (1,), {"use_shm": True})]
