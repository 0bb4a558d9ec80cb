"""Reading numbers, times and shapes in what models write. Any text can be read: what is not understood is None."""
