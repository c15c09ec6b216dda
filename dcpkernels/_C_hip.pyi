"""The same functions as of a CPU. Calls take the stream to enqueue their kernel on; see _C_cpu.pyi."""

from dcpkernels._C_cpu import *
