"""Schema of an evaluation's configuration. cosmos-reason1's `evaluate.yaml` can be loaded unchanged."""

from __future__ import annotations

import re
from collections.abc import Set
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import SplitResult, urlsplit

from pydantic import AfterValidator, AliasChoices, Field, ValidationError, field_validator, model_validator

from dsreason.config.engine_options import EVALUATION, check_owned
from dsreason.config.keys import list_aliases
from dsreason.config.schema_data import SourceConfig, TemplateArguments, VisionConfig
from dsreason.config.section import Section, check_temperature
from dsreason.text import QuestionKind

PENALTIES = frozenset({"repetition_penalty", "presence_penalty", "frequency_penalty"})
DEFAULT_FPS = 4.0
"""Default number of frames per second, as in cosmos-reason1."""


class EvalSourceConfig(SourceConfig):
    """Data set whose rows are questions. Keys that are unset in the data set's `vision` default to those in `[vision]`."""

    name: str | None = None
    """Name of the data set in the results. Unset: `subset`, or else the name of the file or folder, or else the name of the
    adapter."""
    kind: QuestionKind | None = None
    """Kind of the questions, which determines the grading. Unset: each row's `question_kind`, or else the kind that fits the
    row's options and answer."""

    @property
    def dataset(self) -> str:
        """Name of the data set in the results: `name` or its default."""
        adapter = self.adapter.rpartition(":")[0] or self.adapter
        return self.name or self.subset or Path(self.path).stem or Path(adapter).stem


class EvalModelConfig(Section):
    """Settings of the model that the job loads to answer the questions. For a model on a server, see `[server]`."""

    path: str | None = Field(None, validation_alias=AliasChoices("path", "model_name"))
    """Hugging Face folder, name on the Hub, dsreason run (its final export, or a checkpoint completed after the export), or a
    run's checkpoint; `tiny:qwen2_5_vl` and `tiny:qwen3_vl` are models with random weights. Alias: `model_name`."""
    revision: str | None = None
    """Revision of the model on the Hub: a branch, tag or commit. Unset: the default branch."""
    tokenizer_model_name: str | None = None
    """Accepted but ignored, because the tokenizer and processor are always read from the model's folder."""
    dtype: Literal["bfloat16", "float16", "float32", "auto"] | None = None
    """Data type of the weights; `auto` uses the type in the model's config.json. Unset: bfloat16 on a GPU, and float32 on a CPU,
    so that an answer does not depend on the other questions in the batch."""
    tensor_parallel_size: int = Field(
        1, ge=1, le=1024, validation_alias=AliasChoices("tensor_parallel_size", "tp_size")
    )
    """Number of GPUs that share one copy of the model. Alias: `tp_size`."""
    max_length: int | None = Field(None, ge=8)
    """Maximum total length of prompt and answer, in tokens. Unset: the model's maximum."""
    engine: Literal["auto", "vllm", "transformers"] = "auto"
    """Engine that generates the answers; `auto` uses vLLM if it is installed and supports the model. The transformers engine
    distributes a model that is larger than one GPU across all GPUs of its rank (`--nproc 1`: all GPUs of the host); weights that
    do not fit into memory are read from their files when they are needed, which is slow."""
    gpu_memory_utilization: float = Field(0.9, gt=0, lt=1)
    """Fraction of a GPU's memory that vLLM may use."""
    enforce_eager: bool = False
    """Run vLLM without compiled graphs, which saves memory and start-up time, but makes vLLM slower."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model. Set this to true only if you have read the code."""
    attention: Literal["auto", "sdpa", "eager", "flash_attention_2", "flash_attention_3"] = "auto"
    """Attention implementation of the transformers engine; `auto` is torch's scaled-dot-product attention."""

    @model_validator(mode="before")
    @classmethod
    def check_named_once(cls, document: Any) -> Any:
        """Reject a key that has different values under its two names; if the values are equal, drop the second name."""
        if not isinstance(document, dict):
            return document
        deduplicated = dict(document)
        for field in cls.model_fields.values():
            used_names = [name for name in list_aliases(field) if name in deduplicated]
            if len(used_names) < 2:
                continue
            if len({repr(deduplicated[name]) for name in used_names}) > 1:
                values = " and ".join(f"{name} ({deduplicated[name]!r})" for name in used_names)
                raise ValueError(f"{values} are two names of the same key, but have different values; remove one")
            del deduplicated[used_names[1]]
        return deduplicated


class ServerConfig(Section):
    """Settings of an OpenAI-compatible server that answers the questions instead of `[model]`."""

    url: str | None = None
    """URL of the server, such as `http://localhost:8000/v1` (`/v1` may be omitted). Unset: no server is used."""
    model: str | None = None
    """Name of the model on the server. Unset: the only model that the server lists."""
    api_key_env: str = "OPENAI_API_KEY"
    """Name of the environment variable that contains the API key; never enter the key itself. If the variable is unset, no key is
    sent."""
    concurrency: int = Field(16, ge=1, le=1024)
    """Maximum number of concurrent requests."""
    time_limit: float = Field(120.0, gt=0)
    """Seconds that one attempt at a request may take."""
    max_retries: int = Field(5, ge=0)
    """Maximum number of times a failed request is retried. The pause doubles after each retry, unless the server requests a
    different pause."""
    video: Literal["file", "frames"] = "file"
    """Form in which a clip is sent: as a video (only to vLLM, started with `--trust-request-mm-kwargs`), or as images of its
    frames. In both forms, the model sees the frames that training would use; vLLM by itself would choose different frames."""
    folder: str | None = None
    """Local folder of the server's model; its vision settings are the defaults of `[vision]`, and frames have the same sizes as
    in training. Unset: the folder that the server reports, if it exists on this machine. If there is no such folder, frames have
    the sizes that Qwen2.5-VL uses."""

    @field_validator("url")
    @classmethod
    def check_url(cls, url: str | None) -> str | None:
        if url is None:
            return None
        parts = urlsplit(url)
        if parts.password is not None:
            raise ValueError(
                "contains a password, which would be written to the results; remove it, and use api_key_env"
            )
        if parts.query or parts.fragment:
            raise ValueError(
                "contains a query (?) or a fragment (#), but the API's paths are appended to it; remove that part"
            )
        if parts.scheme not in ("http", "https") or not parts.hostname or not has_valid_port(parts):
            raise ValueError(f"must be the URL of a server, such as http://localhost:8000/v1; got {url!r}")
        return url


def has_valid_port(parts: SplitResult) -> bool:
    """Return whether the URL has no port or a valid one."""
    try:
        return parts.port != 0
    except ValueError:
        return False


class EvaluationConfig(Section):
    answer_type: Literal["letter", "reasoning"] = "letter"
    """Form of the responses: `letter` requests only the answer, and `reasoning` requests
    `<think>…</think> <answer>…</answer>`."""
    parser: Literal["default", "compat", "digit"] = "default"
    """Parser of the answers; `compat` works exactly like the parser of cosmos-reason1, which takes the first capital letter.
    `digit` takes the first standalone digit from 1 to 5 as the answer to a question of the kind `ordinal`."""
    num_processes: int | None = Field(None, ge=1)
    """Number of worker processes that decode media, at most one per core. Unset: one per core."""
    batch_size: int | None = Field(None, ge=1)
    """Number of questions that are passed to the engine at a time. The groups are always the same, so that an interrupted
    evaluation gives the same answers in any precision. Unset: all unanswered questions for vLLM, and 64 for the transformers
    engine."""
    media_memory_gib: float = Field(4.0, gt=0)
    """Host memory per rank for decoded media that wait for the engine, in GiB. If the media need more, the questions are passed
    to the engine in several parts, each large enough to keep it fully occupied."""
    skip_saved: bool = True
    """Accepted but ignored, because saved answers are always kept unless `overwrite` is set."""
    overwrite: bool = False
    """Delete the results of an earlier evaluation of the same model, answer type and data set before starting."""
    fps: float | None = Field(DEFAULT_FPS, gt=0)
    """Frames per second to sample from a video if `[vision]` sets neither `fps` nor `nframes`. The default applies only to
    models whose folder lacks the vision settings of their training. Null: the same frames as in training without `fps`."""
    seed: int = Field(1, ge=0)
    """Random seed for sampling."""
    limit: int | None = Field(None, ge=1)
    """Maximum total number of questions: the first questions of each data set, in equal numbers if possible. Unset: all."""
    system_prompt: str | None = None
    """System message; `""` sends no system message. Unset: "Answer the questions." for benchmark folders, and the row's own
    system message for rows."""
    template_arguments: TemplateArguments = {}
    """Arguments for the chat template, such as `{enable_thinking = false}`. Arguments that are unset have the values with which
    the model was trained, if its folder records them, or else the template's own defaults. A server gets them as
    `chat_template_kwargs`."""
    similarity_model: str | None = None
    """Folder of a sentence-embedding model, which scores the semantic similarity of free texts. Unset: no similarity is
    computed."""
    scorer: str | None = None
    """Reward function that computes an additional score for each answer, either built in or your own (`package.module:attr`,
    `file.py:attr`). The report contains the mean score. Unless `scorer_threshold` is set, the score does not affect whether an
    answer is correct. Unset: no additional score."""
    scorer_options: dict[str, Any] = {}
    """Keyword arguments of `scorer`, as in `[reward.options]`."""
    scorer_threshold: float | None = Field(None, allow_inf_nan=False)
    """Minimum score of `scorer` at which a parsed answer counts as correct. Unset: `scorer` does not affect correctness."""
    engine_options: Annotated[dict[str, Any], AfterValidator(partial(check_owned, owned=EVALUATION))] = {}
    """Additional arguments of vLLM's `LLM`, passed unchanged, such as `max_num_seqs` or `attention_backend`."""

    @model_validator(mode="after")
    def check_scorer(self) -> Self:
        for key, value in (
            ("scorer_threshold", self.scorer_threshold),
            ("scorer_options", self.scorer_options or None),
        ):
            if value is not None and self.scorer is None:
                raise ValueError(
                    f"{key} ({value}) requires evaluation.scorer, which is not set; set scorer, or remove {key}"
                )
        return self


class GenerationConfig(Section):
    """Settings for sampling answers. `letter` always picks the most probable token, as cosmos-reason1 does."""

    max_retries: int = Field(10, ge=0, le=100)
    """Maximum number of times a question is asked again if its answer could not be parsed. Each retry allows 256 more tokens and
    raises the temperature by 0.05."""
    max_tokens: int | None = Field(None, ge=1)
    """Maximum length of an answer in tokens. Unset: 1024 for `reasoning`, and 256 for text answers with `letter` (for other
    answers, see `letter_max_tokens`)."""
    letter_max_tokens: int = Field(10, ge=1)
    """Maximum length of an answer in tokens if `letter` requests an option, yes or no, or a number."""
    temperature: Annotated[float, AfterValidator(check_temperature)] = Field(0.6, ge=0, le=2)
    """Sampling temperature (`reasoning` only); 0 always picks the most probable token."""
    top_p: float = Field(0.95, gt=0, le=1)
    """Sample only from the smallest set of most probable tokens whose total probability reaches this value (`reasoning`
    only)."""
    top_k: int = Field(0, ge=0)
    """Sample only from the `top_k` most probable tokens (`reasoning` only); 0: all tokens."""
    repetition_penalty: float = Field(1.0, ge=0.01, le=2)
    """Divisor of the logits of tokens that the prompt or the answer already contains; 1: no penalty. With the parser `compat`,
    the penalties apply to `reasoning` only."""
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    """Amount subtracted from the logits of tokens that the answer already contains; 0: no penalty."""
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    """Amount subtracted from a token's logit for each occurrence in the answer so far; 0: no penalty."""


class EvalConfig(Section):
    """Configuration of a `dsreason eval` run."""

    datasets: tuple[str, ...] = ()
    """Names of benchmark folders: robovqa, av, agibot, bridgev2, holoassist, robofail, or any other folder that contains
    `<ds>_benchmark_qa_pairs.json`."""
    data_dir: str = "data"
    """Folder that contains `<ds>/` or `benchmark/<ds>/`."""
    sources: tuple[EvalSourceConfig, ...] = ()
    """Data sets with additional questions, each a JSONL file or any data set that an adapter can read."""
    results_dir: str = Field("results", min_length=1)
    """Folder for the answers, which are written to `<results_dir>/<model>/<answer_type>/<dataset>/<video_id>.json`."""
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
                "datasets and sources are both empty; set datasets to a list such as [robovqa], or add sources"
            )
        if repeated := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(
                f"duplicate names of data sets: {', '.join(repeated)}; remove one, or set another name for a source"
            )
        if bad := [name for name in names if not re.fullmatch(r"[^./\\][^/\\]*", name)]:
            raise ValueError(
                f"{bad[0]!r} cannot be used as the name of a results folder; choose a name without slashes or a leading dot"
            )
        return self

    @model_validator(mode="after")
    def check_vision(self) -> Self:
        for source in self.sources:
            try:
                VisionConfig.model_validate(source.vision.override(self.vision))
            except ValidationError as error:
                reason = error.errors()[0]["msg"].removeprefix("Value error, ")
                raise ValueError(f"vision of source {source.dataset}, combined with [vision]: {reason}") from None
        return self

    @model_validator(mode="after")
    def check_model_or_server(self) -> Self:
        url, path, engine = self.server.url, self.model.path, self.model.engine
        if url is None and path is None:
            raise ValueError("neither model.path nor server.url is set; set one of them")
        if url is not None and path is not None:
            raise ValueError(
                f"server.url ({url}) and model.path ({path}) are mutually exclusive, because the server has its own "
                "model; remove one (server.model selects the model on the server)"
            )
        if url is not None and engine != "auto":
            raise ValueError(f"server.url ({url}) and model.engine ({engine}) are mutually exclusive; remove one")
        if (options := self.evaluation.engine_options) and (url is not None or engine == "transformers"):
            conflict = f"server.url ({url})" if url is not None else "model.engine (transformers)"
            raise ValueError(f"evaluation.engine_options ({options}) and {conflict} are mutually exclusive; remove one")
        return self

    def merge_vision(self, source: VisionConfig | None = None) -> VisionConfig:
        """Merge `[vision]` with a source's settings, which take precedence.

        If neither of them sets `fps` or `nframes`, `evaluation.fps` is used.
        """
        merged = (source or VisionConfig()).fill(self.vision)
        return merged if merged.nframes is not None else merged.fill(VisionConfig(fps=self.evaluation.fps))

    def set_vision(self) -> VisionConfig:
        """Return the vision settings that the user has set for all data sets: `[vision]` and, if it is set, `evaluation.fps`."""
        has_rate = "fps" in self.evaluation.model_fields_set and self.vision.nframes is None
        return self.vision.fill(VisionConfig(fps=self.evaluation.fps)) if has_rate else self.vision

    def workers(self, num_cores: int) -> int:
        return min(self.evaluation.num_processes or num_cores, num_cores)

    def notes(self, num_cores: int) -> list[str]:
        """Return one note for each setting that the evaluation ignores."""
        problems = []
        if self.model.tokenizer_model_name is not None:
            problems.append(
                f"model.tokenizer_model_name ({self.model.tokenizer_model_name}) is ignored: the model's own tokenizer is used"
            )
        num_processes = self.evaluation.num_processes
        if num_processes is not None and num_processes > num_cores:
            problems.append(f"evaluation.num_processes is {num_processes}, but only {num_cores} are used, one per core")
        if "skip_saved" in self.evaluation.model_fields_set and self.evaluation.skip_saved == self.evaluation.overwrite:
            problems.append(
                f"evaluation.skip_saved ({self.evaluation.skip_saved}) is ignored: saved answers are "
                + ("deleted, because evaluation.overwrite is set" if self.evaluation.overwrite else "kept")
            )
        return [*problems, *self._note_undecided(), *self._note_unused_sampling()]

    def _note_undecided(self) -> list[str]:
        """Return a note if the scorer does not decide which answers are correct."""
        scorer, threshold = self.evaluation.scorer, self.evaluation.scorer_threshold
        if scorer is None:
            return []
        if self.evaluation.parser == "compat":
            return [
                f"evaluation.scorer ({scorer}) does not affect correctness: with the parser compat, answers are graded as in "
                "cosmos-reason1"
            ]
        if threshold is None:
            return [
                f"evaluation.scorer ({scorer}) does not affect correctness, which depends on the kind of question; "
                "to let the scorer decide, set evaluation.scorer_threshold to the minimum score of a correct answer"
            ]
        return []

    def _note_unused_sampling(self) -> list[str]:
        if self.evaluation.answer_type != "letter":
            return []
        problems = self._note_unused_values(
            {"temperature", "top_p", "top_k"}, "letter always picks the most probable token"
        )
        if self.evaluation.parser == "compat":
            problems += self._note_unused_values(PENALTIES, "letter has no penalties with the parser compat")
        return problems

    def _note_unused_values(self, names: Set[str], reason: str) -> list[str]:
        """Return a note about the keys in `names` that are set in `[generation]`, although `letter` does not use them."""
        set_values = self.generation.model_dump(include=self.generation.model_fields_set & names)
        values = ", ".join(f"generation.{name} ({value})" for name, value in sorted(set_values.items()))
        verb = "are" if len(set_values) > 1 else "is"
        return [f"{values} {verb} used only with answer_type = reasoning: {reason}"] if set_values else []
