"""Commands beside training: `plan`, `doctor`, `import` and `data`. Nothing but `cli/` imports them."""
