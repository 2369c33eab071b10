"""A second golden file, of seeds that nobody has seen when the kernels were written, against every CPU backend."""

import json
from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from mxprobe_kernels import cpu_backend, quantize_dequantize, torch_backend
from mxprobe_kernels.formats import MXFP4, Rule
from tests.cases import disagreements
from tests.golden.make_fresh import FRESH, case, inputs

ISAS = cpu_backend.isas()


@cache
def fresh() -> Mapping[str, Any]:
    return json.loads(FRESH.read_text())


def tensor_of(found: Mapping[str, Any]) -> torch.Tensor:
    bits = np.array([int(word, 16) for word in found["x_bits"]], dtype=np.uint32)
    return torch.from_numpy(bits.view(np.float32).reshape(found["shape"]).copy())


@pytest.mark.parametrize("found", fresh()["cases"], ids=lambda found: found["name"])
def test_every_cpu_backend(found: Mapping[str, Any]):
    x = tensor_of(found)
    for rule in Rule:
        expected = found["rules"][rule.value]
        assert disagreements(torch_backend.decompose(x, MXFP4, rule, -1).to_dict(), expected, rtol=1e-9) == []
        for isa in ISAS:
            rows = cpu_backend.decompose(x, MXFP4, rule, -1, isa=isa).to_dict()
            assert disagreements(rows, expected, rtol=1e-6) == [], (rule, isa)
            columns = cpu_backend.decompose(x.t().contiguous(), MXFP4, rule, 0, isa=isa).to_dict()
            assert disagreements(columns, expected, rtol=1e-6) == [], (rule, isa, "columns")
        _, exponent = quantize_dequantize(x, rule=rule)
        assert exponent.reshape(-1).tolist() == expected["exponent"]


def test_the_file_is_what_its_seed_makes():
    remade = [case(name, x) for name, x in inputs(np.random.default_rng(fresh()["seed"]))]
    assert [c["x_bits"] for c in remade] == [c["x_bits"] for c in fresh()["cases"]]
    assert [c["rules"]["rceil"]["code_hist"] for c in remade] == [
        c["rules"]["rceil"]["code_hist"] for c in fresh()["cases"]
    ]
