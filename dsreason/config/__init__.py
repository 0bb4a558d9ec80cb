"""The run configuration: schemas, loading, and the DeepSpeed JSON that belongs to it."""
