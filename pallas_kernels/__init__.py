"""GPU kernels of jkv: Pallas, lowered through Triton, for NVIDIA and AMD."""
