"""Checks every backend of this machine against the float64 reference, on inputs that random data misses."""

import torch

from mxprobe.attach.host_checks import HostCheck
from mxprobe_kernels import cpu_backend, decompose, reference
from mxprobe_kernels.agreement import disagreements, hard_tensors
from mxprobe_kernels.formats import MXFP4, Rule

TOLERANCE = 1e-6
"""Relative, of sums. Codes, counts and histograms must be equal."""


def check_backends() -> list[HostCheck]:
    """Return one finding for each backend and device; what cannot be used here is said to be so."""
    found = [_check("torch", "torch", "cpu")]
    isas = cpu_backend.isas()
    found += [_check(f"C++ {isa}", "cpu", "cpu", isa=isa) for isa in isas]
    if not isas:
        found.append(HostCheck("C++", None, "not built: no compiler when mxprobe was installed; torch is used instead"))
    if torch.cuda.is_available():
        name = torch.cuda.get_device_name()
        found += [_check(f"torch on {name}", "torch", "cuda"), _check(f"Triton on {name}", "triton", "cuda")]
    else:
        found.append(HostCheck("Triton", None, "not run: no GPU that torch can use"))
    return found


def _check(label: str, backend: str, device: str, isa: str = "") -> HostCheck:
    n_cases, wrong = 0, list[str]()
    for name, x in hard_tensors():
        expected_of = x.float().numpy()
        for rule in Rule:
            for dim in (0, 1):
                n_cases += 1
                expected = reference.decompose(expected_of, rule=rule, axis=dim).values
                try:
                    if isa:
                        measured = cpu_backend.decompose(x, MXFP4, rule, dim, isa=isa).to_dict()
                    else:
                        measured = decompose(x.to(device), rule=rule, dim=dim, backend=backend).to_dict()
                except Exception as error:
                    wrong.append(f"{name}, {rule}, dim {dim}: {type(error).__name__}: {error}")
                    continue
                wrong += [f"{name}, {rule}, dim {dim}: {line}" for line in disagreements(measured, expected, TOLERANCE)]
    if wrong:
        return HostCheck(label, False, f"{len(wrong)} disagreements in {n_cases} cases, first: {wrong[0]}")
    return HostCheck(label, True, f"{n_cases} cases: codes, counts and histograms equal, sums within {TOLERANCE:g}")
