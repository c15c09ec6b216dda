"""These tests run the Triton kernels on a CPU, in Triton's interpreter. Triton decides that when it is imported, which other
tests do as well; so ../test_triton.py runs these in a process of their own, and nothing else collects them."""

import os

if os.environ.get("TRITON_INTERPRET") != "1":
    collect_ignore_glob = ["test_*.py"]
