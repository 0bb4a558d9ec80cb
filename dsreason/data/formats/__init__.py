"""The row formats of other tools: their detection, and the conversion of rows to `Sample`."""
