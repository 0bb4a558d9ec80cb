import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image, ImageFile

from dsreason.errors import ConfigError, DataError
from dsreason.media import images, videos
from dsreason.media.images import load_image, probe_image
from dsreason.media.videos import check_torchcodec, load_video, probe_video
from dsreason.media.vision import VideoInfo
from tests.unit.media.videos import read_number, write_video

SHARED = Path(__file__).resolve().parents[4] / "shared" / "data"
needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason="the folder ../shared/data with real media is absent")


def numbers(frames: np.ndarray) -> list[int]:
    return [read_number(frame) for frame in frames]


# ---------------------------------------------------------------- images


def test_exif_rotation_applies_to_size_and_pixels(tmp_path):
    image = Image.new("RGB", (40, 20), "blue")
    image.paste("red", (0, 0, 20, 20))  # red left half
    exif = Image.Exif()
    exif[0x0112] = 6  # show it turned 90 degrees clockwise: left becomes top
    image.save(tmp_path / "a.jpg", exif=exif, quality=95)
    assert probe_image(tmp_path / "a.jpg") == (40, 20)
    displayed = load_image(tmp_path / "a.jpg")
    assert displayed.size == (20, 40)
    assert displayed.getpixel((10, 5))[0] > 200 and displayed.getpixel((10, 35))[2] > 200


@pytest.mark.parametrize("name", ["a.jpg", "a.png", "a.webp", "a.tiff"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_probe_and_load_agree_on_exif_orientation(tmp_path, orientation, name):
    exif = Image.Exif()
    exif[0x0112] = orientation
    Image.new("RGB", (40, 20)).save(tmp_path / name, exif=exif)
    assert probe_image(tmp_path / name) == ((40, 20) if orientation >= 5 else (20, 40))
    assert load_image(tmp_path / name).size == ((20, 40) if orientation >= 5 else (40, 20))


@pytest.mark.parametrize("name", ["a.jpg", "a.png"])
def test_probing_an_image_decodes_nothing(tmp_path, name, monkeypatch):
    Image.new("RGB", (40, 20)).save(tmp_path / name)
    monkeypatch.setattr(ImageFile.ImageFile, "load", lambda image: pytest.fail("decoded"))
    assert probe_image(tmp_path / name) == (20, 40)


def test_transparent_pixels_are_blended_with_white(tmp_path):
    Image.new("RGBA", (2, 1), (255, 0, 0, 0)).save(tmp_path / "a.png")
    assert load_image(tmp_path / "a.png").getpixel((0, 0)) == (255, 255, 255)


def test_transparent_palette_is_blended_with_white(tmp_path):
    image = Image.new("P", (2, 1), 0)
    image.putpalette([10, 20, 30, 40, 50, 60])
    image.putpixel((1, 0), 1)
    image.save(tmp_path / "a.png", transparency=0)
    loaded = load_image(tmp_path / "a.png")
    assert [loaded.getpixel((x, 0)) for x in (0, 1)] == [(255, 255, 255), (40, 50, 60)]


def test_16_bit_grey_is_scaled_not_clipped(tmp_path):
    Image.fromarray(np.array([[0, 0x8000, 0xFFFF]], np.uint16)).save(tmp_path / "a.png")
    loaded = load_image(tmp_path / "a.png")
    assert [loaded.getpixel((x, 0)) for x in range(3)] == [(0, 0, 0), (128, 128, 128), (255, 255, 255)]


@pytest.mark.parametrize("mode", ["CMYK", "L", "1"])
def test_non_rgb_images_are_converted_to_rgb(tmp_path, mode):
    path = tmp_path / ("a.tiff" if mode == "1" else "a.jpg")
    Image.new(mode, (8, 8)).save(path)
    assert load_image(path).mode == "RGB"


def test_truncated_image_error_names_the_file(tmp_path):
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8)).save(tmp_path / "a.png")
    (tmp_path / "b.png").write_bytes((tmp_path / "a.png").read_bytes()[:4000])
    with pytest.raises(DataError, match=r"b\.png: is not a usable image"):
        load_image(tmp_path / "b.png")


def test_image_with_too_many_pixels_is_rejected(tmp_path, monkeypatch):
    monkeypatch.setattr(images, "MAX_IMAGE_PIXELS", 100)
    Image.new("RGB", (11, 10)).save(tmp_path / "a.png")
    with pytest.raises(DataError, match=r"11x10 = 110 pixels, but the maximum is 100"):
        probe_image(tmp_path / "a.png")


@pytest.mark.parametrize("probe", [probe_image, probe_video])
@pytest.mark.parametrize(
    ("content", "message"), [(None, "no such file"), (b"", r"empty \(0 bytes\)"), (b"hello" * 99, "not a usable")]
)
def test_non_media_files_are_data_errors(tmp_path, probe, content, message):
    path = tmp_path / "a.mp4"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match=rf"a\.mp4: .*{message}"):
        probe(path)


def test_only_file_urls_are_accepted_as_paths(tmp_path):
    Image.new("RGB", (4, 3)).save(tmp_path / "a b.png")
    assert probe_image((tmp_path / "a b.png").as_uri()) == (3, 4)
    with pytest.raises(DataError, match="must be local"):
        probe_image("https://example.org/a.png")


# ---------------------------------------------------------------- videos


@pytest.mark.parametrize("name", ["a.mp4", "a.mkv", "a.mov", "a.avi", "a.ts"])
def test_video_probe_matches_decoded_frames(tmp_path, name):
    codec = "mpeg4" if name == "a.avi" else "libx264"
    path = write_video(tmp_path / name, 12, codec=codec)
    info = probe_video(path)
    assert (info.num_frames, info.height, info.width) == (12, 48, 64)
    assert info.fps == pytest.approx(10) and info.duration == pytest.approx(1.2)
    assert numbers(load_video(path, range(12))) == list(range(12))
    with pytest.raises(DataError, match="frame 12 is needed, but only 12"):
        load_video(path, [12])


def test_fragmented_video_without_frame_count_is_read(tmp_path):
    path = write_video(tmp_path / "a.mp4", 12, options={"movflags": "frag_keyframe+empty_moov"})
    assert probe_video(path).num_frames == 12
    assert numbers(load_video(path, [3, 11])) == [3, 11]


def test_variable_frame_rate_is_read(tmp_path):
    times = [0, 100, 140, 180, 500, 510, 520, 1000]
    path = write_video(tmp_path / "a.mp4", times)
    assert probe_video(path).num_frames == 8
    assert numbers(load_video(path, range(8))) == list(range(8))


def test_rounded_times_do_not_change_the_rate(tmp_path):
    """Check Matroska, which rounds to milliseconds: 45 frames at 60 fps end at 733 ms instead of 733.3."""
    path = write_video(tmp_path / "a.mkv", [round(number * 1000 / 60) for number in range(45)], rate=60)
    info = probe_video(path)
    assert info.fps == 60.0 and info.duration == 0.75


def test_contradicted_header_rate_is_ignored(tmp_path):
    path = write_video(tmp_path / "a.mkv", 45, rate=60)
    assert probe_video(path).fps == 10.0


def test_frames_hidden_by_edit_list_are_excluded(tmp_path):
    path = write_video(tmp_path / "a.mp4", 24, gop=24, drop_before=700)
    info = probe_video(path)
    displayed = numbers(load_video(path, range(info.num_frames)))
    assert displayed == list(range(7, 24))
    assert info.fps == pytest.approx(10, rel=0.01)


def test_single_frame_video_is_read(tmp_path):
    path = write_video(tmp_path / "a.mp4", 1)
    assert probe_video(path) == VideoInfo(1, 10.0, 48, 64, 0.1)
    assert load_video(path, [0, 0]).shape == (2, 48, 64, 3)


@pytest.mark.parametrize("rotation", [90.0, 180.0, -90.0])
def test_rotation_metadata_turns_size_and_pixels(tmp_path, rotation):
    frame = np.zeros((48, 64, 3), np.uint8)
    frame[:24, :32] = 255  # top left quarter is white
    path = write_video(tmp_path / "a.mp4", 2, rotation=rotation, frames=[frame, frame])
    info = probe_video(path)
    video = load_video(path, [1])[0]
    assert video.shape[:2] == (info.height, info.width) == ((48, 64) if rotation == 180 else (64, 48))
    turned = np.rot90(frame, round(rotation / 90))  # counter-clockwise, as the display matrix counts
    assert np.abs(video.astype(int) - turned).mean() < 10


@pytest.mark.parametrize("first", [0, 127, 128, 131, 200, 249])
def test_seeking_finds_the_exact_frames(tmp_path, first):
    path = write_video(tmp_path / "a.mp4", 250, gop=30)
    expected = [first, min(first + 1, 249), 249]
    assert numbers(load_video(path, expected)) == expected


@pytest.mark.parametrize("wanted", [[0, 59], list(range(0, 60, 7)), [30, 31, 58], list(range(60))])
def test_unneeded_frames_are_skipped_without_changing_others(tmp_path, wanted):
    noise = np.random.default_rng(0).integers(0, 255, (48, 64, 3), np.uint8)
    frames = [np.roll(noise, 2 * i, axis=1) for i in range(60)]  # motion: B frames refer to their neighbours
    path = write_video(tmp_path / "a.mp4", 60, gop=30, frames=frames)
    result, expected = videos.iter_frames_by_time(path, wanted), videos.iter_frames_by_count(path, wanted)
    for frame, same in zip(result, expected, strict=True):
        assert np.array_equal(frame.to_ndarray(), same.to_ndarray())
    with videos.open_video(path) as (container, stream):
        decoded = [frame.pts for frame in videos._decode_frames(container, stream, chosen={-1})]
        assert 0 < len(decoded) < 60


def test_seeking_without_times_decodes_from_start(tmp_path):
    path = write_video(tmp_path / "a.avi", 150, codec="mpeg4")
    assert numbers(load_video(path, [130, 149])) == [130, 149]


@pytest.mark.parametrize(("name", "codec"), [("raw.h264", "libx264"), ("a b.265", "libx265"), ("raw.hevc", "libx265")])
def test_stream_without_container_advises_ffmpeg(tmp_path, name, codec):
    path = write_video(tmp_path / name, codec=codec)
    advice = {"a b.265": "ffmpeg -i 'a b.265' -c copy 'a b.mp4'"}.get(name, f"ffmpeg -i {name} -c copy raw.mp4")
    with pytest.raises(DataError, match=f"raw (h264|hevc) stream, .* put it into a container: {advice}$"):
        probe_video(path)


def test_unconvertible_frame_names_the_file(tmp_path, monkeypatch):
    def refuse(frame, size):
        raise videos.av.FFmpegError(22, "no path between colorspaces")

    monkeypatch.setattr(videos, "_to_array", refuse)
    with pytest.raises(DataError, match=r"a\.mp4: is not a usable video: no path between colorspaces"):
        load_video(write_video(tmp_path / "a.mp4", 3), [0, 2])


def test_frames_are_resized_like_hugging_face(tmp_path):
    import torch
    from torchvision.transforms.v2 import functional as tvf

    path = write_video(tmp_path / "a.mp4", 3)
    full = torch.from_numpy(load_video(path, [0, 2])).permute(0, 3, 1, 2).contiguous()
    expected = tvf.resize(full, [28, 56], interpolation=tvf.InterpolationMode.BICUBIC, antialias=True)
    resized = torch.from_numpy(load_video(path, [0, 2], size=(28, 56))).permute(0, 3, 1, 2)
    assert torch.equal(resized, expected)


def test_truncated_video_error_names_the_file(tmp_path):
    content = write_video(tmp_path / "a.mp4", 100, options={"movflags": "faststart"}).read_bytes()
    (tmp_path / "b.mp4").write_bytes(content[: len(content) * 3 // 4])
    with pytest.raises(DataError, match=r"b\.mp4: .*truncated"):
        probe_video(tmp_path / "b.mp4")
    with pytest.raises(DataError, match=r"b\.mp4: "):
        load_video(tmp_path / "b.mp4", [99])


def test_damaged_video_data_is_an_error(tmp_path):
    content = bytearray(write_video(tmp_path / "a.mp4", 100, options={"movflags": "faststart"}).read_bytes())
    start = content.index(b"mdat") + 2000
    content[start : start + 3000] = np.random.default_rng(0).bytes(3000)
    (tmp_path / "b.mp4").write_bytes(content)
    with pytest.raises(DataError, match=r"b\.mp4: "):
        load_video(tmp_path / "b.mp4", range(100))


def test_image_is_rejected_as_video(tmp_path):
    Image.new("RGB", (32, 32)).save(tmp_path / "a.jpg")
    with pytest.raises(DataError, match=r"a\.jpg: is an image"):
        probe_video(tmp_path / "a.jpg")


def test_a_sound_file_has_no_video_stream(tmp_path):
    import wave

    with wave.open(str(tmp_path / "a.wav"), "wb") as sound:
        sound.setparams((1, 2, 8000, 0, "NONE", ""))
        sound.writeframes(bytes(16000))
    with pytest.raises(DataError, match=r"a\.wav: has no video stream"):
        probe_video(tmp_path / "a.wav")


def test_video_with_too_many_frames_is_rejected(tmp_path, monkeypatch):
    path = write_video(tmp_path / "a.mp4", 12)
    monkeypatch.setattr(videos, "MAX_VIDEO_FRAMES", 10)
    with pytest.raises(DataError, match=r"a\.mp4: claims to have 12 frames, but the maximum is 10"):
        probe_video(path)


def test_changed_file_is_probed_again(tmp_path):
    path = write_video(tmp_path / "a.mp4", 3)
    assert probe_video(path).num_frames == 3
    assert probe_video(write_video(path, 7)).num_frames == 7


def test_files_are_closed_after_reading(tmp_path):
    path = write_video(tmp_path / "a.mp4", 3)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        probe_video(path)
        load_video(path, [1])
    assert len(os.listdir("/proc/self/fd")) == before


def refuse_to_load(source, **options):
    raise RuntimeError("Could not load libtorchcodec. Likely causes: FFmpeg is not properly installed")


@pytest.mark.parametrize("decoders", [None, SimpleNamespace(VideoDecoder=refuse_to_load)], ids=["itself", "FFmpeg"])
def test_missing_torchcodec_is_config_error(tmp_path, monkeypatch, decoders):
    path = write_video(tmp_path / "a.mp4", 2)
    monkeypatch.setitem(sys.modules, "torchcodec", ModuleType("torchcodec"))
    monkeypatch.setitem(sys.modules, "torchcodec.decoders", decoders)
    for use in (check_torchcodec, lambda: load_video(path, [0], decoder="torchcodec")):
        with pytest.raises(ConfigError, match=r'data\.video_decoder = "torchcodec" cannot be used'):
            use()


def test_torchcodec_decodes_the_chosen_frames(tmp_path, monkeypatch):
    path = write_video(tmp_path / "a.mp4", 12)
    expected, decoded = load_video(path, [5, 5, 11], size=(32, 64)), load_video(path, range(12))

    class VideoDecoder:
        def __init__(self, file, **options):
            assert options["dimension_order"] == "NHWC"
            if not file:
                raise ValueError("no video")
            assert file == str(path)

        def get_frames_at(self, indices):
            return SimpleNamespace(data=torch.from_numpy(decoded[indices]))

    monkeypatch.setitem(sys.modules, "torchcodec", ModuleType("torchcodec"))
    monkeypatch.setitem(sys.modules, "torchcodec.decoders", SimpleNamespace(VideoDecoder=VideoDecoder))
    check_torchcodec()
    np.testing.assert_array_equal(load_video(path, [5, 5, 11], size=(32, 64), decoder="torchcodec"), expected)


@needs_shared
@pytest.mark.parametrize(("name", "frames", "size"), [("sample.mp4", 10, (560, 1008)), ("packer.mp4", 100, (512, 640))])
def test_real_videos_are_decoded(name, frames, size):
    info = probe_video(SHARED / name)
    assert (info.num_frames, (info.height, info.width)) == (frames, size)
    assert load_video(SHARED / name, range(frames)).shape == (frames, *size, 3)


@needs_shared
@pytest.mark.parametrize(("name", "size"), [("photo.jpg", (768, 768)), ("sample.png", (1190, 1910))])
def test_real_images_are_decoded(name, size):
    assert probe_image(SHARED / name) == size
    assert load_image(SHARED / name).size == size[::-1]
