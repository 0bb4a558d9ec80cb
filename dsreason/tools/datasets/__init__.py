"""Preparation of data sets before training: downloading, cutting clips, inspection and validation."""
