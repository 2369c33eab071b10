"""Measures how far rollout and trainer of a finished demo job disagree on its last weights, corrected and not.

    python replay_kl.py --parameters DIR/parameters.pt --apply FILE [the job's own options]

Samples completions as the job's rollout does, on prompts it has not seen, and prints one JSON object:
{"plain": [KL, ...], "corrected": [KL, ...]}, KL(rollout || trainer) in nats per token, exact from logits, one value
per batch of 64 prompts. Both have the same prompts and the same random numbers.
"""

# Around a user's script, against libraries that are only partly typed.
# pyright: basic, reportAttributeAccessIssue=false, reportArgumentType=false

from __future__ import annotations

import argparse
import json
import runpy
from pathlib import Path

import job  # beside this script; sets the environment before torch is imported
import torch
from transformers import Qwen3ForCausalLM

N_BATCHES = 8
N_PROMPTS = 64
PROMPT_SEED = 1_000_003
"""Added to the job's seed: other prompts than those it trained on."""


def kl_by_batch(model: Qwen3ForCausalLM, prompts: list[torch.Tensor]) -> list[float]:
    """Return KL(rollout || trainer) per token of each batch of prompts [N_PROMPTS, T]."""
    found: list[float] = []
    for index, ids in enumerate(prompts):
        torch.manual_seed(index)
        with torch.no_grad():
            sampled = model.generate(input_ids=ids, max_new_tokens=8, do_sample=True, top_k=0)
        completion = sampled[:, ids.shape[1] :]
        ended = (completion == 1).int().cumsum(1) - (completion == 1).int()
        counted = (ended == 0) & (completion != 0)

        def log_probs(sampled: torch.Tensor = sampled, start: int = ids.shape[1]) -> torch.Tensor:
            return model(input_ids=sampled).logits[:, start - 1 : -1].double().log_softmax(-1)

        with torch.no_grad():  # without gradients the job's forward is its rollout's, with them its trainer's
            rollout = log_probs()
        with torch.enable_grad():
            trainer = log_probs().detach()
        kl = (rollout.exp() * (rollout - trainer)).sum(-1)
        found.append(float(kl[counted].mean()))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="KL of rollout and trainer of a finished demo job")
    parser.add_argument("--parameters", type=Path, required=True)
    parser.add_argument("--apply", type=Path, required=True, help="Python file whose enable(model) is the correction")
    options, of_job = parser.parse_known_args()
    settings = job.parse_arguments(of_job)
    torch.set_num_threads(1)
    tokenizer = job.build_tokenizer()
    rows = job.build_dataset(settings.seed + PROMPT_SEED)["prompt"][: N_BATCHES * N_PROMPTS]
    prompts = tokenizer(list(rows), return_tensors="pt", add_special_tokens=False)["input_ids"].split(N_PROMPTS)
    found: dict[str, list[float]] = {}
    for name in ("plain", "corrected"):
        model = job.prepare_model(settings)
        model.load_state_dict(torch.load(options.parameters, weights_only=True))
        if name == "corrected":
            runpy.run_path(str(options.apply))["enable"](model)
        found[name] = kl_by_batch(model.eval(), list(prompts))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
