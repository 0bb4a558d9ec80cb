"""Rollouts from a plain transformers copy of the policy: no vLLM, no ZeRO partitions."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import AutoConfig, AutoModelForImageTextToText, GenerationConfig, PreTrainedTokenizerBase
from transformers.initialization import no_init_weights
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

from dsreason.data.types import EncodedSample
from dsreason.models.families import family_of
from dsreason.models.load import model_config
from dsreason.rollout.protocol import (
    Completion,
    Sampling,
    StaleWeightsError,
    SyncError,
    media_token_ids,
    random_streams,
)

if TYPE_CHECKING:
    from dsreason.data.chat import EncodedPrompt


class TransformersEngine:
    """A `RolloutEngine` whose model exists from `wake` to `sleep` (on a CPU it stays: there is nothing to hand back)."""

    def __init__(
        self,
        path: Path,
        tokenizer: PreTrainedTokenizerBase,
        *,
        dtype: torch.dtype,
        device: torch.device,
        attention: str = "auto",
        batch_size: int = 8,
        trust_remote_code: bool = False,
    ) -> None:
        self.path, self.tokenizer, self.dtype, self.device = path, tokenizer, dtype, device
        self.attention, self.batch_size, self.trust_remote_code = attention, batch_size, trust_remote_code
        self.pad_id = 0  # masked everywhere, so any id will do
        self.stop_ids = torch.tensor(stop_token_ids(path), device=device)
        self.banned_ids = torch.tensor(media_token_ids(tokenizer), dtype=torch.long, device=device)
        self.model: nn.Module | None = None
        self.awake = False
        self.version: int | None = None
        self._stats: dict[str, float] = {}

    def wake(self) -> None:
        start = time.perf_counter()
        if self.model is None:
            self.model = build_empty_model(
                self.path,
                dtype=self.dtype,
                device=self.device,
                attention=self.attention,
                trust_remote_code=self.trust_remote_code,
            )
        self.awake = True
        self._stats["time/wake"] = time.perf_counter() - start

    def sync(self, weights: Iterator[tuple[str, Tensor]], version: int) -> None:
        start = time.perf_counter()
        if not self.awake:
            raise SyncError(f"weights version {version} were sent to a sleeping engine: wake it first")
        self.version = None  # a sync that fails half-way leaves no usable weights
        copy_weights(self.model, weights)
        self.version = version
        self._stats["time/sync"] = time.perf_counter() - start

    @torch.no_grad()
    def generate(self, prompts: Sequence[EncodedPrompt], sampling: Sampling, *, version: int) -> list[Completion]:
        if self.version != version:
            raise StaleWeightsError(
                f"completions of weights version {version} were asked for, the engine holds "
                f"{'no weights' if self.version is None else f'version {self.version}'}: sync before generate"
            )
        start = time.perf_counter()
        # Prompts of like length share a batch, which spares padding; each is drawn from its own random stream.
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i].encoded))
        completions: dict[int, Completion] = {}
        for i in range(0, len(order), self.batch_size):
            indices = order[i : i + self.batch_size]
            rows = [prompts[index].encoded for index in indices]
            completions.update(zip(indices, self._complete(rows, indices, sampling), strict=True))
        seconds = time.perf_counter() - start
        tokens = sum(len(completion.ids) for completion in completions.values())
        self._stats |= {
            "time/rollout": seconds,
            "rollout/tokens": tokens,
            "rollout/tokens_per_second": tokens / seconds,
        }
        return [completions[i] for i in range(len(prompts))]

    def sleep(self) -> None:
        start = time.perf_counter()
        self.awake, self.version = False, None
        if self.device.type == "cuda":
            self.model = None
            torch.cuda.empty_cache()
        self._stats["time/sleep"] = time.perf_counter() - start

    def stats(self) -> dict[str, float]:
        """`time/{wake,sync,rollout,sleep}` in seconds, `rollout/tokens` drawn and `rollout/tokens_per_second`."""
        return dict(self._stats)

    def _complete(self, rows: list[EncodedSample], indices: list[int], sampling: Sampling) -> list[Completion]:
        """One batch. The positions are ours all the way, so nothing of transformers' own generation state is used."""
        inputs = left_padded(rows, self.pad_id, self.device)
        attention = pad(inputs.pop("attention_mask"), (0, sampling.max_completion_length), value=1)
        next_position = inputs["position_ids"].amax(dim=(0, 2)) + 1  # [B]: text goes on after the largest of all axes
        uniform = torch.from_numpy(random_streams(sampling, indices)).to(self.device)
        width = inputs["input_ids"].shape[1]
        finished = torch.zeros(len(rows), dtype=torch.bool, device=self.device)
        ids, logprobs, cache = [], [], None
        for step in range(sampling.max_completion_length):
            mask = attention[:, : width + step]
            output = self.model.model(attention_mask=mask, past_key_values=cache, use_cache=True, **inputs)
            cache = output.past_key_values
            logits = self.model.lm_head(output.last_hidden_state[:, -1]).float()  # [B, V]
            logits[:, self.banned_ids] = -torch.inf
            token, logprob = draw(logits, sampling, uniform[:, step])
            ids.append(token)
            logprobs.append(logprob)
            finished |= torch.isin(token, self.stop_ids)
            if finished.all():
                break
            position = (next_position + step).expand(3, -1)[:, :, None]
            inputs = {"input_ids": token[:, None], "position_ids": position}
        drawn = zip(torch.stack(ids, 1).tolist(), torch.stack(logprobs, 1).tolist(), strict=True)
        return [self._completion(*row) for row in drawn]

    def _completion(self, ids: list[int], logprobs: list[float]) -> Completion:
        """Cuts off what a finished row went on drawing beside its unfinished neighbours."""
        stops = set(self.stop_ids.tolist())
        length = next((i + 1 for i, token in enumerate(ids) if token in stops), None)
        ids, logprobs = ids[:length], logprobs[:length]
        return Completion(
            ids=tuple(ids),
            text=self.tokenizer.decode(ids, skip_special_tokens=True),
            logprobs=tuple(logprobs),
            finish_reason="length" if length is None else "stop",
            version=self.version,
        )


def build_empty_model(
    path: Path, *, dtype: torch.dtype, device: torch.device, attention: str = "auto", trust_remote_code: bool = False
) -> nn.Module:
    """The folder's architecture with whatever memory holds for weights; the RNG state is left as it was."""
    if is_deepspeed_zero3_enabled():
        raise RuntimeError("transformers' global ZeRO-3 flag is set: it would partition the rollout copy")
    config = model_config(path, trust_remote_code=trust_remote_code)
    implementation = "sdpa" if attention == "auto" else attention
    cuda = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=cuda), torch.device(device), no_init_weights():
        model = AutoModelForImageTextToText.from_config(
            config, dtype=dtype, attn_implementation=implementation, trust_remote_code=trust_remote_code
        )
    model.tie_weights()
    family_of(config.model_type).patch(model)
    return model.requires_grad_(False).eval()


@torch.no_grad()
def copy_weights(model: nn.Module, weights: Iterator[tuple[str, Tensor]]) -> None:
    """Copies each tensor into the parameter of its name; all of them must come, under one of their names if tied.

    The iterator is read to its end even after a wrong tensor, because every rank must take part in every gather.
    """
    targets = dict(model.named_parameters(remove_duplicate=False))
    missing = {id(parameter): name for name, parameter in model.named_parameters()}
    wrong = []
    for name, tensor in weights:
        if name not in targets:
            wrong.append(f"{name} is unknown")
        elif targets[name].shape != tensor.shape:
            wrong.append(f"{name} has shape {tuple(tensor.shape)} instead of {tuple(targets[name].shape)}")
        else:
            targets[name].copy_(tensor)
            missing.pop(id(targets[name]), None)
    wrong += [f"{name} did not arrive" for name in missing.values()]
    if wrong:
        raise SyncError(f"weight sync failed for {len(wrong)} tensors: " + "; ".join(wrong[:20]))


def stop_token_ids(path: Path) -> list[int]:
    """The end-of-sequence ids of the folder's generation config, or of its model config where it has none."""
    if (path / "generation_config.json").exists():
        config = GenerationConfig.from_pretrained(path)
    else:
        config = GenerationConfig.from_model_config(AutoConfig.from_pretrained(path))
    if config.eos_token_id is None:
        raise ValueError(f"{path}: neither generation_config.json nor config.json names an eos_token_id")
    return [config.eos_token_id] if isinstance(config.eos_token_id, int) else list(config.eos_token_id)


def left_padded(rows: Sequence[EncodedSample], pad_id: int, device: torch.device) -> dict[str, Tensor]:
    """The forward's arguments for prompts that end in the same column: ids `[B, T]`, positions `[3, B, T]`, media."""
    width = max(len(row) for row in rows)

    def stack(tensors: list[Tensor], value: int, dim: int) -> Tensor:
        return torch.stack([pad(t, (width - t.shape[-1], 0), value=value) for t in tensors], dim).to(device)

    inputs = {
        "input_ids": stack([row.input_ids for row in rows], pad_id, 0),
        "attention_mask": stack([torch.ones_like(row.input_ids) for row in rows], 0, 0),
        "position_ids": stack([row.position_ids for row in rows], 0, 1),
        "mm_token_type_ids": stack([row.mm_token_type_ids for row in rows], 0, 0),
    }
    for key in sorted({key for row in rows for key in row.mm_kwargs}):
        inputs[key] = torch.cat([row.mm_kwargs[key] for row in rows if key in row.mm_kwargs]).to(device)
    return inputs


def draw(logits: Tensor, sampling: Sampling, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """One token a row and its log-probability: `logits` `[B, V]` float32, `uniform` `[B]` in [0, 1), results `[B]`.

    Inverse transform sampling: the first token at which the cumulated probability exceeds the row's uniform number.
    """
    if sampling.temperature == 0:
        token = logits.argmax(dim=-1)
        return token, logits.log_softmax(dim=-1).gather(1, token[:, None]).squeeze(1)
    logprobs = keep_most_probable(logits / sampling.temperature, sampling).log_softmax(dim=-1)
    cumulated = logprobs.double().exp().cumsum(dim=-1)
    # Scaled by the last value, which rounding leaves beside 1; `right` skips tokens of probability 0.
    threshold = uniform[:, None].double() * cumulated[:, -1:]
    token = torch.searchsorted(cumulated, threshold, right=True).clamp_(max=logits.shape[1] - 1)
    return token.squeeze(1), logprobs.gather(1, token).squeeze(1)


def keep_most_probable(logits: Tensor, sampling: Sampling) -> Tensor:
    """Logits `[B, V]` with those outside of top_k and top_p (nucleus sampling, arXiv:1904.09751) at -inf."""
    if sampling.top_k > 0:
        smallest = logits.topk(min(sampling.top_k, logits.shape[1]), dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < smallest, -torch.inf)
    if sampling.top_p < 1:
        ordered, order = logits.sort(dim=-1, descending=True)
        probs = ordered.softmax(dim=-1)
        outside = probs.cumsum(dim=-1) - probs >= sampling.top_p  # what comes before the token reaches top_p already
        logits = logits.masked_fill(outside.scatter(1, order, outside), -torch.inf)
    return logits
