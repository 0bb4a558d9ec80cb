"""Commands other than training and evaluation: `plan`, `doctor`, `import` and `data`. Only `cli/` imports this package."""
