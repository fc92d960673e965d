"""Options of `make_checkpoint` by family, which together cover all modules and settings."""

from __future__ import annotations

from typing import Any

MODES = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")
PROMPTS = {"query": "Find this: ", "document": "", "topic": "About what? "}
RESIDUAL = {"out_features": 16, "use_residual": True, "activation_function": "SELU"}
NO_BIAS = {"out_features": 24, "bias": False, "activation_function": "Identity"}

CASES: dict[str, dict[str, Any]] = {
    "bert": {},
    "roberta": {
        "pooling": ("cls",),
        "layout": "old",
        "lower_case": True,
        "prompts": PROMPTS,
        "default_prompt_name": "topic",
        "similarity": "dot",
        "truncate_dim": 24,
    },
    "xlm-roberta": {"pooling": MODES, "padding_side": "left", "normalize": False},
    "camembert": {"dense": [RESIDUAL, {"out_features": 16, "use_residual": True}], "layer_norm": True},
    "distilbert": {"pooling": ("mean_sqrt_len_tokens",), "dense": [NO_BIAS], "normalize": False},
    "mpnet": {"layer_pooling": 1},
    "albert": {"pooling": ("mean", "weightedmean"), "include_prompt": False, "prompts": PROMPTS},
    "electra": {"pooling": ("max", "lasttoken"), "normalize": False},
}
