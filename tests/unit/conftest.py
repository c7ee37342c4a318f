"""Hypothesis settings for all unit tests: no deadline, since CI machines pause, and the same examples each time."""

from hypothesis import settings

settings.register_profile("samebits", deadline=None, derandomize=True)
settings.load_profile("samebits")
