"""TFRecord files in TensorFlow's format, written with Google's protobuf library."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from dsreason.errors import DataError
from dsreason.tools.datasets.tfrecord import read_examples

REPEATED, OPTIONAL = 3, 1
BYTES, FLOAT, INT64, MESSAGE = 12, 2, 3, 11


def example_class() -> Any:
    """Build the class `tf.train.Example` as defined in tensorflow/core/example/{example,feature}.proto."""
    file = descriptor_pb2.FileDescriptorProto(name="example.proto", package="tf", syntax="proto3")

    def message(name: str, *fields: tuple[str, int, int, int, str]) -> Any:
        made = file.message_type.add(name=name)
        for field, number, label, kind, type_name in fields:
            made.field.add(name=field, number=number, label=label, type=kind, type_name=type_name or None)
        return made

    for name, kind in (("BytesList", BYTES), ("FloatList", FLOAT), ("Int64List", INT64)):
        message(name, ("value", 1, REPEATED, kind, ""))
    lists = ((1, "bytes_list", "BytesList"), (2, "float_list", "FloatList"), (3, "int64_list", "Int64List"))
    message("Feature", *((field, number, OPTIONAL, MESSAGE, f".tf.{kind}") for number, field, kind in lists))
    features = message("Features", ("feature", 1, REPEATED, MESSAGE, ".tf.Features.FeatureEntry"))
    entry = features.nested_type.add(name="FeatureEntry")
    entry.options.map_entry = True
    entry.field.add(name="key", number=1, label=OPTIONAL, type=9)
    entry.field.add(name="value", number=2, label=OPTIONAL, type=MESSAGE, type_name=".tf.Feature")
    message("Example", ("features", 1, OPTIONAL, MESSAGE, ".tf.Features"))
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("tf.Example"))


Example = example_class()


def record(**given: list[bytes] | list[int] | list[float]) -> bytes:
    """Serialize an example; the argument `a__b` stands for the feature `a/b`."""
    example = Example()
    for name, values in given.items():
        feature = example.features.feature[name.replace("__", "/")]
        kinds = {bytes: feature.bytes_list, int: feature.int64_list, float: feature.float_list}
        kinds[type(values[0])].value.extend(values)
    content = example.SerializeToString()
    return struct.pack("<Q", len(content)) + b"\0" * 4 + content + b"\0" * 4


def test_features_are_read_by_name(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(
        record(path=[b"/a/b"], id=[12], steps__image=[b"one", b"", b"x" * 300], steps__action=[0.5, 1.5])
        + record(id=[2**40, 0, 300], other=[b"o"])
    )
    assert list(read_examples(tmp_path / "a", ("path", "id", "steps/image"))) == [
        {"path": [b"/a/b"], "id": [12], "steps/image": [b"one", b"", b"x" * 300]},
        {"id": [2**40, 0, 300]},
    ]


def test_empty_tfrecord_file_has_no_records(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"")
    assert list(read_examples(tmp_path / "a", ("id",))) == []


@pytest.mark.parametrize(
    "content", [record(id=[1])[:-6], b"no record at all", b"\x05" + bytes(11) + b"\xff" * 5 + bytes(4), b"\xff" * 40]
)
def test_damaged_file_is_reported_with_record(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a").write_bytes(record(id=[1]) + content)
    with pytest.raises(DataError, match="a, record 2: is not a TFRecord of tf.train.Example"):
        list(read_examples(tmp_path / "a", ("id",)))
