"""Modules that tests/distributed.py imports in the process that its ranks are forked from."""

from dsreason.imports import make_imports_fast

with make_imports_fast():
    import dsreason.train.sft.loop  # noqa: F401
