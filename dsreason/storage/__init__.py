"""Uploads of checkpoints, exports and logs to S3 and the Hugging Face Hub.

To support another kind of storage, add a module like `storage_s3.py` and open it in `storage.py`."""
