"""The row formats of other tools: which format a row has, and how it becomes a `Sample`."""
