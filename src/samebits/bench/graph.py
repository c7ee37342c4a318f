"""What measurements of operators on a GPU share: launches timed in a CUDA graph, elements counted by their bits."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

REPLAYS = 5


def captured[T](call: Callable[[], T]) -> tuple[Any, T]:
    """A CUDA graph of what `call` launches, and what `call` gave: tensors that a replay fills, while the graph lives.

    `call` must have run before: modules are not loaded while a graph is captured.
    """
    import torch

    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), torch.cuda.graph(graph, stream=stream):
        given = call()
    torch.cuda.current_stream().wait_stream(stream)
    return graph, given


def microseconds(launch: Callable[[int], Any], launches: int) -> float:
    """Microseconds of one of `launches` in a graph, back to back: the median of REPLAYS."""
    return middle(in_turn({"": launch}, launches)[""])


def middle(taken: Sequence[float]) -> float:
    """The median, in four digits."""
    return float(f"{statistics.median(taken):.4g}")


def in_turn(ways: Mapping[str, Callable[[int], Any]], launches: int) -> dict[str, list[float]]:
    """Microseconds of one of `launches` in each replay of several ways to do the same, which take turns, REPLAYS times.

    The first turn of each is not counted. A graph takes some microseconds to begin, which count: give many launches."""
    import torch

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    taken: dict[str, list[float]] = {name: [] for name in ways}
    with torch.cuda.stream(stream):
        graphs = {}
        for name, launch in ways.items():
            for i in range(min(launches, 2)):
                launch(i)
            graphs[name] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graphs[name], stream=stream):
                for i in range(launches):
                    launch(i)
        for turn in range(1 + REPLAYS):
            # Each begins once and follows others in turn, so that none always finds what one other left in the cache.
            order = list(graphs.items())
            order = (order[turn % len(order) :] + order[: turn % len(order)])[:: -1 if turn % 2 else 1]
            for name, graph in order:
                begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                begin.record()
                graph.replay()
                end.record()
                end.synchronize()
                taken[name].append(begin.elapsed_time(end) * 1e3 / launches)
    return {name: times[1:] for name, times in taken.items()}


class Counted:
    """How many elements of outputs have other bits than they must have, of how many; a NaN is as good as another.

    What differs is counted on the device: `differ` waits for it.
    """

    def __init__(self) -> None:
        self._differ: Any = 0
        self.of = 0

    def compare(self, out: Any, like: Any) -> None:
        """Two tensors of one shape and one dtype, of 2 or 4 bytes an element; ValueError for others."""
        import torch

        if out.shape != like.shape or out.dtype != like.dtype:
            raise ValueError(f"{out.dtype} {list(out.shape)} cannot be compared with {like.dtype} {list(like.shape)}")
        bits = {2: torch.int16, 4: torch.int32}[out.element_size()]
        same = (out.view(bits) == like.view(bits)) | (out.isnan() & like.isnan())
        self._differ = self._differ + (~same).sum()
        self.of += out.numel()

    @property
    def differ(self) -> int:
        return int(self._differ)
