"""Kernels of attention: torch's fused one for head outputs, tiles for everything else."""
