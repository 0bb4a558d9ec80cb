"""Self-test before the first step: checks that the rollout engine receives the weights and agrees on log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from dsreason.config.schema_grpo import GRPOConfig
from dsreason.data.chat import EncodedPrompt, Encoder
from dsreason.data.sources import SampleDataset
from dsreason.engine.merged import iter_merged_parameters
from dsreason.errors import DataError, DsReasonError
from dsreason.job.ranks import gather_objects
from dsreason.monitor.progress import Progress
from dsreason.rollout.protocol import SyncError
from dsreason.rollout.self_test import run_self_test
from dsreason.train.common.answers import get_modality
from dsreason.train.common.sampler import Sampler
from dsreason.train.grpo import mismatch
from dsreason.train.grpo.rollouts import Rollout
from dsreason.train.grpo.update import compute_current_logprobs, split_into_micro_batches

NUM_ROWS = 64
"""Number of rows to search for a prompt of each modality."""


class SelfTestError(DsReasonError):
    """Error raised if the rollout engine fails its self-test."""


def check_engine(
    sampler: Sampler,
    prompts: Sequence[EncodedPrompt],
    config: GRPOConfig,
    encoder: Encoder,
    banned_ids: Tensor,
    step: int,
    progress: Progress,
) -> None:
    """Run the engine's self-test and compare its log-probabilities with the trainer's. Collective.

    Raises:
        SelfTestError: some tensors were not received or not restored by the engine; the message names them.
        MismatchError: the log-probabilities differ by more than `rollout.mismatch_stop`.
    """
    sampler.offload.offload()
    try:
        test_result = run_self_test(
            sampler.rollout,
            lambda: iter_merged_parameters(sampler.policy, sampler.bucket_mb),
            prompts,
            max_completion_length=min(8, config.rollout.max_completion_length),
        )
    except SyncError as error:
        raise SelfTestError(str(error)) from error
    sampler.offload.reload()
    pairs = zip(prompts, test_result.completions, strict=True)
    rollouts = [Rollout(*pair, reward=0.0, rewards={}, advantage=0.0) for pair in pairs]
    micro_batches = split_into_micro_batches(rollouts, config, encoder)
    # Engines report the log-probabilities of greedily chosen tokens at temperature 1.
    logprobs = compute_current_logprobs(sampler.policy, micro_batches, 1.0, banned_ids)
    local_differences = [
        difference
        for micro_batch, values in zip(micro_batches, logprobs, strict=True)
        for difference in mismatch.measure_mismatches(micro_batch.rollouts, values)
    ]
    differences = [difference for part in gather_objects(local_differences) for difference in part]
    metrics = mismatch.compute_mismatch_metrics(differences)
    by_modality = ", ".join(
        f"{name.rpartition('/')[2]} {value:.2g}"
        for name, value in metrics.items()
        if name.startswith("mismatch/max_abs_logprob/")
    )
    progress.print_line(
        f"self-test: {sum(map(len, test_result.tensors))} tensors of the engine were perturbed and restored; its "
        f"log-probabilities differ from the trainer's by at most {metrics['mismatch/max_abs_logprob']:.2g} ({by_modality})"
    )
    mismatch.check(metrics, differences, config.rollout, step, folder=None)


def encode_prompt_per_modality(training: SampleDataset, encoder: Encoder) -> list[EncodedPrompt]:
    """Encode, for each modality, the first usable prompt among the first `NUM_ROWS` rows. All ranks get the same prompts.

    Raises:
        DataError: none of these rows is usable.
    """
    prompts: dict[str, EncodedPrompt] = {}
    for index in range(min(NUM_ROWS, len(training))):
        try:
            sample = training[index]
            if get_modality(sample) not in prompts:
                prompts[get_modality(sample)] = encoder.encode_prompt(sample)
        except DataError:  # the loader will report this row
            continue
    if not prompts:
        raise DataError(
            f"none of the first {NUM_ROWS} rows is a usable prompt, so the rollout engine cannot be tested; correct the rows, or "
            "set rollout.self_test = false"
        )
    return list(prompts.values())
