"""In: the results of benchmarks. Out: tables on the terminal, and pictures as SVG files that need nothing else."""
