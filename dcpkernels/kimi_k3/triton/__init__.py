"""What a decode layer of Kimi-K3 needs on a GPU beside the collectives, in Triton: `mla_decode`, `kda_step`. Never run on a
device yet: tests run them in Triton's interpreter, and compile them for five architectures. Needs dcpkernels[triton]."""
