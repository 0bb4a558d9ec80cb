"""Digests that show whether a file is still as it was written.

They are XXH3 hashes of 128 bits: one core computes 6 GB/s of them, reading included, but only 1.1 GB/s of SHA-256. They reveal
accidents, but not forgery, because anyone who can write a file can also write its digest.
"""

from __future__ import annotations

from pathlib import Path

import xxhash

ALGORITHM = "xxh3_128"
"""Key under which files list digests of this kind."""
CHUNK_BYTES = 1024**2
"""Bytes that are read at a time; few enough that they are still in the processor's cache when they are hashed."""


def compute_digest(file: Path) -> str:
    """Compute the digest of a whole file, as hexadecimal digits."""
    digest, chunk = xxhash.xxh3_128(), memoryview(bytearray(CHUNK_BYTES))
    with file.open("rb", buffering=0) as content:
        while size := content.readinto(chunk):
            digest.update(chunk[:size])
    return digest.hexdigest()


def compute_bytes_digest(content: bytes | memoryview) -> str:
    """Compute the digest of a buffer, as hexadecimal digits; that of a file's content equals the file's."""
    return xxhash.xxh3_128_hexdigest(content)
