"""Commands that write the same files at once without a lock: each file comes from one of them as a whole."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from PIL import Image

from dsreason.cli.data import commands
from dsreason.cli.import_ import import_
from dsreason.evaluation.report import report as vlm
from dsreason.evaluation.report.results import find_run, write_results
from dsreason.tools.datasets.clip_rules import Cut
from dsreason.tools.datasets.cutting import cut_clip
from dsreason.world.evaluation import report as world
from dsreason.world.evaluation.results import ClipResult, open_results, write_clip
from tests.unit.evaluation.made_results import made
from tests.unit.tools.cosmos_rl.test_convert import SFT

BASELINES = ("good", "bad")


def import_config(output: Path, variant: int) -> None:
    file = output.with_name(f"cosmos_{variant}.toml")
    file.write_text(SFT)
    import_(file, output / "run.toml")


def validate(output: Path, variant: int) -> None:
    commands.write_problems([f"row {variant}"] * (1 + variant))


def cut(output: Path, variant: int) -> None:
    images = output.with_name(f"images_{variant}")
    images.mkdir(exist_ok=True)
    for number in range(4):
        Image.new("RGB", (64, 48), (60 * number, 0, 99 * variant)).save(images / f"im_{number}.jpg")
    cut_clip(Cut(images, 0, 2 + variant, "frames"), output / "clip.mp4")


def score(output: Path, variant: int) -> None:
    for folder, answer in (output, "A"), (output.with_name(BASELINES[variant]), "AB"[variant]):
        write_results(folder / "big/letter", "robovqa", "1", [made("1"), made("1", 1, answer)])
    vlm.write_report(find_run(output), baseline=find_run(output.with_name(BASELINES[variant])), with_html=False)


def score_world(output: Path, variant: int) -> None:
    for folder in (output, output.with_name(BASELINES[variant])):
        open_results(folder, {"model": {"path": "m"}}, overwrite=False)
        write_clip(folder, ClipResult(0, "row", "a cat", {"": 0.5}, 0.5, 0.1, [1, 2]))
    world.write_report(output, output.with_name(BASELINES[variant]))


COMMANDS: dict[str, tuple[Callable[[Path, int], None], set[str]]] = {
    "import": (import_config, {"run.toml"}),
    "data validate": (validate, {"problems.txt"}),
    "data clip": (cut, {"clip.mp4"}),
    "score": (score, {"big/letter/summary.json", "big/letter/report.md"}),
    "score of a world model": (score_world, {"summary.json", "world.html"}),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_file_written_twice_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    write, files = COMMANDS[name]

    def run(folder: str, *variants: int) -> dict[str, bytes]:
        """Run the command in all variants at once; return the content of its files."""
        output, renamed = tmp_path / folder / "out", list[str]()
        output.mkdir(parents=True)
        monkeypatch.setattr(commands, "build_default_output_dir", lambda command: output)
        drafts_written = threading.Barrier(len(variants))

        def replace(draft: Path, file: Path) -> None:
            if (file_name := str(file.relative_to(tmp_path / folder)).removeprefix("out/")) in files:
                renamed.append(file_name)
                drafts_written.wait(60)
            draft.rename(file)

        monkeypatch.setattr(Path, "replace", replace)
        with ThreadPoolExecutor(len(variants)) as threads:
            list(threads.map(lambda variant: write(output, variant), variants))
        assert sorted(renamed) == sorted([*files] * len(variants))
        assert list(output.rglob(".*")) == []  # no draft is left
        return {file: (output / file).read_bytes() for file in files}

    alone = [run(f"alone_{variant}", variant) for variant in (0, 1)]
    assert all(alone[0][file] != alone[1][file] for file in files)
    both = run("both", 0, 1)
    assert all(both[file] in (alone[0][file], alone[1][file]) for file in files)
