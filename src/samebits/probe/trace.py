"""What every operator of an engine's forward put out, as one hash for each token's row.

Hooks say in which module the forward is, a dispatch mode sees each operator that runs there. A row is kept under its
request and position, so that two runs can be compared whatever the batch, the chunks or the cache were. Eager engines
only: a compiled graph runs no hooks.
"""

from __future__ import annotations

import hashlib
import pathlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

SCHEMA = "samebits.trace/1"
OUTPUT = "output"  # the pseudo-operator of a module's own result
# They put out memory that nobody has written yet.
_UNWRITTEN = ("aten.empty", "aten.new_empty", "aten.empty_like", "aten.empty_strided", "aten.new_empty_strided")

_ADDRESS = 1 << 40  # an integer from here on is no count and no index

Key = tuple[str, str, int]  # module, operator, which call of it within one call of the module
Plant = Callable[[Key, list[torch.Tensor]], None]


class ReplayError(Exception):
    """An operator whose inputs cannot be kept: why not."""


def name_of(func: Any) -> str:
    """An operator's name as torch.ops spells it, such as aten.add.Tensor."""
    return str(func)


class Tracer(TorchDispatchMode):
    """A trace of one engine in this process.

    plant: called with each operator's key and outputs, to change one of them. capture: the key, request and position
    at which to keep the operator's inputs and outputs, in `captured`.
    """

    def __init__(self, llm: Any, plant: Plant | None = None, capture: tuple[Key, str, int] | None = None) -> None:
        super().__init__()
        self.plant, self.capture = plant, capture
        self.captured: tuple[Any, Any, Any, Any] | None = None
        self.keys: dict[Key, int] = {}
        self.rows: dict[str, dict[int, dict[int, str]]] = {}
        core: Any = llm.llm_engine.engine_core
        self._scheduler = core.engine_core.scheduler
        self._runner = core.engine_core.model_executor.driver_worker.worker.model_runner
        self._states = llm.llm_engine.output_processor.request_states
        self._stack: list[tuple[str, Counter[str]]] = []
        self._tokens: list[tuple[str, int]] = []
        self._last: list[tuple[str, int]] = []
        self._scheduled: dict[str, int] = {}
        self._handles: list[Any] = []
        self._impls: list[tuple[Any, Any]] = []
        self._foreign: set[int] = set()

    # --- where the forward is

    def _install(self) -> None:
        model, sampler = self._runner.model, self._runner.sampler
        self._foreign = {p.untyped_storage().data_ptr() for p in [*model.parameters(), *model.buffers()]}
        self._foreign |= {c.untyped_storage().data_ptr() for c in self._runner.kv_caches if torch.is_tensor(c)}
        named = [(name, module) for name, module in model.named_modules() if name]
        named += [(f"sampler.{name}".rstrip("."), module) for name, module in sampler.named_modules()]
        for name, module in [("", model), *named]:
            self._handles.append(module.register_forward_pre_hook(self._enter(name), with_kwargs=True, prepend=True))
            self._handles.append(module.register_forward_hook(self._leave, with_kwargs=True))
            # Attention runs inside of one opaque operator, which no mode sees into: the mode is entered anew in there.
            impl = getattr(module, "impl", None)
            if impl is not None and callable(getattr(impl, "forward", None)):
                self._impls.append((impl, impl.forward))
                impl.forward = self._within(impl.forward)

    def _remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        for impl, _ in self._impls:
            del impl.forward  # the instance's; its class's stays
        self._handles, self._impls = [], []

    def _within(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            with self:
                return forward(*args, **kwargs)

        return run

    def _enter(self, name: str) -> Callable[..., None]:
        def hook(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
            if not name:
                positions = kwargs["positions"] if "positions" in kwargs else args[1]
                self._locate(positions)
            here = name
            if self._stack and (parent := self._stack[-1][0]) and not name.startswith(f"{parent}."):
                here = f"{parent}.{name.rpartition('.')[2]}"  # one module for all layers, as RoPE is
            self._stack.append((here, Counter()))

        return hook

    def _leave(self, module: Any, args: Any, kwargs: Any, result: Any) -> None:
        name, _ = self._stack[-1]
        outputs = [t for t in _flat(result) if t is not None]
        self._keep((name, OUTPUT, 0), outputs)
        self._stack.pop()

    def _locate(self, positions: torch.Tensor) -> None:
        """The request and position of each row of this step."""
        sizes = self._scheduled
        order = [name for name in self._runner.input_batch.req_ids if name in sizes]
        at = positions.tolist()
        names = [name for name in order for _ in range(sizes[name])]
        # The engine adds random characters to a request's id; the output processor knows what it was.
        states = self._states
        self._tokens = [(states[name].external_req_id, position) for name, position in zip(names, at, strict=False)]
        ends, row = [], 0
        for name in order:
            row += sizes[name]
            ends.append(self._tokens[row - 1])
        self._last = ends

    # --- what its operators put out

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self._stack or not self._tokens:
            return func(*args, **kwargs)
        module, calls = self._stack[-1]
        name = name_of(func)
        # Random numbers are drawn for the whole batch, then for each seeded request anew: only the latter count.
        random = torch.Tag.nondeterministic_seeded in func.tags
        if random or name.startswith((*_UNWRITTEN, "prim.")):
            return func(*args, **kwargs)
        key = (module, name, calls[name])
        calls[name] += 1
        before = self._inputs_to_capture(key, args, kwargs)
        result = func(*args, **kwargs)
        outputs = list(_flat(result))
        if func._schema.is_mutable:
            outputs += list(_flat(_written(func, args, kwargs)))
        else:
            given = {t.untyped_storage().data_ptr() for t in _flat([args, kwargs])}
            outputs = [t for t in outputs if t.untyped_storage().data_ptr() not in given]  # a view computes nothing
        outputs = self._ours(outputs)
        if outputs:
            if self.plant is not None:
                self.plant(key, outputs)
            self._keep(key, outputs)
            if before is not None:
                self.captured = (name, *before, [t.detach().clone() for t in outputs])
        return result

    def _ours(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Those that hold a row a token, and are neither a weight nor the KV cache."""
        return [
            t for t in tensors if self._rows_of(t) is not None and t.untyped_storage().data_ptr() not in self._foreign
        ]

    def _rows_of(self, tensor: torch.Tensor) -> list[tuple[str, int]] | None:
        """The request and position of each row: of every token in the model, of the sampled ones behind it."""
        if not tensor.ndim or not tensor.numel():
            return None
        behind = self._stack[0][0] != ""
        for rows in (self._last,) if behind else (self._tokens,):
            if tensor.shape[0] == len(rows):
                return rows
        return None

    def _keep(self, key: Key, outputs: list[torch.Tensor]) -> None:
        outputs = self._ours(outputs)
        if not outputs or not self._tokens:
            return
        index = self.keys.setdefault(key, len(self.keys))
        rows = self._rows_of(outputs[0]) or []
        raw = [_bytes(t) for t in outputs if self._rows_of(t) is rows]
        for i, (request, position) in enumerate(rows):
            digest = hashlib.blake2b(digest_size=8)
            for one in raw:
                digest.update(one[i].data)
            self.rows.setdefault(request, {}).setdefault(position, {})[index] = digest.hexdigest()

    def _inputs_to_capture(self, key: Key, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        if self.capture is None or self.captured is not None or key != self.capture[0]:
            return None
        behind = self._stack[0][0] != ""
        if tuple(self.capture[1:]) not in (self._last if behind else self._tokens):
            return None
        return _copy(args), _copy(kwargs)

    # --- a run

    @contextmanager
    def tracing(self) -> Iterator[Tracer]:
        """Trace all that the engine does meanwhile."""
        schedule = self._scheduler.schedule

        def watched(*args: Any, **kwargs: Any) -> Any:
            made = schedule(*args, **kwargs)
            self._scheduled = dict(made.num_scheduled_tokens)
            self._tokens = []
            return made

        self._scheduler.schedule = watched
        self._install()
        try:
            with self:
                yield self
        finally:
            self._remove()
            self._scheduler.schedule = schedule

    def document(self) -> dict[str, Any]:
        """The trace as JSON: its operators in their order, the rows by request and position, the weights' hashes."""
        rows = {
            request: {str(position): {str(k): value for k, value in row.items()} for position, row in at.items()}
            for request, at in self.rows.items()
        }
        return {
            "schema": SCHEMA,
            "operators": [list(key) for key in self.keys],
            "rows": rows,
            "weights": weights_of(self._runner.model),
        }


def weights_of(model: torch.nn.Module) -> dict[str, str]:
    """The sha256 of every parameter that is resident under its name; one that packing took away is not."""
    return {
        name: hashlib.sha256(_bytes(parameter.detach().reshape(1, -1)).tobytes()).hexdigest()
        for name, parameter in model.named_parameters()
        if parameter.numel()
    }


def _bytes(tensor: torch.Tensor) -> Any:
    """The bytes of a tensor's rows: uint8 [rows, bytes]."""
    flat = tensor.detach().reshape(tensor.shape[0], -1).contiguous()
    return flat.view(torch.uint8).cpu().numpy()


def _flat(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in nested arguments or results."""
    if torch.is_tensor(value):
        yield value
    elif isinstance(value, Mapping):
        for one in value.values():
            yield from _flat(one)
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _flat(one)


def _written(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """The arguments that an operator writes to."""
    found = []
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found.append(kwargs.get(argument.name) if i >= len(args) else args[i])
    return found


def _copy(value: Any) -> Any:
    if torch.is_tensor(value):
        return value.detach().clone()
    if isinstance(value, Mapping):
        return {key: _copy(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_copy(one) for one in value]
    return value


def save_replay(folder: pathlib.Path, captured: tuple[Any, Any, Any, Any], key: Key) -> None:
    """Write an operator's inputs and outputs as a folder that `samebits check replay` runs again.

    Raises:
        ReplayError: an argument that means nothing in another process.
    """
    import json

    from safetensors.torch import save_file

    operator, args, kwargs, outputs = captured
    tensors: dict[str, torch.Tensor] = {}

    def plain(value: Any) -> Any:
        # A packed weight is passed as the address of what a library made of it.
        if torch.is_tensor(value) and value.dtype == torch.int64 and value.numel() and int(value.max()) >= _ADDRESS:
            raise ReplayError(f"{operator} takes a packed weight by its address, which another process does not have")
        if torch.is_tensor(value):
            name = f"input-{len(tensors)}"
            tensors[name] = value.contiguous().cpu()
            return {"tensor": name}
        if isinstance(value, Mapping):
            return {"map": {k: plain(one) for k, one in value.items()}}
        if isinstance(value, (list, tuple)):
            return {"list": [plain(one) for one in value]}
        if isinstance(value, torch.dtype):
            return {"dtype": str(value).removeprefix("torch.")}
        if isinstance(value, torch.device):
            return {"device": value.type}
        if value is None or isinstance(value, (bool, int, float, str)):
            return {"value": value}
        raise ReplayError(f"{operator} takes a {type(value).__name__}, which cannot be kept")

    document = {
        "schema": "samebits.replay/1",
        "module": key[0],
        "operator": operator,
        "args": plain(args),
        "kwargs": plain(kwargs),
        "outputs": len(outputs),
    }
    tensors |= {f"output-{i}": t.contiguous().cpu() for i, t in enumerate(outputs)}
    folder.mkdir(parents=True)
    save_file(tensors, folder / "tensors.safetensors")
    (folder / "replay.json").write_text(json.dumps(document, indent=1) + "\n")
    sums = [
        f"{hashlib.sha256((folder / name).read_bytes()).hexdigest()}  {name}\n"
        for name in ("replay.json", "tensors.safetensors")
    ]
    (folder / "SHA256SUMS").write_text("".join(sums))
