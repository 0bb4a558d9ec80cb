"""Merged adapters in both rollout engines, and the exported adapter in vLLM's LoRA support: both agree with the policy, and
faults are reported."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.distributed import run_on_ranks
from tests.integration.lora import LORA, disturb
from tests.integration.test_vllm_engine import CASES, GATE, KEY, Explorer, Setup, failure

pytestmark = pytest.mark.integration

SETUPS = (Setup("qwen2_5_vl", 1, 1, tied=True), Setup("qwen3_vl", 2, 2, tied=False))
TEXT = {"rank": 8, "rslora": True, "rank_pattern": {r"layers\.0\.": 4}, "alpha_pattern": {"_proj": 6.5}}


class LoRAExplorer(Explorer):
    """An explorer whose policy has adapters: training changes only the adapters, and the engines get the merged weights."""

    def __init__(self, setup: Setup, folder: Path) -> None:
        super().__init__(setup, folder)
        add_adapters(self.policy.model, LORA)
        disturb(self.policy, 1)

    def weights(self, without: Collection[str] = ()) -> Iterator[tuple[str, Tensor]]:
        from dsreason.engine.merged import iter_merged_parameters

        engine: Any = SimpleNamespace(module=self.policy)
        for name, merged in iter_merged_parameters(engine, without=without):
            tensor = merged.clone()
            yield name, tensor
            tensor.fill_(torch.nan)

    def fault(self, name: str, *, base: bool) -> tuple[str, str]:
        """Return the error that a sync raises if vLLM does not get the weight `name`, or gets the weight without its adapter."""
        self.engine.sync(self.weights(), 1)
        disturb(self.policy, 3)
        layer = self.policy.model.get_submodule(name.removesuffix(".weight"))
        original = self.engine.llm.collective_rpc

        def changed(weights: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
            for item, tensor in weights:
                if item != name:
                    yield item, tensor
                elif base:
                    yield item, layer.base_layer.weight.detach().clone()

        self.engine.llm.collective_rpc = lambda method, kwargs: original(
            method, kwargs={"weights_iterator": changed(kwargs["weights_iterator"])}
        )
        try:
            return failure(lambda: self.engine.sync(self.weights(), 2))
        finally:
            self.engine.llm.collective_rpc = original


def add_adapters(model: Any, lora: dict[str, Any]) -> None:
    from dsreason.config.schema_lora import LoRAConfig
    from dsreason.models import lora as adapters

    adapters.add_adapters(model, LoRAConfig.model_validate(lora), seed=0)


def explore(setup: Setup, folder: Path) -> dict[str, Any]:
    from dsreason.engine.merged import list_constant_names

    explorer = LoRAExplorer(setup, folder)
    engine = explorer.engine
    engine.wake()
    engine.sync(explorer.weights(), 1)
    result: dict[str, Any] = {"merged": explorer.differences(version=1)}
    disturb(explorer.policy, 2)
    result["sync skipped"] = explorer.differences(version=1)
    engine.sleep()
    engine.wake()
    policy: Any = SimpleNamespace(module=explorer.policy)
    retained = engine.find_retained(list_constant_names(policy))
    engine.sync(explorer.weights(without=retained), 2, retained)
    result["retained"], result["merged again"] = sorted(retained), explorer.differences(version=2)
    result["stale"] = explorer.fault(GATE, base=False)
    result["partial"] = explorer.fault(KEY, base=True)
    engine.sync(explorer.weights(), 3)
    result["mended"] = explorer.differences(version=3)
    result |= explore_quantized(explorer, folder)
    engine.shutdown()
    result["transformers"] = explore_transformers(explorer, folder)
    torch.distributed.barrier()
    return result


def explore_quantized(explorer: LoRAExplorer, folder: Path) -> dict[str, Any]:
    """Return the differences before and after a sync of the same adapters on a 4-bit base."""
    from dsreason.models.load import load_model
    from dsreason.models.policy import Policy

    unquantized = explorer.policy
    explorer.policy = Policy(load_model(folder / "model", dtype=torch.float32, quantize="nf4")).eval()
    add_adapters(explorer.policy.model, LORA)
    adapters = {name: item for name, item in unquantized.state_dict().items() if "lora_" in name}
    explorer.policy.load_state_dict(adapters, strict=False)
    result = {"not quantized": explorer.differences(version=3)}
    explorer.engine.sync(explorer.weights(), 4)
    result["quantized"] = explorer.differences(version=4)
    explorer.policy = unquantized
    return result


def explore_transformers(explorer: LoRAExplorer, folder: Path) -> dict[str, float]:
    from dsreason.rollout.transformers_engine import TransformersEngine, TransformersSettings

    tokenizer, device = explorer.engine.tokenizer, torch.device("cpu")
    settings = TransformersSettings(batch_size=8)
    engine: Any = TransformersEngine(folder / "model", tokenizer, settings, dtype=torch.float32, device=device)
    engine.wake()
    engine.sync(explorer.weights(), 4)
    explorer.engine = engine
    return explorer.differences(version=4)


@pytest.fixture(
    scope="module",
    params=[SETUPS[0], pytest.param(SETUPS[1], marks=pytest.mark.nightly)],
    ids=lambda s: f"{s.family}-tp{s.tensor_parallel_size}x{s.ranks}",
)
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    from dsreason.models.tiny import build_tiny

    setup = request.param
    folder = tmp_path_factory.mktemp("lora_engine")
    build_tiny(setup.family, folder / "model", tie_embeddings=setup.tied)
    return run_on_ranks(explore, setup.ranks, setup, folder)


@pytest.mark.parametrize("when", ["merged", "merged again", "mended", "quantized", "transformers"])
def test_engine_with_merged_weights_matches_policy(found: list[dict[str, Any]], when: str) -> None:
    for rank in found:
        assert rank[when].keys() == set(CASES)
        assert max(rank[when].values()) <= 1e-5


@pytest.mark.parametrize("when", ["sync skipped", "not quantized"])
def test_skipped_sync_breaks_engine_parity(found: list[dict[str, Any]], when: str) -> None:
    for rank in found:
        assert min(rank[when].values()) > 1e-3


def test_engine_retains_only_weights_without_adapters(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert "model.language_model.norm.weight" in rank["retained"]
        assert not [name for name in rank["retained"] if "_proj" in name or "attn.qkv.weight" in name]


@pytest.mark.parametrize(("fault", "name"), [("stale", GATE), ("partial", KEY)])
def test_tensor_synced_without_its_adapter_is_reported(found: list[dict[str, Any]], fault: str, name: str) -> None:
    for rank in found:
        raised, text = rank[fault]
        assert raised == "SyncError"
        assert f"{name} was sent, but the engine's" in text


# ---------------------------------------------------------------- vLLM's own LoRA


def serve_adapter(folder: str) -> float:
    """Return the largest |difference| between log-probabilities of the policy and of vLLM, which has the exported adapter
    beside the base."""
    import os

    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="1", VLLM_CPU_OMP_THREADS_BIND="nobind"
    )
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    from dsreason.models.load import load_model

    model = load_model(Path(folder) / "model", dtype=torch.float32, attention="sdpa").eval()
    add_adapters(model, TEXT)
    disturb(model, 1)
    write(model, Path(folder))
    llm = LLM(
        f"{folder}/model",
        **{"dtype": "float32", "max_model_len": 128, "enforce_eager": True, "limit_mm_per_prompt": {}},
        **{"enable_lora": True, "max_lora_rank": 8, "max_loras": 1, "lora_dtype": "auto"},
    )
    prompt = list(range(40, 60))
    (output,) = llm.generate(
        [{"prompt_token_ids": prompt}],
        SamplingParams(temperature=0, max_tokens=10, logprobs=0, ignore_eos=True),
        lora_request=LoRARequest("policy", 1, f"{folder}/adapter"),
    )
    ids = torch.tensor([*prompt, *output.outputs[0].token_ids])
    positions = torch.arange(len(ids)).expand(3, 1, -1)
    with torch.no_grad():
        logprobs = model(input_ids=ids[None], position_ids=positions).logits[0].log_softmax(-1)
    squeeze = logprobs[len(prompt) - 1 : -1].gather(1, ids[len(prompt) :, None]).squeeze(1)
    reference = [next(iter(logprob.values())).logprob for logprob in output.outputs[0].logprobs]
    return float((squeeze - torch.tensor(reference)).abs().max())


def write(model: Any, folder: Path) -> None:
    """Write `folder/adapter` the way an export does."""
    from dsreason.checkpoints.adapter import Merge, write_adapter
    from dsreason.checkpoints.checkpoint_folder import SavedAdapter
    from dsreason.engine.merged import iter_unmerged_parameters
    from dsreason.models.lora import get_adapter_scales, get_adapter_settings

    policy: Any = SimpleNamespace(module=torch.nn.ModuleDict({"model": model}))
    merge = Merge("fp32", SavedAdapter("base", None, "", get_adapter_settings(model), get_adapter_scales(model)))
    for _ in merge.merge_weights(iter_unmerged_parameters(policy)):
        pass
    write_adapter(merge, folder)


@pytest.mark.long
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_vllm_serves_exported_adapter_on_base(family: str, tmp_path: Path) -> None:
    from dsreason.models.tiny import build_tiny

    build_tiny(family, tmp_path / "model")
    assert run_on_ranks(serve_adapter, 1, str(tmp_path))[0] <= 1e-5
