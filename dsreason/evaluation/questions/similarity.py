"""Similarity between an answer and its reference: BLEU, ROUGE, and the cosine of their sentence embeddings.

The packages are imported only when needed, because rouge-score and sentence-transformers take seconds to load.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from dsreason.errors import ConfigError
from dsreason.files.disk import read_small
from dsreason.imports import build_install_command

ADVICE = "set it to the folder of a sentence-transformers model, which contains a modules.json"
ROUGES = ["rouge1", "rouge2", "rougeL"]


def compute_overlap(answer: str, reference: str) -> dict[str, float]:
    """Compute sacrebleu's sentence BLEU and rouge-score's ROUGE, with their default settings.

    `bleu` is from 0 to 100 (with effective order, so a text of two words can reach 100); `rouge1`, `rouge2` and `rougeL` are
    F-measures from 0 to 1, without stemming.
    """
    from rouge_score.rouge_scorer import RougeScorer
    from sacrebleu import sentence_bleu

    rouge = RougeScorer(ROUGES).score(reference, answer)
    bleu = sentence_bleu(answer, [reference]).score
    return {"bleu": bleu, **{name: float(rouge[name].fmeasure) for name in ROUGES}}


class Similarity:
    """A sentence-embedding model that compares the meanings of texts, loaded from a folder and run on the CPU.

    Raises:
        ConfigError: sentence-transformers is not installed, or the folder is missing or cannot be loaded.
    """

    def __init__(self, folder: str) -> None:
        source = f"evaluation.similarity_model {folder}"
        path = Path(folder).expanduser()
        if not path.is_dir():
            raise ConfigError(f"{source}: the folder does not exist (working folder: {Path.cwd()}); {ADVICE}")
        try:
            from sentence_transformers import SentenceTransformer
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"{source} requires sentence-transformers; run {build_install_command('similarity')}"
            ) from error
        try:
            check_modules(path)
            self._model: Any = SentenceTransformer(
                str(path), device="cpu", local_files_only=True, trust_remote_code=False
            )
        except Exception as error:  # an arbitrary folder may cause any error
            raise ConfigError(f"{source}: cannot be loaded: {error}; {ADVICE}") from error

    def compute_cosine(self, answer: str, reference: str) -> float:
        """Compute the cosine similarity between the two texts' embeddings, from -1 to 1; 0 if either text is empty."""
        if not (answer and reference):
            return 0.0
        embeddings = self._model.encode([answer, reference], show_progress_bar=False, convert_to_tensor=True)
        first, other = embeddings.double()
        return float(torch.cosine_similarity(first, other, dim=0))


def check_modules(folder: Path) -> None:
    """Raise ValueError if the folder names a module from outside sentence-transformers, some versions of which would run it."""
    for module in json.loads(read_small(folder / "modules.json")):
        if not str(module["type"]).startswith("sentence_transformers."):
            raise ValueError(f"modules.json names the class {module['type']}, whose custom code is never run")
