"""Names that a trace may hold and that nothing may take for markup, a path, a terminal command or a format."""

import pandas as pd

from tests.report_frames import module_names

MODULES = (
    "</script><script>window.hit = 1</script>",
    "[bold]mlp[up][/]",
    "\"><img src=x onerror='window.hit = 1'>",
    "a" * 300,
    "слой.0.注意\x1b[2J力%s{x}",
    "mlp.up-proj",  # slugs as the next one does
    "mlp-up.proj",
)
RAW_KEY = "</script>[bold]\"'\x1b[31m\nreward/../" + "k" * 300
DIRECTORY = "a [bold]<i>'ю"


def hostile(tables: dict[str, pd.DataFrame]) -> None:
    """Give the modules of a one-layer run, and two metrics, such names."""
    names = dict(zip(module_names(1), MODULES, strict=True))
    for table in ("tensors", "outputs", "whatif", "modules"):
        tables[table]["module"] = [names.get(each, each) for each in tables[table]["module"].astype(str)]
    signals = tables["signals"]
    is_entropy = (signals["metric"] == "entropy").to_numpy()
    raw, metric = signals["raw_key"].astype(str), signals["metric"].astype(str)
    tables["signals"] = signals.assign(raw_key=raw.mask(is_entropy, RAW_KEY), metric=metric.mask(is_entropy, ""))
    tables["events"] = tables["events"].assign(detail=MODULES[1] + MODULES[4])
