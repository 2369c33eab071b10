"""Does following the demo's advice do what was predicted? The demo with planted outliers, over seeds.

    python benchmarks/demo_seeds.py [--seeds 10] [--first 0] [--jobs 1] [--results FILE]

Per seed what `mxprobe demo` does, less its pages: a run attached from outside, its recommendation, a replay on its last
weights with the recommended code and without, the run again with that code, and a replay on its last weights. Prints a
markdown table of replayed KL and mismatch (nats per token) in the first run, as predicted, and in the second run, how
often they moved as predicted, and reward and entropy (means of the last 25 steps) beside. A seed takes two runs of
250 steps, about two minutes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mxprobe.attribution import recommend
from mxprobe.demo.runner import DemoPaths, Scenario, read_steps, record, replay
from mxprobe.demo.second_run import DOWN, UP, Replay, mismatch_of, predict
from mxprobe.trace import open_trace

SCENARIO = Scenario.OUTLIERS
LAST_STEPS = 25


def run_seed(seed: int, directory: Path) -> dict[str, Any]:
    """What was measured; the prediction follows from it, see `mxprobe.demo.second_run`."""
    paths = DemoPaths(directory)
    paths.second.directory.mkdir(parents=True)
    record(SCENARIO, paths, seed=seed, on_attached=lambda pid: None, on_step=lambda step: None)
    trace = open_trace(paths.trace)
    recommendation = recommend(trace)
    found: dict[str, Any] = {"seed": seed, "verdict": recommendation.verdict, "chosen": list(recommendation.chosen)}
    if recommendation.snippet is None or not recommendation.chosen:
        return found
    paths.correction.write_text(recommendation.snippet.text)
    first = replay(SCENARIO, paths, seed=seed, correction=paths.correction)
    record(
        SCENARIO,
        paths.second,
        seed=seed,
        apply=paths.correction,
        on_attached=lambda pid: None,
        on_step=lambda step: None,
    )
    second = replay(SCENARIO, paths.second, seed=seed, correction=paths.correction)
    levels = {
        name: [
            statistics.fmean(getattr(step, name) for step in read_steps(each.job / "metrics.jsonl")[-LAST_STEPS:])
            for each in (paths, paths.second)
        ]
        for name in ("reward", "entropy")
    }
    mismatch = [mismatch_of(trace), mismatch_of(open_trace(paths.second.trace))]
    return {**found, **levels, "mismatch": mismatch, "first": asdict(first), "second": asdict(second)}


def results(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Of each seed; those that the results file holds are not run again."""
    lines = options.results.read_text().splitlines() if options.results and options.results.exists() else []
    known = {line["seed"]: line for line in map(json.loads, lines)}

    def one(seed: int) -> dict[str, Any]:
        if seed not in known:
            with tempfile.TemporaryDirectory() as directory:
                known[seed] = run_seed(seed, Path(directory) / "demo")
            if options.results:
                with options.results.open("a") as file:
                    file.write(json.dumps(known[seed]) + "\n")
        return known[seed]

    with ThreadPoolExecutor(options.jobs) as pool:
        return list(pool.map(one, range(options.first, options.first + options.seeds)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--jobs", type=int, default=1, help="seeds at a time; each keeps one core busy")
    parser.add_argument("--results", type=Path, help="JSON lines: seeds found here are not run again")
    found = results(parser.parse_args())
    print(f"first run, predicted [interval: {DOWN:g} down, {UP:g} up, and the batches], second run\n")
    print("| seed | advice | replayed KL | mismatch | reward | entropy |")
    print("|---|---|---|---|---|---|")
    outcomes: dict[str, list[str]] = {}
    for each in found:
        if "first" not in each:
            print(f"| {each['seed']} | {each['verdict']} | - | - | - | - |")
            continue
        cells = []
        for prediction in predict(Replay(**each["first"]), Replay(**each["second"]), tuple(each["mismatch"])):
            outcomes.setdefault(prediction.measure, []).append(prediction.outcome)
            predicted = f"{prediction.predicted:.2g} [{prediction.low:.2g}, {prediction.high:.2g}]"
            cells.append(f"{prediction.before:.2g}, {predicted}, {prediction.after:.2g}: {prediction.outcome}")
        levels = [f"{each[name][0]:.3f}, {each[name][1]:.3f}" for name in ("reward", "entropy")]
        print(f"| {each['seed']} | {', '.join(each['chosen'])} | {' | '.join([*cells, *levels])} |")
    print()
    for measure, moved in outcomes.items():
        print(f"{measure}: as predicted in {moved.count('as predicted')} of {len(found)} seeds")


if __name__ == "__main__":
    main()
