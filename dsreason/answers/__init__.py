"""Parsers that find the option, number or text with which a response answers, and compare it with the reference.

Rewards, validation and evaluation share these parsers; `compat` reproduces the quirks of other projects' parsers for comparisons.
"""
