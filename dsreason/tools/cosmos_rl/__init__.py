"""Conversion of cosmos-rl configurations to dsreason: every key is mapped, left out with a reason, or refused."""
