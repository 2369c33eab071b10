"""The selected layer and the table of all layers, which page.js fills, and the reader's filters."""

from markupsafe import Markup

from .operands import Operands
from .rendering import render

_GROUPS = (("fwd", "forward"), ("dgrad", "dgrad"), ("wgrad", "wgrad"))


def section(operands: Operands) -> Markup:
    """Return the panel that follows the selection and the table of all layers; nothing where none was measured."""
    return render("layer.html", operands=operands) if len(operands.totals) else Markup()


def range_controls(operands: Operands) -> Markup:
    """Return the controls at the top: which steps, rank and operands the page shows. Nothing without a choice."""
    steps, roles = [int(step) for step in operands.binned.steps], operands.roles
    ranks = [each.label for each in (operands.binned, *operands.ranks)]
    if max(len(steps), len(roles), len(ranks)) < 2:
        return Markup()
    groups = [group for group in _GROUPS if 1 < sum(role.endswith(group[0]) for role in roles) < len(roles)]
    return render("range.html", steps=steps, roles=roles, groups=groups, ranks=ranks)
