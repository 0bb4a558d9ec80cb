"""Reading answers: which option, number or text a response gives, and whether that is the reference.

Rewards, validation and evaluation read with the same functions; `compat` keeps the quirks of others' for comparisons.
"""
