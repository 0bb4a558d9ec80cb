"""Contact sheets: images that show, side by side, the media that the model saw, with the text below."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from PIL import Image, ImageDraw, ImageFont

from dsreason.data.media_plan import Medium
from dsreason.data.order import pick_evenly
from dsreason.data.types import Sample
from dsreason.errors import DataError
from dsreason.media.images import load_image
from dsreason.media.videos import load_video, probe_video

WIDTH, THUMBNAIL, MAX_FRAMES = 640, 156, 8
FONT_SIZE, LINE, CHARACTERS = 14, 19, 84
COLUMNS, SAMPLE_FRAMES, MAX_TEXT = 2, 4, 600


def draw_contact_sheet(media: Sequence[Medium], text: str) -> Image.Image:
    """Draw `media` as decoded for the encoder, with the wrapped `text` below. Long videos are thinned to evenly spaced frames."""
    thumbnails = [make_thumbnail(frame) for medium in media for frame in get_frames(medium)]
    lines = [part for line in text.splitlines() for part in textwrap.wrap(line, CHARACTERS) or [""]]
    per_row = WIDTH // (THUMBNAIL + 4)
    top = -(-len(thumbnails) // per_row) * (THUMBNAIL + 4) + 4
    sheet = Image.new("RGB", (WIDTH, top + LINE * len(lines) + 8), "white")
    for i, image in enumerate(thumbnails):
        sheet.paste(image, (4 + i % per_row * (THUMBNAIL + 4), 4 + i // per_row * (THUMBNAIL + 4)))
    drawing, font = ImageDraw.Draw(sheet), ImageFont.load_default(FONT_SIZE)
    for i, line in enumerate(lines):
        drawing.text((6, top + 4 + i * LINE), line, fill="black", font=font)
    return sheet


def get_frames(medium: Medium) -> list[Image.Image]:
    if isinstance(medium, Image.Image):
        return [medium]
    frames, _ = medium
    return [Image.fromarray(frames[i]) for i in pick_evenly(len(frames), MAX_FRAMES)]


def make_thumbnail(image: Image.Image) -> Image.Image:
    """Scale an image up or down to fit into a square of `THUMBNAIL` x `THUMBNAIL` pixels."""
    scale = THUMBNAIL / max(image.size)
    return image.convert("RGB").resize((max(1, round(image.width * scale)), max(1, round(image.height * scale))))


# ---------------------------------------------------------------- sheets for samples that have not been encoded


def draw_sample_sheets(samples: Sequence[Sample]) -> Image.Image:
    """Draw one sheet per sample, in two columns, with its id, its messages and its media (four frames per video)."""
    sheets = [draw_sample_sheet(sample) for sample in samples]
    pairs = [sheets[i : i + COLUMNS] for i in range(0, len(sheets), COLUMNS)]
    heights = [max(sheet.height for sheet in pair) for pair in pairs]
    page = Image.new("RGB", (COLUMNS * WIDTH, max(1, sum(heights))), "white")
    for row, pair in enumerate(pairs):
        for column, sheet in enumerate(pair):
            page.paste(sheet, (column * WIDTH, sum(heights[:row])))
    return page


def draw_sample_sheet(sample: Sample) -> Image.Image:
    texts, media = [f"[{sample.id}]"], []
    for message in sample.messages:
        content = message["content"]
        for part in [{"type": "text", "text": content}] if isinstance(content, str) else content:
            if part["type"] == "text":
                texts.append(f"{message['role']}: {part['text'][:MAX_TEXT]}")
                continue
            try:
                media.append(load_thumbnail(part["type"], part[part["type"]]))
            except DataError as error:
                texts.append(str(error))
    return draw_contact_sheet(media, "\n".join(texts))


def load_thumbnail(kind: str, path: str) -> Medium:
    """Decode an image, or a few frames of a video, at thumbnail size."""
    if kind == "image":
        return make_thumbnail(load_image(path))
    info = probe_video(path)
    scale = THUMBNAIL / max(info.height, info.width)
    size = max(1, round(info.height * scale)), max(1, round(info.width * scale))
    indices = [i * (info.num_frames - 1) // (SAMPLE_FRAMES - 1) for i in range(SAMPLE_FRAMES)]
    return load_video(path, indices, size=size), {}
