"""The sender's end of a weight transfer, which notices that the receiver has failed.

The transfer is a strict request and reply. A receiver that raised, or died, neither connects nor replies, and an
untimed send or receive would wait for it for ever.
"""

import os
import time
from typing import Any

import ray
import zmq

# How often a wait looks whether the receiver has ended.
_LOOK_MS = 500
# A receiver returns right after its last reply, which ZeroMQ's thread may still have to hand over.
_LAST_REPLY_MS = 5000
_LIMIT = "VERL_WEIGHT_SYNC_TIMEOUT_S"


class WatchedSocket:
    """A ZeroMQ REQ socket whose sends and receives end with the receiver's own error when the receiver has failed.

    A receiver that is silent and has not failed is waited for, unless `VERL_WEIGHT_SYNC_TIMEOUT_S` limits the silence.

    Args:
        socket: the socket to wrap; everything but `send_pyobj`, `recv` and `close` goes to it.
        receiver: the Ray call that receives on the other side.
    """

    def __init__(self, socket: zmq.Socket, receiver: "ray.ObjectRef"):
        self._socket = socket
        self._receiver = receiver

    def __getattr__(self, name: str) -> Any:
        return getattr(self._socket, name)

    def send_pyobj(self, message: Any) -> None:
        """Sends once a receiver is connected. Raises what `_wait` raises."""
        self._wait(zmq.POLLOUT)
        self._socket.send_pyobj(message)

    def recv(self) -> bytes:
        """The reply. Raises what `_wait` raises."""
        self._wait(zmq.POLLIN)
        return self._socket.recv()

    def close(self) -> None:
        # After a failure nobody reads the last request, and it must not keep the process from ending. After a success
        # every request has been answered and there is nothing to drop.
        self._socket.close(linger=0)

    def _wait(self, event: int) -> None:
        """Returns when the socket is ready for `event`.

        Raises:
            Exception: whatever the receiver raised, the first error of the sync.
            RuntimeError: the receiver returned although a bucket was still to be taken.
            TimeoutError: neither progress nor an error within `VERL_WEIGHT_SYNC_TIMEOUT_S` seconds, if it is set.
        """
        limit = float(os.environ.get(_LIMIT) or "inf")
        deadline = time.monotonic() + limit
        while not self._socket.poll(_LOOK_MS, event):
            done, _ = ray.wait([self._receiver], timeout=0)
            if done:
                ray.get(done[0])
                if self._socket.poll(_LAST_REPLY_MS, event):
                    return
                raise RuntimeError(
                    "weight sync: the rollout engine stopped receiving before the last bucket: does it run the same "
                    "verl as the trainer? Its log shows what it took"
                )
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"weight sync: the rollout engine has not taken a bucket for {limit:g} s and reports no error: "
                    f"is its process alive? Its log has the cause; {_LIMIT} sets the limit"
                )
