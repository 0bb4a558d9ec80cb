"""Conversion of cosmos-rl keys that depend on each other; each file converts one part of the dsreason configuration."""
