"""Benchmarks: each measures ours and the reference in one run, and exits 0 only if its goals hold."""
