"""The sender's end of a weight transfer, which notices that the receiver has failed.

The transfer is a strict request and reply. A receiver that raised, or died, never replies, and an untimed receive
would wait for it for ever.
"""

import os
import time
from typing import Any

import ray
import zmq

# Seconds without a reply to one bucket. Loading a bucket takes a fraction of a second on any device.
_SILENCE_S = float(os.environ.get("VERL_WEIGHT_SYNC_TIMEOUT_S", "45"))
_POLL_MS = 500


class WatchedSocket:
    """A ZeroMQ REQ socket whose `recv` ends with the receiver's own error when the receiver has failed.

    Args:
        socket: the socket to wrap; everything but `recv` goes to it.
        receiver: the Ray call that receives on the other side.
    """

    def __init__(self, socket: zmq.Socket, receiver: "ray.ObjectRef"):
        self._socket = socket
        self._receiver = receiver
        # A request that nobody will read must not keep the process from ending.
        socket.setsockopt(zmq.LINGER, 0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._socket, name)

    def recv(self) -> bytes:
        """The reply.

        Raises:
            Exception: whatever the receiver raised, the first error of the sync.
            RuntimeError: the receiver returned although a bucket was still to be read.
            TimeoutError: neither a reply nor an error within `VERL_WEIGHT_SYNC_TIMEOUT_S` seconds.
        """
        deadline = time.monotonic() + _SILENCE_S
        while not self._socket.poll(_POLL_MS):
            done, _ = ray.wait([self._receiver], timeout=0)
            if done and not self._socket.poll(0):
                ray.get(done[0])
                raise RuntimeError("weight sync: the rollout engine stopped receiving before the last bucket")
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"weight sync: the rollout engine has not taken a bucket for {_SILENCE_S:.0f} s and reports no error: "
                    "is its process alive? Its log has the cause; VERL_WEIGHT_SYNC_TIMEOUT_S sets the limit"
                )
        return self._socket.recv()
