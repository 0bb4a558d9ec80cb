"""Parsers that find the answer in a response (an option, a number or a text) and compare it with the reference.

Rewards, validation and evaluation share these parsers. `compat` reproduces the quirks of other projects' parsers, for comparison.
"""
