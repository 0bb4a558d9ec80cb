"""Duration of a step by phase: arithmetic, memory and network of a GPU against its rates."""
