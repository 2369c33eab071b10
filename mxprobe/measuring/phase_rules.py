"""Forward passes of the model, and the rules by which one is told from another. No hooks here: see `phases`.

A line of forwards is what one thread has computed in the step under way, in its order.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Hashable, Sequence
from enum import Enum

from mxprobe.measuring.tokens.prefixes import Prefixes
from mxprobe.schema import Phase

MIN_GROWING = 3
"""Forwards in a row, each by one token longer, that are a generation where their tokens are not compared."""
MIN_COMPARED = 2
"""The same where their tokens are compared."""
MIN_DRAWN = 2
"""Tokens by which a training batch is longer than the last forward that it continues. By one it may be the pass that
scored it: the last token predicts nothing."""
MAX_WAITING, MAX_TOKENS = 512, 1 << 22
"""Forwards that may wait in a step, and tokens of theirs and of the training batches that are held against each other:
32 MB of fingerprints."""


class Kind(Enum):
    """What a forward is; the value is the word for it."""

    TRAINING = "training"
    ROLLOUT = "rollout"
    SCORED = "old or reference log-probabilities"
    EVALUATION = "evaluation"
    UNKNOWN = "not recognised"


class Evidence(Enum):
    """What it was told by; the value is the words for it."""

    GRADIENT = "by its gradient"
    KV_CACHE = "by KV cache"
    GROWTH = "by growing sequences"
    GENERATE = "by generate() on the stack"
    TRAINED_ON = "by sequences that grew and were then trained on"
    DECLARED = "by mxprobe.rollout()"
    FUNCTION = "by --rollout-in"
    SAME_TOKENS = "by the tokens of a training batch"
    SAME_SHAPE = "by the shape of a training batch"
    OTHER_TOKENS = "by tokens that were not trained on"
    NONE = "by nothing"


_PHASES = {Kind.TRAINING: Phase.TRAIN, Kind.ROLLOUT: Phase.ROLLOUT}


class Forward:
    """One forward pass of the model."""

    def __init__(self, line: Line, *, with_gradient: bool, site: int) -> None:
        self.with_gradient = with_gradient
        self.site = site
        """Equal for calls from the same place in the program."""
        self.follows_training = line.has_trained
        """Its thread has trained in this step already: what it computes belongs to another step."""
        self.kind: Kind | None = None
        """None while it waits for what follows it."""
        self.evidence = Evidence.NONE
        self.batch: int | None = None
        self.length: int | None = None
        """Tokens of each of its sequences; None where its input does not tell."""
        self.prefixes: Prefixes | None = None
        """Of its tokens, where these are on the CPU."""
        self.seen: set[Hashable] = set()
        """Who has asked for it, by the key of the call."""
        self.is_over = False
        """Training has begun: it is no rollout any more, if it is none by now."""
        self._line = line
        self._start: Forward | None = None
        self._n_in_row = 1

    @property
    def phase(self) -> Phase | None:
        """The phase under which its rows are stored; None while it waits."""
        if self.kind is None:
            return Phase.EVAL if self.is_over else None
        return _PHASES.get(self.kind, Phase.EVAL)

    @property
    def is_of_this_thread(self) -> bool:
        return self._line.thread == threading.get_ident()

    @property
    def start(self) -> Forward:
        """The first forward of the generation that it may belong to; itself where it continues no other."""
        return self if self._start is None else self._start

    def settle(self, kind: Kind, evidence: Evidence) -> None:
        """Decide what it is; the first decision holds."""
        if self.kind is None:
            self.kind, self.evidence = kind, evidence
            self._line.counts[kind, evidence] += 1

    def continue_from(self, before: Forward | None) -> None:
        """Hold it against the forward before it, once its tokens are known: is it a decode step, or are these the same
        sequences with one more token?"""
        if before is not None and not before._may_go_on_in(self):
            before = None
        if self.length == 1:
            if before is not None and _is_of_one_batch(before, self):
                self._follow(before)
            self._settle_all(Evidence.KV_CACHE)
        elif before is not None and before.site == self.site and _grows(before, self):
            self._follow(before)
            compared = before.prefixes is not None and self.prefixes is not None
            if before.kind is Kind.ROLLOUT or self._n_in_row >= (MIN_COMPARED if compared else MIN_GROWING):
                self._settle_all(Evidence.GROWTH)

    def _may_go_on_in(self, after: Forward) -> bool:
        if after.kind is None:
            return self.kind in (None, Kind.ROLLOUT)
        return after.kind is Kind.ROLLOUT and self.kind is Kind.ROLLOUT

    def _follow(self, before: Forward) -> None:
        self._start, self._n_in_row = before.start, before._n_in_row + 1

    def _settle_all(self, evidence: Evidence) -> None:
        """It is a rollout, and with it what it continues, and a first call of the same sequences from elsewhere."""
        start, waiting = self.start, self._line.waiting
        if evidence is Evidence.GROWTH and start in waiting[1:]:
            first = waiting[waiting.index(start) - 1]
            if _grows(first, start):
                first.settle(Kind.ROLLOUT, evidence)
        for each in waiting:
            if each.start is start:
                each.settle(Kind.ROLLOUT, evidence)
        self.settle(Kind.ROLLOUT, evidence)
        self._line.waiting = [each for each in waiting if each.kind is None]


class Line:
    """The forwards of one thread in the step under way."""

    def __init__(self, thread: int = 0) -> None:
        self.thread = thread
        self.waiting: list[Forward] = []
        """Not decided yet, in their order."""
        self.trained: list[Forward] = []
        self.counts: Counter[tuple[Kind, Evidence]] = Counter()

    @property
    def has_trained(self) -> bool:
        return bool(self.trained)

    def make_room(self) -> None:
        """Give up on the oldest that wait where there are too many of them, or too many tokens in all."""
        n = sum(each.prefixes.size for each in (*self.waiting, *self.trained) if each.prefixes is not None)
        while self.waiting and (n > MAX_TOKENS or len(self.waiting) > MAX_WAITING):
            oldest = self.waiting.pop(0)
            n -= 0 if oldest.prefixes is None else oldest.prefixes.size
            oldest.settle(Kind.UNKNOWN, Evidence.NONE)
        for each in self.trained if n > MAX_TOKENS else ():
            each.prefixes = None

    def train(self, batch: Forward) -> None:
        """A training forward begins, its tokens known if they can be: what waits is no rollout, or is one of these."""
        drawn = [each for each in self.waiting if not each.is_over and _is_drawn_from(each, batch)]
        for each in drawn if len({each.length for each in drawn}) > 1 else ():
            each.settle(Kind.ROLLOUT, Evidence.TRAINED_ON)
        for each in self.waiting:
            each.is_over = True


def _is_of_one_batch(before: Forward, decode: Forward) -> bool:
    """Whether a one-token forward can continue `before`: a prompt may have been given several completions."""
    if before.batch is None or decode.batch is None:
        return True
    return decode.batch % before.batch == 0 or before.length == 1  # finished sequences may have been dropped


def _grows(before: Forward, after: Forward) -> bool:
    """Whether `after` has one token more than `before`; at the end of a window the first one may be gone for it."""
    if before.length is None or after.length is None or before.batch != after.batch:
        return False
    if after.length == before.length:
        return before.kind is Kind.ROLLOUT and before.evidence is Evidence.GROWTH
    if after.length != before.length + 1:
        return False
    a, b = before.prefixes, after.prefixes
    return a is None or b is None or b.begins_like(a)


def settle_waiting(waiting: Sequence[Forward], trained: Sequence[Forward]) -> None:
    """Name, at the end of a step, the forwards without gradient that were no rollout, by what was trained on in it."""
    for each in waiting:
        known = [batch for batch in trained if _are_comparable(each, batch)]
        if any(_has_the_tokens_of(each, batch) for batch in known):
            each.settle(Kind.SCORED, Evidence.SAME_TOKENS)
        elif known and len(known) == len(trained):
            each.settle(Kind.EVALUATION, Evidence.OTHER_TOKENS)
        elif each.length is not None and each.length in {batch.length for batch in trained}:
            each.settle(Kind.SCORED, Evidence.SAME_SHAPE)
        else:
            each.settle(Kind.UNKNOWN, Evidence.NONE)


def _are_comparable(each: Forward, batch: Forward) -> bool:
    a, b = each.prefixes, batch.prefixes
    return a is not None and b is not None and a.of_ids == b.of_ids


def _is_drawn_from(each: Forward, batch: Forward) -> bool:
    """Whether the sequences of a training batch continue those of a forward by several tokens."""
    short = each.length is not None and batch.length is not None and each.length + MIN_DRAWN <= batch.length
    return short and _begin_alike(each, batch, each.length or 0)


def _has_the_tokens_of(each: Forward, batch: Forward) -> bool:
    """Whether a forward has the sequences of a training batch, but for the last token, which predicts nothing."""
    lengths = each.length or 0, batch.length or 0
    return abs(lengths[0] - lengths[1]) <= 1 and _begin_alike(each, batch, min(lengths))


def _begin_alike(each: Forward, batch: Forward, n: int) -> bool:
    """Whether all sequences of one of them begin with n tokens of one of the other's: either may be a part."""
    a, b = each.prefixes, batch.prefixes
    if a is None or b is None or a.of_ids != b.of_ids or n < 1:
        return False
    rows, others = a.rows(n), b.rows(n)
    return rows <= others or others <= rows
