"""Files wherever they are: addresses, S3, the cache, archives, locks."""
