"""Rewards for world models: functions and services that score clips."""
