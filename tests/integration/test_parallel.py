"""Tensor, sequence, pipeline, data and expert parallelism over gloo, four ranks: added up, the unsharded run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from mxprobe.attribution.ratios import totals
from mxprobe.schema import COUNTS, ENERGY_SUMS
from mxprobe.tables import EXPERT_SUMS, OUTPUT_SUMS
from tests.integration.parallel_ranks import ROLES

ROOT = Path(__file__).parents[2]
TOLERANCE = 1e-6
TIMEOUT_S = 300

pytestmark = pytest.mark.slow


Tables = dict[str, pd.DataFrame]


def run(plans: list[str], world: int, directory: Path) -> dict[str, Tables]:
    """Per plan the tables of all ranks, with `rank`."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.integration.parallel_ranks"]
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(world), str(directory), *plans],
            cwd=ROOT,
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]
    try:
        errors = [process.communicate(timeout=TIMEOUT_S)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * world, "\n".join(errors)
    return {plan: _tables(directory, plan, world) for plan in plans}


def _tables(directory: Path, plan: str, world: int) -> Tables:
    ranks = [json.loads((directory / f"{plan}.{rank}").read_text()) for rank in range(world)]
    return {
        table: pd.concat([pd.DataFrame(each[table]).assign(rank=rank) for rank, each in enumerate(ranks)])
        for table in ranks[0]
    }


SHARDED = ("DataParallel", "TensorParallel", "SequenceParallel", "Megatron", "Pipeline")


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tables]:
    """All plans: four ranks together, and the whole model in one process."""
    directory = tmp_path_factory.mktemp("plans")
    whole = run(["Plan", "ExpertsWhole", "FusedWhole"], 1, directory)
    return {**whole, **run([*SHARDED, "ExpertParallel", "FusedExpertParallel", "Unnumbered"], 4, directory)}


def sums(tensors: pd.DataFrame) -> pd.DataFrame:
    """Added over ranks, by module and role."""
    tensors = tensors.assign(module=tensors["module"].str.replace(".layer", ".", regex=False).str.rstrip("."))
    return totals(tensors, ["module", "role"]).set_index(["module", "role"]).sort_index()


def assert_equal(parts: pd.DataFrame, whole: pd.DataFrame, columns: tuple[str, ...]) -> None:
    assert list(parts.index) == list(whole.index)
    # Signed sums cancel: they are held to the sum of magnitudes that they are made of.
    magnitude = np.sqrt(whole["n"] * whole["sum_e2"]).to_numpy(dtype=float)
    for name in columns:
        got, wanted = parts[name].to_numpy(dtype=float), whole[name].to_numpy(dtype=float)
        bound = TOLERANCE * np.maximum(np.abs(wanted), magnitude if name == "sum_e" else 1e-3)
        worst = int(np.argmax(np.abs(got - wanted) / np.maximum(bound, 1e-300)))
        assert (np.abs(got - wanted) <= bound).all(), f"{name} of {parts.index[worst]}: {got[worst]}, {wanted[worst]}"


@pytest.mark.parametrize("plan", SHARDED)
def test_sums_over_ranks_are_those_of_the_unsharded_run(plan: str, plans: dict[str, Tables]):
    tables, whole = plans[plan], sums(plans["Plan"]["tensors"])
    found = sums(tables["tensors"])
    assert len(found) == 4 * ROLES
    assert_equal(found, whole, (*COUNTS, *ENERGY_SUMS))
    assert (tables["tensors"]["n_edge_blocks"] == 0).all()
    assert not (tables["events"]["kind"] == "error").any(), tables["events"]["detail"].to_list()
    if plan in ("DataParallel", "Pipeline"):  # no rank holds a part of these sums over features
        of_features = [key for key in whole.index if not key[1].endswith("wgrad")]
        assert_equal(found.loc[of_features], whole.loc[of_features], OUTPUT_SUMS)


def test_what_a_rank_returns_is_compared_with_its_own_product(plans: dict[str, Tables]):
    for plan in ("TensorParallel", "SequenceParallel"):
        outputs = plans[plan]["outputs"]
        assert outputs["exact"].all()
        assert set(outputs["recipe_x"]) == {"none"}
        assert outputs["module"].nunique() == 4


def test_a_sum_made_inside_the_layer_is_withheld_and_says_so(plans: dict[str, Tables]):
    tables = plans["Megatron"]
    assert set(tables["outputs"]["module"]) == {"layers.0.up.layer", "layers.1.up.layer"}
    assert tables["outputs"]["exact"].all()
    reasons = tables["modules"].set_index("module")["reason"].loc["layers.0.down.layer"]
    assert reasons.str.contains("sum over tensor-parallel ranks").any()


def test_stages_and_experts_keep_their_layers_apart(plans: dict[str, Tables]):
    tables, reference = plans["ExpertParallel"]["tensors"], plans["ExpertsWhole"]["tensors"]
    names = {f"layers.{layer}.experts.local_experts.{expert}.up" for layer in range(2) for expert in range(4)}
    assert set(tables["module"]) == names
    assert set(reference["module"]) == names
    assert_equal(sums(tables), sums(reference), (*COUNTS, *ENERGY_SUMS, *OUTPUT_SUMS))


def test_experts_held_as_one_parameter_keep_their_number_and_add_up(plans: dict[str, Tables]):
    parts, whole = plans["FusedExpertParallel"], plans["FusedWhole"]
    names = {f"layers.{layer}.experts.{part}" for layer in range(2) for part in ("up_proj", "down_proj")}
    assert set(parts["tensors"]["module"]) == names
    assert_equal(sums(parts["tensors"]), sums(whole["tensors"]), (*COUNTS, *ENERGY_SUMS, *OUTPUT_SUMS))
    key = ["module", "role", "expert"]
    columns = [name for name in EXPERT_SUMS if name != "n"]
    found, wanted = (each["experts"].set_index(key).sort_index() for each in (parts, whole))
    assert len(wanted) == len(names) * ROLES * 4
    assert list(found.index) == list(wanted.index)  # each expert of each layer on one rank alone
    np.testing.assert_allclose(found[columns].astype(float), wanted[columns].astype(float), rtol=TOLERANCE, atol=1e-9)


def test_stages_that_number_no_layer_do_not_share_a_name(plans: dict[str, Tables]):
    assert set(plans["Unnumbered"]["tensors"]["module"]) == {"stage0.0", "stage1.0"}
