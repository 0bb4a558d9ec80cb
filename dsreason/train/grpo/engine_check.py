"""Before the first step: do weights arrive in the rollout engine, and does it compute the trainer's log-probabilities?"""

from __future__ import annotations

from dsreason.data.chat import EncodedPrompt
from dsreason.engine.merged import merged_parameters
from dsreason.errors import DataError, DsReasonError
from dsreason.job.ranks import gather_objects
from dsreason.rollout.protocol import SyncError
from dsreason.rollout.self_test import self_test
from dsreason.train.common.answers import modality_of
from dsreason.train.grpo import mismatch
from dsreason.train.grpo.build import GRPORun
from dsreason.train.grpo.rollouts import Rollout
from dsreason.train.grpo.update import current_logprobs, cut

NUM_ROWS = 64
"""Rows that are searched for a prompt of each modality."""


class SelfTestError(DsReasonError):
    """The rollout engine does not do what training relies on."""


def check_engine(grpo: GRPORun) -> None:
    """The engine's self-test, and its log-probabilities against the trainer's, on one prompt of each modality. Collective.

    Raises:
        SelfTestError: names the tensors that did not arrive or come back.
        MismatchError: the two sides are further apart than `rollout.mismatch_stop`.
    """
    config, sampler = grpo.config.rollout, grpo.sampler
    prompts = one_prompt_per_modality(grpo)
    with grpo.watchdog.phase("self_test"), grpo.progress.phase("self-test of the rollout engine"):
        sampler.offload.offload()
        try:
            tested = self_test(
                sampler.rollout,
                lambda: merged_parameters(sampler.policy, sampler.bucket_mb),
                prompts,
                max_completion_length=min(8, config.max_completion_length),
            )
        except SyncError as error:
            raise SelfTestError(str(error)) from error
        sampler.offload.reload()
        pairs = zip(prompts, tested.completions, strict=True)
        rollouts = [Rollout(*pair, reward=0.0, rewards={}, advantage=0.0) for pair in pairs]
        micro_batches = cut(rollouts, grpo.config, grpo.encoder)
        logprobs = current_logprobs(grpo.engine, micro_batches, 1.0, grpo.banned_ids)  # greedy ones are reported at 1
    own = [
        one
        for micro_batch, values in zip(micro_batches, logprobs, strict=True)
        for one in mismatch.mismatches(micro_batch.rollouts, values)
    ]
    found = [one for part in gather_objects(own) for one in part]
    metrics = mismatch.metrics_of(found)
    by_modality = ", ".join(
        f"{name.rpartition('/')[2]} {value:.2g}"
        for name, value in metrics.items()
        if name.startswith("mismatch/max_abs_logprob/")
    )
    grpo.progress.say(
        f"self-test: {sum(map(len, tested.tensors))} tensors of the engine took perturbed values and were restored; its "
        f"log-probabilities differ from the trainer's by at most {metrics['mismatch/max_abs_logprob']:.2g} ({by_modality})"
    )
    mismatch.check(metrics, found, config, grpo.state.step, folder=None)


def one_prompt_per_modality(grpo: GRPORun) -> list[EncodedPrompt]:
    """The first prompt of each modality among the first rows, the same on every rank.

    Raises:
        DataError: none of them can be used.
    """
    found: dict[str, EncodedPrompt] = {}
    for index in range(min(NUM_ROWS, len(grpo.training))):
        try:
            sample = grpo.training[index]
            if modality_of(sample) not in found:
                found[modality_of(sample)] = grpo.prompt_encoder.encode_prompt(sample)
        except DataError:  # the loader names it when it is met
            continue
    if not found:
        raise DataError(f"none of the first {NUM_ROWS} rows is a usable prompt, so the rollout engine cannot be tested")
    return list(found.values())
