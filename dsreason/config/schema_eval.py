"""The schema of an evaluation's configuration. cosmos-reason1's `evaluate.yaml` loads as it is."""

from __future__ import annotations

import re
from collections.abc import Set
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import SplitResult, urlsplit

from pydantic import AfterValidator, AliasChoices, Field, ValidationError, field_validator, model_validator

from dsreason.config.engine_options import EVALUATION, check_owned
from dsreason.config.keys import aliases
from dsreason.config.schema_data import SourceConfig, VisionConfig
from dsreason.config.section import Section, check_temperature
from dsreason.text import QuestionKind

PENALTIES = frozenset({"repetition_penalty", "presence_penalty", "frequency_penalty"})
DEFAULT_FPS = 4.0
"""cosmos-reason1's."""


class EvalSourceConfig(SourceConfig):
    """Questions from a data set's rows. What its own `vision` leaves unset is that of `[vision]`."""

    name: str | None = None
    """What the data set is called in the results; unset: `subset`, else the name of the file or folder, else the adapter's."""
    kind: QuestionKind | None = None
    """How the answers are graded; unset: each row's `question_kind`, else by its options and answer."""

    @property
    def dataset(self) -> str:
        """`name`, or what stands for it."""
        adapter = self.adapter.rpartition(":")[0] or self.adapter
        return self.name or self.subset or Path(self.path).stem or Path(adapter).stem


class EvalModelConfig(Section):
    """The model that answers, in this job. Of a server, see `[server]`."""

    path: str | None = Field(None, validation_alias=AliasChoices("path", "model_name"))
    """Hugging Face folder or hub name, or a run of ours (its final export, or a checkpoint completed after it) or one of its
    checkpoints; `tiny:qwen2_5_vl` and `tiny:qwen3_vl` are random models. Another name of this key is `model_name`."""
    revision: str | None = None
    """Hub revision."""
    tokenizer_model_name: str | None = None
    """Accepted and not used: tokenizer and processor are those in the model's folder."""
    dtype: Literal["bfloat16", "float16", "float32", "auto"] | None = None
    """Of the weights; `auto`: what the model's config.json says. Unset: bfloat16 on a GPU, float32 on CPUs, where an answer
    then does not depend on which others are in its batch."""
    tensor_parallel_size: int = Field(
        1, ge=1, le=1024, validation_alias=AliasChoices("tensor_parallel_size", "tp_size")
    )
    """GPUs that hold one copy of the model together. Another name of this key is `tp_size`."""
    max_length: int | None = Field(None, ge=8)
    """Longest prompt and answer together, in tokens; unset: what the model can take."""
    engine: Literal["auto", "vllm", "transformers"] = "auto"
    """`auto`: vLLM where it is installed and knows the model. The transformers engine spreads a model that is larger than one
    GPU over those of its rank (`--nproc 1`: all of the host), and leaves what fits nowhere in its files, which is slow."""
    gpu_memory_utilization: float = Field(0.9, gt=0, lt=1)
    """Share of a GPU's memory that vLLM may use."""
    enforce_eager: bool = False
    """vLLM: do without compiled graphs, which saves memory and start-up time and costs speed."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model. Only for code you have read."""
    attention: Literal["auto", "sdpa", "eager", "flash_attention_2", "flash_attention_3"] = "auto"
    """Of the transformers engine; `auto` takes torch's scaled-dot-product attention."""

    @model_validator(mode="before")
    @classmethod
    def check_named_once(cls, document: Any) -> Any:
        """Of a setting with two names one may be given, or both with the same value."""
        if not isinstance(document, dict):
            return document
        once = dict(document)
        for field in cls.model_fields.values():
            names_given = [name for name in aliases(field) if name in once]
            if len(names_given) < 2:
                continue
            if len({repr(once[name]) for name in names_given}) > 1:
                values = " and ".join(f"{name} ({once[name]!r})" for name in names_given)
                raise ValueError(f"{values} are two names of one setting; remove one")
            del once[names_given[1]]
        return once


class ServerConfig(Section):
    """An OpenAI-compatible server that answers instead of `[model]`."""

    url: str | None = None
    """Address, such as `http://localhost:8000/v1` (the `/v1` may be left out)."""
    model: str | None = None
    """The model's name there; unset: the only one that the server lists."""
    api_key_env: str = "OPENAI_API_KEY"
    """Environment variable that holds the key; the key itself is never written here. Unset there: none is sent."""
    concurrency: int = Field(16, ge=1, le=1024)
    """Requests at the same time."""
    time_limit: float = Field(120.0, gt=0)
    """Seconds that one attempt of a request may take."""
    max_retries: int = Field(5, ge=0)
    """Further attempts of a request that failed, after pauses that double (or as long as the server says)."""
    video: Literal["file", "frames"] = "file"
    """Send a clip as a video, or its frames as pictures. vLLM takes videos when started with `--trust-request-mm-kwargs`."""

    @field_validator("url")
    @classmethod
    def check_url(cls, url: str | None) -> str | None:
        if url is None:
            return None
        parts = urlsplit(url)
        if parts.password is not None:
            raise ValueError("holds a password, which would be written to the results; give it by api_key_env")
        if parts.query or parts.fragment:
            raise ValueError("has a ? or # part, and the paths of the interface are put behind it; leave it out")
        if parts.scheme not in ("http", "https") or not parts.hostname or not has_port(parts):
            raise ValueError(f"{url!r} is not the address of a server; write one such as http://localhost:8000/v1")
        return url


def has_port(parts: SplitResult) -> bool:
    """Return whether the port, if one is given, is a number that a port can have."""
    try:
        return parts.port != 0
    except ValueError:
        return False


class EvaluationConfig(Section):
    answer_type: Literal["letter", "reasoning"] = "letter"
    """`letter` asks for the answer alone, `reasoning` for `<think>…</think> <answer>…</answer>`."""
    parser: Literal["default", "compat"] = "default"
    """How answers are read; `compat` is exactly cosmos-reason1's, which takes the first capital letter."""
    num_processes: int | None = Field(None, ge=1)
    """Workers that decode media, at most one a core; unset: one a core."""
    batch_size: int | None = Field(None, ge=1)
    """Questions that are given to the engine at a time, always the same ones together: an evaluation that was interrupted
    then gives the same answers in any precision. Unset: vLLM gets all that are missing, the transformers engine 64."""
    media_memory_gib: float = Field(4.0, gt=0)
    """GiB of host memory on one rank for decoded media that wait for an engine. Where all need more, each part that it
    gets has at least as many questions as it answers at a time."""
    skip_saved: bool = True
    """Accepted and not used: saved answers are always kept, unless `overwrite` is set."""
    overwrite: bool = False
    """Delete the results of an earlier evaluation of the same model, answer type and data set first."""
    fps: float = Field(DEFAULT_FPS, gt=0)
    """Frames per second to sample from a video, where `[vision]` sets neither `fps` nor `nframes`."""
    seed: int = Field(1, ge=0)
    """Seed of sampling."""
    limit: int | None = Field(None, ge=1)
    """At most this many questions in all: the first ones of each data set, as many of one as of another."""
    system_prompt: str | None = None
    """System message; "": none. Unset: "Answer the questions." for benchmark folders, and rows keep their own."""
    similarity_model: str | None = None
    """Folder of a sentence-embedding model, for the semantic similarity of free texts."""
    scorer: str | None = None
    """A reward, built in or of your own (`package.module:attr`, `file.py:attr`), that scores each answer too. The report has
    its mean; what is right goes by the questions' kinds unless `scorer_threshold` is set."""
    scorer_options: dict[str, Any] = {}
    """Arguments of `scorer`, as `[reward.options]` has them."""
    scorer_threshold: float | None = Field(None, allow_inf_nan=False)
    """An answer is right where `scorer` gives at least this and something was read in it. Unset: `scorer` decides nothing."""
    engine_options: Annotated[dict[str, Any], AfterValidator(partial(check_owned, owned=EVALUATION))] = {}
    """Further arguments of vLLM's `LLM`, passed on as they are, such as `max_num_seqs` or `attention_backend`."""

    @model_validator(mode="after")
    def check_scorer(self) -> Self:
        for key, value in (
            ("scorer_threshold", self.scorer_threshold),
            ("scorer_options", self.scorer_options or None),
        ):
            if value is not None and self.scorer is None:
                raise ValueError(f"{key} ({value}) is of evaluation.scorer, which is not set; set scorer, or remove it")
        return self


class GenerationConfig(Section):
    """How answers are drawn. `letter` always takes the most probable token, as cosmos-reason1 does."""

    max_retries: int = Field(10, ge=0, le=100)
    """How often a question is asked again when nothing was read in the answer: each time 256 tokens longer, 0.05 hotter."""
    max_tokens: int | None = Field(None, ge=1)
    """Longest answer in tokens. Unset: 1024 (`reasoning`), 256 (`letter`, for texts; else see `letter_max_tokens`)."""
    letter_max_tokens: int = Field(10, ge=1)
    """Longest answer in tokens where `letter` asks for an option, yes or no, or a number."""
    temperature: Annotated[float, AfterValidator(check_temperature)] = Field(0.6, ge=0, le=2)
    """Of `reasoning`; 0 takes the most probable token."""
    top_p: float = Field(0.95, gt=0, le=1)
    """Of `reasoning`: sample from the fewest tokens whose probability reaches this."""
    top_k: int = Field(0, ge=0)
    """Of `reasoning`: sample from this many most probable tokens, 0: all."""
    repetition_penalty: float = Field(1.0, ge=0.01, le=2)
    """Divides the scores of tokens that are already there, the prompt's included; 1: none. With the parser `compat` the
    penalties are of `reasoning` only."""
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    """Taken from the scores of tokens that the answer already has; 0: none."""
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    """The same, for each time the answer has them; 0: none."""


class EvalConfig(Section):
    """Everything of one `dsreason eval`."""

    datasets: tuple[str, ...] = ()
    """Benchmark folders: robovqa, av, agibot, bridgev2, holoassist, robofail, or any with `<ds>_benchmark_qa_pairs.json`."""
    data_dir: str = "data"
    """The folder that holds `<ds>/` or `benchmark/<ds>/`."""
    sources: tuple[EvalSourceConfig, ...] = ()
    """Further questions: any adapter's rows, or a JSONL."""
    results_dir: str = Field("results", min_length=1)
    """Answers go to `<results_dir>/<model>/<answer_type>/<dataset>/<video_id>.json`."""
    model: EvalModelConfig = EvalModelConfig()
    server: ServerConfig = ServerConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    generation: GenerationConfig = GenerationConfig()
    vision: VisionConfig = VisionConfig()

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.datasets, *(source.dataset for source in self.sources))

    @field_validator("datasets", mode="before")
    @classmethod
    def check_list(cls, datasets: Any) -> Any:
        return (datasets,) if isinstance(datasets, str) else datasets

    @model_validator(mode="after")
    def check_questions(self) -> Self:
        names = self.names
        if not names:
            raise ValueError(
                "neither datasets nor sources name any questions; set datasets to a list such as [robovqa]"
            )
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"{', '.join(twice)}: named twice; remove one, or give a source another name")
        if bad := [name for name in names if not re.fullmatch(r"[^./\\][^/\\]*", name)]:
            raise ValueError(
                f"{bad[0]!r} becomes a folder of the results; give the data set a name without slashes, not hidden"
            )
        return self

    @model_validator(mode="after")
    def check_vision(self) -> Self:
        for source in self.sources:
            try:
                self.vision_of(source.vision)
            except ValidationError as error:
                reason = error.errors()[0]["msg"].removeprefix("Value error, ")
                raise ValueError(f"the vision of source {source.dataset} together with [vision]: {reason}") from None
        return self

    @model_validator(mode="after")
    def check_who_answers(self) -> Self:
        url, path, engine = self.server.url, self.model.path, self.model.engine
        if url is None and path is None:
            raise ValueError("neither model.path nor server.url is set; set one of them")
        if url is not None and path is not None:
            raise ValueError(
                f"server.url ({url}) and model.path ({path}) exclude each other: the server has its own model; "
                "remove one (server.model names the model there)"
            )
        if url is not None and engine != "auto":
            raise ValueError(f"server.url ({url}) and model.engine ({engine}) exclude each other; remove one")
        if (options := self.evaluation.engine_options) and (url is not None or engine == "transformers"):
            other = f"server.url ({url})" if url is not None else "model.engine (transformers)"
            raise ValueError(f"evaluation.engine_options ({options}) and {other} exclude each other; remove one")
        return self

    def vision_of(self, source: VisionConfig | None = None) -> VisionConfig:
        """How media are shown: `[vision]`, over which a source's own settings win; `evaluation.fps` where none says."""
        own_values = (source or VisionConfig()).model_dump(exclude_none=True)
        common = self.vision.model_dump(exclude_none=True)
        if {"fps", "nframes"} & own_values.keys():
            common = {key: value for key, value in common.items() if key not in ("fps", "nframes")}
        settings = common | own_values
        if not {"fps", "nframes"} & settings.keys():
            settings["fps"] = self.evaluation.fps
        return VisionConfig.model_validate(settings)

    def workers(self, num_cores: int) -> int:
        return min(self.evaluation.num_processes or num_cores, num_cores)

    def notes(self, num_cores: int) -> list[str]:
        """Return what the configuration says and the evaluation does not do, one a line."""
        problems = []
        if self.model.tokenizer_model_name is not None:
            problems.append(
                f"model.tokenizer_model_name ({self.model.tokenizer_model_name}) is not used: the tokenizer is the model's own"
            )
        num_processes = self.evaluation.num_processes
        if num_processes is not None and num_processes > num_cores:
            problems.append(f"evaluation.num_processes is {num_processes}; {num_cores} are used, one a core")
        if "skip_saved" in self.evaluation.model_fields_set and self.evaluation.skip_saved == self.evaluation.overwrite:
            problems.append(
                f"evaluation.skip_saved ({self.evaluation.skip_saved}) is not used: saved answers are "
                + ("deleted, because evaluation.overwrite is set" if self.evaluation.overwrite else "kept")
            )
        return [*problems, *self._undecided(), *self._unused_sampling()]

    def _undecided(self) -> list[str]:
        """A note on a scorer that decides nothing."""
        scorer, threshold = self.evaluation.scorer, self.evaluation.scorer_threshold
        if scorer is None:
            return []
        if self.evaluation.parser == "compat":
            return [f"evaluation.scorer ({scorer}) is a score only: compat counts as cosmos-reason1 does"]
        if threshold is None:
            return [
                f"evaluation.scorer ({scorer}) is a score only: what is right goes by the questions' kinds; "
                "set evaluation.scorer_threshold to the value from which on an answer is right to let it decide"
            ]
        return []

    def _unused_sampling(self) -> list[str]:
        if self.evaluation.answer_type != "letter":
            return []
        problems = self._values({"temperature", "top_p", "top_k"}, "letter takes the most probable token")
        if self.evaluation.parser == "compat":
            problems += self._values(PENALTIES, "so it is in cosmos-reason1")
        return problems

    def _values(self, names: Set[str], reason: str) -> list[str]:
        """A note on those of these settings of `[generation]` that are set, and not used for letters."""
        set_values = self.generation.model_dump(include=self.generation.model_fields_set & names)
        values = ", ".join(f"generation.{name} ({value})" for name, value in sorted(set_values.items()))
        return [f"{values}: used by answer_type reasoning only; {reason}"] if set_values else []
