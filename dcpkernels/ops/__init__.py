"""One file per op. Use the functions from the package itself: `dcpkernels.a2a_lse_reduce`."""
