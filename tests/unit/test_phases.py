"""What a forward pass of the model is, and by what evidence: one case for each way in which runs generate and train."""

from __future__ import annotations

import copy
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import mxprobe
from mxprobe.agent.clock import Clock
from mxprobe.agent.guard import Guard
from mxprobe.agent.phases import Phases, entry_points
from mxprobe.measuring.compat import in_backward
from mxprobe.measuring.phase_rules import Forward
from mxprobe.measuring.tokens.prefixes import Prefixes

B, P, N = 4, 6, 5
"""Sequences, tokens of a prompt, tokens drawn."""
ROLLOUT_BY_GROWTH = "rollout by growing sequences"
ROLLOUT_BY_CACHE = "rollout by KV cache"
SCORED = "old or reference log-probabilities by the tokens of a training batch"
SCORED_BY_SHAPE = "old or reference log-probabilities by the shape of a training batch"
EVALUATED = "evaluation by tokens that were not trained on"


class Policy(nn.Module):
    def __init__(self, *, checkpointed: bool | None = None) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 16)
        self.body = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
        self.lm_head = nn.Linear(16, 64)
        self.checkpointed = checkpointed
        """The kind of activation checkpointing: reentrant or not; None for none."""

    def forward(self, input_ids: torch.Tensor, *, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        return self.head(self.hidden(input_ids))

    def hidden(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        if self.checkpointed is None:
            return self.body(x)
        return checkpoint(self.body, x, use_reentrant=self.checkpointed) if x.requires_grad else self.body(x)

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.lm_head(hidden)


class Wrapped(nn.Module):
    """As DDP has its module, or PEFT its base model."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


class Watched:
    """A model whose first Linear asks what each of its calls belongs to."""

    def __init__(self, root: nn.Module | None = None, *, roots: list[nn.Module] | None = None, **options: Any) -> None:
        self.root = Policy() if root is None else root
        self.errors: list[str] = []
        self.told: list[str] = []
        guard = Guard(10, lambda where, detail: self.errors.append(f"{where}: {detail}"), lambda: None)
        clock = Clock()
        clock.probed = True
        self.phases = Phases(clock, guard, lambda event: self.told.append(f"{event.kind}: {event.words}"), **options)
        self.phases.watch([self.root] if roots is None else roots)
        self.asked: list[Forward] = []
        first = next(m for m in self.root.modules() if isinstance(m, nn.Linear))
        first.register_forward_hook(lambda *call: self._ask(*call))
        self.phases.begin()

    def _ask(self, module: nn.Module, args: Any, output: Any) -> None:
        if not in_backward():
            self.asked.append(self.phases.call("first", args[0]))

    def finish(self) -> dict[str, int]:
        """Forwards by what they were and by what evidence."""
        self.phases.finish()
        assert not self.errors
        return self.phases.facts

    def stored(self) -> list[str | None]:
        """The phase of each call of the Linear, as known by now."""
        return [None if f.phase is None else f.phase.value for f in self.asked]


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def prompts(batch: int = B, length: int = P) -> torch.Tensor:
    return torch.randint(2, 64, (batch, length))


def next_token(logits: torch.Tensor) -> torch.Tensor:
    return torch.multinomial(logits[:, -1].softmax(-1), 1)


@torch.no_grad()
def sample_without_cache(model: Callable[..., torch.Tensor], ids: torch.Tensor, n: int = N) -> torch.Tensor:
    for _ in range(n):
        ids = torch.cat([ids, next_token(model(ids))], 1)
    return ids


@torch.no_grad()
def sample_with_cache(model: Callable[..., torch.Tensor], ids: torch.Tensor, n: int = N) -> torch.Tensor:
    given = ids
    for _ in range(n):
        given = next_token(model(given))
        ids = torch.cat([ids, given], 1)
    return ids


@torch.no_grad()
def score(model: Callable[..., torch.Tensor], ids: torch.Tensor) -> torch.Tensor:
    return model(ids)


def train(model: Callable[..., torch.Tensor], ids: torch.Tensor) -> None:
    model(ids).logsumexp(-1).mean().backward()


@contextmanager
def unseen_tokens(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As on a GPU, where comparing tokens would have to wait."""
    with monkeypatch.context() as patch:
        patch.setattr(Prefixes, "of", lambda x: None)
        yield


def test_a_generation_with_a_cache():
    w = Watched()
    ids = sample_with_cache(w.root, prompts())
    assert w.stored() == ["rollout"] * N
    assert all(each.start is w.asked[0] for each in w.asked)
    train(w.root, ids)
    assert w.stored()[N:] == ["train"]
    assert w.finish() == {"training": 1, ROLLOUT_BY_CACHE: N}
    assert w.told == [f"phases: training 1, {ROLLOUT_BY_CACHE} {N}, not recognised 0"]


def test_a_generation_without_a_cache():
    w = Watched()
    sample_without_cache(w.root, prompts(), 2)
    assert w.stored() == ["rollout", "rollout"]
    assert w.asked[1].start is w.asked[0]
    ids = sample_without_cache(w.root, prompts())
    assert w.asked[2].start is w.asked[2]
    train(w.root, ids)
    assert w.finish() == {"training": 1, ROLLOUT_BY_GROWTH: 2 + N}


def test_without_looking_at_tokens_three_in_a_row_are_a_generation(monkeypatch: pytest.MonkeyPatch):
    with unseen_tokens(monkeypatch):
        w = Watched()
        sample_without_cache(w.root, prompts(), 2)
        assert w.stored() == [None, None]
        train(w.root, prompts(length=20))
        assert w.stored() == ["eval", "eval", "train"]
        assert w.finish() == {"training": 1, "not recognised": 2}
        w.phases.begin()
        w.asked.clear()
        ids = sample_without_cache(w.root, prompts())
        assert w.stored() == ["rollout"] * N
        assert {each.start for each in w.asked} == {w.asked[0]}
        score(w.root, ids)  # one token longer than the last, from another place
        assert w.asked[-1].start is w.asked[-1]
        train(w.root, ids)
        assert w.finish() == {"training": 1, ROLLOUT_BY_GROWTH: N, SCORED_BY_SHAPE: 1}


def test_batches_that_happen_to_get_longer_are_no_generation():
    w = Watched()
    for length in range(P, P + 5):
        score(w.root, prompts(length=length))
    train(w.root, prompts())
    assert w.stored() == ["eval"] * 5 + ["train"]
    assert w.finish() == {"training": 1, EVALUATED: 5}


def test_a_first_call_from_elsewhere_belongs_to_the_generation(monkeypatch: pytest.MonkeyPatch):
    with unseen_tokens(monkeypatch):
        w = Watched()
        with torch.no_grad():
            ids = prompts()
            ids = torch.cat([ids, next_token(w.root(ids))], 1)
        sample_without_cache(w.root, ids)
    assert w.finish() == {ROLLOUT_BY_GROWTH: 1 + N}


@torch.no_grad()
def test_a_window_that_slides_is_still_the_generation():
    w, window = Watched(), P + 2
    ids = prompts()
    for _ in range(N):
        ids = torch.cat([ids, next_token(w.root(ids[:, -window:]))], 1)
    assert w.finish() == {ROLLOUT_BY_GROWTH: N}


def test_sequences_that_grow_by_several_tokens_and_are_trained_on():
    w = Watched()
    with torch.no_grad():
        ids = prompts()
        for _ in range(3):
            w.root(ids)
            ids = torch.cat([ids, torch.randint(2, 64, (B, 3))], 1)
    assert w.stored() == [None] * 3
    score(w.root, ids)
    train(w.root, ids[:2])
    train(w.root, ids[2:])
    assert w.stored() == ["rollout"] * 3 + ["eval", "train", "train"]
    grew = "rollout by sequences that grew and were then trained on"
    assert w.finish() == {"training": 2, grew: 3, SCORED: 1}


def test_a_pass_over_prompts_alone_is_no_generation():
    """Rather unknown than wrong: it may as well be a baseline's."""
    w = Watched()
    ids = prompts()
    score(w.root, ids)
    train(w.root, torch.cat([ids, prompts()], 1))
    assert w.finish() == {"training": 1, EVALUATED: 1}


class GenerationConfig:
    do_sample = True


class Generator(Policy):
    @torch.no_grad()
    def generate(self, ids: torch.Tensor, generation_config: Any = None) -> torch.Tensor:
        for _ in range(2):  # a part of the tokens at a time: neither a cache nor growth
            self(ids)
        return ids


def test_generate_on_the_stack():
    w = Watched(Generator())
    ids = w.root.generate(prompts(), GenerationConfig())  # type: ignore[operator]
    train(w.root, torch.cat([ids, prompts()], 1))
    assert w.stored() == ["rollout", "rollout", "train"]
    assert w.finish() == {"training": 1, "rollout by generate() on the stack": 2}


def test_old_and_reference_passes_are_told_from_evaluations():
    w = Watched()
    ids = sample_without_cache(w.root, prompts())
    for _ in range(2):
        score(w.root, ids)
    score(w.root, prompts())
    for part in ids.chunk(2):
        train(w.root, part)
    score(w.root, ids)
    assert w.asked[-1].follows_training
    assert w.stored()[N:] == ["eval", "eval", "eval", "train", "train", None]
    assert w.finish() == {"training": 2, ROLLOUT_BY_GROWTH: N, SCORED: 3, EVALUATED: 1}
    assert w.asked[-1].phase == "eval"


def test_evaluation_alone():
    w = Watched()
    score(w.root, prompts())
    assert w.finish() == {"not recognised": 1}  # nothing was trained on that it could be held against
    w.phases.begin()
    score(w.root, prompts())
    train(w.root, prompts())
    assert w.finish() == {"training": 1, EVALUATED: 1}
    assert w.told == ["phases: not recognised 1", f"phases: training 1, {EVALUATED} 1, not recognised 0"]


@pytest.mark.parametrize("sample", [sample_with_cache, sample_without_cache])
@pytest.mark.parametrize("depth", [1, 3])
def test_generation_below_a_wrapper_and_training_through_it(sample: Callable[..., torch.Tensor], depth: int):
    """DDP wraps once; PEFT's LoRA has the model at `base_model.model`, below its own wrapper."""
    inner = Policy()
    root: nn.Module = inner
    for _ in range(depth):
        root = Wrapped(root)
    w = Watched(root)
    ids = sample(inner, prompts())
    train(root, ids)
    assert w.stored() == ["rollout"] * N + ["train"]
    assert w.finish() == {"training": 1, ROLLOUT_BY_CACHE if sample is sample_with_cache else ROLLOUT_BY_GROWTH: N}


def test_adapters_of_lora_do_not_hide_the_model():
    from peft import LoraConfig, get_peft_model  # pyright: ignore[reportMissingImports]

    policy = Policy()
    root = get_peft_model(policy, LoraConfig(r=2, target_modules=["body.0"]))  # type: ignore[arg-type]
    w = Watched(root)
    ids = sample_without_cache(policy, prompts())
    train(root, ids)
    assert w.stored() == ["rollout"] * N + ["train"]


def test_a_value_head_beside_the_model():
    class WithValue(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pretrained_model, self.v_head = Policy(), nn.Linear(16, 1)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            hidden = self.pretrained_model.hidden(ids)
            return self.pretrained_model.head(hidden) + self.v_head(hidden)

    root = WithValue()
    w = Watched(root)
    ids = sample_without_cache(root.pretrained_model, prompts())
    train(root, ids)
    assert w.stored() == ["rollout"] * N + ["train"]


def test_two_threads_do_not_mix():
    w = Watched()
    at_once = threading.Barrier(2)
    ids = prompts(length=12)

    @torch.no_grad()
    def generate() -> None:
        given = prompts()
        for _ in range(N):
            at_once.wait(10)
            given = torch.cat([given, next_token(w.root(given))], 1)
            at_once.wait(10)

    thread = threading.Thread(target=generate)
    thread.start()
    for _ in range(N):
        at_once.wait(10)
        train(w.root, ids)
        at_once.wait(10)
    thread.join()
    assert w.finish() == {"training": N, ROLLOUT_BY_GROWTH: N}
    assert sorted(map(str, w.stored())) == ["rollout"] * N + ["train"] * N


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_regions_are_no_forwards(reentrant: bool):
    w = Watched(Policy(checkpointed=reentrant))
    ids = sample_without_cache(w.root, prompts())
    for _ in range(2):
        train(w.root, ids)
    assert w.stored() == ["rollout"] * N + ["train"] * 2
    assert w.finish() == {"training": 2, ROLLOUT_BY_GROWTH: N}


def test_a_declared_rollout():
    w = Watched()
    with mxprobe.rollout(w.root):
        score(w.root, prompts())
        w.root(prompts())  # with gradient: whoever generates so has forgotten to switch it off
    score(w.root, prompts())
    train(w.root, prompts())
    assert w.stored() == ["rollout", "rollout", "eval", "train"]
    assert w.finish() == {"training": 1, "rollout by mxprobe.rollout()": 2, EVALUATED: 1}


def test_what_is_declared_may_be_a_wrapper_or_a_part_but_no_other_model():
    inner = Policy()
    root = Wrapped(inner)
    holder = nn.ModuleDict({"policy": root, "critic": nn.Linear(2, 2)})
    w = Watched(root)
    for model, stored in (
        (root, "rollout"),
        (inner, "rollout"),
        (holder, "rollout"),
        (Policy(), None),
        (object(), "rollout"),
    ):
        with mxprobe.rollout(model):
            score(inner, prompts())
        assert w.stored()[-1] == stored


def test_a_declaration_is_of_its_thread_and_ends_with_its_block():
    w = Watched()
    with mxprobe.rollout(w.root), mxprobe.rollout(w.root):
        thread = threading.Thread(target=score, args=(w.root, prompts()))
        thread.start()
        thread.join()
    score(w.root, prompts())
    assert w.stored() == [None, None]

    @mxprobe.rollout(w.root)
    def fails() -> None:
        raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert sys.modules["_mxprobe_rollouts"].blocks == {}


def test_declaring_imports_no_torch():
    code = "import sys, mxprobe\nwith mxprobe.rollout(object()): pass\nassert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


class Sampler:
    @torch.no_grad()
    def roll_out(self, model: nn.Module) -> None:
        model(prompts())


@pytest.mark.parametrize(
    ("named", "is_found"),
    [
        ("roll_out", True),
        (f"{__name__}.roll_out", True),
        ("another_module.roll_out", False),
        ("sample", False),
        pytest.param("Sampler.roll_out", True, marks=pytest.mark.skipif(sys.version_info < (3, 11), reason="no names")),
    ],
)
def test_a_function_named_with_rollout_in(named: str, is_found: bool):
    w = Watched(rollout_in=[named])
    Sampler().roll_out(w.root)
    train(w.root, prompts())
    found = w.finish()
    assert found == {"training": 1, ("rollout by --rollout-in" if is_found else EVALUATED): 1}
    missing = [f"phases: --rollout-in {named}: no forward was called by a function of that name"]
    assert w.told[1:] == ([] if is_found else missing)


def test_prompts_of_one_token():
    w = Watched()
    ids = sample_with_cache(w.root, prompts(length=1))
    train(w.root, ids)
    assert {each.start for each in w.asked[:N]} == {w.asked[0]}
    assert w.finish() == {"training": 1, ROLLOUT_BY_CACHE: N}


@pytest.mark.parametrize("sample", [sample_with_cache, sample_without_cache])
def test_a_batch_of_one(sample: Callable[..., torch.Tensor]):
    w = Watched()
    ids = sample(w.root, prompts(batch=1))
    score(w.root, ids)
    train(w.root, ids)
    assert w.stored() == ["rollout"] * N + ["eval", "train"]


def test_several_completions_of_a_prompt():
    """The prompts are read once, and their cache is repeated for each completion."""
    w = Watched()
    score(w.root, prompts())
    score(w.root, prompts(batch=3 * B, length=1))
    assert w.stored() == ["rollout", "rollout"]
    assert w.asked[1].start is w.asked[0]


def test_rows_without_ids():
    """Observations [B, T, C] grow like tokens do; a batch [B, C] says nothing of tokens."""
    w = Watched(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 64)))
    x = torch.randn(B, P, 16)
    with torch.no_grad():
        for _ in range(N):
            w.root(x)
            x = torch.cat([x, torch.randn(B, 1, 16)], 1)
    assert w.finish() == {ROLLOUT_BY_GROWTH: N}
    w.phases.begin()
    with torch.no_grad():
        for _ in range(N):
            w.root(torch.randn(B, 16))
    assert w.finish() == {"not recognised": N}


def test_tokens_are_found_where_they_are():
    class Batched(Policy):
        def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:  # type: ignore[override]
            return self.head(self.hidden(batch["tokens"]))

    w = Watched(Batched())
    sample_without_cache(lambda ids: w.root({"attention_mask": ids[:, :1], "tokens": ids}), prompts())
    assert w.finish() == {ROLLOUT_BY_GROWTH: N}
    w = Watched()
    sample_without_cache(lambda ids: w.root(attention_mask=torch.ones_like(ids[:, :1]), input_ids=ids), prompts())
    assert w.finish() == {ROLLOUT_BY_GROWTH: N}


def test_modules_called_outside_of_the_model():
    """A fused loss calls the body and reads the head's weight; nothing of it is an entry point here."""
    w = Watched(roots=[])
    policy = w.root
    assert isinstance(policy, Policy)
    for _ in range(2):
        policy.hidden(prompts()).sum().backward()
    ids = sample_without_cache(lambda ids: policy.head(policy.hidden(ids)), prompts())
    assert w.stored() == ["train"] * 2 + ["rollout"] * N
    policy.hidden(ids).sum().backward()
    assert w.finish() == {"training": 3, ROLLOUT_BY_GROWTH: N}


def test_one_who_asks_later_outside_of_the_model_belongs_to_the_last_forward():
    w = Watched()
    with torch.no_grad():
        hidden = w.root.hidden(prompts())  # type: ignore[operator]
        first = w.asked[-1]
        assert w.phases.call("head", hidden) is first
        assert w.phases.call("experts", hidden.flatten(0, 1)) is first
        assert w.phases.call("head", hidden[:, -1:]) is not first
    assert w.phases.call("head", hidden).phase == "train"


def test_a_module_without_a_token_axis_waits_for_what_the_others_tell():
    w = Watched(roots=[])
    with torch.no_grad():
        experts = w.phases.call("experts", torch.ones(30, 16))
        assert experts.phase is None
        assert w.phases.call("experts", torch.ones(5, 16)).phase is None
        w.phases.call("attention", torch.ones(5, 1, 16))
    assert experts.phase == "rollout"


def test_a_forward_that_was_interrupted_leaves_no_trace():
    class Interrupted(Policy):
        def head(self, hidden: torch.Tensor) -> torch.Tensor:
            raise KeyboardInterrupt

    w = Watched(Interrupted())
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            w.root(prompts())
    w.root.head = Policy.head.__get__(w.root)  # type: ignore[assignment]
    sample_without_cache(w.root, prompts())
    assert w.finish() == {"training": 2, ROLLOUT_BY_GROWTH: N}


def test_only_news_is_told():
    w = Watched()
    for _ in range(3):
        sample_with_cache(w.root, prompts())
        w.finish()
        w.phases.begin()
    assert len(w.told) == 1
    score(w.root, prompts())
    w.finish()
    assert len(w.told) == 2


def test_hooks_are_in_for_a_probed_step_alone_and_a_copy_of_the_model_is_no_concern():
    w = Watched()
    copied = copy.deepcopy(w.root)
    score(copied, prompts())
    assert w.finish() == {"not recognised": 1}  # of the copy's Linear, which asks too
    assert not any(m._forward_pre_hooks for m in w.root.modules())
    assert [len(m._forward_hooks) for m in w.root.modules()].count(1) == 1


def test_entry_points():
    inner = Policy()
    assert entry_points(inner) == [inner]
    root = Wrapped(Wrapped(inner))
    assert entry_points(root) == [root, root.module, inner]
    deep = nn.Sequential(nn.ModuleList([nn.Linear(64, 64), nn.Linear(64, 8)]))
    assert entry_points(deep) == [deep, deep[0][0]]  # type: ignore[index]
