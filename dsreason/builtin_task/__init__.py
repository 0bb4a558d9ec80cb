"""Generated task for the demo and the adapter `builtin`, with questions about pictures and clips of shapes."""
