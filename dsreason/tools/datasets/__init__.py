"""Preparation of data sets before training: fetching, cutting clips, inspecting, and the built-in task."""
