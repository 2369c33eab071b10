"""One captured training microbatch, run again at a step boundary: which operands matter, and what each error costs.

Nothing of the run may notice. Gradients are taken with `torch.autograd.grad` and never reach `.grad`; random
states, buffers and attributes that a forward changes are put back; the root's own hooks do not run again. Hooks
of inner modules do, because a model may depend on what they return.
"""
