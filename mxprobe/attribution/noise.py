"""Weights that were not the trainer's own while a phase computed with them, from the agent's events."""

import pandas as pd

EVENT = "weight_noise"
_OVER = "the trainer's own weights again"


def weight_changes(events: pd.DataFrame, phase: str) -> dict[str, str]:
    """Module, or `norms` -> what was found of its weights in that phase, where it has not ended since."""
    told: dict[str, str] = {}
    for detail in events[events["kind"].astype(str) == EVENT]["detail"].astype(str):
        head, _, said = detail.partition(": ")
        name, _, where = head.rpartition(" ")
        if where == phase:
            told[name] = said
    return {name: said for name, said in told.items() if said != _OVER}
