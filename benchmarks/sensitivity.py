"""Delta2 against the truth, and what a replay costs.

    python benchmarks/sensitivity.py accuracy       on the small language model of tests/small_lm.py, minutes
    python benchmarks/sensitivity.py gradients      gradient probes on the same model, a minute
    python benchmarks/sensitivity.py schedule       a replay against a training step of about a second, a minute
    python benchmarks/sensitivity.py cost           on the demo's GRPO job, minutes
    python benchmarks/sensitivity.py gains TRACE... predicted gains in traces, e.g. of `mxprobe demo --once --seed N`

`accuracy`: Spearman correlation of predictors with the KL that each forward operand's error really makes (the same
batch run again with that error put in), the ratio of predicted to true KL, and the predicted against the replayed gain
of corrections. `gradients`: the same for what each of the six operands does to all weight gradients. `cost`: the job's
time per step in hooks of ours, with and without `--sensitivity-every`.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from mxprobe.agent.parts.replays import KEPT_WIDER
from mxprobe.attribution import Thresholds, recommend
from mxprobe.demo.runner import Scenario, job_command, read_steps, running
from mxprobe.measuring.replay.arms import DEFAULT_ARMS, FORWARD_ROLES, arm_product, quantizer, replay_arms, run_arm
from mxprobe.measuring.replay.backward import WeightGradients
from mxprobe.measuring.replay.captured_call import capture, forward, replayed
from mxprobe.measuring.replay.gradient_probes import ROLES, probe_gradients
from mxprobe.measuring.replay.interception import intercepted
from mxprobe.measuring.replay.policy_output import PolicyGradient
from mxprobe.measuring.replay.sensitivity import CPU_MAX_ROWS, measure_sensitivity
from mxprobe.trace import open_trace
from mxprobe_kernels import apply_correction, decompose
from tests import small_lm

SAMPLES = 64
HELD_OUT = 10**6
CORRECTIONS = (
    *("rule:floor", "rule:even", "rule:ceil", "rule:oas", "mbs:32", "mbs:64", "mbs:128", "mbs:256"),
    *("of:0.25", "of:0.5", "of:0.75", "of:1.0", "had:16", "had:32", "nvfp4", "mxfp8"),
)

Key = tuple[str, str]


def spearman(a: list[float], b: list[float]) -> float:
    ranks = [np.argsort(np.argsort(np.array(values))) for values in (a, b)]
    return float(np.corrcoef(*ranks)[0, 1])


def predicted(
    calls: list[Any],
    modules: Any,
    *,
    n_probes: int,
    seed: int = 0,
    max_rows: int | None = SAMPLES * small_lm.CONTEXT,
    **options: Any,
) -> dict[tuple[str, str, str], float]:
    """(module, role, component) -> Delta2 / 2, averaged over calls and probes; of all rows, or the default number."""
    sums: dict[tuple[str, str, str], list[float]] = {}
    for i, call in enumerate(calls):
        found = measure_sensitivity(call, modules, n_probes=n_probes, seed=seed + i, max_rows=max_rows, **options)
        for row in found.rows():
            key = (row["module"], row["role"], row["component"])
            sums.setdefault(key, []).append(row["sum_delta2"] / row["n_tokens"] / 2)
    return {key: statistics.fmean(values) for key, values in sums.items()}


def accuracy() -> None:
    model = small_lm.trained()
    modules = small_lm.linears(model)
    calls = [capture(model, (small_lm.batch(SAMPLES, HELD_OUT + i),), {}) for i in range(8)]
    operands = [(name, role) for name in modules for role in FORWARD_ROLES]
    true: dict[Key, dict[str, float]] = {}
    for name, role in operands:
        (arm,) = replay_arms(calls[0], modules, ("q",), only={(name, role)})
        row = arm.row()
        true[name, role.value] = {key: row[key] / row["n_tokens"] for key in row if key.startswith("sum_")}
    kl = [each["sum_kl"] for each in true.values()]
    print(f"{len(true)} forward operands, true KL {min(kl):.1e} to {max(kl):.1e} nats per token\n")
    print("| predictor | Spearman with KL | predicted / true, median (q10 to q90) |\n|---|---|---|")
    nmse = [decompose(modules[name].weight).sum_e2 / decompose(modules[name].weight).sum_x2 for name in modules]
    weights = [true[name, "w_fwd"]["sum_kl"] for name in modules]
    print(f"| NMSE (weights only) | {spearman(nmse, weights):.3f} | |")
    everything = SAMPLES * small_lm.CONTEXT
    for words, used, n_probes, max_rows in (
        ("Delta2, 1 probe, the microbatch itself", calls[:1], 1, everything),
        ("Delta2, 4 probes, the microbatch itself", calls[:1], 4, everything),
        ("Delta2, 1 probe, 8 other microbatches", calls, 1, everything),
        (f"Delta2, 1 probe, {CPU_MAX_ROWS} rows of each of these 8 (the default)", calls, 1, None),
    ):
        trials = []
        for seed in range(0, 50, 10):
            found = predicted(used, modules, n_probes=n_probes, seed=seed, max_rows=max_rows)
            half = [found[(*key, "total")] for key in true]
            trials.append((spearman(half, kl), np.quantile(np.array(half) / np.array(kl), [0.5, 0.1, 0.9])))
        rho = [each[0] for each in trials]
        low, middle, high = (statistics.median(each[1][i] for each in trials) for i in (1, 0, 2))
        spread = f"{statistics.median(rho):.3f} ({min(rho):.3f} to {max(rho):.3f})"
        print(f"| {words} | {spread} | {middle:.2f} ({low:.2f} to {high:.2f}) |", flush=True)
    gains(calls[:3], modules)
    wider(calls[:4], modules)
    split(calls[0], modules)
    time_replay(calls[0], modules)


def gains(calls: list[Any], modules: Any) -> None:
    left = dict.fromkeys(("total", *CORRECTIONS), 0.0)
    kl = dict.fromkeys(("q", *CORRECTIONS), 0.0)
    for i, call in enumerate(calls):
        for row in measure_sensitivity(call, modules, corrections=CORRECTIONS, seed=i).rows():
            if row["component"] in left:
                left[row["component"]] += row["sum_delta2"]
        for arm in replay_arms(call, modules, list(kl)):
            kl[arm.name] += arm.row()["sum_kl"]
    print("\n| correction | predicted KL gain, 1 probe | replayed |\n|---|---|---|")
    errors = []
    for name in CORRECTIONS:
        told, seen = 1 - left[name] / left["total"], 1 - kl[name] / kl["q"]
        errors.append(abs(np.clip(told, -1, 1) - np.clip(seen, -1, 1)))
        print(f"| {name} | {told:+.2f} | {seen:+.2f} |")
    print(f"\nmean absolute error of the gain, clipped to [-1, 1]: {100 * np.mean(errors):.1f} points")


def wider(calls: list[Any], modules: Any) -> None:
    """What MXFP8 in place of MXFP4 would leave of the KL: by its own Delta2, by output errors, replayed."""
    found = predicted(calls, modules, n_probes=1, corrections=KEPT_WIDER)
    operands = {(module, role) for module, role, _ in found}
    own = sum(found[(*key, "mxfp8")] for key in operands)
    by_output = 0.0
    with replayed(calls[0], gradient=True), intercepted(modules, record=modules) as intercept:
        forward(calls[0])
    for recorded in intercept.calls:
        assert recorded.x is not None
        x, w = recorded.x.flatten(0, -2), recorded.module.weight.detach()
        for role, a, b in (("x_fwd", x, w.T), ("w_fwd", w, x.T)):
            left = [float(((apply_correction(a, name) - a) @ b).square().sum()) for name in ("mxfp8", "rule:rceil")]
            by_output += found[recorded.name, role, "total"] * left[0] / left[1]
    kl = {"q": 0.0, "mxfp8": 0.0}
    n_tokens = 0.0
    for call in calls:
        for arm in replay_arms(call, modules, list(kl)):
            row = arm.row()
            kl[arm.name] += row["sum_kl"]
            n_tokens += row["n_tokens"] / len(kl)
    print(f"\nKL in nats per token, MXFP4: replayed {kl['q'] / n_tokens:.2e}. All in MXFP8 instead: replayed")
    print(f"{kl['mxfp8'] / n_tokens:.2e}, by its own Delta2 {own:.2e}, by output errors {by_output:.2e}")


def gradients() -> None:
    model = small_lm.trained()
    modules, ids = small_lm.linears(model), small_lm.batch(16, HELD_OUT)
    logits = model(ids)
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    gradient = PolicyGradient(torch.autograd.grad(loss, logits)[0], None)
    call = capture(model, (ids,), {})
    true: dict[Key, float] = {}
    high = WeightGradients(modules)
    run_arm(call, modules, arm_product(quantizer("high"), gradients=high), gradient, high)
    started = time.perf_counter()
    for name in modules:
        for role in ROLES:
            found = WeightGradients(modules)
            run_arm(call, modules, arm_product(quantizer("q"), only={(name, role)}, gradients=found), gradient, found)
            true[name, role.value] = float(torch.stack([s.values for s in found.against(high, modules)]).sum(0)[1])
    rerun_s = time.perf_counter() - started
    reached = {key: value for key, value in true.items() if value > 1e-9 * max(true.values())}
    print(f"{len(reached)} operands that reach a dW; running the batch again for each: {rerun_s:.1f} s\n")
    print("| directions | Spearman with ||change of all dW||^2 (range of 5 seeds) | predicted / true, median | s |")
    print("|---|---|---|---|")
    for n_probes in (4, 8, 16):
        trials, spent = [], time.perf_counter()
        for seed in range(5):
            rows = probe_gradients(call, modules, gradient, n_probes=n_probes, seed=seed)
            seen = {(r["module"], r["role"]): r["err2"] for r in rows if r["component"] == "total"}
            pairs = [(seen[key], reached[key]) for key in reached]
            rho = spearman([a for a, _ in pairs], [b for _, b in pairs])
            trials.append((rho, float(np.median([a / b for a, b in pairs]))))
        rho = [each[0] for each in trials]
        each_s = (time.perf_counter() - spent) / 5
        ratio = statistics.median(each[1] for each in trials)
        print(f"| {n_probes} | {statistics.median(rho):.3f} ({min(rho):.3f} to {max(rho):.3f}) ", end="")
        print(f"| {ratio:.2f} | {each_s:.1f} |", flush=True)


def split(call: Any, modules: Any) -> None:
    rows = {arm.name: arm.row() for arm in replay_arms(call, modules)}
    print("\n| arm | KL to high, nats per token | entropy shift |\n|---|---|---|")
    for name, row in rows.items():
        print(f"| {name} | {row['sum_kl'] / row['n_tokens']:.2e} | {row['sum_entropy_shift'] / row['n_tokens']:+.4f} |")


def time_replay(call: Any, modules: Any) -> None:
    def seconds(run: Any) -> float:
        times = []
        for _ in range(5):
            started = time.perf_counter()
            run()
            times.append(time.perf_counter() - started)
        return statistics.median(times)

    def step() -> None:
        call.module(*call.args).float().square().mean().backward()

    one = seconds(step)
    call.module.zero_grad()
    print(f"\nforward and backward: {1e3 * one:.0f} ms; replay for sensitivity:", end=" ")
    print(f"{seconds(lambda: measure_sensitivity(call, modules)) / one:.1f} times that;", end=" ")
    print(f"{len(DEFAULT_ARMS)} arms: {seconds(lambda: list(replay_arms(call, modules))) / one:.1f} times")


def schedule() -> None:
    """A replay relative to a step: the same model, batch and machine, in turns."""
    torch.manual_seed(0)
    model = small_lm.SmallLM(width=256)
    modules = small_lm.linears(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step(n: int) -> None:
        ids = small_lm.batch(n, 0)
        loss = torch.nn.functional.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    n = 8
    while seconds_of(step, n) < 0.8:
        n *= 2
    step_s, replay_s = [], []
    for i in range(5):
        step_s.append(seconds_of(step, n))
        call = capture(model, (small_lm.batch(n, i),), {})
        replay_s.append(
            seconds_of(lambda call=call: list(measure_sensitivity(call, modules, corrections=KEPT_WIDER).rows()))
        )
    one, spent = statistics.median(step_s), statistics.median(replay_s)
    print(f"step of {one:.2f} s ({n} x {small_lm.CONTEXT} tokens); a sensitivity replay takes {spent / one:.2f} steps:")
    for every in (50, 100, 200):
        print(f"  --sensitivity-every {every}: {spent / one / every:.2%} of step time", flush=True)
    ids = small_lm.batch(n, 9)
    whole = seconds_of(whole_replay, capture(model, (ids,), {}), modules, ids)
    again = seconds_of(step, n)
    print(f"one with arms, gradients and 4 directions takes {whole / again:.1f} steps:")
    print(f"  --replay-every 1000: {whole / again / 1000:.2%} of step time")


def whole_replay(call: Any, modules: Any, ids: torch.Tensor) -> None:
    logits = call.module(ids)
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    gradient = PolicyGradient(torch.autograd.grad(loss, logits)[0], None)
    for arm in replay_arms(call, modules, gradient=gradient):
        arm.row()
        list(arm.gradient_rows())
    probe_gradients(call, modules, gradient, n_probes=4)


def seconds_of(run: Any, *arguments: Any) -> float:
    started = time.perf_counter()
    run(*arguments)
    return time.perf_counter() - started


def cost(steps: int) -> None:
    print("| --sensitivity-every | in hooks, of step time | one replay, ms | median step, ms |\n|---|---|---|---|")
    for every in (0, 50, 200):
        with tempfile.TemporaryDirectory() as temporary:
            job_directory, trace = Path(temporary) / "job", Path(temporary) / "trace.mxprobe"
            command = job_command(Scenario.OUTLIERS, seed=0, out=job_directory, steps=steps)
            with running(command, Path(temporary) / "job.log") as job:
                while not read_steps(job_directory / "metrics.jsonl"):
                    time.sleep(0.05)
                attach = [sys.executable, "-m", "mxprobe", "attach", str(job.pid), "-o", str(trace)]
                subprocess.run([*attach, "--sensitivity-every", str(every)], check=True, capture_output=True)
                job.wait()
            overhead, events = open_trace(trace).overhead(), open_trace(trace).events()
            told = events[events["kind"] == "sensitivity"]["detail"].tolist()
            replay_ms = told[0].split("took ")[1].split(" ms")[0] if told else "-"
            share = overhead["probe_ns"].sum() / overhead["step_ns"].sum()
            print(
                f"| {every or 'off'} | {share:.2%} | {replay_ms} | {overhead['step_ns'].median() / 1e6:.0f} |",
                flush=True,
            )


def gains_of_traces(traces: list[str]) -> None:
    """Gain of each correction on the operands that the verdict names: mean over traces, least and largest."""
    found: dict[str, list[float]] = {}
    for trace in traces:
        for score in recommend(open_trace(Path(trace)), Thresholds(n_resamples=1)).corrections:
            found.setdefault(score.correction, []).append(score.gain)
    print(f"| correction | part of the output error removed, {len(traces)} traces |\n|---|---|")
    for name, values in sorted(found.items(), key=lambda item: -statistics.fmean(item[1])):
        print(f"| {name} | {statistics.fmean(values):.2f} ({min(values):.2f} to {max(values):.2f}) |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("what", choices=["accuracy", "gradients", "schedule", "cost", "gains"])
    parser.add_argument("traces", nargs="*")
    parser.add_argument("--steps", type=int, default=250)
    options = parser.parse_args()
    torch.set_num_threads(1)
    run = {"accuracy": accuracy, "gradients": gradients, "schedule": schedule, "cost": lambda: cost(options.steps)}
    run["gains"] = lambda: gains_of_traces(options.traces)
    run[options.what]()


if __name__ == "__main__":
    main()
