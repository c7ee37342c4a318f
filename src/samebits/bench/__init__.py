"""Paired measurement: both arms in one run, each in a process of its own, taking turns on the same processors.

`turns` is the taking of turns, `engine` and `trainer` are what the processes do, `pairs` is the command behind
``samebits bench cpu``; what it must show is the judge's (`samebits.judge.speed`). Only the processes import vLLM and
Megatron Core, and they import little else.
"""
