"""Suggestions for keys that cosmos-rl ignores although they occur in configuration files, even in its own examples."""

from __future__ import annotations

from dsreason.problems import find_nearest
from dsreason.tools.cosmos_rl.draft import Settings

MEANT: dict[str, str] = {
    "enable_validation": "validation.enable",
    "validation_step": "validation.freq",
    "validation_freq": "validation.freq",
    "validation_batch_per_replica": "validation.batch_size",
    "num_samples_per_prompt": "rollout.n_generation",
    "rollout_batch_size": "rollout.batch_size",
    "kl_penalty": "train.train_policy.kl_beta",
    "kl_coef": "train.train_policy.kl_beta",
    "learning_rate": "train.optm_lr",
    "lr": "train.optm_lr",
    "epochs": "train.epoch",
    "max_steps": "train.max_num_steps",
    "ema_update_step_interval": "train.ema_update_interval",
    "timestep_fraction": "policy.diffusers.timesteps_fraction",
}
"""Last part of an ignored key → the key that was probably meant."""
GONE = {"cp_rotate_method": "it belonged to a kind of context parallelism that cosmos-rl no longer has"}


def suggest(key: str, cosmos: Settings) -> str:
    """Return a message about a key that cosmos-rl does not read, with the key that was probably meant if one is similar."""
    name = key.rpartition(".")[2]
    if key.startswith("custom."):
        return "cosmos-rl passes [custom] to your script, but dsreason does not read this key"
    if name in GONE:
        return f"cosmos-rl does not read it: {GONE[name]}"
    probable = MEANT.get(name)
    if probable not in cosmos.keys:
        homes = [known_key for known_key in cosmos.keys if known_key.rpartition(".")[2] == name]
        probable = homes[0] if homes else find_nearest(key, cosmos.keys, cutoff=0.75) or suggest_by_name(name, cosmos)
    if probable is None:
        return "cosmos-rl does not read it, and has no similar key"
    return f"cosmos-rl does not read it; {probable} was probably meant, whose value is {cosmos[probable]!r}"


def suggest_by_name(name: str, cosmos: Settings) -> str | None:
    """Return the key whose last part is most similar to `name`; None if none is similar enough."""
    names = {known_key.rpartition(".")[2]: known_key for known_key in reversed(cosmos.keys)}
    near = find_nearest(name, names, cutoff=0.75)
    return names[near] if near else None
