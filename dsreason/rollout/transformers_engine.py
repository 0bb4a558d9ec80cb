"""Rollout engine that samples from an unsharded transformers copy of the policy, without vLLM."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import PreTrainedTokenizerBase, TopKLogitsWarper, TopPLogitsWarper

from dsreason.data.collate import collate
from dsreason.data.types import EncodedSample
from dsreason.errors import CheckpointError
from dsreason.families import get_family
from dsreason.families.layer_types import has_delta_nets
from dsreason.models.attention import to_model_positions
from dsreason.models.generation import list_stop_ids, read_generation_config
from dsreason.models.load import build_empty_model, fill_buffers, read_model_config
from dsreason.models.media_features import patch_vision
from dsreason.models.placement import load_where_it_fits
from dsreason.models.policy import run_decoder
from dsreason.rollout.batches import cut_batches
from dsreason.rollout.protocol import (
    Completion,
    RolloutEngine,
    Sampling,
    SyncError,
    TensorFingerprints,
    check_no_media_tokens,
    check_version,
    draw_random_streams,
    find_media_token_ids,
    make_single_turn,
)
from dsreason.rollout.weight_sync import WeightStream, compute_fingerprints

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from dsreason.data.chat import EncodedPrompt

PAD_ID = 0
"""Id of padding tokens; padding is always masked, so any id would work."""


@dataclass(frozen=True, kw_only=True)
class TransformersSettings:
    """Settings of the transformers engine."""

    attention: str = "auto"
    batch_size: int = 8
    batch_tokens: int = 0
    """Maximum number of tokens, including completions and padding, in a batch with more than `batch_size` prompts; 0 disables
    such batches."""


class TransformersEngine(RolloutEngine):
    """`RolloutEngine` whose model exists only between `wake` and `sleep`; on a CPU, the model stays in memory."""

    reads_pixels = True

    def __init__(
        self,
        path: Path,
        tokenizer: PreTrainedTokenizerBase,
        settings: TransformersSettings = TransformersSettings(),
        *,
        dtype: torch.dtype,
        device: torch.device,
        trust_remote_code: bool = False,
    ) -> None:
        self.path, self.tokenizer, self.dtype, self.device = path, tokenizer, dtype, device
        self.settings, self.trust_remote_code = settings, trust_remote_code
        self.max_num_seqs = settings.batch_size
        self.stop_ids = torch.tensor(read_stop_token_ids(path), device=device)
        self.config = read_model_config(path, trust_remote_code=trust_remote_code)
        family = get_family(self.config.model_type)
        self.banned_ids = torch.tensor(find_media_token_ids(tokenizer, family), dtype=torch.long, device=device)
        self.model: PreTrainedModel | None = None
        self.awake = False
        self.version: int | None = None

    @property
    def keeps_weights(self) -> bool:
        return self.device.type != "cuda"

    @property
    def _awake_model(self) -> PreTrainedModel:
        assert self.model is not None, "the engine is asleep"
        return self.model

    def wake(self) -> None:
        if self.model is None:
            self.model = self._build_model()
        self.awake = True

    def load(self, version: int) -> None:
        """Wake the engine and load the weights in the model folder as version `version`."""
        self.model = load_where_it_fits(
            self.path,
            dtype=self.dtype,
            attention=self.settings.attention,
            device=self.device,
            trust_remote_code=self.trust_remote_code,
        )
        self.awake, self.version = True, version

    def find_retained(self, names: Collection[str]) -> set[str]:
        """Return an empty set, because every sync sends all weights."""
        return set()

    def sync(self, weights: Iterator[tuple[str, Tensor]], version: int, retained: Collection[str] = ()) -> None:
        if not self.awake:
            raise SyncError(f"weights (version {version}) were sent to a sleeping engine; wake it first")
        self.version = None  # a sync that fails halfway leaves no usable weights
        model = self._awake_model
        expected = {name: parameter.shape for name, parameter in model.named_parameters()}
        copy_weights(model, WeightStream(weights, expected, self.dtype, self.device))
        self.version = version

    def fingerprints(self) -> TensorFingerprints:
        model = self._awake_model
        return TensorFingerprints(
            compute_fingerprints(model.named_parameters()), compute_fingerprints(model.named_buffers())
        )

    def iter_completions(
        self, prompts: Sequence[EncodedPrompt], samplings: Sequence[Sampling], *, version: int, streams: Sequence[int]
    ) -> Iterator[tuple[int, Completion]]:
        """Complete the prompts in batches with equal sampling settings. Each prompt has its own random stream."""
        check_version(version, self.version if self.awake else None)
        for sampling in dict.fromkeys(samplings):
            positions = [i for i, prompt_sampling in enumerate(samplings) if prompt_sampling == sampling]
            lengths = {i: len(prompts[i].encoded) + sampling.max_completion_length for i in positions}
            for indices in cut_batches(lengths, self.settings.batch_size, self.settings.batch_tokens):
                rows = [prompts[index].encoded for index in indices]
                completions = self._complete_batch(rows, [streams[index] for index in indices], sampling, version)
                yield from zip(indices, completions, strict=True)

    def sleep(self) -> None:
        self.awake = False
        if not self.keeps_weights:
            self.model, self.version = None, None
            torch.cuda.empty_cache()

    def _build_model(self) -> PreTrainedModel:
        """Build the model with uninitialised weights."""
        model = build_empty_model(self.config, self.dtype, self.settings.attention, self.trust_remote_code)
        model.to_empty(device=self.device)
        model.tie_weights()
        fill_buffers(model, self.device)
        patch_vision(model)
        return model.requires_grad_(False).eval()

    def _complete_batch(
        self, rows: list[EncodedSample], streams: list[int], sampling: Sampling, version: int
    ) -> list[Completion]:
        steps = draw_tokens(
            self._awake_model,
            rows,
            streams,
            sampling,
            banned_ids=self.banned_ids,
            stop_ids=self.stop_ids,
        )
        ids, logprobs = (torch.stack(step_values, 1).tolist() for step_values in zip(*steps, strict=True))
        return [
            self._build_completion(row.id, row_ids, row_logprobs, version)
            for row, row_ids, row_logprobs in zip(rows, ids, logprobs, strict=True)
        ]

    def _build_completion(self, sample_id: str, ids: list[int], logprobs: list[float], version: int) -> Completion:
        """Build a completion; tokens after the stop token, which were sampled while other rows were unfinished, are dropped."""
        stops = set(self.stop_ids.tolist())
        length = next((i + 1 for i, token in enumerate(ids) if token in stops), None)
        ids, logprobs = ids[:length], logprobs[:length]
        check_no_media_tokens(sample_id, ids, self.banned_ids.tolist(), self.tokenizer)
        return make_single_turn(
            ids=tuple(ids),
            text=self.tokenizer.decode(ids, skip_special_tokens=True),
            logprobs=tuple(logprobs),
            finish_reason="length" if length is None else "stop",
            version=version,
        )


@torch.no_grad()
def draw_tokens(
    model: PreTrainedModel,
    rows: Sequence[EncodedSample],
    streams: Sequence[int],
    sampling: Sampling,
    *,
    banned_ids: Tensor,
    stop_ids: Tensor,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield, for each decoding step, the tokens sampled for the `B` rows and their log-probabilities, both `[B]`.

    Sampling ends when every row has sampled a stop token; until then, finished rows keep sampling. The function computes
    positions itself, without transformers' generation state. The model's layers may be on several devices; inputs and
    sampled tokens are on the device of `banned_ids`.
    """
    prompts = list({id(row): row for row in rows}.values())  # completions of a prompt share one prefill
    index_by_prompt = {id(prompt): i for i, prompt in enumerate(prompts)}
    device = banned_ids.device
    prompt_indices = torch.tensor([index_by_prompt[id(row)] for row in rows])  # [B]
    device_indices = prompt_indices.to(device)
    # Padding after a prompt would change the state of a delta net, with which decoding starts.
    side: Literal["left", "right"] = "left" if has_delta_nets(model.config.get_text_config()) else "right"
    batch = collate(prompts, pad_id=PAD_ID, padding_side=side).to(device)
    output = run_decoder(model, batch, use_cache=True)
    assert batch.attention_mask is not None  # the rows are padded
    last = batch.attention_mask.cumsum(1).argmax(1)  # the first token whose count is the highest
    hidden = output.last_hidden_state.to(device)[device_indices, last[device_indices]]
    cache = output.past_key_values
    cache.reorder_cache(prompt_indices)  # unlike batch_select_indices, also supported by delta nets
    attention = pad(batch.attention_mask[device_indices], (0, sampling.max_completion_length), value=1)
    # Completion positions start after the prompt's largest position on any axis.
    next_position = batch.position_ids.amax(dim=(0, 2))[device_indices] + 1
    uniform = torch.from_numpy(draw_random_streams(sampling, streams)).to(device)
    head = model.get_output_embeddings()
    width, vocabulary = batch.input_ids.shape[1], head.weight.shape[0]
    penalties = Penalties(sampling, rows, vocabulary, device) if sampling.has_penalties else None
    finished = torch.zeros(len(rows), dtype=torch.bool, device=device)
    for step in range(sampling.max_completion_length):
        logits = head(hidden).to(device).float()  # [B, V]
        if penalties is not None:
            logits = penalties.apply(logits)
        logits[:, banned_ids] = -torch.inf
        token, logprob = draw(logits, sampling, uniform[:, step])
        yield token, logprob
        finished |= torch.isin(token, stop_ids)
        if finished.all() or step == sampling.max_completion_length - 1:
            return
        if penalties is not None:
            penalties.count(token)
        output = model.model(
            input_ids=token[:, None],
            position_ids=to_model_positions(model, (next_position + step).expand(3, -1)[:, :, None]),
            attention_mask=attention[:, : width + step + 1],
            past_key_values=cache,
            use_cache=True,
        )
        hidden = output.last_hidden_state[:, -1].to(device)


@torch.no_grad()
def copy_weights(model: nn.Module, sending: WeightStream) -> None:
    """Copy each tensor to the parameter of the same name; tied parameters have only the first of their names.

    Raises:
        SyncError: a tensor is missing or wrong.
    """
    parameters = dict(model.named_parameters())
    for name, tensor in sending:
        parameters[name].copy_(tensor)
    sending.finish()


def read_stop_token_ids(path: Path) -> list[int]:
    """Return the ids of the tokens that end a completion.

    The ids are taken from the generation config or, if the folder has none, from the model config; the token that ends a turn in
    the chat template is added.

    Raises:
        CheckpointError: `eos_token_id` is missing, or is neither a token id nor a list of token ids.
    """
    eos_token_id = read_generation_config(path, read_model_config(path)).eos_token_id
    stop_ids = list_stop_ids(eos_token_id)
    if not stop_ids:
        file = "generation_config.json" if (path / "generation_config.json").is_file() else "config.json"
        raise CheckpointError(
            f"{path}: eos_token_id in {file} is {eos_token_id!r:.100}, but it must be a token id or a list of token ids; correct "
            "it, otherwise completions never end"
        )
    return stop_ids


class Penalties:
    """Penalties that change the logits of tokens that have already been used, for `B` rows and a vocabulary of `V` tokens.

    Source: `apply_penalties` in vLLM; the repetition penalty is from CTRL (arXiv:1909.05858), the others from OpenAI's API.
    """

    def __init__(
        self, sampling: Sampling, rows: Sequence[EncodedSample], vocabulary: int, device: torch.device
    ) -> None:
        self.sampling = sampling
        self.in_prompt = torch.zeros(len(rows), vocabulary, dtype=torch.bool, device=device)
        for row_mask, row in zip(self.in_prompt, rows, strict=True):
            row_mask[row.input_ids.to(device)] = True
        self.counts = torch.zeros(len(rows), vocabulary, device=device)

    def apply(self, logits: Tensor) -> Tensor:
        factor = self.sampling.repetition_penalty
        repeated = torch.where(logits > 0, logits / factor, logits * factor)
        logits = torch.where(self.in_prompt | (self.counts > 0), repeated, logits)
        logits = logits - self.sampling.frequency_penalty * self.counts
        return logits - self.sampling.presence_penalty * (self.counts > 0)

    def count(self, tokens: Tensor) -> None:
        self.counts.scatter_add_(1, tokens[:, None], torch.ones_like(tokens[:, None], dtype=self.counts.dtype))


def draw(logits: Tensor, sampling: Sampling, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Sample one token per row; return the tokens and their log-probabilities, both `[B]`.

    This is inverse transform sampling: it selects the first token whose cumulative probability exceeds the row's uniform number.

    Args:
        logits: `[B, V]`, float32.
        uniform: `[B]`, in [0, 1).
    """
    if sampling.temperature == 0:
        token = logits.argmax(dim=-1)
        return token, logits.log_softmax(dim=-1).gather(1, token[:, None]).squeeze(1)
    logits = logits / sampling.temperature
    if sampling.top_k > 0:
        logits = TopKLogitsWarper(sampling.top_k)(None, logits)
    if sampling.top_p < 1:
        logits = TopPLogitsWarper(sampling.top_p)(None, logits)
    logprobs = logits.log_softmax(dim=-1)
    cumulated = logprobs.double().exp().cumsum(dim=-1)
    # The threshold is scaled, because rounding makes the last cumulative value differ from 1. `right` skips zero probabilities.
    threshold = uniform[:, None].double() * cumulated[:, -1:]
    token = torch.searchsorted(cumulated, threshold, right=True).clamp_(max=logits.shape[1] - 1)
    return token.squeeze(1), logprobs.gather(1, token).squeeze(1)
