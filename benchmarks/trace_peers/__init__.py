"""One program for each analyser that `benchmarks.trace_analysis` compares; each runs in a fresh process."""
