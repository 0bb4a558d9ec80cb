"""Conversion of a file for cosmos-rl or cosmos-framework to a dsreason configuration, with a finding for every key."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from dsreason.errors import ConfigError
from dsreason.problems import build_config_error
from dsreason.tools.cosmos_rl.comparison import Meaning, list_meanings
from dsreason.tools.cosmos_rl.draft import COSMOS_FRAMEWORK, COSMOS_RL, UNSET, Draft, KeyFinding, Settings, iter_flat
from dsreason.tools.cosmos_rl.keys import framework as keys_of_framework
from dsreason.tools.cosmos_rl.keys import grpo as keys_of_grpo
from dsreason.tools.cosmos_rl.keys import model as keys_of_model
from dsreason.tools.cosmos_rl.keys import predict as keys_of_predict
from dsreason.tools.cosmos_rl.keys import train as keys_of_train
from dsreason.tools.cosmos_rl.keys import world as keys_of_world
from dsreason.tools.cosmos_rl.keys.dead import suggest
from dsreason.tools.cosmos_rl.keys.key import SHOWN, Key, is_of_kind
from dsreason.tools.cosmos_rl.parts import data, framework, framework_world, grpo, predict, train, world

LANGUAGE_KEYS: dict[str, Key] = (
    keys_of_train.KEYS | keys_of_train.DATA | keys_of_train.PREFERENCES | keys_of_grpo.KEYS | keys_of_model.KEYS
)
"""Keys in files for vision-language and text models."""
WORLD_KEYS: dict[str, Key] = LANGUAGE_KEYS | keys_of_world.KEYS
"""Keys in files for world models in diffusers' format; an entry here replaces the one in `LANGUAGE_KEYS`."""
DEFAULT = "dsreason's default"
PREDICT_KEYS: dict[str, Key] = keys_of_predict.KEYS
"""Keys in files for the older trainer of Cosmos-Predict2.5, which have a different structure."""


@dataclass(frozen=True)
class Imported:
    """Result of `dsreason import`, from which the tables and the TOML file are created."""

    trainer: str
    config: dict[str, Any]
    findings: list[KeyFinding]
    meanings: list[Meaning]
    num_gpus: int
    arguments: list[str]
    tool: str = COSMOS_RL
    """Name of the program that the file is for."""

    def check(self, name: str) -> None:
        """Check that no finding has the verdict "error".

        Raises:
            ConfigError: some keys can be neither used nor left out; the message lists all of them.
        """
        errors = [f"{name}: {finding.key}: {finding.text}" for finding in self.findings if finding.verdict == "error"]
        if errors:
            raise build_config_error(errors)


def is_importable(document: dict[str, Any]) -> bool:
    """Return whether a configuration file is for cosmos-rl or cosmos-framework, that is, has a section or key that dsreason
    files never have."""
    train_section = document.get("train")
    return (
        is_framework(document)
        or isinstance(document.get("policy"), dict)
        or is_predict(document)
        or "redis" in document
        or (
            isinstance(train_section, dict)
            and bool({"train_policy", "ckpt", "train_batch_per_replica", "optm_lr"} & train_section.keys())
        )
    )


def is_framework(document: dict[str, Any]) -> bool:
    """Return whether a configuration file is for cosmos-framework's supervised fine-tuning."""
    job, model = document.get("job"), document.get("model")
    return (isinstance(job, dict) and bool({"task", "experiment"} & job.keys())) or (
        isinstance(model, dict) and bool({"parallelism", "backbone", "activation_checkpointing"} & model.keys())
    )


def is_predict(document: dict[str, Any]) -> bool:
    """Return whether a configuration file is for the older trainer of world models."""
    model = document.get("model")
    return bool({"model_parallel", "dataloader_train"} & document.keys()) or (
        isinstance(model, dict) and bool({"rl", "fsdp_shard_size"} & model.keys())
    )


def is_evaluation(document: dict[str, Any]) -> bool:
    """Return whether a configuration file is cosmos-reason1's `evaluate.yaml`, which `dsreason eval` reads directly."""
    return "evaluation" in document and "datasets" in document


def convert(document: dict[str, Any], accepted: Iterable[str] = ()) -> Imported:
    """Convert a file. Keys that can be neither used nor left out become findings with the verdict "error".

    Args:
        accepted: keys that may be left out even if this changes the result of training.

    Raises:
        ConfigError: an accepted key is not in the file.
    """
    accepted_keys = frozenset(accepted)
    if is_framework(document):
        return convert_framework(document, accepted_keys)
    if is_predict(document):
        return convert_document(document, PREDICT_KEYS, Draft("world", accepted_keys), [predict.convert_world])
    policy_section = document.get("policy")
    if isinstance(policy_section, dict) and policy_section.get("is_diffusers") is True:
        return convert_document(document, WORLD_KEYS, Draft("world", accepted_keys), [world.convert_world])
    draft = Draft(choose_trainer(document), accepted_keys)
    parts = [
        train.convert_ranks,
        train.convert_optimizer,
        train.convert_model,
        train.convert_checkpoints,
        data.convert_rows,
    ]
    if draft.trainer == "grpo":
        parts += [grpo.convert_algorithm, grpo.convert_rollout, grpo.convert_rewards, grpo.convert_teacher]
    elif draft.trainer == "dpo":
        parts += [train.convert_preferences]
    return convert_document(document, LANGUAGE_KEYS, draft, [*parts, data.convert_validation])


def convert_framework(document: dict[str, Any], accepted: frozenset[str]) -> Imported:
    """Convert a file for cosmos-framework: a reasoner's becomes one for `dsreason sft`, a generator's for `dsreason world`."""
    job = document.get("job")
    if isinstance(job, dict) and job.get("task") == "vlm":
        draft, keys, parts = Draft("sft", accepted), keys_of_framework.REASONER, [framework.convert_reasoner]
    else:
        draft, keys, parts = Draft("world", accepted), keys_of_framework.GENERATOR, [framework_world.convert_generator]
    return convert_document(document, keys, draft, parts, tool=COSMOS_FRAMEWORK)


def choose_trainer(document: dict[str, Any]) -> str:
    """Return the dsreason trainer for the file: sft, grpo or dpo."""
    train_section = document.get("train")
    policy = train_section.get("train_policy") if isinstance(train_section, dict) else None
    policy = policy if isinstance(policy, dict) else {}
    if policy.get("trainer_type") == "dpo":
        return "dpo"
    if "type" in policy:
        return "grpo" if policy["type"] == "grpo" else "sft"
    return "grpo" if "rollout" in document else "sft"


def convert_document(
    document: dict[str, Any], keys: dict[str, Key], draft: Draft, parts: list[Any], *, tool: str = COSMOS_RL
) -> Imported:
    cosmos = Settings.of(document, keys, tool)
    for key in sorted(draft.accepted - cosmos.given.keys()):
        raise ConfigError(f"--accept {key}: the file has no such key; correct it")
    check_values(cosmos, draft)
    if not any(verdict == "error" for verdict, _ in draft.notes.values()):  # the parts rely on valid values
        copy_values(cosmos, draft)
        for part in parts:
            part(cosmos, draft)
    else:  # no key was mapped
        errors = [KeyFinding(key, cosmos.given[key], *note) for key, note in draft.notes.items()]
        return Imported(draft.trainer, {}, errors, [], draft.num_gpus, [], tool)
    findings = [make_finding(key, value, cosmos, draft) for key, value in cosmos.given.items()]
    findings += [
        KeyFinding(key, cosmos[key], verdict, f"{text} ({tool}'s default)")
        for key, (verdict, text) in draft.notes.items()
        if key not in cosmos.given
    ]
    if tool == COSMOS_FRAMEWORK:
        because = f"{UNSET} leaves the value to the command line"
        findings += [
            KeyFinding(key, UNSET, "left out", because) for key, value in iter_flat(document, keys) if value == UNSET
        ]
    meanings = [] if any(finding.verdict == "error" for finding in findings) else list_meanings(cosmos, draft)
    return Imported(draft.trainer, draft.config, findings, meanings, draft.num_gpus, draft.arguments, tool)


def check_values(cosmos: Settings, draft: Draft) -> None:
    """Report all values that are not of the kind that their key takes."""
    for key, value in cosmos.given.items():
        known_key = cosmos.keys.get(key)
        if known_key is None and any(name.startswith(f"{key}.") for name in cosmos.keys):
            if value != {}:
                draft.reject_value(key, f"must be a section; got {value!r:.60}")
        elif known_key is not None and not is_of_kind(value, known_key.takes):
            draft.reject_value(key, f"must be {SHOWN[known_key.takes]}; got {value!r:.60}")


def copy_values(cosmos: Settings, draft: Draft) -> None:
    """Convert the keys that are copied, and reject other keys whose values cannot safely be ignored."""
    for key, known_key in cosmos.keys.items():
        if draft.trainer not in known_key.trainers:
            continue
        value = cosmos[key]
        if known_key.copies:
            try:
                draft.set(known_key.becomes[0], known_key.convert(value))
            except (ValueError, TypeError) as error:
                draft.refuse(key, f"{value!r:.60}: {error}")
        elif known_key.only is not None and value not in known_key.only:
            draft.refuse(key, known_key.instead)


def make_finding(key: str, value: Any, cosmos: Settings, draft: Draft) -> KeyFinding:
    """Build the finding about a key in the file."""
    if key in draft.notes:
        return KeyFinding(key, value, *draft.notes[key])
    known_key = cosmos.keys.get(key)
    if known_key is None:
        if value == {}:
            return KeyFinding(key, value, "left out", "the section is empty")
        return KeyFinding(key, value, "not read", suggest(key, cosmos))
    if draft.trainer not in known_key.trainers:
        return KeyFinding(key, value, "left out", f"{cosmos.tool} reads it only for {' and '.join(known_key.trainers)}")
    if known_key.because:
        return KeyFinding(key, value, "left out", known_key.because)
    return KeyFinding(
        key,
        value,
        "mapped",
        ", ".join(filter(None, (describe_result(name, draft) for name in known_key.becomes))) or DEFAULT,
    )


def describe_result(name: str, draft: Draft) -> str:
    """Describe what a cosmos-rl key became: a dsreason key and its value, the number of GPUs, or the command; "" if unset."""
    if name == "GPUs":
        return f"{draft.num_gpus} GPUs in total"
    if name == "the command":
        return f"dsreason {draft.trainer}"
    value = draft.get(name)
    return "" if value is None else f"{name} = {value!r}"
