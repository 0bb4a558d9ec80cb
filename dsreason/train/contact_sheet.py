"""One picture of what the model saw and said: frames side by side, the text below."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from PIL import Image, ImageDraw, ImageFont

from dsreason.data.chat import Medium

WIDTH, THUMBNAIL, MAX_FRAMES = 640, 156, 8
FONT_SIZE, LINE, CHARACTERS = 14, 19, 84


def contact_sheet(media: Sequence[Medium], text: str) -> Image.Image:
    """`media` as the encoder decoded them; of a long video evenly spaced frames. `text` is wrapped line by line."""
    thumbnails = [thumbnail(frame) for medium in media for frame in frames_of(medium)]
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


def frames_of(medium: Medium) -> list[Image.Image]:
    if isinstance(medium, Image.Image):
        return [medium]
    frames, _ = medium
    count = min(MAX_FRAMES, len(frames))
    return [Image.fromarray(frames[i * len(frames) // count]) for i in range(count)]


def thumbnail(image: Image.Image) -> Image.Image:
    """Fitted into a square of `THUMBNAIL`, enlarged where it is smaller."""
    scale = THUMBNAIL / max(image.size)
    return image.convert("RGB").resize((max(1, round(image.width * scale)), max(1, round(image.height * scale))))
