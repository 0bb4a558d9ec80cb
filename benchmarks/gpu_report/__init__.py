"""A report, in parts, of checks and measurements on a GPU: `python -m benchmarks.gpu_report`. Nothing is downloaded."""
