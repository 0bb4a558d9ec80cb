"""How long a step takes, by phase: arithmetic, memory and network of a GPU against its rates."""
