"""A small seeded run in this process with the agent beside it, and what must not differ, or be left, afterwards."""

from __future__ import annotations

import hashlib
import io
import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as module_hooks
from torch.optim import optimizer as optimizer_hooks
from torch.overrides import _get_current_function_mode_stack

from tests.standin_controller import StandinController, wait_for

SINK = "verl.utils.tracking"
"""A test that wants the metrics listened to installs this stand-in of `tests.standin_sinks`."""
STEPS = 14
"""With the agent; more while it has not left."""
PATIENCE_S = 120.0


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.dropout(torch.relu(self.up(self.norm(x))), 0.1))


class Model(nn.Module):
    """Embedding, one block, a norm and a head: every tap of the agent finds something to listen to."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.block, self.norm = nn.Embedding(50, 32), Block(), nn.LayerNorm(32)
        self.lm_head = nn.Linear(32, 50, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.lm_head(self.norm(self.block(self.embed(tokens))))


class Run:
    """Generates, trains, logs where there is a sink, and saves a checkpoint now and then."""

    def __init__(self, build: Callable[[], nn.Module] = Model) -> None:
        torch.manual_seed(0)
        self.model = build()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.losses: list[str] = []

    def step(self) -> None:
        with torch.no_grad():
            probabilities = self.model(torch.randint(0, 50, (4, 6)))[:, -1].softmax(-1)
            self.model(torch.multinomial(probabilities, 1))
        tokens = torch.randint(0, 50, (4, 8))
        loss = nn.functional.cross_entropy(self.model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.item().hex())
        sink = sys.modules.get(SINK)
        if sink is not None:
            sink.Tracking().log({"loss": loss.item()}, step=len(self.losses))
        if len(self.losses) % 4 == 0:
            torch.save(self.model.state_dict(), io.BytesIO())

    def fingerprint(self) -> tuple[list[str], str]:
        """The losses, and a hash of parameters, optimizer and random state."""
        state = [*self.model.state_dict().values(), torch.random.get_rng_state()]
        state += [v for s in self.optimizer.state.values() for v in s.values()]
        data = (t.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes() for t in state if not t.is_meta)
        return self.losses, hashlib.sha256(b"".join(data)).hexdigest()


def fingerprint_alone(n_steps: int, make: Callable[[], Run] = Run) -> tuple[list[str], str]:
    """Of the same run without the agent."""
    alone = make()
    for _ in range(n_steps):
        alone.step()
    return alone.fingerprint()


@contextmanager
def agent_beside(controller: StandinController) -> Generator[threading.Thread]:
    """The agent in a thread of this process, watching for a step (or gone already); must end by itself."""
    from mxprobe.agent import boot

    thread = threading.Thread(target=boot.start, args=(str(controller.path), "token"), name="mxprobe-agent")
    thread.start()
    try:
        wait_for(
            lambda: (
                optimizer_hooks._global_optimizer_post_hooks or controller.attached.is_set() or not thread.is_alive()
            ),
            "the agent does nothing",
        )
        yield thread
    except BaseException:
        controller.die()
        raise
    finally:
        thread.join(PATIENCE_S)
        assert not thread.is_alive(), "the agent did not leave"


def step_until_it_has_left(run: Run, controller: StandinController, *asks: dict[str, Any]) -> None:
    """STEPS with the agent, which is triggered, asked for its status and sent `asks` meanwhile; then it is asked to
    leave, and the run goes on until it has."""
    with agent_beside(controller) as thread:
        deadline = time.monotonic() + PATIENCE_S
        n_steps, asked = 0, False
        while thread.is_alive():
            assert time.monotonic() < deadline, "the agent stays"
            run.step()
            n_steps += controller.attached.is_set()
            if n_steps == 3:
                controller.send({"verb": "trigger", "reason": "test"})
                controller.send({"verb": "status"})
                for frame in asks:
                    controller.send(frame)
            if not asked and (n_steps >= STEPS or len(run.losses) > 20 * STEPS):
                asked = True
                controller.send({"verb": "detach"})
            time.sleep(0.002)
    assert controller.closed.wait(PATIENCE_S), "the controller still reads"


def what_is_left(model: nn.Module) -> dict[str, list[str]]:
    """Hooks, threads, function modes and wrapped functions of ours, by kind; empty where there are none."""
    hooks = [
        name or "the root"
        for name, module in model.named_modules()
        if any((module._forward_hooks, module._forward_pre_hooks, module._backward_hooks))
    ]
    everywhere: dict[str, Any] = {
        "global forward": module_hooks._global_forward_hooks,
        "global forward pre": module_hooks._global_forward_pre_hooks,
        "global step": optimizer_hooks._global_optimizer_post_hooks,
    }
    functions = [torch.save, torch.load, *([sys.modules[SINK].Tracking.log] if SINK in sys.modules else [])]
    found = {
        "hooks": hooks + [name for name, held in everywhere.items() if held],
        "threads": [thread.name for thread in threading.enumerate() if thread.name.startswith("mxprobe")],
        "modes": [type(mode).__name__ for mode in _get_current_function_mode_stack()],
        "wrapped": [function.__qualname__ for function in functions if hasattr(function, "__wrapped__")],
    }
    return {name: held for name, held in found.items() if held}


def errors_told(controller: StandinController) -> list[str]:
    return [row["detail"] for row in controller.rows.get("events", []) if row["kind"] == "error"]
