"""What a GPU shows of dsreason, in parts: `python -m benchmarks.gpu_report`. Nothing is downloaded."""
