"""The process that tries: `python -m tests.torture.fuzz_worker FIRST COUNT FILE`. Try number n is the same in every process.
The number of the present try is in FILE, should the process not survive it; what was wrong goes to stdout, as JSON."""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import random
import re
import resource
import sys
import time
import traceback
import warnings
from collections import Counter
from typing import Any

import torch

from dcpkernels.errors import DcpError, DcpInvalidArgument, DcpUnsupported
from tests.torture import fuzz_plain
from tests.torture.fuzz_targets import WORKSPACES, Stage, Target
from tests.torture.fuzz_values import broken_value

# A call that asks for far too much memory is refused it. Beside what is mapped at the start: a sanitizer has terabytes.
ADDRESS_SPACE = 5 << 30
WORKS_EVERY = 200  # tries
MAX_PROBLEMS = 40
TEXT = re.compile(r"[\w.: ]+: .*\(.*\)[^()]*$", re.DOTALL)


class Watched:
    """The bytes of all tensors of a call, and of the workspace."""

    def __init__(self, target: Target, arguments: list[Any]) -> None:
        self.stage = target.stage
        storages: dict[int, torch.Tensor] = {}
        for value in arguments:
            for tensor in value if isinstance(value, (list, tuple)) else [value]:
                memory = bytes_of(tensor)
                if memory is not None:
                    storages[memory.data_ptr()] = memory
        self.memory = list(storages.values()) + (self.stage.memory if self.stage else [])
        self.before = [memory.clone() for memory in self.memory]
        self.state = self.stage.state() if self.stage else None

    def changed(self) -> str:
        for before, memory in zip(self.before, self.memory, strict=True):
            if not torch.equal(before, memory):
                at = int(before.ne(memory).nonzero()[0])
                return f"byte {at} of {len(memory)} has changed"
        if self.stage and self.stage.state() != self.state:
            return f"the state has changed: {self.state} -> {self.stage.state()}"
        return ""


def bytes_of(tensor: Any) -> torch.Tensor | None:
    try:
        if tensor.device.type != "cpu" or tensor.layout is not torch.strided or type(tensor).__name__ == "FakeTensor":
            return None
        storage = tensor.untyped_storage()
        if storage.nbytes() == 0 or storage.nbytes() > 1 << 24 or storage.data_ptr() == 0:
            return None
        return torch.empty(0, dtype=torch.uint8).set_(storage)
    except (AttributeError, RuntimeError, NotImplementedError):
        return None


def tensors_in(values: Any) -> list[torch.Tensor]:
    flat = [x for value in values for x in (value if isinstance(value, (list, tuple)) else [value])]
    return [x for x in flat if bytes_of(x) is not None]


def attempt(number: int, targets: list[Target], counts: Counter[str]) -> str:
    """What was wrong with try `number`, or nothing."""
    dice = random.Random(number)
    target = dice.choice(targets)
    right = target.right(dice)
    arguments = dict(right)
    others = tensors_in(right.values()) + (target.stage.handed_out if target.stage else [])
    names = dice.sample(sorted(right), min(len(right), dice.choice([1, 1, 1, 2, 3])))
    for name in names:
        arguments[name] = broken_value(right[name], others, dice)
    watched = Watched(target, [*right.values(), *arguments.values()])
    what = f"{target.name}, broken: " + ", ".join(f"{name}={shown(arguments[name])}" for name in names)
    wrong = ""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result = target.call(**arguments)
    except (DcpInvalidArgument, DcpUnsupported) as error:
        counts["refused"] += 1
        if not TEXT.match(str(error)):
            wrong = f"the text has another form: {error}"
        wrong = wrong or watched.changed()
    except Exception as error:
        if is_out_of_memory(error):
            counts["out of memory"] += 1
            wrong = watched.changed()
        elif target.lenient:
            counts["refused otherwise"] += 1
            wrong = watched.changed()
            wrong = wrong and f"{wrong}, before {type(error).__name__}: {str(error)[:200]}"
        else:
            where = "".join(traceback.format_exception(error)[-4:])
            wrong = f"{type(error).__name__}: {str(error)[:300]}\n{where}"
    else:
        counts["taken"] += 1
        wrong = check_taken(target, arguments, result, counts) if target.stage else ""
    if target.stage:
        target.stage.settle()
    return f"{number}: {what}: {wrong}" if wrong else ""


def check_taken(target: Target, arguments: dict[str, Any], result: Any, counts: Counter[str]) -> str:
    """What was wrong with a call of an op that was taken."""
    try:
        expected = target.stage.expected(target.name, arguments)
    except DcpInvalidArgument as error:
        if target.lenient:
            return ""  # b"e" is text to the dispatcher
        return f"taken, and the reference refuses it: {error}"
    if expected is None:
        return ""
    counts["taken, and checked"] += 1
    result = (result[0] if isinstance(result, tuple) else result).detach().float()
    if target.lenient:
        result = result[: len(expected)]  # of a custom op, which has room for more
    if result.shape != expected.shape or not torch.allclose(result, expected.float(), rtol=0, atol=0, equal_nan=True):
        return f"the result is wrong: {result.flatten()[:4].tolist()}, not {expected.flatten()[:4].tolist()}"
    return "" if target.lenient else target.stage.overlap(target.name, arguments)


def is_out_of_memory(error: Exception) -> bool:
    """A request that is right and larger than this process may be: results in memory that only strides have, plans of
    billions of requests. Of the ops a DcpError, of plans Python's own."""
    return isinstance(error, MemoryError) or (type(error) is DcpError and "there must be memory" in str(error))


def shown(value: Any) -> str:
    """Never the elements of a tensor: torch itself reads freed memory."""
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(shown, value))}]"
    try:
        if isinstance(value, torch.Tensor):
            return f"{type(value).__name__}({value.dtype}, {list(value.shape)}, {value.layout}, {value.device})"
        return repr(value)[:150]
    except Exception as error:
        return f"{type(value).__name__} ({type(error).__name__})"


def main(first: int, count: int, path: str) -> None:
    faulthandler.enable()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with open("/proc/self/statm") as statm:
        limit = int(statm.read().split()[0]) * resource.getpagesize() + ADDRESS_SPACE
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    torch.set_num_threads(1)
    logging.getLogger("torch").setLevel(logging.CRITICAL)
    stages = [Stage(*workspace) for workspace in WORKSPACES]
    # Half of the tries go to the ops.
    targets = [target for stage in stages for target in stage.targets()]
    plain = fuzz_plain.targets()
    targets += plain * max(1, len(targets) // len(plain))
    counts: Counter[str] = Counter()
    problems, start = [], time.monotonic()
    with open(path, "r+b", buffering=0) as file:
        for number in range(first, first + count):
            os.pwrite(file.fileno(), b"%12d" % number, 0)
            problem = attempt(number, targets, counts)
            if problem:
                problems.append(problem)
            if number % WORKS_EVERY == WORKS_EVERY - 1 or number == first + count - 1 or problem:
                for stage in stages:
                    stage.check_works()
            if len(problems) >= MAX_PROBLEMS:
                break
    seconds = time.monotonic() - start
    print(json.dumps({"counts": counts, "problems": problems, "tries": number + 1 - first, "seconds": seconds}))
    sys.stdout.flush()
    os._exit(0)  # what a fuzzed object does at exit is nobody's concern


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
