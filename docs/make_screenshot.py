"""Draw `docs/report.png` from the report of an evaluation: `python docs/make_screenshot.py outputs/…/report.html`.

Without an argument: from the newest report in `outputs/`, such as the one that `make demo` leaves.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from PIL import Image

FILE = Path(__file__).with_name("report.png")
WIDTH, HEIGHT = 1100, 925
MAX_BYTES = 200_000
SILENT = ["--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-component-update"]


def main(report: Annotated[Path | None, typer.Argument(help="A report.html.")] = None) -> None:
    """Draw docs/report.png from the report of an evaluation, by default from the newest one in outputs/."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        sys.exit("error: no chromium on PATH; install it (Debian: apt-get install chromium)")
    page = report or newest(Path("outputs"))
    if page is None or not page.is_file():
        sys.exit(f"error: {page or 'outputs/'}: no report.html; run make demo first, or name one with REPORT=")
    with tempfile.TemporaryDirectory() as folder:
        drawn = Path(folder) / "page.png"
        # As root, which containers are, chromium starts without its sandbox only; the page is one of ours and runs no other code.
        options = ["--headless=new", "--no-sandbox", "--hide-scrollbars", *SILENT, f"--user-data-dir={folder}/profile"]
        options += [f"--window-size={WIDTH},{HEIGHT}", f"--screenshot={drawn}", "--virtual-time-budget=5000"]
        ended = subprocess.run([chromium, *options, page.absolute().as_uri()], capture_output=True, text=True)
        if not drawn.is_file():
            sys.exit(f"error: chromium drew nothing (exit code {ended.returncode}): {ended.stderr[-500:]}")
        Image.open(drawn).convert("RGB").quantize(128).save(FILE, optimize=True)
    size = FILE.stat().st_size
    if size > MAX_BYTES:
        sys.exit(f"error: {FILE} has {size:,} bytes, more than {MAX_BYTES:,}; choose a smaller window in {__file__}")
    print(f"{FILE}: {size:,} bytes, from {page}")


def newest(folder: Path) -> Path | None:
    return max(folder.glob("**/report.html"), key=lambda page: page.stat().st_mtime, default=None)


if __name__ == "__main__":
    typer.run(main)
