"""What MXFP4 and each correction do to a small GRPO run: reward, entropy, gradient norm, mismatch, over seeds.

    python benchmarks/rl.py [--seeds 3] [--steps 250] [--side rollout] [--outliers 32] [--recipes NAME ...]

The job is the demo's (tiny Qwen3, TRL, CPU), its own fake quantization replaced by `mxprobe.emulate`. Every arm has
the same seeds. Prints a markdown table with 95 % t-intervals over seeds, and Spearman's correlation between the
arms' KL and reward with a bootstrap interval over arms. One run takes about 40 s on one idle core.

Reward, entropy and gradient norm are means of the last tenth of the steps. The others are measured every tenth of
the run on the run's own weights and on completions sampled as the run samples them, without touching its random
state:

    KL(rollout || trainer), KL(rollout || high precision)    per token, exact from logits
    gradient cosine     of the policy gradient of the same completions, the recipe in the forward pass (straight-through
                        backward) against high precision; what a trainer that is quantized alike would make of them

The arm `mxfp4`, the run that a user would have, also replays every other arm's forward on its own weights. Spearman's
correlation is printed for both: KL of each arm in its own run, and KL as replayed in the MXFP4 run, with reward.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

ARMS: dict[str, str] = {
    "high precision": "none",
    "mxfp4": "fwd=mxfp4/rceil",
    "mxfp4 floor": "fwd=mxfp4/floor",
    "mbs:128": "fwd=mxfp4/rceil+mbs:128",
    "mbs:32": "fwd=mxfp4/rceil+mbs:32",
    "had:32": "fwd=mxfp4/rceil+had:32",
    "of:0.5": "fwd=mxfp4/rceil+of:0.5",
    "of:1.0": "fwd=mxfp4/rceil+of:1.0",
    "mbs:128 + of:0.5": "fwd=mxfp4/rceil+mbs:128+of:0.5",
    "mbs:128 + AQN": "fwd=mxfp4/rceil+mbs:128",
    "nvfp4": "fwd=nvfp4",
    "mxfp8": "fwd=mxfp8/rceil",
}
MIN_ARMS = 8
"""Fewer arms give a rank correlation no interval worth printing."""
REPLAYING = "mxfp4"
LOGGED = ("reward", "entropy", "grad_norm")
MEASURED = ("grad_cosine", "kl_trainer", "kl_high_precision")
METRICS = (*LOGGED, *MEASURED)
HEADINGS = {
    "reward": "reward",
    "entropy": "entropy",
    "grad_norm": "gradient norm",
    "grad_cosine": "gradient cosine",
    "kl_trainer": "KL to the trainer",
    "kl_high_precision": "KL to high precision",
}
# 97.5 % quantile of Student's t by degrees of freedom.
T = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 7: 2.36, 8: 2.31, 9: 2.26}


def worker(arm: str, side: str, outliers: float, seed: int, steps: int) -> dict[str, Any]:
    """One run in this process."""
    import torch
    from transformers import TrainerCallback

    import mxprobe
    from mxprobe.demo import job
    from mxprobe.emulation import Emulation, Recipe, noise_callback

    recipe = Recipe.parse(ARMS[arm])
    own = recipe if recipe.quantizes_nothing else recipe.on(side)
    emulations: list[Emulation] = []

    def emulate(model: torch.nn.Module, **_: object) -> None:
        emulations.append(mxprobe.emulate(model, own))

    @dataclass(frozen=True)
    class Completions:
        """Sampled once; every forward pass below is of the same tokens."""

        model: torch.nn.Module
        ids: torch.Tensor
        n_prompt: int
        real: torch.Tensor
        advantage: torch.Tensor

        def log_probs(self) -> torch.Tensor:
            """[n_tokens, vocabulary]"""
            logits = self.model(input_ids=self.ids).logits[:, self.n_prompt - 1 : -1]
            return logits[self.real].double().log_softmax(-1)

        def gradient(self) -> torch.Tensor:
            """Of the policy-gradient loss, all parameters in one vector."""
            tokens = self.ids[:, self.n_prompt :][self.real]
            chosen = self.log_probs().gather(1, tokens[:, None])[:, 0]
            loss = -(chosen * self.advantage[:, None].expand_as(self.real)[self.real]).mean()
            parameters = [p for p in self.model.parameters() if p.requires_grad]
            return torch.cat([g.flatten().double() for g in torch.autograd.grad(loss, parameters)])

    def sample(model: torch.nn.Module, tokenizer: Any) -> Completions:
        rows = job.build_dataset(seed + 1000).select(range(64))
        prompts = tokenizer([row["prompt"] for row in rows], return_tensors="pt", add_special_tokens=False)
        prompts.pop("token_type_ids", None)
        with torch.no_grad(), torch.random.fork_rng():
            torch.manual_seed(0)
            ids = model.generate(**prompts, max_new_tokens=8, do_sample=True, top_k=0)
        n_prompt = prompts["input_ids"].shape[1]
        completion = ids[:, n_prompt:]
        ended = (completion == 1).int().cumsum(1) - (completion == 1).int()
        texts = tokenizer.batch_decode(completion, skip_special_tokens=True)
        reward = torch.tensor(job.copy_reward(texts, [row["answer"] for row in rows]), dtype=torch.float64)
        return Completions(model, ids, n_prompt, (ended == 0) & (completion != 0), reward - reward.mean())

    def kl(p: torch.Tensor, q: torch.Tensor) -> float:
        return float((p.exp() * (p - q)).sum(-1).mean())

    def in_forward(name: str) -> Recipe:
        other = Recipe.parse(ARMS[name])
        return other if other.quantizes_nothing else other.on("both")

    measured: list[dict[str, float]] = []
    replayed: list[dict[str, float]] = []

    class MeasureOnOwnWeights(TrainerCallback):
        def on_step_end(self, args, state, control, model=None, processing_class=None, **_: object) -> None:
            if state.global_step % max(steps // 10, 1):
                return
            emulation = emulations[0]
            completions = sample(model, processing_class)
            with torch.no_grad(), emulation.rollout():
                rollout = completions.log_probs()
            with torch.no_grad():
                trainer = completions.log_probs()
            emulation.set("none", now=True)
            exact, gradient = completions.log_probs().detach(), completions.gradient()
            emulation.set(in_forward(arm), now=True)
            alike = completions.gradient()
            measured.append(
                {
                    "grad_cosine": float(torch.cosine_similarity(gradient, alike, dim=0)),
                    "kl_trainer": kl(rollout, trainer),
                    "kl_high_precision": kl(rollout, exact),
                }
            )
            if arm == REPLAYING:
                found = {}
                for name in ARMS:
                    emulation.set(in_forward(name), now=True)
                    with torch.no_grad():
                        found[name] = kl(completions.log_probs(), exact)
                replayed.append(found)
            emulation.set(own, now=True)

    extra = [MeasureOnOwnWeights(), *([noise_callback()] if arm.endswith("AQN") else [])]

    class MeasuredTrainer(job.GRPOTrainer):
        def __init__(self, *args: object, callbacks: list, **kwargs: object) -> None:
            super().__init__(*args, callbacks=[*callbacks, *extra], **kwargs)

    job.emulate, job.GRPOTrainer = emulate, MeasuredTrainer
    with tempfile.TemporaryDirectory() as directory:
        sys.argv = ["job.py", "--out", directory, "--steps", str(steps), "--seed", str(seed)]
        sys.argv += ["--outliers", str(outliers)]
        job.main()
        lines = (Path(directory) / "metrics.jsonl").read_text().splitlines()
    last = [json.loads(line) for line in lines[-max(steps // 10, 1) :]]
    result: dict[str, Any] = {name: statistics.fmean(line[name] for line in last) for name in LOGGED}
    result |= {name: statistics.fmean(each[name] for each in measured) for name in MEASURED}
    if replayed:
        result["replayed"] = {name: statistics.fmean(each[name] for each in replayed) for name in ARMS}
    return result


def run_arm(arm: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """One result per seed; a run that the results file holds already is not repeated."""
    lines = options.results.read_text().splitlines() if options.results and options.results.exists() else []
    known = {json.dumps(line["run"]): line["result"] for line in map(json.loads, lines)}

    def run_seed(seed: int) -> dict[str, Any]:
        run = json.dumps([arm, options.side, options.outliers, seed, options.steps])
        if run not in known:
            command = [sys.executable, __file__, "--worker", run]
            finished = subprocess.run(command, capture_output=True, text=True, check=False)
            if finished.returncode:
                raise SystemExit(f"{arm}, seed {seed} failed:\n{finished.stderr[-3000:]}")
            known[run] = json.loads(finished.stdout.splitlines()[-1])
            if options.results:
                with options.results.open("a") as file:
                    file.write(json.dumps({"run": json.loads(run), "result": known[run]}) + "\n")
        numbers = "  ".join(f"{name} {value:.3g}" for name, value in known[run].items() if name in METRICS)
        print(f"{arm} seed {seed}: {numbers}", file=sys.stderr, flush=True)
        return known[run]

    with ThreadPoolExecutor(options.jobs) as pool:
        return list(pool.map(run_seed, range(options.seeds)))


def interval(values: list[float]) -> str:
    mean = statistics.fmean(values)
    digits = 3 if abs(mean) >= 0.001 or mean == 0 else 6
    if len(values) < 2:
        return f"{mean:.{digits}f}"
    half = T.get(len(values) - 1, 1.96) * statistics.stdev(values) / math.sqrt(len(values))
    return f"{mean:.{digits}f} ± {half:.{digits}f}"


def spearman(x: np.ndarray, y: np.ndarray) -> float:
    """Rank correlation; ties share their mean rank."""

    def ranks(values: np.ndarray) -> np.ndarray:
        _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
        return (np.cumsum(counts) - (counts - 1) / 2.0)[inverse]

    rx, ry = ranks(x), ranks(y)
    if rx.std() == 0 or ry.std() == 0:
        return math.nan
    return float(np.corrcoef(rx, ry)[0, 1])


def correlation(kl: list[float], reward: list[float]) -> str:
    """Spearman's rho over arms with a 95 % percentile interval of 2,000 resamples of arms."""
    x, y = np.array(kl), np.array(reward)
    generator = np.random.default_rng(0)
    resamples = (generator.integers(0, len(x), len(x)) for _ in range(2000))
    draws = [rho for i in resamples if math.isfinite(rho := spearman(x[i], y[i]))]
    low, high = np.quantile(draws, [0.025, 0.975])
    return f"{spearman(x, y):.2f} [{low:.2f}, {high:.2f}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--side", choices=("rollout", "train", "both"), default="rollout")
    parser.add_argument("--outliers", type=float, default=32.0)
    parser.add_argument("--recipes", nargs="+", choices=list(ARMS), default=list(ARMS), metavar="NAME")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time; each keeps one core busy")
    parser.add_argument("--results", type=Path, help="JSON lines: runs found here are not repeated, new ones are added")
    options = parser.parse_args()
    if options.worker:
        print(json.dumps(worker(*json.loads(options.worker))))
        return
    results = {arm: run_arm(arm, options) for arm in options.recipes}
    print_table(results, options)
    if len(results) >= MIN_ARMS:
        print_correlations(results)


def print_table(results: dict[str, list[dict[str, Any]]], options: argparse.Namespace) -> None:
    # With a trainer in high precision, KL to it is KL to high precision.
    shown = [name for name in METRICS if name != "kl_trainer" or options.side != "rollout"]
    replayed = replayed_kl(results)
    print(f"{options.side} quantized, outliers x{options.outliers:g}, {options.steps} steps, {options.seeds} seeds\n")
    headings = [HEADINGS[name] for name in shown] + [f"replayed in the {REPLAYING} run"] * bool(replayed)
    print(f"| recipe | {' | '.join(headings)} |\n{'|---' * (len(headings) + 1)}|")
    for arm, runs in results.items():
        cells = [interval([run[name] for run in runs]) for name in shown]
        if replayed:
            cells.append(interval(replayed[arm]))
        print(f"| {arm} | {' | '.join(cells)} |")


def replayed_kl(results: dict[str, list[dict[str, Any]]]) -> dict[str, list[float]]:
    """KL(arm, high precision) on the weights of the MXFP4 run, by seed; {} where that run is not among the arms."""
    replays = [run["replayed"] for run in results.get(REPLAYING, [])]
    return {arm: [each[arm] for each in replays] for arm in results} if replays else {}


def print_correlations(results: dict[str, list[dict[str, Any]]]) -> None:
    reward = [statistics.fmean(run["reward"] for run in runs) for runs in results.values()]
    own = [statistics.fmean(run["kl_high_precision"] for run in runs) for runs in results.values()]
    print(f"\nSpearman of KL in an arm's own run and its reward, {len(reward)} arms: {correlation(own, reward)}")
    replayed = replayed_kl(results)
    if replayed:
        rho = correlation([statistics.fmean(values) for values in replayed.values()], reward)
        print(f"Spearman of KL replayed in the {REPLAYING} run and reward: {rho}")


if __name__ == "__main__":
    main()
