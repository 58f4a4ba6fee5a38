"""Speed and memory, measured beside torch's own layers: ``python -m benchmarks``."""
