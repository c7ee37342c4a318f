"""Sources: pinned upstream releases, fetched by hash, patched by symbol, rebuilt as wheels or exported as commits.

Bottom up: pins (what), fetch (get it), patchset (the patches), patching (the engine), records (proof), wheels and
series (the two outputs). Nothing here imports an upstream.
"""
