"""What the tests of the modules with other libraries' names share."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from torch.utils._python_dispatch import TorchDispatchMode

from dcpkernels.testing import merge_inputs

BASES = {"base2": "2", "basee": "e"}
# Which bring bytes from one tensor to another.
COPYING = ("copy", "clone", "cat", "contiguous", "to_copy")


def partials(num_ranks, num_tokens, num_heads, head_dim, dtype, *, kind="spread", seed=0):
    """(outs [W, T, H, D], lses [W, T, H]) of all ranks."""
    return merge_inputs(num_ranks, num_tokens, num_heads, head_dim, dtype, kind=kind, seed=seed)


class _Ops(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def copies(function, *arguments, **keywords):
    """Its result, and the ops of torch that it called, on this thread, and that copy."""
    with _Ops() as ops:
        result = function(*arguments, **keywords)
    return result, [name for name in ops.names if any(word in name for word in COPYING)]


def crossed(rank, first, second):
    """The results of two calls, on two ranks that come to them in different orders: each waits for its peer, so it ends
    only where the calls do not wait for each other."""
    if rank == 0:
        with ThreadPoolExecutor(1) as pool:
            begun = pool.submit(first)
            result = second()
            return begun.result(), result
    result = second()
    return first(), result


def containers(module):
    """What of a module's could hold state."""
    kinds = (dict, list, set)
    return [name for name, value in vars(module).items() if isinstance(value, kinds) and not name.startswith("__")]
