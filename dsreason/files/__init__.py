"""Local and remote files: addresses, S3, the cache, archives, locks."""
