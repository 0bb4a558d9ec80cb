"""Configurations of cosmos-rl as configurations of dsreason: every key mapped, left out with a reason, or refused."""
