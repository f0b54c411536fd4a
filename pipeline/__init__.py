"""Move and compute: RoPE and codec kernels, static graphs, NPU runtimes."""
