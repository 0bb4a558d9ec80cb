"""Tables that `datasets` has converted to Arrow files in its cache; damaged files are converted again.

An Arrow file that was cut between two batches can still be read: it just has fewer rows.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from dsreason.files.cache import find_change, get_cache_dir, record_files, write_record

if TYPE_CHECKING:
    import datasets

log = logging.getLogger(__name__)


def load_intact_table(name: str, load: Callable[[str | None], datasets.Dataset]) -> datasets.Dataset:
    """Return the table that `load` returns; if its Arrow files were damaged since they were written, convert the data again.

    Args:
        name: name of the data for the warning.
        load: calls `datasets.load_dataset` with this `download_mode`.
    """
    import pyarrow

    try:
        table = load(None)
        damage = find_table_damage(table)
    except (OSError, pyarrow.ArrowInvalid) as error:
        if isinstance(error, OSError) and error.errno is not None:  # only pyarrow's own errors have no number
            raise
        damage = str(error)
    if damage is not None:
        log.warning("%s: the cache of `datasets` is damaged (%s), so the data are converted again", name, damage)
        table = load("reuse_cache_if_exists")
        write_table_record(table)
    return table


def find_table_damage(table: datasets.Dataset) -> str | None:
    """Describe the damage of a table's files, or return None. The first time that a table is used, it gets a record."""
    split = (table.info.splits or {}).get(str(table.split))
    if split is not None and split.num_examples != len(table):
        return f"{len(table)} of {split.num_examples} rows"
    if locate_record(table).exists():
        return find_change(list_arrow_files(table), locate_record(table))
    write_table_record(table)
    return None


def write_table_record(table: datasets.Dataset) -> None:
    record = locate_record(table)
    with suppress(OSError):  # without a record, only the number of rows is compared
        record.parent.mkdir(parents=True, exist_ok=True)
        write_record(record, record_files(list_arrow_files(table)))


def list_arrow_files(table: datasets.Dataset) -> dict[str, Path]:
    return {file["filename"]: Path(file["filename"]) for file in table.cache_files}


def locate_record(table: datasets.Dataset) -> Path:
    key = hashlib.sha256("\n".join(list_arrow_files(table)).encode()).hexdigest()[:24]
    return get_cache_dir() / "tables" / f"{key}.json"
