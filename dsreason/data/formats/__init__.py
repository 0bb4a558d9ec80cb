"""Detection of other tools' row formats, and conversion of their rows to `Sample`."""
