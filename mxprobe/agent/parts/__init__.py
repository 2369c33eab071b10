"""What a session measures and looks after: one file a part, and the list of them.

The order is that in which the session calls them. Who finishes first takes its hooks out first, and has its rows
written first.
"""

from __future__ import annotations

from mxprobe.agent.budget import Budget
from mxprobe.agent.context import Context
from mxprobe.agent.part import Part
from mxprobe.agent.parts.batches import BatchTaps
from mxprobe.agent.parts.device_steps import DeviceSteps
from mxprobe.agent.parts.eager import EagerSteps
from mxprobe.agent.parts.flight import FlightRecorder
from mxprobe.agent.parts.memory_in_use import MemoryInUse
from mxprobe.agent.parts.micro_batches import MicroBatches
from mxprobe.agent.parts.milestones import Milestones
from mxprobe.agent.parts.norm_layers import Norms
from mxprobe.agent.parts.planted import PlantedOps
from mxprobe.agent.parts.probed_modules import ProbedModules
from mxprobe.agent.parts.recipe_switch import Recipes
from mxprobe.agent.parts.replays import Replays
from mxprobe.agent.parts.rollouts import Rollouts
from mxprobe.agent.parts.signals import Signals
from mxprobe.agent.parts.sync import WeightSync
from mxprobe.agent.parts.versions import Versions
from mxprobe.agent.parts.warm_up import WarmUp
from mxprobe.agent.phases import Phases


def all_parts(context: Context, budget: Budget) -> list[Part]:
    """Make the parts of a session, in order."""
    clock, guard, tell = context.clock, context.guard, context.events.tell
    phases = Phases(clock, guard, tell, context.config.rollout_in)
    modules = ProbedModules(context, budget, phases)
    rollouts = Rollouts(context, phases)
    return [
        phases,
        EagerSteps(context.config.eager_probe_steps, clock, guard, tell),
        modules,
        PlantedOps(clock, guard, tell, modules.probes.values),
        MemoryInUse(context),
        DeviceSteps(clock, tell),
        WarmUp(context.worker, context.config, tell),
        Signals(context),
        Milestones(guard, tell, lambda: context.run.optimizer),
        rollouts,
        BatchTaps(context, rollouts.note_batch, lambda: rollouts.computed_in),
        WeightSync(context),
        Norms(clock, guard, context.events, phases),
        FlightRecorder(context),
        Replays(context, modules.linears),
        Recipes(context),
        MicroBatches(clock, guard),
        Versions(context, modules),
    ]
