"""GPU kernels of the decode step in Triton. Imports nothing: `mla_decode`, `kda_step` and `compile` need the extra
dcpkernels[triton]. Run in Triton's interpreter and compiled for five GPUs by the tests; never run on a device."""
