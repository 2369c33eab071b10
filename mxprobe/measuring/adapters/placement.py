"""The part of a GEMM's operands that this rank holds, so that ranks can be added without counting anything twice.

    operand    axes              sharded by
    X          tokens x in       tokens: data and sequence parallelism; in: a row-parallel weight
    W          out x in          out: a column-parallel weight; in: a row-parallel one
    G          tokens x out

A placement is written in a row as `tokens=r0 out=1/2 | in=0/4`: the operand's own shard, then what its partner in the
GEMM adds. Rows with the same operand shard are copies: their energies are counted once. Rows with the same text are
copies of the same product too. `r0` is the lowest rank of those that share tokens; an empty text is the whole.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from mxprobe.schema import Role


@dataclass(frozen=True)
class Shard:
    index: int = 0
    count: int = 1

    def words(self, axis: str) -> str:
        return f"{axis}={self.index}/{self.count}" if self.count > 1 else ""


_ALL = Shard()


@dataclass(frozen=True)
class Placement:
    """The part of one GEMM that is on one rank; the whole but for what is given."""

    token_group: str = ""
    """The group whose tokens these are; the same on ranks that compute on the same ones."""
    out_features: Shard = _ALL
    in_features: Shard = _ALL
    x_tokens: Shard = _ALL
    """Part of the group's tokens of which this rank sees X ..."""
    g_tokens: Shard = _ALL
    """... and G."""

    def within(self, token_group: str) -> Placement:
        """Return the same placement with this group, where it does not say whose tokens they are."""
        return self if self.token_group else replace(self, token_group=token_group)

    def words(self, role: Role) -> str:
        """Say how a row of that role is placed."""
        sides = {
            "x": (self._tokens(self.x_tokens), self.in_features.words("in")),
            "w": (self.out_features.words("out"), self.in_features.words("in")),
            "g": (self._tokens(self.g_tokens), self.out_features.words("out")),
        }
        own = [each for each in sides[role.value[0]] if each]
        partner = [each for each in sides[PARTNER[role]] if each and each not in own]
        return " ".join(own) + (f" | {' '.join(partner)}" if partner else "")

    def _tokens(self, shard: Shard) -> str:
        if shard.count == 1:
            return f"tokens={self.token_group}" if self.token_group else ""
        return f"tokens={self.token_group}:{shard.index}/{shard.count}"

    def edge_blocks(self, role: Role, length: int, n_rows: int, block: int) -> int:
        """Count blocks of `n_rows` rows of `length` elements along the contraction that one GPU would form differently.

        A shard that does not begin on a multiple of the block has all its blocks elsewhere; one that merely does not
        end on one has its last block cut short.
        """
        shard = self._contraction(role)
        if shard.count == 1 or length == 0:
            return 0
        if shard.index * length % block:
            return n_rows * -(-length // block)
        return n_rows if length % block and shard.index < shard.count - 1 else 0

    def _contraction(self, role: Role) -> Shard:
        if role in (Role.X_FWD, Role.W_FWD):
            return self.in_features
        if role in (Role.G_DGRAD, Role.W_DGRAD):
            return self.out_features
        return self.g_tokens if role is Role.G_WGRAD else self.x_tokens


PARTNER = {
    Role.X_FWD: "w",
    Role.W_FWD: "x",
    Role.G_DGRAD: "w",
    Role.W_DGRAD: "g",
    Role.G_WGRAD: "x",
    Role.X_WGRAD: "g",
}
"""The tensor that each operand meets in its GEMM."""

WHOLE = Placement()
