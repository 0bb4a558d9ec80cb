"""What tests/distributed.py imports in the process that its ranks are forked from."""

from dsreason.imports import quick_imports

with quick_imports():
    import dsreason.train.sft.loop  # noqa: F401
