"""Calls to a vLLM engine that end when the engine dies.

vLLM refuses new calls to a dead engine, but a call that was pending when the engine's process died is never answered.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any

# vLLM announces the death of its engine by a flag, and to no one.
_LOOK_S = 1.0


async def unless_engine_dies(engine: Any, call: Coroutine[Any, Any, Any]) -> Any:
    """Awaits `call`, a call to `engine` (an `AsyncLLM`), and returns its result.

    Raises:
        EngineDeadError: vLLM's, when the engine dies before it answers.
    """
    task = asyncio.ensure_future(call)
    try:
        while True:
            # Asked first: an answer that came before the death counts.
            dead = engine.errored
            if (await asyncio.wait([task], timeout=0 if dead else _LOOK_S))[0]:
                return task.result()
            if dead:
                raise engine.dead_error
    finally:
        task.cancel()
