def export_engine(*a, **k): raise NotImplementedError("ENGINE is writing this file; overwrite it")
