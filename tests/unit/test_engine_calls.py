"""An engine asked by its own remote calls: what its workers hold, and what its prefill says of sampled tokens."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from click.testing import CliRunner
from torch import nn

from mxprobe.attribution.held_versions import held_versions
from mxprobe.cli import main
from mxprobe.engines import SOURCE, held_weights, prompt_log_probs, record_log_probs, record_weights
from mxprobe.errors import UsageError
from mxprobe.trace import open_trace
from tests.standin_engine import EngineModel
from tests.unit.test_engines import engine, stale, versions, write

EXTENSION = "mxprobe.engines.WorkerExtension"


class Worker:
    """vllm 0.33.0, vllm/v1/worker/gpu_worker.py and worker_base.py: the extension becomes one of the class's bases."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def get_model(self) -> nn.Module:
        return self._model


class LLM:
    """vllm 0.33.0, vllm/entrypoints/llm.py: `collective_rpc(method, timeout, args, kwargs)` of every worker."""

    def __init__(self, *models: nn.Module, worker_extension_cls: str) -> None:
        module, _, name = worker_extension_cls.rpartition(".")
        extension = getattr(__import__(module, fromlist=[name]), name)
        taken = [each for each in dir(extension) if not each.startswith("__") and hasattr(Worker, each)]
        assert not taken, "vLLM refuses an extension whose names its worker has"
        extended = type("Worker", (Worker, extension), {})
        self._workers = [extended(model) for model in models]

    def collective_rpc(
        self, method: str, timeout: float | None = None, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> list[Any]:
        return [getattr(worker, method)(*args, **(kwargs or {})) for worker in self._workers]


def test_an_engine_that_is_asked_by_collective_rpc_is_audited_without_an_attach(tmp_path: Path):
    write(tmp_path / "trainer", versions(7, 8, 9, 10))
    late = engine(packed=True)
    stale(late, packed=True)
    llm = LLM(engine(packed=True), late, worker_extension_cls=EXTENSION)
    record_weights(llm.collective_rpc("mxprobe_held_weights"), tmp_path / "engine", step=4)
    found = {each.module: each for each in held_versions(*(open_trace(tmp_path / n) for n in ("trainer", "engine")))}
    assert {name for name, each in found.items() if each.state != "current"} == {"layers.1.k_proj (rank 1)"}
    assert found["layers.1.k_proj (rank 1)"].lag == 3
    audited = CliRunner().invoke(main, ["audit", str(tmp_path / "trainer"), str(tmp_path / "engine")])
    assert audited.exit_code == 0
    assert "layers.1.k_proj (rank 1)" in audited.output
    assert "3 behind" in audited.output


def test_a_weight_stored_with_padding_is_not_called_wrong(tmp_path: Path):
    model = engine()
    wide: Any = model.layers[0].o_proj
    wide.weight = nn.Parameter(nn.functional.pad(wide.weight, (0, 32)), False)
    write(tmp_path / "trainer", versions(10))
    record_weights([held_weights(model)], tmp_path / "e")
    found = {each.module: each for each in held_versions(*(open_trace(tmp_path / n) for n in ("trainer", "e")))}
    assert found["layers.0.o_proj"].detail == (
        "cannot compare: stored as [64, 96], padded perhaps, where the trainer has [64, 64]"
    )
    assert found["layers.1.o_proj"].state == "current"


def test_an_engine_whose_call_returns_nothing_is_refused_in_words(tmp_path: Path):
    with pytest.raises(UsageError, match="MXPROBE_LISTEN=1"):
        record_weights(None, tmp_path / "engine")  # type: ignore[arg-type]


def test_a_worker_opens_the_socket_of_the_cooperative_attach(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    (answer,) = LLM(EngineModel(1, 64), worker_extension_cls=EXTENSION).collective_rpc("mxprobe_listen")
    assert answer["socket"] is not None
    assert answer["socket"].endswith(f"{answer['pid']}.listen.sock")


class Logprob(NamedTuple):
    """vllm 0.33.0, vllm/logprobs.py."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


class RequestOutput:
    """vllm 0.33.0, vllm/outputs.py: None, then {token: Logprob} with the prompt's own among them."""

    def __init__(self, prompt_token_ids: list[int], log_probs: torch.Tensor | None) -> None:
        self.prompt_token_ids = prompt_token_ids
        self.prompt_logprobs: Any = None
        if log_probs is not None:
            best = [int(row.argmax()) for row in log_probs]
            self.prompt_logprobs = [None] + [
                {b: Logprob(float(row[b]), 1), token: Logprob(float(row[token]))}
                for token, b, row in zip(prompt_token_ids[1:], best, log_probs, strict=False)
            ]


def sequence(seed: int, n_tokens: int) -> tuple[list[int], torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 11, (n_tokens,), generator=generator).tolist()
    return tokens, torch.randn(n_tokens, 11, generator=generator, dtype=torch.float64).log_softmax(-1)


def test_the_sampled_tokens_are_set_against_what_prefill_says_of_them(tmp_path: Path):
    sequences = [sequence(seed, 6 + seed) for seed in range(4)]
    n_response = 4
    outputs = [RequestOutput(tokens, log_probs) for tokens, log_probs in sequences]
    wanted = [
        [float(log_probs[i - 1, tokens[i]]) for i in range(len(tokens) - n_response, len(tokens))]
        for tokens, log_probs in sequences
    ]
    shift = 0.25
    record_log_probs(outputs, [[value - shift for value in each] for each in wanted], tmp_path / "t", step=7)
    rows = open_trace(tmp_path / "t").rollouts()
    whole = rows[rows["stratum"] == "all"].iloc[0]
    assert (whole["source"], whole["step"], whole["n_tokens"], whole["n_sequences"]) == (SOURCE, 7, 16, 4)
    assert whole["sum_d"] == pytest.approx(16 * shift)
    assert whole["sum_d2"] == pytest.approx(16 * shift**2)
    signals = open_trace(tmp_path / "t").table("signals").set_index("raw_key")["value"]
    assert signals["mxprobe/mismatch_k3"] == pytest.approx(math.exp(-shift) - 1 + shift)


def test_sglangs_results_are_read_too():
    result = {"meta_info": {"input_token_logprobs": [(None, 5, None), (-0.5, 7, None), (-1.5, 2, None)]}}
    assert prompt_log_probs(result) == [-0.5, -1.5]


def test_log_probabilities_that_were_not_asked_for_are_missed_in_words(tmp_path: Path):
    tokens, log_probs = sequence(0, 6)
    with pytest.raises(UsageError, match="prompt_logprobs=0"):
        prompt_log_probs(RequestOutput(tokens, None))
    with pytest.raises(UsageError, match="logprob_start_len"):
        prompt_log_probs({"meta_info": {}})
    with pytest.raises(UsageError, match="asked with the prompt alone"):
        record_log_probs([RequestOutput(tokens[:2], log_probs)], [[-1.0] * 4], tmp_path / "t")
