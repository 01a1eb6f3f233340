"""What people and agents run: the `bestiary` command, the demo and the benchmarks."""
