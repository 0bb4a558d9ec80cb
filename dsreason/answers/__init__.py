"""Answer parsing: which option, number or text a response gives, and whether it matches the reference.

Rewards, validation and evaluation share these functions; `compat` reproduces the quirks of other parsers for comparisons.
"""
