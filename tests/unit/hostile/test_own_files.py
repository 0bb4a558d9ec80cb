"""Local data sets whose README or index files name tables outside their folder."""

from __future__ import annotations

import bz2
import gzip
import importlib.util
import json
import lzma
from pathlib import Path
from typing import Any

import datasets
import httpx
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from huggingface_hub.errors import RemoteEntryNotFoundError
from PIL import Image

from dsreason.config.schema_data import DataConfig
from dsreason.data import rows
from dsreason.data.formats import data_files
from dsreason.data.sources import open_datasets
from dsreason.errors import DataError
from dsreason.files import archives, own_files
from dsreason.world.data import open_world_data
from dsreason.world.data.prompts import read_prompts
from dsreason.world.schema import WorldDataConfig
from tests.unit.hostile.guard import guarded, refused

ROW = {"id": "7", "image": "a.png", "question": "What colour?", "answer": "red"}


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give `datasets` a temporary cache folder."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("datasets"))


@pytest.fixture
def folder(here: Path) -> Path:
    """A data set with one row, beside another person's table."""
    folder = here / "rows"
    folder.mkdir()
    Image.new("RGB", (28, 28)).save(folder / "a.png")
    (folder / "train.jsonl").write_text(json.dumps(ROW))
    (here / "secret.jsonl").write_text(json.dumps(ROW | {"id": "secret"}))
    return folder


def ids(folder: Path, **keys: Any) -> list[str]:
    data = DataConfig(adapter="jsonl", path=str(folder), validation=0, media_path=str(folder), **keys)
    return [sample.id for sample in open_datasets(data)[0]]


def name_files(folder: Path, files: Any, key: str = "data_files") -> None:
    """Write a README whose second, unused configuration names the files, because `datasets` resolves all configurations."""
    configs = [
        {"config_name": "default", "data_files": "train.jsonl"},
        {"config_name": "more", "data_files": "train.jsonl", key: files},
    ]
    (folder / "README.md").write_text(f"---\nlicense: mit\nconfigs: {json.dumps(configs)}\n---\n# Rows\n")


KINDS = ("Image", "Video", "Audio", "Pdf", "Nifti", "Mesh")


def known(kinds: list[str]) -> list[str]:
    """Return the kinds that the installed version of `datasets` knows."""
    return [kind for kind in kinds if importlib.util.find_spec(f"datasets.packaged_modules.{kind}")]


ADDRESSES = (
    "http://127.0.0.1:9/rows.jsonl",
    "https://example.com/rows.jsonl",
    "s3://bucket/rows.jsonl",
    "hf://datasets/somebody/data/rows.jsonl",
    "file:///etc/passwd",
    "local:///etc/passwd",
    "data:text/plain,{}",
    "zip://rows.jsonl::rows.zip",
    "train.jsonl::http",
)
OUTSIDE = ("/etc/passwd", "../secret.jsonl", "train/../../secret.jsonl", "../*.jsonl", "//etc/passwd")


@pytest.mark.parametrize("given", [*ADDRESSES, *OUTSIDE])
def test_readme_cannot_name_files_outside_folder(folder: Path, given: str) -> None:
    name_files(folder, given)
    message = f"{given} is a URL" if given in ADDRESSES else f"{given} is outside {folder}"
    refused(lambda: ids(folder), DataError, f"{folder}/README.md: configs[1].data_files: {message}")


@pytest.mark.parametrize(
    "files",
    [
        ["train.jsonl", "../secret.jsonl"],
        [{"split": "train", "path": "../secret.jsonl"}],
        [{"split": "train", "path": "train.jsonl"}, {"split": "test", "path": ["train.jsonl", "../secret.jsonl"]}],
    ],
)
def test_each_file_of_split_is_checked(folder: Path, files: Any) -> None:
    name_files(folder, files)
    refused(lambda: ids(folder), DataError, f"configs[1].data_files: ../secret.jsonl is outside {folder}")


@pytest.fixture
def on_the_hub(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Serve the folder as the data set `somebody/data` on the Hub."""

    def download(repository: str, name: str, *, repo_type: str, revision: str | None) -> str:
        assert (repository, repo_type, revision) == ("somebody/data", "dataset", "v2")
        if not (folder / name).is_file():
            raise RemoteEntryNotFoundError(name, response=httpx.Response(404, request=httpx.Request("HEAD", name)))
        return str(folder / name)

    monkeypatch.setattr(own_files, "hf_hub_download", download)


@pytest.mark.usefixtures("on_the_hub")
@pytest.mark.parametrize("given", [*OUTSIDE, "file:///etc/passwd", "local:///etc/passwd", "zip://rows.jsonl::rows.zip"])
def test_hub_data_set_cannot_name_local_files(folder: Path, given: str) -> None:
    name_files(folder, given)
    message = f"somebody/data: README.md: configs[1].data_files: {given} is a file on this machine"
    refused(lambda: own_files.check_hub_configs("somebody/data", "v2"), DataError, message)


@pytest.mark.usefixtures("on_the_hub")
@pytest.mark.parametrize("given", ["data/*.parquet", "https://example.com/a.zip", "hf://datasets/a/b/c.jsonl", "**"])
def test_hub_data_set_may_name_remote_files(folder: Path, given: str) -> None:
    name_files(folder, given)
    own_files.check_hub_configs("somebody/data", "v2")


ALIASES = "\n".join(f"  x{i}: &x{i} [{', '.join([f'*x{i - 1}'] * 9) if i else '../secret.jsonl'}]" for i in range(20))


@pytest.mark.parametrize("files", [f"*x19\n{ALIASES}", "&x [../secret.jsonl, *x]"], ids=["nested", "endless"])
def test_endless_lists_in_header_are_rejected(folder: Path, files: str) -> None:
    before, _, more = files.partition("\n")
    configs = f"configs:\n- config_name: default\n{more}\n  data_files: {before}\n"
    (folder / "README.md").write_text(f"---\n{configs}---\n")
    refused(lambda: ids(folder), DataError, f"../secret.jsonl is outside {folder}")


def test_data_dir_cannot_leave_folder(folder: Path) -> None:
    name_files(folder, "..", key="data_dir")
    refused(lambda: ids(folder), DataError, f"README.md: configs[1].data_dir: .. is outside {folder}")


def test_standalone_header_is_also_checked(folder: Path) -> None:
    name_files(folder, "train.jsonl")
    (folder / ".huggingface.yaml").write_text("configs:\n- config_name: default\n  data_files: ../secret.jsonl\n")
    refused(lambda: ids(folder), DataError, ".huggingface.yaml: configs[0].data_files: ../secret.jsonl is outside")


@pytest.mark.parametrize("kind", known(["hdf5", "xml", "lance", "vortex", "eval", "pdffolder", "niftifolder", "fasta"]))
def test_formats_that_reference_files_are_rejected(folder: Path, kind: str) -> None:
    """Reject them whether or not the packages that read them are installed."""
    name = {"pdffolder": "rows.pdf", "niftifolder": "rows.nii"}.get(kind, f"rows.{kind}")
    (folder / name).write_bytes(b"rows")
    (folder / "README.md").write_text(
        f"---\nlicense: mit\nconfigs: [{{config_name: default, data_files: {name}}}]\n---\n"
    )
    refused(lambda: ids(folder), DataError, f"files of type {kind} are not supported; convert them to JSON lines")


@pytest.mark.parametrize(
    "given",
    ["~/secret.jsonl", "[.][.]/secret.jsonl", "{..,x}/secret.jsonl", "$HOME/secret.jsonl", "%2e%2e/secret.jsonl"],
)
def test_patterns_cannot_leave_folder(folder: Path, here: Path, monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    monkeypatch.setenv("HOME", str(here))
    monkeypatch.chdir(folder)
    (folder / "README.md").write_text(f"---\nconfigs: [{{config_name: default, data_files: '{given}'}}]\n---\n")
    refused(lambda: ids(folder), DataError, "cannot be read")
    refused(lambda: ids(Path(".")), DataError, "cannot be read")


@pytest.mark.parametrize("files", ["train.jsonl", "./train.jsonl", "*.jsonl", "more/../train.jsonl", ["train.jsonl"]])
def test_files_in_the_folder_are_read(folder: Path, files: Any) -> None:
    (folder / "more").mkdir()
    name_files(folder, files)
    assert guarded(lambda: ids(folder, subset="more")) == ["7"]


def test_user_created_link_may_leave_folder(folder: Path, here: Path) -> None:
    (folder / "linked.jsonl").symlink_to(here / "secret.jsonl")
    name_files(folder, "linked.jsonl")
    assert guarded(lambda: ids(folder, subset="more")) == ["secret"]


def test_rows_reflect_current_folder_contents(folder: Path, here: Path) -> None:
    name_files(folder, "train.jsonl")
    assert ids(folder) == ["7"]
    (folder / "train.jsonl").write_text(json.dumps(ROW | {"id": "8"}))
    assert ids(folder) == ["8"]
    (here / "other").mkdir()
    other = folder.rename(here / "other" / "rows")  # has the same name, README and size
    (other / "train.jsonl").write_text(json.dumps(ROW | {"id": "9"}))
    assert ids(other) == ["9"]


def test_relative_folder_is_distinct_from_parent(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    name_files(folder, "../secret.jsonl")
    refused(lambda: ids(Path(".")), DataError, "../secret.jsonl is outside")


def saved(folder: Path, *splits: str) -> Path:
    table = datasets.Dataset.from_list([ROW])
    place = folder / "saved"
    (datasets.DatasetDict(dict.fromkeys(splits, table)) if splits else table).save_to_disk(str(place))
    return place


def edit(file: Path, change: Any) -> None:
    document = json.loads(file.read_text())
    change(document)
    file.write_text(json.dumps(document))


def test_a_saved_data_set_is_read(folder: Path) -> None:
    place = saved(folder)
    data = DataConfig(adapter="jsonl", path=str(place), validation=0, media_path=str(folder))
    assert [sample.id for sample in guarded(lambda: list(open_datasets(data)[0]))] == ["7"]


@pytest.mark.parametrize("splits", [(), ("train", "test")])
@pytest.mark.parametrize("absolute", [False, True])
def test_saved_table_cannot_use_outside_files(
    folder: Path, here: Path, splits: tuple[str, ...], absolute: bool
) -> None:
    place = saved(folder, *splits)
    other = here / "other"
    datasets.Dataset.from_list([ROW | {"id": "secret"}]).save_to_disk(str(other))
    (table,) = other.glob("*.arrow")
    value = str(table) if absolute else f"{'../' * (2 + bool(splits))}other/{table.name}"
    state = place / (splits[-1] if splits else "") / "state.json"
    edit(state, lambda found: found["_data_files"].append({"filename": value}))
    refused(lambda: ids(place), DataError, f"{state}: _data_files[1].filename: {value} is outside {place}")


@pytest.mark.parametrize("absolute", [False, True])
def test_saved_split_must_be_in_data_set(folder: Path, here: Path, absolute: bool) -> None:
    place = saved(folder, "train")
    datasets.Dataset.from_list([ROW | {"id": "secret"}]).save_to_disk(str(here / "other"))
    value = str(here / "other") if absolute else "../../other"
    edit(place / "dataset_dict.json", lambda found: found["splits"].append(value))
    refused(lambda: ids(place), DataError, f"dataset_dict.json: splits[1]: {value} is outside {place}")


@pytest.mark.parametrize("content", ["[]", "{", "[" * 100_000])
def test_invalid_index_is_reported(folder: Path, content: str) -> None:
    place = saved(folder)
    (place / "state.json").write_text(content)
    refused(lambda: ids(place), DataError, f"{place}/state.json: ", "save the data set again")


@pytest.mark.parametrize("given", ["a.png", "../../secret.png", "/etc/passwd", "file:///etc/passwd"])
def test_image_folder_metadata_cannot_leave_folder(folder: Path, here: Path, given: str) -> None:
    Image.new("RGB", (28, 28)).save(here / "secret.png")
    (folder / "pictures").mkdir()
    (folder / "a.png").rename(folder / "pictures" / "a.png")
    row = {"id": "7", "file_name": given, "question": "What colour?", "answer": "red"}
    (folder / "pictures" / "metadata.jsonl").write_text(json.dumps(row))
    configs = "configs:\n- config_name: default\n  data_files: pictures/*\n"
    (folder / "README.md").write_text(f"---\n{configs}---\n")
    if given == "a.png":
        assert guarded(lambda: ids(folder)) == ["7"]
    else:
        refused(lambda: ids(folder), DataError)


def test_path_in_table_cannot_leave_folder(folder: Path, here: Path) -> None:
    """Check the path that old versions of `datasets` build from `file_name = "../secret.png"`."""
    Image.new("RGB", (28, 28)).save(here / "secret.png")
    value = f"{folder}/../secret.png"
    (folder / "train.jsonl").write_text(json.dumps(ROW | {"image": {"path": value, "bytes": None}}))
    refused(lambda: ids(folder), DataError, f"image: {value} points outside {folder}")


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind in vars(datasets)])
@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ("http://127.0.0.1:9/a.png", "is outside of"),
        ("zip://a.png::http://127.0.0.1:9/a.zip", "is a URL"),
        ("../secret.png", "points outside"),
    ],
)
def test_table_feature_types_open_no_files(
    folder: Path,
    here: Path,
    kind: str,
    given: str,
    reason: str,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Check feature types that make `datasets` open the file that a column names."""
    monkeypatch.setenv("DSREASON_CACHE", str(tmp_path_factory.mktemp("cache")))  # where the table's record is written
    Image.new("RGB", (28, 28)).save(here / "secret.png")
    texts = {name: {"dtype": "string", "_type": "Value"} for name in ("id", "question", "answer")}
    described = json.dumps({"info": {"features": {**texts, "image": {"_type": kind}}}})
    file = pa.struct({"bytes": pa.binary(), "path": pa.string()})  # otherwise `datasets` ignores the declared features
    schema = pa.schema({**dict.fromkeys(texts, pa.string()), "image": file})
    table = pa.Table.from_pylist([ROW | {"image": {"bytes": None, "path": given}}], schema)
    (folder / "train.jsonl").unlink()
    pq.write_table(table.replace_schema_metadata({"huggingface": described}), folder / "train.parquet")
    refused(lambda: ids(folder), DataError, f"image: {given} ", reason)


@pytest.mark.parametrize("name", ["metadata.jsonl", "metadata.csv", "metadata.parquet"])
@pytest.mark.parametrize("field", ["file_name", "image_file_name"])
@pytest.mark.parametrize("given", ["../../secret.png", "http://127.0.0.1:9/a.png"])
def test_metadata_of_any_format_cannot_leave_folder(
    folder: Path, here: Path, name: str, field: str, given: str
) -> None:
    Image.new("RGB", (28, 28)).save(here / "secret.png")
    (folder / "pictures").mkdir()
    (folder / "a.png").rename(folder / "pictures" / "a.png")
    table = datasets.Dataset.from_list([{"id": "7", field: given, "question": "What colour?", "answer": "red"}])
    {"jsonl": table.to_json, "csv": table.to_csv, "parquet": table.to_parquet}[name.partition(".")[2]](
        str(folder / "pictures" / name)
    )
    (folder / "README.md").write_text("---\nconfigs:\n- config_name: default\n  data_files: pictures/*\n---\n")
    refused(lambda: ids(folder), DataError, given)


@pytest.mark.parametrize("given", ["../secret.mp4", "a/../../secret.mp4", "http://127.0.0.1:9/a.mp4", "file:///a.mp4"])
def test_prompt_video_cannot_leave_folder(folder: Path, given: str) -> None:
    (folder / "prompts.jsonl").write_text(json.dumps({"prompt": "a red ball", "video": given}))
    data = WorldDataConfig(format="prompts", path=str(folder / "prompts.jsonl"), validation=0)
    message = "is a URL, but" if "://" in given else "is outside the folder of"
    refused(lambda: open_world_data(data, 0), DataError, f"prompts.jsonl:1: its video {given} {message}")


@pytest.mark.parametrize("given", ["a.mp4", "a/../b.mp4", "take:1.mp4", "/elsewhere/a.mp4", "s3://bucket/a.mp4"])
def test_allowed_prompt_video_locations_are_resolved(folder: Path, given: str) -> None:
    (folder / "prompts.jsonl").write_text(json.dumps({"prompt": "a red ball", "video": given}))
    rows = read_prompts(str(folder / "prompts.jsonl"))
    assert rows.bad == []
    assert rows.rows[0].clip == (given if given[0] == "/" or "://" in given else str(folder / given))


PACK = {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress, "jsonl": bytes}


@pytest.mark.parametrize("suffix", PACK)
def test_packed_tables_are_read(folder: Path, suffix: str) -> None:
    (folder / f"more.jsonl.{suffix}").write_bytes(PACK[suffix](json.dumps(ROW | {"id": "8"}).encode()))
    name_files(folder, f"more.jsonl.{suffix}")
    assert ids(folder, subset="more") == ["8"]


@pytest.mark.parametrize("name", ["more.jsonl.gz", "more.jsonl"])  # `datasets` looks only at the content
@pytest.mark.parametrize("pack", PACK)
def test_endless_compressed_line_is_rejected(
    folder: Path, pack: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "MAX_LINE_BYTES", 2048)
    (folder / name).write_bytes(PACK[pack](b'{"a": 1}\n' + b" " * 3000))
    name_files(folder, name)
    refused(lambda: ids(folder, subset="more"), DataError, f"{name}, line 2: the line is longer than")


def test_packed_list_is_limited_by_unpacked_size(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_files, "MAX_LIST_BYTES", 2048)
    (folder / "more.json").write_bytes(gzip.compress(b"\n[" + b" " * 3000 + b"]"))
    name_files(folder, "more.json")
    refused(lambda: ids(folder, subset="more"), DataError, "more.json: has 3003 bytes")


def test_packed_table_is_limited_like_an_archive(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archives, "SMALL_BYTES", 2048)
    (folder / "more.jsonl.gz").write_bytes(gzip.compress(b"{}\n" * 100_000))
    name_files(folder, "more.jsonl.gz")
    refused(lambda: ids(folder, subset="more"), DataError, "more.jsonl.gz: unpacks to more than")


@pytest.mark.parametrize(
    ("content", "word"),
    [(gzip.compress(b"{}\n" * 1000)[:-20], "end"), (b"\x28\xb5\x2f\xfdx", "unpack it"), (b"PK\3\4x", "unpack it")],
    ids=["cut", "zst", "zip"],
)
def test_damaged_packed_table_is_reported(folder: Path, content: bytes, word: str) -> None:
    (folder / "more.jsonl.gz").write_bytes(content)
    name_files(folder, "more.jsonl.gz")
    refused(lambda: ids(folder, subset="more"), DataError, "more.jsonl.gz", word)


def test_csv_lines_have_the_same_limit(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "MAX_LINE_BYTES", 2048)
    (here / "rows.csv").write_bytes(b"id\n" + b"0" * 3000)
    refused(lambda: ids(here / "rows.csv"), DataError, "rows.csv, line 2: the line is longer than")
