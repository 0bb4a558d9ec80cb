"""The generated task of the demo and of the adapter `builtin`: clips of moving shapes, with questions."""
