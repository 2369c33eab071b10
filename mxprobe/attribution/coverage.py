"""How much of the work was seen: the first thing to say about any verdict."""

import pandas as pd

from .recommendation import Coverage

PROBED = "probed"
_NOT_LINEAR = "not_linear"


def coverage_of(modules: pd.DataFrame) -> Coverage:
    """Return the share of forward weight-GEMM FLOPs in probed modules, from `Trace.modules()`.

    Modules without a GEMM (embeddings, norms) count in neither part. Ranks are added.
    """
    flops = modules["gemm_flops"].fillna(0.0)
    has_gemm = (flops > 0) | (modules["status"].astype(str) != _NOT_LINEAR)
    probed = modules["status"].astype(str) == PROBED
    total = float(flops[has_gemm].sum())
    unseen = modules[has_gemm & ~probed].assign(flops=flops).sort_values("flops", ascending=False)
    return Coverage(
        flops_frac=float(flops[has_gemm & probed].sum()) / total if total > 0 else None,
        n_probed=int(modules.loc[has_gemm & probed, "module"].astype(str).nunique()),
        n_modules=int(modules.loc[has_gemm, "module"].astype(str).nunique()),
        not_seen=tuple(
            dict.fromkeys(
                (str(row.module), str(row.reason) if isinstance(row.reason, str) else str(row.status))
                for row in unseen.itertuples()
            )
        ),
    )
