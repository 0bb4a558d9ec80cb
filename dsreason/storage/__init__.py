"""Checkpoints and exports in S3 and on the Hugging Face Hub.

To add another storage, add a file beside `storage_s3.py` and a line in `storage.py`."""
