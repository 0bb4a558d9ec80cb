"""The distillation teacher: a frozen model that returns log-probabilities of the student's completions."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import deepspeed
import torch
from torch import Tensor

from dsreason.checkpoints.export_digests import check_digests
from dsreason.config.schema import ModelConfig
from dsreason.config.schema_grpo import GRPOConfig
from dsreason.data.chat import Encoder
from dsreason.engine.engine import place_buffers
from dsreason.engine.zero3 import gather_whole_blocks
from dsreason.errors import ConfigError
from dsreason.families import get_family
from dsreason.files.cache import get_cache_dir
from dsreason.job.ranks import World, run_on_rank_zero
from dsreason.models.folder import compute_fingerprint
from dsreason.models.load import load_model, read_model_config, resolve_model
from dsreason.models.policy import Policy
from dsreason.models.processors.loading import load_processor
from dsreason.train.common.preflight import DTYPES
from dsreason.train.grpo.rollouts import RolloutMicroBatch
from dsreason.train.grpo.teacher_server import TeacherServer, check_server

log = logging.getLogger(__name__)

PIXELS_AS = ("patch_size", "merge_size", "temporal_patch_size", "image_mean", "image_std", "rescale_factor")
"""Settings of the image and video processors that determine which pixels the model sees of an image of a given size."""


class Teacher(Protocol):
    """A model from which the student learns."""

    fingerprint: str
    """Fingerprint of the teacher; a run can only be resumed with the same teacher."""

    def compute_logprobs(self, micro_batches: Sequence[RolloutMicroBatch]) -> list[Tensor]:
        """Return the log-probabilities of the sampled tokens at temperature 1, `[N]` per micro-batch. Collective."""


class TeacherModel:
    """A `Teacher` on the job's GPUs: a frozen model, sharded with ZeRO-3, that gets the student's batches."""

    def __init__(self, path: Path, config: GRPOConfig, banned_ids: Tensor, world: World) -> None:
        settings = build_teacher_deepspeed(config, world)
        log.info("loading the teacher %s", path)
        model = load_model(
            path,
            dtype=DTYPES[config.train.precision],
            attention=config.model.attention,
            deepspeed=settings,
            trust_remote_code=config.model.trust_remote_code,
        )
        policy = Policy(model.requires_grad_(False).eval(), world.group)
        gather_whole_blocks(policy, get_family(model.config.model_type).modules.blocks)
        self.engine, *_ = deepspeed.initialize(model=policy, config=settings)
        place_buffers(self.engine.module, self.engine.device)
        self.banned_ids = banned_ids
        self.fingerprint: str = run_on_rank_zero(lambda: compute_fingerprint(path))

    @torch.no_grad()
    def compute_logprobs(self, micro_batches: Sequence[RolloutMicroBatch]) -> list[Tensor]:
        return [
            self.engine(micro_batch.batch.to(self.engine.device), 1.0, self.banned_ids) for micro_batch in micro_batches
        ]


def build_teacher_deepspeed(config: GRPOConfig, world: World) -> dict[str, Any]:
    """Build the DeepSpeed config for a teacher: ZeRO-3, regardless of the student's stage, and no optimizer."""
    zero: dict[str, Any] = {"stage": 3, "stage3_max_reuse_distance": 0}
    if world.device.type == "cuda" and config.distill.offload:
        zero["offload_param"] = {"device": "cpu", "pin_memory": True}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": zero,
        "bf16": {"enabled": config.train.precision == "bf16"},
    }


def open_teacher(config: GRPOConfig, banned_ids: Tensor, world: World, saved: Mapping[str, Any]) -> Teacher | None:
    """Open the configured teacher; return None if distillation is off. Collective.

    Args:
        saved: GRPO-specific state from the checkpoint to resume from; it may contain the teacher's fingerprint.

    Raises:
        ConfigError: the resumed run had a different teacher.
    """
    if config.distill.teacher is None:
        return None
    teacher: Teacher
    if config.distill.by_server:
        teacher = TeacherServer(config.distill, world)
    else:
        teacher = TeacherModel(find_teacher(config), config, banned_ids, world)
    saved_fingerprint = saved.get("teacher", teacher.fingerprint)
    if saved_fingerprint != teacher.fingerprint:
        raise ConfigError(
            f"distill.teacher ({config.distill.teacher}) has fingerprint {teacher.fingerprint}, but the teacher at the "
            f"checkpoint had {saved_fingerprint}; restore the model, or start a new run in another --output-dir"
        )
    return teacher


def find_teacher(config: GRPOConfig) -> Path:
    """Return the teacher's local folder; download or build the model if necessary. Safe to call on several ranks at once."""
    assert config.distill.teacher is not None
    model_settings = {"path": config.distill.teacher, "revision": config.distill.revision}
    model = ModelConfig.model_validate(model_settings | {"trust_remote_code": config.model.trust_remote_code})
    return resolve_model(model, get_cache_dir() / "models")


def check_teacher(config: GRPOConfig, student: Encoder, model_path: Path) -> None:
    """Raise ConfigError if the teacher cannot read the student's prompts and completions. No weights are loaded."""
    if config.distill.teacher is None:
        return
    if config.distill.by_server:
        check_server(config.distill, student.processor.tokenizer)
        return
    path, trust_remote_code = find_teacher(config), config.model.trust_remote_code
    check_digests(path)
    kinds = [read_model_config(folder, trust_remote_code=trust_remote_code).model_type for folder in (path, model_path)]
    key = f"distill.teacher ({config.distill.teacher})"
    if kinds[0] != kinds[1]:
        raise ConfigError(
            f"{key} is a {kinds[0]}, but model.path ({config.model.path}) is a {kinds[1]}, which reads prompts differently; use "
            f"a teacher that is a {kinds[1]}"
        )
    teacher = load_processor(path, trust_remote_code=trust_remote_code)
    check_vocabularies(key, teacher.tokenizer.get_vocab(), student.processor.tokenizer.get_vocab())
    if student.family.vision is not None:
        for kind in ("image_processor", "video_processor"):
            settings = [getattr(processor, kind).to_dict() for processor in (student.processor, teacher)]
            for name in PIXELS_AS:
                student_value, teacher_value = (processor_settings.get(name) for processor_settings in settings)
                if student_value != teacher_value:
                    raise ConfigError(
                        f"{key}: its {kind} has {name} {teacher_value}, but that of model.path has {student_value}, so it would "
                        "see different pixels than in its training; use a teacher with the same processor settings"
                    )


def check_vocabularies(key: str, teacher: Mapping[str, int], student: Mapping[str, int]) -> None:
    """Raise a ConfigError that names `key` unless the two vocabularies contain the same tokens with the same ids."""
    differing = sorted(
        (student.items() | teacher.items()) - (student.items() & teacher.items()), key=lambda item: item[1]
    )
    if differing:
        token, _ = differing[0]
        descriptions = [
            f"no {token!r}" if token not in vocabulary else f"{token!r} as {vocabulary[token]}"
            for vocabulary in (teacher, student)
        ]
        raise ConfigError(
            f"{key}: its vocabulary differs from that of model.path: the teacher has {descriptions[0]}, but the student has "
            f"{descriptions[1]} (differing entries: {len(differing)}), so the same ids mean different text; use a teacher with "
            "the same vocabulary"
        )
