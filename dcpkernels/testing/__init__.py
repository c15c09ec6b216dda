"""What a test, a demo or a benchmark of the ops needs, in engines too: ranks, hard inputs, how close to the
truth to be, poisoned memory, timing. Importing it needs torch, not pytest, and starts nothing."""

from dcpkernels.testing.compare import assert_merge_close, error_bound, max_err_over_bound
from dcpkernels.testing.inputs import merge_inputs
from dcpkernels.testing.poison import Guarded, fill_nan, unchanged
from dcpkernels.testing.ranks import RankFailure, run_ranks
from dcpkernels.testing.thread_group import ThreadGroup

__all__ = [
    "Guarded",
    "RankFailure",
    "ThreadGroup",
    "assert_merge_close",
    "error_bound",
    "fill_nan",
    "max_err_over_bound",
    "merge_inputs",
    "run_ranks",
    "unchanged",
]
