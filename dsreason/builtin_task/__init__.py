"""The generated task for the demo and the adapter `builtin`: questions about pictures and clips of shapes."""
