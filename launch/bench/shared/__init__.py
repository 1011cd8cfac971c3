"""What several benchmarks share: timing, ranks, cases, and the methods that take turns."""
