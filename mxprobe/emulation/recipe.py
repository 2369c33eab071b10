"""A recipe: per operand role how it is quantized, where, and on which side. One line, or a TOML file. No torch.

paper x_fwd=mxfp4/rceil+of:0.5 side=rollout
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from mxprobe.errors import UsageError
from mxprobe.schema import Role
from mxprobe_kernels.formats import Name
from mxprobe_kernels.recipe_grammar import SPELLING, Correction, Operand

HIGH_PRECISION = Operand()


class Side(Name):
    """Where a recipe applies. Generation is the rollout, everything else is the trainer."""

    TRAIN = "train"
    ROLLOUT = "rollout"
    BOTH = "both"


ROLES: tuple[str, ...] = tuple(role.value for role in Role)
GROUPS: dict[str, tuple[str, ...]] = {
    "all": ROLES,
    "fwd": ("x_fwd", "w_fwd"),
    "dgrad": ("g_dgrad", "w_dgrad"),
    "wgrad": ("g_wgrad", "x_wgrad"),
    "x": ("x_fwd", "x_wgrad"),
    "w": ("w_fwd", "w_dgrad"),
    "g": ("g_dgrad", "g_wgrad"),
}
DEFAULT_EXCLUDE: tuple[str, ...] = (
    "*lm_head*",
    "*embed*",
    "*router*",
    "*.gate",
    "*.shared_expert_gate",
    "*score",
    "*classifier*",
    "*lora_*",
)
"""Heads, embeddings, routers and adapters: small, sensitive, and kept in high precision by every published recipe."""
_COUNTS = ("keep_first", "keep_last")
_GLOBS = ("include", "exclude")


@dataclass(frozen=True)
class Recipe:
    """Six operands (science: operands and axes) and the modules they apply to. Frozen; `str()` is one line that
    `Recipe.parse` reads back. Raises UsageError for `as_forward` on a role that has no forward counterpart."""

    name: str = "custom"
    x_fwd: Operand = HIGH_PRECISION
    w_fwd: Operand = HIGH_PRECISION
    g_dgrad: Operand = HIGH_PRECISION
    w_dgrad: Operand = HIGH_PRECISION
    g_wgrad: Operand = HIGH_PRECISION
    x_wgrad: Operand = HIGH_PRECISION
    include: tuple[str, ...] = ("*",)
    """Globs over module names."""
    exclude: tuple[str, ...] = DEFAULT_EXCLUDE
    keep_first: int = 0
    """Leading transformer blocks left in high precision."""
    keep_last: int = 0
    """Trailing transformer blocks left in high precision."""
    side: Side = Side.BOTH
    attention: bool = False
    """Quantize attention's own products too, q k^T and p v, each operand as the role that it plays in them."""

    def __post_init__(self) -> None:
        for role in ROLES:
            if self.operand(role).as_forward and role not in ("w_dgrad", "x_wgrad"):
                raise UsageError(
                    f"{role}: as_forward means nothing here",
                    cause="only W in dgrad and X in wgrad were quantized before, in the forward GEMM",
                    remedy="use it for w_dgrad and x_wgrad",
                )
        if self.keep_first < 0 or self.keep_last < 0:
            raise UsageError("keep_first and keep_last count transformer blocks and cannot be negative")

    def operand(self, role: str | Role) -> Operand:
        return getattr(self, str(role))

    @property
    def operands(self) -> dict[str, Operand]:
        return {role: self.operand(role) for role in ROLES}

    @property
    def quantizes_nothing(self) -> bool:
        return all(operand.is_high_precision for operand in self.operands.values())

    def on(self, side: Side | str) -> Recipe:
        """Return the same recipe for one side."""
        return replace(self, side=Side(side))

    def corrected(self, correction: Correction | str, roles: tuple[str, ...] = ("x_fwd",)) -> Recipe:
        """Return the recipe with a correction of `mxprobe recommend` switched on for some roles.

        UsageError where the correction cannot be read, or does not combine with what is on.
        """
        try:
            changed: dict[str, Any] = {role: self.operand(role).corrected(correction) for role in roles}
        except ValueError as error:
            raise UsageError(f"cannot switch on {correction}: {error}") from None
        return replace(self, name=f"{self.name}+{correction}", **changed)

    @classmethod
    def parse(cls, text: str) -> Recipe:
        """Read a name, a path ending in `.toml`, or `[NAME] KEY=VALUE ...`. UsageError says what is wrong.

        Keys are roles, groups of roles (all, fwd, dgrad, wgrad, x, w, g) and the other fields.
        """
        text = text.strip()
        if text.endswith(".toml"):
            return cls.load(Path(text))
        first, *rest = text.split() or [""]
        if "=" in first:
            return _with_settings(cls(), [first, *rest], text)
        name, at, side = first.partition("@")
        if name not in NAMED_RECIPES:
            raise UsageError(
                f"no recipe named {name!r}",
                cause=f"known: {', '.join(NAMED_RECIPES)}",
                remedy="give one of them, a .toml file, or settings such as 'fwd=mxfp4/rceil+of:0.5 side=rollout'",
            )
        settings = [*rest, f"side={side}"] if at else rest
        base = NAMED_RECIPES[name]
        return _with_settings(base, settings, text) if settings else base

    def __str__(self) -> str:
        """Print the nearest named recipe and what differs: `paper x_fwd=mxfp4/rceil+of:0.5 side=rollout`."""
        base_name = self.name if self.name in NAMED_RECIPES else _nearest(self)
        base = NAMED_RECIPES[base_name]
        changes = [f"{role}={self.operand(role)}" for role in ROLES if self.operand(role) != base.operand(role)]
        for key in (*_GLOBS, *_COUNTS, "side", "attention"):
            if getattr(self, key) != getattr(base, key):
                changes.append(f"{key}={_spelled(getattr(self, key))}")
        if self.name != (base_name if self.operands == base.operands else "custom"):
            changes.append(f"name={self.name}")
        return " ".join([base_name, *changes])

    @classmethod
    def from_toml(cls, text: str, *, source: str = "recipe") -> Recipe:
        """Read fields of a recipe and a table `operands` of ROLE = OPERAND; those left out are in high precision.

        UsageError names `source`.
        """
        import tomllib  # Python 3.11; where the agent runs under an older one, recipes arrive as lines

        try:
            data = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise UsageError(f"{source} is not TOML: {error}") from None
        operands: Any = data.pop("operands", {})
        known = {field.name for field in fields(cls)} - set(ROLES)
        if unknown := sorted(set(data) - known):
            raise UsageError(f"{source}: unknown keys {', '.join(unknown)}", remedy=f"use {', '.join(sorted(known))}")
        if not isinstance(operands, dict):
            raise UsageError(f"{source}: `operands` must be a table of ROLE = OPERAND")
        settings = [f"{role}={operand}" for role, operand in operands.items()]
        settings += [f"{key}={_spelled(value)}" for key, value in data.items()]
        return _with_settings(cls(), settings, source)

    @classmethod
    def load(cls, path: Path) -> Recipe:
        try:
            text = path.read_text(encoding="utf-8")
        except OSError as error:
            raise UsageError(f"cannot read the recipe {path}: {error.strerror or error}") from None
        return cls.from_toml(text, source=str(path))


def _spelled(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return ",".join(value) if isinstance(value, (list, tuple)) else str(value)


def _with_settings(base: Recipe, settings: list[str], source: str) -> Recipe:
    changes: dict[str, Any] = {}
    named: set[str] = set()
    # Groups first, so that a role always overrides the group it is in.
    for setting in sorted(settings, key=lambda item: item.partition("=")[0] not in GROUPS):
        key, equals, value = setting.partition("=")
        if not equals:
            raise UsageError(f"{source!r}: {setting!r} is not KEY=VALUE")
        if key in ROLES or key in GROUPS:
            for role in GROUPS.get(key, (key,)):
                changes[role] = _operand(value)
        elif key in _GLOBS:
            changes[key] = tuple(part for part in value.split(",") if part)
        elif key in _COUNTS:
            if not value.isdecimal():
                raise UsageError(f"{source!r}: {key} counts transformer blocks, {value!r} is not a count")
            changes[key] = int(value)
        elif key == "side":
            if value not in list(Side):
                raise UsageError(f"{source!r}: unknown side {value!r}", remedy=f"use {', '.join(Side)}")
            changes[key] = Side(value)
        elif key == "attention":
            if value not in ("on", "off"):
                raise UsageError(f"{source!r}: attention is on or off, not {value!r}")
            changes[key] = value == "on"
        elif key == "name":
            changes[key] = value
        else:
            keys = (*ROLES, *GROUPS, *_GLOBS, *_COUNTS, "side", "attention", "name")
            raise UsageError(f"{source!r}: unknown key {key!r}", remedy=f"use {', '.join(keys)}")
        named.add(key)
    recipe = replace(base, **changes)
    return recipe if "name" in named or recipe.operands == base.operands else replace(recipe, name="custom")


def _nearest(recipe: Recipe) -> str:
    def distance(name: str) -> int:
        return sum(NAMED_RECIPES[name].operand(role) != recipe.operand(role) for role in ROLES)

    return min(NAMED_RECIPES, key=distance)


def _operand(text: str) -> Operand:
    try:
        return Operand.parse(text)
    except ValueError as error:
        raise UsageError(str(error), remedy=f"spell it {SPELLING}") from None


_NAMED = {
    "none": "",
    # arXiv 2605.20402: all three GEMMs in MXFP4, scale by "ceiling".
    "paper": "all=mxfp4/rceil",
    # OCP MX v1.0's conversion, which saturates.
    "ocp": "all=mxfp4/floor",
    "nvfp4": "all=nvfp4",
    "nvfp4_4over6": "all=nvfp4_4over6",
    "hif4": "all=hif4",
    "mxfp6": "all=mxfp6_e2m3/rceil",
    "mxfp8": "all=mxfp8/rceil",
    # Forward operands only, straight-through backward: what QAT fake-quantization computes.
    "qat": "fwd=mxfp4/rceil w_dgrad=mxfp4/rceil+as_forward x_wgrad=mxfp4/rceil+as_forward",
    "qat-nvfp4": "fwd=nvfp4 w_dgrad=nvfp4+as_forward x_wgrad=nvfp4+as_forward",
    "w4a8": "x_fwd=mxfp8/rceil w_fwd=mxfp4/rceil w_dgrad=mxfp4/rceil+as_forward x_wgrad=mxfp8/rceil+as_forward",
    "w4a16": "w_fwd=mxfp4/rceil w_dgrad=mxfp4/rceil+as_forward",
}
NAMED_RECIPES: dict[str, Recipe] = {
    name: _with_settings(Recipe(), [f"name={name}", *line.split()], name) for name, line in _NAMED.items()
}
