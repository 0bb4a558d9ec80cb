"""The run configuration: its schemas, its loading, and the DeepSpeed JSON that it is merged with."""
