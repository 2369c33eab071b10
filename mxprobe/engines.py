"""Asks a rollout engine by its own remote calls what it holds and says: no attach, no hook, no permission to trace.

    llm = vllm.LLM(..., worker_extension_cls="mxprobe.engines.WorkerExtension")
    record_weights(llm.collective_rpc("mxprobe_held_weights"), "rollout.mxprobe")

    asked = [{"prompt_token_ids": prompt + response} for prompt, response in ...]
    outputs = llm.generate(asked, SamplingParams(max_tokens=1, prompt_logprobs=0))
    record_log_probs(outputs, log_probs_of_the_trainer, "log-probs.mxprobe")

A worker's forward hooks are not called while it replays CUDA graphs; these calls are answered all the same. Written for
vLLM 0.33.0 and SGLang 0.5.23 (whose collective call returns nothing: its weights are read by an attach alone).
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mxprobe.errors import UsageError
from mxprobe.schema import Row
from mxprobe.tables import TABLES

if TYPE_CHECKING:
    from torch import nn

SOURCE = "prompt log-probabilities"


def held_weights(model: nn.Module) -> list[Row]:
    """Return hashes of what the weights of an engine's model are now: rows of table `weight_codes`, `step` 0.

    Also to be given to `LLM.apply_model`. Some rows of each weight are copied to the host, one weight after another.
    """
    from mxprobe.measuring.engines.fingerprints import engine_rows, hashed_of, not_comparable_row
    from mxprobe.measuring.engines.layouts import NotComparable, weights_of

    rows: list[Row] = []
    for each in weights_of(model):
        if isinstance(each, NotComparable):
            rows.append(not_comparable_row(*each, step=0))
            continue
        rows += engine_rows(each, *hashed_of(each), step=0)
    return rows


class WorkerExtension:
    """Methods of every vLLM worker, as `worker_extension_cls`; called by `collective_rpc`."""

    def mxprobe_held_weights(self: Any) -> list[Row]:
        """Return `held_weights` of the worker's model."""
        return held_weights(self.get_model())

    def mxprobe_listen(self: Any) -> dict[str, Any]:
        """Open the socket by which `mxprobe attach PID` gets in without ptrace: {pid, socket, None if refused}."""
        from mxprobe.listener import listen

        return {"pid": os.getpid(), "socket": listen()}


def record_weights(answers: Sequence[Sequence[Row]], out: str | Path, *, step: int = 0) -> Path:
    """Write the workers' answers as a trace for `mxprobe audit TRAINER OUT`; `step`: a number for this moment.

    Raises:
        UsageError: the engine's call returned nothing.
        TraceError: `out` holds a trace already, or cannot be written.
    """
    if not isinstance(answers, (list, tuple)) or not all(isinstance(each, (list, tuple)) for each in answers):
        raise UsageError(
            f"the engine answered {type(answers).__name__}, no rows of each worker",
            cause="its collective_rpc returns nothing (SGLang), or is a coroutine that was not awaited",
            remedy="await it; for SGLang start it with MXPROBE_LISTEN=1 and use `mxprobe attach PID`",
        )
    by_rank = {rank: {"weight_codes": [{**row, "step": step} for row in rows]} for rank, rows in enumerate(answers)}
    return _write(Path(out), by_rank)


def prompt_log_probs(output: Any) -> list[float]:
    """Return the log-probabilities of a request's prompt from its second token on, by the engine's prefill.

    `output`: a `RequestOutput` of vLLM asked with `prompt_logprobs=0`, or a result of SGLang's `Engine.generate` with
    `return_logprob=True, logprob_start_len=0`.

    Raises:
        UsageError: it was not asked for them.
    """
    if isinstance(output, Mapping):
        meta: Any = output.get("meta_info", {})
        pairs: Any = meta.get("input_token_logprobs")
        found = None if pairs is None else [pair[0] for pair in pairs[1:]]
    else:
        per_token: Any = getattr(output, "prompt_logprobs", None)
        tokens: Any = getattr(output, "prompt_token_ids", None) or ()
        found = None if per_token is None else [per_token[i][token].logprob for i, token in enumerate(tokens) if i]
    if found is None:
        raise UsageError(
            f"a {type(output).__name__} without log-probabilities of its prompt",
            cause="they are computed on request only",
            remedy="vLLM: SamplingParams(max_tokens=1, prompt_logprobs=0); "
            "SGLang: generate(..., return_logprob=True, logprob_start_len=0)",
        )
    return [math.nan if value is None else float(value) for value in found]


def record_log_probs(
    outputs: Sequence[Any], log_probs: Sequence[Sequence[float]], out: str | Path, *, step: int = 0
) -> Path:
    """Write what the engine's prefill and another side say of the same sampled tokens as a trace (table `rollouts`).

    Args:
        outputs: one of each sequence, asked with prompt and response together as its prompt: see `prompt_log_probs`.
        log_probs: of the tokens of each response, at temperature 1. The trainer's: their mismatch. Those the engine
            returned when it drew the tokens: what its decode differs from its own prefill by, a floor for the other.
        step: the trainer's.

    Raises:
        UsageError: other lengths than the sequences have.
        TraceError: `out` holds a trace already, or cannot be written.
    """
    import torch

    from mxprobe.measuring.tokens.mismatch import Pairs, table_rows

    if len(outputs) != len(log_probs):
        raise UsageError(f"{len(outputs)} outputs and log-probabilities of {len(log_probs)} responses")
    ours: list[float] = []
    theirs: list[float] = []
    positions: list[int] = []
    lengths: list[int] = []
    for output, response in zip(outputs, log_probs, strict=True):
        asked, n = prompt_log_probs(output), len(response)
        if n > len(asked):
            raise UsageError(
                f"a response of {n} tokens in a prompt of {len(asked) + 1}",
                cause="the engine was asked with the prompt alone, or the response was tokenized again",
                remedy="ask with the token ids of prompt and response",
            )
        ours += asked[len(asked) - n :]
        theirs += [float(value) for value in response]
        positions += range(n)
        lengths += [n] * n
    pairs = Pairs(
        torch.tensor(ours, dtype=torch.float64),
        torch.tensor(theirs, dtype=torch.float64),
        len(outputs),
        position=torch.tensor(positions, dtype=torch.int64),
        length=torch.tensor(lengths, dtype=torch.int64),
    )
    when = {"step": step, "time_ns": time.time_ns()}
    tables: dict[str, list[Row]] = {"rollouts": [], "signals": []}
    for table, row in table_rows(pairs, when, SOURCE, signal_source=f"mxprobe[{SOURCE}]", temperature=1.0, dtype=""):
        tables[table].append(row)
    return _write(Path(out), {0: tables})


def _write(out: Path, by_rank: Mapping[int, Mapping[str, Sequence[Row]]]) -> Path:
    from mxprobe.trace import TraceWriter

    with TraceWriter(out, {"role": "rollout"}) as writer:
        for rank, tables in by_rank.items():
            for table, rows in tables.items():
                columns = {name: [row[name] for row in rows] for name, _ in TABLES[table] if rows and name in rows[0]}
                writer.append(table, columns, rank=rank)
    return out
