"""Sections that a child goes through for tests of the probe; imported by the child."""

import os
import time


def _raise():
    raise LookupError("nothing here")


SECTIONS = {
    "well": lambda: {"answer": {"value": 42}},
    "pid": lambda: {"pid": {"value": os.getpid()}},
    "raises": _raise,
    "dies": lambda: os.kill(os.getpid(), 11),
    "ends": lambda: os._exit(3),
    "hangs": lambda: time.sleep(60),
}
