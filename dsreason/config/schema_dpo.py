"""Schema for a DPO run's configuration, which adds keys to `RunConfig`."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from dsreason.config.schema import RunConfig, TrainConfig, ValidationConfig
from dsreason.config.schema_checkpoint import CheckpointConfig
from dsreason.config.section import Section

LossName = Literal["sigmoid", "hinge", "ipo", "robust", "bco"]

MPO: dict[str, float] = {"sigmoid": 0.8, "bco": 0.2}
"""Loss weights in mixed preference optimization (2411.10442), which also has an SFT term with weight 1."""


class PreferenceConfig(Section):
    """Settings for the algorithm that computes updates from pairs of a better and a worse answer."""

    loss: Literal["sigmoid", "hinge", "ipo", "robust", "bco", "mpo"] = "sigmoid"
    """Loss function: `sigmoid` is DPO; `mpo` is 0.8 sigmoid + 0.2 bco + 1.0 SFT. The formulas are in
    `dsreason/losses/preference.py`."""
    loss_weights: dict[LossName, Annotated[float, Field(gt=0)]] = {}
    """Weights of several losses, whose weighted sum replaces `loss`, such as `{sigmoid = 0.5, hinge = 0.5}`. Empty: `loss` is
    used."""
    beta: float = Field(0.1, gt=0)
    """Factor for differences in log-probability; a small value lets the policy move farther from the reference."""
    label_smoothing: float = Field(0.0, ge=0, lt=0.5)
    """Assumed fraction of pairs in which the two answers are swapped; applies only to sigmoid (cDPO) and robust."""
    sft_weight: float | None = Field(None, ge=0)
    """Weight of the mean negative log-likelihood of the chosen answers. Unset: 1 for mpo, and 0 for the other losses."""
    reference: Literal["model", "precomputed", "adapter_off", "none"] = "model"
    """Source of the reference log-probabilities: `model` computes them once with the initial model, before the first step;
    `precomputed` reads them from the rows (`ref_chosen_logprob`, `ref_rejected_logprob`) or from `reference_file`;
    `adapter_off` computes them in every step with the adapters disabled (needs `lora.rank`); `none` uses no reference."""
    reference_file: str | None = None
    """File with the log-probabilities for `precomputed`: JSON lines with `id`, `chosen` and `rejected`, such as the
    `reference.jsonl` of another run. Unset: the values are read from the rows."""

    @property
    def weights(self) -> dict[str, float]:
        """Loss name → weight, without the SFT term."""
        if self.loss_weights:
            return {str(name): weight for name, weight in self.loss_weights.items()}
        return MPO if self.loss == "mpo" else {self.loss: 1.0}

    @property
    def sft(self) -> float:
        """Weight of the SFT term."""
        return float(self.loss == "mpo") if self.sft_weight is None else self.sft_weight

    @model_validator(mode="after")
    def check_losses(self) -> Self:
        if self.loss_weights and "loss" in self.differing():
            raise ValueError(f"loss ({self.loss}) and loss_weights are mutually exclusive; remove one")
        smoothed = {"sigmoid", "robust"} & self.weights.keys()
        if self.label_smoothing and not smoothed:
            raise ValueError(
                f"label_smoothing ({self.label_smoothing}) is defined only for sigmoid and robust, but the loss is "
                f"{' + '.join(self.weights)}; remove it"
            )
        return self

    @model_validator(mode="after")
    def check_reference(self) -> Self:
        if self.reference_file is not None and self.reference != "precomputed":
            raise ValueError(
                f'reference_file ({self.reference_file}) requires reference = "precomputed", but reference is '
                f'"{self.reference}"; change one of them'
            )
        if self.reference == "none" and "bco" in self.weights:
            raise ValueError(
                "bco compares rewards with their mean, but without a reference, rewards are absolute log-probabilities; choose "
                "another loss, or set reference"
            )
        return self


class DPOValidationConfig(ValidationConfig):
    generate: bool = False
    """Also generate answers and compare them with the references (`val/accuracy`), which is useful for short answers."""


class DPOCheckpointConfig(CheckpointConfig):
    best_metric: Literal["val/preference_accuracy", "val/accuracy", "val/loss"] = "val/preference_accuracy"
    """Metric that selects the best checkpoint: the fraction of held-out pairs with a positive margin, the fraction of correct
    answers, or the loss."""


class DPOConfig(RunConfig):
    """Configuration for a `dsreason dpo` run."""

    deciding_sections: ClassVar[tuple[str, ...]] = (*RunConfig.deciding_sections, "dpo")
    held_out_as_trained: ClassVar[bool] = True
    adapter_lr = 2e-5

    train: TrainConfig = TrainConfig()
    validation: DPOValidationConfig = DPOValidationConfig()
    checkpoint: DPOCheckpointConfig = DPOCheckpointConfig()
    dpo: PreferenceConfig = PreferenceConfig()

    @property
    def samples_per_step(self) -> int:
        return self.train.global_batch_size

    @property
    def batch_fact(self) -> str:
        return f"train.global_batch_size is {self.samples_per_step}"

    @model_validator(mode="after")
    def check_adapter(self) -> Self:
        if self.dpo.reference == "adapter_off" and not self.lora.rank:
            raise ValueError(
                'dpo.reference ("adapter_off") is the model without its adapters, but lora.rank is 0; set '
                'dpo.reference = "model", or set lora.rank'
            )
        return self

    @model_validator(mode="after")
    def check_best_metric(self) -> Self:
        best = self.checkpoint.best_metric
        if best == "val/accuracy" and not self.validation.generate:
            raise ValueError(
                f"checkpoint.best_metric ({best}) requires generated answers; set validation.generate = true"
            )
        return self
