"""Report of what dsreason does on a GPU, in parts: `python -m benchmarks.gpu_report`. Nothing is downloaded."""
