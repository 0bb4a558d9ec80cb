"""Post-training of reasoning vision-language models with DeepSpeed ZeRO-3 and vLLM."""

__version__ = "0.1.0"
