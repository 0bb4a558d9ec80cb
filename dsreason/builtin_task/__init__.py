"""The generated task of the demo and of the adapter `builtin`: questions about pictures and clips of shapes."""
