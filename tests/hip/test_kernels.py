"""The host's list of kernels and what lies in the code objects are two compilations: every kernel that the host names is in
the code object of each architecture, and none lies there that nobody can launch."""

import os
import subprocess
import sys

from tests.hip import built

# All that a workspace may load, whatever its configuration; and what a call launches without loading.
LOAD = """
import ctypes, sys
library = ctypes.CDLL(sys.argv[1])
library.shim_names.restype = ctypes.c_char_p
from dcpkernels import _C_hip as m
for dtype in (0, 1, 2):
    for wire in (0, 2, 3):
        assert m.load_kernels(wire=wire, dtype=dtype, device=0)
words = (ctypes.c_uint64 * 6)()
m.link_check(rank=0, bases=[4096], bases_table=8192, multicast=0, multicast_view=0, offset=0, nonce=1, timeout_ns=1, num_spins=1,
             num_yields=0, result=ctypes.addressof(words), isa="auto", stream=0, device=0)
print(library.shim_names().decode())
"""


def loaded_names(tmp_path):
    library = built.stub_library(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", LOAD, str(library)], capture_output=True, text=True, check=False, env=os.environ
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_every_kernel_is_in_every_code_object(tmp_path):
    built.module_file()
    named = loaded_names(tmp_path)
    assert len(named) == 17
    for arch, paths in built.code_objects().items():
        kernels = set().union(*(built.dynamic_symbols(path) for path in paths))
        kernels = {name for name in kernels if "kernel_entry" in name and not name.endswith(".kd")}
        assert named <= kernels, (arch, sorted(named - kernels)[:3])
        assert kernels == named, (arch, sorted(kernels - named)[:3])
