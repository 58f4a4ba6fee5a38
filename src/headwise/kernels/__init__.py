"""Who computes: torch's fused kernel for products, tiles for everything else."""
