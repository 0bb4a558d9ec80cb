"""Setup of an answerer (a server, or an engine on this job's ranks), with the collectives that its ranks share."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import torch

from dsreason.checkpoints.export_digests import check_digests
from dsreason.config.schema import ModelConfig
from dsreason.config.schema_eval import EvalConfig
from dsreason.data.chat import Encoder
from dsreason.errors import ConfigError
from dsreason.evaluation.ask.asking import Answerer, Gather, wrap_in_list
from dsreason.evaluation.ask.engine import VERSION, EngineAnswerer
from dsreason.evaluation.ask.models import export_temporarily, find_run_weights, is_checkpoint, name_model
from dsreason.evaluation.ask.sampling import compute_max_tokens
from dsreason.evaluation.ask.server import ServerAnswerer
from dsreason.files.cache import get_cache_dir
from dsreason.job.ranks import World, gather_objects, init_world, run_first_rank_first, run_on_rank_zero, shutdown
from dsreason.models.folder import compute_fingerprint
from dsreason.models.load import build_checked_model, read_model_config, resolve_model
from dsreason.models.processors.loading import open_encoder
from dsreason.monitor.progress import Advance, open_progress
from dsreason.rollout.opening import EngineSettings, open_rollout_engine
from dsreason.rollout.protocol import RolloutEngine
from dsreason.rollout.transformers_engine import TransformersEngine, TransformersSettings
from dsreason.rollout.vllm_arguments import VLLMSettings, check_engine_options
from dsreason.secrets import hide_in_json
from dsreason.text import QuestionKind

TRANSFORMERS_BATCH = 64
"""Default number of questions that the transformers engine answers in one batch."""
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True)
class Answering:
    """An answerer, and this process's rank among the processes that have one. (Only one process queries a server.)"""

    answerer: Answerer
    batch_size: int | None
    """Number of questions to pass to the answerer at a time, always in the same batches. None passes all unanswered questions
    at once, because the answerer forms its own batches."""
    model: dict[str, str]
    """The model's `name` in the results, and the facts that identify it, such as its path and fingerprint."""
    rank: int = 0
    size: int = 1
    in_step: Gather = wrap_in_list
    """Function that gathers a value from the ranks that share a model. These ranks must call the answerer equally often."""

    def gather(self, value: Any) -> list[Any]:
        """Return all ranks' values, in rank order. Collective."""
        return gather_objects(value) if self.size > 1 else [value]

    def run_on_first_rank(self, call: Callable[[], None]) -> None:
        """Call `call` on the first rank; if it raises a DsReasonError, raise the error on all ranks. Collective."""
        if self.size > 1:
            run_on_rank_zero(call)
        else:
            call()

    @contextmanager
    def progress(self, num_questions: int) -> Iterator[Advance]:
        """Show progress on the first rank, which estimates the total over all ranks from its own count."""
        with (
            open_progress(rank=self.rank, total_steps=1) as progress,
            progress.track_phase("questions", num_questions, "questions") as advance,
        ):
            yield lambda count: advance(count * self.size)


OnModel = Callable[[dict[str, str]], None]


@contextmanager
def open_answering(config: EvalConfig, on_model: OnModel) -> Iterator[Answering]:
    """Join the job and start the engine, or connect to the server; close everything at the end of the block.

    `on_model` is called once, before the weights are loaded, with the model's name and the facts that identify it.
    """
    if config.server.url is not None:
        with closing(ServerAnswerer(config.server, config.evaluation.template_arguments)) as answerer:
            name, url = name_model(answerer.model), str(hide_in_json(config.server.url))
            model = {"name": name, "path": answerer.model, "server": url}
            on_model(model)
            yield Answering(answerer, None, model)
        return
    world = init_world()
    with ExitStack() as stack:
        stack.callback(shutdown)
        yield build_answering(config, world, stack, on_model)


def build_answering(config: EvalConfig, world: World, stack: ExitStack, on_model: OnModel) -> Answering:
    """Start an engine with the model's weights on every rank; it runs until `stack` closes. Collective."""
    if world.size % config.model.tensor_parallel_size:
        raise ConfigError(
            f"model.tensor_parallel_size ({config.model.tensor_parallel_size}) does not divide the number of ranks "
            f"({world.size}); change one of them"
        )
    path, name = find_model(config, world, stack)
    run_on_rank_zero(lambda: check_folder(config, path))
    model = {
        "name": name,
        "path": str(config.model.path),
        "fingerprint": compute_fingerprint(path),
        "dtype": choose_dtype_name(config, world),
    }
    run_on_rank_zero(lambda: on_model(model))
    dtype, length = choose_dtype(config, path, world), choose_max_length(config, path)
    encoder = open_encoder(
        path,
        dtype=dtype,
        max_length=compute_max_prompt_length(config, length),
        max_length_key=f"model.max_length ({length}) minus the longest answer",
        template_arguments=config.evaluation.template_arguments,
        template_key="evaluation.template_arguments",
        trust_remote_code=config.model.trust_remote_code,
    )
    engine = build_engine(config, path, encoder, dtype, length, world, stack)
    in_step = gather_objects if config.model.tensor_parallel_size > 1 else wrap_in_list
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", world.size))  # these ranks share the host's cores
    answerer = EngineAnswerer(
        engine,
        encoder,
        length,
        media_memory_gib=config.evaluation.media_memory_gib,
        workers=config.workers(max(1, len(os.sched_getaffinity(0)) // local_ranks)),
        in_step=in_step,
    )
    batch_size = config.evaluation.batch_size
    if batch_size is None and isinstance(engine, TransformersEngine):
        batch_size = engine.settings.batch_size
    return Answering(answerer, batch_size, model, world.rank, world.size, in_step)


def check_model(config: EvalConfig) -> None:
    """Check the model before ranks start. A checkpoint is not checked, because it has not been exported yet."""
    if config.server.url is not None:
        return
    own_weights = find_run_weights(str(config.model.path))
    if own_weights is None or not is_checkpoint(own_weights):
        check_folder(config, resolve_model_folder(config, own_weights))


def check_folder(config: EvalConfig, path: Path) -> None:
    """Check vLLM's options and a model folder, reading only the headers of the weights."""
    check_digests(path)
    check_engine_options(config.evaluation.engine_options, "evaluation.engine_options")
    compute_max_prompt_length(config, choose_max_length(config, path))
    build_checked_model(path, attention=config.model.attention, trust_remote_code=config.model.trust_remote_code)


def resolve_model_folder(config: EvalConfig, export: Path | None) -> Path:
    """Return the folder of a model that is not a checkpoint. If the model is a dsreason run, `export` is its export."""
    model = config.model
    path = str(export or model.path)
    settings = ModelConfig(path=path, revision=model.revision, trust_remote_code=model.trust_remote_code)
    return resolve_model(settings, get_cache_dir() / "models")


def compute_max_prompt_length(config: EvalConfig, length: int) -> int:
    """Return the maximum prompt length, in tokens, that leaves room for the longest first answer."""
    longest = max(compute_max_tokens(config, kind) for kind in get_args(QuestionKind))
    if longest >= length:
        raise ConfigError(
            f"generation.max_tokens ({longest}) leaves no room for a prompt in model.max_length ({length}); "
            "raise model.max_length, or lower generation.max_tokens"
        )
    return length - longest


def find_model(config: EvalConfig, world: World, stack: ExitStack) -> tuple[Path, str]:
    """Return the Hugging Face folder that `model.path` refers to (see `models.find_run_weights`), and the model's name.

    A checkpoint is exported to a temporary folder, which exists until `stack` closes. Collective.
    """
    own_weights = run_on_rank_zero(lambda: find_run_weights(str(config.model.path)))
    name = name_model(str(own_weights or config.model.path))
    if own_weights is not None and is_checkpoint(own_weights):
        dtype = {"float32": "fp32", "auto": "auto"}.get(choose_dtype_name(config, world), "bf16")
        results = Path(config.results_dir).expanduser().absolute()  # a folder that all ranks can read
        return run_on_rank_zero(lambda: stack.enter_context(export_temporarily(own_weights, results, dtype))), name
    with run_first_rank_first(world):
        return resolve_model_folder(config, own_weights), name


def choose_dtype_name(config: EvalConfig, world: World) -> str:
    return config.model.dtype or ("bfloat16" if world.device.type == "cuda" else "float32")


def choose_dtype(config: EvalConfig, path: Path, world: World) -> torch.dtype:
    name = choose_dtype_name(config, world)
    if name != "auto":
        return DTYPES[name]
    dtype = read_model_config(path, trust_remote_code=config.model.trust_remote_code).dtype
    return torch.float32 if dtype is None else dtype


def choose_max_length(config: EvalConfig, path: Path) -> int:
    """Return the maximum length of prompt plus answer, in tokens: the configured length, but at most the model's maximum."""
    model = read_model_config(path, trust_remote_code=config.model.trust_remote_code)
    longest = int(model.get_text_config().max_position_embeddings)
    return min(config.model.max_length or longest, longest)


def choose_engine(config: EvalConfig, world: World) -> str:
    """Choose the engine. `auto` uses vLLM only on a GPU or with tensor parallelism, because it starts too slowly on a CPU."""
    engine, tensor_parallel_size = config.model.engine, config.model.tensor_parallel_size
    installed = importlib.util.find_spec("vllm") is not None
    if engine == "vllm" and not installed:
        raise ConfigError(
            'model.engine is "vllm", but vLLM is not installed; install it, or set model.engine = "transformers"'
        )
    if engine == "transformers" and tensor_parallel_size > 1:
        raise ConfigError(
            f'model.tensor_parallel_size ({tensor_parallel_size}) requires model.engine = "vllm"; set it, or set '
            "tensor_parallel_size = 1 and use --nproc 1, which spreads a model larger than one GPU over all GPUs"
        )
    if engine != "auto":
        return engine
    wants_vllm = world.device.type == "cuda" or tensor_parallel_size > 1
    return "vllm" if wants_vllm and installed else "transformers"


def build_engine(
    config: EvalConfig, path: Path, encoder: Encoder, dtype: torch.dtype, length: int, world: World, stack: ExitStack
) -> RolloutEngine:
    """Start an engine that is awake and has loaded the weights in `path`; it runs until `stack` closes. Collective."""
    engine = open_rollout_engine(
        path,
        encoder.processor.tokenizer,
        world,
        make_engine_settings(config, length, world),
        dtype=dtype,
        loaded_version=VERSION,
        trust_remote_code=config.model.trust_remote_code,
    )
    return stack.enter_context(engine)


def make_engine_settings(config: EvalConfig, length: int, world: World) -> EngineSettings:
    model, options = config.model, config.evaluation.engine_options
    if choose_engine(config, world) == "vllm":
        return VLLMSettings(
            max_model_len=length,
            tensor_parallel_size=model.tensor_parallel_size,
            gpu_memory_utilization=model.gpu_memory_utilization,
            enforce_eager=model.enforce_eager,
            engine_options=options,
        )
    if options:
        raise ConfigError(
            f"evaluation.engine_options ({options}) apply only to vLLM, but the transformers engine is used; set "
            'model.engine = "vllm", or remove the options'
        )
    batch_size = config.evaluation.batch_size or TRANSFORMERS_BATCH
    return TransformersSettings(attention=model.attention, batch_size=batch_size)
