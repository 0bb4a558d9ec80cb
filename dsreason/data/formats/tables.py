"""Tables that `datasets` has converted to Arrow files in its cache. If the files are damaged, the data is converted again.

The files must be checked, because an Arrow file that was cut off between two batches can still be read but has fewer rows.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from dsreason.files.cache import find_damage, get_cache_dir, record_files, write_record

if TYPE_CHECKING:
    import datasets

log = logging.getLogger(__name__)


def load_intact_table(name: str, load: Callable[[str | None], datasets.Dataset]) -> datasets.Dataset:
    """Return the table that `load` returns; if its Arrow files have been damaged, convert the data again.

    Args:
        name: name of the data in the warning.
        load: function that calls `datasets.load_dataset` with the given `download_mode`.
    """
    import pyarrow

    try:
        table = load(None)
        damage = find_table_damage(table)
    except (OSError, pyarrow.ArrowInvalid) as error:
        # pyarrow's errors for damaged files have no errno
        if isinstance(error, OSError) and error.errno is not None and ".arrow" not in str(error):
            raise
        damage = str(error)
    if damage is not None:
        log.warning("%s: the cache of `datasets` is damaged (%s); converting the data again", name, damage)
        table = load("reuse_cache_if_exists")
        write_table_record(table)
    return table


def find_table_damage(table: datasets.Dataset) -> str | None:
    """Describe the damage to a table's files; None if they are intact. On first use of the table, record its files instead."""
    split = (table.info.splits or {}).get(str(table.split))
    if split is not None and split.num_examples != len(table):
        return f"{len(table)} of {split.num_examples} rows"
    if locate_record(table).exists():
        return find_damage(locate_record(table))
    write_table_record(table)
    return None


def write_table_record(table: datasets.Dataset) -> None:
    with suppress(OSError):  # without a record, only the number of rows is compared
        write_record(locate_record(table), record_files(list_arrow_files(table)))


def list_arrow_files(table: datasets.Dataset) -> list[str]:
    return [file["filename"] for file in table.cache_files]


def locate_record(table: datasets.Dataset) -> Path:
    """Return the path of the record for this version of the table.

    A version is identified by the modification time of `dataset_info.json`, which `datasets` writes at each conversion.
    """
    files = list_arrow_files(table)
    info = [Path(file).with_name("dataset_info.json") for file in files[:1]]
    version = [str(file.stat().st_mtime_ns) for file in info if file.is_file()]
    key = hashlib.sha256("\n".join([*files, *version]).encode()).hexdigest()[:24]
    return get_cache_dir() / "tables" / f"{key}.json"
