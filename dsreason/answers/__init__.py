"""Parsers of answers: they find the option, number or text that a response gives, and compare it with the reference.

Rewards, validation and evaluation share these parsers; `compat` reproduces the quirks of other projects' parsers for comparisons.
"""
