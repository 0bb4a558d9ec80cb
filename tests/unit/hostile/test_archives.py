"""Archives that try to leave their folder, fill the disk or are damaged."""

from __future__ import annotations

import gzip
import lzma
import random
import sys
import tarfile
from pathlib import Path

import pytest

from dsreason.errors import DataError, StorageError
from dsreason.files import archives
from dsreason.files.archives import extract, unpack, write_embedded
from tests.disks import set_read_only, small_disk
from tests.unit.hostile.guard import guarded, listing, refused
from tests.unit.hostile.inputs import damaged, escape_by_links, header, member, tar_of, zip_of

RANDOM = random.Random(0)
PLAIN = tar_of(member("a.txt", b"a" * 5000), member("b.txt", b"b" * 5000))
PACKED = tar_of(member("a.txt", RANDOM.randbytes(5000)), member("b.txt", RANDOM.randbytes(5000)), mode="w:gz")
ZIP = zip_of(("a.txt", RANDOM.randbytes(900)))


def spoilt(content: bytes, position: int, change: bytes) -> bytes:
    return content[:position] + change + content[position + len(change) :]


def in_both_headers(change: bytes, local: int, central: int) -> bytes:
    """Change a field of the zip's member in both of its headers."""
    return spoilt(spoilt(ZIP, local, change), ZIP.index(b"PK\x01\x02") + central, change)


def pax(content: bytes = b"x", **headers: str) -> bytes:
    """Make a tar with an extended header and a file `a`; `_` stands for `.` in the header's keys."""
    return tar_of(member("a", content, pax_headers={key.replace("_", "."): value for key, value in headers.items()}))


ESCAPES = {
    "tar with ..": (tar_of(member("../outside/new", b"x")), ["'../outside/new'", "outside the destination"]),
    "tar with a folder and ..": (tar_of(member("a/../../outside/new", b"x")), ["outside the destination"]),
    "tar with an absolute path": (tar_of(member("/outside/new", b"x")), ["'/outside/new'", "outside the destination"]),
    "tar with .. in an extended header": (pax(GNU_sparse_name="../outside/new"), ["outside the destination"]),
    "zip with ..": (zip_of(("../outside/new", b"x")), ["'../outside/new'", "outside the destination"]),
    "zip with an absolute path": (zip_of(("/outside/new", b"x")), ["'/outside/new'", "outside the destination"]),
    "link out of the folder": (
        tar_of(member("l", kind=tarfile.SYMTYPE, linkname="../../outside")),
        ["'l'", "symbolic link"],
    ),
    "absolute link": (tar_of(member("l", kind=tarfile.SYMTYPE, linkname="/etc")), ["'l'", "symbolic link"]),
    "link and a file through it": (
        tar_of(member("l", kind=tarfile.SYMTYPE, linkname="../../outside"), member("l/new", b"x")),
        ["'l'", "symbolic link"],
    ),
    "chain of links (CVE-2025-4517)": (escape_by_links(), ["'a'", "symbolic link"]),
    "hard link": (
        tar_of(member("a", b"x"), member("h", kind=tarfile.LNKTYPE, linkname="a")),
        ["'h'", "link"],
    ),
    "hard link out of the folder": (
        tar_of(member("h", kind=tarfile.LNKTYPE, linkname="../outside/flag"), member("h", b"overwritten")),
        ["'h'", "link"],
    ),
    "FIFO": (tar_of(member("f", kind=tarfile.FIFOTYPE)), ["'f'", "special file"]),
    "device": (tar_of(member("zero", kind=tarfile.CHRTYPE, devmajor=1, devminor=5)), ["'zero'", "special file"]),
}
BOMBS = {
    "zip bomb": (zip_of(*((f"{i}", bytes(1 << 27)) for i in range(3))), ["unpacks to more than"]),
    "tar that claims 32 TiB": (header("big", 1 << 45) + bytes(1024), ["unpacks to more than"]),
    "packed tar that claims 32 TiB": (gzip.compress(header("big", 1 << 45) + bytes(1024)), ["unpacks to more than"]),
    "sparse file that claims a PiB": (
        pax(
            b"1\n0\n100\n".ljust(512, b"\0") + b"x" * 100,
            GNU_sparse_major="1",
            GNU_sparse_minor="0",
            GNU_sparse_name="s",
            GNU_sparse_realsize=str(1 << 50),
        ),
        ["unpacks to more than"],
    ),
    "name of 3 GiB": (
        gzip.compress(header("././@LongLink", 3 << 30, tarfile.GNUTYPE_LONGNAME) + bytes(1 << 20)),
        ["damaged header"],
    ),
    "zeros behind the end": (gzip.compress(tar_of(member("a", b"x")) + bytes(1 << 24)), ["unpacks to more than"]),
    "dictionary of 4 GiB": (
        spoilt(lzma.compress(PLAIN, format=lzma.FORMAT_ALONE), 1, b"\xff" * 4),
        ["MemoryError"],
    ),
    "20,000 empty members": (gzip.compress(header("e", 0) * 20_000 + bytes(1024)), ["unpacks to more than"]),
}
DAMAGES = {
    "truncated gzip": (PACKED[:4000], ["'a.txt'", "ended before the end-of-stream marker"]),
    "changed bytes in a gzip": (spoilt(PACKED, 3000, bytes(100)), ["cannot be unpacked"]),
    "tar cut inside a header": (PLAIN[:6000], ["truncated header"]),
    "damaged header in the middle": (spoilt(PLAIN, PLAIN.index(b"b.txt"), b"zzzzz"), ["bad checksum"]),
    "negative size": (pax(size="-10"), ["cannot be unpacked"]),
    "size of 30 digits": (pax(size="9" * 30), ["unpacks to more than"]),
    "time beyond all calendars": (pax(mtime="1e300"), ["'a'", "timestamp out of range"]),
    "sparse map without end": (
        pax(GNU_sparse_major="1", GNU_sparse_minor="0", GNU_sparse_name="s", GNU_sparse_realsize="9"),
        ["cannot be unpacked"],
    ),
    "NUL in a name": (
        pax(path="a\0b"),
        ["'a\\x00b'", "null character" if sys.version_info >= (3, 13) else "null byte"],
    ),
    "name of 300 characters": (tar_of(member("n" * 300, b"x")), ["nnn", "File name too long"]),
    "zip name of 300 characters": (zip_of(("n" * 300, b"x")), ["nnn", "File name too long"]),
    "3000 folders deep": (tar_of(member("d/" * 3000 + "x", b"x")), ["d/d/d", "cannot be unpacked"]),
    "file and folder of one name": (tar_of(member("a", b"x"), member("a/b", b"y")), ["'a/b'", "Not a directory"]),
    "folder and file of one name": (tar_of(member("a/b", b"x"), member("a", b"y")), ["'a'", "Is a directory"]),
    "zip with file and folder of one name": (zip_of(("a", b"x"), ("a/b", b"y")), ["'a/b'", "Not a directory"]),
    "encrypted zip": (in_both_headers(b"\1", 6, 8), ["'a.txt'", "encrypted"]),
    "unknown compression": (in_both_headers(b"\x63", 8, 10), ["'a.txt'", "compression method"]),
    "zip with changed bytes": (spoilt(ZIP, 100, bytes(100)), ["'a.txt'", "Bad CRC"]),
    "zip without its directory": (ZIP[:-30], ["not a zip file"]),
    "zip whose directory lies elsewhere": (spoilt(ZIP, len(ZIP) - 6, b"\0\0\0\x7f"), ["cannot be unpacked"]),
    "something else": (b"MZ" + bytes(3000), ["could not be opened"]),
    "no bytes at all": (b"", ["could not be opened"]),
}
CASES = ESCAPES | BOMBS | DAMAGES


@pytest.mark.parametrize("name", CASES)
def test_rejected_archive_leaves_no_files(here: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    content, words = CASES[name]
    monkeypatch.setattr(archives, "SMALL_BYTES", 4 << 20)  # lowers the number of empty members that is refused
    (here / "clips.tar.gz").write_bytes(content)
    refused(lambda: extract(here / "clips.tar.gz", here / "folder"), DataError, "clips.tar.gz", *words)


@pytest.mark.parametrize(
    ("content", "names"),
    [
        (tar_of(member("A.txt", b"x"), member("a.txt", b"y")), ["A.txt", "a.txt"]),
        (tar_of(member("\x1b]0;x\x07", b"x")), ["\x1b]0;x\x07"]),
        (tar_of(member("..a", b"x"), member("b/..c", b"y")), ["..a", "b/..c"]),
        (zip_of(("..\\a", b"x")), ["..\\a"]),
        (b"", []),
    ],
    ids=["case", "control characters", "dots", "backslash", "empty tar"],
)
def test_unusual_member_names_stay_inside_folder(here: Path, content: bytes, names: list[str]) -> None:
    (here / "a.tar").write_bytes(content or tar_of())
    guarded(lambda: extract(here / "a.tar", here / "folder"))
    assert sorted(listing(here / "folder")) == names


def test_rejected_archive_is_never_cached(here: Path) -> None:
    (here / "a.tar").write_bytes(tar_of(member("a", b"x"), member("../outside/new", b"x")))
    for _ in range(2):
        with pytest.raises(DataError, match="outside the destination"):
            guarded(lambda: unpack(here / "a.tar"))
    assert [name for name in listing(here / "cache") if ".locks" not in name] == []


@pytest.mark.parametrize("seed", range(4))
def test_random_damage_is_an_error_or_harmless(here: Path, seed: int) -> None:
    chance = random.Random(seed)
    originals = [PACKED, PLAIN, ZIP, gzip.compress(PLAIN)]

    def unpack_damaged() -> None:
        for number in range(40):
            (here / "a.bin").write_bytes(damaged(chance.choice(originals), chance))
            try:
                extract(here / "a.bin", here / str(number))
            except DataError as error:
                assert "a.bin" in str(error)
                assert not (here / str(number)).exists()

    guarded(unpack_damaged)


@pytest.mark.parametrize("suffix", ["." + "x" * 5000, ".a\0b", "./../x", ". png"])
def test_embedded_media_accept_any_suffix(here: Path, suffix: str) -> None:
    file = guarded(lambda: write_embedded(b"content", suffix))
    assert file.parent.parent == here / "cache" / "media" and file.suffix == ""
    assert file.read_bytes() == b"content"


def test_embedded_media_must_be_bytes() -> None:
    refused(lambda: write_embedded("text"), DataError, "must be bytes; got str")  # type: ignore[arg-type]


@pytest.mark.parametrize(("trouble", "reason"), [("full", "No space left"), ("read-only", "Read-only file system")])
def test_embedded_media_are_removed_after_disk_error(
    here: Path, monkeypatch: pytest.MonkeyPatch, trouble: str, reason: str
) -> None:
    with small_disk(here / "disk") as disk:
        monkeypatch.setenv("COSMOS_CACHE", str(disk))
        if trouble == "read-only":
            set_read_only(disk)
        with pytest.raises(
            StorageError, match=rf"^{disk}/media/\w\w/\w+.png: cannot be written: .*{reason}.*COSMOS_CACHE"
        ):
            write_embedded(bytes(2_000_000), ".png")
        assert listing(disk) == {}
        assert list(disk.glob("media/*/*")) == []


@pytest.mark.parametrize("trouble", ["full", "read-only"])
def test_unpacking_cleans_up_after_disk_error(here: Path, monkeypatch: pytest.MonkeyPatch, trouble: str) -> None:
    (here / "clips.tar").write_bytes(tar_of(member("1.mp4", bytes(2_000_000))))
    with small_disk(here / "disk") as disk:
        monkeypatch.setenv("COSMOS_CACHE", str(disk))
        if trouble == "read-only":
            set_read_only(disk)
        with pytest.raises(StorageError, match=r"clips.*COSMOS_CACHE"):
            unpack(here / "clips.tar")
        assert not list(disk.rglob("*.mp4"))


def test_folder_is_rejected_as_archive(here: Path) -> None:
    (here / "folder.tar").mkdir()
    refused(lambda: extract(here / "folder.tar", here / "new"), DataError, "folder.tar", "Is a directory")
