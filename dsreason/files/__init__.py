"""Local and remote files: storage URLs, S3, the cache, archives and locks."""
