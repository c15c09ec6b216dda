"""The decode step of Kimi-K3 on the collectives of dcpkernels: a reference to read, to check against, to start from.

    from dcpkernels.kimi_k3 import KimiK3Config, MLALayer

docs/kimi_k3.md has the layer on one page. Nothing here is imported by `import dcpkernels`, and `triton/` is imported by
nothing: its kernels need the extra dcpkernels[triton].
"""
